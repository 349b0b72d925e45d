"""A cycle: grow a tree, verify it, walk down it, commit the accepted path; and the driver that does so eagerly.

`run_eager` is the whole of it, over a list of lanes: root, level, verify, commit. Each lane's cycle is a generator that
stops where rows can be run with those of other lanes, so that one lane is the plain case. The captured driver
(engine/captured.py) replays the same functions as graphs.
"""

import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from specengine import drafters, ops, policies
from specengine.drafters import Drafter, RowDraft, Wrapped, innermost, reserve
from specengine.drafters._wrappers import Origins
from specengine.errors import DrafterError, InputError, PolicyError, SpecEngineError, restating
from specengine.models import SharedRows, Successors, Target
from specengine.ops import Nodes, Step, TokenTree
from specengine.ops.cuda_graphs import CaptureError
from specengine.ops.tree import CAPACITY
from specengine.policies import Plan, TreePolicy
from specengine.records import Cycle, Outcome, Seconds, Stats, TokenLogprob
from specengine.request.sampling import History, Sampler, Stopper, of_rows, refuse_no_choice

REST = Plan(rests=True)  # of plain decoding, and of trees that are their root alone
MAX_REPEATED = 32  # tokens
# tokens of earlier texts that are compared, and how many of these count as one that repeats
MAX_RECALLED, RECALLED = 128, 2
MOST_PUT_OFF = 64  # plain cycles that a drafter is handed at once: more of them have the interpreter collect garbage


@dataclass
class Lane:
    """One request under way.

    driver  runs its cycles
    root    the token committed last, which is the root of the next tree
    room    tokens of prompt and answer that the caches have room for
    limit   tokens of prompt and answer that there may be
    source  drafter to grow trees from: the engine's own, wrapped where the request asks for it; None for plain decoding
    origins where nodes come from, noted where they are wanted
    began   time.perf_counter() at the start, in seconds
    memory  of earlier texts, a TextMemory of csrc/spec/memory.hpp, or None
    reason  why the answer has ended; None while it goes on
    """

    driver: "EagerDriver"
    sampler: Sampler
    stopper: Stopper
    history: History
    stats: Stats
    root: int
    room: int
    limit: int
    source: Drafter | None = None
    origins: Origins | None = None
    memory: Any = None
    began: float = field(default_factory=time.perf_counter)
    reason: str | None = None

    def commit(self, token: int) -> bool:
        """Append a token to the answer; return whether the answer ends with it."""
        self.history.append(token)
        self.reason = self.stopper.reason(token, self.history)
        return self.reason is not None

    def count(self, cycle: Cycle) -> None:
        self.stats.elapsed_s = time.perf_counter() - self.began
        self.stats.ttft_s = self.stats.ttft_s or self.stats.elapsed_s
        self.stats.num_generated_tokens += len(cycle.tokens)
        self.stats.add(cycle)


class PutOff(NamedTuple):
    """Hold what a drafter takes in of a plain cycle. root: the root's token; token: the one behind it."""

    root: int
    token: int
    features: Tensor | None
    successors: Successors | None


class Draft(NamedTuple):
    """The tree that a cycle proposes."""

    tree: TokenTree  # what the target verifies
    grown: TokenTree  # all that was drafted
    # int64 [tree.size], the nodes of `grown` that make up `tree`; None: all of them
    kept: Tensor | None = None


def first(drafter: Drafter, policy: TreePolicy, tree: TokenTree, seconds: Seconds) -> Nodes:
    """Return the nodes of a new tree to draft from: the root, or none if the policy skips drafting."""
    return _grown(drafter, policy, tree, tree.root_alone().where(False), seconds, "first")


def root(
    drafter: Drafter, policy: TreePolicy, tree: TokenTree, frontier: Nodes, seconds: Seconds
) -> Nodes:
    """Run the first draft pass and append the first level; return the nodes to draft from next."""
    tree.passes += frontier.live > 0
    return _grown(drafter, policy, tree, frontier, seconds, "root")


