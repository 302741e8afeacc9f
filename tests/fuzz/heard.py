"""Real messages of small federations, as bytes: what fuzzing of messages starts from."""

from __future__ import annotations

import torch
from flwr.app import Message, MetricRecord, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key
from flwr.common.serde import recorddict_to_proto

from feddpc import flower
from feddpc.flower.messages import arrays_of, pack
from fuzz import messages
from fuzz.messages import ACTIONS, QUESTIONS, STAGES


def seeds() -> dict[str, list[bytes]]:
    """Return messages by target: every kind once."""
    with messages.one_version():
        return _seeds()


def _seeds() -> dict[str, list[bytes]]:
    said = {method: Listening(flower.client_app(model=messages.Small, data=messages.samples), 2) for method in ASKED}
    for method, grid in said.items():
        made = messages.strategy(method)
        made.start(grid, made.initial_arrays(), num_rounds=1)
    orders = [(m, action) for m, grid in said.items() for action in grid.heard if (m, action) not in LATER]
    train, evaluate = (said["scaffold"].heard[kind] for kind in ("train", "evaluate"))
    answers = zip(QUESTIONS, ("query.hello", "query.setup", "query.probe", *["query.learn"] * 3), strict=True)
    metrics = MetricRecord({"num-examples": 2, "loss": 0.5})
    models = [{"w": torch.ones(3)}, {"w": torch.ones(3), **messages.BUFFERS}]
    weights = [as_bytes(RecordDict({"arrays": pack(model), "metrics": metrics})) for model in models]
    asked, told = _secure()
    return {
        "flower_reply": [train[1]],
        "flower_evaluation": [evaluate[1]],
        "flower_plain_reply": weights,
        "flower_order": [bytes([ACTIONS.index(a)]) + said[m].heard[a][0] for m, a in orders],
        "flower_answer": [bytes([i]) + said[q[0]].heard[action][1] for i, (q, action) in enumerate(answers)],
        "secure_reply": [bytes([STAGES.index(stage)]) + content for stage, content in told.items()],
        "secure_order": list(asked.values()),
    }


#: Methods that between them ask everything that can be asked.
ASKED = ("scaffold", "datasharing", "fedga", "fedbr", "gmm", "faug", "fedamd")


#: What needs that the node has heard something before.
LATER = {("fedga", "train"), *((m, a) for m in ("datasharing", "fedbr", "gmm") for a in ("train", "evaluate"))}


class Listening(flower.InProcessGrid):
    """A grid that remembers, for every kind of message, the last one of the first node and its answer."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.heard: dict[str, tuple[bytes, bytes]] = {}
        self.answers: dict[str, RecordDict] = {}

    def deliver(self, message: Message) -> list[Message]:
        """Return what comes back for one message."""
        replies = super().deliver(message)
        if message.metadata.dst_node_id == min(self.contexts):
            kind = self.named(message)
            answer = self.answers.setdefault(kind, replies[0].content)
            for name, array in arrays_of(replies[0].content, "answer").items():  # to all questions of a kind at once
                answer["answer"][name] = array
            self.heard[kind] = as_bytes(message.content), as_bytes(answer)
        return replies

    def named(self, message: Message) -> str:
        """Return what a message is called."""
        return message.metadata.message_type


class Stages(Listening):
    """The same for the stages of secure aggregation."""

    def named(self, message: Message) -> str:
        """Return the stage, or the kind of a message that is in none."""
        asked = message.content.get(RECORD_KEY_CONFIGS)
        return super().named(message) if asked is None else str(asked[Key.STAGE])


def _secure() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return what a client hears and says in every stage of secure aggregation."""
    grid = Stages(flower.secure_client_app(model=messages.Small, data=messages.samples), 3)
    numbers = {"clients": 3, "cohort": 3, "batch_size": 1, "rounds": 1}
    made = flower.secure_strategy("feddpc", model=messages.Small(), test=messages.EVEN, classes=2, **numbers)
    made.start(grid, made.initial_arrays(), num_rounds=1)
    return {s: grid.heard[s][0] for s in STAGES}, {s: grid.heard[s][1] for s in STAGES}


def as_bytes(content: RecordDict) -> bytes:
    """Return the content of a message as it travels, the same every time."""
    return recorddict_to_proto(content).SerializeToString(deterministic=True)
