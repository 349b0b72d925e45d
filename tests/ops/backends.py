"""The backends of this machine, and helpers that run an op with one or each of them."""

import os
from contextlib import contextmanager

import pytest

from specengine import ops

BACKENDS = ops.backends("cpu")["step_queues"].available

each_backend = pytest.mark.parametrize("backend", ["cpp", "reference"], indirect=True)


class _Environment(dict):
    """The environment, whose change binds ops anew."""

    def get(self, name, default=None):
        return os.environ.get(name, default)

    def __setitem__(self, name, value):
        os.environ[name] = value
        ops.bind()

    def __delitem__(self, name):
        del os.environ[name]
        ops.bind()


def choose(patch, backends):
    """Run ops by these backends until the patch is undone."""
    patch.setitem(_Environment(), ops.VARIABLE, backends)


@contextmanager
def running(backend):
    if backend not in BACKENDS:
        pytest.skip("specengine._ops is not built (pip install -e .)")
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, backend)
        yield


def of_each(call):
    """Return the result of `call` by name of the backend, for each backend."""
    results = {}
    for backend in BACKENDS:
        with running(backend):
            results[backend] = call()
    return results
