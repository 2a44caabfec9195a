"""A Ray cluster that all tests of this folder share."""

import logging

import pytest


@pytest.fixture(scope="package")
def cluster():
    ray = pytest.importorskip("ray")
    ray.init("local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    yield
    ray.shutdown()
