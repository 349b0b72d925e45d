"""Check what print, the interactive prompt and a notebook show of results, streams and trees."""

import dataclasses
import html
import pickle
import re

import pytest

from specengine.ops.tree import TokenTree
from specengine.records import GenerationResult, Stats
from tests.engine.engines import PROMPT, engine_of, tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
FIGURES = r"\d+ tokens in \d+\.\d\d s \(\d+\.\d tokens/s\), \d\.\d\d per verification"


def test_a_result_is_shown_as_its_text_and_a_line_of_figures() -> None:
    result = engine_of(tokenizer=tokenizer()).generate(PROMPT, max_new_tokens=6)
    text, _, figures = str(result).rpartition("\n")
    assert text == result.text
    assert re.fullmatch(rf"\[length: {FIGURES}\]", figures), figures
    assert repr(result).startswith(f"GenerationResult(text={result.text!r}, finish_reason='length'")
    assert len(repr(result)) < len(repr(result.text)) + 120
    assert str(Stats()).startswith("0 tokens in 0.00 s")
    assert re.fullmatch(rf"Stats\({FIGURES}\)", repr(result.stats))
    assert repr(GenerationResult("x" * 1000, [1], "stop", Stats())).startswith(
        f"GenerationResult(text='{'x' * 200}'..., finish_reason='stop', seed=None"
    )


def test_a_result_has_the_tree_of_its_longest_step() -> None:
    engine = engine_of(draft="small_model", tokenizer=tokenizer())
    stream = engine.stream(PROMPT, max_new_tokens=24)
    cycles = [piece.cycle for piece in stream]
    longest = max(cycles, key=lambda cycle: len(cycle.tokens))
    assert len(longest.tokens) > 1
    assert stream.result is not None
    lines = str(stream.result.tree).splitlines()
    assert len(lines) == len(longest.tree)
    assert sum(line.endswith(" accepted") for line in lines) == longest.accepted
    assert not lines[0].endswith(" accepted"), "the root was there before"
    decode = tokenizer().decode
    accepted = [line.split(" accepted")[0].strip() for line in lines if "accepted" in line]
    for line, token in zip(accepted, longest.tokens, strict=False):
        assert line.startswith(repr(decode([token], skip_special_tokens=True) or token))
    shown = stream.result._repr_html_()
    assert "<details><summary>tree of the longest step</summary><pre>" in shown
    assert html.escape(lines[-1]) in shown
    assert dataclasses.asdict(stream.result)["tree"] == str(stream.result.tree)
    assert pickle.loads(pickle.dumps(stream.result)).tree == str(stream.result.tree)  # noqa: TID251
    plain = engine.generate(PROMPT, max_new_tokens=6, policy="plain")
    assert plain.tree is None
    assert "<details>" not in plain._repr_html_()


def test_html_holds_no_markup_of_the_answer() -> None:
    result = GenerationResult("<script>alert(1)</script> & 'x'", [1], "stop", Stats())
    shown = result._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &#x27;x&#x27;" in shown
    assert "stop: 0 tokens in 0.00 s" in shown


def test_a_stream_is_shown_as_far_as_it_is() -> None:
    engine = engine_of(tokenizer=tokenizer())
    with engine.stream(PROMPT, max_new_tokens=12) as stream:
        assert repr(stream).startswith("TextGeneration(0 tokens")
        next(stream)
        so_far = stream.stats.num_emitted_in_steps
        assert so_far
        assert "<pre" in stream._repr_html_()
        rest = list(stream)
    assert rest
    assert re.search(rf"TextGeneration\({FIGURES}\)", repr(stream))
    assert stream.result is not None
    assert stream._repr_html_() == stream.result._repr_html_()


def test_a_tree_is_shown_a_line_per_node_below_its_parent() -> None:
    tree = TokenTree.of_lists([9, 4, 5, 6, 7], [-1, 0, 0, 1, 2])
    lines = ["9 1.000", "  4 1.000", "    6 1.000", "  5 1.000", "    7 1.000"]
    assert str(tree) == "\n".join(lines)
    assert tree._repr_html_() == f"<pre>{tree}</pre>"
    assert str(TokenTree.root(3, capacity=8)) == "3 1.000"
