"""What data-side methods find out before round 1, as an exchange: clients answer questions, and keep their samples.

In the simulator ``Method.learn`` sees all data. Here its client half runs at the clients and its server half at the
server, with the method's own functions and the same numbers.

| method | a client answers with |
|---|---|
| FAug | its class counts, and the raw samples that the method makes it send |
| FedBR | averages of the samples that the server asks for, by their places |
| GMM | sums for each class and component, once a round of EM; for float data first the range of its values |
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from feddpc.errors import BadInputError
from feddpc.methods import _em
from feddpc.methods.base import Method, State
from feddpc.methods.faug import FAug
from feddpc.methods.fedbr import FedBR
from feddpc.methods.federated_data import FederatedData, Ids
from feddpc.methods.gmm import GMM
from feddpc.tasks.classification import tensors

Answers = dict[int, State]
#: Sends every client a question, with something for each, and returns what all of them answered.
Ask = Callable[[str, Callable[[int], State]], Answers]
#: What a mixture consists of, as it travels.
MIXTURE = ("counts", "means", "variances")


class Preparation(ABC):
    """The two halves of a method's ``learn``."""

    @abstractmethod
    def learn(self, method: Any, ask: Ask, world: FederatedData, sizes: Ids) -> State:
        """Return what ``method.learn`` would; ``world`` is the server's, without samples, ``sizes`` the clients'."""

    @abstractmethod
    def answer(self, method: Any, question: str, client: int, world: FederatedData, asked: State) -> State:
        """Return what one client answers; ``world`` has its own samples only."""


def preparation(method: Method) -> Preparation:
    """Return how ``method`` learns before round 1 without the clients' samples."""
    for kind, found in PREPARATIONS.items():
        if isinstance(method, kind):
            return found
    raise BadInputError(
        f"{method.name} learns from all clients' data before round 1, and nobody wrote how to ask clients for it: add "
        "its two halves to feddpc.flower.preparing.PREPARATIONS, or simulate it"
    )


def learn(method: Method, ask: Ask, world: FederatedData, sizes: Ids) -> State:
    """Return what ``method`` finds out before round 1."""
    try:
        return preparation(method).learn(method, ask, world, sizes)
    except (ValueError, KeyError, IndexError, RuntimeError) as error:
        raise BadInputError(
            f"{method.name}: what the clients answered before round 1 does not fit together: {error}"
        ) from error


@dataclass(frozen=True, kw_only=True)
class _Received(FAug):
    """FAug at a server whose clients have chosen and sent their samples already."""

    uploads: tuple[tuple[Ids, Ids], ...] = ()

    def upload(self, world: FederatedData, client: int, target: Ids) -> tuple[Ids, Ids]:
        """What the client sent."""
        return self.uploads[client]


@dataclass(frozen=True)
class _Told(FederatedData):
    """A server's world, which knows of the clients' data what these told."""

    told: Ids = field(default_factory=lambda: np.zeros((0, 0), np.int64))

    def counts(self) -> Ids:
        """Return what the clients counted."""
        return self.told


class PrepareFAug(Preparation):
    """One question: counts and raw samples; the method's own ``learn`` does the rest."""

    def answer(self, method: FAug, question: str, client: int, world: FederatedData, asked: State) -> State:
        """Choose and send samples as the method says."""
        counts = world.counts()[client]
        ids, classes = method.upload(world, client, np.flatnonzero(method.missing(counts[None])[0]))
        sent = {"counts": counts, "x": world.data.x_train[ids], "y": world.data.y_train[ids], "classes": classes}
        return {key: torch.from_numpy(np.array(value)) for key, value in sent.items()}

    def learn(self, method: FAug, ask: Ask, world: FederatedData, sizes: Ids) -> State:
        """Train the generator on what was sent."""
        answers = [{k: v.numpy() for k, v in said.items()} for said in ask("seeds", lambda _: {}).values()]
        ends = np.cumsum([len(said["y"]) for said in answers])
        uploads = [
            (np.arange(end - len(said["y"]), end), said["classes"]) for said, end in zip(answers, ends, strict=True)
        ]
        x, y = (np.concatenate([said[key] for said in answers]) for key in ("x", "y"))
        parts = {name: getattr(world, name) for name in FederatedData.__dataclass_fields__}
        parts["data"] = dataclasses.replace(world.data, x_train=x, y_train=y)
        told = _Told(**parts, told=np.stack([said["counts"] for said in answers]))
        return _Received(**method.hyper(), uploads=tuple(uploads)).learn(told)


