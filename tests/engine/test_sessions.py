"""Sessions that reuse their caches, streams whose pieces add up, and stop strings."""

import pytest
from hypothesis import given, strategies as st

from specengine.errors import InputError
from specengine.request.text import TextStream
from tests.engine.engines import engine_of, forced, tokenizer
from tests.toy import POLICIES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("draft", ["none", "ngram", "recycling", "small_model"])
def test_a_session_reuses_its_caches_and_answers_as_a_fresh_engine_does(draft: str) -> None:
    session = engine_of("llama", draft, tokenizer=tokenizer()).session(
        [{"role": "system", "content": "Be brief."}]
    )
    for turn, text in enumerate(("Say it.", "Again, äöü €!", "And once more.")):
        fresh = engine_of("llama", draft, tokenizer=tokenizer())
        messages = [*session.messages, {"role": "user", "content": text}]
        expected = fresh.generate(messages, max_new_tokens=8)
        result = session.generate(text, max_new_tokens=8)
        assert result.token_ids == expected.token_ids
        assert session.messages == [*messages, {"role": "assistant", "content": result.text}]
        assert (result.stats.num_cached_prompt_tokens > 0) == (turn > 0)
        assert expected.stats.num_cached_prompt_tokens == 0
        assert result.stats.num_prompt_tokens == expected.stats.num_prompt_tokens


def test_a_turn_enters_the_session_only_when_its_stream_has_ended() -> None:
    session = engine_of(tokenizer=tokenizer()).session()
    stream = session.stream("Hello", max_new_tokens=8)
    next(stream)
    stream.close()
    assert session.messages == []
    expected = engine_of(tokenizer=tokenizer()).generate("Hello", max_new_tokens=8)
    stream = session.stream("Hello", max_new_tokens=8)
    assert [token for piece in stream for token in piece.cycle.tokens] == expected.token_ids
    assert stream.stats.num_cached_prompt_tokens == stream.stats.num_prompt_tokens - 1
    assert [message["role"] for message in session.messages] == ["user", "assistant"]
    with pytest.raises(InputError, match="text: it is empty"):
        session.generate("")


@pytest.mark.sliced(1)
@pytest.mark.parametrize("policy", POLICIES)
def test_pieces_add_up_to_the_text(policy: str) -> None:
    """A random model writes random bytes, so characters break off and are completed across cycles all the time."""
    engine = engine_of("llama", "small_model", policy, tokenizer())
    for seed in range(6):
        stream = engine.stream("grüße, 世界", max_new_tokens=48, temperature=1.2, seed=seed)
        pieces = list(stream)
        assert stream.result is not None
        assert (
            "".join(piece.text for piece in pieces)
            == stream.result.text
            == tokenizer().decode(stream.result.token_ids, skip_special_tokens=True)
        )
        assert [
            token for piece in pieces for token in piece.cycle.tokens
        ] == stream.result.token_ids
        assert len(pieces) == stream.result.stats.num_spec_steps
        with pytest.raises(StopIteration):
            next(stream)


def test_stop_strings_across_cycles_and_characters() -> None:
    text = "Ein Gruß aus Köln — bis bald, 世界!"
    engine = engine_of("llama", "ngram", "eagle", tokenizer())
    for stop in ("ß a", "bald, 世", ["zzz", "— b", "aus"], "E"):
        stream = engine.stream(
            "hi", max_new_tokens=60, stop_strings=stop, logits_processor=[forced(text)]
        )
        pieces = "".join(piece.text for piece in stream)
        ends = [
            text.index(s) + len(s) for s in ([stop] if isinstance(stop, str) else stop) if s in text
        ]
        assert stream.result is not None
        assert pieces == stream.result.text == text[: min(ends)]
        assert stream.result.finish_reason == "stop"
        assert stream.result.token_ids == tokenizer()(text[: min(ends)])["input_ids"]


def test_the_same_text_twice_is_streamed_to_the_end_of_the_limit() -> None:
    text = "äöü"
    engine = engine_of("llama", "ngram", "chain", tokenizer())
    stream = engine.stream("hi", max_new_tokens=9, logits_processor=[forced(text)])
    assert (
        "".join(piece.text for piece in stream) == "äöüä\N{REPLACEMENT CHARACTER}"
    )  # 9 of 12 bytes


CHARACTERS = "aé€\N{GRINNING FACE}".encode()


@given(
    st.lists(
        st.binary(max_size=4) | st.lists(st.sampled_from(CHARACTERS), max_size=5).map(bytes),
        max_size=30,
    )
)
def test_pieces_of_any_bytes_begin_the_whole(chunks: list[bytes]) -> None:
    """Also where they are no UTF-8: what was given is never another text later, and only its uncertain end waits."""
    texts, given_, tokens = (
        TextStream(lambda tokens: bytes(tokens).decode(errors="replace")),
        "",
        [],
    )
    for chunk in chunks:
        tokens += chunk
        given_ += texts.push(list(chunk))
        whole = bytes(tokens).decode(errors="replace")
        assert given_ == whole.rstrip("\N{REPLACEMENT CHARACTER}")
