"""Tokens that write nothing, in answers, streams and stop strings: special tokens and ids without text."""

from typing import Any

import pytest
from hypothesis import example, given, strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specengine.errors import InputError
from specengine.request.sampling import Stopper
from specengine.request.text import Decoder, TextStream
from tests.engine.engines import PROMPT, engine_of, forced
from tests.examples import examples
from tests.request.silent_tokenizers import BEYOND, Plain, byte_fallback, byte_level, special, words
from tests.toy import byte_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

UTF8 = list("aé✓\N{GRINNING FACE}".encode())
LETTERS = byte_tokenizer()("a ✓é")["input_ids"]
HIDDEN = [special(byte_level(), "<|end|>"), special(byte_level(), "<|quiet|>"), BEYOND]
BYTES = st.sampled_from(LETTERS) | st.sampled_from(HIDDEN) | st.integers(0, 255)
PIECES = (
    st.sampled_from([1, 2, 3, 4, 5])
    | st.sampled_from([special(byte_fallback()), special(byte_fallback(), "<|y|>"), BEYOND])
    | st.sampled_from([6 + byte for byte in UTF8])
)
NAMED = st.integers(0, 6) | st.sampled_from([special(words()), 9, BEYOND])


def chunks(tokens: st.SearchStrategy[int]) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(tokens, max_size=4), max_size=24)


def check_stream(tokenizer: Any, given_: list[list[int]], written: list[int]) -> None:
    """The pieces and what is held back are the whole text at any time; no piece is taken back."""
    decode = Decoder(tokenizer)
    texts, said, tokens = TextStream(decode), "", []
    for chunk in given_:
        tokens += chunk
        said += texts.push(chunk)
        assert said + texts.rest == decode(tokens)
    assert decode(tokens) == tokenizer.decode(
        [token for token in tokens if token in written], skip_special_tokens=True
    )


@examples(80)
@given(chunks(BYTES))
def test_streams_of_bytes(given_: list[list[int]]) -> None:
    check_stream(byte_level(), given_, list(range(256)))


@example([[2], [262], [2]])  # a word, a special token and the next word's blank
@example([[6 + 0x41], [6 + 0xE2], [4]])  # the second byte makes the first one unreadable
@example([[1], [300], [1], [2]])
@examples(80)
@given(chunks(PIECES))
def test_streams_of_sentencepiece(given_: list[list[int]]) -> None:
    check_stream(byte_fallback(), given_, list(range(262)))


@example([[0], [2], [9], [2], [0]])
@examples(80)
@given(chunks(NAMED))
def test_streams_of_a_tokenizer_in_python(given_: list[list[int]]) -> None:
    check_stream(words(), given_, list(range(7)))


@pytest.mark.parametrize(
    "tokenizer", [byte_level(), byte_fallback(), words()], ids=["bytes", "pieces", "words"]
)
def test_long_silence_costs_no_more_with_every_token(tokenizer: Any) -> None:
    calls: list[int] = []
    decode = Decoder(tokenizer)

    def counted(tokens: list[int]) -> str:
        calls.append(len(tokens))
        return decode(tokens)

    texts = TextStream(counted)
    letter = tokenizer.convert_tokens_to_ids("a")
    said = texts.push([letter])
    for _ in range(1000):
        said += texts.push([BEYOND]) + texts.push([special(tokenizer)])
    said += texts.push([letter])
    assert said == "aa"
    assert max(calls) <= 4


# ---- answers


def test_ids_are_answered_with_ids_whatever_the_tokenizer_knows() -> None:
    for tokenizer in (words(), Plain()):
        engine = engine_of("llama", "none", tokenizer=tokenizer)
        script = [0, 1, 200, 9, 0, 257, 1]
        options: dict[str, Any] = {"max_new_tokens": 7, "logits_processor": [forced(script)]}
        stream = engine.stream(PROMPT, **options)
        assert "".join(piece.text for piece in stream) == "abab"
        assert stream.result is not None
        assert (stream.result.text, stream.result.token_ids) == ("abab", script)
        assert (
            engine.generate(PROMPT, return_dict_in_generate=False, **options)[0, -7:].tolist()
            == script
        )


def test_a_prompt_needs_no_more_than_encode() -> None:
    engine = engine_of("llama", "ngram", tokenizer=Plain())
    answer = engine.generate(
        "abc", max_new_tokens=3, logits_processor=[forced([3, 4, 5])], prediction="def"
    )
    assert (answer.text, answer.stats.num_prompt_tokens) == ("def", 3)
    with pytest.raises(InputError, match="allow_special_text"):
        engine.generate("abc", max_new_tokens=3, allow_special_text=False)