class PrepareFedBR(Preparation):
    """One question: averages of samples, whose places the server draws."""

    def answer(self, method: FedBR, question: str, client: int, world: FederatedData, asked: State) -> State:
        """Average samples, in the values and layout of the data."""
        places, mine = asked["places"].numpy(), world.partition[client]
        x, _ = tensors(world.data.x_train[mine[places.reshape(-1)]], world.data.y_train[:0])
        return {"x_p": x.reshape(*places.shape, *x.shape[1:]).double().mean(1).float()}

    def learn(self, method: FedBR, ask: Ask, world: FederatedData, sizes: Ids) -> State:
        """Draw clients and places as the method does, and put the averages into the order of drawing."""
        rng, holders = world.rng("fedbr"), np.flatnonzero(sizes)
        owners = np.zeros(method.pseudo, np.int64)
        places = np.zeros((method.pseudo, method.averaged), np.int64)
        for i in range(method.pseudo):
            owners[i] = holders[rng.integers(len(holders))]
            places[i] = rng.choice(sizes[owners[i]], method.averaged)
        answers = ask("averages", lambda client: {"places": torch.from_numpy(places[owners == client])})
        made = torch.cat([answer["x_p"] for answer in answers.values()])
        back = np.argsort(np.argsort(owners, kind="stable"))
        return {"x_p": made[torch.from_numpy(back)]}


class PrepareGMM(Preparation):
    """A question a round of EM, for all classes at once; for float data one more, for the range of the values."""

    def answer(self, method: GMM, question: str, client: int, world: FederatedData, asked: State) -> State:
        """Sum up what belongs to each component of each class."""
        mine = world.partition[client]
        x, y = world.data.x_train[mine].reshape(len(mine), -1), world.data.y_train[mine]
        if question == "box":
            return {"low": torch.from_numpy(x.min(0)), "high": torch.from_numpy(x.max(0))}
        told = {key: value.numpy() for key, value in asked.items()}
        box = _em.Box(told["low"], told["high"]) if "low" in told else _image_box(x.shape[1])
        mixtures = [_em.one_component(x.shape[1])] * world.data.classes
        if "means" in told:
            mixtures = [_em.Mixture(*parts) for parts in zip(*(told[key] for key in MIXTURE), strict=True)]
        sums = np.zeros((world.data.classes, len(mixtures[0].counts), 1 + 2 * x.shape[1]))
        for r in np.unique(y):
            of = _em.client_sums(mixtures[r], x[y == r], box)
            sums[r] = np.concatenate([of.n[:, None], of.s, of.q], axis=1)
        holds = np.isin(np.arange(world.data.classes), y).astype(np.int64)
        return {"sums": torch.from_numpy(sums), "holds": torch.from_numpy(holds)}

    def learn(self, method: GMM, ask: Ask, world: FederatedData, sizes: Ids) -> State:
        """Fit the mixtures, and pack them as the method does."""
        if method.target == 0:
            return {}
        told: State = {}
        if not world.data.is_image:
            ends = [np.stack([a["low"].numpy(), a["high"].numpy()]) for a in ask("box", lambda _: {}).values()]
            box = _em.Box.around(ends)
            told = {"low": torch.from_numpy(box.low), "high": torch.from_numpy(box.high)}
        M, classes = method.components, world.data.classes
        fitted = [
            _em.spread(whole, M, method.floor, world.rng("gmm", r)) if whole.counts.any() else _nobody(M, whole)
            for r, whole in enumerate(self._improved(None, ask, told, classes, 0.0))
        ]
        for _ in range(method.em_rounds):
            fitted = self._improved(fitted, ask, told, classes, method.floor)
        kept = [mixture.without(method.min_count) for mixture in fitted]
        learned = {key: [getattr(mixture, key) for mixture in kept] for key in ("weights", "means", "variances")}
        box = _em.Box(*(told[k].numpy() for k in ("low", "high"))) if told else _image_box(fitted[0].means.shape[1])
        learned |= {"counts": [mixture.counts for mixture in fitted], "box": [box.low, box.high]}
        return {key: torch.from_numpy(np.stack(value)) for key, value in learned.items()}

    def _improved(
        self, old: list[_em.Mixture] | None, ask: Ask, told: State, classes: int, floor: float
    ) -> list[_em.Mixture]:
        """One round of EM for every class; ``old`` None stands for one component each."""
        stacked = {} if old is None else {key: np.stack([getattr(m, key) for m in old]) for key in MIXTURE}
        answers = list(ask("sums", lambda _: told | {k: torch.from_numpy(v) for k, v in stacked.items()}).values())
        dim = (answers[0]["sums"].shape[2] - 1) // 2
        made = []
        for r, mixture in enumerate(old or [_em.one_component(dim)] * classes):
            parts = [answer["sums"][r].numpy() for answer in answers if answer["holds"][r]]
            sums = [_em.Sums(p[:, 0], p[:, 1 : 1 + dim], p[:, 1 + dim :]) for p in parts]
            total = functools.reduce(_em.Sums.__add__, sums) if sums else None
            made.append(_nobody(len(mixture.counts), mixture) if total is None else _em.maximise(total, mixture, floor))
        return made


def _nobody(M: int, like: _em.Mixture) -> _em.Mixture:
    """Return the mixture of a class that no client holds."""
    return _em.Mixture(np.zeros(M), *np.zeros((2, M, like.means.shape[1])))


def _image_box(dim: int) -> _em.Box:
    return _em.Box(np.zeros(dim), np.full(dim, 255.0))


#: For every class of methods that learn before round 1, how they do it here.
PREPARATIONS: dict[type[Method], Preparation] = {FAug: PrepareFAug(), FedBR: PrepareFedBR(), GMM: PrepareGMM()}
