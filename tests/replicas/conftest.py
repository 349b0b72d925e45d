"""Without Ray there is nothing to test here; one cluster for all tests, whose start takes seconds."""

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

NEEDED = ("ray", "fastapi", "uvicorn", "prometheus_client", "httpx", "psutil")
collect_ignore_glob = ["test_*.py"]
if all(map(importlib.util.find_spec, NEEDED)):
    collect_ignore_glob = []
    importlib.import_module("tests.replicas.clusters")  # sets what Ray reads when it is imported


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Start a cluster with room for four replicas; yields its address."""
    from tests.replicas.clusters import cluster

    with cluster(4) as found:
        yield found


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.batch.files import make_model

    return make_model(tmp_path_factory.mktemp("replicas") / "tiny")