def test_a_session_goes_on_behind_tokens_without_text() -> None:
    engine = engine_of("llama", "none", tokenizer=byte_level())
    session = engine.session()
    script = [*byte_level()("h")["input_ids"], BEYOND - 41, *byte_level()("i")["input_ids"]]
    assert session.generate("a", max_new_tokens=3, logits_processor=[forced(script)]).text == "hi"
    assert session.messages[1] == {"role": "assistant", "content": "hi"}
    session.generate("b", max_new_tokens=2)


@pytest.mark.parametrize("draft", ["none", "ngram"])
@pytest.mark.parametrize(
    ("tokenizer", "silent"),
    [
        (byte_level(), 256),
        (byte_level(), 259),
        (words(), special(words())),
        (words(), 9),
        (words(), 3),
        (Plain(), 200),
    ],
    ids=["special", "another", "special in Python", "unknown", "empty", "an error"],
)
def test_a_stop_string_is_met_across_any_number_of_silent_tokens(
    draft: str, tokenizer: Any, silent: int
) -> None:
    engine = engine_of("llama", draft, tokenizer=tokenizer)
    a, b = tokenizer.encode("ab")
    options = {"max_new_tokens": 60, "logits_processor": [forced([b, a, *[silent] * 40, b, b, b])]}
    found = engine.generate(PROMPT, stop_strings="ab", **options)
    assert (found.text, found.finish_reason, len(found.token_ids)) == ("bab", "stop", 43)


@pytest.mark.parametrize(
    ("stop", "script", "text", "count"),
    [
        ("<|end|>", "ab<|end|>c", "ab", 3),
        (["zz", "<|end|>"], "ab<|user|>c<|end|>d", "abc", 5),
        ("b<|end|>", "a<|end|>b<|end|>c", "ab", 4),
        ("<|end|>c", "a<|end|>b<|end|>cd", "abc", 5),
        ("<|user|><|end|>", "a<|end|>b<|user|><|end|>c", "ab", 5),
        (["<|end|>", "ab"], "ab<|end|>c", "ab", 2),
        (["<|end|>z", "ab"], "a<|end|>bc", "ab", 3),
    ],
)
def test_the_text_of_a_special_token_stops_at_that_token(
    stop: Any, script: str, text: str, count: int
) -> None:
    engine = engine_of("llama", "none", tokenizer=byte_tokenizer())
    options: dict[str, Any] = {
        "max_new_tokens": 20,
        "logits_processor": [forced(byte_tokenizer()(script)["input_ids"])],
    }
    found = engine.generate(PROMPT, stop_strings=stop, **options)
    assert (found.text, found.finish_reason, len(found.token_ids)) == (text, "stop", count)
    assert (
        "".join(piece.text for piece in engine.stream(PROMPT, stop_strings=stop, **options)) == text
    )


def test_nothing_is_shown_behind_a_stop_string_with_a_special_token() -> None:
    """Where the token that completes it writes more."""
    core = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "bab": 2}, merges=[]))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|x|>"]})
    engine = engine_of("llama", "none", tokenizer=tokenizer)
    options: dict[str, Any] = {"max_new_tokens": 9, "logits_processor": [forced([0, 3, 2, 1])]}
    assert engine.generate(PROMPT, stop_strings="<|x|>b", **options).text == "ab"
    assert (
        "".join(piece.text for piece in engine.stream(PROMPT, stop_strings="<|x|>b", **options))
        == "ab"
    )


@examples(60)
@given(
    chunks(PIECES),
    st.sampled_from(["ab", " a", "é", "✓.", "a.\N{GRINNING FACE}", "\N{REPLACEMENT CHARACTER}a"]),
)
def test_an_answer_ends_where_its_text_first_holds_the_stop_string(
    given_: list[list[int]], stop: str
) -> None:
    decode = Decoder(byte_fallback())
    stopper = Stopper(10_000, stop_strings=[stop], decode=decode)
    tokens: list[int] = []
    for token in (token for chunk in given_ for token in chunk):
        tokens.append(token)
        reason = stopper.reason(token, None)  # type: ignore[arg-type]
        assert (reason == "stop") == (stop in decode(tokens))
        if reason is not None:
            break
