"""A trace in the terminal: trees, the summary, titles."""

from __future__ import annotations

import dataclasses
import re

import pytest

from specengine.trace import Trace, TracedCycle, read_trace
from specengine.trace.views import LEGEND, MARKS, cycle_lines, summary
from tests.trace.runs import TREE, rewritten, set_field


def test_a_tree_in_the_terminal() -> None:
    assert "\n".join(cycle_lines(TREE)).splitlines()[2:-1] == [
        "                   'root' 7",
        " 0.500    0.500  ✓ ├ ' a' 1",
        "                 + │ ├ '?' 9",
        " 0.500    0.250  × │ ├ 'd' 4",
        "                 · │ └ 2 pruned, the best 'e' 0.250",
        " 0.250    0.250  × └ 'b\\n' 2",
        " 0.001    2e-04  ·   └ 'f' 6",
    ]


def test_a_pruned_chain_is_one_line() -> None:
    chain = dataclasses.replace(TREE, parents=[-1, 0, 0, 1, 1, 2, 5])
    assert "\n".join(cycle_lines(chain)).splitlines()[-3:-1] == [
        " 0.250    0.250  × └ 'b\\n' 2",
        "                 ·   └ 1 pruned, the best 'e' 0.250",
    ]
    assert any(line.endswith("'f' 6") for line in cycle_lines(chain, pruned=True))


def test_every_pruned_node_on_request() -> None:
    lines = list(cycle_lines(TREE, pruned=True))
    assert lines[-1] == LEGEND
    assert [line[17] for line in lines[2:-1]] == [" ", "✓", "+", "×", "·", "·", "×", "·"]
    assert " 0.125    0.062  · │ └ '\\x1b[31m' 3" in lines


def test_a_token_that_was_drafted_and_pruned_is_noted() -> None:
    missed = dataclasses.replace(TREE, committed=[1, 5], committed_texts=[" a", "e"])
    assert any(line.endswith("'e' 5, drafted but pruned") for line in cycle_lines(missed))


def test_a_long_chain_does_not_recurse() -> None:
    size = 3000
    chain = TracedCycle(
        tokens=[1] * size, texts=["x"] * size, parents=list(range(-1, size - 1)), probabilities=[1.0] * size,
        path_probabilities=[1.0] * size, kept=list(range(size)), accepted=[0], committed=[2], committed_texts=["y"],
        text="y", passes=size, seconds={},
    )  # fmt: skip
    assert len(list(cycle_lines(chain))) == size + 4


def test_the_summary_counts_through_all_files(written: Trace) -> None:
    lines = list(summary([written, written]))
    rows = [line.split() for line in lines if re.match(r" +\d", line)]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    query = written.queries[0]
    assert rows[0][1:7] == [
        str(len(query.cycles)), "24", f"{query.tau:.2f}", f"{query.delta:.2f}", "5.0", "21.0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "title"),
    [
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nName\na  river.<|im_end|>\n<|im_start|>assistant",
         "Name a river."),
        ("[INST] hello there [/INST]", "hello there"),
        ("once upon a time", "once upon a time"),
        ("word", "word"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_title_is_what_was_asked(written: Trace, prompt: str, title: str) -> None:
    trace = read_trace(rewritten(written, set_field(1, "prompt", prompt)))
    assert trace.queries[0].title == title


def test_marks_tell_states_apart_without_colour() -> None:
    assert len(set(MARKS.values())) == len(MARKS)
