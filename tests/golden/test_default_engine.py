"""The default engine drafts, verifies and commits to the bit what was recorded, native and by transformers' modules."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.golden import default_engine
from tests.golden.default_engine import (
    BACKENDS,
    FILE,
    INSTRUCTIONS,
    PROMPTS,
    PROVENANCE,
    RUNS,
    ULPS,
    Arrays,
    differences,
)


@pytest.fixture
def known() -> Arrays:
    return default_engine.load()


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason=f"this machine has no {INSTRUCTIONS}",
)
def test_the_default_engine_is_bit_for_bit_as_recorded(default_model_path: Path) -> None:
    assert default_engine.compared() == []


def test_trees_of_all_runs_are_in_the_file(known: Arrays) -> None:
    for run in RUNS:
        cycles = known[f"{run.name}: cycles"]
        assert set(cycles[:, 0].tolist()) == set(range(len(PROMPTS)))
        assert known[f"{run.name}: nodes"].shape[1] == cycles[:, 1].sum()
        if "plain" not in run.policy:
            assert cycles[:, 1].max() > 8
            assert cycles[:, 4].max() > 1
            assert len(known[f"{run.name}: log_probs"]) == cycles[:, 1].sum()
    assert FILE.stat().st_size < 300_000
    assert len(json.loads(PROVENANCE.read_text())["prompts"]) == len(PROMPTS)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
@pytest.mark.parametrize("key", ["cycles", "nodes", "log_probs", "path", "tokens"])
def test_one_changed_bit_is_seen(key: str, run: default_engine.Run, known: Arrays) -> None:
    name = f"{run.name}: {key}"
    changed = known[name].copy()
    changed.reshape(-1)[changed.size // 2] ^= 1
    lines = differences(known | {name: changed}, known, same_machine=True)
    assert len(lines) == 1
    assert lines[0].startswith(f"{name}: 1 of {changed.size} differ")


def test_a_missing_node_is_seen(known: Arrays) -> None:
    name = "native, auto: nodes"
    assert differences(known | {name: known[name][:, :-1]}, known, same_machine=True)
    assert differences(
        {key: values for key, values in known.items() if key != name}, known, same_machine=True
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_another_machine_only_last_places_of_log_probabilities_may_differ(
    backend: str, known: Arrays
) -> None:
    name = f"{backend}, auto: log_probs"
    changed = known[name].copy()
    changed[-1] ^= 1
    assert not differences(known | {name: changed}, known, same_machine=False)
    changed[-1] += 2 * ULPS
    assert bool(differences(known | {name: changed}, known, same_machine=False)) == (
        backend == "native"
    )
    far = (known[name].view(np.float32) + np.float32(1e-3)).view(np.int32)
    assert differences(known | {name: far}, known, same_machine=False)
    other = f"{backend}, auto: nodes"
    tokens = known[other].copy()
    tokens[0, -1] ^= 1
    assert differences(known | {other: tokens}, known, same_machine=False)
