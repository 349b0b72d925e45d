"""Cycles as CUDA graphs: the functions of cycle.py, each captured once over buffers of fixed size, and replayed.

Where the host has nothing to say between verification and commit, a cycle stays on the device: a graph verifies, walks
down, commits and leaves one record of a few kilobytes, which the host reads while the next cycle runs; one begun behind
the end of an answer is forgotten. Rows of nodes below a drafted end token stand there in the place of padding, and the
record leaves them out. Where it has (processors, penalties, drafts that copy), it reads the tree and the
logits, and walks itself.
"""

import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, partialmethod
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from specengine import cycle, ops, policies
from specengine.cycle import REST, Draft, EagerDriver, Lane
from specengine.drafters import CapturedDrafter, Drafter, RowDraft, Wrapped, reserve
from specengine.drafters._wrappers import Coupled, Guided
from specengine.models import SharedRows
from specengine.models.huggingface import (
    PADDED_ROWS,
    HuggingFaceTarget,
    padded_width,
)
from specengine.ops import Nodes
from specengine.ops.cuda_graphs import (
    WARM_UPS,
    CaptureError,
    GraphMemoryError,
    Graphs,
    Mark,
    branches,
    only_if,
    room,
    sharing,
)
from specengine.ops.tree import NUMBERS, TokenTree, overfull
from specengine.policies import Plan, TreePolicy
from specengine.records import Cycle, Outcome, Seconds
from specengine.request.sampling import Sampler, TopP, refuse_no_choice, signed

NOTE = "graphs: cycles stayed on the device; drafting has the policy's time, verification the rest"
PARTS_NOTE = "graphs: a tree could not be one graph here, or would have been another tree, so its passes are graphs"
GUIDED_NOTE = "graphs: a grammar guides the trees, so the host grew them outside of graphs"
DEEPEST = 16  # passes of a tree that is one graph: they are nested, and each is captured
HOST = torch.device("cpu")
T = TypeVar("T")


class Record(NamedTuple):
    """The record of a cycle on the host. length: tokens committed before it, the root excluded; accepted: nodes
    with the root, 0 where the target gave no token; tokens, path: as in Cycle; grown: nodes drafted with the root;
    tree: what was verified."""

    length: int
    accepted: int
    tokens: list[int]
    path: list[int]
    grown: int
    tree: TokenTree


class Sent(NamedTuple):
    """A cycle that was launched: where its record will stand, and marks before its tree, behind it and at the end."""

    record: Tensor
    marks: tuple[Mark, Mark, Mark]

    def seconds(self, before: Mark | None) -> Seconds:
        """Return the times of the cycle once its record has arrived; before: the end of the one before it."""
        began, drafted, ended = self.marks
        draft, verify = drafted.since(began), ended.since(drafted)
        total = ended.since(before or began)
        return Seconds(draft=draft, verify=verify, total=total, model=draft + verify, captured=True)


class Choice(NamedTuple):
    """How tokens are chosen, of which graphs there is one each.

    draws      whether tokens are drawn; else the most likely one is taken
    truncates  whether draws leave out unlikely tokens
    couples    whether drafts know the noise of the draws
    """

    draws: bool = False
    truncates: bool = False
    couples: bool = False


