"""Tests of which backend runs an op, and of the message if it is missing."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from specengine import ops
from specengine.errors import BackendError, InputError
from specengine.ops import _registry
from tests.ops.backends import BACKENDS, choose

pytestmark = pytest.mark.usefixtures("backend")


def test_fresh_buffers_are_poisoned():
    assert torch.empty(4).isnan().all()


class TestBackends:
    def test_the_variable_decides(self, backend):
        taken = ops.backends("cpu")
        assert set(taken) == set(ops.OPS)
        assert set(taken) >= {
            "ancestor_words",
            "select_best",
            "step_queues",
            "walk",
            "tree_attention",
        }
        assert taken["top_children"].name == backend
        assert "reference" in taken["top_children"].available

    def test_an_op_that_the_backend_lacks_falls_back_and_says_so(self, backend):
        attention = ops.backends("cpu")["tree_attention"]
        assert attention.name == "reference"
        if backend == "cpp":
            assert "cpp has no tree_attention" in attention.reason

    def test_within_its_meaning_no_backend_runs_an_op(self, monkeypatch):
        """In this thread alone, also where it is asked for inside, and only so long."""
        ran = []
        monkeypatch.setattr(
            _registry, "_loaded", lambda key: {"tree_mask": lambda *given: ran.append(key) or [7]}
        )
        choose(monkeypatch, "cpp")
        words = torch.tensor([[1]])
        assert ops.by_meaning(ops.tree_mask, words, 1).tolist() == [[True]]
        with ops.meaning():
            with ops.meaning():
                assert ops.tree_mask(words, 1).tolist() == [[True]]
            assert ops.tree_mask(words, 1).tolist() == [[True]]
            with ThreadPoolExecutor() as other:
                assert other.submit(ops.tree_mask, words, 1).result() == [7]
        assert ops.tree_mask(words, 1) == [7]
        with pytest.raises(InputError), ops.meaning():
            ops.tree_mask(words.int(), 1)
        assert ops.tree_mask(words, 1) == [7]
        assert ran == ["cpp"] * 3

    def test_devices_that_the_backend_does_not_serve(self, monkeypatch):
        choose(monkeypatch, "auto")
        on_another = ops.backends("meta")["walk"]
        assert on_another.name == "reference"
        assert on_another.reason == "first choice on meta"

    @pytest.mark.parametrize("asked", ["", "auto"])
    def test_auto_takes_the_extension(self, monkeypatch, asked):
        choose(monkeypatch, asked)
        assert ops.backends("cpu")["walk"].name == ("cpp" if "cpp" in BACKENDS else "reference")

    def test_unknown_name(self, monkeypatch):
        choose(monkeypatch, "fast")
        with pytest.raises(
            BackendError,
            match="SPECENGINE_BACKEND=fast: unknown, accepted: auto, cpp, triton, cuda, reference",
        ):
            ops.tree_mask(torch.tensor([[1]]), 1)

    @pytest.mark.slow
    @pytest.mark.parametrize("backend", ["reference"], indirect=True)
    def test_a_backend_that_is_not_built(self):
        """Without the extension: auto carries on and says why, asking for it raises and names the build command."""
        program = (
            "import sys; sys.modules['specengine._ops'] = None\n"
            "import torch\n"
            "from specengine import ops\n"
            "print(ops.tree_mask(torch.tensor([[1]]), 1), ops.backends('cpu')['walk'])\n"
            "import os; os.environ[ops.VARIABLE] = 'cpp'; ops.bind()\n"
            "ops.tree_mask(torch.tensor([[1]]), 1)\n"
        )
        environment = {name: value for name, value in os.environ.items() if name != ops.VARIABLE}
        run = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment
        )
        assert "tensor([[True]]) Backend(name='reference', reason='cpp is not built" in run.stdout
        assert run.returncode == 1
        assert "BackendError: SPECENGINE_BACKEND=cpp: cpp is not built" in run.stderr
        assert "pip install -e ." in run.stderr
