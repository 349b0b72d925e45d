"""One cycle on the device: drafting, verification, walk and commit as three functions that a graph can capture.

`root` runs the accepted tokens through the draft and grows the first level, `level` every other one, `verify` runs the
target, walks down the tree, commits and leaves a record. All that changes from cycle to cycle stands in device memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specengine import ops
from specengine.cuda_graphs import RowBuffer, bucket, causal_words, words_for
from specengine.drafters import Step
from specengine.drafters._passes import CapturedDraft
from specengine.ops import Nodes, own_bits
from specengine.policies import TreePolicy
from specengine.targets.captured import CapturedTarget
from specengine.tree import TokenTree, overfull

NUMBERS = 7  # of a record, before its lists


class Record(NamedTuple):
    """What the host learns of a cycle. length: tokens committed before it, the root excluded; accepted: nodes
    with the root, 0 where the target gave no token; tokens, path: as in Cycle; grown: nodes drafted with the root;
    tree: what was verified."""

    length: int
    accepted: int
    tokens: list[int]
    path: list[int]
    grown: int
    tree: TokenTree


@dataclass
class State:
    """Of the sequence, on the device: `length`, committed tokens without the root; `root`; `committed`, the tokens of
    the last cycle with the root last, `taken` of them; `used`, scratch slots of the tree."""

    length: Tensor
    root: Tensor
    committed: Tensor
    taken: Tensor
    used: Tensor
    seed: Tensor
    temperature: Tensor

    @classmethod
    def on(cls, device: torch.device, longest: int) -> State:
        def whole(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        length, taken, used = (whole(1, torch.int32) for _ in range(3))
        committed, temperature = whole(longest, torch.int64), torch.ones(1, device=device)
        return cls(length, whole(1, torch.int64), committed, taken, used, whole(1, torch.int64), temperature)


class NoDraft:
    """What plain decoding has instead of a draft."""

    ahead, spare, drafted, captured_ids, captured_states = 0, 0, 0, None, None
    captured_reads: tuple[Tensor, ...] = ()
    captured_weights: tuple[torch.nn.Module, ...] = ()

    def reserve(self, tokens: int, nodes: int) -> None: ...

    def captured_pass(self, rows: RowBuffer, tokens: Tensor, positions: Tensor, words: Tensor, **where: Any) -> Tensor:
        raise NotImplementedError("plain decoding has no draft passes")

    def captured_accept(self, features: Tensor | None, path: Tensor) -> None: ...

    def captured_start(self, root: int) -> list[int]:
        return [root]

    def captured_end(self, tokens: list[int], drafted: int) -> None: ...


class CapturedCycle:
    """The cycles of one target, draft and policy; without the last two they decode plainly.

    sampled: whether the target's choices are drawn, by the state's seed and temperature; passes: draft passes per tree,
    at most.
    """

    def __init__(self, target: CapturedTarget, drafter: CapturedDraft | None, policy: TreePolicy | None) -> None:
        self.target, self.sampled = target, False
        self.drafter: CapturedDraft = NoDraft() if drafter is None else drafter
        self.policy, self.passes, rows = policy, 0, 1
        if policy is not None:
            self.passes, rows = policy.passes, policy.rows
        device = target.device
        self.tree = TokenTree(1 if policy is None else policy.capacity, device)
        self.budget = 1 if policy is None else min(policy.budget, policy.capacity)
        longest = bucket(self.passes + 1)
        self.state = State.on(device, longest)
        self._accepted = RowBuffer(longest, 1, device)
        self._causal = causal_words(longest).to(device)
        scratch = max(1, min(self.tree.capacity, (self.passes - 1) * rows))
        self._drafted = RowBuffer(bucket(rows), words_for(scratch), device)
        self._slots = own_bits(scratch, device)
        nodes = self.tree.capacity + 1  # and a spare one, for padding
        self._seen = torch.zeros(nodes, words_for(scratch), dtype=torch.int64, device=device)  # slots, by node
        self.verified = RowBuffer(target.padded_rows(self.budget), words_for(self.budget), device)
        self.frontier = Nodes(
            *(torch.zeros(n, dtype=t, device=device) for n, t in ((rows, torch.int64), (1, torch.int32)))
        )
        self._root_alone = Nodes(torch.zeros(1, dtype=torch.int64, device=device), torch.ones_like(self.frontier.live))
        size = NUMBERS + 2 * longest + 5 * self.budget
        self.record = torch.zeros(size, dtype=torch.int64, device=device)

    def root(self) -> None:
        """The tokens committed last through the draft, then the first level of a new tree."""
        state, rows, place = self.state, self._accepted, self._place(self._accepted.rows)
        start = state.length + self.drafter.ahead - state.taken
        last = place == state.taken - 1
        spare = self.drafter.spare
        logits = self.drafter.captured_pass(
            rows,
            state.committed,
            start + place,
            self._causal,
            slot=start,
            prefix=start,
            live=state.taken,
            seen=state.taken,
            sources=place + (spare + 1),
            targets=(~last).long() * spare,
        )
        state.used.zero_()
        self.tree.size.fill_(1)
        self.tree.passes.fill_(1)
        self.tree.overflow.zero_()
        self._grow(self._root_alone, logits.index_select(0, (state.taken.long() - 1).clamp(min=0)))

    def level(self) -> None:
        """One draft pass from the frontier, and the next level; nothing where the frontier is empty."""
        state, tree, count = self.state, self.tree, self.frontier.live
        nodes = self.frontier.ids.masked_fill(self.frontier.padding(), 0)
        place = self._place(len(nodes))
        parents = tree.parents.index_select(0, nodes).clamp(min=0)
        slots = (state.used + place).clamp(max=len(self._slots) - 1)
        words = self._seen.index_select(0, parents) | self._slots.index_select(0, slots)
        self._seen.index_copy_(0, nodes.masked_fill(place >= count, tree.capacity), words)
        stable = state.length + self.drafter.ahead
        logits = self.drafter.captured_pass(
            self._drafted,
            tree.tokens.index_select(0, nodes),
            tree.depths.index_select(0, nodes) + (stable - 1),
            words,
            slot=stable + state.used,
            prefix=stable,
            live=count,
            seen=state.used + count,
            sources=parents,
            targets=nodes,
        )
        state.used.add_(count)
        tree.passes.add_(count > 0)
        self._grow(Nodes(nodes, count), logits[: len(nodes)])

    def verify(self) -> None:
        """The target's forward over the tree, the walk down, the commit in both caches, and the record."""
        state, tree, rows = self.state, self.tree, self.verified
        nodes, count = self._kept()
        parents, words = ops.subtree(tree.parents, tree.ancestors, nodes, count)
        tokens, depths = (array.index_select(0, nodes) for array in (tree.tokens, tree.depths))
        length = state.length
        rows.write(tokens, depths + length, words, slot=length, prefix=length, live=count, seen=count)
        logits, features = self.target.padded(rows)
        seed = state.seed if self.sampled else None
        chosen = ops.choose_tokens(logits[: self.budget], depths + (length + 1), seed, state.temperature)
        walked = ops.walk(tokens, parents, chosen, count)
        path = pad_to(walked.nodes, len(state.committed))
        ops.compact_kv(self.target.cache.slab, path, walked.live, length)
        self.drafter.captured_accept(features, path)
        inner = self._place(len(path)) < walked.live - 1
        root = walked.bonus.clamp(min=0)  # a cycle may be under way before the host sees that there is none
        state.committed.copy_(torch.where(inner, tokens.index_select(0, path.roll(-1)), root))
        counts = torch.cat([walked.live, tree.size, count, tree.passes, length, tree.overflow]).long()
        sums = (array.index_select(0, nodes).view(torch.int32) for array in (tree.log_probs, tree.path_log_probs))
        self.record.copy_(torch.cat([counts, walked.bonus, state.committed, path, tokens, parents, depths, *sums]))
        length.add_(walked.live)
        state.taken.copy_(walked.live)
        self.start(root)

    def start(self, root: Tensor) -> None:
        """A new tree under this token, int64 [1]."""
        self.state.root.copy_(root)
        self.tree.tokens[:1].copy_(root)

    def _grow(self, frontier: Nodes, logits: Tensor) -> None:
        assert self.policy is not None
        states = self.drafter.captured_states if self.policy.reads_hidden else None
        hidden = None if states is None else states(frontier.ids)
        step = Step(logits, self.drafter.captured_ids, hidden=hidden)
        found = self.policy.grow(self.tree, frontier, step)
        width = min(len(found.ids), len(self.frontier.ids))
        self.frontier.ids[:width].copy_(found.ids[:width])
        self.frontier.live.copy_(found.live)

    def _kept(self) -> Nodes:
        """What is verified, `budget` wide."""
        if self.policy is None:
            return self._root_alone
        ids, live = self.policy.keep(self.tree)
        return Nodes(pad_to(ids, self.budget), live)

    def _place(self, count: int) -> Tensor:
        return torch.arange(count, device=self.target.device)

    def read(self, values: Tensor) -> Record:
        """A record that has been copied to the host."""
        longest = len(self.state.committed)
        numbers, committed, path, *arrays = values.split([NUMBERS, longest, longest, *[self.budget] * 5])
        count, grown, kept, passes, length, overflow, _ = numbers.tolist()
        if overflow:
            raise overfull(self.tree.capacity, grown)
        tokens, parents, depths, *sums = (array[:kept].clone() for array in arrays)
        edges, paths = (bits.int().view(torch.float32) for bits in sums)
        tree = TokenTree.of(tokens, parents, depths, edges, paths, passes)
        return Record(length, count, committed[:count].tolist(), path[:count].tolist(), grown, tree)


def pad_to(values: Tensor, size: int) -> Tensor:
    """The first `size` values, filled up with 0."""
    return torch.nn.functional.pad(values[:size], (0, max(0, size - len(values))))
