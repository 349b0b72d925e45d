"""Streams and stop strings of tokenizers whose decoders write text anew when more tokens come."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from tokenizers import decoders

from specengine.protocol.tools import OneCall
from specengine.request.sampling import Stopper
from specengine.request.text import REWRITTEN_LIMIT, Decoder, TextStream
from tests.engine.engines import PROMPT, engine_of, forced
from tests.examples import examples
from tests.request.rewriting_tokenizers import (
    APPENDING,
    LETTERS,
    MADE,
    WORDS,
    fast,
    rewriting,
    size_of,
)
from tests.request.silent_tokenizers import byte_fallback, byte_level

pytestmark = pytest.mark.usefixtures("one_thread")

CONTRACTIONS = [1, 3, 4, 2, 5, 3, 6, 16, 12, 17, 14, 1, 3, 7]  # it ' s do n ' t a . b ? it ' ve
NAMES = st.sampled_from(sorted(MADE))


def pieces_of(
    tokenizer: Any, chunks: list[list[int]]
) -> Iterator[tuple[str, list[int], TextStream]]:
    """Yield the joined pieces, the tokens and the stream after each chunk."""
    texts, joined, tokens = TextStream(Decoder(tokenizer)), "", list[int]()
    for chunk in chunks:
        tokens += chunk
        joined += texts.push(chunk)
        yield joined, tokens, texts


@examples(400)
@given(NAMES, st.data())
def test_pieces_begin_the_text_at_any_time(name: str, data: st.DataObject) -> None:
    tokenizer = rewriting(name)
    tokens = st.integers(0, size_of(tokenizer) - 1)
    often = tokens | st.sampled_from(
        CONTRACTIONS if size_of(tokenizer) == len(WORDS) else [3, 4, 9, 11]
    )
    chunks = data.draw(st.lists(st.lists(often, max_size=4), max_size=30))
    whole = Decoder(tokenizer)([token for chunk in chunks for token in chunk])
    for joined, tokens_so_far, texts in pieces_of(tokenizer, chunks):
        assert whole.startswith(joined)
        now = Decoder(tokenizer)(tokens_so_far)
        assert (joined + texts.rest)[: len(now.rstrip())] == now.rstrip()


@pytest.mark.sliced(10)
@pytest.mark.parametrize("name", sorted(MADE))
def test_long_texts_are_streamed_as_they_grow(name: str) -> None:
    tokenizer = rewriting(name)
    tokens = (
        CONTRACTIONS if size_of(tokenizer) == len(WORDS) else [3, 4, 9, 2, 11, 4, 7, 5, 6]
    ) * 150
    whole = Decoder(tokenizer)(tokens)
    for joined, tokens_so_far, texts in pieces_of(tokenizer, [[token] for token in tokens]):
        assert whole.startswith(joined)
        if len(tokens_so_far) % 100 == 0:
            assert joined + texts.rest == Decoder(tokenizer)(tokens_so_far)
            assert len(texts.rest) <= Decoder(tokenizer).lookback + 4
        assert len(texts._tokens) <= REWRITTEN_LIMIT + 1


@pytest.mark.parametrize("name", APPENDING)
def test_decoders_that_append_hold_nothing_back(name: str) -> None:
    assert Decoder(rewriting(name)).lookback == 0
    for tokenizer in (byte_level(), byte_fallback()):
        assert Decoder(tokenizer).lookback == 0


@examples(200)
@given(NAMES, st.data())
def test_an_answer_ends_where_its_text_first_holds_the_stop_string(
    name: str, data: st.DataObject
) -> None:
    tokenizer = rewriting(name)
    decode = Decoder(tokenizer)
    tokens = data.draw(st.lists(st.integers(0, size_of(tokenizer) - 1), min_size=1, max_size=40))
    whole = decode(tokens)
    begin = data.draw(st.integers(0, max(0, len(whole) - 1)))
    stop = whole[begin : begin + data.draw(st.integers(1, 6))].strip() or "it's"
    stopper = Stopper(10_000, stop_strings=[stop], decode=decode)
    for count, token in enumerate(tokens, 1):
        reason = stopper.reason(token, None)  # type: ignore[arg-type]
        assert (reason == "stop") == (stop in decode(tokens[:count]))
        if reason is not None:
            break


@pytest.mark.sliced(6)
@pytest.mark.parametrize("draft", ["none", "ngram"])
@pytest.mark.parametrize(
    "name", [name for name in sorted(MADE) if size_of(rewriting(name)) == len(WORDS)]
)
def test_an_answer_is_the_sum_of_its_pieces(name: str, draft: str) -> None:
    engine = engine_of("llama", draft, tokenizer=rewriting(name))
    for count in (1, 3, 13, 40):
        options: dict[str, Any] = {
            "max_new_tokens": count,
            "logits_processor": [forced(CONTRACTIONS)],
        }
        whole = engine.generate(PROMPT, **options)
        assert whole.text == Decoder(engine.tokenizer)(whole.token_ids)
        assert "".join(piece.text for piece in engine.stream(PROMPT, **options)) == whole.text
        stop = whole.text[-3:].strip() or "it"
        stopped = engine.generate(PROMPT, stop_strings=stop, **options)
        assert (stopped.finish_reason, stopped.text.endswith(stop)) == ("stop", True)
        streamed = "".join(
            piece.text for piece in engine.stream(PROMPT, stop_strings=stop, **options)
        )
        assert streamed == stopped.text


@pytest.mark.parametrize(
    ("words", "stop", "count"),
    [
        ("it ' s a", "it's", 3),
        ("do n ' t a", "n't", 4),
        ("it ' ve b", "it've", 3),
        ("a b . a", "b.", 3),
    ],
)
def test_a_stop_string_that_the_decoder_joins_is_met(words: str, stop: str, count: int) -> None:
    engine = engine_of("llama", "none", tokenizer=rewriting("wordpiece, cleaned by transformers"))
    script = [WORDS.index(word) for word in words.split()]
    options: dict[str, Any] = {"max_new_tokens": 13, "logits_processor": [forced(script)]}
    found = engine.generate(PROMPT, stop_strings=stop, **options)
    assert (found.finish_reason, len(found.token_ids), found.text.endswith(stop)) == (
        "stop",
        count,
        True,
    )


def test_a_stop_string_of_bytes_is_met_before_the_run_of_bytes_ends() -> None:
    tokenizer = byte_fallback()
    smile, accent = (
        [6 + byte for byte in letter.encode()] for letter in ("\N{GRINNING FACE}", "é")
    )
    engine = engine_of("llama", "none", tokenizer=tokenizer)
    script = [3, *smile, *accent, *smile, *accent]
    options: dict[str, Any] = {"max_new_tokens": 13, "logits_processor": [forced(script)]}
    found = engine.generate(PROMPT, stop_strings="é", **options)
    assert (found.text, found.finish_reason) == ("a\N{GRINNING FACE}é", "stop")
    assert found.token_ids == script[:7]


class Found:
    """A reader that finds a call where the text has an exclamation mark."""

    def __init__(self) -> None:
        self.found = 0

    def push(self, text: str) -> None:
        self.found += text.count("!")


def test_a_call_ends_the_answer_though_its_text_may_be_written_anew() -> None:
    ends = OneCall(Found(), Decoder(rewriting("in Python")))  # type: ignore[arg-type]
    tokens = [WORDS.index(word) for word in ("a", "b", "!")]
    assert [ends(torch.tensor([[token]]), None) for token in tokens] == [False, False, True]


def test_letters_of_ctc_are_told_apart_by_padding() -> None:
    a, pad = LETTERS.index("a"), LETTERS.index("<pad>")
    *_, (joined, _, _) = pieces_of(rewriting("ctc"), [[a], [a], [pad], [a], [a]])
    assert joined == "aa"


def test_a_panic_of_the_library_writes_nothing() -> None:
    tokenizer = fast(decoders.Strip("a", 1, 1), LETTERS)
    assert Decoder(tokenizer)([LETTERS.index(letter) for letter in ("b", "a", "b")]) == "bb"
