"""``python -m feddpc``."""

from feddpc.cli import main

main()
