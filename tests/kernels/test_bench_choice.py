"""bench.kernels: the ways to choose tokens are right, and a wrong one is seen."""

from __future__ import annotations

import pytest
import torch

from bench.kernels import choice
from bench.kernels.cases import Choice
from bench.kernels.inputs import INPUTS
from bench.kernels.truth import error_of, truth
from bench.kernels.way import Unavailable, Way

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.mark.parametrize("way", choice.WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("sampled", [False, True])
def test_ways_are_right(way: Way, sampled: bool, device: torch.device) -> None:
    pytest.importorskip("triton")
    case = Choice(9, 1500, sampled)
    inputs = INPUTS["choice"](case, device)
    if sampled and way.name != "specengine":
        with pytest.raises(Unavailable):
            way.prepare(case, inputs)
        return
    wanted = truth(case, inputs)
    reached = way.result(case, way.prepare(case, inputs)())
    assert error_of(case, reached, wanted) == 0
    assert error_of(case, reached + (torch.arange(9, device=device) == 4), wanted) == 1
