"""One answer: from a checked prompt to the cycles, and to the pieces of its text; and the scores of a given text."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from typing import Any, NamedTuple, cast, overload

import torch

from specengine.costs.measuring import stored
from specengine.cycle import Lane, blaming, make_room, run_eager
from specengine.drafters import MAX_WAITING, Drafter, Hints, RowDraft, Traits, innermost
from specengine.drafters._wrappers import Coupled, Guided, Origins
from specengine.engine.captured import GUIDED_NOTE, NOTE, CapturedDriver
from specengine.engine.parts import Drivers, EngineState, slots_of
from specengine.engine.scheduler import GivenUpError, SteppedAnswer, Ticket
from specengine.errors import InputError, require, require_input, require_value
from specengine.models import Target
from specengine.ops.cuda_graphs import CaptureError, GraphMemoryError, Graphs, sharing
from specengine.records import (
    Cycle,
    DrawnTree,
    GenerationResult,
    SpeculativeOutput,
    Stats,
    StreamPiece,
    TokenLogprob,
)
from specengine.registry import plain
from specengine.request.configs import read_call
from specengine.request.grammars import Constraint
from specengine.request.options import GenerationOptions, Request
from specengine.request.prompts import Prompt, predicted_ids, token_ids
from specengine.request.sampling import (
    History,
    Sampler,
    first_stop_end,
    of_rows,
    refuse_no_choice,
    signed,
)
from specengine.request.text import Decoder, TextStream

SCORED_ROWS = 128  # of a text's logits at once, each as long as the vocabulary
DEFAULT_WARMUP_TOKENS = 2048
MIN_ROOM = 1024  # tokens of an answer that room is made for at once; then for twice as many tokens as there are


class PreparedAnswer(NamedTuple):
    """Hold an answer that is about to begin.

    cycles   its cycles
    request  its stopper says when the answer ends and why
    policy   a TreePolicy, what shapes its trees; None where it decodes plainly
    origins  a drafters._wrappers.Origins, whose `wanted` may be set before the first cycle
    """

    cycles: Generator[Cycle, None, None] | SteppedAnswer
    request: Request
    policy: Any
    origins: Any


@contextlib.contextmanager
def serving(engine: EngineState) -> Iterator[None]:
    """Hold the engine for one answer. An error clears its caches."""
    with engine.hold(
        "this engine is generating for another caller; finish or close that stream first (one left by break or an "
        "error stays open: use `with engine.stream(...) as stream:` or close()), or make an Engine for each thread "
        "(they can share the loaded model)"
    ):
        try:
            yield
        except (GeneratorExit, GivenUpError):
            raise  # the caller has had enough; the caches are as after the last cycle
        except BaseException:
            engine.reset()
            raise


def run_eagerly(engine: EngineState, error: CaptureError) -> None:
    """Run all cycles without graphs from here on, or the next answer's where a capture found no memory.

    Raises the error of a capture where graphs were asked for.
    """
    recipe = engine.watch.recipe
    if engine.pool is None and (recipe is None or recipe.options.graphs):
        raise error
    engine.reset()
    if not isinstance(error, GraphMemoryError):
        engine.target.captured = False
        engine.drivers.forget_graphs()
        engine.notes = [*engine.notes, f"{error}; cycles run without graphs"]


def want(target: Target, drafter: Drafter | None) -> None:
    """Ask the target for the features and successors that the draft reads."""
    traits = Traits() if drafter is None else drafter.traits
    target.want(traits.features, traits.successors)


def begin(
    engine: EngineState, drivers: Drivers, request: Request
) -> Generator[Any, Any, tuple[Lane, CapturedDriver | None]]:
    """Take in the prompt; return the lane, and the captured driver, None where graphs are done without."""
    try:
        if drivers.captured is None or engine.target.captured:
            return (yield from _begin(engine, drivers, request)), drivers.captured
    except CaptureError as error:
        # and begin again below, as the error holds memory of the capture
        run_eagerly(engine, error)
        if engine.target.captured:
            request.stats.notes.append(f"{error}; this answer's cycles ran without graphs")
    return (
        yield from _begin(
            engine,
            drivers._replace(captured=None),
            dataclasses.replace(request, reuse_cache=False),
        )
    ), None


@torch.inference_mode()
def _begin(engine: EngineState, drivers: Drivers, request: Request) -> Generator[Any, Any, Lane]:
    target, pool = engine.target, engine.pool
    drafter, policy = drivers.drafter, drivers.policy
    stats = request.stats
    reason = (
        "plain decoding has no draft that copies"
        if drafter is None
        else f"draft {drafter.name!r} copies nothing"
    )
    require_input(
        f"prediction: {reason}; accepted with ngram and with lookup",
        not request.prediction or (drafter is not None and drafter.traits.copies),
    )
    hints = Hints(
        [request.prompt[-1], *request.prediction] if request.prediction else (),
        0.0 if request.sampler.couples else request.sampler.temperature,
        memory=request.memory and request.memory.index,
    )
    rests = False
    if engine.ring is not None and drafter is not None:
        cast(Any, innermost(drafter)).renew()  # takes a head that was learnt meanwhile
    if policy is not None:
        find = functools.cache(lambda: stored.find(target, drafter, drivers.captured))
        costs = find if pool is None else functools.partial(pool.costs, engine, find)
        with blaming(policy, "begin"):
            policy.begin(
                len(request.prompt),
                request.sampler.seed is not None,
                costs,
            )
        with blaming(policy, "plan"):
            plan = policy.plan()
        rests = plan.rests
        stats.policy, stats.plain_reason = repr(policy), plan.reason
        if plan.reads_costs and costs().doubt:
            stats.notes.append(f"costs are provisional: {costs().doubt} while they were measured")
        if plan.reads_costs and drivers.captured is not None:
            drivers.captured.narrow_to(costs().verify)
    if not request.reuse_cache and pool is None:  # a pool's caches are what its texts share
        engine.reset()
    stats.draft = drafter.name if drafter is not None else ""
    # processors and criteria read it there
    on_device = request.sampler.reads_history or bool(request.stopper.criteria)
    most = len(request.prompt) + request.stopper.left
    driver = drivers.eager if drivers.captured is None else drivers.captured
    room = min(most, len(request.prompt) + MIN_ROOM)
    history = History(request.prompt, room, target.device if on_device else torch.device("cpu"))
    lane = Lane(
        driver, request.sampler, request.stopper, history, stats, request.prompt[-1], room, most
    )
    lane.memory = hints.memory
    make_room(driver, room)
    before = request.prompt[:-1]
    want(target, drafter)
    if pool is not None:
        yield from pool.share(engine, before, drafter)
    cached = min(
        target.cached(before), drafter.cached(before) if drafter is not None else len(before)
    )
    stats.num_cached_prompt_tokens = cached
    stats.num_prompt_tokens = len(request.prompt)  # last: other threads tell both from then on
    features = (
        (target if drivers.captured is None else drivers.captured).prefill(before, cached)
        if pool is None
        else (yield from pool.prefill(engine, before, cached))
    )
    if drafter is not None:
        waits = drivers.captured is None and (pool is None or rests) and len(before) <= MAX_WAITING
        with blaming(drafter, "begin"):
            hints = hints._replace(waits=waits, multiple=driver.prompt_rows)
            drafter.begin(before, features, hints)
        inner = innermost(drafter)
        drivers.eager.late = inner if waits and isinstance(inner, RowDraft) else None
    if pool is not None:
        pool.read(engine)
    driver.prepare(request.sampler)
    captured_notes = () if drivers.captured is None else drivers.captured.notes
    stats.notes += [*engine.notes, *target.notes, *captured_notes]
    return lane


def source_of(
    drafter: Drafter | None, lane: Lane, constraint: Constraint | None, origins: Origins | None
) -> Drafter | None:
    """Return the drafter wrapped in what an answer asks for."""
    if drafter is None:
        return None
    source, sampler = drafter, lane.sampler
    if sampler.couples and sampler.seed is not None:
        seed = torch.tensor([signed(sampler.seed)], device=drafter.device, dtype=torch.int64)
        factor = Coupled.scale(drafter, sampler.temperature, truncated=sampler.truncates)
        scale = torch.tensor([factor], device=drafter.device, dtype=torch.float32)
        source = Coupled(drafter, seed, scale, lambda: lane.history.length)
    if constraint is not None:
        source = Guided(source, constraint, lane.stopper.tokens)
    if origins is None or not origins.wanted:
        return source
    lane.origins = origins
    return origins.around(source)


def run_cycles(
    engine: EngineState,
    request: Request,
    drivers: Drivers | None,
    origins: Origins | None,
    ticket: Ticket,
) -> Generator[Any, Any, None]:
    """Yield the cycles of one generation. An engine of a pool yields what it needs too, see engine.scheduler."""
    stats = request.stats
    with contextlib.suppress(GivenUpError), serving(engine), contextlib.ExitStack() as held:
        eager, captured = drivers or engine.drivers.own
        pool = engine.pool
        whole = captured is not None and captured.serves(request.sampler)
        if pool is not None and not (whole and eager.inspected and cast(Any, captured).joined):
            captured = None
        require_input(
            "the model was changed after this answer was asked for; ask again",
            eager.target is engine.target,
        )
        if pool is not None:
            slots = slots_of(eager, len(request.prompt) + request.stopper.left)
            yield from pool.place(engine, *slots, ticket)
            held.callback(pool.leave, engine)
        running = sharing(engine.target.device, engine.target.running)
        with running():
            lane, captured = yield from begin(engine, Drivers(eager, captured), request)
            whole = whole and captured is not None
            # a pool's cycles are run where all texts are stepped
            lane.driver = (
                captured if captured is not None and whole is (pool is not None) else eager
            )
            if whole:
                stats.notes.append(NOTE)
            lane.source = source_of(eager.drafter, lane, request.constraint, origins)
            if request.constraint is not None and captured is not None and captured.grows_there:
                stats.notes.append(GUIDED_NOTE)
        held.callback(lambda: lane.driver.forget())
        while lane.reason is None:
            if whole and pool is None and (eager.inspected or stats.num_spec_steps):
                yield from cast(CapturedDriver, captured).cycles(lane)
                break
            if pool is None:
                with running():
                    (cycle,) = run_eager([lane])
            else:
                cycle = yield lane
            if lane.reason is not None or whole:
                with running():
                    lane.driver.catch_up()
            yield cycle
        if eager.drafter is not None and stats.num_draft_passes:
            stats.notes += eager.drafter.notes


def cycles(
    engine: EngineState,
    request: Request,
    drivers: Drivers | None = None,
    origins: Origins | None = None,
    ticket: Ticket | None = None,
) -> Generator[Cycle, None, None] | SteppedAnswer:
    """Return the cycles of one generation; see `Engine.cycles`."""
    ticket = ticket or Ticket()
    steps = run_cycles(engine, request, drivers, origins, ticket)
    answer = steps if engine.pool is None else engine.pool.scheduler.add(steps, ticket)
    engine.answers.add(answer)
    return answer


def prepare(  # noqa: PLR0913
    engine: EngineState,
    prompt: list[int],
    options: GenerationOptions,
    decode: Callable[[list[int]], str],
    *,
    sampler: Sampler | None = None,
    constraint: Constraint | None = None,
    reuse_cache: bool = False,
    ticket: Ticket | None = None,
    memory: Any = None,
) -> PreparedAnswer:
    """Make the request of checked options, and prepare its answer.

    decode: for stop strings; sampler: instead of the one that the options make; constraint: of `options`, where it is
    made already; reuse_cache, memory: as in Request; ticket: as in Engine.cycles.
    """
    require_value(
        "logprobs",
        options.logprobs,
        f"0 to {engine.target.vocab_size}, the vocabulary",
        (options.logprobs or 0) <= engine.target.vocab_size,
    )
    constraint = constraint or engine.constraint(options)
    origins = Origins()
    drivers = engine.drivers.asked(options.policy, options.policy_options)
    request = Request(
        prompt,
        sampler or options.sampler(len(prompt), engine.target.device, constraint),
        options.stopper(decode, constraint),
        prediction=predicted_ids(options.prediction, engine.tokenizer, engine.target.vocab_size),
        reuse_cache=reuse_cache,
        constraint=constraint,
        memory=memory,
    )
    return PreparedAnswer(
        cycles(engine, request, drivers, origins, ticket), request, drivers.policy, origins
    )


class TextGeneration(Iterator[StreamPiece], contextlib.AbstractContextManager["TextGeneration"]):
    """One generation as an iterator of StreamPiece; closing it, or letting it go, frees the engine.

    Options and prompt are checked at construction. `answer.origins.wanted`, set before the first piece, has cycles note
    the sources of their nodes, which takes time. `result` is there once the iterator has ended.
    """

    # Nothing it holds may hold it in turn: only then does letting it go free the engine at once.

    def __init__(
        self,
        engine: EngineState,
        prompt: Prompt | None,
        options: Mapping[str, Any] | GenerationOptions,
        *,
        reuse_cache: bool = False,
        shown: Collection[int] = (),
        constraint: Constraint | None = None,
        ticket: Ticket | None = None,
    ) -> None:
        """options: of GenerationOptions.of, where they are checked already, with their constraint; shown: special
        tokens whose text the answer shows; ticket: says until when it waits for room among others. An answer that is
        given up while it waits has no pieces and no result."""
        engine.follow()
        target = engine.target
        if not isinstance(options, GenerationOptions):
            prompt, options = read_call(prompt, options)
        given = vars(options) if isinstance(options, GenerationOptions) else options
        self.prompt = token_ids(
            cast(Prompt, prompt),
            engine.tokenizer,
            raw=plain(given.get("raw")) is True,
            vocab_size=target.vocab_size,
            max_context=target.max_context,
            allow_special_text=plain(given.get("allow_special_text")) is not False,
        )
        self.options = (
            options
            if isinstance(options, GenerationOptions)
            else GenerationOptions.of(
                options, target.generation_config, len(self.prompt), target.max_context
            )
        )
        require_input(
            "stop_strings: they need a tokenizer, pass tokenizer= when loading the engine",
            not self.options.stops or engine.tokenizer is not None,
        )
        self.result: GenerationResult | None = None
        self._texts = TextStream(Decoder(engine.tokenizer, shown))
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._sent = 0
        self._silent = False  # whether the text of pieces is left out, as nobody reads it
        self._streams: bool | None = None  # whether a streamer waits for the end; None: not begun
        self._longest: Cycle | None = None  # the one that committed the most tokens, if several
        self._engine = engine
        self.answer = prepare(
            engine,
            self.prompt,
            self.options,
            self._texts.decode,
            constraint=constraint,
            reuse_cache=reuse_cache,
            ticket=ticket,
            memory=engine.memory and engine.memory.of(ticket.owner if ticket else ""),
        )

    @property
    def stats(self) -> Stats:
        """Return the statistics of the cycles so far."""
        return self.answer.request.stats

    @property
    def prompt_read(self) -> float:
        """Return the share of the prompt that the target's cache holds, 0 to 1, as far as the target says it.

        May be read from another thread while the first piece is waited for.
        """
        cache = getattr(self._engine.target, "cache", None)
        return min(1.0, getattr(cache, "length", 0) / max(1, len(self.prompt) - 1))

    @property
    def stops_passed(self) -> int:
        """Return the characters at the beginning of the answer in which no stop string counts."""
        return self.answer.request.stopper.passed

    def __repr__(self) -> str:
        return f"TextGeneration({self.stats})"

    def _repr_html_(self) -> str:
        return (
            self.result
            or GenerationResult(
                self._texts.decode(self._tokens), self._tokens, "under way", self.stats
            )
        )._repr_html_()

    def __next__(self) -> StreamPiece:
        try:
            return self._advance()
        except StopIteration:
            raise
        except (
            BaseException
        ):  # also from a streamer or a tokenizer: a traceback may keep this object for long
            self.answer.cycles.close()
            with contextlib.suppress(Exception):  # the error that is under way says more
                self._end_streamer()
            raise

    def __exit__(self, *error: object) -> None:
        self.close()

    def _advance(self) -> StreamPiece:
        streamer = self.options.streamer
        if streamer is not None and self._streams is None:
            self._streams = True
            streamer.put(torch.tensor([self.prompt], dtype=torch.int64, device="cpu"))
        cycle = next(self.answer.cycles)
        self._tokens += cycle.tokens
        if len(cycle.tokens) > (1 if self._longest is None else len(self._longest.tokens)):
            self._longest = cycle
        self._logprobs += cycle.logprobs or ()
        text = "" if self._silent else self._texts.push(cycle.tokens)
        if streamer is not None:
            streamer.put(torch.tensor(cycle.tokens, dtype=torch.int64, device="cpu"))
        reason = self.answer.request.stopper.last_reason
        if reason is not None and (
            not isinstance(self.answer.cycles, SteppedAnswer) or self.answer.cycles.is_over
        ):
            text = self._finish(reason)[self._sent :]
            next(self.answer.cycles, None)  # runs the generator to its end, which frees the engine
            self._end_streamer()
        self._sent += len(text)
        return StreamPiece(text, cycle)

    @property
    def is_ready(self) -> bool:
        """Return whether the next piece can be had without a step of other answers."""
        return not isinstance(self.answer.cycles, SteppedAnswer) or self.answer.cycles.is_ready

    def silence(self) -> None:
        """Leave out the text of pieces, as nobody reads it, unless a streamer does or some were read."""
        self._silent = self.options.streamer is None and not self._tokens

    def run(self) -> Any:
        """Generate to the end; the result in the form that `return_dict_in_generate` asks for."""
        streams = self.options.streamer is not None
        self._silent = self._silent or not (streams or self._tokens)
        with (
            contextlib.nullcontext() if streams else self._engine.target.running()
        ):  # nobody looks at pieces meanwhile
            for _ in self:
                pass
        result, wanted = cast(GenerationResult, self.result), self.options.return_dict_in_generate
        if wanted is None:
            return result
        sequences = torch.tensor([[*self.prompt, *self._tokens]], dtype=torch.int64, device="cpu")
        output = SpeculativeOutput(
            sequences=sequences,
            text=result.text,
            token_ids=result.token_ids,
            finish_reason=result.finish_reason,
            stats=result.stats,
            logprobs=result.logprobs,
        )
        return output if wanted else sequences

    def close(self) -> None:
        """Stop generating and free the engine; what was streamed stays valid, and a streamer is told the end."""
        self.answer.cycles.close()
        self._end_streamer()

    def _end_streamer(self) -> None:
        if self._streams:
            self._streams = False
            self.options.streamer.end()

    def _finish(self, reason: str) -> str:
        if reason == "length" and self.options.cut:
            self.stats.notes += [self.options.cut]
        keepers = {"learn": self._engine.ring, "memory": self.answer.request.memory}
        for name, keeper in keepers.items():
            try:
                if keeper is not None:
                    keeper.add(self.prompt, self._tokens)
            except OSError as error:
                self.stats.notes += [f"{name}: this text was not kept ({error.strerror or error})"]
        text = self._texts.decode(self._tokens)
        text = text[: first_stop_end(text, self.options.stops, self.stops_passed)]
        text = text[: len(text) - self.answer.request.stopper.overhang]
        self.result = GenerationResult(
            text,
            self._tokens,
            reason,
            self.stats,
            self.options.seed,
            None if self.options.logprobs is None else self._logprobs,
            None
            if (longest := self._longest) is None
            else DrawnTree(longest.tree, longest.agreed[1:], self._texts.decode),
        )
        return text


def score(engine: EngineState, prompt: Prompt, top: int) -> Generator[TokenLogprob, None, None]:
    """Return the log-probabilities of a text's tokens; see `Engine.score`."""
    top = plain(top)
    require("top", top, "0 or more", type(top) is int and top >= 0)
    engine.follow()
    target = engine.target
    ids = token_ids(
        prompt,
        engine.tokenizer,
        raw=True,
        vocab_size=target.vocab_size,
        max_context=target.max_context,
    )
    rows = _scored(engine, ids, top)
    engine.answers.add(rows)
    return rows