def level(
    drafter: Drafter, policy: TreePolicy, tree: TokenTree, frontier: Nodes, seconds: Seconds
) -> Nodes:
    """Run one draft pass from the frontier and append the next level; return the nodes to draft from next.

    On a device an empty frontier appends nothing.
    """
    if tree.device.type == ops.tree.FREE or not getattr(innermost(drafter), "counts", False):
        tree.passes += frontier.live > 0
    return _grown(drafter, policy, tree, frontier, seconds, "step")


def _grown(
    drafter: Drafter,
    policy: TreePolicy,
    tree: TokenTree,
    frontier: Nodes,
    seconds: Seconds,
    method: Literal["first", "root", "step"],
) -> Nodes:
    """Run a pass by this method of the drafter, none at first, and have the policy append what comes of it."""
    began = time.perf_counter()
    step = Step(tree.log_probs[:0, None]) if method == "first" else None
    try:
        if method == "root":
            step = drafter.root(tree)
        elif step is None:
            if ops.is_free(frontier.live):
                frontier = Nodes(frontier.alive(), frontier.live)
                if not len(frontier.ids):
                    return frontier
            step = drafter.step(tree, frontier)
        drafted = time.perf_counter()
        grown = policy.grow(tree, frontier, step)
    except Exception as error:
        # else looking waits for a device
        is_seen = ops.is_free(tree.size) and not says_enough(error)
        if is_seen:
            policies.require_nodes(policy, "grow", frontier, tree)
        if step is None:
            blame(drafter, method, error)
        elif is_seen:
            drafters.require_step(drafter, step, frontier.ids.shape[0], sys.maxsize)
        blame(policy, "grow", error)
    if not isinstance(grown, Nodes):
        raise policies.no_nodes(policy, "grow", grown)
    seconds.draft += drafted - began
    seconds.policy += time.perf_counter() - drafted
    return grown


def keep(policy: TreePolicy, grown: TokenTree, seconds: Seconds) -> Draft:
    """Select the nodes of the drafted tree to verify. Synchronises with the device if the tree is on one."""
    clock = time.perf_counter()
    try:
        kept = policy.keep(grown)
    except Exception as error:
        blame(policy, "keep", error)
    if not isinstance(kept, Nodes):
        raise policies.no_nodes(policy, "keep", kept)
    kept = Nodes(kept.alive(), kept.live)
    try:
        verified = grown.subtree(kept)
    except InputError as error:
        raise PolicyError(f"{policies.name_of(policy)}: keep returned {error}") from error
    seconds.policy += time.perf_counter() - clock
    return Draft(verified, grown.trimmed(), kept.ids)


def without_ended(draft: Draft, tokens: Sequence[int], stopper: Stopper) -> Draft:
    """Leave out the nodes below those that carry an end token: no answer goes on there.

    tokens: of the verified nodes. Synchronises with the device if the tree is on one.
    """
    tree = draft.tree
    ended = [False]
    for parent in tree.parents.tolist()[1:]:
        ended.append(ended[parent] or (parent > 0 and tokens[parent] in stopper.eos_token_ids))
    rest = [node for node, is_ended in enumerate(ended) if not is_ended]
    if len(rest) == len(ended):
        return draft
    nodes = torch.tensor(rest, dtype=torch.int64, device=tree.device)
    kept = nodes if draft.kept is None else draft.kept.index_select(0, nodes)
    return Draft(tree.subtree(Nodes.of(nodes)), draft.grown, kept)


