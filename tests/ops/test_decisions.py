"""beam_observation and best_action refuse what they cannot read; what they compute is tested with the policy ltd."""

import pytest
import torch

from specengine import ops
from specengine.errors import InputError

SCORES, DEPTHS = torch.tensor([0.0, -1.0, -2.0]), torch.tensor([0, 1, 1])
GIVEN = {"pad": -20.0, "shown": (0, 2), "room": 4, "facts": (0.5, 0.1), "repeats": 1}


def test_the_first_of_equal_outputs_is_taken() -> None:
    layers = [torch.zeros(3, 2), torch.tensor([1.0, 2.0, 2.0])]
    assert ops.best_action(torch.zeros(2), layers, "relu") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": SCORES.double()}, "scores, depths: float32"),
        ({"depths": DEPTHS[1:]}, "scores, depths: float32"),
        ({"shown": (3, 2)}, "shown, room, pad: an ascending pair"),
        ({"shown": (0, 5)}, "at most room apart"),
        ({"pad": 1.0}, "0 or less"),
    ],
)
def test_wrong_observations_are_refused(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ops.beam_observation(**{"scores": SCORES, "depths": DEPTHS, "width": 2, **GIVEN, **change})


def test_wrong_networks_are_refused() -> None:
    layers = [torch.zeros(3, 2), torch.zeros(3)]
    with pytest.raises(InputError, match="activation: got 'gelu', accepted relu, tanh"):
        ops.best_action(torch.zeros(2), layers, "gelu")
    with pytest.raises(InputError, match=r"observation: float32 \[2\] is needed"):
        ops.best_action(torch.zeros(3), layers, "relu")
