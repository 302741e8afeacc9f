"""What is pinned, what is hashed and whose licences are listed is one list."""

import re
from email.message import Message
from importlib.metadata import PackageNotFoundError, distribution

import pytest

import licences
import lock
from pins import CONSTRAINTS, UNHASHED, pins


def test_every_pin_but_torch_has_hashes():
    assert pins(lock.LOCK) == {name: version for name, version in pins().items() if name != UNHASHED}, "run `make lock`"
    blocks = re.findall(r"^[a-z].*(?:\n .*)*", lock.LOCK.read_text(), re.MULTILINE)
    assert len(blocks) == len(pins()) - 1
    assert all("--hash=sha256:" in block for block in blocks)


def test_torch_is_pinned():
    assert UNHASHED in pins()


def test_an_open_version_is_no_pin(tmp_path):
    (tmp_path / "c.txt").write_text("# a comment\nnumpy>=1  # too wide\n")
    with pytest.raises(SystemExit, match="not pinned"):
        pins(tmp_path / "c.txt")


def test_constraints_are_sorted_and_name_nothing_twice():
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if "==" in line]
    assert len(lines) == len(pins())


def test_hashes_are_those_of_the_version_and_of_no_other():
    page = "".join(
        f'<a href="https://x/{file}#sha256={digit * 64}">{file}</a>'
        for file, digit in {
            "some_thing-1.0-py3-none-any.whl": "a",
            "some-thing-1.0.tar.gz": "b",
            "some-thing-1.0.1.tar.gz": "c",
            "some_thing-1.0-py2.7.egg": "d",
        }.items()
    )
    assert lock.hashes(page, "1.0") == ["a" * 64, "b" * 64]


# Licences.


def test_every_pin_has_a_licence_that_is_allowed():
    listed = licences.listed(licences.PAGE.read_text())
    assert {name: version for name, (version, _) in listed.items()} == pins(), "run `make licences`"
    others = {name: said for name, (_, said) in listed.items() if not licences.parts(said) <= licences.ALLOWED}
    assert others == {}


def test_the_list_says_what_the_packages_say():
    """Torch is left out, whose builds differ in what they contain."""
    for name, (version, said) in licences.listed(licences.PAGE.read_text()).items():
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue  # not for this system
        if name != UNHASHED and found.version == version:
            assert licences.licence(name, found.metadata) == said, f"{name}: run `make licences`"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([("License-Expression", "MIT OR Apache-2.0"), ("License", "other")], "MIT OR Apache-2.0"),
        ([("License", "Apache 2.0")], "Apache-2.0"),
        ([("License", "BSD, Public Domain")], "BSD AND Public Domain"),
        (
            [("License", "Copyright (c) 2001 " + "x" * 99), ("Classifier", "License :: OSI Approved :: BSD License")],
            "BSD",
        ),
        ([("License", "UNKNOWN"), ("Classifier", "License :: OSI Approved :: MIT License")], "MIT"),
        ([("License", "GPL-3.0")], "GPL-3.0"),
        ([], ""),
    ],
)
def test_licences_are_read_from_whatever_says_them(fields, expected):
    metadata = Message()
    for name, value in fields:
        metadata[name] = value
    assert licences.licence("some-thing", metadata) == expected


@pytest.mark.parametrize("expression", ["", "GPL-3.0", "MIT AND AGPL-3.0-only", "Proprietary"])
def test_other_licences_are_not_allowed(expression):
    assert not licences.parts(expression) <= licences.ALLOWED
