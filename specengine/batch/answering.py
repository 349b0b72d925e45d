"""Answer lines with one engine, or with several on its weights."""

from __future__ import annotations

import concurrent.futures
import hashlib
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from specengine.batch import openai
from specengine.batch.lines import Item
from specengine.costs.measuring import stored
from specengine.engine import Engine, GivenUpError, Pool, TextGeneration, Ticket, parallel_of
from specengine.errors import InputError
from specengine.records import GenerationResult

# Of costs.stored.identity: what changes the time that an answer takes and none of its tokens.
_SPEED_ALONE = ("threads", "packed")
BLOCKS = 64  # of a file of weights, evenly spaced
BLOCK_BYTES = 4096
AHEAD = 256  # answers that may wait for an earlier one, of which the file is in need
STOP_SECONDS = 1.0  # to wait for answers that are given up


class Answered(NamedTuple):
    """The record written for a line.

    line   for the file of answers: nothing in it was measured
    stats  of each turn, as Stats.to_dict gives them; empty where it failed
    """

    place: int
    line: dict[str, Any]
    stats: list[dict[str, Any]]

    @property
    def failed(self) -> bool:
        return bool(self.line.get("error"))


def answer(engine: Engine, item: Item, ticket: Ticket | None = None) -> Answered:
    """Return the answer of one line, from empty caches. An error becomes the line's answer.

    GivenUpError where the ticket is cancelled before the answer is whole.
    """
    if item.fault is not None:
        return failed(item, InputError.__name__, item.fault)
    ticket = ticket or Ticket()
    try:
        if item.url is not None:
            given = (item.request, item.url, item.id, item.place, item.options)
            line, stats = openai.answered(engine, *given, ticket)
            return Answered(item.place, line, [each.to_dict() for each in stats])
        results = _turns(engine, item, ticket)
    except GivenUpError:
        raise
    except Exception as error:
        return failed(item, type(error).__name__, " ".join(str(error).split()))
    turns = [{"text": each.text, "token_ids": each.token_ids, "finish_reason": each.finish_reason} for each in results]
    said = {"turns": turns} if item.later else turns[0]
    return Answered(item.place, {"id": item.id, **said}, [result.stats.to_dict() for result in results])


def failed(item: Item, kind: str, message: str) -> Answered:
    """Return the line of an item that gets no answer."""
    if item.url is not None:
        return Answered(item.place, openai.failure(item.id, item.place, kind, message), [])
    return Answered(item.place, {"id": item.id, "error": {"type": kind, "message": message}}, [])


def facts(engine: Engine) -> dict[str, Any]:
    """Return the facts of an engine that its answers depend on, JSON-ready. Engines that answer alike have the same."""
    identity = stored.identity(engine.target, engine.drafter)
    defaults: Any = engine.target.generation_config
    texts = {
        "chat template": stored.digest({"template": getattr(engine.tokenizer, "chat_template", None)}),
        "generation config": stored.digest({} if defaults is None else defaults.to_dict()),
        "weights": _sampled(Path(engine.target.name)),
    }
    return {name: value for name, value in identity.items() if name not in _SPEED_ALONE} | texts


def _sampled(model: Path) -> str:
    """Return a digest of blocks of a model's files at a path: other weights of the same shapes have another one."""
    read = hashlib.sha256()
    for file in sorted(model.glob("*")) if model.is_dir() else [model]:
        if file.suffix in (".safetensors", ".gguf", ".bin") and file.is_file():
            size = file.stat().st_size
            with file.open("rb") as handle:
                for block in range(BLOCKS):
                    handle.seek(size * block // BLOCKS)
                    read.update(handle.read(BLOCK_BYTES))
    return read.hexdigest()[:32]


def _turns(engine: Engine, item: Item, ticket: Ticket) -> list[GenerationResult]:
    def result(prompt: Any) -> GenerationResult:
        return openai.complete(engine, TextGeneration(engine, prompt, item.options, ticket=ticket), ticket)

    results = [result(item.prompt)]
    prompt = item.prompt
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    for text in item.later:
        messages = [*messages, {"role": "assistant", "content": results[-1].text}, {"role": "user", "content": text}]
        results.append(result(messages))
    return results


def answered(
    load: Callable[[], Engine],
    items: Iterable[Item],
    loaded: Callable[[dict[str, Any]], None],
    parallel: int | None = 1,
) -> Iterator[Answered]:
    """Answer the lines in this process, `parallel` at once, in their order; None: as many as memory holds.

    loaded: called with the facts of the engine before the first answer.
    """
    engine = load()
    parallel = parallel_of(engine) if parallel is None else parallel
    pool = None if parallel == 1 else Pool(engine, parallel)
    loaded(facts(engine))
    if pool is None:
        for item in items:
            yield answer(engine, item)
    else:
        yield from _at_once(pool.engines, items)


def _at_once(engines: list[Engine], items: Iterable[Item]) -> Iterator[Answered]:
    free: queue.SimpleQueue[Engine] = queue.SimpleQueue()
    for engine in engines:
        free.put(engine)

    def run(item: Item, ticket: Ticket) -> Answered:
        engine = free.get()
        try:
            return answer(engine, item, ticket)
        finally:
            free.put(engine)

    under_way: deque[tuple[Future[Answered], Ticket]] = deque()
    threads = ThreadPoolExecutor(len(engines))

    def first() -> Answered:
        answered = under_way[0][0].result()
        under_way.popleft()
        return answered

    try:
        for item in items:
            ticket = Ticket()
            under_way.append((threads.submit(run, item, ticket), ticket))
            if len(under_way) == AHEAD:
                yield first()
        while under_way:
            yield first()
    finally:
        for future, ticket in under_way:
            future.cancel()
            ticket.cancel()
        threads.shutdown(wait=False)
        concurrent.futures.wait([future for future, _ in under_way], STOP_SECONDS)
