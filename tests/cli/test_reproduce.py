"""`feddpc reproduce` as a person or a script uses it."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from feddpc.cli import app
from feddpc.cli.reproduce import TARGETS, UNFINISHED
from feddpc.errors import BadInputError, DataError, RunFolderError
from feddpc.paper import study_spec, tuned

QUICK = ["--data", "digits", "--scale", "tiny", "--rounds", "2", "--alpha", "0.2", "--seeds", "0", "--processes", "1"]
FEW = ["--methods", "feddpc,fedcm"]


@pytest.fixture
def feddpc(tmp_path, monkeypatch):
    """Return a caller of the command line in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*args, code=0):
        done = CliRunner().invoke(app, ["reproduce", *map(str, args)])
        if code is None:
            raise done.exception
        assert done.exit_code == code, done.output
        return done.stdout

    return call


@pytest.mark.parametrize(
    ("wanted", "at_once"),
    [
        (["--data", "cifar10"], 4),
        (["--data", "cifar100"], 1),
        (["--data", "cifar100", "--scale", "tiny"], 4),  # a small model stands in for ResNet18
        (["--data", "cifar100", "--at-once", "2"], 2),
        (["--data", "cifar10", "--device", "cpu"], 1),
    ],
)
def test_a_large_model_has_the_gpu_for_itself(monkeypatch, feddpc, wanted, at_once):
    monkeypatch.setattr("feddpc.resolve.resolve_device", lambda name: "cuda" if name == "auto" else name)
    seen = []

    def reproduce(spec, parts, folders, *, workers, **options):
        seen.append(workers.at_once)
        return SimpleNamespace(missing=[], failures=[])

    monkeypatch.setattr("feddpc.paper.reproduction.reproduce", reproduce)
    feddpc("table2", *wanted, "--report-only", "--quiet")
    assert seen == [at_once]


def test_table_2_again_and_in_part(feddpc, tmp_path):
    printed = feddpc("table2", *QUICK, *FEW)
    assert "Table 2, digits, shortened: 2 of the paper's 400 rounds" in printed
    assert "55.44" in printed  # the paper's, beside ours
    assert "What holds" in printed
    assert printed.startswith("FedDPC is above: nothing")  # the summary comes first; one seed decides nothing
    assert printed.splitlines()[2] == "It cannot be told from: alpha 0.2: FedCM"
    results = tmp_path / "runs" / "reproduce" / "digits" / "tiny-2-rounds"
    assert str(results.relative_to(tmp_path) / "report.html") in printed
    assert feddpc("table2", *QUICK, *FEW) == printed
    unfinished = feddpc("table2", *QUICK[:-4], "--seeds", "0,1", "--report-only", *FEW, code=UNFINISHED)
    assert "2 runs are missing" in unfinished
    assert "FedCM seed 1: missing" in unfinished
    found = json.loads(feddpc("table2", *QUICK, *FEW, "--json"))
    (study,) = found["studies"]
    assert [row[0] for row in study["tables"][0]["rows"]] == ["FedDPC", "FedCM"]
    assert {finding["verdict"] for finding in study["findings"]} <= {"holds", "does not hold", "cannot be told"}
    assert feddpc("table2", *QUICK, *FEW, "--quiet") == ""


def test_export_and_docs(feddpc, tmp_path):
    feddpc("figure1", *QUICK, *FEW)
    folder = "runs/reproduce/digits/tiny-2-rounds"
    assert "digits.json: 2 runs" in feddpc("export", folder, "--to", "digits.json")
    assert (tmp_path / "digits.json").read_text() == (tmp_path / folder / "records.json").read_text()
    printed = feddpc("docs", "digits.json", "--to", "docs/reproduction.md", "--images", "docs/images")
    assert "docs/reproduction.md" in printed
    text = (tmp_path / "docs" / "reproduction-digits.md").read_text()
    assert "images/digits-tiny-2-rounds/curves.png" in text
    with pytest.raises(RunFolderError, match=f"there are {folder}"):
        feddpc("export", "runs", "--to", "x.json", code=None)


def test_table_1_needs_no_data(feddpc, tmp_path):
    printed = feddpc("table1")
    assert "4k'd + d" in printed
    assert "d = 62,006" in printed
    assert (tmp_path / "runs/reproduce/cifar10/paper/table1-server.csv").is_file()
    found = json.loads(feddpc("table1", "--data", "digits", "--json"))
    assert [sheet["title"].split(",")[1] for sheet in found["table1"]] == [" local costs", " server costs"]


def test_mistakes_say_what_to_do(feddpc, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDDPC_CACHE", str(tmp_path))
    for error, words, args in [
        (DataError, "Run `feddpc data get cifar10` first", ["figure4"]),
        (BadInputError, "for the curves of cifar10 ask for figure1", ["figure2", "--data", "cifar10"]),
        (BadInputError, "unknown preset 'mnist'", ["table2", "--data", "mnist"]),
        (BadInputError, "write numbers with commas", ["table2", *QUICK, "--rates", "fast"]),
        (BadInputError, "unknown selection 'luck'", ["table2", *QUICK, "--select", "luck"]),
        (BadInputError, "must be whole numbers", ["table2", *QUICK, "--seeds", "0.5"]),
        (BadInputError, "--alpha 0.3 --ladder` first", ["table2", *QUICK, "--alpha", "0.3"]),
    ]:
        with pytest.raises(error, match=words):
            feddpc(*args, code=None)


def test_every_target_has_its_help(feddpc):
    assert set(TARGETS) == set(study_spec.TARGETS)
    printed = feddpc("--help")
    assert all(name in printed for name in (*TARGETS, "export", "docs"))


@pytest.mark.parametrize("target", ["table2", "figure2"])
def test_rows_without_a_setting_are_named_and_left_out(feddpc, target, tmp_path, monkeypatch):
    """The settings that come with feddpc for CIFAR-100 lack two rows; here those for digits do."""
    known = tuned.known("digits", tmp_path)
    for rows in known.settings.values():
        del rows["fedavgm"], rows[tuned.MOMENTUM]
    monkeypatch.setattr("feddpc.paper.reproduction.known", lambda *_: known)
    args = (target, *QUICK[:-6], "--seeds", "0", "--report-only")
    shown = feddpc(*args, code=UNFINISHED)
    assert "left out (alpha 0.2: FedAvgM / FedDPC, momentum; alpha 0.6: FedAvgM / FedDPC, momentum)" in shown
    (study,) = json.loads(feddpc(*args, "--json", code=UNFINISHED))["studies"]
    assert len(study["missing"]) == 2 * (len(study_spec.ROWS) - 2)
    assert len(study["left_out"]) == 2
    with pytest.raises(BadInputError, match="no setting of fedavgm"):
        feddpc(*args, "--methods", "fedavgm", code=None)
