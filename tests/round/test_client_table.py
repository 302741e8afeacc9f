"""Memories of clients: alike on the device, in host memory and on disk, safe in a crash, no larger than needed."""

import errno
import os

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from feddpc import methods
from feddpc.errors import BadInputError, RunFolderError
from feddpc.round import placement as placements
from feddpc.round.client_table import ClientTable
from feddpc.round.placement import Placement, available_memory, decide, resolve
from feddpc.round.row_storage import PAGE, SLOTS

KINDS = ("device", "host", "disk")
GB = 10**9


def fresh():
    return {
        "c": torch.tensor([1.0, 2.0, 3.0]),
        "half": torch.full((2, 2), 0.5, dtype=torch.bfloat16),
        "visits": torch.tensor(7, dtype=torch.int64),
        "flag": torch.tensor([True]),
        "nothing": torch.zeros(0, 3),
    }


def stack(clients, value):
    m = len(clients)
    x = torch.as_tensor(np.array(clients, dtype=np.int64) * 100 + value)
    return {
        "c": x[:, None] + torch.arange(3.0),
        "half": (x % 64).to(torch.bfloat16)[:, None, None].expand(m, 2, 2),
        "visits": x,
        "flag": x[:, None] % 2 == 0,
        "nothing": torch.zeros(m, 0, 3),
    }


def memory(kind="device", folder=None, start=fresh, population=10):
    return ClientTable(start, "memory", population, Placement(kind, folder))


def write(table, clients, value=1):
    table.write(np.array(clients, dtype=np.int64), stack(clients, value))


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def saved(table):
    """What a checkpoint would hold, as a file gives it back."""
    ids, rows = table.export()
    return ids.clone(), {k: v.clone() for k, v in rows.items()}


CLIENTS = st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 77, 10**12]), min_size=0, max_size=5, unique=True)
OPERATION = st.one_of(
    st.tuples(st.just("write"), CLIENTS),
    st.tuples(st.just("read"), CLIENTS),
    st.tuples(st.sampled_from(["checkpoint", "half a checkpoint", "crash"]), st.just([])),
)


@given(st.lists(OPERATION, max_size=25))
@example([("write", [0, 1]), ("checkpoint", []), ("write", [1]), ("crash", []), ("write", [1])])
@example([("write", [0]), ("checkpoint", []), ("crash", []), ("write", [0]), ("checkpoint", []), ("write", [0])])
@settings(max_examples=60, deadline=None)
def test_placements_are_equal_whatever_happens(tmp_path_factory, operations):
    """A crash loses what came after the last checkpoint; what lies in slots that it does not name must not matter."""
    folder = tmp_path_factory.mktemp("run") / "checkpoint"
    file = folder / "clients.rows"
    tables = {"device": memory(), "host": memory("host"), "disk": memory("disk", folder), "none": memory("disk")}
    last = dict.fromkeys(tables)
    failed = False
    everyone = np.array([0, 1, 2, 3, 4, 5, 77, 10**12, 6])
    for number, (what, clients) in enumerate(operations):
        if what == "write":
            for table in tables.values():
                write(table, clients, number)
            if clients:
                assert file.stat().st_size <= (4 if failed else 3) * len(tables["disk"]) * PAGE
        elif what == "read":
            stacks = [table.read(np.array(clients, dtype=np.int64)) for table in tables.values()]
            assert all(same(stacks[0], other) for other in stacks[1:])
        elif what == "crash":
            if file.exists():
                spoil(file, last["disk"])
            for name, table in tables.items():
                tables[name] = ClientTable(fresh, "memory", 10, table._placement)
                if last[name] is not None:
                    tables[name].restore(*last[name])
        else:
            failed |= what == "half a checkpoint"
            for name, table in tables.items():
                ids, rows = saved(table)
                if what == "checkpoint":
                    last[name] = ids, rows
                    table.committed()
        stacks = [table.read(everyone) for table in tables.values()]
        assert all(same(stacks[0], other) for other in stacks[1:])
        assert len({len(table) for table in tables.values()}) == 1


