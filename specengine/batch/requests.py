"""Lines of OpenAI's batches: {"custom_id", "method", "url", "body"}, and the lines that answer them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specengine.errors import InputError, shown

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# by OpenAI's name, the engine's
_OPTIONS = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "stop": "stop_strings",
}
_NEUTRAL = {"n": 1, "stream": False, "logprobs": False, "store": False, "best_of": 1, "echo": False}
_WITHOUT_EFFECT = ("user", "metadata", "model")


def read(entry: Mapping[str, Any]) -> tuple[str, Any, dict[str, Any]]:
    """Url, prompt, and options of Engine.generate; InputError for a field that cannot be honoured."""
    url, body = entry.get("url", CHAT), entry["body"]
    if url not in (CHAT, TEXT):
        raise InputError(f"url: got {shown(url)}, accepted {CHAT}, {TEXT}")
    if entry.get("method", "POST") != "POST":
        raise InputError(f"method: got {shown(entry['method'])}, accepted POST")
    if not isinstance(entry.get("custom_id"), str):
        raise InputError(f"custom_id: got {shown(entry.get('custom_id'))}, accepted a string")
    if not isinstance(body, dict):
        raise InputError(f"body: got {shown(body)}, accepted an object")
    said = {name: value for name, value in body.items() if value is not None}
    prompt = said.pop("messages" if url == CHAT else "prompt", None)
    for name, value in said.items():
        if name in _NEUTRAL and value != _NEUTRAL[name]:
            raise InputError(f"body.{name}: got {shown(value)}, accepted {_NEUTRAL[name]!r}")
        if name not in {*_OPTIONS, *_NEUTRAL, *_WITHOUT_EFFECT}:
            raise InputError(f"body.{name}: unknown, or not supported in a batch, accepted are {', '.join(_OPTIONS)}")
    options = {_OPTIONS[name]: value for name, value in said.items() if name in _OPTIONS}
    return url, prompt, options | ({"raw": True} if url == TEXT else {})


def answer(url: str, id: str, place: int, given: Mapping[str, Any], prompt_tokens: int, model: str) -> dict[str, Any]:
    """The line of an answer; `given` as other lines have it. `created` is 0: it would differ in every run."""
    own = f"{place:08d}"
    chosen = {"role": "assistant", "content": given["text"]}
    choice = {
        "index": 0,
        **({"message": chosen} if url == CHAT else {"text": given["text"]}),
        "logprobs": None,
        "finish_reason": given["finish_reason"],
    }
    count = len(given["token_ids"])
    body = {
        "id": f"{'chatcmpl' if url == CHAT else 'cmpl'}-{own}",
        "object": "chat.completion" if url == CHAT else "text_completion",
        "created": 0,
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens, "completion_tokens": count, "total_tokens": prompt_tokens + count
        },
    }  # fmt: skip
    response = {"status_code": 200, "request_id": f"req_{own}", "body": body}
    return {"id": f"batch_req_{own}", "custom_id": id, "response": response, "error": None}


def failure(id: str, place: int, kind: str, message: str) -> dict[str, Any]:
    error = {"code": kind, "message": message}
    return {"id": f"batch_req_{place:08d}", "custom_id": id, "response": None, "error": error}
