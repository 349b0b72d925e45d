"""Log-probabilities in OpenAI's shapes: the engine's own, of answers and of prompts."""

from typing import Any

import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specengine.engine import SCORED_ROWS
from specengine.protocol.completion import Completion
from specengine.protocol.preparing import CheckedRequest
from specengine.protocol.replies import MIN_LOGPROB, ChatLogprobs, TextLogprobs, TokenTexts
from specengine.protocol.requests import CompletionRequest
from specengine.protocol.settings import Settings
from specengine.records import TokenLogprob
from specengine.request.text import Decoder
from specengine.serve.metrics import Metrics
from specengine.serve.worker import Job, Worker
from tests.request.silent_tokenizers import BEYOND, byte_fallback, byte_level, special, words
from tests.serve.served import CHAT, NAME, TEXT, Served, tiny_engine
from tests.serve.test_answers import chunks
from tests.toy import byte_tokenizer

SAMPLED = {"temperature": 1.0, "top_p": 0.9, "seed": 5, "frequency_penalty": 0.5}
PROMPT = list(b"once upon a time, and then ")  # ids of other letters, as good as any


def close(value: Any) -> Any:
    return pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_of_chat_streamed_or_not(server: Served, options: dict[str, Any]) -> None:
    expected = tiny_engine().generate(CHAT["messages"], max_new_tokens=24, logprobs=2, **options)
    asked = CHAT | options | {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    whole = server.post(asked).json()["choices"][0]
    assert whole["token_ids"] == expected.token_ids
    content = whole["logprobs"]["content"]
    assert [given["logprob"] for given in content] == close(
        [given.logprob for given in expected.logprobs]
    )
    tops = [[likely["logprob"] for likely in given["top_logprobs"]] for given in content]
    assert tops == [close([value for _, value in given.top]) for given in expected.logprobs]
    special = byte_tokenizer().all_special_tokens
    written = bytes(
        byte for given in content if given["token"] not in special for byte in given["bytes"]
    )
    assert written.decode(errors="replace") == whole["message"]["content"] == expected.text
    streamed = [
        choice
        for chunk in chunks(server.post(asked | {"stream": True}).text)
        for choice in chunk["choices"]
    ]
    for choice in streamed:
        assert len((choice["logprobs"] or {"content": []})["content"]) == len(
            choice.get("token_ids", [])
        )
    assert [
        given
        for choice in streamed
        if choice["logprobs"]
        for given in choice["logprobs"]["content"]
    ] == content


def test_openais_client_reads_them(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="any")
    chat = client.chat.completions.create(**CHAT, logprobs=True)
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    assert all(
        given.logprob <= 0 and given.top_logprobs == []
        for given in chat.choices[0].logprobs.content
    )
    stream = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=1, stream=True)
    assert (
        sum(
            len(chunk.choices[0].logprobs.content or [])
            for chunk in stream
            if chunk.choices[0].logprobs
        )
        == 24
    )
    text = client.completions.create(**TEXT, logprobs=1)
    assert text.choices[0].logprobs is not None
    assert len(text.choices[0].logprobs.tokens or []) == 24
    assert client.chat.completions.create(**CHAT).choices[0].logprobs is None
    assert client.completions.create(**TEXT).choices[0].logprobs is None


@pytest.mark.parametrize("count", [0, 1, 2, 24])
@pytest.mark.parametrize(
    "prompt", [PROMPT, [PROMPT], "Once upon", ["Once upon"]], ids=["ids", "one", "text", "list"]
)
def test_of_an_echoed_prompt_and_what_follows(server: Served, prompt: Any, count: int) -> None:
    asked = TEXT | {
        "prompt": prompt,
        "max_tokens": count,
        "echo": True,
        "logprobs": 3,
        "return_token_ids": True,
    }
    body = server.post(asked, "/v1/completions").json()
    choice, ids = body["choices"][0], body["prompt_token_ids"]
    engine = tiny_engine()
    rated = list(engine.score(ids, top=3))
    if count:
        answer = engine.generate(ids, max_new_tokens=count, logprobs=3)
        assert choice["token_ids"] == answer.token_ids
        rated += answer.logprobs
    found = choice["logprobs"]
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(
        found, len(ids) + count
    )
    assert (found["token_logprobs"][0], found["top_logprobs"][0], found["text_offset"][0]) == (
        None,
        None,
        0,
    )
    assert found["token_logprobs"][1:] == close([given.logprob for given in rated])
    for top, name, given in zip(found["top_logprobs"][1:], found["tokens"][1:], rated, strict=True):
        assert top[name] == close(given.logprob)
        assert max(top.values()) == close(given.top[0][1])
        assert len(top) == 3 + (given.token not in dict(given.top))
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (len(ids), count)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert choice["finish_reason"] == "length"
    streamed = chunks(server.post(asked | {"stream": True}, "/v1/completions").text)
    choices = [choice for chunk in streamed for choice in chunk["choices"]]
    joined = {
        name: [value for part in choices for value in (part["logprobs"] or {name: []})[name]]
        for name in found
    }
    assert joined["text_offset"] == found["text_offset"]
    assert joined["tokens"] == found["tokens"]
    assert joined["token_logprobs"] == [None, *close(found["token_logprobs"][1:]).expected]
    assert choices[-1]["finish_reason"] == "length"


