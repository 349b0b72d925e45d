"""Lines of OpenAI's batches: {"custom_id", "method", "url", "body"}, and the lines that answer them.

The bodies are those of the server, and are answered as it answers them.
"""

import hashlib
import json
import os
import re
from collections.abc import Generator, Mapping
from typing import Any

from specengine.engine import Engine, TextGeneration
from specengine.engine.scheduler import finished
from specengine.errors import InputError, missing_extra, require_value
from specengine.records import GenerationResult, Stats

CHAT = "/v1/chat/completions"
URLS = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages")
_NOT_OF_A_BATCH = ("stream", "echo", "return_cycles")


def read(entry: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the URL and the body as the server reads it; InputError names a field that is not supported."""
    try:
        from pydantic import ValidationError

        from specengine.protocol.dialects import DIALECTS
        from specengine.protocol.problems import RequestError, of_validation
    except ImportError as error:
        raise missing_extra("OpenAI's requests", "serve", error) from error
    url, body = entry.get("url", CHAT), entry["body"]
    require_value("url", url, ", ".join(URLS), url in URLS)
    require_value(
        "method", entry.get("method", "POST"), "POST", entry.get("method", "POST") == "POST"
    )
    require_value("body", body, "an object", isinstance(body, dict))
    dialect = DIALECTS[url]
    try:
        given = dialect.given.model_validate(body)
        request = dialect.translated(given)
    except ValidationError as error:
        raise InputError(
            f"body.{of_validation(error.errors(), list(dialect.given.model_fields))}"
        ) from error
    except RequestError as problem:
        raise InputError(f"body.{problem}") from problem
    require_value("body.max_tokens", 0, "in a batch: 1 or more", request.wanted_tokens != 0)
    for name in _NOT_OF_A_BATCH:
        value = getattr(request, name, None)
        require_value(f"body.{name}", value, "in a batch: false", not value)
    return url, given


def answered(
    engine: Engine, body: Any, url: str, id: str, place: int, defaults: Mapping[str, Any]
) -> Generator[None, None, tuple[dict[str, Any], list[Stats]]]:
    """Return the line of an answer, and the statistics of each that it holds, as a task of engine.scheduler.

    InputError for a field that is not supported.

    defaults: options of Engine.generate, for what the request does not say. Times are 0, and ids made of the place:
    they would differ in every run.
    """
    from specengine.protocol.dialects import DIALECTS
    from specengine.protocol.preparing import CheckedRequest
    from specengine.protocol.problems import RequestError
    from specengine.protocol.settings import Settings

    dialect = DIALECTS[url]
    name = os.path.basename(engine.target.name) or type(engine.target).__name__
    settings = Settings(
        name or "model", allow_special_text=bool(defaults.get("allow_special_text", True))
    )
    try:
        request = dialect.translated(body)
        asked = [
            CheckedRequest(each, settings, _seeded(defaults, number), dialect.names)
            for number, each in enumerate(request.each())
        ]
        answers = []
        for each in asked:
            answer = yield from _answer(engine, each)
            answers.append(answer)
    except RequestError as problem:
        raise InputError(str(problem)) from problem
    response = {
        "status_code": 200,
        "request_id": f"req_{place:08d}",
        "body": _without_chance(
            dialect.reply(body, request, name, engine.tokenizer).whole(answers), place
        ),
    }
    line = {"id": f"batch_req_{place:08d}", "custom_id": id, "response": response, "error": None}
    return line, [answer.stats for answer in answers]


def complete(engine: Engine, generation: TextGeneration) -> Generator[None, None, GenerationResult]:
    """Generate to the end."""
    with generation, engine.target.running():
        yield from finished(generation)
    assert generation.result is not None
    return generation.result


def _answer(engine: Engine, asked: Any) -> Generator[None, None, Any]:
    """Return the Completion of one request."""
    from specengine.protocol.completion import Completion
    from specengine.protocol.preparing import ModelLimits

    prepared = asked.prepare(engine, ModelLimits(engine.tokenizer, engine.target.max_context))
    generation = TextGeneration(
        engine,
        prepared.prompt,
        prepared.options,
        shown=prepared.shown,
        constraint=prepared.constraint,
    )
    result = yield from complete(engine, generation)
    return Completion(
        generation.stats,
        generation.prompt,
        token_ids=result.token_ids,
        text=result.text,
        reason="length" if result.finish_reason == "length" else "stop",
        passed=generation.stops_passed,
        logprobs=result.logprobs or [],
    )


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
    known: dict[str, str] = {}

    def own(name: str, value: Any) -> Any:
        found = _DRAWN.fullmatch(value) if name.endswith("id") and isinstance(value, str) else None
        if found is None:
            return plain(value)
        if value not in known:
            number = _id(place, len(known), len(found[3]))
            known[value] = f"{found[1]}{found[2]}{number}" if found[1] else number
        return known[value]

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(each) for each in value]
        if not isinstance(value, dict):
            return value
        kept = {
            name: each
            for name, each in value.items()
            if name not in _MEASURED and not name.endswith("_details")
        }
        if cached := kept.get(
            "cache_read_input_tokens"
        ):  # Anthropic's input tokens are those that were not cached
            kept |= {"input_tokens": kept["input_tokens"] + cached, "cache_read_input_tokens": 0}
        return {
            name: each if name in _CLIENTS else 0 if name in _TIMES else own(name, each)
            for name, each in kept.items()
        }

    told: dict[str, Any] = plain(body)
    prefix = _DRAWN.fullmatch(str(body.get("id")))
    return told | (
        {"id": f"{prefix[1]}{prefix[2]}{place:08d}"} if prefix is not None and prefix[1] else {}
    )


def _id(place: int, number: int, length: int) -> str:
    """Return letters and digits for an id, as long as the server's: templates may check the length."""
    return hashlib.sha256(json.dumps([place, number]).encode()).hexdigest()[:length]


def failure(id: str, place: int, kind: str, message: str) -> dict[str, Any]:
    return {
        "id": f"batch_req_{place:08d}",
        "custom_id": id,
        "response": None,
        "error": {"code": kind, "message": message},
    }