def grow(
    token: int,
    drafter: Drafter,
    policy: TreePolicy,
    seconds: Seconds,
    device: torch.device,
    plan: Plan,
    *,
    shared: bool = False,
    settle: Callable[[Seconds], None] | None = None,
) -> Generator[SharedRows, None, Draft]:
    """Draft the tree under `token` in steps.

    shared: yield the rows of draft passes that other lanes' can join; settle: run before the first pass, if any is.
    """
    tree = TokenTree.root(token, policy.capacity, device)
    tree.free, tree.origin = drafter.free, drafter.about.origin
    frontier = first(drafter, policy, tree, seconds) if plan.patience else tree.root_alone()
    if plan.patience and not drafter.about.passes:
        frontier = frontier.where(False)
    if drafted := int(frontier.live):
        if settle is not None:
            settle(seconds)
        if shared:
            yield from _shared_pass(drafter, tree, None, seconds)
        frontier = root(drafter, policy, tree, frontier, seconds)
    while width := int(frontier.live):
        drafted += width
        if drafted > tree.capacity:
            raise PolicyError(
                f"{policies.name_of(policy)}: grow returned nodes that have been drafted from already, so the tree "
                "never ends; return new nodes, or an empty Nodes to stop"
            )
        if shared:
            yield from _shared_pass(drafter, tree, frontier, seconds)
        frontier = level(drafter, policy, tree, frontier, seconds)
    return keep(policy, tree, seconds)


def _shared_pass(
    drafter: Drafter, tree: TokenTree, frontier: Nodes | None, seconds: Seconds
) -> Generator[SharedRows, None, None]:
    source = innermost(drafter)
    if not isinstance(source, RowDraft):
        return
    began = time.perf_counter()
    rows = source.ask(tree, frontier)
    seconds.draft += time.perf_counter() - began
    if rows is not None:
        yield rows
        seconds.draft += rows.seconds


def blame(part: TreePolicy | Drafter, method: str, error: Exception) -> NoReturn:
    """Raise the error that names the policy or the drafter whose method has raised this one, itself if it says enough.

    To be called in a handler: a context manager would be entered ten times in a cycle.
    """
    text = str(error)
    if (
        isinstance(part, TreePolicy)
        and isinstance(error, PolicyError)
        and text.startswith(CAPACITY)
    ):
        raise policies.named(part, error) from error
    named = isinstance(error, InputError) and text.startswith(("policy ", "draft"))
    if named or says_enough(error):
        raise error
    if not isinstance(error, InputError):
        text = f"raised {type(error).__name__}: {text}"
    if isinstance(part, TreePolicy):
        raise PolicyError(f"{policies.name_of(part)}: {method}: {text}") from error
    raise DrafterError(f"{drafters.name_of(part)}: {method}: {text}") from error


def says_enough(error: Exception) -> bool:
    """Return whether this is an error of specengine that is more than of an input, or one of the machine."""
    kinds = SpecEngineError | MemoryError | torch.OutOfMemoryError
    return isinstance(error, kinds) and type(error) is not InputError


@contextmanager
def blaming(part: TreePolicy | Drafter, method: str) -> Iterator[None]:
    """Have errors within the context name this part, as `blame` does."""
    try:
        yield
    except Exception as error:
        blame(part, method, error)


def result_of(steps: Generator[Any, None, Any]) -> Any:
    """Run a generator that yields nothing, and return its result."""
    try:
        next(steps)
    except StopIteration as end:
        return end.value


class Inspected(Wrapped):
    """A drafter whose distributions are checked before a policy sees them, and the frontiers that it is asked for.

    Raises DrafterError where a step is none, has another number of rows than the frontier, or holds NaN or what is no
    token; PolicyError where the frontier is none of the tree.
    """

    def __init__(self, inner: Drafter, policy: TreePolicy, vocab_size: int) -> None:
        super().__init__(inner)
        self._policy, self._vocab_size = policy, vocab_size

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        policies.require_nodes(self._policy, "grow", frontier, tree)
        return super().step(tree, frontier)

    def changed(self, step: Step, tree: TokenTree, frontier: Nodes) -> Step:
        drafters.require_step(self.inner, step, frontier.ids.shape[0], self._vocab_size)
        return step


