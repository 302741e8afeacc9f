"""Every reader of what may come from elsewhere, files and messages, as a function of bytes.

A target may raise :class:`feddpc.errors.FeddpcError` and nothing else. Checksums inside a format (a zip's, a PNG's) are
not looked at, so that a changed byte reaches what lies behind them.
"""

from fuzz import files, messages
from fuzz.messages import one_version
from fuzz.place import FOLDER, TARGETS, Target, blind

__all__ = ["FOLDER", "TARGETS", "Target", "blind", "files", "messages", "one_version"]
