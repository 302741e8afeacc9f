"""A run is submitted again until it completes, with longer and longer waits, and nothing is left at the end."""

import threading

import pytest

from feddpc.cli import main
from feddpc.cli.flags import UNFINISHED
from feddpc.errors import BadInputError
from feddpc.federate import supervise
from feddpc.federate.flower_cli import FlowerCliError
from feddpc.federate.supervise import GaveUpError, Supervisor
from feddpc.runs.stop import Stop


class Link:
    """A SuperLink whose runs end as ``plan`` says, one entry per run: statuses, or errors to raise."""

    def __init__(self, *plan, on_submit=lambda run: None):
        self.plan, self.on_submit = [list(statuses) for statuses in plan], on_submit
        self.submitted, self.stopped = [], []

    def submit(self, app, config):
        if self.plan and isinstance(self.plan[0], list) and self.plan[0] and isinstance(self.plan[0][0], str):
            self.submitted.append(config)
            run = str(len(self.submitted))
            self.on_submit(run)
            return run
        raise self.plan.pop(0)[0]

    def status(self, run):
        step = self.plan[0].pop(0)
        if isinstance(step, Exception):
            raise step
        if step.startswith("finished"):
            self.plan.pop(0)
        elif not self.plan[0]:
            self.plan[0].append(step)
        return step

    def log_of(self, run):
        return "INFO : begin\nfeddpc.errors.BadInputError: the disk is full\nERROR : it failed\n"

    def stop_run(self, run):
        self.stopped.append(run)


GONE = FlowerCliError("flwr list: connection refused")


@pytest.fixture
def app(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "pyproject.toml").write_text("")
    return tmp_path / "app"


@pytest.fixture
def supervisor(app, monkeypatch):
    """A supervisor whose waits take no time; gives it with its waits and its lines."""
    waits, lines = [], []

    def make(link, **more):
        made = Supervisor(app, "mine", link=link, tell=lines.append, poll=0.0, **more)
        pause = made._pause

        def waited(seconds):
            waits.append(seconds)
            pause(0.0)
            if made.stop.wanted:
                raise KeyboardInterrupt

        made._pause = waited
        return made

    return make, waits, lines


def test_a_run_that_completes_is_submitted_once(supervisor):
    make, _, lines = supervisor
    link = Link(["pending", "running", "finished:completed"])
    make(link, config=["rounds=3"]).run()
    assert link.submitted == [["rounds=3"]]
    assert "completed" in lines[-1]


def test_failed_runs_are_submitted_again_with_longer_and_longer_waits(supervisor):
    make, waits, lines = supervisor
    link = Link(*[["running", "finished:failed"]] * 5, ["finished:completed"])
    make(link, failures=6, wait=10.0, longest_wait=60.0).run()
    assert len(link.submitted) == 6
    assert [seconds for seconds in waits if seconds] == [10.0, 20.0, 40.0, 60.0, 60.0]
    assert any("the disk is full" in line for line in lines)


def test_it_gives_up_with_the_reason(supervisor):
    make, _, _ = supervisor
    link = Link(*[["finished:failed"]] * 9)
    with pytest.raises(GaveUpError, match=r"3 failures in a row.*the disk is full"):
        make(link, failures=3).run()
    assert len(link.submitted) == 3


def test_a_new_round_sets_the_count_of_failures_to_zero(supervisor, tmp_path):
    make, waits, _ = supervisor
    run = tmp_path / "run"
    run.mkdir()

    def train(number):
        if number != "3":
            with (run / "rounds.jsonl").open("a") as records:
                records.write('{"round": 1}\n')

    link = Link(*[["finished:failed"]] * 4, ["finished:completed"], on_submit=train)
    make(link, failures=3, wait=1.0, run_folder=run).run()
    assert [seconds for seconds in waits if seconds] == [1.0, 1.0, 2.0, 1.0]


