"""ClusterFedVARP: FedVARP with one memory per cluster of clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from feddpc.errors import BadInputError
from feddpc.methods._algebra import safe_ratio, weighted_sum
from feddpc.methods.base import Cohort, Costs, Method, State, Step, Transformed
from feddpc.rng import generator


@dataclass(frozen=True, kw_only=True)
class ClusterFedVARP(Method):
    """FedVARP with one memory per cluster of clients.

    The server remembers C vectors instead of N: y_c for cluster c, which holds the share q_c of the population (its
    number of clients over N, or with ``weighting = "samples"`` its samples over all samples).

    Client j:  plain local SGD, sends u_j = eta_l D_j
    Server:    v   = sum_c q_c y_c + mean_S (D_j - y_{c(j)})
               w_t = w_{t-1} - eta_g v
               y_c <- mean of D_j over the participants of cluster c, for every cluster that has one    (0 at the start)

    All means have the weights of the experiment.

    | symbol | name     | default | domain                                                                  |
    |--------|----------|---------|-------------------------------------------------------------------------|
    | C      | clusters | 10      | a number (clients are assigned at random) or, from Python, groups of ids |

    One client per cluster is FedVARP; full participation is FedAvg. Both hold under sample weights too.

    Departures: as in FedVARP, D_j is not divided by the number of local steps. A number deals the clients in one fixed
    random way, the same for every seed. Clusters by data similarity are for the caller to give: the server of a real
    federation does not see the data.

    Confidence: paper (through summaries) and one third-party code.

    >>> ClusterFedVARP(clusters=5).hyper()
    {'clusters': 5}
    """

    name: ClassVar[str] = "clusterfedvarp"
    title: ClassVar[str] = "ClusterFedVARP"
    reference: ClassVar[str] = "Jhunjhunwala et al., FedVARP, UAI 2022, arXiv:2207.14130"
    costs: ClassVar[Costs] = Costs(server_state="C", server_work="2d per client")

    clusters: int | tuple[tuple[int, ...], ...] = 10

    def __post_init__(self) -> None:
        count = self.clusters if isinstance(self.clusters, int) else len(self.clusters)
        self.require(count >= 1, "clusters", "at least one cluster")
        groups = () if isinstance(self.clusters, int) else self.clusters
        self.require(all(_are_ids(g) for g in groups), "clusters", "a number, or groups of client ids")

    def init_server(self, w: Tensor, population: int) -> State:
        """One memory per cluster, and the cluster of every client."""
        member = torch.from_numpy(self._membership(population)).to(w.device)
        return {"y": w.new_zeros(int(member.max()) + 1, len(w)), "member": member}

    def combine(self, w: Tensor, server: State, rows: Transformed, cohort: Cohort) -> Step:
        """Fresh updates for participants, their clusters' memories for the others."""
        D_md, y_cd = rows["delta"] / cohort.client_lr, server["y"]
        cluster_m = server["member"][cohort.clients]
        share_c = cohort.group_shares(server["member"], len(y_cd))
        v = weighted_sum(share_c, y_cd) + cohort.mean(D_md - y_cd[cluster_m])
        belongs_cm = cluster_m == torch.arange(len(y_cd), device=w.device)[:, None]
        weight_cm = torch.where(belongs_cm, cohort.weights, 0.0)
        mean_cd = safe_ratio(weight_cm, weight_cm.sum(1, keepdim=True)).to(w.dtype) @ D_md
        y_cd = torch.where(belongs_cm.any(1, keepdim=True), mean_cd, y_cd)
        return Step(v, rate=cohort.server_lr, server={**server, "y": y_cd})

    def _membership(self, population: int) -> np.ndarray:
        """Return the cluster of every client."""
        if isinstance(self.clusters, int):
            if self.clusters > population:
                raise BadInputError(
                    f"clusterfedvarp: clusters = {self.clusters} but there are {population} clients: use at most that"
                )
            cluster = np.arange(population, dtype=np.int64) % self.clusters
            return cluster[generator(0, "clusters").permutation(population)]
        ids = np.array([j for group in self.clusters for j in group], dtype=np.int64)
        if not np.array_equal(np.sort(ids), np.arange(population)):
            raise BadInputError(f"clusterfedvarp: clusters must name each of the {population} clients exactly once")
        member = np.empty(population, dtype=np.int64)
        member[ids] = np.repeat(np.arange(len(self.clusters)), [len(group) for group in self.clusters])
        return member


def _are_ids(group: object) -> bool:
    return isinstance(group, tuple) and len(group) > 0 and all(type(j) is int for j in group)