class EagerDriver:
    """Runs the cycles of these parts without capture."""

    captured = False  # whether its times are those of graphs
    joined: Any = None  # what runs its cycles with those of a pool's other texts, if anything does
    prompt_rows = 1  # by which passes of the draft over a prompt are padded

    def __init__(self, target: Target, drafter: Drafter | None, policy: TreePolicy | None) -> None:
        if policy is not None:
            policies.require_sizes(policy)
        if drafter is not None and not isinstance(getattr(drafter, "name", None), str):
            raise DrafterError(f"{drafters.name_of(drafter)}.name: missing, accepted a string")
        self.target, self.drafter, self.policy = target, drafter, policy
        self.device = target.device if drafter is None else drafter.device
        self.budget = 1 if policy is None else min(policy.budget, policy.capacity)
        self.longest = 1 if policy is None else longest_path(policy)
        # whether the policy learns from cycles
        self.learns = policy is not None and type(policy).learn is not TreePolicy.learn
        self.patience = 0 if policy is None else policy.plan().patience
        self.unread = self.longest + self.patience  # tokens between draft passes
        self.inspected = False  # whether a tree has been looked at closely, or need not be
        self._put_off: list[PutOff] = []  # plain cycles that the drafter has yet to take in
        # the drafter, where it has a prompt to run before its first pass
        self.late: RowDraft | None = None

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens and the trees behind them."""
        self.target.reserve(tokens, self.budget)
        if self.policy is not None:
            reserve(self.drafter, tokens, self.policy.capacity, self.unread)

    def draft(
        self, token: int, seconds: Seconds, source: Drafter, plan: Plan, *, shared: bool = False
    ) -> Generator[SharedRows, None, Draft]:
        """Draft the tree under `token`, as `grow`; source: the drafter to grow it from.

        Raises PolicyError or DrafterError if a part breaks its contract.
        """
        assert self.policy is not None
        if self._put_off:
            self.catch_up()
        if not self.inspected:
            source = Inspected(source, self.policy, self.target.vocab_size)
        settle = None if self.late is None else self._settle
        draft = yield from grow(
            token, source, self.policy, seconds, self.device, plan, shared=shared, settle=settle
        )
        if not self.inspected:
            if draft.kept is not None:
                policies.require_nodes(self.policy, "keep", Nodes.of(draft.kept), draft.grown)
            self.inspected = len(draft.grown) > 1
        return draft

    def _settle(self, seconds: Seconds) -> None:
        """Have the drafter run the prompt that waits. Its time is none of the cycle's, from which policies learn."""
        began = time.perf_counter()
        cast(RowDraft, self.late).settle()
        self.late = None
        seconds.total = seconds.model = began - time.perf_counter()

    def put_off(self, root: int, cycle: Cycle) -> None:
        """Hand the drafter a plain cycle later, with others: several at once take less time. root: its token."""
        self._put_off.append(PutOff(root, cycle.tokens[0], cycle.features, cycle.successors))
        if len(self._put_off) >= MOST_PUT_OFF:
            self.catch_up()

    @torch.inference_mode()
    def catch_up(self) -> None:
        """Hand the drafter what was put off."""
        cycles, self._put_off = self._put_off, []
        if cycles and self.drafter is not None:
            with blaming(self.drafter, "accept"):
                self.drafter.accept(joined(cycles, self.device))

    def forget(self) -> None:
        """Drop what was put off: its text has ended early."""
        self._put_off = []

    @property
    def model_seconds(self) -> float:
        """Return the seconds spent in forwards of target and draft so far."""
        return self.target.model_seconds + (
            self.drafter.model_seconds if self.drafter is not None else 0.0
        )

    def verify(self, tree: TokenTree) -> tuple[Tensor, Tensor | None]:
        """Return logits and features of every node, as `Target.verify`."""
        return self.target.verify(tree)

    def prepare(self, sampler: Sampler) -> None:
        """Prepare for cycles, after target and draft have taken in a prompt, or have moved to larger caches."""


def longest_path(policy: TreePolicy) -> int:
    """Return the maximum number of nodes from the root to a leaf of the policy's trees."""
    try:
        return min(policy.passes + 1, policy.capacity)
    except NotImplementedError:
        return policy.capacity


