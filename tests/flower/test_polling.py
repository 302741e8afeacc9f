"""How often replies are asked for: at once, rarely after a long wait, and never after the deadline."""

import time

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.superlink.grid import HttpGrid

from feddpc import flower
from feddpc.flower.polling import PollingGrid, prompt
from federations import plain_app


class Late(flower.InProcessGrid):
    """A grid whose replies arrive one by one, ``every`` seconds."""

    def __init__(self, nodes, every):
        super().__init__(plain_app(), nodes)
        self.every, self.begin, self.looks = every, time.monotonic(), 0

    def pull_messages(self, message_ids):
        self.looks += 1
        there = int((time.monotonic() - self.begin) / self.every)
        return super().pull_messages(sorted(message_ids, key=lambda name: int(name[8:]))[: max(there - self.came, 0)])

    @property
    def came(self):
        return len(self.contexts) - len(self._replies)


def messages(grid):
    content = RecordDict({"config": ConfigRecord({"server-round": 1})})
    return [Message(content, node, "evaluate", group_id="1") for node in grid.get_node_ids()]


def test_all_replies_are_returned_soon_after_they_came():
    grid = Late(4, 0.15)
    replies = PollingGrid(grid).send_and_receive(messages(grid))
    waited = time.monotonic() - grid.begin
    assert {reply.metadata.src_node_id for reply in replies} == set(grid.get_node_ids())
    assert waited < 4 * 0.15 + 0.5  # Flower's own grid would take 3 s
    assert grid.looks < 20


def test_after_the_deadline_only_those_that_came_in_time_are_returned():
    grid = Late(3, 0.4)
    begin = time.monotonic()
    replies = PollingGrid(grid).send_and_receive(messages(grid), timeout=0.6)
    assert len(replies) == 1
    assert 0.6 <= time.monotonic() - begin < 1.0


def test_nobody_asked_is_nobody_waited_for():
    grid = Late(1, 10.0)
    assert PollingGrid(grid).send_and_receive([]) == []
    assert grid.looks == 0


def test_only_flowers_grid_of_a_deployment_is_changed():
    other = flower.InProcessGrid(plain_app(), 2)
    assert prompt(other) is other
    http = object.__new__(HttpGrid)
    assert isinstance(prompt(http), PollingGrid)


@pytest.mark.parametrize("name", ["get_node_ids", "contexts"])
def test_everything_else_is_the_grids_own(name):
    grid = flower.InProcessGrid(plain_app(), 2)
    ours, theirs = getattr(PollingGrid(grid), name), getattr(grid, name)
    assert (ours() if callable(ours) else ours) == (theirs() if callable(theirs) else theirs)
