"""The engine: draft, verify, commit, cycle after cycle, on one model and one sequence at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, cast

import torch
from transformers import PreTrainedModel

from specengine import contracts, loading, policies
from specengine.captured import GUIDED_NOTE, CapturedDriver
from specengine.costs.measuring import stored
from specengine.cuda_graphs import CaptureError, Graphs, sharing
from specengine.cycle import EagerDriver, Lane, make_room, run_eager
from specengine.drafters import Drafter, Hints, Traits, innermost
from specengine.drafters._coupled import Coupled
from specengine.drafters._guided import Guided
from specengine.drafters._origins import Origins
from specengine.engine.pool import Pool as Pool
from specengine.engine.pool import parallel_of as parallel_of
from specengine.engine.pool import slots_of
from specengine.engine.scheduler import Client as Client
from specengine.engine.scheduler import GivenUpError as GivenUpError
from specengine.engine.scheduler import SteppedAnswer
from specengine.engine.scheduler import Ticket as Ticket
from specengine.engine.streams import AsyncTextGeneration as AsyncTextGeneration
from specengine.engine.streams import Streams
from specengine.errors import (
    EngineBusyError,
    InputError,
    UnsupportedModelError,
    require,
    shown,
)
from specengine.models import Target, common_prefix
from specengine.models.kv_cache import KVCache
from specengine.models.native import NativeHead, NativeTarget
from specengine.options import LoadOptions
from specengine.policies import TreePolicy
from specengine.records import (
    Cycle,
    GenerationResult,
    SpeculativeOutput,
    Stats,
    StreamPiece,
    TokenLogprob,
)
from specengine.registry import plain
from specengine.request.custom_generate import CustomGenerate
from specengine.request.grammars import Constraint, Vocabularies, compiled
from specengine.request.options import GenerationOptions
from specengine.request.prompts import Prompt, predicted_ids, token_ids
from specengine.request.sampling import History, Sampler, Stopper, cut_after_stop, of_rows, refuse_no_choice, signed
from specengine.request.text import TextStream, decoder

DEFAULT_WARMUP_TOKENS = 2048
AHEAD = 1024  # tokens of an answer that room is made for at once; then for twice as many tokens as there are
SCORED_ROWS = 128  # of a text's logits at once, each as long as the vocabulary


@dataclass(frozen=True)
class WarmUp:
    """The result of `Engine.warmup`: captured functions by name, seconds, and bytes of graphs and caches."""

    captured: tuple[str, ...]
    seconds: float
    graph_bytes: int
    cache_bytes: int

    @classmethod
    def of(cls, graphs: Graphs, caches: list[KVCache]) -> WarmUp:
        names = tuple(str(name) for name in graphs.captures)
        return cls(names, graphs.seconds, graphs.bytes, sum(cache.nbytes for cache in caches))

    def __str__(self) -> str:
        graphs, caches = self.graph_bytes / 2**20, self.cache_bytes / 2**20
        return f"{len(self.captured)} graphs in {self.seconds:.2f} s, {graphs:.0f} MiB, caches {caches:.0f} MiB"


class Engine:
    """A target with a draft and a policy, and the caches of one sequence.

    An engine serves one generation at a time; a second caller, from whatever thread, gets EngineBusyError. Engines
    may share a loaded model. After an error or an interrupt the caches are cleared and the engine can be used again.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: TreePolicy | None,
        tokenizer: Any = None,
    ) -> None:
        if (drafter is None) != (policy is None):
            raise InputError("policy, draft: give both, or neither for plain decoding")
        self.target = target
        self.drafter = drafter
        self.drivers = KeptDrivers(target, drafter, policy)
        self.tokenizer = tokenizer
        self.notes: list[str] = []  # what a user should know about these parts; in the statistics
        self._busy, self._making = threading.Lock(), threading.Lock()
        self._recipe: loading.Recipe | None = None
        self._shared: tuple[Any, int, Any] = None, 0, None  # costs, beside how many texts, and what they are there
        self.pool: Pool | None = None  # that it belongs to
        self.ring: Any = None  # the checkpoints.learnt.Learnt that keeps its texts
        self._streams: tuple[tuple[Any, ...], Streams] | None = None  # what answers `astream`
        found = (getattr(part, "lm", None) for part in (target, drafter))
        self._models: tuple[Any, ...] = tuple(model for model in found if model is not None)

    def __repr__(self) -> str:
        drafter = None if self.drafter is None else self.drafter.name
        model = self.target.name or type(self.target).__name__
        return f"Engine({model}, {self.target.backend}, draft={drafter}, policy={self.policy!r})"

    @functools.cached_property
    def vocabularies(self) -> Vocabularies:
        """Return the tokenizer as grammars read it."""
        return Vocabularies(self.tokenizer, self.target.vocab_size)

    @property
    def policy(self) -> TreePolicy | None:
        """Return the policy of calls that name no other. It can be replaced between generations."""
        return self.drivers.own.policy

    @policy.setter
    def policy(self, policy: TreePolicy | None) -> None:
        if policy is not None and self.drafter is None:
            raise InputError("policy: this engine was loaded without a draft, so a policy has no effect")
        self.drivers.use(policy)
        if self._recipe is not None:
            self._recipe = dataclasses.replace(self._recipe, policy=policy)

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] | PreTrainedModel | None = None,
        draft: str | os.PathLike[str] | PreTrainedModel | Drafter | None = None,
        policy: str | TreePolicy | None = None,
        **options: Any,
    ) -> Engine:
        """Load a target with its draft and policy.

        model   a Hugging Face id, a local path or a loaded model; None is the embedded default model
        draft   `ngram`, `recycling`, `mtp`, `none`, `default-head`, the id or path of a smaller model or an EAGLE
                head, a loaded model or a Drafter; None is the head that ships for the default model, the MTP head
                of a checkpoint that has one, and `recycling` with lookup for any other
        policy  a policy's name (see specengine.policies.names()), `plain` for no draft, or a TreePolicy; None is
                the draft's default
        options dtype, device, tokenizer, draft_options, policy_options, graphs, lookup, strict,
                pack, offline, trust_remote_code, progress: see options.LoadOptions

        Raises InputError for unknown names and options, UnsupportedModelError, TokenizerMismatchError.
        """
        chosen = LoadOptions.of(options)
        model, draft = (os.fspath(given) if isinstance(given, os.PathLike) else given for given in (model, draft))
        recipe = loading.Recipe(model, draft, policy, chosen)
        parts = recipe.load()
        self = cls(parts.target, parts.drafter, parts.policy, parts.tokenizer)
        self._recipe, self._models, self.notes = recipe, parts.models, parts.notes
        self.ring = getattr(None if parts.drafter is None else innermost(parts.drafter), "learnt", None)
        return self

    def generate(self, prompt: Prompt, **options: Any) -> Any:
        """Answer `prompt` (a string, chat messages or token ids) with exactly what plain decoding would give.

        options: the fields of GenerationOptions. Returns a GenerationResult; with `return_dict_in_generate` True a
        SpeculativeOutput, with False the LongTensor [1, prompt + new] that transformers returns.
        """
        return TextGeneration(self, prompt, options).run()

    def stream(self, prompt: Prompt, **options: Any) -> TextGeneration:
        """Generate as an iterator of StreamPiece; `.result` holds the GenerationResult at the end."""
        return TextGeneration(self, prompt, options)

    def generate_many(self, prompts: Iterable[Prompt], parallel: int = 8, **options: Any) -> list[GenerationResult]:
        """Answer all prompts, up to `parallel` at once; options as in `generate`. Returns results in their order.

        On the native forward the rows of all texts are run together; elsewhere one prompt follows the other. An answer
        is the one that `generate` gives. Each text takes caches of its own. The first error ends all and is raised.
        """
        require("parallel", parallel, "1 or more", type(parallel) is int and parallel >= 1)
        asked = list(prompts)
        if parallel == 1 or type(self.target) is not NativeTarget:
            return [self.generate(prompt, **options) for prompt in asked]
        return Pool(self, max(1, min(parallel, len(asked)))).generate(asked, **options)

    def astream(self, prompt: Prompt, *, parallel: int = 8, **options: Any) -> AsyncTextGeneration:
        """Generate as an asynchronous iterator of StreamPiece: `async for piece in engine.astream(prompt)`.

        Up to `parallel` of them are answered at once on the native forward, as by `generate_many`; those beyond wait.
        Elsewhere they are answered one by one. Answers are those of `generate`. Takes caches beside those of `stream`
        on the native forward. To be called from a running event loop.
        """
        require("parallel", parallel, "1 or more", type(parallel) is int and parallel >= 1)
        with self._making:
            key = parallel, self.target, self.drafter, self.policy
            if self._streams is None or any(new is not old for new, old in zip(key, self._streams[0], strict=True)):
                pool = Pool(self, parallel) if type(self.target) is NativeTarget else None
                streams = Streams([self]) if pool is None else Streams(pool.engines, pool.scheduler)
                self._streams = key, streams
        begin = functools.partial(TextGeneration, prompt=prompt, options=options)
        return AsyncTextGeneration(self._streams[1], begin)

    @property
    def is_busy(self) -> bool:
        """Return whether an answer is under way."""
        return self._busy.locked()

    def holds(self, tokens: list[int]) -> int:
        """Return how many of the first `tokens` the target's cache holds. May be called from any thread."""
        return common_prefix(self.target.tokens, tokens)

    def score(self, prompt: Prompt, top: int = 0) -> Iterator[TokenLogprob]:
        """Yield the log-probability of each token of a text, from the second on.

        prompt: a string, without the chat template, or token ids; top: how many of the likeliest tokens come with each.
        Closing the iterator frees the engine. InputError, EngineBusyError, NumericalError, and UnsupportedModelError
        of a target that has no way to do it.
        """
        top = plain(top)
        require("top", top, "0 or more", type(top) is int and top >= 0)
        self.follow()
        target = self.target
        ids = token_ids(prompt, self.tokenizer, raw=True, vocab_size=target.vocab_size, max_context=target.max_context)
        return self._scored(ids, top)

    def session(self, messages: list[dict[str, str]] | None = None) -> Session:
        """Return a conversation whose turns reuse the caches of target and draft."""
        return Session(self, messages)

    def as_custom_generate(self, streamer: Any = None, seed: int | None = None) -> Callable[..., Any]:
        """Return a function for transformers' `model.generate(custom_generate=...)`.

        transformers passes on its generation config, logits processors and stopping criteria, but no streamer:
        bind one here. The last call's figures are its attribute `stats`.
        """
        return CustomGenerate(self, streamer, seed)

    def cycles(
        self,
        prompt: list[int],
        sampler: Sampler,
        stopper: Stopper,
        stats: Stats,
        options: CycleOptions | None = None,
    ) -> Generator[Cycle, None, None] | SteppedAnswer:
        """Return the cycles of one generation, which can be closed; everything else reads from these.

        prompt: checked token ids. The last of them is the root of the first tree. `stats` is filled on the way. There
        are none where the ticket of `options` is given up before the prompt is taken in.
        """
        options = options or CycleOptions()
        steps = self.steps(prompt, sampler, stopper, stats, options)
        return steps if self.pool is None else self.pool.scheduler.add(steps, options.ticket or Ticket())

    def steps(
        self, prompt: list[int], sampler: Sampler, stopper: Stopper, stats: Stats, options: CycleOptions
    ) -> Generator[Any, Any, None]:
        """Yield the cycles of one generation. An engine of a pool yields what it needs too, see engine.scheduler."""
        _, prediction, reuse_cache, constraint, origins, ticket = options
        with contextlib.suppress(GivenUpError), self._serving(), contextlib.ExitStack() as held:
            eager, captured = options.drivers or self.drivers.own
            pool = self.pool
            if eager.target is not self.target:
                raise InputError("the model was changed after this answer was asked for; ask again")
            if pool is not None:
                slots = slots_of(eager, len(prompt) + stopper.left)
                yield from pool.place(self, *slots, ticket or Ticket())
                held.callback(pool.leave, self)
            running = sharing(self.target.device, self.target.running)
            with running():
                given = {"prompt": prompt, "sampler": sampler, "stopper": stopper, "stats": stats}
                given["hints"] = _hints(eager.drafter, prompt, prediction, sampler)
                beginning = self._begin_with(Drivers(eager, captured), given, reuse_cache=reuse_cache)
                lane, captured = yield from beginning
                whole = captured is not None and captured.serves(sampler)
                lane.driver = driver = captured if captured is not None and not whole else eager
                lane.source = self._source(eager.drafter, lane, constraint, origins)
                if constraint is not None and captured is not None and captured.grows_there:
                    stats.notes.append(GUIDED_NOTE)
            held.callback(driver.forget)
            while lane.reason is None:
                if whole and (eager.inspected or stats.num_spec_steps):
                    yield from cast(CapturedDriver, captured).cycles(lane)
                    break
                if pool is None:
                    with running():
                        (cycle,) = run_eager([lane])
                else:
                    cycle = yield lane
                if lane.reason is not None or whole:
                    with running():
                        driver.catch_up()
                yield cycle
            if eager.drafter is not None and stats.num_draft_passes:
                stats.notes += eager.drafter.notes

    def answer(
        self, prompt: list[int], sampler: Sampler | None = None, **options: Any
    ) -> Generator[Cycle, None, None] | SteppedAnswer:
        """Yield the cycles of an answer without its text, for training and measuring; stop strings are ignored.

        prompt: checked token ids; options: the fields of GenerationOptions; sampler: instead of the one that they make.
        """
        self.follow()
        asked = GenerationOptions.of(options, self.target.generation_config, len(prompt), self.target.max_context)
        return self.start(prompt, asked, Stats(), decoder(None), sampler=sampler).cycles

    def start(
        self,
        prompt: list[int],
        asked: GenerationOptions,
        stats: Stats,
        decode: Callable[[list[int]], str],
        *,
        sampler: Sampler | None = None,
        reuse_cache: bool = False,
        constraint: Constraint | None = None,
        ticket: Ticket | None = None,
    ) -> PreparedAnswer:
        """Prepare an answer with checked options.

        decode: for stop strings; sampler: instead of the one that the options make; constraint: of `asked`, where it is
        made already; the others as in `cycles`.
        """
        constraint = constraint or self.constraint(asked)
        stopper, origins = asked.stopper(decode, constraint), Origins()
        drivers = self.drivers.asked(asked.policy, asked.policy_options)
        prediction = predicted_ids(asked.prediction, self.tokenizer, self.target.vocab_size)
        chosen = sampler or asked.sampler(len(prompt), self.target.device, constraint)
        options = CycleOptions(drivers, prediction, reuse_cache, constraint, origins, ticket or Ticket())
        cycles = self.cycles(prompt, chosen, stopper, stats, options)
        return PreparedAnswer(cycles, stopper, drivers.policy, origins)

    def constraint(self, asked: GenerationOptions) -> Constraint | None:
        """Return a new constraint made from these options, or None. May be called from any thread."""
        if (given := asked.constrains) is None:
            return None
        return self.vocabularies.constraint(given[0], compiled(*given), asked.eos_token_ids)

    @torch.inference_mode()
    def warmup(
        self,
        tokens: int | None = None,
        policy: str | TreePolicy | None = None,
        policy_options: Mapping[str, Any] | None = None,
    ) -> WarmUp:
        """Capture all graphs now instead of on first use, for up to `tokens` tokens of prompt and answer.

        tokens: 2048 by default, or the model's context where that is shorter; a longer text means captures again.
        policy, policy_options: as in `generate`; each policy has graphs of its own, and one whose trees need larger
        caches means captures again for those before it. InputError where the engine was loaded without graphs. Where
        the model cannot be captured and graphs were not asked for, nothing is, and statistics have the reason.
        """
        captured = (drivers := self.drivers.asked(policy, policy_options)).captured
        tokens = min(DEFAULT_WARMUP_TOKENS, self.target.max_context) if tokens is None else plain(tokens)
        if captured is None:
            raise InputError("warmup: this engine captures no graphs; load it with graphs=True")
        if not 1 <= tokens <= self.target.max_context:
            raise InputError(f"tokens: got {tokens}, accepted 1 to {self.target.max_context}")
        if not self._busy.acquire(blocking=False):
            raise EngineBusyError("this engine is generating; warm it up before, or after that stream has ended")
        graphs = captured.graphs
        try:
            with sharing(self.target.device, self.target.running)():
                self._want(drivers.drafter)
                captured.warm_up(tokens)
        except CaptureError as error:
            self._run_eagerly(error)
            graphs = Graphs(self.target.device)
        finally:
            self._busy.release()
        caches = [cache for part in (self.target, self.drafter) if (cache := getattr(part, "cache", None)) is not None]
        return WarmUp.of(graphs, caches)

    @torch.inference_mode()
    def refresh(self) -> None:
        """Take in all changes to models that were handed over loaded.

        Every answer begins with that by itself, which reads the weights once. Weights are packed again, caches
        that belong to what was are forgotten, and where more than numbers was changed (adapters, sizes, dtypes,
        modules, settings) target and draft are made anew, as for a new engine. UnsupportedModelError where the model
        has become one that cannot be run, or a Drafter was brought along for what it was; EngineBusyError.
        """
        if not self._busy.acquire(blocking=False):
            raise EngineBusyError("this engine is generating; refresh it after that stream has ended")
        try:
            self._follow()
            for model in self._models:
                model.refresh()
        finally:
            self._busy.release()

    @torch.inference_mode()
    def follow(self) -> None:
        """Refresh all but changed numbers, which are checked when an answer begins. Does nothing during an answer."""
        if self._models and self._busy.acquire(blocking=False):
            try:
                self._follow()
            finally:
                self._busy.release()

    def _follow(self) -> None:
        try:
            for model in self._models:
                model.require_same()
        except UnsupportedModelError:
            if self._recipe is None or not self._recipe.again:
                raise
            options = dataclasses.replace(self._recipe.options, tokenizer=self.tokenizer)
            parts = dataclasses.replace(self._recipe, options=options).load()
            self.target, self.drafter, self._models = parts.target, parts.drafter, parts.models
            self.notes = parts.notes
            self.drivers = KeptDrivers(parts.target, parts.drafter, parts.policy)
            vars(self).pop("vocabularies", None)

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget all cached tokens."""
        self.target.reset()
        if self.drafter is not None:
            self.drafter.reset()

    @contextlib.contextmanager
    def _serving(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise EngineBusyError(
                "this engine is generating for another caller; finish or close that stream first (one left by break or "
                "an error stays open: use `with engine.stream(...) as stream:` or close()), or make an Engine for each "
                "thread (they can share the loaded model)"
            )
        try:
            yield
        except (GeneratorExit, GivenUpError):
            raise  # the caller has had enough; the caches are as after the last cycle
        except Exception as error:
            self.reset()
            if (named := contracts.blamed(error)) is error:
                raise
            raise named from error
        except BaseException:
            self.reset()
            raise
        finally:
            self._busy.release()

    def _want(self, drafter: Drafter | None) -> None:
        """Ask the target for the features and successors that the draft reads."""
        traits = Traits() if drafter is None else drafter.traits
        self.target.want(traits.features, traits.successors)

    def _scored(self, tokens: list[int], top: int) -> Iterator[TokenLogprob]:
        with self._serving():
            with torch.inference_mode():
                self.target.reset()
                self.target.reserve(len(tokens), 0)
            for first in range(0, len(tokens) - 1, SCORED_ROWS):
                with sharing(self.target.device, self.target.running)():
                    yield from self._rated(tokens, first, min(first + SCORED_ROWS, len(tokens) - 1), top)

    @torch.inference_mode()
    def _rated(self, tokens: list[int], first: int, end: int, top: int) -> list[TokenLogprob]:
        logits = self.target.rate(tokens[first:end])
        found = torch.isfinite(logits).any(1).tolist()
        if not all(found):
            refuse_no_choice(None, first + found.index(False) + 1)
        return of_rows(logits, tokens[first + 1 : end + 1], top)

    def _begin_with(
        self, drivers: Drivers, given: Mapping[str, Any], *, reuse_cache: bool
    ) -> Generator[Any, Any, tuple[Lane, CapturedDriver | None]]:
        """Return a lane as `_begin`, and the captured driver, None where graphs are done without."""
        eager, captured = drivers
        try:
            if captured is None or self.target.captured:
                return (yield from self._begin(drivers, reuse_cache=reuse_cache, **given)), captured
        except CaptureError as error:
            self._run_eagerly(error)  # and begin again below, as the error holds memory of the capture
        return (yield from self._begin(Drivers(eager, None), reuse_cache=False, **given)), None

    @torch.inference_mode()
    def _begin(
        self,
        drivers: Drivers,
        prompt: list[int],
        sampler: Sampler,
        stopper: Stopper,
        stats: Stats,
        hints: Hints,
        reuse_cache: bool,
    ) -> Generator[Any, Any, Lane]:
        drafter, policy, pool = drivers.drafter, drivers.policy, self.pool
        rests = False
        if self.ring is not None and drafter is not None:
            cast(Any, innermost(drafter)).renew()  # takes a head that was learnt meanwhile
        if policy is not None:
            own = functools.cache(lambda: stored.find(self.target, drafter, drivers.captured))
            policy.begin(len(prompt), sampler.seed is not None, lambda: self._costs(own()))
            plan = policy.plan()
            rests = plan.rests
            stats.policy, stats.plain_reason = repr(policy), plan.reason
            if plan.reads_costs and own().doubt:
                stats.notes.append(f"costs are provisional: {own().doubt} while they were measured")
        if not reuse_cache and pool is None:  # a pool's caches are what its texts share
            self.reset()
        stats.num_prompt_tokens = len(prompt)
        stats.draft = drafter.name if drafter is not None else ""
        on_device = sampler.reads_history or bool(stopper.criteria)  # processors and criteria read it there
        most = len(prompt) + stopper.left
        driver = drivers.eager if drivers.captured is None else drivers.captured
        room = min(most, len(prompt) + AHEAD) if drivers.captured is None else most
        history = History(prompt, room, self.target.device if on_device else torch.device("cpu"))
        lane = Lane(driver, sampler, stopper, history, stats, prompt[-1], room, most)
        make_room(driver, room)
        known = prompt[:-1]
        self._want(drafter)
        if pool is not None:
            yield from pool.share(self, known, drafter)
        kept = min(self.target.cached(known), drafter.cached(known) if drafter is not None else len(known))
        stats.num_cached_prompt_tokens = kept
        features = self.target.prefill(known, kept) if pool is None else (yield from pool.prefill(self, known, kept))
        if drafter is not None:
            waits = rests and drivers.captured is None and pool is None and not reuse_cache
            drivers.eager.begin(functools.partial(drafter.begin, known, features, hints), later=waits)
        if pool is not None:
            pool.read(self)
        driver.prepare(sampler)
        stats.notes += self.notes + self.target.notes
        stats.notes += [] if drivers.captured is None else drivers.captured.notes
        return lane

    def _run_eagerly(self, error: CaptureError) -> None:
        """Run all cycles without graphs from here on. Raises the error of a capture where graphs were asked for."""
        if self._recipe is None or self._recipe.options.graphs:
            raise error
        self.target.captured = False
        self.drivers.forget_graphs()
        self.notes = [*self.notes, f"{error}; cycles run without graphs"]
        self.reset()

    def _costs(self, own: Any) -> Any:
        """Return PassCosts beside the texts that are under way; own: those of target and draft alone."""
        others = getattr(self.target, "others", 0)
        if not others or (pool := self.pool) is None:
            return own
        if (own, others) != self._shared[:2]:
            joined = self.drafter is not None and isinstance(getattr(innermost(self.drafter), "head", None), NativeHead)
            scheduler = pool.scheduler
            shared = own.beside(
                others, resting=lambda: scheduler.pace.rests, joined=joined, forward=scheduler.take_last_forward
            )
            self._shared = own, others, shared
        return self._shared[2]

    def _source(
        self, drafter: Drafter | None, lane: Lane, constraint: Constraint | None, origins: Origins | None
    ) -> Drafter | None:
        """Return the drafter wrapped in what an answer asks for."""
        if drafter is None:
            return None
        source = self._coupled(drafter, lane.sampler, lane.history) if lane.sampler.couples else drafter
        if constraint is not None:
            source = Guided(source, constraint, lane.stopper.tokens)
        if origins is None or not origins.wanted:
            return source
        lane.origins = origins
        return origins.around(source)

    def _coupled(self, drafter: Drafter, sampler: Sampler, history: History) -> Coupled:
        assert sampler.seed is not None
        seed = torch.tensor([signed(sampler.seed)], device=drafter.device, dtype=torch.int64)
        part = Coupled.scale(drafter, sampler.temperature, truncated=sampler.truncates)
        scale = torch.tensor([part], device=drafter.device, dtype=torch.float32)
        return Coupled(drafter, seed, scale, lambda: history.length)


def is_ours(part: object) -> bool:
    """Return whether a policy or a drafter ships with this package, so that its trees need no closer look."""
    return type(part).__module__.startswith("specengine.")


def _hints(drafter: Drafter | None, prompt: list[int], prediction: Sequence[int], sampler: Sampler) -> Hints:
    """Return the hints for a drafter. Raises InputError if there is a prediction and the drafter has no use for it."""
    if prediction and drafter is None:
        raise InputError("prediction: plain decoding has no draft that copies; accepted with ngram and with lookup")
    if prediction and drafter is not None and not drafter.traits.copies:
        raise InputError(f"prediction: draft {drafter.name!r} copies nothing; accepted with ngram and with lookup")
    expected = [prompt[-1], *prediction] if prediction else ()
    return Hints(expected, 0.0 if sampler.couples else sampler.temperature)


class CycleOptions(NamedTuple):
    """Options of `Engine.cycles`.

    drivers      those of a policy; None: the engine's own
    prediction   token ids that the answer is expected to be like
    reuse_cache  keep the common prefix that both caches hold from the generation before
    constraint   of the sampler's processors, for trees to follow
    origins      notes the sources of nodes if they are wanted, see Cycle
    ticket       says until when the answer waits for room beside others; None: as long as it takes
    """

    drivers: Drivers | None = None
    prediction: Sequence[int] = ()
    reuse_cache: bool = False
    constraint: Constraint | None = None
    origins: Origins | None = None
    ticket: Ticket | None = None


class PreparedAnswer(NamedTuple):
    """Hold an answer that is about to begin.

    cycles   its cycles
    stopper  says when it ends and why
    policy   a TreePolicy, what shapes its trees; None where it decodes plainly
    origins  a drafters._origins.Origins, whose `wanted` may be set before the first cycle
    """

    cycles: Generator[Cycle, None, None] | SteppedAnswer
    stopper: Stopper
    policy: Any
    origins: Any


class TextGeneration:
    """One generation as an iterator of StreamPiece; closing it, or letting it go, frees the engine.

    Options and prompt are checked at construction; `policy` is what shapes its trees, None where it decodes plainly.
    `result` is there once the iterator has ended.
    """

    # Nothing it holds may hold it in turn: only then does letting it go free the engine at once.

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        options: Mapping[str, Any] | GenerationOptions,
        *,
        reuse_cache: bool = False,
        shown: Collection[int] = (),
        constraint: Constraint | None = None,
        ticket: Ticket | None = None,
    ) -> None:
        """options: of GenerationOptions.of, where they are checked already, with their constraint; shown: special
        tokens whose text the answer shows; ticket: says until when it waits for room beside others. An answer that is
        given up while it waits has no pieces and no result."""
        engine.follow()
        target = engine.target
        given = vars(options) if isinstance(options, GenerationOptions) else options
        self.prompt = token_ids(
            prompt,
            engine.tokenizer,
            raw=bool(given.get("raw", False)),
            vocab_size=target.vocab_size,
            max_context=target.max_context,
            allow_special_text=bool(given.get("allow_special_text", True)),
        )
        self.options = (
            options
            if isinstance(options, GenerationOptions)
            else GenerationOptions.of(dict(options), target.generation_config, len(self.prompt), target.max_context)
        )
        if self.options.stops and engine.tokenizer is None:
            raise InputError("stop_strings: they need a tokenizer, pass tokenizer= when loading the engine")
        self.stats = Stats()
        self.result: GenerationResult | None = None
        self._decode = decoder(engine.tokenizer, shown)
        self._texts = TextStream(self._decode)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._sent = 0
        self._started = False
        self._silent = False  # whether the text of pieces is left out, as nobody reads it
        self._streams = False  # whether a streamer waits for the end
        self._target, self._ring = target, engine.ring
        self._cycles, self._stopper, self.policy, self._origins = engine.start(
            self.prompt,
            self.options,
            self.stats,
            self._decode,
            reuse_cache=reuse_cache,
            constraint=constraint,
            ticket=ticket,
        )

    @property
    def origins(self) -> bool:
        """Return whether cycles note the sources of their nodes, which takes time. Set it before the first piece."""
        return bool(self._origins.wanted)

    @origins.setter
    def origins(self, wanted: bool) -> None:
        self._origins.wanted = wanted

    @property
    def stops_passed(self) -> int:
        """Return the characters at the beginning of the answer in which no stop string counts."""
        return self._stopper.passed

    def __iter__(self) -> Iterator[StreamPiece]:
        return self

    def __next__(self) -> StreamPiece:
        try:
            return self._advance()
        except StopIteration:
            raise
        except BaseException:  # also from a streamer or a tokenizer: a traceback may keep this object for long
            self._cycles.close()
            with contextlib.suppress(Exception):  # the error that is under way says more
                self._end_streamer()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _advance(self) -> StreamPiece:
        streamer = self.options.streamer
        if streamer is not None and not self._started:
            self._streams = True
            streamer.put(torch.tensor([self.prompt], dtype=torch.int64, device="cpu"))
        self._started = True
        cycle = next(self._cycles)
        self._tokens += cycle.tokens
        self._logprobs += cycle.logprobs or ()
        text = "" if self._silent else self._texts.push(cycle.tokens)
        if streamer is not None:
            streamer.put(torch.tensor(cycle.tokens, dtype=torch.int64, device="cpu"))
        reason = self._stopper.last_reason
        if reason is not None and (not isinstance(self._cycles, SteppedAnswer) or self._cycles.is_over):
            text = self._finish(reason)[self._sent :]
            next(self._cycles, None)  # runs the generator to its end, which frees the engine
            self._end_streamer()
        self._sent += len(text)
        return StreamPiece(text, cycle)

    @property
    def is_ready(self) -> bool:
        """Return whether the next piece can be had without a step of other answers."""
        return not isinstance(self._cycles, SteppedAnswer) or self._cycles.is_ready

    def silence(self) -> None:
        """Leave out the text of pieces, as nobody reads it, unless a streamer does or some were read."""
        self._silent = self.options.streamer is None and not self._started

    def run(self) -> Any:
        """Generate to the end; the result in the form that `return_dict_in_generate` asks for."""
        streams = self.options.streamer is not None
        self._silent = self._silent or not (streams or self._started)
        with contextlib.nullcontext() if streams else self._target.running():  # nobody looks at pieces meanwhile
            for _ in self:
                pass
        assert self.result is not None
        wanted = self.options.return_dict_in_generate
        if wanted is None:
            return self.result
        sequences = torch.tensor([[*self.prompt, *self._tokens]], dtype=torch.int64, device="cpu")
        if not wanted:
            return sequences
        names = ("text", "token_ids", "finish_reason", "stats", "logprobs")
        return SpeculativeOutput(sequences=sequences, **{name: getattr(self.result, name) for name in names})

    def close(self) -> None:
        """Stop generating and free the engine; what was streamed stays valid, and a streamer is told the end."""
        self._cycles.close()
        self._end_streamer()

    def _end_streamer(self) -> None:
        if self._streams:
            self._streams = False
            self.options.streamer.end()

    def _finish(self, reason: str) -> str:
        if reason == "length" and self.options.cut:
            self.stats.notes += [self.options.cut]
        if self._ring is not None:
            try:
                self._ring.add(self.prompt, self._tokens)
            except OSError as error:
                self.stats.notes += [f"learn: this text was not kept ({error.strerror or error})"]
        text = cut_after_stop(self._decode(self._tokens), self.options.stops, self.stops_passed)
        text = text[: len(text) - self._stopper.overhang]
        logprobs = None if self.options.logprobs is None else self._logprobs
        self.result = GenerationResult(text, self._tokens, reason, self.stats, self.options.seed, logprobs)
        return text


class Session:
    """A conversation. `messages` holds the turns so far; each turn runs only what the caches do not hold yet."""

    def __init__(self, engine: Engine, messages: list[dict[str, str]] | None = None) -> None:
        self.engine = engine
        self.messages = list(messages or [])

    def generate(self, text: str, **options: Any) -> Any:
        """Add a user turn and answer it; options and result as in Engine.generate."""
        return self.stream(text, **options).run()

    def stream(self, text: str, **options: Any) -> TextGeneration:
        """Answer as `generate` does, streamed; the turn enters `messages` when the stream has ended."""
        return _Turn(self, text, options)


class _Turn(TextGeneration):
    """A turn that writes itself into its session once it is complete."""

    def __init__(self, session: Session, text: str, options: Mapping[str, Any]) -> None:
        if not isinstance(text, str) or not text:
            raise InputError("text: it is empty, a turn needs text")
        self._session, self._turn = session, {"role": "user", "content": text}
        super().__init__(session.engine, [*session.messages, self._turn], options, reuse_cache=True)

    def _finish(self, reason: str) -> str:
        text = super()._finish(reason)
        self._session.messages += [self._turn, {"role": "assistant", "content": text}]
        return text


PLAIN = "plain"
MOST_CAPTURED = 4  # policies by name, beside the engine's own, whose graphs are kept


class Drivers(NamedTuple):
    """The drivers of one policy: eager, and captured if the target is."""

    eager: EagerDriver
    captured: CapturedDriver | None

    @classmethod
    def of(cls, target: Target, drafter: Drafter | None, policy: TreePolicy | None) -> Drivers:
        """Make the drivers of these parts. Without a policy they decode plainly and leave the draft alone."""
        if policy is None:
            drafter = None
        captured = CapturedDriver(cast(Any, target), drafter, policy) if target.captured else None
        eager = EagerDriver(target, drafter, policy)
        eager.inspected = captured is not None and all(part is None or is_ours(part) for part in (drafter, policy))
        return cls(eager, captured)

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
    take memory: of the policies by name the MOST_CAPTURED asked for last keep theirs.
    """

    def __init__(self, target: Target, drafter: Drafter | None, policy: TreePolicy | None) -> None:
        self._target, self._drafter = target, drafter
        self._named: dict[tuple[str, ...], Drivers] = {}
        self._brought: Drivers | None = None
        self.own = self._of(policy)

    def use(self, policy: TreePolicy | None) -> None:
        """Make this the engine's own policy; None decodes plainly."""
        self.own = self._of(policy)

    def asked(self, policy: str | TreePolicy | None, options: Mapping[str, Any] | None = None) -> Drivers:
        """Return the drivers of a call's policy: a name, NAME/PRESET, `plain`, a TreePolicy, or None for the own one.

        InputError for unknown names and options, and for any policy but `plain` where there is no draft.
        """
        options = options or {}
        if policy is None or policy == PLAIN:
            if options:
                raise InputError("policy_options: they need a policy given by name, other than plain")
            return self.own if policy is None else self._by_name(PLAIN, {})
        if self._drafter is None:
            raise InputError(f"policy: got {shown(policy)}, accepted plain: this engine was loaded without a draft")
        if isinstance(policy, str):
            return self._by_name(policy, options)
        return self._by_itself(policies.of(policy, options))

    def _by_name(self, name: str, options: Mapping[str, Any]) -> Drivers:
        # as text, as options may be given as text, and need not be hashable
        try:
            key = name, *(f"{option}={value}" for option, value in sorted(options.items()))
        except (RecursionError, ValueError) as error:
            raise InputError(f"policy_options: got {shown(options)}, which have no text form") from error
        if key not in self._named:
            policy = None if name == PLAIN else policies.of(name, options)
            self._named[key] = self.own if policy == self.own.policy else self._of(policy)
        elif self._target.captured:
            self._named[key] = self._captured(self._named.pop(key))
        return self._bounded(key)

    def _captured(self, known: Drivers) -> Drivers:
        """Return these drivers, captured once more if they have given up their graphs."""
        return known if known.captured is not None else known._replace(captured=self._of(known.policy).captured)

    def _bounded(self, key: tuple[str, ...]) -> Drivers:
        """Return the drivers asked for last; those asked for longest ago give up their graphs if there are many."""
        captured = [one for one, kept in self._named.items() if kept.captured is not None and kept is not self.own]
        for one in captured[:-MOST_CAPTURED]:
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
            self._brought = self._of(policy)
        return self._brought

    def _of(self, policy: TreePolicy | None) -> Drivers:
        return Drivers.of(self._target, self._drafter, policy)
