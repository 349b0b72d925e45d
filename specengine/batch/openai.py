"""Lines of OpenAI's batches: {"custom_id", "method", "url", "body"}, and the lines that answer them.

The bodies are those of the server, and are answered as it answers them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from specengine.engine import Engine, TextGeneration
from specengine.errors import InputError, missing_extra, shown
from specengine.records import Stats

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_NOT_OF_A_BATCH = ("stream", "echo", "return_cycles")


def read(entry: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the URL and the request as the server reads it; InputError names a field that is not supported."""
    try:
        from pydantic import ValidationError

        from specengine.protocol.problems import of_validation
        from specengine.protocol.requests import ChatRequest, CompletionRequest
    except ImportError as error:
        raise missing_extra("OpenAI's requests", "serve", error) from error
    url, body = entry.get("url", CHAT), entry["body"]
    if url not in (CHAT, TEXT):
        raise InputError(f"url: got {shown(url)}, accepted {CHAT}, {TEXT}")
    if entry.get("method", "POST") != "POST":
        raise InputError(f"method: got {shown(entry['method'])}, accepted POST")
    if not isinstance(body, dict):
        raise InputError(f"body: got {shown(body)}, accepted an object")
    model = ChatRequest if url == CHAT else CompletionRequest
    try:
        request = model.model_validate(body)
    except ValidationError as error:
        raise InputError(f"body.{of_validation(error.errors(), list(model.model_fields))}") from error
    for name in _NOT_OF_A_BATCH:
        if getattr(request, name, None):
            raise InputError(f"body.{name}: got {shown(getattr(request, name))}, accepted in a batch: false")
    return url, request


def answered(
    engine: Engine, request: Any, url: str, id: str, place: int, defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], Stats]:
    """Return the line of an answer and its statistics; InputError for a field that is not supported.

    defaults: options of Engine.generate, for what the request does not say. `created` is 0: it would differ in every
    run, and so would ids that are drawn.
    """
    from specengine.protocol import replies
    from specengine.protocol.completion import Completion
    from specengine.protocol.preparing import CheckedRequest, ModelLimits
    from specengine.protocol.problems import RequestError
    from specengine.protocol.settings import Settings

    name = os.path.basename(engine.target.name) or type(engine.target).__name__
    settings = Settings(name or "model", allow_special_text=bool(defaults.get("allow_special_text", True)))
    asked = CheckedRequest(request, settings, {"max_new_tokens": None, **defaults})
    try:
        prepared = asked.prepare(engine, ModelLimits(engine.tokenizer, engine.target.max_context))
    except RequestError as problem:
        raise InputError(str(problem)) from problem
    generation = TextGeneration(
        engine, prepared.prompt, prepared.options, shown=prepared.shown, constraint=prepared.constraint
    )
    for _ in generation:
        pass
    result = generation.result
    assert result is not None
    answer = Completion(generation.stats, generation.prompt)
    answer.text, answer.token_ids, answer.logprobs = result.text, result.token_ids, result.logprobs or []
    answer.reason = "length" if result.finish_reason == "length" else "stop"
    reply = replies.make(request, name, engine.tokenizer)
    choice = reply.message(answer) if isinstance(reply, replies.ChatReply) else reply.message(answer, "")
    for number, call in enumerate(choice.get("message", {}).get("tool_calls", ())):
        call["id"] = _id(place, number, len(call["id"]))
    own, count = f"{place:08d}", len(answer.token_ids)
    body = {
        "id": f"{reply.prefix}-{own}",
        "object": reply.kind,
        "created": 0,
        "model": name,
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prepared.prompt),
            "completion_tokens": count,
            "total_tokens": len(prepared.prompt) + count,
        },
    }
    response = {"status_code": 200, "request_id": f"req_{own}", "body": body}
    return {"id": f"batch_req_{own}", "custom_id": id, "response": response, "error": None}, generation.stats


def _id(place: int, number: int, length: int) -> str:
    """Return the id of a call, as long as the server's ids: templates may check the length."""
    drawn = hashlib.sha256(json.dumps([place, number]).encode()).hexdigest()
    return drawn[:length] if length < 16 else f"call_{drawn[:32]}"


def failure(id: str, place: int, kind: str, message: str) -> dict[str, Any]:
    error = {"code": kind, "message": message}
    return {"id": f"batch_req_{place:08d}", "custom_id": id, "response": None, "error": error}
