"""Drafters around a draft that one answer asks for: coupled to its draws, guided by its grammar, origins noted."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specengine import ops
from specengine.drafters import Drafter, Wrapped
from specengine.ops import Free, Nodes, Step, TokenTree
from specengine.ops.select import COPIED, FREE, RECYCLED, ids_with

if TYPE_CHECKING:
    from specengine.request.grammars import Constraint


# ---- coupled


MEAN = 0.5772  # of the noise
# shares, of 0, 0.25, 0.5, 0.75 and 1, that let the default draft guess best
NOISE, NOISE_OF_TRUNCATED = 0.75, 0.5
MAX_SCALE = 1e4  # of the noise; no logit counts against more
MIN_REMAINDER = 1e-6  # chance that is always left to what was not proposed


class Coupled(Wrapped):
    """A drafter for sampled answers: the distributions of `drafter` given the noise of the draws.

    The target takes the largest of log p + g, where the noise g is a pure function of seed, position and token. A draft
    that adds the same noise to its own log q guesses the draw instead of the distribution: of two distributions that
    agree in a share of 1 - d the draws agree with a probability of at least (1 - d) / (1 + d), and always where q is p.
    The answer stays the one that plain decoding draws with that seed, as the tree has no say in any choice (Daliri et
    al. 2024, Coupling without Communication, and Drafter-Invariant Speculative Decoding, section 3).

    Log-probabilities become those of being drawn: softmax(z + s T g), s being `Traits.sharpness`. A greedy target takes
    the largest of logits that are off from the draft's by errors of some scale t, and z = logits / t are calibrated to
    that; one that draws at temperature T takes the largest of logits + T g, off by the same errors. Drafts are more
    often right with a part of that noise, `NOISE`, and with less where a truncation leaves unlikely tokens out, which
    the noise would raise. Where a row says only what part of the tokens is likely, the rest counts as one token of mean
    noise. Continuations that need no pass stay as they are: what is copied is mostly sure or wrong, and would be
    guessed worse by the noise.

    seed: int64 [1], 64 bits, and scale: float32 [1], of the noise, on the trees' device; length: of the text, the root
    included, there or on the host.
    """

    def __init__(
        self, drafter: Drafter, seed: Tensor, scale: Tensor, length: Callable[[], Tensor | int]
    ) -> None:
        super().__init__(drafter)
        self.about = drafter.about._replace(passes=True)  # type: ignore[misc]  # which alone know the noise
        self._seed, self._scale, self._length = seed, scale, length

    @staticmethod
    def scale(drafter: Drafter, temperature: float, *, truncated: bool) -> float:
        """Return the scale of the noise for this drafter's logits."""
        return min(
            (NOISE_OF_TRUNCATED if truncated else NOISE) * temperature * drafter.traits.sharpness,
            MAX_SCALE,
        )

    def changed(self, step: Step, tree: TokenTree, frontier: Nodes) -> Step:
        positions = tree.depths.index_select(0, frontier.ids) + self._length()
        further = step.further
        if further is not None:  # positions that follow each other
            behind = torch.arange(1, len(further) + 1, device=positions.device, dtype=torch.int64)
            further = self._guessed(further, step, positions + behind)
        return replace(step, logits=self._guessed(step.logits, step, positions), further=further)

    def _guessed(self, rows: Tensor, step: Step, positions: Tensor) -> Tensor:
        """Return rows of a step with the noise of their positions, int64 [rows]."""
        logits = ops.couple(rows, step.token_ids, positions, self._seed, self._scale)
        if step.normalized:
            rest = (1 - rows.float().exp().sum(1, keepdim=True)).clamp(min=MIN_REMAINDER)
            logits = logits - torch.logaddexp(
                logits.logsumexp(1, keepdim=True), rest.log() + self._scale * MEAN
            )
        return logits


# ---- guided