def _scored(
    engine: EngineState, tokens: list[int], top: int
) -> Generator[TokenLogprob, None, None]:
    with serving(engine):
        target = engine.target
        with torch.inference_mode():
            target.reset()
            target.reserve(len(tokens), 0)
        for first in range(0, len(tokens) - 1, SCORED_ROWS):
            end = min(first + SCORED_ROWS, len(tokens) - 1)
            with sharing(target.device, target.running)(), torch.inference_mode():
                logits = target.rate(tokens[first:end])
                finite = torch.isfinite(logits).any(1).tolist()
                if not all(finite):
                    refuse_no_choice(None, first + finite.index(False) + 1)
                rated = of_rows(logits, tokens[first + 1 : end + 1], top)
            yield from rated  # not within, where a caller who pauses would hold up captures


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


def warm_up(engine: EngineState, tokens: int | None, drivers: Drivers) -> WarmUp:
    """Capture all graphs of a policy; see `Engine.warmup`."""
    target = engine.target
    captured = drivers.captured
    tokens = min(DEFAULT_WARMUP_TOKENS, target.max_context) if tokens is None else plain(tokens)
    if captured is None:
        raise InputError("warmup: this engine captures no graphs; load it with graphs=True")
    require("tokens", tokens, f"1 to {target.max_context}", 1 <= tokens <= target.max_context)
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


