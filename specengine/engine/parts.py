"""What an engine is made of: its cycles' drivers by policy, and engines that share memory and answer at the same time.

The first tree of an engine is checked closely (cycle.Inspected), later ones where that costs no time.
"""

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from specengine import drafters, policies
from specengine.checkpoints.texts import Memory, corpus, folder_of
from specengine.cycle import EagerDriver
from specengine.drafters import Drafter, RowDraft
from specengine.drafters.lookup import Lookup, backend
from specengine.engine import loading
from specengine.engine.captured import CapturedDriver
from specengine.engine.joined import CapturedLanes, JoinedDriver
from specengine.engine.scheduler import Scheduler, Task, Ticket, finished, piece_at, run_tasks
from specengine.errors import (
    EngineBusyError,
    EngineClosedError,
    InputError,
    require,
    require_input,
    require_or,
    require_value,
    restating,
    shown,
)
from specengine.models import Target, common_prefix, free_memory as free_memory
from specengine.models.kv_cache import LANES, CachedTarget, LaneTarget
from specengine.models.native import PREFILL_ROWS, NativeTarget, progress_bar
from specengine.policies import TreePolicy
from specengine.records import GenerationResult
from specengine.request.grammars import Constraint, Vocabularies, compiled
from specengine.request.options import GenerationOptions
from specengine.request.prompts import Prompt
from specengine.request.text import SharedTokenizer

if TYPE_CHECKING:
    from specengine.costs import PassCosts, SharedCosts
    from specengine.options import LoadOptions

PLAIN = "plain"
MAX_CAPTURED = 4  # policies by name, next to the engine's own, whose graphs are kept
SHARED = 32  # tokens of another text's prompt that are worth a copy, or waiting for them
MOST = 8  # answers at once where nobody says how many: sixteen bring little more, and each takes longer


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
            require_input(
                "policy_options: they need a policy given by name, other than plain", not options
            )
            return self.own if policy is None else self._by_name(PLAIN, {})
        require_value(
            "policy",
            policy,
            "plain: this engine was loaded without a draft",
            self._drafter is not None,
        )
        return (
            self._by_name(policy, options)
            if isinstance(policy, str)
            else self._by_itself(policies.of(policy, options))
        )

    def _by_name(self, name: str, options: Mapping[str, Any]) -> Drivers:
        # as text, as options may be given as text, and need not be hashable
        with restating(
            (RecursionError, ValueError),
            lambda _: InputError(f"policy_options: got {shown(options)}, which have no text form"),
        ):
            key = name, *(f"{option}={value}" for option, value in sorted(options.items()))
        if key not in self._named:
            policy = None if name == PLAIN else policies.of(name, options)
            self._named[key] = self.own if policy == self.own.policy else self.of(policy)
        elif self._target.captured:
            drivers = self._named.pop(key)
            if drivers.captured is None:  # it has given up its graphs
                drivers = drivers._replace(captured=self.of(drivers.policy).captured)
            self._named[key] = drivers
        # of many, those asked for longest ago give up their graphs
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


class ClosedPart:
    """Stands for each part of an engine that is closed."""

    def __getattr__(self, name: str) -> Any:
        raise EngineClosedError("this engine is closed; load another with Engine.from_pretrained()")


CLOSED: Any = ClosedPart()


