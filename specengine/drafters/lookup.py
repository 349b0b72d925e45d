"""A draft that also copies: its distributions mixed with what followed the same words before."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specengine import ops
from specengine.drafters import Drafter, Maker, Step
from specengine.drafters._suffixes import Suffixes
from specengine.modeling.load_options import LoadOptions
from specengine.ops import Nodes
from specengine.records import Cycle
from specengine.tree import TokenTree

# Share of positions at which a match of so many tokens was followed by the token that followed it before; of 0.7M
# tokens that the embedded model wrote. They stand until a text has shown its own.
PRIOR_HITS = (0.17, 0.45, 0.53, 0.65, 0.7, 0.74, 0.78, 0.93)
PRIOR_WEIGHT = 8.0  # matches that the prior counts for
MOST = 0.98  # of a row's probability that a match can take
MOST_FOLLOWERS = 8  # of a match, the commonest ones
UNSEEN = -20.0  # below a row's best logit: columns that only another row has a use for


class _Copy(NamedTuple):
    """A continuation of a row by copying: its target id, and the log-odds of copying it against the draft's say."""

    row: int
    token: int
    log_odds: float


class Lookup(Drafter):
    """`drafter`, whose distributions are mixed with the continuations of the longest suffix seen before.

    Where the last m tokens stood in the text before, p becomes (1 - w) p + w q: q are the shares of the tokens that
    followed, and w is how often matches of this length have been right in this generation so far. Tokens outside
    the draft's vocabulary get columns of their own. The distributions stay normalised, so every policy works on them
    as on the draft's own; where nothing matches they are the draft's own.

    The idea of copying is prompt lookup decoding (Saxena 2023); the mixture is that of pointer networks (Merity et
    al. 2017) with counted instead of learnt weights.
    """

    lookup = False

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.device = drafter.device
        self.name = f"{drafter.name} with lookup"
        self.features, self.successors = drafter.features, drafter.successors
        self.default_policy = drafter.default_policy  # type: ignore[misc]
        self._seen = Suffixes(1, len(PRIOR_HITS))
        self._hits: list[float] = []
        self._tries: list[float] = []
        self._ids: Tensor | None = None  # those that `_columns` is for
        self._columns: dict[int, int] = {}
        self._forget_hits()

    @classmethod
    def maker(cls, draft: Any, options: LoadOptions) -> Maker | None:
        """None: it is made of another draft."""
        return None

    @property
    def model_seconds(self) -> float:  # type: ignore[override]
        return self.drafter.model_seconds

    def cached(self, tokens: list[int]) -> int:
        return self.drafter.cached(tokens)

    def reserve(self, tokens: int, nodes: int, longest: int) -> None:
        self.drafter.reserve(tokens, nodes, longest)

    def begin(self, prompt: list[int], features: Tensor | None = None) -> None:
        self.drafter.begin(prompt, features)
        self._seen.become(prompt)
        self._forget_hits()

    def root(self, tree: TokenTree) -> Step:
        return self._with_copies(self.drafter.root(tree), tree, tree.root_alone())

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        return self._with_copies(self.drafter.step(tree, frontier), tree, frontier)

    def observe(self, cycle: Cycle) -> None:
        self.drafter.observe(cycle)
        for token in (int(cycle.tree.tokens[0]), *cycle.tokens[:-1]):
            match = next(self._seen.matches(self._seen.tokens[-self._seen.longest :]), None)
            if match is not None:
                length, followers = match
                self._tries[length - 1] += 1
                self._hits[length - 1] += followers.get(token, 0) / sum(followers.values())
            self._seen.extend([token])

    def reset(self) -> None:
        self.drafter.reset()
        self._seen.clear()
        self._forget_hits()

    @torch.inference_mode()
    def _with_copies(self, step: Step, tree: TokenTree, frontier: Nodes) -> Step:
        if step.normalized:  # a draft that proposes nothing or only what it has seen itself
            return step
        contexts = self._seen.contexts(tree, frontier.alive())
        copies = [copy for row, context in enumerate(contexts) for copy in self._copies(row, context)]
        return self._mixed(step, copies) if copies else step

    def _forget_hits(self) -> None:
        self._hits = [PRIOR_WEIGHT * share for share in PRIOR_HITS]
        self._tries = [PRIOR_WEIGHT] * len(PRIOR_HITS)

    def _copies(self, row: int, context: list[int]) -> list[_Copy]:
        """The continuations of `context` that were seen after its longest suffix, each with its odds."""
        match = next(self._seen.matches(context), None)
        if match is None:
            return []
        length, followers = match
        weight = min(self._hits[length - 1] / self._tries[length - 1], MOST)
        if weight <= 0:
            return []
        total, odds = sum(followers.values()), weight / (1 - weight)
        likeliest = heapq.nlargest(MOST_FOLLOWERS, followers.items(), key=itemgetter(1))
        return [_Copy(row, token, math.log(odds * count / total)) for token, count in likeliest]

    def _mixed(self, step: Step, copies: list[_Copy]) -> Step:
        """`step` with these continuations made likelier, each by its odds."""
        known, width, device = self._columns_of(step), step.logits.shape[1], step.logits.device
        unknown = dict.fromkeys(copy.token for copy in copies if copy.token not in known)
        new = {token: column for column, token in enumerate(unknown, width)}
        log_probs, best = ops.top_children(step.logits, 1)
        peaks = step.logits.gather(1, best)
        logits = torch.cat([step.logits, (peaks + UNSEEN).expand(-1, len(new))], 1)
        rows = torch.tensor([copy.row for copy in copies], device=device)
        columns = torch.tensor([new.get(copy.token, known.get(copy.token, 0)) for copy in copies], device=device)
        log_odds = torch.tensor([copy.log_odds for copy in copies], device=device)
        levels = peaks.float() - log_probs  # log-sum-exp of each row
        copied = levels[rows, 0] + log_odds
        logits[rows, columns] = torch.logaddexp(logits[rows, columns].float(), copied).to(logits.dtype)
        return replace(step, logits=logits, token_ids=_ids_with(step, list(new)))

    def _columns_of(self, step: Step) -> Mapping[int, int]:
        """The column of each target id that the draft has one for."""
        width, ids = step.logits.shape[1], step.token_ids
        if len(self._columns) != width or ids is not self._ids:
            self._ids = ids
            self._columns = {
                token: column for column, token in enumerate(range(width) if ids is None else ids.tolist())
            }
        return self._columns


def _ids_with(step: Step, new: list[int]) -> Tensor | None:
    """The target's ids of the step's columns and of new ones behind them."""
    if not new:
        return step.token_ids
    device = step.logits.device if step.token_ids is None else step.token_ids.device
    ids = torch.arange(step.logits.shape[1], device=device) if step.token_ids is None else step.token_ids
    return torch.cat([ids, torch.tensor(new, device=device)])
