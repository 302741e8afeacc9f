"""The processes that share one run, as torchrun, SLURM or ``--ranks`` start them, and how they tell each other things.

Every process is called a rank. All ranks run the same code on the same configuration; what one of them computes alone
reaches the others through the calls of `Ranks`, which every rank makes in the same order.
"""

from feddpc.ranks.exchange import RankError as RankError
from feddpc.ranks.exchange import Ranks as Ranks
from feddpc.ranks.place import Place as Place
from feddpc.ranks.place import first_host as first_host
from feddpc.ranks.place import place as place
from feddpc.ranks.place import refuse_ranks as refuse_ranks
from feddpc.ranks.place import restarted as restarted
from feddpc.ranks.rendezvous import ALONE as ALONE
from feddpc.ranks.rendezvous import backend as backend
from feddpc.ranks.rendezvous import have_met as have_met
from feddpc.ranks.rendezvous import join as join
