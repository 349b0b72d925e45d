"""Tests of what each protocol's clients read in its own words: overflows, tools left out, ends, rates and times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from specengine.errors import ContextLengthError
from specengine.protocol.problems import of_error
from specengine.protocol.replies import OpenAIReply
from specengine.protocol.tools import StopText
from tests.serve.saying import CALL, Saying, saying

CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
HELLO = [{"role": "user", "content": "Hello"}]
FUNCTION: dict[str, Any] = {"name": "look_up", "description": "Look"}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.fixture(scope="module")
def own() -> Iterator[Saying]:
    with saying(context=512, max_prompt_tokens=400) as made:
        yield made


def answered(
    own: Saying, path: str, body: dict[str, Any], text: str | None = "Yes."
) -> dict[str, Any]:
    own.said = text
    answer = own.server.post(body, path)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def events(
    own: Saying, path: str, body: dict[str, Any], text: str | None = "Yes."
) -> list[dict[str, Any]]:
    own.said = text
    lines = own.server.post(body | {"stream": True}, path).text.splitlines()
    found = [line.removeprefix("data: ") for line in lines if line.startswith(("data: {", "{"))]
    return [json.loads(line) for line in found]


# ---- prompts that are too long

LONG = {"just": "word " * 150, "far": "word " * 30_000, "beyond the server's limit": "w" * 420}
BODIES: dict[str, Any] = {
    CHAT: lambda text: {"messages": [{"role": "user", "content": text}]},
    TEXT: lambda text: {"prompt": text},
    RESPONSES: lambda text: {"input": text},
    MESSAGES: lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
    "/api/chat": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/api/generate": lambda text: {"prompt": text, "raw": True},
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG.keys())
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_prompt_that_is_too_long_is_told_in_the_words_that_agents_know(
    own: Saying, path: str, streams: bool, text: str
) -> None:
    answer = own.server.post(BODIES[path](text) | {"stream": streams}, path)
    assert answer.status_code == 400
    body = answer.json()
    if path in (CHAT, TEXT, RESPONSES):
        error = body["error"]
        assert (error["code"], error["type"]) == (
            "context_length_exceeded",
            "invalid_request_error",
        )
        assert error["message"].startswith("This model's maximum context length is ")
        assert error["param"] in ("messages", "prompt", "input")
    elif path == MESSAGES:
        words = body["error"]["message"].split()
        assert (
            " ".join([*words[:4], *words[5:7], words[-1]]) == "prompt is too long: tokens > maximum"
        )
        assert int(words[4]) > int(words[7])
        assert body["error"]["type"] == "invalid_request_error"
    else:
        assert "the input length exceeds the context length" in body["error"]
        assert "prompt too long; exceeded max context length by " in body["error"]


def test_llama_cpps_overflow_has_its_figures(own: Saying) -> None:
    answer = own.server.post({"input_prefix": "word " * 30_000, "input_suffix": ""}, "/infill")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (
        400,
        400,
        "exceed_context_size_error",
    )
    assert error["n_prompt_tokens"] > error["n_ctx"] > 0


def test_openais_client_and_streams_under_way_see_the_code(own: Saying) -> None:
    client = openai.OpenAI(base_url=f"{own.server.address}/v1", api_key="any", max_retries=0)
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "w" * 600}], stream=True
        )
    assert raised.value.code == "context_length_exceeded"
    problem = of_error(
        ContextLengthError("prompt: it has 600", 600, 512, 511), {"prompt": "messages"}
    )
    told = object.__new__(OpenAIReply).failed(problem)
    assert json.loads(told.removeprefix(b"data: "))["error"]["code"] == "context_length_exceeded"


# ---- tools that no client calls by a function

OTHERS: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "namespace", "name": "agents", "tools": [TOOL]},
    {"type": "custom", "name": "apply_patch", "format": {"type": "text"}},
    {"type": "mcp", "server_label": "x", "server_url": "http://x"},
    {"type": "file_search", "vector_store_ids": []},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "local_shell"},
]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, "/api/chat"])
def test_they_are_left_out_with_a_note(own: Saying, path: str) -> None:
    ours = {
        RESPONSES: {"type": "function", **FUNCTION, "parameters": {"type": "object"}},
        MESSAGES: FUNCTION,
    }
    others = OTHERS
    if path == MESSAGES:
        others = [{"type": f"{other['type']}_20250305", "name": "x"} for other in OTHERS]
    tools = [*others[:3], ours.get(path, TOOL), *others[3:]]
    whole = answered(own, path, BODIES[path]("Hello") | {"tools": tools, "stream": False})
    assert "look_up" in own.prompt
    assert not any(other["type"] in own.prompt for other in others)
    places = [0, 1, 2, 4, 5, 6, 7]
    assert [note.partition(" is ")[0] for note in whole["notes"]] == [
        f"tools[{place}]: type {tools[place]['type']!r}" for place in places
    ]
    parts = events(own, path, BODIES[path]("Hello") | {"tools": others[:1]})
    assert whole["notes"][0] in json.dumps(parts)
    assert own.prompt == "<|user|>Hello<|end|><|assistant|>"


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, "/api/chat"])
def test_the_description_says_which_tools_are_taken(own: Saying, path: str) -> None:
    described = own.server.client.get("/openapi.json").json()
    body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    checker = jsonschema.Draft202012Validator(body | {"components": described["components"]})
    ours = {
        RESPONSES: {"type": "function", **FUNCTION, "parameters": {"type": "object"}},
        MESSAGES: FUNCTION,
    }
    function = ours.get(path, TOOL)
    others = [other for other in OTHERS if path != MESSAGES or other["type"] != "custom"]
    wrong = [{"type": "custom" if path == MESSAGES else "function"}, {"type": 1}, {}, "look_up"]
    for tool, taken in [
        *((tool, True) for tool in [function, *others]),
        *((tool, False) for tool in wrong),
    ]:
        request = BODIES[path]("Hello") | {"tools": [function, tool], "stream": False}
        assert checker.is_valid(request) is taken, tool
        assert own.server.post(request, path).status_code == (200 if taken else 400)


def test_a_tool_that_is_left_out_cannot_be_chosen(own: Saying) -> None:
    bodies = {
        CHAT: {"tool_choice": "required"},
        RESPONSES: {"tool_choice": {"type": "web_search"}},
        MESSAGES: {"tool_choice": {"type": "tool", "name": "x"}},
    }
    for path, choice in bodies.items():
        other = OTHERS[0] | {"name": "x"}
        answer = own.server.post(BODIES[path]("Hello") | {"tools": [other]} | choice, path)
        assert answer.status_code == 400
        assert "tool_choice" in answer.json()["error"]["message"]


def test_notes_of_codex_are_taken(own: Saying) -> None:
    assert (
        answered(own, RESPONSES, {"input": "Hello", "client_metadata": {"session_id": "1"}})[
            "status"
        ]
        == "completed"
    )
    assert own.server.post({"input": "Hello", "nonsense": 1}, RESPONSES).status_code == 400


# ---- ends


@pytest.mark.parametrize(
    ("stop", "least", "text", "count"),
    [
        (["abc"], 0, "", 3),
        (["abc"], 3, "abc", 6),
        (["abc"], 4, "abc", 6),
        (["ca"], 4, "abcab", 7),
        (["b", "x"], 8, "abcabcabca", 11),
        (["zz"], 8, "abcabcabcabcxyz", 16),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_stop_strings_count_after_min_tokens(
    own: Saying, path: str, stop: list[str], least: int, text: str, count: int
) -> None:
    body = BODIES[path]("Hello") | {"stop": stop, "min_tokens": least, "max_tokens": 20}
    whole = answered(own, path, body, "abcabcabcabcxyz")
    choice = whole["choices"][0]
    assert choice.get("text", choice.get("message", {}).get("content")) == text
    assert (whole["usage"]["completion_tokens"], choice["finish_reason"]) == (count, "stop")
    parts = [part["choices"][0] for part in events(own, path, body, "abcabcabcabcxyz")]
    assert (
        "".join(part.get("text", part.get("delta", {}).get("content", "")) or "" for part in parts)
        == text
    )


def test_end_tokens_count_after_min_tokens(own: Saying) -> None:
    end = own.server.worker.engine.tokenizer.convert_tokens_to_ids("<|end|>")  # type: ignore[union-attr]
    for path in (CHAT, TEXT):
        body = BODIES[path]("Hello") | {
            "max_tokens": 12,
            "return_token_ids": True,
            "logit_bias": {str(end): 90},
        }
        assert answered(own, path, body, None)["usage"]["completion_tokens"] == 1
        whole = answered(own, path, body | {"min_tokens": 5, "stop_token_ids": [end]}, None)
        assert whole["usage"]["completion_tokens"] == 6


def test_a_stop_string_is_found_across_pieces_after_what_is_passed() -> None:
    stop = StopText(["ab", "bc"])
    assert "".join(stop.push(letter, 4) for letter in "abab") == "aba"
    assert (stop.push("c", 4), stop.found) == ("", None) or stop.found == "bc"
    assert stop.found == "bc"


@pytest.mark.parametrize(
    "said", ["Yes, it is.", "<think>Hm, it is.</think>", "<think>Hm.</think>Yes, it is"]
)
def test_what_the_limit_cuts_is_incomplete(own: Saying, said: str) -> None:
    body = {
        "input": "Hello",
        "max_output_tokens": len(said) - 3 if said[0] == "Y" else len(said) - 9,
    }
    whole = answered(own, RESPONSES, body, said)
    last = events(own, RESPONSES, body, said)[-1]["response"]
    for response in (whole, last):
        statuses = [item["status"] for item in response["output"]]
        assert statuses == ["completed"] * (len(statuses) - 1) + ["incomplete"]
    done = [
        event
        for event in events(own, RESPONSES, body, said)
        if event["type"] == "response.output_item.done"
    ]
    assert done[-1]["item"]["status"] == "incomplete"
    assert answered(own, RESPONSES, {"input": "Hello"}, said)["output"][-1]["status"] == "completed"


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_string_hides_neither_a_call_nor_the_limit(own: Saying, streams: bool) -> None:
    """In Messages, each of which has a reason of its own."""
    asked = BODIES[MESSAGES]("Hello") | {
        "max_tokens": 200,
        "stop_sequences": ["STOP"],
        "tools": [FUNCTION],
    }

    def reason(change: dict[str, Any], said: str) -> tuple[str, str | None]:
        body = asked | change
        ended = (
            events(own, MESSAGES, body, said)[-2]["delta"]
            if streams
            else answered(own, MESSAGES, body, said)
        )
        return ended["stop_reason"], ended["stop_sequence"]

    assert reason({}, f"{CALL}STOP") == ("tool_use", None)
    assert reason({}, "Well STOP now") == ("stop_sequence", "STOP")
    assert reason({"max_tokens": 8}, "Well, STOP") == ("max_tokens", None)
    assert reason({"max_tokens": 9}, "Well STOP") == ("stop_sequence", "STOP")


# ---- rates, times and thoughts


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": HELLO}),
        ("/api/generate", {"prompt": "Hello"}),
        ("/api/generate", {"prompt": "Hello", "raw": True}),
    ],
)
def test_ollamas_logprobs_are_given(own: Saying, path: str, body: dict[str, Any]) -> None:
    body = body | {"logprobs": True, "top_logprobs": 2, "options": {"num_predict": 3}}
    whole = answered(own, path, body | {"stream": False}, "Yes.")
    assert [rated["token"] for rated in whole["logprobs"]] == ["Y", "e", "s"]
    assert all(
        len(rated["top_logprobs"]) == 2 and rated["logprob"] <= 0 for rated in whole["logprobs"]
    )
    parts = [
        rated for part in events(own, path, body, "Yes.") for rated in part.get("logprobs", [])
    ]
    assert [rated["token"] for rated in parts] == ["Y", "e", "s"]
    assert [rated["logprob"] for rated in parts] == pytest.approx(
        [rated["logprob"] for rated in whole["logprobs"]]
    )
    assert "logprobs" not in answered(
        own, path, body | {"stream": False, "logprobs": False, "top_logprobs": 0}
    )
    refused = own.server.post(
        body | {"logprobs": None, "prompt": "a"} if path == "/api/chat" else {"prompt": 3}, path
    )
    assert refused.status_code == 400


def test_ollamas_durations_are_those_of_the_timings(
    own: Saying, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specengine.protocol.completion import Completion

    timings = {"prompt_ms": 7.0, "predicted_ms": 11.0}
    monkeypatch.setattr(Completion, "timings", property(lambda answer: timings))
    whole = answered(own, "/api/chat", {"messages": HELLO, "stream": False})
    last = events(own, "/api/generate", {"prompt": "Hello"})[-1]
    for ended in (whole, last):
        assert (ended["prompt_eval_duration"], ended["eval_duration"]) == (7_000_000, 11_000_000)
        assert ended["total_duration"] == 18_000_000


def test_counting_takes_what_an_answer_takes(own: Saying) -> None:
    plain = answered(own, f"{MESSAGES}/count_tokens", {"messages": HELLO})
    rest = {
        "max_tokens": 1 << 40,
        "stream": True,
        "temperature": 0.5,
        "stop_sequences": ["a"],
        "metadata": {},
    }
    assert answered(own, f"{MESSAGES}/count_tokens", {"messages": HELLO} | rest) == plain
    assert (
        own.server.post({"messages": HELLO, "nonsense": 1}, f"{MESSAGES}/count_tokens").status_code
        == 400
    )


def test_an_effort_of_none_switches_thoughts_off(own: Saying) -> None:
    for path, body in (
        (CHAT, {"reasoning_effort": "none"}),
        (RESPONSES, {"reasoning": {"effort": "none"}}),
        (RESPONSES, {"reasoning_effort": "none"}),
        (MESSAGES, {"thinking": {"type": "disabled"}}),
        ("/api/chat", {"think": False}),
    ):
        answered(own, path, BODIES[path]("Hello") | body | {"stream": False})
        assert own.prompt.startswith("N")
    answered(own, CHAT, {"messages": HELLO, "reasoning_effort": "low"})
    assert own.prompt.startswith("<|user|>")
    answered(
        own,
        CHAT,
        {
            "messages": HELLO,
            "reasoning_effort": "none",
            "chat_template_kwargs": {"enable_thinking": True},
        },
    )
    assert own.prompt.startswith("<|user|>")
