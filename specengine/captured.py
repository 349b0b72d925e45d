"""Cycles that stay on the device: drafting, verification and commit as graphs, with one read by the host, a cycle late.

The functions of captured_cycle.py, each captured once, make a cycle. What the host wants to know is one record of a few
kilobytes, which it reads while the next cycle runs; a cycle begun behind the end of an answer is forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from specengine.captured_cycle import CapturedCycle
from specengine.cuda_graphs import WARM_UPS, Graphs
from specengine.drafters import Drafter
from specengine.drafters._passes import MOST_ROWS
from specengine.errors import InputError
from specengine.generation.sampling import Sampler, refuse_no_choice, signed
from specengine.policies import TreePolicy
from specengine.records import Cycle, Seconds
from specengine.targets.captured import CapturedTarget

NOTE = "graphs: after the first, cycles stayed on the device; their times are not split into parts"
LOOPS = ("read", "ahead", "while")


def why_not(target: Any, drafter: Any, policy: TreePolicy | None) -> str:
    """Why these do not run captured; empty where they do."""
    if not isinstance(target, CapturedTarget):
        return "the target is not captured in graphs"
    if policy is None:
        return ""
    if not drafter.drafts_captured():
        return f"{drafter.name} does not draft on the device"
    name = type(policy).__name__.lower()
    try:
        widest = max(policy.rows, policy.passes + 1)
    except NotImplementedError as error:
        return f"{name}: {error}"
    if widest > MOST_ROWS:
        return f"its trees are wider or deeper than the {MOST_ROWS} rows of a pass"
    return ""


def for_parts(target: Any, drafter: Any, policy: TreePolicy | None, loop: str) -> CapturedDriver | None:
    """The captured driver of an engine of these parts, None where its trees grow on the host.

    loop: `auto`, `host` or one of LOOPS; InputError where one of these is asked for and cannot be had.
    """
    if loop not in ("auto", "host", *LOOPS):
        raise InputError(f"loop: got {loop!r}, accepted auto, host, {', '.join(LOOPS)}")
    if loop == "host":
        return None
    reason = why_not(target, drafter, policy)
    if reason and loop != "auto":
        raise InputError(f"loop: got {loop!r}, but {reason}; accepted auto, host")
    return None if reason else CapturedDriver(target, drafter, policy, "read" if loop == "auto" else loop)


class CapturedDriver:
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
        drafter: Drafter | None,
        policy: TreePolicy | None,
        loop: str,
    ) -> None:
        self.cycle, self.loop = CapturedCycle(target, drafter, policy), loop
        self.target, self.drafter, self.policy = target, self.cycle.drafter, policy
        self.passes = self.cycle.passes
        self.graphs = Graphs(target.device)
        pinned = target.device.type == "cuda"
        self._records = [torch.zeros(self.cycle.record.shape, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._flags = [torch.zeros(1, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._loops: dict[bool, tuple[tuple[Any, ...], Any]] = {}

    # ---- a cycle, as the host starts it

    def launch(self) -> None:
        """Start one cycle."""
        if self._is_one_graph:
            self._whole_cycle().launch()
            return
        reads = self._reads()
        if self.passes:
            self._run("root", reads)
        levels = self.passes - 1
        if self.policy is None or not self.policy.ends_early:
            for _ in range(levels):
                self._run("level", reads)
        elif self.loop == "ahead":
            self._run_ahead(reads, levels)
        else:
            for _ in range(levels):
                if not int(self.cycle.frontier.live):
                    break
                self._run("level", reads)
        self._run("verify", reads)

    def _run_ahead(self, reads: tuple[Tensor, ...], levels: int) -> None:
        sent = self._send(self.cycle.frontier.live, self._flags[0])
        for number in range(levels):
            self._run("level", reads)
            before, sent = sent, self._send(self.cycle.frontier.live, self._flags[(number + 1) % 2])
            if not int(received(before)):
                break

    def _run(self, name: str, reads: tuple[Tensor, ...]) -> None:
        self.graphs.run(self._name(name), reads, getattr(self.cycle, name))

    def _name(self, name: str) -> str:
        kind = (
            f" of {self.cycle.verified.rows} rows, {'sampled' if self.cycle.sampled else 'greedy'}"
            if name == "verify"
            else ""
        )
        return f"captured {name}{kind}"

    def _reads(self) -> tuple[Tensor, ...]:
        return *self.target.captured_reads, *self.drafter.captured_reads

    @property
    def _is_one_graph(self) -> bool:
        return self.loop == "while" and self.passes > 1 and self.target.device.type == "cuda"

    def _whole_cycle(self) -> Any:
        from specengine.ops.cuda import Loop  # raises ImportError where the library is not built

        reads = self._reads()
        signature = tuple((tensor.data_ptr(), tuple(tensor.shape)) for tensor in reads)
        known = self._loops.get(self.cycle.sampled)
        if known is None or known[0] != signature:
            before, body, after = (
                self.graphs.capture(self._name(name), getattr(self.cycle, name)) for name in ("root", "level", "verify")
            )
            rounds = torch.zeros(1, dtype=torch.int32, device=self.target.device)
            loop = Loop(body, self.cycle.frontier.live, rounds, self.passes - 1, before, after)
            known = self._loops[self.cycle.sampled] = (signature, loop)
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
        most = tokens + self.cycle.budget + (WARM_UPS + 2) * len(self.cycle.state.committed)
        self.target.reserve(most, self.cycle.budget)
        self.drafter.reserve(most, self.cycle.tree.capacity)

    @torch.inference_mode()
    def warm_up(self, tokens: int) -> None:
        """Capture everything, for texts of up to so many tokens."""
        self.reserve(tokens)
        for self.cycle.sampled in (False, True):
            self._prepare()

    def _prepare(self) -> None:
        """Capture what is not captured yet. That runs the functions, so the state is set only afterwards."""
        if self.graphs.require_same(self.target.lm.model, *self.drafter.captured_weights):
            self._loops.clear()
        self.cycle.state.length.fill_(self.target.cache.length)
        self.cycle.state.taken.fill_(0)
        if self._is_one_graph:
            self._whole_cycle()
            return
        reads = self._reads()
        passes = self.passes
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
            follows = (
                self.policy is not None and self.policy.has_history()
            )  # the next tree waits for what became of this
            ahead = self._start(0)
            number = 0
            while run.reason is None:
                number += 1
                sent = ahead
                if run.stopper.left > 1 and not follows:  # the cycle under way gives one token at least
                    ahead = self._start(number)
                record = self.cycle.read(received(sent))
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
                if follows and run.reason is None:
                    ahead = self._start(number)
        finally:
            self._end(run, drafted)

    def _start(self, number: int) -> Any:
        """Launch a cycle; what will have arrived of its record."""
        self.launch()
        return self._send(self.cycle.record, self._records[number % 2])

    def _begin(self, run: Any) -> None:
        state, sampler = self.cycle.state, run.sampler
        self.cycle.sampled = sampler.seed is not None
        self._prepare()
        committed = self.drafter.captured_start(run.root)
        length = run.history.length - 1
        assert length == self.target.cache.length
        state.length.fill_(length)
        state.taken.fill_(len(committed))
        state.committed[: len(committed)] = torch.tensor(committed)
        self.cycle.start(state.committed[len(committed) - 1 : len(committed)])
        if self.cycle.sampled:
            state.seed.fill_(signed(sampler.seed))
            state.temperature.fill_(float(sampler.processors[0].temperature) if sampler.processors else 1.0)

    def _end(self, run: Any, drafted: int) -> None:
        tokens = run.history.ids[0].tolist()[:-1]
        self.target.captured_end(tokens)
        self.drafter.captured_end(tokens, drafted)


def received(sent: Any) -> Tensor:
    """What was sent, once it is there."""
    values, event = sent
    if event is not None:
        event.synchronize()
    return values
