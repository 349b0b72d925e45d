"""The cycles of every policy over toy tables, as arrays; `python -m tests.golden.recorded_runs [POLICY ...]` records.

Recorded before rules were rewritten, compared after it: the same trees, answers and counters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specengine import Engine, policies
from specengine.policies import TreePolicy
from tests.toy import POLICIES, Tables, ToyDrafter, ToyTarget, policy_for

FILE = Path(__file__).parent / "cycles.npz"
TOKENS = 60
PRESETS = {"cpu": [name for name in policies.presets() if name.endswith("/cpu")]}


class Run(NamedTuple):
    """world: dense distributions over a softmax, or sparse ones of a smaller vocabulary; policy: as for `policy_of`."""

    world: str
    policy: str
    seed: int | None  # None is greedy

    @property
    def name(self) -> str:
        return f"{self.world}, {self.policy}, {'greedy' if self.seed is None else 'sampled'}"


def runs() -> Iterator[Run]:
    for seed in (None, 3):
        for policy in POLICIES:
            yield Run("dense", policy, seed)
            yield Run("sparse", policy, seed)
        for policy in PRESETS["cpu"]:
            if policy != "specdecpp/cpu" and not policies.make(policy).plan().reads_costs:
                yield Run("dense", policy, seed)


def policy_of(name: str) -> TreePolicy:
    """Return one of POLICIES, small, or a preset."""
    return policies.make(name) if "/" in name else policy_for(name, 5)


def engine_of(run: Run) -> Engine:
    if run.world == "dense":
        target = Tables(48, seed=1, concentration=0.2, order=2)
        draft = ToyDrafter(Tables(48, seed=2, concentration=0.2, order=2, like=target, share=0.8))
    else:
        target = Tables(14, seed=3, exact=0.3, order=3)
        tables = Tables(14, seed=4, exact=0.3, order=3, like=target, share=0.7)
        draft = ToyDrafter(tables, columns=[5, 0, 13, 2, 9, 7, 11, 1, 4, 3], normalized=True)
    return Engine(ToyTarget(target), draft, policy_of(run.policy))


def recorded(run: Run) -> dict[str, np.ndarray]:
    """By cycle: nodes verified and drafted, passes, nodes accepted; by node: token, parent, edge; the answer."""
    options = {} if run.seed is None else {"temperature": 1.0, "seed": run.seed}
    stream = engine_of(run).stream([1, 2, 3, 4], max_new_tokens=TOKENS, **options)
    cycles = [piece.cycle for piece in stream]
    trees = [cycle.tree for cycle in cycles]
    return {
        "cycles": np.array(
            [[len(c.tree), c.drafted, int(c.tree.passes), c.accepted] for c in cycles], np.int16
        ),
        "nodes": np.concatenate(
            [np.stack([t.tokens.numpy(), t.parents.numpy()]) for t in trees], 1
        ).astype(np.int16),
        "log_probs": np.concatenate([t.log_probs.numpy() for t in trees]),
        "tokens": np.array(stream.result.token_ids, np.int16),
    }


def main(names: list[str]) -> None:
    """Record the runs of these policies, or all; the others stay."""
    with np.load(FILE) as known:
        arrays = dict(known) if names else {}
    chosen = [run for run in runs() if not names or run.policy in names]
    arrays |= {
        f"{run.name}: {key}": values for run in chosen for key, values in recorded(run).items()
    }
    np.savez_compressed(FILE, **arrays)  # type: ignore[arg-type]
    nodes = sum(values.shape[1] for key, values in arrays.items() if key.endswith(": nodes"))
    print(f"{len(arrays) // 4} runs, {nodes} nodes, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
