"""FedDPC under secure aggregation: clients project and scale for themselves, the server sees nothing but the sum.

``secure_server_app`` and ``secure_client_app`` run a method over Flower's SecAgg+, which masks what every client sends
so that only the sum over the cohort can be read. docs/secure-aggregation.md says who sends what, and what is hidden.
"""
