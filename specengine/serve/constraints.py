"""Fields that constrain what an answer may look like: `response_format`, `grammar`, and tools that must be called."""

from __future__ import annotations

import json
import re
from typing import Any

from specengine.errors import InputError
from specengine.request.grammars import WRITTEN, compiled
from specengine.serve.messages import is_empty
from specengine.serve.problems import Problem
from specengine.serve.requests import ChatRequest, NamedChoice, Sampling, Tool
from specengine.serve.tool_formats import CLOSING, OPENING, Hermes
from specengine.serve.tools import format_of

_TAG = re.compile(r"</?\w+>")
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def options(request: Sampling, tokenizer: Any) -> dict[str, Any]:
    """Of GenerationOptions: what keeps to these fields; Problem where they contradict each other."""
    asked = request.constraints
    if len(asked) > 1:
        name, other = sorted(asked)[:2]
        raise Problem(400, f"{name}: {other} constrains the answer too; leave one of them out", name)
    calls = calls_grammar(request, tokenizer) if isinstance(request, ChatRequest) else None
    if calls is not None and asked:
        name = next(iter(asked))
        raise Problem(400, f"{name}: tool_choice, or a strict tool, constrains the answer too; leave one out", name)
    return next(iter(asked.values()), {}) if calls is None else {"grammar": calls}


def names(request: Sampling) -> dict[str, str]:
    """The client's names of the options that constrain."""
    field = next(iter(request.constraints), "tools" if isinstance(request, ChatRequest) else "response_format")
    return dict.fromkeys(("json_schema", "json_object", "grammar"), field)


def calls_grammar(request: ChatRequest, tokenizer: Any) -> str | None:
    """A grammar, as Lark text, of what `tool_choice` and strict tools allow; None where they leave it free.

    In it arguments meet the schema of their tool; of a tool that is not strict, where that schema can be read.
    `required` is one call, unless the client says that there may be several.
    """
    tools, choice = request.tools or [], request.tool_choice
    if isinstance(choice, NamedChoice):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    elif choice == "none" or (choice != "required" and not any(tool.function.strict for tool in tools)):
        return None
    if not isinstance(format_of(tokenizer), Hermes):
        name = "tool_choice" if choice not in (None, "auto") else "tools"
        message = f"{name}: calls can be forced, and kept to their schema, where they are written as {Hermes.title}"
        raise Problem(400, message, name, "unsupported_field")
    added = tokenizer.get_added_vocab()
    opening, closing = (tag if tag in added else json.dumps(tag) for tag in (OPENING, CLOSING))
    rules = [f"body: ({' | '.join(f'call_{index}' for index in range(len(tools)))}) {closing}"]
    rules += [f"call_{index}: {_call(tool)}" for index, tool in enumerate(tools)]
    if isinstance(choice, NamedChoice):
        rules.append(f"start: {opening} body")
    elif choice == "required":
        more = f'("\\n" {opening} body)*' if request.parallel_tool_calls else ""
        rules.append(f"start: {opening} body {more}")
    elif OPENING in added:
        others = [token for token in added if _TAG.fullmatch(token) and token not in (OPENING, CLOSING)]
        written = [token for token in others if token not in tokenizer.all_special_tokens]
        between = f"(({' | '.join(written)}) TEXT?)*" if written else ""
        rules += [f"start: (text {opening} body)* text", f"text: TEXT? {between}"]
        rules.append(f"TEXT: /(.|\\n)+/ & ~/(.|\\n)*{OPENING}(.|\\n)*/")
    else:
        rules += ["start: (opened body)* TEXT", f"opened[lazy]: TEXT {opening}", "TEXT: /(.|\\n)*/"]
    return "\n".join(["%llguidance {}", *rules])


def _call(tool: Tool) -> str:
    function = tool.function
    schema = NO_ARGUMENTS if is_empty(function.parameters) else (function.parameters or {}) | {"type": "object"}
    if not function.strict and not _readable(schema):
        schema = {"type": "object"}
    name = json.dumps(function.name, ensure_ascii=False)
    head = json.dumps(f'\n{{"name": {name}, "arguments": ', ensure_ascii=False)
    given = json.dumps(schema | {"x-guidance": WRITTEN})
    return rf'{head} %json {given} "}}\n"'


def _readable(schema: dict[str, Any]) -> bool:
    try:
        compiled("json_schema", schema)
    except InputError:
        return False
    return True
