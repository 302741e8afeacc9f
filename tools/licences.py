"""Write ``docs/licences.md``: the licence of every pinned version, as its metadata say.

``python tools/licences.py`` reads what is installed beside it, so run it in the project's environment: `make licences`.
"""

from __future__ import annotations

import re
import sys
from email.message import Message
from importlib.metadata import PackageNotFoundError, distribution
from typing import cast

from pins import ROOT, pins

PAGE = ROOT / "docs" / "licences.md"
#: Licences that a dependency may have: permissive ones, and weak copyleft that stays in its files.
ALLOWED = {
    *("0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0"),
    *("ISC", "MIT", "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib"),
    *("BSD", "Public Domain"),  # what older metadata say, without a number of clauses
}
#: Read in the licence file of a package whose metadata say nothing.
READ = {"atheris": "Apache-2.0"}
#: How older metadata, and classifiers, spell licences.
SPELLINGS = {
    "Apache 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "3-Clause BSD License": "BSD-3-Clause",
    "BSD 2-Clause License": "BSD-2-Clause",
    "BSD License": "BSD",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
HEAD = """\
# Licences of what this project depends on

Every version in `constraints.txt`, extras and tools for development included, with the licence that its metadata state.
The project itself is under Apache-2.0 and contains none of them. Written by `make licences`; a test checks that the
list is complete and that nothing is in it but permissive licences and weak copyleft.

| package | version | licence |
|---|---|---|
"""


def licence(name: str, metadata: Message) -> str:
    """Return a package's licence as an SPDX expression, from the newest field that says something short."""
    if name in READ:
        return READ[name]
    text = str(metadata.get("License-Expression") or "")
    said = [part.strip() for part in str(metadata.get("License") or "").split(",")]
    classes = [str(c).split(" :: ") for c in metadata.get_all("Classifier") or []]
    # A whole text, or no word at all, is no name of a licence.
    short = said if re.fullmatch(r"[\w.,+ -]{2,40}", ", ".join(said)) and said != ["UNKNOWN"] else []
    listed = [parts[-1] for parts in classes if parts[0] == "License" and parts[-1] != "OSI Approved"]
    return text or " AND ".join(SPELLINGS.get(part, part) for part in short or listed)


def parts(expression: str) -> set[str]:
    """Return the licences that an expression names.

    >>> sorted(parts("MIT AND (Apache-2.0 OR BSD-3-Clause)"))
    ['Apache-2.0', 'BSD-3-Clause', 'MIT']
    """
    return {part.strip("() ") for part in re.split(r" AND | OR ", expression)}


def listed(page: str) -> dict[str, tuple[str, str]]:
    """Return version and licence by package, from the page."""
    rows = re.findall(r"^\| ([\w.-]+) \| ([\w.+!-]+) \| (.*) \|$", page, re.MULTILINE)
    return {name: (version, licence) for name, version, licence in rows if name != "package"}


def main() -> None:
    """Write the page, or say which packages are not installed in the pinned version."""
    rows, missing = [], []
    for name, version in pins().items():
        try:
            found = distribution(name)
        except PackageNotFoundError:
            missing.append(name)
            continue
        if found.version.partition("+")[0] != version:
            missing.append(f"{name} {version}")
        rows.append(f"| {name} | {version} | {licence(name, cast(Message, found.metadata))} |")
    if missing:
        sys.exit(f"not installed: {', '.join(missing)}; run `make test` once, which sets up the environment")
    PAGE.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
