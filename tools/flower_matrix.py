"""Run the tests that use Flower once per supported release of Flower: `make matrix`.

The release in this environment is tested as it is. Any other one is unpacked, without its dependencies, into a folder
that stands before the environment, whose other packages stay. So a release can be tested whose own pins cannot be met
here; which of them are not met is printed, and docs/flower.md says so too. A release that cannot be downloaded is
reported and ends the matrix with code 1: what was not tested must not look tested.

    python tools/flower_matrix.py                   # every release in TESTED
    python tools/flower_matrix.py 1.42.0 -- tests/flower/test_secure.py -m ''
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

#: The releases that were tested; one for every minor version in the range of `feddpc.flower.SUPPORTED`.
TESTED = ("1.41.0", "1.42.0")
TESTS = ["-q", "tests/flower", "tests/federate", "-m", "not slow"]


def unpack(version: str, folder: Path) -> bool:
    """Unpack a release into ``folder``, without dependencies; return whether that worked."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
    ]
    return subprocess.run([*pip, "--target", str(folder), f"flwr=={version}"], check=False).returncode == 0


def unmet(folder: Path) -> list[str]:
    """Return the requirements of the unpacked release that this environment does not meet."""
    from packaging.requirements import Requirement

    (release,) = metadata.distributions(path=[str(folder)], name="flwr")
    lacking = []
    for text in release.requires or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            found = "nothing"
        if found == "nothing" or not requirement.specifier.contains(found, prereleases=True):
            lacking.append(f"{text} (here: {found})")
    return lacking


def run(version: str, tests: list[str]) -> str:
    """Test one release, and return how it went."""
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix=f"flwr-{version}-") as name:
        lacking: list[str] = []
        if version != metadata.version("flwr"):
            folder = Path(name)
            if not unpack(version, folder):
                return "NOT TESTED: it cannot be downloaded"
            lacking = unmet(folder)
            environment["PYTHONPATH"] = os.pathsep.join([name, *filter(None, [environment.get("PYTHONPATH")])])
        which = [sys.executable, "-c", "from importlib.metadata import version; print(version('flwr'))"]
        found = subprocess.run(which, env=environment, check=True, capture_output=True, text=True).stdout.strip()
        if found != version:
            return f"NOT TESTED: flwr {found} was found in its place"
        code = subprocess.run([sys.executable, "-m", "pytest", *tests], env=environment, check=False).returncode
    outcome = "passed" if code == 0 else f"FAILED (pytest ended with {code})"
    return f"{outcome}{'; not met: ' * bool(lacking)}{', '.join(lacking)}"


def main(arguments: list[str]) -> int:
    """Test the releases in ``arguments``, by default all; what comes after ``--`` goes to pytest."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    outcomes = {version: run(version, arguments[at + 1 :] or TESTS) for version in arguments[:at] or TESTED}
    for version, outcome in outcomes.items():
        print(f"flwr {version}: {outcome}")
    return 0 if all(outcome.startswith("passed") for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
