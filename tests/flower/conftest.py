"""Flower logs every step of every round; here only what goes wrong is of interest."""

import logging

import pytest


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("flwr").setLevel(logging.WARNING)