def test_offsets_are_places_in_the_text() -> None:
    tokenizer = byte_tokenizer()
    ids = (
        tokenizer("a né→ b", add_special_tokens=False)["input_ids"]
        + tokenizer.all_special_ids[:1]
        + [64]
    )
    found = TextLogprobs(TokenTexts(tokenizer)).of([TokenLogprob(token, -1.0, []) for token in ids])
    assert found["text_offset"] == [0, 1, 2, 3, 3, 4, 4, 4, 5, 6, 7, 7]
    assert found["tokens"][:5] == ["a", " ", "n", "bytes:\\xc3", "bytes:\\xa9"]
    assert found["tokens"][10] == tokenizer.all_special_tokens[0]


@pytest.mark.parametrize(
    ("tokenizer", "ids"),
    [
        (byte_fallback(), [2, 2, special(byte_fallback()), 2, 6 + 0xC3, BEYOND, 6 + 0xA9, 3]),
        (byte_level(), [64, special(byte_level(), "<|quiet|>"), 64, BEYOND, 64]),
        (words(), [0, 9, 1, BEYOND, 5, 0]),
    ],
    ids=["pieces", "bytes", "words"],
)
def test_tokens_that_write_nothing_take_no_place(tokenizer: Any, ids: list[int]) -> None:
    found = TextLogprobs(TokenTexts(tokenizer)).of(
        [TokenLogprob(token, -1.0, [(BEYOND, -2.0)]) for token in ids]
    )
    decode = Decoder(tokenizer)
    assert found["text_offset"] == [
        len(decode(ids[:count]).rstrip("\N{REPLACEMENT CHARACTER}")) for count in range(len(ids))
    ]
    assert [name for token, name in zip(ids, found["tokens"], strict=True) if token == BEYOND] == [
        ""
    ]


def test_pieces_of_sentencepiece_keep_their_blanks_and_bytes() -> None:
    names = ["<unk>", "▁Hello", "▁there", "<0xC3>", "<0xA9>", "x"]
    core = Tokenizer(
        models.BPE(
            {name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>"))
    assert [texts.written(token) for token in range(1, 6)] == [
        b" Hello",
        b" there",
        b"\xc3",
        b"\xa9",
        b"x",
    ]
    assert texts.written(0) == b"<unk>"


def test_what_is_impossible_stays_json() -> None:
    rated = [TokenLogprob(64, float("-inf"), [(64, float("-inf"))])]
    texts = TokenTexts(byte_tokenizer())
    assert ChatLogprobs(texts).of(rated)["content"][0]["logprob"] == MIN_LOGPROB
    assert TextLogprobs(texts).of(rated)["token_logprobs"] == [MIN_LOGPROB]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0, "echo": True, "prompt": []}, "prompt"),
        ({"echo": True, "logprobs": 1, "prompt": [1, 2, 99999]}, "prompt"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    server: Served, change: dict[str, Any], field: str
) -> None:
    answer = server.post(TEXT | change, "/v1/completions")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_a_client_that_goes_away_while_its_prompt_is_scored_frees_the_engine() -> None:
    engine = tiny_engine()
    asked = CheckedRequest(
        CompletionRequest(prompt=[5] * 240, max_tokens=1, echo=True, logprobs=1), Settings(NAME)
    )
    delivered: list[Any] = []
    job = Job(asked, delivered.append)
    rate, rated = engine.target.rate, []

    def leaving(tokens: list[int]) -> Any:
        rated.append(len(tokens))
        job.ticket.cancel()
        return rate(tokens)

    engine.target.rate = leaving  # type: ignore[method-assign]
    assert list(Worker(lambda: engine, Settings(NAME), Metrics())._answer(engine, job, 0.0)) == []
    assert len(rated) == 1
    assert delivered == []
    assert len(engine.generate(PROMPT, max_new_tokens=4).token_ids) == 4


def test_other_answers_go_on_between_the_pieces_of_a_prompt_that_is_scored() -> None:
    engine = tiny_engine()
    count = SCORED_ROWS + 100
    asked = CheckedRequest(
        CompletionRequest(prompt=[5] * count, max_tokens=1, echo=True, logprobs=1), Settings(NAME)
    )
    events = list[str]()
    rate = engine.target.rate

    def rating(tokens: list[int]) -> Any:
        events.append("rate")
        return rate(tokens)

    engine.target.rate = rating  # type: ignore[method-assign]
    for _ in Worker(lambda: engine, Settings(NAME), Metrics())._answer(
        engine, Job(asked, lambda _: None), 0.0
    ):
        events.append("others")
    assert events[:3] == ["rate", "others", "rate"]


def test_a_prompt_that_was_scored_counts_as_read() -> None:
    answer = Completion(tiny_engine().generate(PROMPT, max_new_tokens=2).stats, PROMPT)
    answer.stats.num_cached_prompt_tokens = len(PROMPT) - 1
    assert answer.timings["cache_n"] == len(PROMPT) - 1
    answer.prompt_logprobs, answer.scored_s = [TokenLogprob(1, -1.0, [])], 2.0
    assert (answer.timings["cache_n"], answer.timings["prompt_n"]) == (0, len(PROMPT))
    assert answer.timings["prompt_ms"] >= 2000
