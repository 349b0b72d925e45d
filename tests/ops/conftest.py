"""Fixtures of the tests of ops: a backend to run with, and memory that shows what was not written."""

import pytest
import torch

from tests.ops.backends import running


@pytest.fixture(scope="class", params=["reference", "cpp"])
def backend(request):
    """The backend that every op takes meanwhile. By class: Hypothesis runs many cases within one function's scope."""
    with running(request.param):
        yield request.param


@pytest.fixture(scope="module", autouse=True)
def poisoned_buffers():
    """Fresh tensors hold NaN or the largest integer, so that an output that is not written shows."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled
