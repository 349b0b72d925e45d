"""The drivers of an engine's cycles, by policy: what each has learnt and captured, and how they begin an answer.

The first tree of an engine is checked closely (cycle.Inspected), later ones where that costs no time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from specengine import policies
from specengine.captured import CapturedDriver
from specengine.costs.measuring import stored
from specengine.cuda_graphs import CaptureError, Graphs, sharing
from specengine.cycle import EagerDriver, Lane, blaming, make_room
from specengine.drafters import MAX_WAITING, Drafter, Hints, RowDraft, Traits, innermost
from specengine.drafters._wrappers import Coupled, Guided, Origins
from specengine.errors import InputError, shown
from specengine.models import Target
from specengine.policies import TreePolicy
from specengine.registry import plain
from specengine.request.grammars import Constraint
from specengine.request.options import Request
from specengine.request.sampling import History, Sampler, signed

if TYPE_CHECKING:
    from specengine.engine import Engine

PLAIN = "plain"
DEFAULT_WARMUP_TOKENS = 2048
MIN_ROOM = 1024  # tokens of an answer that room is made for at once; then for twice as many tokens as there are
MAX_CAPTURED = 4  # policies by name, next to the engine's own, whose graphs are kept


class Drivers(NamedTuple):
    """The drivers of one policy: eager, and captured if the target is."""

    eager: EagerDriver
    captured: CapturedDriver | None

    @property
    def drafter(self) -> Drafter | None:
        return self.eager.drafter

    @property
    def policy(self) -> TreePolicy | None:
        return self.eager.policy


class KeptDrivers:
    """An engine's drivers by policy, with what each policy has learnt and captured.

    Those of a policy's name and options are kept from the first call that asks for them, those of a TreePolicy until a
    call brings another one. A name and options that give what the engine was loaded with mean its own policy. Graphs
    take memory: of the policies by name the MAX_CAPTURED asked for last keep theirs.
    """

    def __init__(self, target: Target, drafter: Drafter | None, policy: TreePolicy | None) -> None:
        self._target, self._drafter = target, drafter
        self._named: dict[tuple[str, ...], Drivers] = {}
        self._brought: Drivers | None = None
        self.own = self.of(policy)

    def asked(
        self, policy: str | TreePolicy | None, options: Mapping[str, Any] | None = None
    ) -> Drivers:
        """Return the drivers of a call's policy: a name, NAME/PRESET, `plain`, a TreePolicy, or None for the own one.

        InputError for unknown names and options, and for any policy but `plain` where there is no draft.
        """
        options = options or {}
        if policy is None or policy == PLAIN:
            if options:
                raise InputError(
                    "policy_options: they need a policy given by name, other than plain"
                )
            return self.own if policy is None else self._by_name(PLAIN, {})
        if self._drafter is None:
            raise InputError(
                f"policy: got {shown(policy)}, accepted plain: this engine was loaded without a draft"
            )
        if isinstance(policy, str):
            return self._by_name(policy, options)
        return self._by_itself(policies.of(policy, options))

    def _by_name(self, name: str, options: Mapping[str, Any]) -> Drivers:
        # as text, as options may be given as text, and need not be hashable
        try:
            key = name, *(f"{option}={value}" for option, value in sorted(options.items()))
        except (RecursionError, ValueError) as error:
            raise InputError(
                f"policy_options: got {shown(options)}, which have no text form"
            ) from error
        if key not in self._named:
            policy = None if name == PLAIN else policies.of(name, options)
            self._named[key] = self.own if policy == self.own.policy else self.of(policy)
        elif self._target.captured:
            drivers = self._named.pop(key)
            if drivers.captured is None:  # it has given up its graphs
                drivers = drivers._replace(captured=self.of(drivers.policy).captured)
            self._named[key] = drivers
        return self._bounded(key)

    def _bounded(self, key: tuple[str, ...]) -> Drivers:
        """Return the drivers asked for last; those asked for longest ago give up their graphs if there are many."""
        captured = [
            one
            for one, kept in self._named.items()
            if kept.captured is not None and kept is not self.own
        ]
        for one in captured[:-MAX_CAPTURED]:
            self._named[one] = self._named[one]._replace(captured=None)
        return self._named[key]

    def forget_graphs(self) -> None:
        """Keep what policies have learnt, without their graphs."""
        self.own = self.own._replace(captured=None)
        self._named = {key: kept._replace(captured=None) for key, kept in self._named.items()}
        self._brought = None if self._brought is None else self._brought._replace(captured=None)

    def _by_itself(self, policy: TreePolicy) -> Drivers:
        if policy is self.own.policy:
            return self.own
        if self._brought is None or self._brought.policy is not policy:
            self._brought = self.of(policy)
        return self._brought

    def of(self, policy: TreePolicy | None) -> Drivers:
        """Make the drivers of a policy. Without one they decode plainly and leave the draft alone."""
        target = self._target
        drafter = None if policy is None else self._drafter
        captured = CapturedDriver(cast(Any, target), drafter, policy) if target.captured else None
        eager = EagerDriver(target, drafter, policy)
        eager.inspected = captured is not None and all(  # our own need no closer look
            part is None or type(part).__module__.startswith("specengine.")
            for part in (drafter, policy)
        )
        return Drivers(eager, captured)


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """The result of `Engine.warmup`: captured functions by name, seconds, and bytes of graphs and caches."""

    captured: tuple[str, ...]
    seconds: float
    graph_bytes: int
    cache_bytes: int

    def __str__(self) -> str:
        graphs, caches = self.graph_bytes / 2**20, self.cache_bytes / 2**20
        return f"{len(self.captured)} graphs in {self.seconds:.2f} s, {graphs:.0f} MiB, caches {caches:.0f} MiB"


def warm_up(
    engine: Engine,
    tokens: int | None,
    policy: str | TreePolicy | None,
    policy_options: Mapping[str, Any] | None,
) -> WarmUp:
    """Capture all graphs of a policy; see `Engine.warmup`."""
    target = engine.target
    drivers = engine.drivers.asked(policy, policy_options)
    captured = drivers.captured
    tokens = min(DEFAULT_WARMUP_TOKENS, target.max_context) if tokens is None else plain(tokens)
    if captured is None:
        raise InputError("warmup: this engine captures no graphs; load it with graphs=True")
    if not 1 <= tokens <= target.max_context:
        raise InputError(f"tokens: got {tokens}, accepted 1 to {target.max_context}")
    graphs = captured.graphs
    with engine.hold(
        "this engine is generating; warm it up before, or after that stream has ended"
    ):
        try:
            with sharing(target.device, target.running)():
                want(target, drivers.drafter)
                captured.warm_up(tokens)
        except CaptureError as error:
            run_eagerly(engine, error)
            graphs = Graphs(target.device)
    caches = [
        cache
        for part in (target, engine.drafter)
        if (cache := getattr(part, "cache", None)) is not None
    ]
    return WarmUp(
        captured=tuple(str(name) for name in graphs.captures),
        seconds=graphs.seconds,
        graph_bytes=graphs.bytes,
        cache_bytes=sum(cache.nbytes for cache in caches),
    )


def run_eagerly(engine: Engine, error: CaptureError) -> None:
    """Run all cycles without graphs from here on. Raises the error of a capture where graphs were asked for."""
    recipe = engine.watch.recipe
    if recipe is None or recipe.options.graphs:
        raise error
    engine.target.captured = False
    engine.drivers.forget_graphs()
    engine.notes = [*engine.notes, f"{error}; cycles run without graphs"]
    engine.reset()


def want(target: Target, drafter: Drafter | None) -> None:
    """Ask the target for the features and successors that the draft reads."""
    traits = Traits() if drafter is None else drafter.traits
    target.want(traits.features, traits.successors)


def begin(
    engine: Engine, drivers: Drivers, request: Request
) -> Generator[Any, Any, tuple[Lane, CapturedDriver | None]]:
    """Take in the prompt; return the lane, and the captured driver, None where graphs are done without."""
    try:
        if drivers.captured is None or engine.target.captured:
            return (yield from _begin(engine, drivers, request)), drivers.captured
    except CaptureError as error:
        run_eagerly(
            engine, error
        )  # and begin again below, as the error holds memory of the capture
    return (
        yield from _begin(
            engine,
            drivers._replace(captured=None),
            dataclasses.replace(request, reuse_cache=False),
        )
    ), None


@torch.inference_mode()
def _begin(engine: Engine, drivers: Drivers, request: Request) -> Generator[Any, Any, Lane]:
    target, pool = engine.target, engine.pool
    drafter, policy = drivers.drafter, drivers.policy
    stats = request.stats
    hints = _hints_for(drafter, request)
    rests = False
    if engine.ring is not None and drafter is not None:
        cast(Any, innermost(drafter)).renew()  # takes a head that was learnt meanwhile
    if policy is not None:
        costs = functools.cache(lambda: stored.find(target, drafter, drivers.captured))
        with blaming(policy, "begin"):
            policy.begin(
                len(request.prompt),
                request.sampler.seed is not None,
                costs if pool is None else lambda: pool.costs(engine, costs()),
            )
        with blaming(policy, "plan"):
            plan = policy.plan()
        rests = plan.rests
        stats.policy, stats.plain_reason = repr(policy), plan.reason
        if plan.reads_costs and costs().doubt:
            stats.notes.append(f"costs are provisional: {costs().doubt} while they were measured")
    if not request.reuse_cache and pool is None:  # a pool's caches are what its texts share
        engine.reset()
    stats.num_prompt_tokens = len(request.prompt)
    stats.draft = drafter.name if drafter is not None else ""
    # processors and criteria read it there
    on_device = request.sampler.reads_history or bool(request.stopper.criteria)
    most = len(request.prompt) + request.stopper.left
    driver = drivers.eager if drivers.captured is None else drivers.captured
    room = min(most, len(request.prompt) + MIN_ROOM) if drivers.captured is None else most
    history = History(request.prompt, room, target.device if on_device else torch.device("cpu"))
    lane = Lane(
        driver, request.sampler, request.stopper, history, stats, request.prompt[-1], room, most
    )
    make_room(driver, room)
    before = request.prompt[:-1]
    want(target, drafter)
    if pool is not None:
        yield from pool.share(engine, before, drafter)
    cached = min(
        target.cached(before), drafter.cached(before) if drafter is not None else len(before)
    )
    stats.num_cached_prompt_tokens = cached
    features = (
        target.prefill(before, cached)
        if pool is None
        else (yield from pool.prefill(engine, before, cached))
    )
    if drafter is not None:
        waits = drivers.captured is None and (pool is None or rests) and len(before) <= MAX_WAITING
        with blaming(drafter, "begin"):
            drafter.begin(before, features, hints._replace(waits=waits))
        inner = innermost(drafter)
        drivers.eager.late = inner if waits and isinstance(inner, RowDraft) else None
    if pool is not None:
        pool.read(engine)
    driver.prepare(request.sampler)
    stats.notes += engine.notes + target.notes
    stats.notes += [] if drivers.captured is None else drivers.captured.notes
    return lane


def _hints_for(drafter: Drafter | None, request: Request) -> Hints:
    """Return the hints for a drafter. Raises InputError if there is a prediction and the drafter has no use for it."""
    if request.prediction and (drafter is None or not drafter.traits.copies):
        reason = (
            "plain decoding has no draft that copies"
            if drafter is None
            else f"draft {drafter.name!r} copies nothing"
        )
        raise InputError(f"prediction: {reason}; accepted with ngram and with lookup")
    return Hints(
        [request.prompt[-1], *request.prediction] if request.prediction else (),
        0.0 if request.sampler.couples else request.sampler.temperature,
    )


def source_of(
    drafter: Drafter | None, lane: Lane, constraint: Constraint | None, origins: Origins | None
) -> Drafter | None:
    """Return the drafter wrapped in what an answer asks for."""
    if drafter is None:
        return None
    source = _coupled(drafter, lane.sampler, lane.history) if lane.sampler.couples else drafter
    if constraint is not None:
        source = Guided(source, constraint, lane.stopper.tokens)
    if origins is None or not origins.wanted:
        return source
    lane.origins = origins
    return origins.around(source)


def _coupled(drafter: Drafter, sampler: Sampler, history: History) -> Coupled:
    assert sampler.seed is not None
    seed = torch.tensor([signed(sampler.seed)], device=drafter.device, dtype=torch.int64)
    scale = torch.tensor(
        [Coupled.scale(drafter, sampler.temperature, truncated=sampler.truncates)],
        device=drafter.device,
        dtype=torch.float32,
    )
    return Coupled(drafter, seed, scale, lambda: history.length)