def spoil(file, checkpoint):
    """Fill every slot that the checkpoint does not name."""
    used = set() if checkpoint is None else set(checkpoint[1][SLOTS].tolist())
    with file.open("r+b") as handle:
        for slot in set(range(file.stat().st_size // PAGE + 5)) - used:
            handle.seek(slot * PAGE)
            handle.write(b"\xa5" * PAGE)


def test_a_slot_of_the_last_checkpoint_is_never_overwritten(tmp_path):
    table = memory("disk", tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "clients.rows"
    write(table, [4, 8, 6])
    (_, first), before = saved(table), file.read_bytes()
    table.committed()
    for value in (2, 3, 4):
        write(table, [8, 4], value)
        assert file.read_bytes()[: len(before)] == before
    ids, second = saved(table)
    assert ids.tolist() == [4, 8, 6]
    assert (first[SLOTS].tolist(), second[SLOTS].tolist()) == ([0, 1, 2], [4, 3, 2])
    write(table, [4], 5)  # the second checkpoint is not complete: neither it nor the first may suffer
    assert file.read_bytes()[: len(before)] == before
    again = memory("disk", tmp_path / "checkpoint")
    again.restore(ids, second)
    assert same(again.read(np.array([4, 8])), stack([4, 8], 4))


def test_slots_are_used_again_and_the_file_stays_small(tmp_path):
    table = memory("disk", tmp_path)
    for value in range(50):
        write(table, range(6), value)
        table.export()
        table.committed()
    assert (tmp_path / "clients.rows").stat().st_size <= 3 * 6 * PAGE
    assert same(table.read(np.arange(6)), stack(range(6), 49))


@pytest.mark.parametrize("before", KINDS)
@pytest.mark.parametrize("after", KINDS)
def test_a_checkpoint_moves_to_any_placement(tmp_path, before, after):
    old = memory(before, tmp_path)
    write(old, [3, 10**12, 8])
    ids, rows = saved(old)
    old.committed()
    assert (SLOTS in rows) == (before == "disk")
    new = memory(after, tmp_path)
    new.restore(ids, rows)
    who = np.array([8, 1, 3, 10**12])
    assert same(new.read(who), old.read(who))
    write(new, [1, 3], 9)
    expected = stack([1, 3], 9), stack([8], 1)
    assert same(new.read(np.array([1, 3])), expected[0])
    assert same(new.read(np.array([8])), expected[1])


def test_nothing_is_on_the_disk_before_the_first_row(tmp_path):
    folder = tmp_path / "checkpoint"
    for start in (fresh, dict):
        table = memory("disk", folder, start)
        table.read(np.array([1, 2]))
        table.write(np.array([], dtype=np.int64), {k: v.new_empty(0, *v.shape) for k, v in start().items()})
        empty = saved(table)
        table.committed()
        table.restore(*empty)
        assert not folder.exists()
    stateless = memory("disk", folder, dict)
    stateless.write(np.array([1]), {})
    assert not folder.exists()


def test_a_hundred_thousand_clients_cost_those_that_came(tmp_path):
    d, population = 62_006, 100_000
    table = memory("disk", tmp_path, lambda: {"c": torch.zeros(d)}, population)
    came = np.array([99_999, 0, 50_000, 7])
    table.write(came, {"c": torch.arange(4.0)[:, None].expand(4, d)})
    status = (tmp_path / "clients.rows").stat()
    assert status.st_size < 5 * (4 * d + PAGE)
    assert table.read(np.array([7, 1, 99_999]))["c"].sum(1).tolist() == [3 * d, 0, 0]
    ids, rows = table.export()
    assert sum(v.nbytes for v in (ids, *rows.values())) == 4 * 24  # number, slot and checksum


def test_system_calls_may_stop_half_way(tmp_path, monkeypatch):
    read, written = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:5]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: written(fd, [views[0][:3]], at))
    table = memory("disk", tmp_path)
    write(table, [5, 2])
    assert same(table.read(np.array([2, 5])), stack([2, 5], 1))


@pytest.mark.parametrize(("size", "said"), [(None, "is missing"), (PAGE, "but the checkpoint needs"), (0, "0 bytes")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_not_what_the_checkpoint_says(tmp_path, kind, size, said):
    table = memory("disk", tmp_path)
    write(table, [1, 2])
    checkpoint, file = saved(table), tmp_path / "clients.rows"
    if size is None:
        file.unlink()
    else:
        os.truncate(file, size)
    with pytest.raises(RunFolderError, match=rf"clients\.rows.*{said}"):
        memory(kind, tmp_path).restore(*checkpoint)
    assert (file.stat().st_size if file.exists() else None) == size


def test_a_file_cut_off_while_in_use(tmp_path):
    table = memory("disk", tmp_path)
    write(table, [1])
    os.truncate(tmp_path / "clients.rows", 0)
    with pytest.raises(RunFolderError, match=r"clients\.rows ends before"):
        table.read(np.array([1]))


@pytest.mark.parametrize("call", ["pwritev", "fsync"])
def test_a_full_disk_is_said(tmp_path, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    table, temporary = memory("disk", tmp_path), memory("disk")
    write(table, [1])
    monkeypatch.setattr(os, call, full)
    with pytest.raises(RunFolderError, match=r"the disk of .*clients\.rows is full"):
        write(table, [2]) if call == "pwritev" else table.export()
    if call == "pwritev":
        with pytest.raises(RunFolderError, match=r"temporary file in .* No space left on device; free some disk space"):
            write(temporary, [2])


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be used"):
        write(memory("disk", tmp_path / "file" / "checkpoint"), [1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_form_is_checked_before_anything_is_stored(tmp_path, kind):
    table = memory(kind, tmp_path / "checkpoint")
    for bad in ({}, stack([1], 1) | {"c": torch.zeros(1, 4)}, stack([1], 1) | {"c": torch.zeros(1, 3).double()}):
        with pytest.raises(BadInputError, match="memory"):
            table.write(np.array([1]), bad)
    assert len(table) == 0
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize(
    ("needed", "device", "host", "kind"),
    [
        (0, 0, 0, "device"),
        (20 * GB, 80 * GB, 1 * GB, "device"),
        (20 * GB + 1, 80 * GB, 64 * GB, "host"),
        (32 * GB, 80 * GB, 64 * GB, "host"),
        (32 * GB + 1, 80 * GB, 64 * GB, "disk"),
        (100 * 4 * 11_227_812, 7 * GB, 7 * GB, "disk"),  # ResNet18 a client on a machine with 8 GB
        (100 * 4 * 62_006, 7 * GB, 7 * GB, "device"),  # LeNet5
        (100_000 * 4 * 62_006, 7 * GB, 7 * GB, "disk"),
    ],
)
def test_the_rule(needed, device, host, kind):
    assert decide(needed, device_free=device, host_free=host) == kind


def test_auto_counts_both_memories_of_the_whole_population(monkeypatch):
    w, varp = torch.zeros(1000), methods.create("fedvarp")  # 4,000 bytes per client
    monkeypatch.setattr(placements, "available_memory", lambda: 1_600_000)
    assert resolve("auto", varp, w, 100) == "device"
    assert resolve("auto", varp, w, 101) == "host"
    assert resolve("auto", varp, w, 201) == "disk"
    assert resolve("auto", methods.create("fedavg"), w, 10**9) == "device"
    for kind in KINDS:
        assert resolve(kind, varp, w, 10**9) == kind


def test_available_memory(tmp_path):
    assert 1 << 20 < available_memory() < 1 << 50
    assert available_memory(tmp_path) > 1 << 20  # nothing there: what sysconf says
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  16000000 kB\nMemFree: 5 kB\nMemAvailable:  8000000 kB\n")
    assert available_memory(tmp_path) == 8_000_000 * 1024
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    for text, expected in (("max\n", 8_000_000 * 1024), ("2000000000\n", 2 * GB)):
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(text)
        assert available_memory(tmp_path) == expected
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("1500000000\n")
    assert available_memory(tmp_path) == GB // 2
    # Cached files can be dropped.
    (tmp_path / "sys/fs/cgroup/memory.stat").write_text("anon 9\nactive_file 7\ninactive_file 300000000\nshmem 1\n")
    assert available_memory(tmp_path) == 800_000_000
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("2900000000\n")
    assert available_memory(tmp_path) == 0
