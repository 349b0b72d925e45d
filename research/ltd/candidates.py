"""Candidate trees of a running engine, on disk, with the target's path through each of them.

A tree that the draft grew at a position accepts the tokens that the answer continues with, whichever nodes are
verified. So one answer determines what all trees along it would have accepted, and their nodes need not be verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specengine.cycle import walk
from specengine.engine import Engine
from specengine.errors import InputError, require_minimum
from specengine.ops import Nodes
from specengine.ops.tree import TokenTree
from specengine.policies.baselines.eagle import Eagle
from specengine.records import Cycle
from specengine.train.classifier.trees import MIN_PROMPT
from specengine.train.text.corpus import Contents, ShardFolder

Progress = Callable[[str], None]


@dataclass(frozen=True)
class CandidateOptions:
    """Options of logging trees.

    length             tokens of each answer, at most; one answer gives about length / acceptance length trees
    width, expansions  of the beam whose candidates are logged
    verified           nodes of each tree that are verified while the answer is made, the root included; with 1 there is
                       a tree at every position, so that any policy finds those that it would come to
    temperature, seed  of the answers; 0 is greedy
    """

    length: int = 96
    width: int = 10
    expansions: int = 12
    verified: int = 1
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_minimum(self, length=1, width=1, expansions=0, verified=1, temperature=0, seed=0)

    def generation(self) -> dict[str, Any]:
        """Return the options of each answer, which override the target's own."""
        asked: dict[str, Any] = {"max_new_tokens": self.length, "temperature": self.temperature}
        return asked | ({"seed": self.seed, "top_k": 0, "top_p": 1.0} if self.temperature else {})


class Candidates(NamedTuple):
    """One tree of m candidates, the root left out, in the order of their creation.

    scores   float32 [m], path log-probabilities by the draft, in nats
    depths   int64 [m], 1 for the root's children
    path     int64 [k], the candidates that the target accepts where all are verified, in the order of their depth
    context  tokens committed when it was grown, its root included
    """

    scores: Tensor
    depths: Tensor
    path: Tensor
    context: int


class CandidateTrees(ShardFolder):
    """Logged candidates, one shard per prompt."""

    FORMAT = 2  # in the first, an answer's last trees were not consecutive
    MANIFEST = "candidates.json"
    contents = Contents(
        "candidates", "logged candidates", "the candidates in {} were", "log the candidates"
    )

    def add(self, number: int, trees: Sequence[Candidates]) -> None:
        self.save(
            number,
            {
                "scores": torch.cat([tree.scores for tree in trees]),
                "depths": torch.cat([tree.depths for tree in trees]).to(torch.uint8),
                "path": torch.cat([tree.path for tree in trees]).to(torch.int32),
                "sizes": torch.tensor(
                    [len(tree.scores) for tree in trees], dtype=torch.int32, device="cpu"
                ),
                "lengths": torch.tensor(
                    [len(tree.path) for tree in trees], dtype=torch.int32, device="cpu"
                ),
                "contexts": torch.tensor(
                    [tree.context for tree in trees], dtype=torch.int32, device="cpu"
                ),
            },
        )

    def answers(self) -> Iterator[list[Candidates]]:
        """Yield the trees of each answer, in its order. InputError for a damaged shard."""
        for file in self.shards():
            yield self.load(file, _candidates)


def _candidates(tensors: dict[str, Tensor]) -> list[Candidates]:
    sizes, lengths = tensors["sizes"].tolist(), tensors["lengths"].tolist()
    scores, depths = tensors["scores"].split(sizes), tensors["depths"].long().split(sizes)
    paths = tensors["path"].long().split(lengths)
    parts = zip(scores, depths, paths, tensors["contexts"].tolist(), strict=True)
    return [Candidates(*part) for part in parts]


class RootAlone(Eagle):
    """EAGLE's beam, of which the root alone is verified. Its budget is not 1, as no such tree would be grown."""

    def keep(self, tree: TokenTree) -> Nodes:
        return tree.best_of_all(1)


def log_candidates(
    engine: Engine,
    prompts: Sequence[list[int]],
    folder: Path,
    options: CandidateOptions,
    *,
    name: str = "",
    progress: Progress = lambda line: None,
) -> CandidateTrees:
    """Let `engine` answer the prompts, and log the candidates of every cycle.

    prompts: checked token ids, two or more each; each is a shard, and one that is there is not answered again, so an
    interrupted call goes on where it stopped. An answer's trees end before the first that reaches beyond its end: what
    the target would accept of that is not known. name: of the target, as recorded. InputError without a draft.
    """
    if engine.drafter is None:
        raise InputError("draft: got none, but the candidates come from a draft")
    short = next(
        (number for number, prompt in enumerate(prompts, start=1) if len(prompt) < MIN_PROMPT), None
    )
    if short is not None or not prompts:
        raise InputError(f"prompts: number {short or 1} has fewer than {MIN_PROMPT} tokens")
    recorded = {"target": name, "draft": engine.drafter.name, **asdict(options)}
    trees = CandidateTrees.create(folder, recorded)
    kind = RootAlone if options.verified == 1 else Eagle
    beam = kind(options.width, options.expansions, max(options.verified, 2))
    growing = Engine(engine.target, engine.drafter, beam, engine.tokenizer)
    new, began = 0, time.perf_counter()
    for number, prompt in enumerate(prompts):
        if trees.shard(number).is_file():
            continue
        logged = list(_answer(growing, prompt, options))
        if logged:
            trees.add(number, logged)
            new += len(logged)
        rate = new / (time.perf_counter() - began)
        progress(f"{number + 1} of {len(prompts)} prompts, {new} trees, {rate:.1f} per second")
    return trees


def _answer(engine: Engine, prompt: list[int], options: CandidateOptions) -> Iterator[Candidates]:
    cycles = list(engine.answer(prompt, **options.generation()))
    answer = [token for cycle in cycles for token in cycle.tokens]
    place = 0
    for cycle in cycles:
        found = _accepted(cycle, answer[place:])
        if found is None:
            return  # a later tree that ends in time would leave a gap, and stand for those that do not
        grown = cycle.grown
        assert grown is not None, "an engine records it"
        scores, depths = grown.path_log_probs[1:].cpu(), grown.depths[1:].cpu()
        yield Candidates(
            scores,
            depths,
            torch.tensor(found, dtype=torch.int64, device="cpu") - 1,
            len(prompt) + place,
        )
        place += len(cycle.tokens)


def _accepted(cycle: Cycle, following: Sequence[int]) -> list[int] | None:
    """Return the nodes below the root that carry the tokens `following`; None if the tree may go on beyond them."""
    assert cycle.grown is not None, "an engine records it"
    tree, depths = cycle.grown, cycle.grown.depths.tolist()
    path, _ = walk(
        tree,
        lambda node: following[depths[node]] if depths[node] < len(following) else -1,
        lambda _: False,
    )
    return path[1:] if depths[path[-1]] < len(following) else None
