"""Answer lines with one engine, or with several on its weights."""

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from specengine.batch import openai
from specengine.batch.lines import Item
from specengine.costs.measuring import stored
from specengine.engine import Engine, Pool, TextGeneration, parallel_of
from specengine.engine.scheduler import Task, run_tasks
from specengine.errors import InputError
from specengine.records import GenerationResult

# Of costs.stored.identity: what changes the time that an answer takes and none of its tokens.
_SPEED_ALONE = ("threads", "packed")
BLOCKS = 64  # of a file of weights, evenly spaced
BLOCK_BYTES = 4096
AHEAD = 256  # answers that may wait for an earlier one, of which the file is in need


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


def answer(engine: Engine, item: Item) -> Generator[None, None, Answered]:
    """Return the answer of one line, from empty caches, as a task. An error becomes the line's answer."""
    if item.fault is not None:
        return failed(item, InputError.__name__, item.fault)
    try:
        if item.url is not None:
            line, stats = yield from openai.answered(
                engine, item.request, item.url, item.id, item.place, item.options
            )
            return Answered(item.place, line, [each.to_dict() for each in stats])
        results = yield from _turns(engine, item)
    except Exception as error:
        return failed(item, type(error).__name__, " ".join(str(error).split()))
    turns = [
        {"text": each.text, "token_ids": each.token_ids, "finish_reason": each.finish_reason}
        for each in results
    ]
    said = {"turns": turns} if item.later else turns[0]
    return Answered(
        item.place, {"id": item.id, **said}, [result.stats.to_dict() for result in results]
    )


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
        "chat template": stored.digest(
            {"template": getattr(engine.tokenizer, "chat_template", None)}
        ),
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


def _turns(engine: Engine, item: Item) -> Generator[None, None, list[GenerationResult]]:
    results: list[GenerationResult] = []
    prompt = item.prompt
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    for text in (None, *item.later):
        if text is not None:
            answer = {"role": "assistant", "content": results[-1].text}
            messages = [*messages, answer, {"role": "user", "content": text}]
            prompt = messages
        results.append(
            (yield from openai.complete(engine, TextGeneration(engine, prompt, item.options)))
        )
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
    engines, scheduler = ([engine], None) if pool is None else (pool.engines, pool.scheduler)
    loaded(facts(engine))
    coming = enumerate(items)
    answers: dict[int, Answered] = {}  # that wait for earlier ones
    written = 0  # in their order

    def task(engine: Engine, number: int, item: Item) -> Generator[None, None, int]:
        answers[number] = yield from answer(engine, item)
        return number

    def take(idle: list[Engine], wait: bool) -> tuple[Engine, Task] | None:
        if len(answers) >= AHEAD or (one := next(coming, None)) is None:
            return None
        return idle[0], task(idle[0], *one)

    for _ in run_tasks(engines, scheduler, take):
        while written in answers:
            yield answers.pop(written)
            written += 1
