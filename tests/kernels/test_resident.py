"""SPECENGINE_BACKEND=triton: the ops of resident cycles by the kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install 'specengine[kernels]'")
from specengine import ops
from tests.ops.resident_cases import CHECKS

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SERVED = ("choose_rows", "gather_rows", "hang_nodes", "move_rows", "select_candidates", "step_queues", "walk_down")


@pytest.fixture(autouse=True)
def _asked_for() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ops.VARIABLE, "triton")
        yield


@pytest.mark.parametrize("op", SERVED)
def test_twins(op: str) -> None:
    assert ops.backends(DEVICE)[op].name == "triton"
    for seed in (0, 1, 2, 3, 33, 65, 96, 101):
        CHECKS[op](seed, DEVICE)