def test_a_superlink_that_is_away_for_a_while_is_waited_for(supervisor):
    make, _, _ = supervisor
    link = Link(["running", GONE, GONE, "running", "finished:completed"])
    make(link, failures=3).run()
    assert len(link.submitted) == 1


def test_a_superlink_that_never_answers_is_given_up(supervisor):
    make, _, _ = supervisor
    with pytest.raises(GaveUpError, match="connection refused"):
        make(Link(*[[GONE]] * 9), failures=2).run()


def test_a_superlink_that_forgot_the_run_gets_it_again(supervisor):
    make, _, _ = supervisor
    link = Link(
        ["running", FlowerCliError("flwr list: Run ID not found.", supervise.RUN_NOT_FOUND)], ["finished:completed"]
    )
    status = link.status

    def forgets(run):
        try:
            return status(run)
        except FlowerCliError:
            link.plan.pop(0)
            raise

    link.status = forgets
    make(link).run()
    assert len(link.submitted) == 2


def test_a_run_that_somebody_stopped_is_not_submitted_again(supervisor, tmp_path):
    make, _, lines = supervisor
    link = Link(["finished:stopped"], ["finished:completed"])
    make(link, state=tmp_path / "state").run()
    assert len(link.submitted) == 1
    assert "was stopped" in lines[-1]
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("plan", "code"),
    [(["finished:completed"], 0), (["finished:stopped"], 0), (["finished:failed"], UNFINISHED), (None, 2)],
)
def test_every_outcome_has_an_exit_code(app, monkeypatch, capsys, plan, code):
    """Units restart a supervisor by its code: neither what somebody stopped nor what was given up is tried again."""
    if plan is None:  # a user's mistake
        (app / "pyproject.toml").unlink()
    monkeypatch.setattr(supervise, "FlowerCli", lambda *_, **__: Link(plan))
    monkeypatch.setattr("sys.argv", ["feddpc", "federate", "supervise", str(app), "mine", "--failures", "1"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    assert capsys.readouterr().err.startswith("error: ") == bool(code)


def test_a_request_to_stop_stops_the_run_and_forgets_it(supervisor, tmp_path):
    make, _, lines = supervisor
    stop, state = Stop(), tmp_path / "state"
    link = Link(["running"], on_submit=lambda run: setattr(stop, "wanted", True))
    with pytest.raises(KeyboardInterrupt):
        make(link, stop=stop, state=state).run()
    assert link.stopped == ["1"]
    assert not state.exists()
    assert "stopped" in lines[-1]
    assert "continues" in lines[-1]


def test_a_request_to_stop_ends_a_long_wait_at_once(app):
    stop, link = Stop(), Link(["finished:failed"], ["finished:completed"])
    timer = threading.Timer(0.3, lambda: setattr(stop, "wanted", True))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        Supervisor(app, "mine", link=link, stop=stop, wait=600.0, poll=0.0).run()
    timer.join()
    assert len(link.submitted) == 1
    assert link.stopped == []


def test_a_supervisor_that_was_killed_goes_on_watching_its_run(supervisor, tmp_path):
    make, _, lines = supervisor
    state = tmp_path / "state"

    class KilledError(BaseException):
        pass

    link = Link(["running", KilledError()])
    link.status = lambda run: (_ for _ in ()).throw(KilledError())
    with pytest.raises(KilledError):
        make(link, state=state).run()
    assert state.read_text() == "1\n"
    link = Link(["running", "finished:completed"])
    make(link, state=state).run()
    assert link.submitted == []
    assert "run 1: watched again" in lines
    assert not state.exists()


def test_what_cannot_be_right_is_named(supervisor, tmp_path, app):
    make, _, _ = supervisor
    (tmp_path / "state").write_text("mine")
    with pytest.raises(BadInputError, match="holds no id of a run"):
        make(Link(), state=tmp_path / "state").run()
    (app / "pyproject.toml").unlink()
    with pytest.raises(BadInputError, match="is no Flower app"):
        make(Link()).run()