class Guided(Wrapped):
    """A drafter for constrained answers: `drafter`, corrected along each node's path.

    written: the tokens generated so far, the tree's root among them unless it is the prompt's last; it grows outside.
    Tokens that the grammar forces have probability 1, in a draft pass and, as `free`, without one.
    """

    def __init__(self, drafter: Drafter, constraint: "Constraint", written: list[int]) -> None:
        super().__init__(drafter)
        self.about = drafter.about._replace(passes=True)  # type: ignore[misc]  # which know what the grammar leaves
        self.constraint, self.written = constraint, written

    def free(self, tree: TokenTree, nodes: Nodes, most: int, least: float) -> Free | None:
        """Return the forced continuations of these nodes, and the drafter's free ones after them and other nodes."""
        size, proposals, ends = len(tree), Free([], [], [], [], []), []
        scores, parents, tokens = (
            values[:size].tolist() for values in (tree.path_log_probs, tree.parents, tree.tokens)
        )
        children = set(zip(parents, tokens, strict=True))
        for node in sorted(nodes.alive().tolist(), key=lambda node: -scores[node]):
            end = node
            if scores[node] >= least:
                for token in self.constraint.forced(self._path(tree, node))[
                    : most - len(proposals.tokens)
                ]:
                    if (end, token) in children:
                        break
                    proposals.append(end, token, 0.0, FREE, 0)
                    end = size + len(proposals.tokens) - 1
            ends.append(end)
        grown = tree
        if proposals.tokens:
            grown = tree.to(tree.device)
            grown.graft(proposals.parents, proposals.tokens, proposals.log_probs)
        room = most - len(proposals.tokens)
        if room:
            below = Nodes.of(torch.tensor(sorted(ends), dtype=torch.int64, device=tree.device))
            if (unchecked := self.inner.free(grown, below, room, least)) is not None:
                self._add_allowed(proposals, unchecked, grown)
        return proposals if proposals.tokens else None

    def _add_allowed(self, proposals: Free, unchecked: Free, tree: TokenTree) -> None:
        """Append the continuations that the grammar allows on their own path."""
        size, first = len(tree), len(tree) - len(proposals.tokens)
        added: dict[int, tuple[int, list[int]]] = {}  # their places and paths
        for entry, (parent, token) in enumerate(
            zip(unchecked.parents, unchecked.tokens, strict=True)
        ):
            if parent >= size and parent not in added:
                continue
            place, path = added.get(parent) or (parent, self._path(tree, parent))
            if self.constraint.allows(path, token):
                added[size + entry] = first + len(proposals.tokens), [*path, token]
                proposals.append(
                    place,
                    token,
                    unchecked.log_probs[entry],
                    unchecked.marks[entry],
                    unchecked.ranks[entry],
                )

    def changed(self, step: Step, tree: TokenTree, frontier: Nodes) -> Step:
        paths = [self._path(tree, node) for node in frontier.alive().tolist()]
        forced = [
            continuation[0] if (continuation := self.constraint.forced(path)) else None
            for path in paths
        ]
        ids = ids_with(step, []).cpu().numpy()
        new = sorted({token for token in forced if token is not None}.difference(ids.tolist()))
        columns = np.concatenate([ids, np.array(new, np.int64)])
        mask = np.ones((len(step.logits), len(columns)), bool)
        for row, (path, token) in enumerate(zip(paths, forced, strict=True)):
            mask[row] = (
                self.constraint.allowed(path)[columns] if token is None else columns == token
            )
        logits = torch.nn.functional.pad(step.logits.float(), (0, len(new)), value=-float("inf"))
        logits = logits.masked_fill(torch.from_numpy(~mask).to(logits.device), -float("inf"))
        marks = (
            step.marks if step.marks is None else torch.nn.functional.pad(step.marks, (0, len(new)))
        )
        sure = [row for row, token in enumerate(forced) if token is not None]
        if sure:
            marks = torch.zeros_like(logits, dtype=torch.uint8) if marks is None else marks.clone()
            marks[sure] = FREE
            logits[sure] = torch.where(
                torch.from_numpy(mask[sure]).to(logits.device), 0.0, -float("inf")
            )
        return Step(
            logits,
            ids_with(step, new) if new else step.token_ids,
            step.normalized,
            step.hidden,
            marks,
            conditioned=step.conditioned,
        )

    def _path(self, tree: TokenTree, node: int) -> list[int]:
        return [*self.written, *tree.path_tokens(node)]


# ---- origins


class Origins(Wrapped):
    """A drafter that notes the source of each node if it is `wanted`: draft, copies, recycled tokens, grammar.

    Synchronises with a device in each pass.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._forget()

    def around(self, drafter: Drafter) -> "Origins":
        """Return this, to grow trees from instead of `drafter`."""
        super().__init__(drafter)
        self._forget()
        return self

    def of(self, tree: TokenTree) -> list[str | None]:
        """Return the source of each node of the last tree, None for the root and nodes grown without this drafter.

        Below a node that was not drafted from, the distribution is that of the node of its depth that was (`ddtree`).
        """
        parents, depths = tree.parents.tolist(), tree.depths.tolist()
        by_depth = {depths[node]: node for node in self._passed if node < len(depths)}
        lenders = [
            by_depth.get(depths[parent], parent) if parent not in self._passed else parent
            for parent in parents
        ]
        sources = list(map(self._origin, parents, lenders, tree.tokens.tolist()))
        self._forget()
        return sources

    def free(self, tree: TokenTree, nodes: Nodes, most: int, least: float) -> Free | None:
        proposals = self.inner.free(tree, nodes, most, least)
        entries = zip(*proposals[:2], proposals.marks, strict=True) if proposals is not None else ()
        # in place of what a rule has only looked at
        self._free = {(parent, token): mark for parent, token, mark in entries}
        return proposals

    def changed(self, step: Step, tree: TokenTree, frontier: Nodes) -> Step:
        ids = frontier.alive().tolist()
        self._passed.update(ids)
        self._free = {}
        if step.marks is not None:
            rows, columns = (
                (step.marks[: len(ids)] > 0) & (step.logits[: len(ids)] > -math.inf)
            ).nonzero(as_tuple=True)
            tokens, marks = step.tokens_of(columns).tolist(), step.marks[rows, columns].tolist()
            for row, token, mark in zip(rows.tolist(), tokens, marks, strict=True):
                self._marks[ids[row], token] = mark
        return step

    def _forget(self) -> None:
        self._passed = set[int]()  # nodes that were drafted from
        self._marks = dict[tuple[int, int], int]()  # by parent and token
        self._free = dict[tuple[int, int], int]()

    def _origin(self, parent: int, lender: int, token: int) -> str | None:
        if parent < 0:
            return None
        mark = (
            self._free.get((parent, token))
            or self._marks.get((parent, token))
            or self._marks.get((lender, token))
        )
        if mark is None:
            return self.inner.about.origin if lender in self._passed else None
        return "copied" if mark & COPIED else "recycled" if mark & RECYCLED else "forced"
