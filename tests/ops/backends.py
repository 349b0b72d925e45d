"""Which backends there are here, and running an op with one of them or with each."""

from contextlib import contextmanager

import pytest

from specengine import ops

BACKENDS = ops.backends("cpu")["step_queues"].available

each_backend = pytest.mark.parametrize("backend", ["cpp", "reference"], indirect=True)


@contextmanager
def running(backend):
    if backend not in BACKENDS:
        pytest.skip("specengine._expander is not built (pip install -e .)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ops.VARIABLE, backend)
        yield


def of_each(call):
    """What `call` gives with each backend, by its name."""
    results = {}
    for backend in BACKENDS:
        with running(backend):
            results[backend] = call()
    return results