class EngineState:
    """The parts of an engine, and the caches of the one answer that it gives at a time."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: TreePolicy | None,
        tokenizer: Any = None,
    ) -> None:
        require(
            "target", "none", "a Target; Engine.from_pretrained() loads one", target is not None
        )
        require_input(
            "policy, draft: give both, or neither for plain decoding",
            (drafter is None) == (policy is None),
        )
        self.target, self.drafter = target, drafter
        self.drivers = KeptDrivers(target, drafter, policy)
        self.tokenizer = tokenizer
        self.notes: list[str] = []  # what a user should know about these parts; in the statistics
        self.pool: Pool | None = None  # that it belongs to
        self.ring: Any = None  # the checkpoints.learnt.Learnt that keeps its texts
        self.watch = loading.ModelWatch(
            tuple(
                model
                for part in (target, drafter)
                if (model := getattr(part, "lm", None)) is not None
            )
        )
        self._busy = threading.Lock()
        # generators under way, which end where the engine is closed
        self.answers = weakref.WeakSet[Any]()

    def __reduce__(self) -> Any:
        raise TypeError(
            "an Engine is neither copied nor pickled, as it holds threads and memory of its process: call "
            "Engine.from_pretrained() in each process, and for several engines over one model see Pool"
        )

    def let_go(self) -> None:
        """Drop all parts. What is asked for afterwards raises EngineClosedError."""
        self.target = self.drafter = self.drivers = self.watch = self.pool = self.ring = CLOSED
        for name in ("vocabularies", "memory"):
            vars(self).pop(name, None)

    @functools.cached_property
    def vocabularies(self) -> Vocabularies:
        """Return the tokenizer as grammars read it."""
        return Vocabularies(self.tokenizer, self.target.vocab_size)

    @functools.cached_property
    def memory(self) -> Memory | None:
        """Return the texts that drafts copy from, by owner; None for an engine that was loaded without."""
        recipe = self.watch.recipe
        return (
            None
            if recipe is None
            else memory_of(self.drafter, self.target, self.tokenizer, recipe.options)
        )

    @property
    def policy(self) -> TreePolicy | None:
        """Return the policy of calls that name no other. It can be replaced between generations."""
        return self.drivers.own.policy

    @policy.setter
    def policy(self, policy: TreePolicy | None) -> None:
        require_input(
            "policy: this engine was loaded without a draft, so a policy has no effect",
            policy is None or self.drafter is not None,
        )
        self.drivers.own = self.drivers.of(policy)
        if self.watch.recipe is not None:
            self.watch.recipe = dataclasses.replace(self.watch.recipe, policy=policy)

    @property
    def is_busy(self) -> bool:
        """Return whether an answer is under way."""
        return self._busy.locked()

    def constraint(self, asked: GenerationOptions) -> Constraint | None:
        """Return a new constraint made from these options, or None. May be called from any thread."""
        return (
            None
            if (given := asked.constrains) is None
            else self.vocabularies.constraint(given[0], compiled(*given), asked.eos_token_ids)
        )

    @torch.inference_mode()
    def follow(self) -> None:
        """Refresh all but changed numbers, which are checked when an answer begins. Does nothing during an answer."""
        with contextlib.suppress(EngineBusyError), self.hold(""):
            self._follow()

    def _follow(self) -> None:
        if (parts := self.watch.follow(self.tokenizer)) is not None:
            self.target = parts.target
            self.drafter = parts.drafter
            self.notes = parts.notes
            self.drivers = KeptDrivers(parts.target, parts.drafter, parts.policy)
            vars(self).pop("vocabularies", None)
            vars(self).pop("memory", None)

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget all cached tokens."""
        self.target.reset()
        if self.drafter is not None:
            self.drafter.reset()

    @contextlib.contextmanager
    def hold(self, refusal: str) -> Iterator[None]:
        """Keep other callers out meanwhile; EngineBusyError with this text where one is in."""
        require_or(EngineBusyError, refusal, self._busy.acquire(blocking=False))
        try:
            yield
        finally:
            self._busy.release()


class Pool:
    """Engines that share the weights of one, and answer at the same time.

    Each has caches, a draft and a policy of its own. Their rows are run together: a cycle of all of them costs little
    more than one text's. On the native forward an answer is the same, bit for bit, whatever is answered beside it; on
    modules up to rounding, where `strict` runs each alone.

    A prompt that begins like another text is copied from its cache as far as both agree, and not read again. An answer
    begins once the caches have room for it to the end; those of ended answers are kept until then.

    engine: stays usable by itself; count: texts at once; spare: engines more than that; memory: bytes that caches of
    target and draft may take for all texts, besides some hundred tokens of each that has none, by default half of what
    is free. InputError for a target whose rows stand alone (a dense mask, shared keys, states of modules), a draft that
    serves one text alone, or a text that has no room even alone.
    """

    def __init__(
        self, engine: EngineState, count: int, memory: int | None = None, *, spare: int = 0
    ) -> None:
        require("parallel", count, "1 or more", type(count) is int and count >= 1)
        require(
            "parallel",
            count,
            f"1 on {engine.target.backend or 'this target'}",
            type(engine.target) in LANES and cast(Any, engine.target).lm.joins,
        )
        self.memory = free_memory(engine.target.device) // 2 if memory is None else memory
        self.scheduler = Scheduler(cast(CachedTarget, engine.target))
        self.tokenizer = SharedTokenizer.of(engine.tokenizer)
        self.engines = [self._beside(engine) for _ in range(count + spare)]
        if engine.target.captured:
            CapturedLanes([cast(Any, other.target) for other in self.engines])
            drivers = [other.drivers.own.captured for other in self.engines]
            rows = isinstance(engine.drafter, RowDraft | None)  # of drafts whose passes are rows
            if rows and all(driver is not None and driver.grows_there for driver in drivers):
                JoinedDriver(cast(Any, drivers))
        for other in self.engines[1:]:
            if (learn_with := getattr(other.policy, "learn_with", None)) is not None:
                learn_with(self.engines[0].policy)
        self.waiting: dict[EngineState, Ticket] = {}  # whose answers wait for room
        self._reading: dict[EngineState, list[int]] = {}  # prompts that are taken in
        self._reserved: dict[EngineState, int] = {}  # bytes of answers under way
        self._costs: dict[EngineState, SharedCosts] = {}  # with other texts under way
        self._ended = list(self.engines)  # the one whose answer ended last comes last

    def place(
        self, engine: EngineState, tokens: int, drafted: int, ticket: Ticket
    ) -> Iterator[None]:
        """Wait until there is room for so many tokens; `leave` gives it back. Drops caches of ended answers.

        The oldest ones go first. Of those that wait, the one whose client was served least has its turn; the others
        wait behind it. tokens, drafted: slots of the target's cache and of the draft's, trees included.
        """
        if (need := bytes_held(engine, tokens, drafted)) > self.memory:
            _forget(engine)
            need = bytes_held(engine, tokens, drafted)
        require_input(
            f"max_new_tokens: {tokens} tokens of prompt and answer take {need / 1e6:.0f} MB of cache, accepted "
            f"{self.memory / 1e6:.0f} MB for all texts at once; ask for fewer",
            need <= self.memory,
        )
        self.waiting[engine] = ticket
        try:
            while not self._make_room(engine, need):
                yield
        finally:
            del self.waiting[engine]
        self._reserved[engine] = need
        self._count()

    def leave(self, engine: EngineState) -> None:
        """Give back the room of an answer that has ended; what its caches hold is kept for as long as it can be."""
        del self._reserved[engine]
        self._reading.pop(engine, None)
        self._ended.remove(engine)
        self._ended.append(engine)
        self._count()

    def _count(self) -> None:
        for engine in self.engines:
            cast(LaneTarget, engine.target).others = len(self._reserved.keys() - {engine})
        for engine in self._reserved:
            if (reprice := getattr(engine.policy, "reprice", None)) is not None:
                reprice()

    def _make_room(self, engine: EngineState, need: int) -> bool:
        if min(self.waiting, key=lambda other: self.waiting[other].rank) is not engine:
            return False
        left = self.memory - need - sum(self._reserved.values())
        kept = {
            other: bytes_held(other)
            for other in self._ended
            if other is not engine and other not in self._reserved
        }
        for other in kept:
            if sum(kept.values()) <= left:
                break
            if not other.is_busy or other in self.waiting:
                _forget(other)
                kept[other] = 0
        return sum(kept.values()) <= left

    def share(
        self, engine: EngineState, prompt: list[int], drafter: Drafter | None
    ) -> Iterator[None]:
        """Copy what other texts have of a prompt. Waits for those that are taking in the same beginning."""
        target = cast(LaneTarget, engine.target)

        def held(other: EngineState) -> int:
            count = target.shares(cast(LaneTarget, other.target), prompt)
            return (
                count
                if drafter is None or other.drafter is None
                else min(count, other.drafter.cached(prompt))
            )

        own = held(engine)
        for other, known in list(self._reading.items()):
            while (
                common_prefix(known, prompt) >= own + SHARED and self._reading.get(other) is known
            ):
                yield
        best = max(
            (other for other in self.engines if other is not engine), key=held, default=engine
        )
        if (count := held(best)) >= held(engine) + SHARED:
            target.copy_from(cast(LaneTarget, best.target), count)
            if drafter is not None and best.drafter is not None:
                drafters.copy_prompt(drafter, best.drafter, count)
        self._reading[engine] = prompt

    def prefill(
        self, engine: EngineState, prompt: list[int], keep: int
    ) -> Generator[Any, None, Tensor | None]:
        """Take in a prompt behind its first `keep` tokens, in short pieces while there are other texts."""
        target = cast(LaneTarget, engine.target)
        return target.take_in(
            prompt, keep, lambda length: piece_at(length) if target.others else PREFILL_ROWS
        )

    def read(self, engine: EngineState) -> None:
        """Note that target and draft hold the prompt, for those that wait for its beginning."""
        del self._reading[engine]

    def costs(self, engine: EngineState, find: "Callable[[], PassCosts]") -> "PassCosts":
        """Return the costs of an engine's passes with the texts that are under way.

        find: returns those without other texts, which stay what they are while there are others.
        """
        if (others := cast(LaneTarget, engine.target).others) == 0:
            self._costs.pop(engine, None)
            return find()
        shared = self._costs.get(engine)
        if shared is None or shared.others != others:
            alone = find() if shared is None else shared.alone
            source = None if engine.drafter is None else drafters.innermost(engine.drafter)
            shared = alone.beside(
                others,
                resting=lambda: self.scheduler.pace.rests,
                joined=getattr(source, "shares", False),
                forward=self.scheduler.take_last_forward,
            )
            self._costs[engine] = shared
            self.scheduler.pace.price = alone.over_plain
        return shared

    def _beside(self, engine: EngineState) -> EngineState:
        """Return an engine of the same parts with a state of its own."""
        draft = None if engine.drafter is None else drafters.another(engine.drafter)
        policy = None if engine.policy is None else dataclasses.replace(cast(Any, engine.policy))
        target = LANES[type(engine.target)](cast(CachedTarget, engine.target))
        head = None if draft is None else getattr(drafters.innermost(draft), "head", None)
        if (
            follow := getattr(head, "follow", None)
        ) is not None:  # an assistant, of its target's keys
            follow(target)
        made = type(engine)(target, draft, policy, self.tokenizer)
        made.notes, made.pool, made.vocabularies = list(engine.notes), self, engine.vocabularies
        made.ring, made.memory = engine.ring, engine.memory
        return made

    def generate(self, prompts: Iterable[Prompt], **options: Any) -> list[GenerationResult]:
        """Answer all prompts, as many at once as there are engines; options as in Engine.generate.

        Returns the results in the order of the prompts. The first error ends all of it and is raised.
        """
        asked = enumerate(prompts)

        def answer(engine: Any, number: int, prompt: Prompt) -> Task:
            with engine.stream(prompt, **options) as generation:
                generation.silence()
                yield from finished(generation)
                return number, generation.run()

        def take(idle: list[Any], wait: bool) -> tuple[Any, Task] | None:
            one = next(asked, None)
            return None if one is None else (idle[0], answer(idle[0], *one))

        answers = run_tasks(self.engines, self.scheduler, take)
        results = dict(progress_bar(answers, "Answers", getattr(prompts, "__len__", int)()))
        return [results[number] for number in range(len(results))]


