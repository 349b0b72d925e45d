"""The server's answers are the engine's, in the shapes that clients read."""

import asyncio
import json
from typing import Any

import openai
import pytest

from specengine.protocol import anthropic
from specengine.protocol.completion import Completion, found_again
from specengine.protocol.tools import StopText
from specengine.records import Stats
from tests.serve.served import CHAT, NAME, TEXT, Served, served, tiny_engine

SAMPLED = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.0, "top_p": 0.9, "seed": 5, "frequency_penalty": 0.5},
]


def chunks(text: str) -> list[dict[str, Any]]:
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


@pytest.mark.parametrize("options", SAMPLED)
def test_tokens_are_the_engines_streamed_or_not(server: Served, options: dict[str, Any]) -> None:
    named = {name: value for name, value in options.items() if name != "max_tokens"}
    expected = tiny_engine().generate(CHAT["messages"], max_new_tokens=24, **named)
    pieces = "".join(
        piece.text for piece in tiny_engine().stream(CHAT["messages"], max_new_tokens=24, **named)
    )
    asked = CHAT | options | {"return_token_ids": True}
    whole = server.post(asked).json()["choices"][0]
    assert whole["token_ids"] == expected.token_ids
    assert whole["message"]["content"] == expected.text
    streamed = chunks(server.post(asked | {"stream": True}).text)
    choices = [choice for chunk in streamed for choice in chunk["choices"]]
    assert [
        token for choice in choices for token in choice.get("token_ids", [])
    ] == expected.token_ids
    assert "".join(choice["delta"].get("content", "") for choice in choices) == pieces
    assert choices[-1]["finish_reason"] == whole["finish_reason"] == expected.finish_reason


def test_a_stop_string_is_left_out_streamed_or_not(server: Served) -> None:
    text = server.post(TEXT, "/v1/completions").json()["choices"][0]["text"]
    stop = text[6:9]
    expected = text[: text.index(stop)]
    for stream in (False, True):
        answer = server.post(
            TEXT | {"stop": [stop, "never there"], "stream": stream}, "/v1/completions"
        )
        bodies = chunks(answer.text) if stream else [answer.json()]
        choices = [choice for body in bodies for choice in body["choices"]]
        assert "".join(choice["text"] for choice in choices) == expected
        assert choices[-1]["finish_reason"] == "stop"


def test_usage_counts_cached_tokens_and_timings_come_once(server: Served) -> None:
    asked = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    server.post(CHAT)
    streamed = chunks(server.post(asked).text)
    assert streamed[0]["choices"][0]["delta"]["role"] == "assistant"
    assert streamed[-1]["choices"] == []
    usage = streamed[-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    assert usage["completion_tokens"] == 24 == streamed[-1]["timings"]["predicted_n"]
    assert "timings" in streamed[-2]
    assert not any("timings" in chunk for chunk in streamed[:-2])
    figures = streamed[-1]["metrics"]["speculative_decoding"]
    by_length = figures["acceptance_histogram_by_draft_length"].values()
    assert (
        sum(map(sum, by_length))
        == figures["num_spec_steps"]
        == sum(figures["acceptance_histogram"])
    )


def test_figures_of_a_prompt_that_was_cached_in_part() -> None:
    stats = Stats()
    stats.num_prompt_tokens, stats.num_cached_prompt_tokens = 10, 4
    answer = Completion(stats, list(range(10)))
    assert (answer.timings["cache_n"], answer.timings["prompt_n"]) == (4, 6)
    assert answer.usage["prompt_tokens"] == 10
    usage = anthropic._usage(answer)
    assert (usage["cache_read_input_tokens"], usage["input_tokens"]) == (4, 6)


def test_openais_client_sync_async_and_streaming(server: Served) -> None:
    base: dict[str, Any] = {"base_url": f"{server.address}/v1", "api_key": "any"}
    client = openai.OpenAI(**base)
    assert client.models.list().data[0].id == NAME
    # random bytes, of which a stream and a whole text make the same so far
    asked = CHAT | {"max_tokens": 8}
    whole = client.chat.completions.create(**asked)
    text = whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    stream = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text

    async def ask() -> Any:
        async with openai.AsyncOpenAI(**base) as asynchronous:
            return await asynchronous.chat.completions.create(**asked)

    assert asyncio.run(ask()).choices[0].message.content == text
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=21)


def test_prediction_is_counted_and_refused_where_nothing_copies() -> None:
    prediction = {"type": "content", "content": "some text"}
    with served(lambda: tiny_engine(draft="none")) as plain:
        refused = plain.post(CHAT | {"prediction": prediction, "stream": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prediction")
    with served(lambda: tiny_engine(draft="ngram", policy="chain")) as copying:
        answer = copying.post(CHAT | {"prediction": prediction})
        details = answer.json()["usage"]["completion_tokens_details"]
        assert sum(details.values()) == len("some text")
        assert details["accepted_prediction_tokens"] == 0


@pytest.mark.parametrize(
    ("predicted", "answer", "found"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 4),
        ([1, 2, 3, 4], [9, 9], 0),
        ([1, 2, 3, 4, 5], [1, 9, 3, 4, 5], 3),
        ([1], [], 0),
        ([1, 2, 3, 4], [1, 2, 3, 1, 2, 9], 3),  # what was found is not found again
    ],
)
def test_what_of_a_prediction_is_found_again(
    predicted: list[int], answer: list[int], found: int
) -> None:
    assert found_again(predicted, answer) == found


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    stop = StopText(["END", "ENOUGH"])
    assert [stop.push(part) for part in ("go E", "N", "TER E", "ND of it", "more")] == [
        "go ",
        "",
        "ENTER ",
        "",
        "",
    ]
    other = StopText(["END"])
    assert other.push("the EN") + other.end() == "the EN"