def walk(
    tree: TokenTree,
    choose: Callable[[int], int | None],
    commit: Callable[[int], bool],
    policy: TreePolicy | None = None,
) -> tuple[list[int], list[int]]:
    """Return accepted node ids (root first) and committed tokens (those of the path below the root, then one more).

    choose  the target's token after a node, given the tokens committed so far; None where its logits are not finite
    commit  takes a chosen token, in order; True ends the walk, and the token is the last one committed
    policy  that shaped the tree, named in errors

    At each node the target chooses once. While a child carries the chosen token, the walk moves there; the first
    token that no child carries is the bonus token. Lossless for any tree where the noise of a choice is a function of
    its position, fixed before the first tree; for trees that do not depend on the noise no lossless rule accepts more.
    A node below the root whose logits are not finite is not entered:
    its token becomes the last one.
    """
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    child = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))
    }
    if len(child) < len(tokens):
        raise policies.twins(policy, tokens, parents)
    path: list[int] = [0]
    committed: list[int] = []
    token = choose(0)
    while token is not None:
        committed.append(token)
        if commit(token):
            break
        node = child.get((path[-1], token))
        if node is None:
            break
        token = choose(node)
        if token is not None:
            path.append(node)
    return path, committed


def drafted_end(tree: TokenTree, path: Sequence[int], lane: Lane) -> int | None:
    """Return the node below a path that carries the end token which has ended the lane; None if there is none."""
    token = lane.stopper.tokens[-1]
    if token not in lane.stopper.eos_token_ids:
        return None
    nodes = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    return next((node for node, edge in enumerate(nodes) if edge == (path[-1], token)), None)


class Verdict(NamedTuple):
    """The target's verdict on a tree; fields as in Cycle."""

    path: list[int]
    tokens: list[int]
    end: int | None
    features: Tensor | None
    successors: Successors | None
    logprobs: list[TokenLogprob] | None


def run_lanes(lanes: Sequence[Lane], pieces: Sequence[SharedRows] = ()) -> list[Any]:
    """Run one cycle of every lane, and pieces of prompts; return records or errors, as `run_eager` does.

    Lanes whose drivers have graphs of all texts are run in these, before the others: a graph writes after what each
    cache holds, where a piece would have its rows.
    """
    whole = [lane for lane in lanes if lane.driver.joined is not None]
    eager = [lane for lane in lanes if lane.driver.joined is None]
    try:
        done = whole[0].driver.joined.run(whole) if whole else []
    except CaptureError as error:
        for lane in whole:
            cast(Any, lane.driver).give_up(lane, error)
        return run_eager(lanes, pieces)
    done += run_eager(eager, pieces)
    results = dict(zip(map(id, [*whole, *eager]), done, strict=True))
    return [results[id(lane)] for lane in lanes]


@torch.inference_mode()
def run_eager(lanes: Sequence[Lane], pieces: Sequence[SharedRows] = ()) -> list[Any]:
    """Run one cycle of every lane; return their records. One lane is the plain case.

    Draft passes of all lanes are run together, then the trees of all, with the `pieces` of prompts. Of several lanes
    one that fails has its error in the place of its record; a piece that fails has it as `error`.
    """
    # a text alone in a pool may have its rows run in graphs of all
    alone = len(lanes) == 1 and getattr(lanes[0].driver.target, "joined", None) is None
    if alone and not pieces:
        return [result_of(run_cycle(lanes[0]))]
    results: list[Any] = [None] * len(lanes)
    waiting: dict[int, SharedRows] = {}  # by number of the lane
    steps = [run_cycle(lane, shared=True) for lane in lanes]

    def go_on(number: int, error: BaseException | None = None) -> None:
        try:
            waiting[number] = next(steps[number]) if error is None else steps[number].throw(error)
        except StopIteration as end:
            results[number] = end.value
        except BaseException as fault:  # of this lane alone
            results[number] = fault

    for number in range(len(lanes)):
        go_on(number)
    while passes := {number: rows for number, rows in waiting.items() if rows.drafts}:
        run_shared([*passes.values()])
        for number, rows in passes.items():
            del waiting[number]
            go_on(number, rows.error)
    run_shared([*waiting.values(), *pieces])
    trees, waiting = waiting, {}
    for number, rows in trees.items():
        go_on(number, rows.error)
    return results