def parallel_of(engine: EngineState, memory: int | None = None) -> int:
    """Return how many answers at once suit an engine: those whose caches fit in `memory`, MOST at most.

    Caches are counted with the model's whole context, of target and draft; memory: as of a Pool. One where answers
    share no forward: on other targets than the native forward, with a draft of one text.
    """
    target, draft = engine.target, engine.drafter
    if type(target) is not NativeTarget:
        return 1
    try:
        caches = target.cache, None if draft is None else drafters.cache_of(drafters.another(draft))
    except InputError:
        return 1
    each = sum(
        cache.bytes_of(count)
        for cache, count in zip(
            caches, slots_of(engine.drivers.own.eager, target.max_context), strict=True
        )
        if cache is not None
    )
    return max(1, min(MOST, (free_memory() // 2 if memory is None else memory) // each))


def slots_of(driver: EagerDriver, text: int) -> tuple[int, int]:
    """Return the slots that the caches of target and draft need for a text of so many tokens, trees included."""
    drafted = 0 if driver.policy is None else text + driver.policy.capacity + driver.unread
    return text + driver.budget, drafted


def bytes_used(engine: EngineState) -> int:
    """Return the bytes of those slots of its caches that hold tokens."""
    caches = cast(LaneTarget, engine.target).cache, drafters.cache_of(engine.drafter)
    return sum(cache.length * cache.slot_bytes for cache in caches if cache is not None)


def bytes_held(engine: EngineState, tokens: int = 0, drafted: int = 0) -> int:
    """Return the bytes of the caches of a pool's engine, with room for so many tokens or for more, as they have it."""
    cache = drafters.cache_of(engine.drafter)
    return cast(LaneTarget, engine.target).cache.bytes_of(tokens) + (
        0 if cache is None else cache.bytes_of(drafted)
    )


def _forget(engine: EngineState) -> None:
    target = cast(LaneTarget, engine.target)
    target.cache, target.tokens = target.lm.new_cache(1), []
    drafters.forget(engine.drafter)


def memory_of(
    drafter: Drafter | None, target: Target, tokenizer: Any, options: "LoadOptions"
) -> Memory | None:
    """Return the memory that an engine of these parts was loaded with; None without.

    Raises InputError where one is asked for by name and the draft copies nothing, or files cannot be read.
    """
    copies = isinstance(drafter, Lookup) and hasattr(backend(), "TextMemory")
    named = options.memory not in (None, "off") or options.memory_from is not None
    require(
        "memory",
        str(options.memory or options.memory_from),
        "off where the draft copies nothing; lookup=True has drafts copy, with the extension specengine._ops",
        copies or not named,
    )
    if not copies or options.memory == "off":
        require("memory_from", str(options.memory_from), "none", options.memory_from is None)
        return None
    memory = Memory(backend().TextMemory, target.vocab_size, tokenizer, folder_of(options.memory))
    index = memory.of().index
    if options.memory_from is not None:
        require("memory_from", str(options.memory_from), "with a tokenizer", tokenizer is not None)
        for text in corpus(Path(options.memory_from)):
            index.add(tokenizer(text, add_special_tokens=False)["input_ids"])
    return memory
