"""The file of prompts: a line is a prompt, a conversation, or a request of OpenAI's batches.

Those requests are {"custom_id", "method", "url", "body"}. The bodies are those of the server.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from specengine.errors import (
    InputError,
    did_you_mean,
    missing_extra,
    require_input,
    require_value,
    shown,
)
from specengine.files import lines_of
from specengine.request.declared import declarations
from specengine.request.options import GenerationOptions

CHAT = "/v1/chat/completions"
URLS = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages")
_NOT_OF_A_BATCH = ("stream", "echo", "return_cycles")
LINE_OPTIONS = tuple(name for name, declared in declarations().items() if declared.line)
KINDS = ("prompt", "turns", "messages", "body")
_IDS = ("id", "custom_id", "question_id")
# A line's own words, among them those of Spec-Bench and SPEED-Bench, which no answer depends on.
_OF_DATA = ("category", "sub_category", "difficulty", "reference", "source", "src_id", "multiturn")
_FORMS = f"a string or an object with one of {', '.join(json.dumps(kind) for kind in KINDS)}"


@dataclass(frozen=True)
class Item:
    """One line.

    place    among the prompts, from 0
    id       as the line names it, a request of OpenAI's by its custom_id, else its number in the file, from 1
    prompt   as Engine.generate takes it; of several turns the first
    later    the user's further turns
    options  of Engine.generate
    url      of a request of OpenAI's batches, whose answer has its form
    request  that request, as the server reads it
    fault    why it cannot be answered, which is then its answer
    """

    place: int
    id: Any
    prompt: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    later: tuple[str, ...] = ()
    url: str | None = None
    request: Any = None
    fault: str | None = None


class Prompts(NamedTuple):
    """All lines, and the facts that tell this file from others."""

    items: list[Item]
    digest: str


def read(
    file: Path, options: Mapping[str, Any], *, seed: int = 0, system: str | None = None
) -> Prompts:
    """Return every line, checked without the model. InputError names the line, but for a request of
    OpenAI's, whose answer then says what is wrong.

    options: of Engine.generate, for lines that do not say otherwise; seed: each line samples with a seed of its own,
    made of this and its place; system: a message before prompts and turns that are strings.
    """
    lines = [(number, line) for number, line in enumerate(lines_of(file), start=1) if line.strip()]
    require_input(f"prompts: {file} has no prompts", bool(lines))
    items, seen = [], dict[str, int]()
    for place, (number, line) in enumerate(lines):
        where = f"{file}, line {number}"
        item = _item(place, number, _parsed(line, where), where, options, seed, system)
        first = seen.setdefault(str(item.id), number)
        require_input(
            f"prompts: {where}: id: got {shown(item.id)}, the id of line {first}; ids must be unique",
            first == number,
        )
        items.append(item)
    return Prompts(
        items, hashlib.sha256("\n".join(line for _, line in lines).encode()).hexdigest()[:32]
    )


def seed_of(seed: int, place: int) -> int:
    """Return the seed of one prompt's sampling, below 2**63. Two places share one by chance alone."""
    return int.from_bytes(hashlib.sha256(f"{seed} {place}".encode()).digest()[:8], "big") >> 1


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"prompts: {where} is not JSON ({error})") from error
    entry = {"prompt": entry} if isinstance(entry, str) else entry
    require_input(
        f"prompts: {where} is not {_FORMS}",
        isinstance(entry, dict) and len([kind for kind in KINDS if kind in entry]) == 1,
    )
    kind = next(kind for kind in KINDS if kind in entry)
    elsewhere: tuple[str, ...] = ()
    accepted: tuple[str, ...]
    if kind == "body":
        accepted = (*_IDS, "method", "url", kind)
        hint = 'fields of the request are accepted within "body": {...}'
    else:
        accepted = (*_IDS, kind, "options", *_OF_DATA)
        elsewhere = LINE_OPTIONS
        hint = 'options are accepted within "options": {...}, fields of OpenAI\'s requests within "body": {...}'
    for name in entry:
        if name not in accepted:
            listed = f"accepted {', '.join(accepted)}; {hint}{did_you_mean(name, (*accepted, *elsewhere))}"
            raise InputError(f"prompts: {where}: unknown field {shown(name)}, {listed}")
    return entry


def _item(
    place: int,
    number: int,
    entry: dict[str, Any],
    where: str,
    run: Mapping[str, Any],
    seed: int,
    system: str | None,
) -> Item:
    names = ("custom_id",) if "body" in entry else _IDS
    given = next((entry[name] for name in names if name in entry), number)
    is_id = isinstance(given, str | int) and not isinstance(given, bool)
    require_value(f"prompts: {where}: id", given, "a string or a whole number", is_id)
    seeded = {"seed": seed_of(seed, place), **run}
    if "body" in entry:
        return _request(place, given, entry, where, seeded)
    try:
        own = _options(entry.get("options", {}))
        prompt = next(entry[kind] for kind in KINDS if kind in entry)
        options = {**seeded, **own}
        GenerationOptions.check(dict(options))
    except InputError as error:
        raise InputError(f"prompts: {where}: {error}") from error
    later: tuple[str, ...] = ()
    if "turns" in entry:
        prompt, *later = _turns(prompt, where)  # type: ignore[assignment]
    else:
        _require_prompt(prompt, "messages" in entry, where)
    if system and isinstance(prompt, str):
        prompt = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
    return Item(place, given, prompt, options, tuple(later))


def _request(
    place: int, given: Any, entry: dict[str, Any], where: str, options: dict[str, Any]
) -> Item:
    """Return a line of OpenAI's batches; InputError where no answer could name it."""
    custom_id = entry.get("custom_id")
    require_value(f"prompts: {where}: custom_id", custom_id, "a string", isinstance(custom_id, str))
    try:
        url, request = _read_request(entry)
    except InputError as error:
        return Item(place, given, "", options, url=str(entry.get("url", CHAT)), fault=str(error))
    own = getattr(request, "seed", None)
    return Item(
        place, given, "", options | ({} if own is None else {"seed": own}), url=url, request=request
    )


def _read_request(entry: Mapping[str, Any]) -> tuple[str, Any]:
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
        validated = dialect.given.model_validate(body)
        request = dialect.translated(validated)
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
    return url, validated


def _options(given: Any) -> dict[str, Any]:
    require_value("options", given, "an object of options by name", isinstance(given, dict))
    for name in given:
        require_input(
            f"options: unknown {shown(name)}, accepted: {', '.join(LINE_OPTIONS)}",
            name in LINE_OPTIONS,
        )
    return given


def _turns(given: Any, where: str) -> list[str]:
    holds = _all(given, lambda turn: isinstance(turn, str) and turn)
    require_value(f"prompts: {where}: turns", given, "a list of strings", holds)
    return given


def _require_prompt(prompt: Any, messages: bool, where: str) -> None:
    """Raise InputError for another kind than Engine.generate takes; what the model says to it comes later."""
    field = f"prompts: {where}: {'messages' if messages else 'prompt'}"
    if messages:
        require_value(
            field, prompt, "a list of messages with role and content", _all(prompt, _is_message)
        )
    else:
        holds = (isinstance(prompt, str) and bool(prompt)) or _all(
            prompt, lambda token: type(token) is int
        )
        require_value(field, prompt, "a string or a list of token ids", holds)


def _all(given: Any, holds: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(map(holds, given))


def _is_message(given: Any) -> bool:
    return isinstance(given, dict) and isinstance(given.get("role"), str) and "content" in given
