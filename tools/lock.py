"""Write ``requirements-ci.txt``: every pinned version with the hashes of all its files, from the package index.

``python tools/lock.py`` asks the index at ``PIP_INDEX_URL``, PyPI by default, whose pages give every file's sha256.
All files of a release are listed, so that the list holds for every platform and version of Python.
"""

from __future__ import annotations

import os
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from pins import ROOT, UNHASHED, pins

LOCK = ROOT / "requirements-ci.txt"
HEAD = f"""\
# The versions of constraints.txt with the hashes of their files; written by `make lock`, installed by `make hashed`.
# {UNHASHED} is left out: its wheel differs between indexes.
"""
#: What has no files for some systems, with the condition under which it is installed.
ONLY = {"atheris": "platform_system == 'Linux'", "uvloop": "platform_system != 'Windows'"}


class Links(HTMLParser):
    """Collects file names and hashes from a page of a package index (PEP 503)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take in one link."""
        address, _, fragment = (dict(attrs).get("href") or "").partition("#")
        if tag == "a" and (hashed := re.fullmatch(r"sha256=([0-9a-f]{64})", fragment)):
            self.found[address.rpartition("/")[2]] = hashed[1]


def hashes(page: str, version: str) -> list[str]:
    """Return the hashes of all files of a release that an index page names.

    >>> hash = "0" * 64
    >>> hashes(f'<a href="https://x/six-1.0-py3-none-any.whl#sha256={hash}">', "1.0") == [hash]
    True
    >>> hashes(f'<a href="https://x/six-1.1.tar.gz#sha256={hash}">', "1.0")
    []
    """
    links = Links()
    links.feed(page)
    return sorted({digest for name, digest in links.found.items() if _version(name) == Version(version)})


def _version(name: str) -> Version | None:
    try:
        return parse_wheel_filename(name)[1] if name.endswith(".whl") else parse_sdist_filename(name)[1]
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None  # an egg or an installer, which pip does not take


def fetch(name: str) -> str:
    """Return the index page of a package."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    request = urllib.request.Request(f"{index}/{name}/", headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def lock(versions: dict[str, str]) -> str:
    """Return the text of the list."""
    with ThreadPoolExecutor(8) as pool:
        pages = dict(zip(versions, pool.map(fetch, versions), strict=True))
    lines = [HEAD]
    for name, version in versions.items():
        found = hashes(pages[name], version)
        if not found:
            sys.exit(f"the index has no files of {name} {version}: nothing was written")
        marker = f" ; {ONLY[name]}" if name in ONLY else ""
        lines.append(" \\\n".join([f"{name}=={version}{marker}", *(f"    --hash=sha256:{h}" for h in found)]) + "\n")
    return "".join(lines)


if __name__ == "__main__":
    LOCK.write_text(lock({name: version for name, version in pins().items() if name != UNHASHED}), encoding="utf-8")
    print(f"wrote {LOCK.relative_to(ROOT)}")