def run_shared(batch: Sequence[SharedRows]) -> None:
    """Run rows of several texts, those of one model's weights in one call. What fails has its error as `error`."""
    groups: dict[int, list[SharedRows]] = {}
    for rows in batch:
        groups.setdefault(id(getattr(rows.model, "weights_of", rows.model)), []).append(rows)
    for group in groups.values():
        began = time.perf_counter()
        error: BaseException | None = None
        try:
            group[0].model.run_lanes(group)
        except BaseException as fault:  # raised by each text
            error = fault
        for rows in group:
            rows.seconds = time.perf_counter() - began
            rows.error = error


def run_cycle(lane: Lane, *, shared: bool = False) -> Generator[SharedRows, None, Cycle]:
    """Run a lane's cycle in steps; return its record. shared: yield rows that can be run with other lanes'."""
    driver = lane.driver
    began, model_seconds = time.perf_counter(), driver.model_seconds
    if lane.history.length > lane.room:
        make_more_room(driver, lane)
    seconds = Seconds(captured=driver.captured)
    plan = REST if driver.policy is None or driver.budget == 1 else driver.policy.plan()
    if plan.rests or lane.source is None:
        alone = TokenTree.alone(lane.root, driver.device)
        draft = Draft(alone, alone)
    else:
        draft = yield from driver.draft(lane.root, seconds, lane.source, plan, shared=shared)
    if driver.policy is not None and draft.tree.capacity > 1:
        tokens = draft.tree.tokens.tolist()
        if (
            len(tokens) > driver.budget
            or not 0 <= min(tokens) <= max(tokens) < driver.target.vocab_size
        ):
            raise policies.no_tree(driver.policy, tokens, driver.budget, driver.target.vocab_size)
        if not lane.stopper.eos_token_ids.isdisjoint(tokens):
            draft = without_ended(draft, tokens, lane.stopper)
    if shared:
        clock = time.perf_counter()
        rows = cast(Any, driver.target).ask(draft.tree, greedy=lane.sampler.takes_largest)
        seconds.verify = time.perf_counter() - clock
        if rows is not None:
            yield rows
            seconds.verify += rows.seconds
    verdict = verify(driver, lane, draft.tree, seconds, plan)
    clock = time.perf_counter()
    cycle = commit(driver, lane, draft, verdict, seconds, plan)
    now = time.perf_counter()
    seconds.commit = now - clock
    seconds.total += now - began
    seconds.model += driver.model_seconds - model_seconds
    if driver.policy is not None and plan.learns and driver.learns:
        try:
            driver.policy.learn(Outcome.of(cycle))
        except Exception as error:
            blame(driver.policy, "learn", error)
        seconds.policy += (learnt := time.perf_counter() - now)
        seconds.total += learnt
    lane.count(cycle)
    return cycle


def verify(
    driver: EagerDriver, lane: Lane, tree: TokenTree, seconds: Seconds, plan: Plan
) -> Verdict:
    """Have the target choose a token at each node that the walk comes to, and append those tokens to the answer.

    Adds the time spent to `seconds`. Raises NumericalError where the root's logits are NaN or infinite throughout.
    """
    clock = time.perf_counter()
    chosen = driver.target.choose(tree) if lane.sampler.takes_largest else None
    logits = None
    if chosen is not None:
        choices = [token if token >= 0 else None for token in chosen.tokens]
        choose: Callable[[int], int | None] = choices.__getitem__
        features, successors = chosen.features, chosen.successors
    else:
        logits, features = driver.verify(tree)
        wanted = 0 if plan.rests else driver.target.successors
        successors = Successors.of(logits, wanted) if wanted else None
        choose = lane.sampler.chooser_of_tree(logits, lane.history, tree.depths)
    seconds.verify += -clock + (clock := time.perf_counter())
    path, tokens = walk(tree, choose, lane.commit, driver.policy)
    seconds.walk = time.perf_counter() - clock
    if not tokens:
        refuse_no_choice(None, lane.history.length)
    top = lane.sampler.logprobs
    logprobs = None if top is None or logits is None else of_rows(logits[path], tokens, top)
    end = None if lane.reason is None else drafted_end(tree, path, lane)
    return Verdict(path, tokens, end, features, successors, logprobs)


