"""FedDPC under secure aggregation: clients project and scale their own updates, and the server sees only the sum.

``secure_server_app`` and ``secure_client_app`` run a method over Flower's SecAgg+, which masks what every client sends
so that only the sum over the cohort can be read. docs/secure-aggregation.md says who sends what, and what is hidden.
"""

from feddpc.flower.secure.internals import check_internals

check_internals()  # before the modules of this package import them