class Session:
    """A conversation. `messages` holds the turns so far; each turn runs only what the caches do not hold yet."""

    def __init__(self, engine: EngineState, messages: list[dict[str, str]] | None = None) -> None:
        require_value(
            "messages",
            messages,
            "a list of messages (role, content)",
            isinstance(messages, list | tuple | None),
        )
        self.engine = engine
        self.messages = list(messages or [])

    @overload
    def generate(
        self, text: str, *, return_dict_in_generate: bool, **options: Any
    ) -> SpeculativeOutput | torch.Tensor: ...

    @overload
    def generate(self, text: str, **options: Any) -> GenerationResult: ...

    def generate(self, text: str, **options: Any) -> Any:
        """Add a user turn and answer it; options and result as in Engine.generate."""
        return self.stream(text, **options).run()

    def stream(self, text: str, **options: Any) -> TextGeneration:
        """Answer as `generate` does, streamed; the turn enters `messages` when the stream has ended."""
        return _Turn(self, text, options)


class _Turn(TextGeneration):
    """A turn that writes itself into its session once it is complete."""

    def __init__(self, session: Session, text: str, options: Mapping[str, Any]) -> None:
        require_value("text", text, "a string", isinstance(text, str))
        require_input("text: it is empty, a turn needs text", bool(text))
        self._session, self._turn = session, {"role": "user", "content": text}
        super().__init__(session.engine, [*session.messages, self._turn], options, reuse_cache=True)

    def _finish(self, reason: str) -> str:
        text = super()._finish(reason)
        self._session.messages += [self._turn, {"role": "assistant", "content": text}]
        return text