class DeviceSampler:
    """The settings of a sampler where graphs read them, and the choices of tokens by them.

    request  how the request's tokens are chosen; choice: how graphs choose that run, maybe for other texts alone
    scale    float32 [1]: the divisor of the noise that drafts know
    """

    def __init__(self, device: torch.device) -> None:
        self.request = self.choice = Choice()
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        self.scale = torch.ones(1, device=device, dtype=torch.float32)
        self.temperature, self._one = torch.ones(2, device=device, dtype=torch.float32).split(1)
        self._truncation = ops.Truncation(
            torch.ones(1, dtype=torch.int64, device=device),
            *torch.ones(2, device=device, dtype=torch.float32).split(1),
        )

    def take(self, sampler: Sampler, drafter: Drafter | None, *, chooses: bool) -> None:
        """Take over a sampler's settings. drafter: the one to couple; chooses: whether tokens are chosen in graphs."""
        draws = sampler.seed is not None and chooses
        couples = sampler.couples and drafter is not None
        row_filter = sampler.row_filter if draws else None
        truncates = row_filter is not None and row_filter.truncates
        self.request = self.choice = Choice(draws, truncates, couples)
        if sampler.seed is not None:
            self.seed.fill_(signed(sampler.seed))
            self.temperature.fill_(sampler.temperature)
        if row_filter is not None:
            for tensor, value in zip(self._truncation, row_filter[1:], strict=True):
                tensor.fill_(value)
        if couples and drafter is not None:
            self.scale.fill_(
                Coupled.scale(drafter, sampler.temperature, truncated=sampler.truncates)
            )

    def choose(self, logits: Tensor, depths: Tensor, length: Tensor) -> Tensor:
        """Return the token after each row; length: int32 [1], tokens before the root, whose depth is 0."""
        if not self.choice.draws:
            return ops.choose_tokens(logits)
        divisor = self.temperature
        if self.choice.truncates:
            logits, divisor = ops.truncate(logits, divisor, self._truncation), self._one
        return ops.choose_tokens(logits, depths + (length + 1), self.seed, divisor)


