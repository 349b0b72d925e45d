"""A captured cycle launches no more kernels than launches.json says; fewer are written there by launches.py --write."""

from __future__ import annotations

import json

import pytest
import torch

from tests.graphs import launches

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
]
KNOWN = json.loads(launches.TABLE.read_text())


@pytest.mark.parametrize("way", launches.WAYS)
def test_launches_are_those_of_the_table(way: str) -> None:
    found = launches.table(launches.WAYS[way], ("eagle", "talon"))
    assert found == {name: KNOWN[way][name] for name in found}
