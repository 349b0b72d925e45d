"""Tests of where a generation ends: nothing after the end is returned, streamed, cached or counted."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specengine import policies
from specengine.engine import Engine
from tests.examples import examples
from tests.lossless.engines import by_hand, engines, prompt_of
from tests.toy import POLICIES, LetterTokenizer, RecordingStreamer, Tables, ToyDrafter, ToyTarget


class StopAt:
    """A StoppingCriteria that ends at a total length and notes the lengths it was asked at."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any) -> Tensor:
        self.asked.append(input_ids.shape[1])
        return torch.tensor([input_ids.shape[1] >= self.length])


def cut_by_hand(
    tokens: list[int], stop: dict[str, Any], prompt: list[int]
) -> tuple[list[int], str]:
    """Cut an endless answer by the stop rules, one token at a time; returns the rest and the reason."""
    letters = LetterTokenizer()
    for count in range(1, len(tokens) + 1):
        kept = tokens[:count]
        text = letters.decode(kept)
        if kept[-1] in stop.get("eos_token_id", []) or any(
            string in text for string in stop.get("stop_strings", [])
        ):
            return kept, "stop"
        if len(prompt) + count >= stop.get("criteria", 10**9):
            return kept, "criteria"
        if count >= stop["max_new_tokens"]:
            return kept, "length"
    raise AssertionError("max_new_tokens is always met")


stops = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 16)},
    optional={
        "eos_token_id": st.lists(st.integers(0, 5), min_size=0, max_size=2),
        "stop_strings": st.lists(st.text("abcdef", min_size=1, max_size=3), min_size=1, max_size=2),
        "criteria": st.integers(1, 18),
    },
)


@pytest.mark.sliced(10)
@pytest.mark.parametrize("policy", POLICIES)
@examples(25)
@given(seed=st.integers(0, 10_000), stop=stops, sampled=st.booleans())
def test_nothing_after_the_end_is_returned_streamed_cached_or_counted(
    policy: str, seed: int, stop: dict[str, Any], sampled: bool
) -> None:
    world = {"vocabulary": 6, "concentration": 0.3, "exact": 0.0, "share": 0.95, "seed": seed}
    speculative, plain = engines(world, policy)
    prompt = prompt_of(world)
    how = {"do_sample": True, "seed": seed} if sampled else {}
    expected, reason = cut_by_hand(by_hand(plain.target, prompt, how, 16), stop, prompt)
    for engine in (speculative, plain):
        streamer, criterion = RecordingStreamer(), StopAt(stop.get("criteria", 10**9))
        options = {name: value for name, value in stop.items() if name != "criteria"}
        stream = engine.stream(
            prompt, **options, **how, streamer=streamer, stopping_criteria=[criterion]
        )
        pieces = list(stream)
        result = stream.result
        assert result is not None
        assert (result.token_ids, result.finish_reason) == (expected, reason)
        text = LetterTokenizer().decode(expected)
        assert result.text == "".join(piece.text for piece in pieces) == text
        assert [token for piece in pieces for token in piece.cycle.tokens] == expected
        assert streamer.puts[0] == prompt
        assert [token for tokens in streamer.puts[1:] for token in tokens] == expected
        assert streamer.ended == 1
        lengths = range(len(prompt) + 1, len(prompt) + len(expected) + 1)
        stopped_before = reason == "stop"
        assert criterion.asked == list(lengths)[: len(expected) - stopped_before]
        assert engine.target.tokens == [*prompt, *expected[:-1]]
        assert (
            result.stats.num_generated_tokens == result.stats.num_emitted_in_steps == len(expected)
        )
        assert all(cycle.accepted <= len(cycle.tokens) for _, cycle in pieces)
    assert speculative.drafter.tokens == plain.target.tokens


def test_a_stop_string_in_the_middle_of_a_token_cuts_the_text_there() -> None:
    class Syllables(LetterTokenizer):
        def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
            return "".join(("ka", "to", "mi")[token] for token in tokens)

    tables = Tables(3, 2)
    engine = Engine(
        ToyTarget(tables), ToyDrafter(tables), policies.make("chain", length=6), Syllables()
    )
    whole = engine.generate([0], max_new_tokens=12).text
    stop = whole[4:7]  # ends inside the fourth syllable
    stream = engine.stream([0], max_new_tokens=12, stop_strings=stop)
    pieces = [piece.text for piece in stream]
    cut = whole[: whole.index(stop) + 3]
    assert stream.result is not None
    assert "".join(pieces) == stream.result.text == cut
    assert len(stream.result.token_ids) == -(-len(cut) // 2)
