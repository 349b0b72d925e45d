"""Tests that every policy grows the recorded trees, greedy and sampled."""

from __future__ import annotations

import numpy as np
import pytest

from tests.golden.recorded_runs import FILE, Run, recorded, runs


@pytest.fixture(scope="module")
def known() -> dict[str, np.ndarray]:
    with np.load(FILE) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("run", list(runs()), ids=lambda run: run.name)
def test_cycles_are_those_recorded(run: Run, known: dict[str, np.ndarray]) -> None:
    found = recorded(run)
    for key in ("tokens", "cycles", "nodes"):
        assert np.array_equal(found[key], known[f"{run.name}: {key}"]), key
    assert np.allclose(found["log_probs"], known[f"{run.name}: log_probs"], rtol=0, atol=2e-6)


def test_a_changed_tree_is_seen(known: dict[str, np.ndarray]) -> None:
    found = recorded(Run("dense", "eagle/cpu", None))
    assert not np.array_equal(found["nodes"], known["dense, opt_tree/cpu, greedy: nodes"])
    assert not np.array_equal(found["nodes"], known["dense, eagle/cpu, sampled: nodes"])