def commit(
    driver: EagerDriver, lane: Lane, draft: Draft, verdict: Verdict, seconds: Seconds, plan: Plan
) -> Cycle:
    """Keep the accepted path in the target's cache, and hand the cycle to the drafter."""
    driver.target.commit(draft.tree, verdict.path)
    origins = None if lane.origins is None else lane.origins.of(draft.grown)
    path, tokens, end, features, successors, logprobs = verdict
    copies = (
        plan.rests and plan.learns and driver.drafter is not None and driver.drafter.traits.copies
    )
    cycle = Cycle(
        draft.tree,
        path,
        tokens,
        seconds,
        len(draft.grown) - 1,
        features,
        draft.grown,
        draft.kept,
        successors,
        origins,
        logprobs,
        driver.target.experts,
        repeated=repeated(lane.history.ids[0], lane.memory) if copies else 0,
        end=end,
    )
    if driver.drafter is not None and driver.policy is not None:
        if plan.rests:
            driver.put_off(lane.root, cycle)
        else:
            try:
                driver.drafter.accept(cycle)
            except Exception as error:
                blame(driver.drafter, "accept", error)
    lane.root = tokens[-1]
    return cycle


def repeated(tokens: Tensor, memory: Any = None) -> int:
    """Return the length of the longest suffix that occurs earlier too, at most MAX_REPEATED. tokens: int64 [n]

    memory: of earlier texts, in which a suffix counts for a share of its length, as fewer of them go on alike.
    """
    text = tokens.cpu().numpy()
    matches = [] if memory is None else memory.recall(text[-MAX_RECALLED:].tolist())
    recalled = matches[0][0] if matches else 0
    count, ends = 0, (text[:-1] == text[-1]).nonzero()[0]
    while len(ends) and count < MAX_REPEATED:
        count += 1
        ends = ends[ends.searchsorted(count) :]  # they ascend
        ends = ends[text[ends - count] == text[-1 - count]]
    return max(count, min(recalled // RECALLED, MAX_REPEATED))


def joined(cycles: Sequence[PutOff], device: torch.device) -> Cycle:
    """Return plain cycles of one text as one cycle, whose tree is the chain of their roots, all accepted."""
    tokens = torch.tensor([cycle.root for cycle in cycles], dtype=torch.int64, device=device)
    nodes = torch.arange(len(cycles), dtype=torch.int64, device=device)
    blank = torch.zeros(len(cycles), dtype=torch.float32, device=device)
    features = [cycle.features for cycle in cycles if cycle.features is not None]
    successors = [cycle.successors for cycle in cycles if cycle.successors is not None]
    return Cycle(
        TokenTree.of(tokens, nodes - 1, nodes, blank, blank),
        list(range(len(cycles))),
        [cycle.token for cycle in cycles],
        Seconds(),
        len(cycles) - 1,
        torch.cat(features) if features else None,
        successors=Successors(*map(torch.cat, zip(*successors, strict=True)))
        if successors
        else None,
    )


def make_more_room(driver: EagerDriver, lane: Lane) -> None:
    """Reserve caches for twice as many tokens as a text has, between two of its cycles."""
    lane.room = min(lane.limit, 2 * lane.history.length)
    make_room(driver, lane.room)
    driver.prepare(lane.sampler)


def make_room(driver: EagerDriver, tokens: int) -> None:
    """Reserve caches for a prompt and answer of `tokens`. Raises InputError if memory is short."""
    # torch's allocators raise RuntimeError
    with restating(
        (MemoryError, RuntimeError),
        lambda error: InputError(
            f"max_new_tokens: not enough memory to cache {tokens} tokens of prompt and answer; ask for fewer "
            f"({(str(error).splitlines() or [type(error).__name__])[0]:.200})"
        ),
        (SpecEngineError,),
    ):
        driver.reserve(tokens)
