"""Answer lines with one engine, or with several on its weights; requests of OpenAI's batches as the server does."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from specengine.batch.lines import Item
from specengine.costs.measuring import stored
from specengine.engine import Engine, Pool, TextGeneration, parallel_of
from specengine.engine.scheduler import Task, finished, run_tasks
from specengine.errors import InputError
from specengine.records import GenerationResult, Stats

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
            line, stats = yield from _request_answered(engine, item, item.url)
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
        error = _openai_line(item, None, {"code": kind, "message": message})
        return Answered(item.place, error, [])
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
        results.append((yield from complete(engine, TextGeneration(engine, prompt, item.options))))
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


# ---- requests of OpenAI's batches


def _request_answered(
    engine: Engine, item: Item, url: str
) -> Generator[None, None, tuple[dict[str, Any], list[Stats]]]:
    """Return the line of an answer, and the statistics of each that it holds, as a task of engine.scheduler.

    InputError for a field that is not supported. Times are 0, and ids made of the place: they would differ in every
    run.
    """
    from specengine.protocol.completion import Completion
    from specengine.protocol.dialects import DIALECTS
    from specengine.protocol.preparing import CheckedRequest, ModelLimits
    from specengine.protocol.problems import RequestError
    from specengine.protocol.settings import Settings

    dialect = DIALECTS[url]
    name = os.path.basename(engine.target.name) or type(engine.target).__name__
    settings = Settings(
        name or "model", allow_special_text=bool(item.options.get("allow_special_text", True))
    )
    answers = []
    try:
        request = dialect.translated(item.request)
        asked = [
            CheckedRequest(each, settings, _seeded(item.options, number), dialect.names)
            for number, each in enumerate(request.each())
        ]
        for each in asked:
            prepared = each.prepare(
                engine, ModelLimits(engine.tokenizer, engine.target.max_context)
            )
            generation = TextGeneration(
                engine,
                prepared.prompt,
                prepared.options,
                shown=prepared.shown,
                constraint=prepared.constraint,
            )
            result = yield from complete(engine, generation)
            answers.append(
                Completion(
                    generation.stats,
                    generation.prompt,
                    token_ids=result.token_ids,
                    text=result.text,
                    reason="length" if result.finish_reason == "length" else "stop",
                    passed=generation.stops_passed,
                    logprobs=result.logprobs or [],
                )
            )
    except RequestError as problem:
        raise InputError(str(problem)) from problem
    body = dialect.reply(item.request, request, name, engine.tokenizer).whole(answers)
    response = {
        "status_code": 200,
        "request_id": f"req_{item.place:08d}",
        "body": _without_chance(body, item.place),
    }
    return _openai_line(item, response, None), [answer.stats for answer in answers]


def _openai_line(item: Item, response: Any, error: Any) -> dict[str, Any]:
    return {
        "id": f"batch_req_{item.place:08d}",
        "custom_id": item.id,
        "response": response,
        "error": error,
    }


def complete(engine: Engine, generation: TextGeneration) -> Generator[None, None, GenerationResult]:
    with generation, engine.target.running():
        yield from finished(generation)
    assert generation.result is not None
    return generation.result


def _seeded(defaults: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the defaults of one of a request's answers, which sample with seeds that follow on each other."""
    seed = defaults.get("seed")
    return {"max_new_tokens": None, **defaults} | ({} if seed is None else {"seed": seed + number})


_MEASURED = ("timings", "metrics", "system_fingerprint")
_TIMES = ("created", "created_at", "completed_at")
# a client's or a model's own words, as they stand
_CLIENTS = "input", "tools", "metadata", "parameters"
_DRAWN = re.compile(r"(?:([a-z]+)([-_]))?([0-9a-f]{9}|[0-9a-f]{32})")


def _without_chance(body: dict[str, Any], place: int) -> dict[str, Any]:
    """Return an answer without what differs from run to run: figures, times, and ids that were drawn."""
    numbered: dict[str, str] = {}

    def renumbered(name: str, value: Any) -> Any:
        drawn = _DRAWN.fullmatch(value) if name.endswith("id") and isinstance(value, str) else None
        if drawn is None:
            return plain(value)
        if value not in numbered:
            number = _id(place, len(numbered), len(drawn[3]))
            numbered[value] = f"{drawn[1]}{drawn[2]}{number}" if drawn[1] else number
        return numbered[value]

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(each) for each in value]
        if not isinstance(value, dict):
            return value
        fields = {
            name: each
            for name, each in value.items()
            if name not in _MEASURED and not name.endswith("_details")
        }
        # Anthropic's input tokens are those that were not cached
        if cached := fields.get("cache_read_input_tokens"):
            fields |= {
                "input_tokens": fields["input_tokens"] + cached,
                "cache_read_input_tokens": 0,
            }
        return {
            name: each if name in _CLIENTS else 0 if name in _TIMES else renumbered(name, each)
            for name, each in fields.items()
        }

    told: dict[str, Any] = plain(body)
    prefix = _DRAWN.fullmatch(str(body.get("id")))
    return told | (
        {"id": f"{prefix[1]}{prefix[2]}{place:08d}"} if prefix is not None and prefix[1] else {}
    )


def _id(place: int, number: int, length: int) -> str:
    """Return letters and digits for an id, as long as the server's: templates may check the length."""
    return hashlib.sha256(json.dumps([place, number]).encode()).hexdigest()[:length]
