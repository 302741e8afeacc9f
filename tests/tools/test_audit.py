"""The audit: what an advisory names is found, and nothing else; without a database it says so."""

import datetime as dt
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import audit

TOOL = Path(audit.__file__)
PINNED = {"numpy": "2.4.6", "pillow": "13.0.0", "pyyaml": "6.0.3"}


def advisory(name="numpy", *events, versions=(), **more):
    ranges = [{"type": "ECOSYSTEM", "events": [dict([event]) for event in events]}] if events else []
    affected = [{"package": {"ecosystem": "PyPI", "name": name}, "ranges": ranges, "versions": list(versions)}]
    return {"id": "PYSEC-1", "modified": "2026-01-02T03:04:05Z", "summary": "bad", "affected": affected, **more}


def database(folder, *found):
    for i, each in enumerate(found):
        (folder / each["affected"][0]["package"]["name"]).mkdir(parents=True, exist_ok=True)
        (folder / each["affected"][0]["package"]["name"] / f"PYSEC-{i}.json").write_text(json.dumps(each))
    return folder


NAMED = {
    "every version": [("introduced", "0")],
    "until a later fix": [("introduced", "0"), ("fixed", "2.4.7")],
    "since this version": [("introduced", "2.4.6")],
    "up to this version": [("introduced", "1.0"), ("last_affected", "2.4.6")],
    "in the second of two spans": [("introduced", "0"), ("fixed", "1.2"), ("introduced", "2.0"), ("fixed", "3.0")],
    "events in no order": [("fixed", "3.0"), ("introduced", "2.0"), ("fixed", "1.2"), ("introduced", "0")],
    "a fix that nobody can read": [("introduced", "0"), ("fixed", "r1234")],
    "fixed in the final version only": [("introduced", "2.4.6rc1"), ("fixed", "2.4.6.post1")],
}
NOT_NAMED = {
    "fixed in this version": [("introduced", "0"), ("fixed", "2.4.6")],
    "fixed before": [("introduced", "0"), ("fixed", "2.4.6rc1")],
    "introduced later": [("introduced", "2.4.10")],
    "up to the version before": [("introduced", "0"), ("last_affected", "2.4.5")],
    "between two spans": [("introduced", "0"), ("fixed", "2.4"), ("introduced", "2.5")],
    "versions are no texts": [("introduced", "2.10"), ("fixed", "2.20")],
}


@pytest.mark.parametrize("events", NAMED.values(), ids=NAMED)
def test_a_named_version_is_found(events):
    assert audit.affects(advisory("NumPy", *events), "numpy", "2.4.6")


@pytest.mark.parametrize("events", NOT_NAMED.values(), ids=NOT_NAMED)
def test_another_version_is_not(events):
    assert not audit.affects(advisory("numpy", *events), "numpy", "2.4.6")


def test_a_list_of_versions_counts_too():
    assert audit.affects(advisory("numpy", versions=["2.4.6"]), "numpy", "2.4.6")
    assert not audit.affects(advisory("numpy", versions=["2.4.60"]), "numpy", "2.4.6")


def test_a_withdrawn_advisory_does_not_count():
    everything = advisory("numpy", ("introduced", "0"), withdrawn="2026-01-01T00:00:00Z")
    assert not audit.affects(everything, "numpy", "2.4.6")


def test_another_ecosystem_and_commits_do_not_count():
    foreign, commits = advisory("numpy", ("introduced", "0")), advisory("numpy", ("introduced", "0"))
    foreign["affected"][0]["package"]["ecosystem"] = "npm"
    commits["affected"][0]["ranges"][0]["type"] = "GIT"
    assert not audit.affects(foreign, "numpy", "2.4.6")
    assert not audit.affects(commits, "numpy", "2.4.6")


def test_a_folder_is_searched_and_its_age_told(tmp_path):
    today = dt.datetime.now(dt.UTC).isoformat()
    fixed = advisory("numpy", ("introduced", "0"), ("fixed", "2.4.7"), aliases=["CVE-1"])
    fine = advisory("Pillow", ("introduced", "0"), ("fixed", "12.0"), modified=today)
    found, about = audit.audit(database(tmp_path, fixed, fine, advisory("other", ("introduced", "0"))), PINNED)
    assert [str(f) for f in found] == ["numpy 2.4.6: PYSEC-1, CVE-1: bad (fixed in 2.4.7)"]
    assert about == f"3 advisories, the newest of {today[:10]}, 0 days ago"


def test_an_old_database_is_called_old(tmp_path):
    _, about = audit.audit(database(tmp_path, advisory("numpy", modified="2020-01-01T00:00:00Z")), PINNED)
    assert about.endswith("the database is old")


def test_a_zip_and_yaml_are_read_too(tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("PYSEC-1.json", json.dumps(advisory("PyYAML", ("introduced", "0"))))
        archive.writestr("vulns/numpy/PYSEC-2.yaml", json.dumps(advisory("numpy", ("introduced", "0"))))
    found, _ = audit.audit(tmp_path / "all.zip", PINNED)
    assert [f.package for f in found] == ["pyyaml", "numpy"]


def run(tmp_path, *options):
    env = {"HOME": str(tmp_path / "nowhere"), "PATH": ""}
    return subprocess.run([sys.executable, str(TOOL), *options], capture_output=True, text=True, env=env)


def test_without_a_database_it_says_that_it_was_skipped(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("audit skipped: no database of advisories at")


def test_a_finding_is_named_and_fails_unless_it_is_ignored(tmp_path):
    place = database(tmp_path / "db", advisory("numpy", ("introduced", "0")))
    done = run(tmp_path, "--database", str(place))
    assert done.returncode == 1
    assert "numpy" in done.stdout
    assert "PYSEC-1" in done.stdout
    assert run(tmp_path, "--database", str(place), "--ignore", "PYSEC-1").returncode == 0


def test_a_database_that_was_asked_for_must_be_there(tmp_path):
    assert "there is no database" in run(tmp_path, "--database", str(tmp_path / "db")).stderr


def test_a_database_without_advisories_proves_nothing(tmp_path):
    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "all.zip").write_bytes(b"")
    done = run(tmp_path, "--database", str(tmp_path / "db"))
    assert done.returncode == 1
    assert "holds no advisories" in done.stderr


@pytest.mark.parametrize("content", ["[]", "{"])
def test_a_file_that_is_no_advisory_is_named(tmp_path, content):
    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "odd.json").write_text(content)
    done = run(tmp_path, "--database", str(tmp_path / "db"))
    assert done.returncode == 1
    assert done.stderr.startswith("odd.json ")
