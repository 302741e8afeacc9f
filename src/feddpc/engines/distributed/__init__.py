"""The engine ``distributed``: several processes share one run."""

from feddpc.engines.distributed.engine import Distributed as Distributed
from feddpc.engines.distributed.exchange import adds_up as adds_up
