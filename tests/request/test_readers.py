"""Processes that read schemas and grammars: what crashes, loops or takes memory is refused, and ends there alone."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("llguidance")

from specengine.errors import InputError
from specengine.request import grammars, readers
from specengine.request.grammars import LIMITS, compiled
from specengine.request.readers import GRAMMARS, NoReaderError, Readers, ReadingProcess
from tests.request.schemas import nested

# where it is not refused before
CRASH = {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 2}
SLOW = {"allOf": [{"type": "string", "pattern": f".*{'ab' * count}c.*"} for count in range(1, 20)]}
QUICK = {"enum": ["a", "b"]}


def grammar_of(schema: Any) -> str:
    return str(grammars.library().LLMatcher.grammar_from_json_schema(json.dumps(schema)))


@pytest.fixture
def pool() -> Iterator[Readers]:
    made = Readers(GRAMMARS)
    yield made
    made.close()


def test_a_text_that_crashes_its_reader_is_told_and_the_next_one_is_read(pool: Readers) -> None:
    for _ in range(2):
        with pytest.raises(MemoryError, match="reading it fails, or takes more than"):
            pool.answer([grammar_of(CRASH), LIMITS], 30)
        assert pool.answer([grammar_of(QUICK), LIMITS], 30) == ""
    assert "Unimplemented" in pool.answer([grammar_of({"not": {}}), LIMITS], 30)


def test_memory_is_bounded(pool: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_BYTES", 1 << 20)
    with pytest.raises(MemoryError):
        pool.answer([grammar_of({"enum": [f"value {place}" for place in range(9999)]}), LIMITS], 30)


@pytest.mark.slow
def test_what_takes_long_ends_with_its_refusal_and_holds_up_nobody(pool: Readers) -> None:
    pool.start()
    faults: list[str] = []

    def slow() -> None:
        try:
            pool.answer([grammar_of(SLOW), LIMITS], 1.5)
        except TimeoutError as error:
            faults.append(str(error))

    threads = [threading.Thread(target=slow) for _ in range(2)]
    for thread in threads:
        thread.start()
    read = 0
    while any(thread.is_alive() for thread in threads):
        assert pool.answer([grammar_of(QUICK), LIMITS], 30) == ""
        read += 1
    assert read > 3
    assert len(faults) == 2
    assert all("takes more than 1.5 s" in fault for fault in faults)


@pytest.mark.slow
def test_a_reader_ends_with_whoever_started_it() -> None:
    script = (
        "import time; from specengine.request.readers import GRAMMARS, ReadingProcess;"
        "reader = ReadingProcess(GRAMMARS);"
        "reader.ask(b'[\"start: /a/\", {}]\\n', 30); print(reader._process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
    end = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")


def test_a_reader_imports_neither_torch_nor_this_package() -> None:
    reader = ReadingProcess(GRAMMARS)
    assert reader.ask(json.dumps([grammar_of(QUICK), LIMITS]).encode() + b"\n", 30) == b'""\n'
    if sys.platform == "linux":
        with open(f"/proc/{reader._process.pid}/maps") as maps:
            assert "torch" not in maps.read()
    reader.close()


def test_without_processes_texts_are_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*given: Any) -> str:
        raise NoReaderError

    monkeypatch.setattr(Readers, "answer", none)
    assert compiled("json_schema", {"enum": ["read", "here"]})
    with pytest.raises(InputError, match="Unimplemented"):
        compiled("json_schema", {"not": {"enum": ["read", "here"]}})


HOSTILE: dict[str, tuple[str, Any]] = {
    "patterns that are met together": ("json_schema", SLOW),
    "patterns that are met together, in a definition": (
        "json_schema",
        {"$ref": "#/$defs/a", "$defs": {"a": SLOW}},
    ),
    "a schema in a grammar": ("grammar", "start: %json " + json.dumps(SLOW)),
    "references in a circle": ("json_schema", {"allOf": [{"$ref": "#"}, {"type": "object"}]}),
    "deep": (
        "json_schema",
        nested(400, QUICK, lambda inner: {"anyOf": [inner, {"type": "array"}]}),
    ),
    "wide alternatives": (
        "json_schema",
        {
            "allOf": [
                {"anyOf": [{"properties": {f"k{n}_{m}": QUICK}} for m in range(4)]}
                for n in range(40)
            ]
        },
    ),
    "a length and a pattern": (
        "json_schema",
        {"type": "string", "pattern": "^(\\w+\\s?)*x.{50}$", "minLength": 500, "maxLength": 9000},
    ),
    "a divisor": ("json_schema", {"type": "integer", "multipleOf": 4294967291}),
    "brackets of a grammar": ("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "brackets of a GBNF grammar": ("grammar", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "a text of 280,000 characters": ("grammar", "start: " + "|".join(['"a"'] * 70_000)),
}


@pytest.mark.sliced(5)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    field, text = HOSTILE[name]
    monkeypatch.setattr(grammars, "MAX_SECONDS", 0.5)
    with pytest.raises(InputError, match=f"^{field}: "):
        compiled(field, text)
