"""Tests of reading: a killed run up to its last line, and broken files refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from specengine.errors import InputError
from specengine.trace import Trace, read_trace
from tests.examples import examples
from tests.toy import policy_for
from tests.trace.runs import PROMPT, rewritten, set_field, toy_engine, write


@examples(60)
@given(share=st.floats(0, 1))
def test_a_killed_run_can_be_read_up_to_its_last_line(
    share: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "killed.jsonl"
    if not file.exists():
        write(file, toy_engine(policy_for("chain")), PROMPT, [4])
    content = file.read_bytes()
    whole, part = read_trace(file), content[: int(share * len(content))]
    cut = file.with_name("cut.jsonl")
    cut.write_bytes(part)
    if b"}" not in part.rstrip(b"\n") or not part.startswith(content.split(b"\n")[0]):
        with pytest.raises(InputError, match="has no records"):
            read_trace(cut)
        return
    trace = read_trace(cut)
    assert trace.truncated == (
        part.split(b"\n")[-1] not in {b"", content.split(b"\n")[part.count(b"\n")]}
    )
    for query, original in zip(trace.queries, whole.queries, strict=False):
        assert query.cycles == original.cycles[: len(query.cycles)]
    complete = [
        record
        for record in content.splitlines()[: part.count(b"\n")]
        if b'"record":"cycle"' in record
    ]
    assert sum(len(query.cycles) for query in trace.queries) >= len(complete)


BROKEN: list[tuple[Any, str]] = [
    (
        set_field(0, "record", "cycle"),
        "line 1: record: got cycle, but a trace begins with a record trace",
    ),
    (set_field(0, "format", 2), "line 1: format: got 2, this specengine reads 1"),
    (set_field(0, "model", 7), "line 1: trace.model: got 7, accepted a string"),
    (lambda lines: lines[0].pop("draft"), "line 1: trace.draft is missing"),
    (lambda lines: lines.insert(1, lines[0]), "line 2: record: a second record trace"),
    (
        set_field(1, "record", "nonsense"),
        "line 2: record: got 'nonsense', accepted trace, query, cycle, end",
    ),
    (set_field(1, "record", ["cycle"]), "line 2: record: got ['cycle']"),
    (set_field(1, "seed", True), "line 2: query.seed: got True, accepted an integer or null"),
    (set_field(1, "extra", 1), "line 2: query.extra is unknown"),
    (lambda lines: lines.pop(1), "line 2: record: got cycle outside a query"),
    (lambda lines: lines.append(lines[2]), "record: got cycle outside a query"),
    (set_field(2, "tokens", []), "line 3: cycle.tokens: got [], accepted at least the root"),
    (
        set_field(2, "tokens", [1, -2]),
        "line 3: cycle.tokens: got [1, -2], accepted a list of token ids",
    ),
    (set_field(2, "texts", ["a"]), "line 3: cycle.texts: got ['a'], accepted 22 entries"),
    (set_field(2, "parents", [-1, *range(1, 22)]), "line 3: cycle.parents"),
    (set_field(2, "parents", [0, *[0] * 21]), "line 3: cycle.parents"),
    (set_field(2, "probabilities", [2.0] * 22), "accepted a list of numbers from 0 to 1"),
    (
        set_field(2, "probabilities", [float("nan")] * 22),
        "line 3 is not JSON (NaN is not a JSON number)",
    ),
    (
        set_field(2, "kept", [1, 2]),
        "line 3: cycle.kept: got [1, 2], accepted ascending nodes, the root first",
    ),
    (set_field(2, "kept", [0, 21]), "line 3: cycle.kept"),
    (set_field(2, "kept", [0, 22]), "line 3: cycle.kept"),
    (set_field(2, "kept", [0, 2, 1]), "line 3: cycle.kept"),
    (
        set_field(2, "accepted", [0, 22]),
        "line 3: cycle.accepted: got [0, 22], accepted a path of kept nodes",
    ),
    (set_field(2, "accepted", []), "line 3: cycle.accepted"),
    (
        set_field(2, "committed", []),
        "line 3: cycle.committed: got [], accepted the accepted tokens and one more",
    ),
    (set_field(2, "passes", -1), "line 3: cycle.passes: got -1, accepted 0 or more"),
    (set_field(2, "seconds", {"draft": -1}), "line 3: cycle.seconds"),
    (set_field(2, "origins", ["stolen"] * 22), "line 3: cycle.origins: got ['stolen', 'stolen',"),
    (
        set_field(2, "origins", []),
        "line 3: cycle.origins: got [], accepted 22 entries, as many as tokens",
    ),
    (set_field(-1, "finish_reason", 3), "end.finish_reason: got 3"),
]


def test_a_trace_of_before_there_were_origins_is_read(written: Trace) -> None:
    def without(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            line.pop("origins", None)

    assert {
        name for query in written.queries for cycle in query.cycles for name in cycle.origins or []
    } == {
        None,
        "draft",
    }
    read = read_trace(rewritten(written, without))
    assert {cycle.origins for query in read.queries for cycle in query.cycles} == {None}
    assert [cycle.tokens for cycle in read.queries[0].cycles] == [
        cycle.tokens for cycle in written.queries[0].cycles
    ]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_what_is_broken_is_named(written: Trace, change: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as raised:
        read_trace(rewritten(written, change))
    assert str(written.file) in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no records"),
        (b"half a li", "has no records"),
        (b"\x00\xff\n", "line 1 is not JSON"),
        (b"[" * 100_000 + b"\n", "line 1 is not JSON"),
        (b"[]\n", "line 1: got [], accepted an object"),
        (b'{"record":"trace","format":' + b"9" * 5000 + b"}\n", "line 1"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "run.jsonl"
    file.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(message)):
        read_trace(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path / "missing.jsonl")