class CapturedDriver(EagerDriver):
    """Runs the cycles of one engine as graphs; without a draft and a policy they decode plainly.

    grows_there  whether trees grow in graphs, which needs a draft that captures and a policy that states its sizes
    under_way    int32 [1], 0 where nothing is to be committed; None outside of a pool
    """

    captured = True
    under_way: Tensor | None = None
    prompt_rows = PADDED_ROWS
    target: HuggingFaceTarget
    policy: Any  # which is there wherever trees grow

    def __init__(
        self, target: HuggingFaceTarget, drafter: Drafter | None, policy: TreePolicy | None
    ) -> None:
        super().__init__(target, drafter, policy)
        self.grows_there = drafter is None or (
            isinstance(drafter, CapturedDrafter) and states_sizes(policy)
        )
        self.graphs = Graphs(target.device)
        device = target.device
        rows = policy.rows if policy and self.grows_there else 1
        self.tree = TokenTree(policy.capacity if policy and self.grows_there else 1, device)
        self.frontier = Nodes(
            *(
                torch.zeros(n, dtype=t, device=device)
                for n, t in ((rows, torch.int64), (1, torch.int32))
            )
        )
        ends = policy is not None and (policy.ends_early or self.patience > 0)
        # whether a tree is one graph
        self.branched = ends and 0 < self.passes <= DEEPEST and branches(device)
        self.notes: list[str] = []  # for the user, in the statistics of each answer
        # rows of graphs that finish trees of fewer nodes than the largest one's, descending
        self.narrow: list[int] = []
        self._drafts = False  # whether the last tree had a draft pass
        self._given = TokenTree(self.budget, device)  # what is verified for a walk on the host
        self.sampler = DeviceSampler(device)
        size = NUMBERS + 2 * self.longest + 5 * self.budget
        self.record = torch.zeros(size, dtype=torch.int64, device=device)
        self._records = [
            torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")
            for _ in range(2)
        ]

    @property
    def texts(self) -> "Sequence[CapturedDriver]":
        """Return the drivers of the texts that its graphs are of."""
        return (self,)

    @property
    def passes(self) -> int:
        """Return the maximum number of draft passes of a tree, 0 where trees do not grow in graphs."""
        return self.policy.passes if self.policy is not None and self.grows_there else 0

    @property
    def widths(self) -> list[int]:
        """Return the numbers of rows that `narrow` may have, descending: where the host reads how large a tree is."""
        read = self.rests and self.passes > 1 and self.policy.ends_early
        rounded = {padded_width(nodes) for nodes in range(2, self.budget) if read}
        return sorted((rows for rows in rounded if rows < self.budget), reverse=True)

    @property
    def looks(self) -> bool:
        """Return whether the host waits for the device while a tree grows."""
        ends = self.passes > 0 and (self.patience > 0 or self.policy.ends_early)
        return bool(ends) and not self.branched

    @property
    def rests(self) -> bool:
        """Return whether the host may know that a tree is its root alone, which then takes one row."""
        padded = self.branched or self.target.strict_rows or self.budget == 1
        return self.passes > 0 and self.patience > 0 and not padded

    # ---- the functions of a cycle

    def run_first(self) -> None:
        self.frontier.live.copy_(
            cycle.first(self._source(), self.policy, self.tree, Seconds()).live
        )

    def run_root(self) -> None:
        root = self.tree.root_alone()
        if self.patience or self.joined is not None:
            root = root._replace(live=self.frontier.live)
        self._go_on(cycle.root(self._source(), self.policy, self.tree, root, Seconds()))

    def run_level(self) -> None:
        self._go_on(cycle.level(self._source(), self.policy, self.tree, self.frontier, Seconds()))

    def run_tree(self) -> None:
        """Grow a tree, each pass only where the rule goes on."""
        if self.patience:
            self.run_first()
        self._passes_from(0)

    def _passes_from(self, number: int) -> None:
        if number == self.passes:
            return
        ends = self.policy.ends_early if number else self.patience
        with only_if(self.frontier.live > 0) if ends else nullcontext():
            (self.run_level if number else self.run_root)()
            self._passes_from(number + 1)

    def _source(self) -> Drafter:
        """Return the drafter that trees grow from."""
        if not self.sampler.choice.couples:
            return cast(Drafter, self.drafter)
        filled, sampler = self.target.cache.filled, self.sampler
        return Coupled(cast(Drafter, self.drafter), sampler.seed, sampler.scale, lambda: filled + 1)

    def _go_on(self, found: Nodes) -> None:
        if found.ids is not self.frontier.ids:
            width = min(len(found.ids), len(self.frontier.ids))
            self.frontier.ids[:width].copy_(found.ids[:width])
            self.frontier.live.copy_(found.live)

    def run_verify(
        self,
    ) -> tuple[Tensor, Tensor | None]:  # by its name, as the other functions of a cycle
        return self.target.verify(self._given)

    def run_finish(self, rows: int = 0) -> None:
        """Run the target over the tree, walk down, commit in both caches, write the record and set the next root.

        rows: of the target's forward; 0: those of the largest tree.
        """
        outcome = self.commit(*self.select(rows))
        self.learn_there(outcome)
        self.tree.restart()

    def commit(self, nodes: Nodes, verified: TokenTree) -> Outcome:
        """Walk down what the target has verified, as `select` gives it, and commit; return what became of it."""
        tree, longest = self.tree, self.longest
        length = self.target.cache.filled
        logits, features = self.target.verify(verified)
        chosen = self.sampler.choose(logits, verified.depths, length)
        walked = ops.walk(verified.tokens, verified.parents, chosen, nodes.live)
        counts = tree.size, tree.passes, length, tree.overflow
        record, end = self.record, NUMBERS + longest
        ids, walked_over = ops.record_walk(
            verified.arrays, walked, nodes, counts, tree.tokens, record, longest
        )
        live = walked.live if self.under_way is None else walked.live * self.under_way
        path = Nodes(record[end : end + longest], live)
        self.target.cache.keep(path)
        if self.drafter is not None and self.policy is not None:
            cast(CapturedDrafter, self.drafter).take(walked_over, path, features)
        return Outcome(tree, Nodes(ids, path.live), record[NUMBERS:end], None)

    def learn_there(self, outcome: Outcome) -> None:
        """Have the policy learn on the device, if it does; policies of a pool share what they count."""
        if self._learns_there():
            self.policy.learn(outcome)

    def select(self, rows: int) -> tuple[Nodes, TokenTree]:
        """Return the nodes to verify, `rows` wide on a device, 0: as wide as the largest tree; and their tree."""
        nodes = self.run_kept(rows or self.budget)
        return nodes, self.tree.subtree(nodes)

    def run_kept(self, rows: int) -> Nodes:
        """Return the nodes to verify, `rows` wide on a device."""
        ids, live = self.tree.root_alone() if self.policy is None else self.policy.keep(self.tree)
        return Nodes(ids[: int(live)] if ops.is_free(live) else ops.padded(ids, rows), live)

    run_plain = partialmethod(run_finish, 1)  # of a tree that is its root alone, in one row

    # ---- a cycle, as the host starts it

    def _grow(self) -> str:
        """Replay the graphs of one tree; return the name of the one that finishes it.

        Where the tree is not one graph, the host reads after a part whether it was the last.

        After `first` it reads only if the last tree had no draft pass: a root pass for nothing is rarer than a wait.
        With that it reads how many nodes are verified. The largest number of rows finishes a tree that ends with the
        last pass, which nobody reads.
        """
        if self.branched:
            self._run("tree")
        if self.branched or self.policy is None:
            return "finish"
        alone = "plain" if self.rests else "finish"
        if self.patience:
            self._run("first")
            reads = not self._drafts or ops.is_free(self.frontier.live)
            if reads and not any(self.frontier.live.tolist()):
                self._drafts = False
                return alone
        self._run("root")
        for _ in range(1, self.passes):
            if self.policy.ends_early:
                live, passes, nodes = self._look()
                if not live:
                    self._drafts = passes > 0
                    fitting = (f"finish {rows}" for rows in self.narrow if rows >= nodes)
                    return ["finish", *fitting][-1] if self._drafts else alone
            self._run("level")
        self._drafts = self.passes > 1
        return "finish"

    def _look(self) -> tuple[int, int, int]:
        """Return nodes to draft from next, and passes so far, the most of any text, and nodes to verify: one wait."""
        chosen = self._run(f"kept {self.budget}").live if self.narrow else self.frontier.live[:1]
        numbers = [count for text in self.texts for count in (text.frontier.live, text.tree.passes)]
        *counts, nodes = torch.cat([*numbers, chosen]).tolist()
        return max(counts[::2]), max(counts[1::2]), nodes

    def _run(self, name: str) -> Any:
        function, *rows = name.split()
        run = partial(getattr(self, f"run_{function}"), *map(int, rows))
        return self.graphs.run(self._name(name), self.reads(), run)

    def _name(self, name: str) -> str:
        """Return the name of a capture; a function and so its capture depend on the sampler."""
        choice = self.sampler.choice
        if name.startswith(("finish", "plain")):
            return name + (
                " truncated" if choice.truncates else " sampled" if choice.draws else " greedy"
            )
        return name + " coupled" if choice.couples and name in ("tree", "root", "level") else name

    def reads(self) -> tuple[Tensor, ...]:
        cache, drafter = self.target.cache, self.drafter
        return (
            cache.slab,
            *(tensor for memory in cache.states for tensor in memory.reads),
            *(drafter.reads if isinstance(drafter, CapturedDrafter) else ()),
        )

    def _capture(self, *names: str) -> None:
        """Capture what is not captured yet. That runs the functions, so what lasts longer than a tree is put back."""
        if not names:
            return
        with ExitStack() as stack:
            for text in self.texts:
                stack.enter_context(text.undone())
                text.tree.restart()  # the last tree may be full
            for name in names:
                self._run(name)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Put back what lasts longer than a tree, and the root."""
        state = self.target.cache.filled, self.tree.tokens[:1], *self._lasting()
        kept = [tensor.clone() for tensor in state]
        try:
            yield
        finally:
            for tensor, before in zip(state, kept, strict=True):
                tensor.copy_(before)
            self.tree.restart()

    def _grows_alike(self) -> bool:
        """Return whether the graph of a tree can be captured, and grows the tree that its parts grow."""
        parts, grown = ("first", "root", "level"), list[list[Any]]()
        try:
            for self.branched in (True, False):
                self._capture(*self._missing(self._growth()))
                with self.undone():
                    self._drafts = False
                    self._grow()
                    size = len(self.tree)
                    grown.append(
                        [
                            int(self.tree.passes),
                            *(array[:size].tolist() for array in self.tree.arrays[:3]),
                        ]
                    )
        except CaptureError:
            if not self.branched:
                raise
            return False
        alike = grown[0] == grown[1]
        self.graphs.drop(*map(self._name, parts if alike else ("tree",)))
        return alike

    def _lasting(self) -> Iterator[Tensor]:
        """Yield the tensors that outlive a cycle."""
        for memory in self.target.cache.states:
            yield from memory.reads
        if isinstance(self.drafter, CapturedDrafter):
            yield from self.drafter.state
        if self.policy is not None:
            yield from self.policy.state_on(self.tree.device)

    def _learns_there(self) -> bool:
        """Return whether the policy learns on the device, inside a graph."""
        return self.policy is not None and bool(self.policy.state_on(self.tree.device))

    def _missing(self, names: list[str]) -> list[str]:
        return [name for name in names if not self.graphs.has(self._name(name), self.reads())]

    def _growth(self) -> list[str]:
        if self.branched:
            return ["tree"]
        return [
            *["first"] * bool(self.grows_there and self.patience),
            *["root", "level"][: min(self.passes, 2)],
            *[f"kept {self.budget}"] * bool(self.narrow),
        ]

    # ---- as the engine sees it

    def serves(self, sampler: Sampler) -> bool:
        """Return whether whole cycles, choices by this sampler included, can stay on the device."""
        chooses = not sampler.processors if sampler.seed is None else not sampler.reads_history
        return self.grows_there and chooses and sampler.logprobs is None

    def narrow_to(self, rows: Collection[int]) -> None:
        """Finish trees in these numbers of rows too, each captured once it is needed; drop what was only timed."""
        self.narrow = [width for width in self.widths if width in rows]
        self.graphs.drop(*(self._name(f"finish {n}") for n in {*self.widths} - {*self.narrow}))

    def reserve(self, tokens: int) -> None:
        """Make room, also for the cycle that may run behind the last token and for the runs of a capture."""
        longer = self.budget + (WARM_UPS + 2) * self.unread
        slots, limit = tokens + longer, self.target.max_context + longer
        rows = self.budget + self.target.strict_rows  # every forward is padded
        self.target.reserve(room(slots + rows, limit + rows), 0)
        if self.policy is not None:
            nodes = self.policy.capacity + len(self.frontier.ids)
            text = room(slots + nodes, limit + nodes) - nodes - self.unread
            # what idles in a pool writes after the tokens that wait
            reserve(self.drafter, text, self.policy.capacity, self.unread + 1)

    def _require_same(self) -> None:
        weights = self.drafter.weights if isinstance(self.drafter, CapturedDrafter) else ()
        self.graphs.require_same(self.target.lm.model, *weights)

    def prefill(self, tokens: list[int], keep: int) -> Tensor | None:
        """Run a prompt as `Target.prefill`: up to `budget` tokens as a tree of one path, by the graph that verifies.

        The driver's first prompt waits for no capture. Rows of a tree have other bits than those of a prompt, so a
        strict target's are no tree.
        """
        target, count = self.target, len(tokens) - keep
        self._require_same()
        fits = 0 < count <= self.budget and not (target.strict_rows or target.cache.states)
        if not fits or not self.graphs.captures:
            return target.prefill(tokens, keep)
        target.prefill(tokens[:keep], keep)
        chain = TokenTree.of_lists(tokens[keep:], [*range(-1, count - 1)], HOST)
        _, features = self.verify(chain)
        target.commit(chain, [*range(count)])
        return features

    @torch.inference_mode()
    def prepare(self, sampler: Sampler) -> None:
        for memory in self.target.cache.states:
            memory.settle(self.target.cache.filled, self.budget)
        coupled = self.drafter if self.grows_there else None
        self.sampler.take(sampler, coupled, chooses=self.serves(sampler))
        # in a pool before the next step, as pieces of prompts are not committed yet
        if self.joined is None:
            self.make_ready(self.sampler.request, whole=self.serves(sampler))

    def make_ready(self, choice: Choice, *, whole: bool = True) -> None:
        """Capture what cycles with such choices need; whole: which choose in graphs."""
        for text in self.texts:
            text.sampler.choice = choice
        self.sampler.choice = choice
        self._require_same()
        if self.branched and self._missing(["tree"]):
            self.branched = self._grows_alike()
            self.notes = [] if self.branched else [PARTS_NOTE]
        ends = ["finish", *["plain"] * self.rests] if whole else ["verify"]
        self._capture(*self._missing([*self._growth(), *ends]))

    @torch.inference_mode()
    def warm_up(self, tokens: int) -> None:
        """Capture everything, for texts of up to so many tokens."""
        self.reserve(tokens)
        for sampler in (Sampler(), Sampler(seed=0), Sampler([TopP(0.9)], seed=0)):
            self.prepare(sampler)
            self._capture(*self._missing([f"finish {rows}" for rows in self.narrow]))
        self._capture(*self._missing(["verify"]))

    @torch.inference_mode()
    def rehearse(self, root: int, count: int) -> dict[str, list[float]]:
        """Run greedy cycles below this token, behind what the caches hold, and undo each; return the seconds of parts.

        Parts are `plain` and `finish N`, by `widths`, cycles of a root alone before the others, `first`, `root`,
        `level`, `end` (what a tree takes behind its last level) and `finish`, each with the host's reads before it. A
        cycle has one level, as wide as may be, whatever the policy thinks of it. Captures what is not captured yet.
        Trees grow in graphs, if there are any, and no answer is under way.
        """
        self.prepare(Sampler())
        self.make_ready(self.sampler.request)  # also in a pool
        # passes of one graph have no times of their own
        branched, self.branched = self.branched, False
        self._capture(*self._missing(self._growth()))
        self.branched = branched
        self._capture(*self._missing([f"finish {rows}" for rows in self.widths]))
        spans = list[tuple[str, Mark, Mark]]()
        for _ in range(count):
            with self.undone():
                self.plant(root)
                spans += self._rehearsal()
        spans[-1][2].wait()
        return {
            each: [ended.since(began) for name, began, ended in spans if name == each]
            for each in dict.fromkeys(name for name, _, _ in spans)
        }

    def _rehearsal(self) -> Iterator[tuple[str, Mark, Mark]]:
        """Yield the parts of one cycle, as `_grow` and `_start` launch them, with marks before and behind them."""
        (ids, live), device, policy = self.frontier, self.tree.device, self.policy
        reads = policy is not None and policy.ends_early and not self.branched
        began = Mark(device)
        for name in [*["plain"] * self.rests, *(f"finish {rows}" for rows in self.widths)]:
            self._run(name)
            yield name, began, (began := Mark(device))
        ended = began
        if policy is not None:
            if self.patience:
                self._run("first")
                yield "first", began, (ended := Mark(device))
                ids[:1].zero_()
                live.fill_(1)
                began = Mark(device)
            self._run("root")
            yield "root", began, (ended := Mark(device))
        if policy is not None and self.passes > 1:
            ids.copy_(
                torch.arange(1, len(ids) + 1, device=device, dtype=torch.int64).clamp(
                    max=self.tree.capacity - 1
                )
            )
            live.copy_((self.tree.size - 1).clamp(max=len(ids)))
            began = Mark(device)
            if reads:
                int(live)
            self._run("level")
            yield "level", began, (ended := Mark(device))
        if reads:
            int(live)
            yield "end", ended, (ended := Mark(device))
        self._run("finish")
        self._records[0].copy_(self.record, non_blocking=True)
        yield "finish", ended, Mark(device)

    def draft(
        self, token: int, seconds: Seconds, source: Drafter, plan: Plan, *, shared: bool = False
    ) -> Generator[SharedRows, None, Draft]:
        if self.policy is None or not self.grows_there or is_guided(source):
            return (yield from super().draft(token, seconds, source, plan, shared=shared))
        began = time.perf_counter()
        self.plant(token)
        self._grow()
        grown = self.tree.to(self.tree.device if self._learns_there() else HOST)
        seconds.draft += time.perf_counter() - began
        if int(grown.overflow):
            raise policies.named(self.policy, overfull(grown.capacity, len(grown)))
        return cycle.keep(self.policy, grown, seconds)

    def verify(self, tree: TokenTree) -> tuple[Tensor, Tensor | None]:
        self._given.copy_(tree.trimmed())
        logits, features = self._run("verify")
        size = len(tree)
        # the next tree overwrites them
        return logits[:size], None if features is None else features[:size].clone()

    @torch.inference_mode()
    def cycles(self, lane: Lane) -> Iterator[Cycle]:
        """Run the cycles of a lane until its answer ends."""
        drafted = len(self.target.tokens)
        assert lane.history.length - 1 == drafted
        self.plant(lane.root)
        ended: Mark | None = None
        try:
            # the next tree waits for what became of this
            follows = self.learns and not self._learns_there()
            times = self.learns and not follows and self.policy.plan().times
            ahead = self._start(0)
            number = 0
            while lane.reason is None:
                number += 1
                sent = ahead
                self.follow(lane)
                # the first token does not wait for another tree
                first = follows or (number == 1 and self.looks)
                # the cycle under way gives one token at least
                if lane.stopper.left > 1 and not first:
                    ahead = self._start(number)
                sent.marks[-1].wait()
                record = self._read(sent.record)
                drafted = record.length
                seconds, ended = sent.seconds(ended), sent.marks[-1]
                yield self._commit(lane, record, seconds, learns=follows or times)
                if first and lane.reason is None:
                    ahead = self._start(number)
        finally:
            self._end(lane, drafted)

    def _commit(self, lane: Lane, record: Record, seconds: Seconds, *, learns: bool) -> Cycle:
        """Append a cycle's tokens to an answer; return the cycle. learns: whether the policy does on the host."""
        if not record.accepted:
            refuse_no_choice(None, lane.history.length)
        for kept in range(1, record.accepted + 1):
            if lane.commit(record.tokens[kept - 1]):
                break
        draft = cycle.without_ended(
            cycle.Draft(record.tree, record.tree), record.tree.tokens.tolist(), lane.stopper
        )
        places = range(record.grown) if draft.kept is None else draft.kept.tolist()
        path = [places.index(node) for node in record.path[:kept]]
        end = None if lane.reason is None else cycle.drafted_end(draft.tree, path, lane)
        finished = Cycle(
            draft.tree,
            path,
            record.tokens[:kept],
            seconds,
            record.grown - 1,
            learnt=self.learns and self._learns_there(),
            end=end,
        )
        if learns:
            self.policy.learn(Outcome.of(finished))
        lane.count(finished)
        return finished

    def _end(self, lane: Lane, drafted: int) -> None:
        """Forget what cycles committed beyond the end of an answer. drafted: tokens before the last tree."""
        tokens, cache = lane.history.ids[0].tolist()[:-1], self.target.cache
        cache.length, self.target.tokens = len(tokens), tokens
        if cache.states:
            cache.crop(len(tokens))
            self.target.tokens = tokens[: cache.length]
        if isinstance(self.drafter, CapturedDrafter):
            self.drafter.ended(tokens, drafted)

    @torch.inference_mode()
    def run(self, lanes: Sequence[Lane]) -> list[Any]:
        """Run one cycle of each lane, whose drivers are `texts`, and read its record; return these, or errors."""
        pairs = [(lane, cast(CapturedDriver, lane.driver)) for lane in lanes]
        for lane, driver in pairs:
            driver.follow(lane)
        self.make_ready(pairs[0][1].sampler.request)
        plans = [REST if driver.policy is None else driver.policy.plan() for _, driver in pairs]
        self.plant_each(
            {
                driver: (lane.root, not plan.rests)
                for (lane, driver), plan in zip(pairs, plans, strict=True)
            }
        )
        sent = self._start(0)
        sent.marks[-1].wait()
        records = dict(zip(self.texts, sent.record.view(len(self.texts), -1), strict=True))
        return [
            driver.result(lane, records[driver], sent, plan)
            for (lane, driver), plan in zip(pairs, plans, strict=True)
        ]

    def give_up(self, lane: Lane, error: CaptureError) -> None:
        """Have a lane's cycles run without graphs from here on."""
        if not isinstance(error, GraphMemoryError):  # else the next answer may find some
            lane.driver.joined = None
        lane.driver = EagerDriver(self.target, self.drafter, self.policy)
        lane.stats.notes.append(f"{error}; cycles ran without graphs")
        if isinstance(self.drafter, RowDraft):
            self.drafter.follow(lane.history.ids[0].tolist()[:-1])

    def result(self, lane: Lane, values: Tensor, sent: Sent, plan: Plan) -> Any:
        """Return the cycle that a record tells of, or its error."""
        learns = self.learns and (plan.times or not self._learns_there())
        try:
            record = self._read(values)
            done = self._commit(lane, record, sent.seconds(None), learns=learns)
            self.target.tokens += [lane.root, *done.tokens[:-1]]
            lane.root = done.tokens[-1]
            if lane.reason is not None:
                self._end(lane, record.length)
        except Exception as error:  # of this text alone
            return error
        return done

    def follow(self, lane: Lane) -> None:
        """Move to larger caches where a text has come to the end of its room."""
        if lane.history.length > lane.room:
            with sharing(self.tree.device, self.target.running)():
                cycle.make_more_room(self, lane)

    def plant(self, token: int, *, drafts: bool = True) -> None:
        """Begin a tree; drafts: whether it may become more than its root."""
        self.tree.restart()
        self.tree.tokens[:1].fill_(token)
        if self.under_way is not None:
            self.under_way.fill_(1)
            self.frontier.live.fill_(drafts)

    def plant_each(self, roots: Mapping["CapturedDriver", tuple[int, bool]]) -> None:
        """Begin the trees of texts; roots: of each its token, and whether it may become more."""
        for driver, (token, drafts) in roots.items():
            driver.plant(token, drafts=drafts)

    def _start(self, number: int) -> Sent:
        """Launch a cycle."""
        device = self.tree.device
        with sharing(device, self.target.running)():  # on its device, if there are several
            began = Mark(device)
            end = self._grow()
            drafted = Mark(device)
            late = self._missing([end])
            self._run("finish" if late else end)
            into = self._records[number % 2]
            into.copy_(self.record, non_blocking=True)
            # off CUDA a record of its own, as the device would have another memory
            sent = Sent(
                into if device.type == "cuda" else into.clone(), (began, drafted, Mark(device))
            )
            if late:  # for the next trees, as none is under way
                self._capture(*late)
            return sent

    def _read(self, values: Tensor) -> Record:
        """Parse a record that has been copied to the host."""
        numbers, tokens, path, *arrays = values.split(
            [NUMBERS, *[self.longest] * 2, *[self.budget] * 5]
        )
        count, grown, kept, passes, length, overflow, _ = numbers.tolist()
        if overflow:
            raise policies.named(self.policy, overfull(self.tree.capacity, grown))
        nodes, parents, depths, *sums = (array[:kept].clone() for array in arrays)
        edges, paths = (bits.int().view(torch.float32) for bits in sums)
        tree = TokenTree.of(nodes, parents, depths, edges, paths, passes)
        return Record(length, count, tokens[:count].tolist(), path[:count].tolist(), grown, tree)


def is_guided(source: Drafter | None) -> bool:
    """Return whether a grammar guides this drafter."""
    while isinstance(source, Wrapped) and not isinstance(source, Guided):
        source = source.inner
    return isinstance(source, Guided)


def states_sizes(policy: TreePolicy | None) -> bool:
    """Return whether a policy states how wide and deep its trees become, so that buffers can be made for them."""
    try:
        return policy is not None and policy.rows > 0 and policy.passes > 0
    except NotImplementedError:
        return False
