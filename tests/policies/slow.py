"""Tree policies over again, slowly: on paths in Python lists, with the arithmetic of float32."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st

from research.drafting import draft_tree
from specengine.ops.tree import TokenTree
from specengine.policies import TreePolicy
from specengine.records import Seconds
from tests.toy import CPU, Tables, ToyDrafter

Path = tuple[int, ...]
Layer = dict[Path, np.float32]  # path log-probability by tokens from the root, in order of creation

DRAFTS = st.fixed_dictionaries(
    {
        "vocabulary": st.sampled_from([2, 3, 5, 9]),
        "seed": st.integers(0, 100_000),
        "concentration": st.sampled_from([0.05, 0.3, 2.0]),
        "exact": st.sampled_from([0.0, 0.5, 1.0]),
    }
)


def drafter(
    vocabulary: int, seed: int, *, concentration: float = 0.3, exact: float = 0.0
) -> ToyDrafter:
    """A draft made of tables; its log-probabilities reach the policy as they are."""
    draft = ToyDrafter(
        Tables(vocabulary, seed, concentration=concentration, exact=exact), normalized=True
    )
    draft.begin([seed % vocabulary])
    return draft


def grow(policy: TreePolicy, draft: ToyDrafter) -> TokenTree:
    return draft_tree(0, draft, policy, Seconds(), CPU).tree


def paths(tree: TokenTree) -> Layer:
    """The tree's nodes as paths, the root's being empty."""
    return {
        tuple(tree.path_tokens(node)): score
        for node, score in enumerate(tree.path_log_probs.numpy())
    }


def layers(tree: TokenTree) -> list[Layer]:
    """The same by depth, the root's layer first."""
    found: list[Layer] = [{} for _ in range(int(tree.depths.max()) + 1)]
    for path, score in paths(tree).items():
        found[len(path)][path] = score
    return found


def children(draft: ToyDrafter, path: Path, score: np.float32) -> Iterator[tuple[Path, np.float32]]:
    """Yield all children with a probability, by token."""
    row = draft.tables.logits([*draft.tokens, 0, *path]).numpy()
    for token, edge in enumerate(row):
        if edge > -math.inf:
            yield (*path, token), np.float32(score + edge)


def ranked(draft: ToyDrafter, parents: Layer) -> list[tuple[Path, np.float32]]:
    """Return all children of a layer, best path first; of equals the earlier parent's, then the likelier token."""
    found = []
    for place, (path, score) in enumerate(parents.items()):
        row = draft.tables.logits([*draft.tokens, 0, *path]).numpy()
        found += [
            (-child, place, -row[name[-1]], name) for name, child in children(draft, path, score)
        ]
    return [(name, np.float32(-score)) for score, _, _, name in sorted(found)]


def best_value(draft: ToyDrafter, nodes: int, max_depth: int | None = None) -> float:
    """The largest sum of path probabilities of `nodes` drafted nodes: the most probable nodes of the infinite tree."""
    heap: list[tuple[float, Path]] = [(-0.0, ())]
    taken: list[float] = []
    while heap and len(taken) <= nodes:
        score, path = heapq.heappop(heap)
        taken.append(-score)
        if max_depth is None or len(path) < max_depth:
            for child, value in children(draft, path, np.float32(-score)):
                heapq.heappush(heap, (-float(value), child))
    return math.fsum(map(math.exp, taken[1:]))


def value(tree: TokenTree) -> float:
    """Expected accepted tokens if the draft's probabilities were the target's."""
    return math.fsum(tree.path_log_probs[1:].double().exp().tolist())


def options(**fields: Any) -> Any:
    return st.fixed_dictionaries(fields)
