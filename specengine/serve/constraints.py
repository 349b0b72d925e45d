"""Fields that constrain what an answer may look like: `response_format`, `grammar`, and tools that must be called."""

from __future__ import annotations

import json
from typing import Any

from specengine.generation.grammars import WRITTEN, compiled
from specengine.serve.problems import Problem
from specengine.serve.requests import ChatRequest, NamedChoice, Sampling, Tool
from specengine.serve.tools import CLOSING, OPENING


def options(request: Sampling) -> dict[str, Any]:
    """Of GenerationOptions: what keeps to these fields; Problem where they contradict each other."""
    asked = {} if request.response_format is None else request.response_format.options
    if request.grammar is not None:
        if asked:
            raise Problem(400, "grammar: response_format constrains the answer too; leave one of them out", "grammar")
        asked = {"grammar": request.grammar}
    calls = calls_grammar(request) if isinstance(request, ChatRequest) else None
    if calls is not None and asked:
        name = "grammar" if "grammar" in asked else "response_format"
        raise Problem(400, f"{name}: tool_choice, or a strict tool, constrains the answer too; leave one out", name)
    return asked if calls is None else {"grammar": calls}


def names(request: Sampling) -> dict[str, str]:
    """The client's names of the options that constrain."""
    chat = isinstance(request, ChatRequest) and request.grammar is None
    own = {"json_schema": "response_format", "json_object": "response_format"}
    return own | ({"grammar": "tools"} if chat else {})


def calls_grammar(request: ChatRequest) -> str | None:
    """A grammar, as Lark text, of what `tool_choice` and strict tools allow; None where they leave it free."""
    tools, choice = request.tools or [], request.tool_choice
    if isinstance(choice, NamedChoice):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    elif choice == "none" or (choice != "required" and not any(tool.function.strict for tool in tools)):
        return None
    lines = [f"call_{index}: {_call(tool)}" for index, tool in enumerate(tools)]
    opening, closing = json.dumps(OPENING), json.dumps("\n" + CLOSING)
    body = f"({' | '.join(f'call_{index}' for index in range(len(tools)))}) {closing}"
    if isinstance(choice, NamedChoice):
        start = f"start: {opening} {body}"
    elif choice == "required":
        start = f'start: {opening} {body} ("\\n" {opening} {body})*'
    else:
        start = f"start: (opened {body})* TEXT\nopened[lazy]: TEXT {opening}\nTEXT: /(.|\\n)*/"
    return "\n".join(["%llguidance {}", start, *lines])


def _call(tool: Tool) -> str:
    """What stands between the tags: for strict tools, and where one must be called, by the schema of its parameters."""
    function = tool.function
    schema = function.parameters if function.parameters else {"type": "object"}
    head = json.dumps('\n{"name": ' + json.dumps(function.name) + ', "arguments": ')
    return f"{head} %json {json.dumps(schema | {'x-guidance': WRITTEN})} \"}}\""
