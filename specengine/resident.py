"""Cycles that stay on the device: drafting, verification and commit as graphs, with one read by the host, a cycle late.

Three functions, each captured once, make a cycle: `root` runs the accepted tokens through the draft and grows the first
level, `level` every other one, `verify` runs the target, walks down the tree and commits. All that changes from cycle
to cycle stands in device memory. What the host wants to know is one record of a few kilobytes, which it reads while
the next cycle runs; a cycle begun behind the end of an answer is forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from specengine import ops
from specengine.cycle import Cycle, Seconds
from specengine.device_tree import DeviceTree
from specengine.drafters._captured import MOST_ROWS, CapturedEagle, CapturedSmallModel
from specengine.errors import InputError
from specengine.graphs import WARM_UPS, Graphs, RowBuffer, bucket, causal_words, words_for
from specengine.policies import TreePolicy
from specengine.policies._levels import Levels, NoLevels
from specengine.reference import own_bits
from specengine.sampling import Sampler, refuse_no_choice
from specengine.targets.captured import CapturedTarget
from specengine.tree import TokenTree

NOTE = "graphs: after the first, cycles stayed on the device; their times are not split into parts"
LOOPS = ("read", "ahead", "while")
NUMBERS = 6  # of a record, before its lists


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
    the last cycle with the root last, `taken` of them; `level`, draft passes, and `used`, scratch slots of the tree."""

    length: Tensor
    root: Tensor
    committed: Tensor
    taken: Tensor
    level: Tensor
    used: Tensor
    seed: Tensor
    temperature: Tensor

    @classmethod
    def on(cls, device: torch.device, longest: int) -> State:
        def whole(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        numbers = [whole(1, torch.int32) for _ in range(4)]
        length, taken, level, used = numbers
        committed, heat = whole(longest, torch.int64), torch.ones(1, device=device)
        return cls(length, whole(1, torch.int64), committed, taken, level, used, whole(1, torch.int64), heat)


def why_not(target: Any, drafter: Any, policy: TreePolicy | None) -> str:
    """Why these do not run as resident cycles; empty where they do."""
    if not isinstance(target, CapturedTarget):
        return "the target is not captured in graphs"
    if policy is None:
        return ""
    if not isinstance(drafter, CapturedEagle | CapturedSmallModel):
        return f"{drafter.name} does not draft on the device"
    levels = policy.levels()
    if levels is None:
        return f"{type(policy).__name__.lower()} grows its trees on the host"
    if max(levels.width, levels.passes + 1) > MOST_ROWS:
        return f"its trees are wider or deeper than the {MOST_ROWS} rows of a pass"
    return ""


def for_parts(target: Any, drafter: Any, policy: TreePolicy | None, loop: str) -> Resident | None:
    """The resident cycles of an engine of these parts, None where its trees grow on the host.

    loop: `auto`, `host` or one of LOOPS; InputError where one of these is asked for and cannot be had.
    """
    if loop not in ("auto", "host", *LOOPS):
        raise InputError(f"loop: got {loop!r}, accepted auto, host, {', '.join(LOOPS)}")
    if loop == "host":
        return None
    reason = why_not(target, drafter, policy)
    if reason and loop != "auto":
        raise InputError(f"loop: got {loop!r}, but {reason}; accepted auto, host")
    return None if reason else Resident(target, drafter, policy, "read" if loop == "auto" else loop)


class NoDraft:
    """What plain decoding has instead of a draft."""

    ahead, spare, drafted, resident_ids = 0, 0, 0, None
    resident_reads: tuple[Tensor, ...] = ()
    resident_weights: tuple[torch.nn.Module, ...] = ()

    def reserve(self, tokens: int, nodes: int) -> None: ...

    def resident_accept(self, features: Tensor | None, path: Tensor) -> None: ...

    def resident_start(self, root: int) -> list[int]:
        return [root]

    def resident_end(self, tokens: list[int], drafted: int) -> None: ...


class Resident:
    """The cycles of one engine; without a draft and a policy they decode plainly.

    loop: how the end of a tree's growth is seen where a policy may end it early

    read   the host reads after each level whether there is another one
    ahead  it reads while the next level runs already; a level too many changes nothing
    while  the whole cycle is one graph with a conditional loop (csrc/graph.cu); needs the CUDA library, and is `read`
           without a CUDA device
    """

    def __init__(
        self,
        target: CapturedTarget,
        drafter: CapturedEagle | CapturedSmallModel | None,
        policy: TreePolicy | None,
        loop: str,
    ) -> None:
        self.target, self.loop = target, loop
        self.drafter: Any = NoDraft() if drafter is None else drafter
        self.levels: Levels = NoLevels() if policy is None else cast(Levels, policy.levels())
        self.levels.states = getattr(self.drafter, "resident_states", None)
        device, levels = target.device, self.levels
        self.graphs = Graphs(device)
        self.tree = DeviceTree(1 if policy is None else policy.capacity, device)
        self.budget = 1 if policy is None else min(policy.budget, policy.capacity)
        longest = bucket(levels.passes + 1)
        self.state = State.on(device, longest)
        self._accepted = RowBuffer(longest, 1, device)
        self._causal = causal_words(longest).to(device)
        scratch = max(1, min(self.tree.capacity, (levels.passes - 1) * levels.width))
        self._drafted = RowBuffer(bucket(levels.width), words_for(scratch), device)
        self._slots = own_bits(scratch, device)
        nodes = self.tree.capacity + 1  # and a spare one, for padding
        self._seen = torch.zeros(nodes, words_for(scratch), dtype=torch.int64, device=device)  # slots, by node
        self._verified = RowBuffer(target.padded_rows(self.budget), words_for(self.budget), device)
        self._frontier = _frontier(levels.width, device)
        self._root_alone = _frontier(1, device)
        self._root_alone.live.fill_(1)
        pinned = device.type == "cuda"
        size = NUMBERS + 2 * longest + 5 * self.budget
        self._record = torch.zeros(size, dtype=torch.int64, device=device)
        self._records = [torch.zeros(size, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._flags = [torch.zeros(1, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._sampled = False
        self._loops: dict[bool, tuple[tuple[Any, ...], Any]] = {}

    # ---- a cycle, on the device

    def root(self) -> None:
        """The tokens committed last through the draft, then the first level of a new tree."""
        state, rows, place = self.state, self._accepted, self._place(self._accepted.rows)
        start = state.length + self.drafter.ahead - state.taken
        last = place == state.taken - 1
        spare = self.drafter.spare
        logits = self.drafter.resident_pass(
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
        state.level.fill_(1)
        self._grow(self._root_alone, logits.index_select(0, (state.taken.long() - 1).clamp(min=0)))

    def level(self) -> None:
        """One draft pass from the frontier, and the next level; nothing where the frontier is empty."""
        state, tree, frontier = self.state, self.tree, self._frontier
        nodes, count = frontier.nodes, frontier.live
        place = self._place(len(nodes))
        parents = tree.parents.index_select(0, nodes).clamp(min=0)
        slots = (state.used + place).clamp(max=len(self._slots) - 1)
        words = self._seen.index_select(0, parents) | self._slots.index_select(0, slots)
        self._seen.index_copy_(0, nodes.masked_fill(place >= count, tree.capacity), words)
        stable = state.length + self.drafter.ahead
        logits = self.drafter.resident_pass(
            self._drafted,
            tree.tokens.index_select(0, nodes),
            frontier.depths + (stable - 1),
            words,
            slot=stable + state.used,
            prefix=stable,
            live=count,
            seen=state.used + count,
            sources=parents,
            targets=nodes,
        )
        state.used.add_(count)
        state.level.add_(count > 0)
        self._grow(frontier, logits[: len(nodes)])

    def verify(self) -> None:
        """The target's forward over the tree, the walk down, the commit in both caches, and the record."""
        state, tree, rows = self.state, self.tree, self._verified
        self.levels.finish(tree)
        if self.budget < tree.capacity:
            nodes, count = tree.best(self.budget)
            parents, words = ops.take_subtree(tree.parents, tree.ancestors, nodes, count)
        else:
            nodes, count, parents, words = self._place(tree.capacity), tree.size, tree.parents, tree.ancestors
        tokens, depths = (array.index_select(0, nodes) for array in (tree.tokens, tree.depths))
        length = state.length
        rows.write(tokens, depths + length, words, slot=length, prefix=length, live=count, seen=count)
        logits, features = self.target.padded(rows)
        seed = state.seed if self._sampled else None
        chosen = ops.choose_rows(logits[: self.budget], depths + (length + 1), seed, state.temperature)
        walked = ops.walk_down(tokens, parents, chosen, count)
        path = pad_to(walked.nodes, len(state.committed))
        ops.move_rows(self.target.cache.slab, path, walked.live, length)
        self.drafter.resident_accept(features, path)
        inner = self._place(len(path)) < walked.live - 1
        root = walked.bonus.clamp(min=0)  # a cycle may be under way before the host sees that there is none
        state.committed.copy_(torch.where(inner, tokens.index_select(0, path.roll(-1)), root))
        numbers = (walked.live.long(), walked.bonus, tree.size.long(), count.long(), state.level.long(), length.long())
        sums = (array.index_select(0, nodes).view(torch.int32) for array in (tree.log_probs, tree.path_log_probs))
        self._record.copy_(torch.cat([*numbers, state.committed, path, tokens, parents, depths, *sums]))
        length.add_(walked.live)
        state.taken.copy_(walked.live)
        self._start(root)

    def _start(self, root: Tensor) -> None:
        """A new tree under this token, int64 [1]."""
        self.state.root.copy_(root)
        self.state.level.fill_(0)
        self.state.used.fill_(0)
        self.tree.start(root)

    def _grow(self, frontier: ops.Frontier, logits: Tensor) -> None:
        ids = self.drafter.resident_ids
        found = self.levels.grow(self.tree, frontier, logits, ids, self.state.level)
        for into, values in zip(self._frontier, found, strict=True):
            into.copy_(values)

    def _place(self, count: int) -> Tensor:
        return torch.arange(count, device=self.target.device)

    # ---- a cycle, as the host starts it

    def launch(self) -> None:
        """Start one cycle."""
        if self._is_one_graph:
            self._whole_cycle().launch()
            return
        reads = self._reads()
        if self.levels.passes:
            self._run("root", reads)
        levels = self.levels.passes - 1
        if not self.levels.ends_early:
            for _ in range(levels):
                self._run("level", reads)
        elif self.loop == "ahead":
            self._run_ahead(reads, levels)
        else:
            for _ in range(levels):
                if not int(self._frontier.live):
                    break
                self._run("level", reads)
        self._run("verify", reads)

    def _run_ahead(self, reads: tuple[Tensor, ...], levels: int) -> None:
        sent = self._send(self._frontier.live, self._flags[0])
        for number in range(levels):
            self._run("level", reads)
            before, sent = sent, self._send(self._frontier.live, self._flags[(number + 1) % 2])
            if not int(received(before)):
                break

    def _run(self, name: str, reads: tuple[Tensor, ...]) -> None:
        self.graphs.run(self._name(name), reads, getattr(self, name))

    def _name(self, name: str) -> str:
        kind = f" of {self._verified.rows} rows, {'sampled' if self._sampled else 'greedy'}" if name == "verify" else ""
        return f"resident {name}{kind}"

    def _reads(self) -> tuple[Tensor, ...]:
        return *self.target.resident_reads, *self.drafter.resident_reads

    @property
    def _is_one_graph(self) -> bool:
        return self.loop == "while" and self.levels.passes > 1 and self.target.device.type == "cuda"

    def _whole_cycle(self) -> Any:
        from specengine.cuda import Loop  # raises ImportError where the library is not built

        reads = self._reads()
        signature = tuple((tensor.data_ptr(), tuple(tensor.shape)) for tensor in reads)
        known = self._loops.get(self._sampled)
        if known is None or known[0] != signature:
            before, body, after = (
                self.graphs.capture(self._name(name), getattr(self, name)) for name in ("root", "level", "verify")
            )
            rounds = torch.zeros(1, dtype=torch.int32, device=self.target.device)
            loop = Loop(body, self._frontier.live, rounds, self.levels.passes - 1, before, after)
            known = self._loops[self._sampled] = (signature, loop)
        return known[1]

    def _send(self, values: Tensor, into: Tensor) -> Any:
        into.copy_(values, non_blocking=True)
        if values.device.type != "cuda":
            return into.clone(), None  # the device would have another memory
        event = torch.cuda.Event()
        event.record()
        return into, event

    # ---- cycles, as the engine sees them

    def serves(self, sampler: Sampler) -> bool:
        """Whether the target's choices by this sampler can be made on the device."""
        return not sampler.processors if sampler.seed is None else not sampler.reads_history

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens, the cycle that may run behind the last of them, and the runs of a capture."""
        most = tokens + self.budget + (WARM_UPS + 2) * len(self.state.committed)
        self.target.reserve(most, self.budget)
        self.drafter.reserve(most, self.tree.capacity)

    @torch.inference_mode()
    def warm_up(self, tokens: int) -> None:
        """Capture everything, for texts of up to so many tokens."""
        self.reserve(tokens)
        for self._sampled in (False, True):
            self._prepare()

    def _prepare(self) -> None:
        """Capture what is not captured yet. That runs the functions, so the state is set only afterwards."""
        if self.graphs.require_same(self.target.lm.model, *self.drafter.resident_weights):
            self._loops.clear()
        self.state.length.fill_(self.target.cache.length)
        self.state.taken.fill_(0)
        if self._is_one_graph:
            self._whole_cycle()
            return
        reads = self._reads()
        passes = self.levels.passes
        for name in (*(["root"] if passes else []), *(["level"] if passes > 1 else []), "verify"):
            if not self.graphs.has(self._name(name), reads):
                self._run(name, reads)

    @torch.inference_mode()
    def cycles(self, run: Any) -> Iterator[Cycle]:
        """The cycles of a generation whose first one has been made by the engine, until `run.reason` is set."""
        drafted = self.drafter.drafted
        self._begin(run)
        clock = time.perf_counter()
        try:
            self.launch()
            ahead = self._send(self._record, self._records[0])
            number = 0
            while run.reason is None:
                number += 1
                sent = ahead
                if run.stopper.left > 1:  # the cycle under way gives one token at least
                    self.launch()
                    ahead = self._send(self._record, self._records[number % 2])
                record = self._read(received(sent))
                drafted = record.length
                if not record.accepted:
                    refuse_no_choice(None, run.history.length)
                kept = 0
                while kept < record.accepted:
                    kept += 1
                    if run.commit(record.tokens[kept - 1]):
                        break
                now = time.perf_counter()
                seconds = Seconds(total=now - clock, model=now - clock, split=False)
                clock = now
                yield Cycle(record.tree, record.path[:kept], record.tokens[:kept], seconds, record.grown - 1)
        finally:
            self._end(run, drafted)

    def _begin(self, run: Any) -> None:
        state, sampler = self.state, run.sampler
        self._sampled = sampler.seed is not None
        self._prepare()
        committed = self.drafter.resident_start(run.root)
        length = run.history.length - 1
        assert length == self.target.cache.length
        state.length.fill_(length)
        state.taken.fill_(len(committed))
        state.committed[: len(committed)] = torch.tensor(committed)
        self._start(state.committed[len(committed) - 1 : len(committed)])
        if self._sampled:
            state.seed.fill_(signed(sampler.seed))
            state.temperature.fill_(float(sampler.processors[0].temperature) if sampler.processors else 1.0)

    def _end(self, run: Any, drafted: int) -> None:
        tokens = run.history.ids[0].tolist()[:-1]
        self.target.resident_end(tokens)
        self.drafter.resident_end(tokens, drafted)

    def _read(self, values: Tensor) -> Record:
        longest = len(self.state.committed)
        numbers, committed, path, *arrays = values.split([NUMBERS, longest, longest, *[self.budget] * 5])
        count, _, grown, kept, passes, length = numbers.tolist()
        tokens, parents, depths, *sums = (array[:kept].clone() for array in arrays)
        tree = TokenTree.of(tokens, parents, depths, *(bits.int().view(torch.float32) for bits in sums))
        tree.passes = passes
        return Record(length, count, committed[:count].tolist(), path[:count].tolist(), grown, tree)


def _frontier(width: int, device: torch.device) -> ops.Frontier:
    nodes, depths = torch.zeros(2, width, dtype=torch.int64, device=device)
    scores, live = torch.zeros(width, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    return ops.Frontier(nodes, depths, scores, live)


def received(sent: Any) -> Tensor:
    """What was sent, once it is there."""
    values, event = sent
    if event is not None:
        event.synchronize()
    return values


def signed(value: int) -> int:
    """The int64 with the bits of a number modulo 2**64."""
    return ((value + 2**63) & ops.MASK64) - 2**63


def pad_to(values: Tensor, size: int) -> Tensor:
    """The first `size` values, filled up with 0."""
    return torch.nn.functional.pad(values[:size], (0, max(0, size - len(values))))
