"""The goals for a CPU, next to the measured figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from bench.cpu.answers import MEAN_OF_SETS
from bench.cpu.forwards import ISA_ROWS, ISAS
from bench.cpu.ways import KINDS
from specengine.benchmark.records import NOTHING, Table

Record = dict[str, Any]


class Figure(NamedTuple):
    """A figure of a way's record, and the goals by way."""

    name: str
    record: dict[str, str]
    place: tuple[str, ...]
    goals: dict[str, str]


_FORWARD = {"record": "forward"}
_PLAIN, _DEFAULT = (
    {"record": "summary", "part": part, "set": MEAN_OF_SETS} for part in ("plain", "default")
)
FIGURES = [
    Figure(
        "1 row / reading its weights",
        _FORWARD,
        ("over_read", "1"),
        {"native": "1.25", "native int8": "1.4"},
    ),
    Figure(
        "16 rows / 1 row", _FORWARD, ("over_1_row", "16"), {"native": "1.15", "native int8": "1.15"}
    ),
    Figure(
        "64 rows / 1 row", _FORWARD, ("over_1_row", "64"), {"native": "2.0", "native int8": "2.0"}
    ),
    Figure("plain / generate", _PLAIN, ("speedup_over_generate",), {"native": "2.5"}),
    Figure(
        "default / generate",
        _DEFAULT,
        ("speedup_over_generate",),
        {"native": "7", "native int8": "10"},
    ),
    Figure("default / llama.cpp", _DEFAULT, ("speedup_over_llama.cpp",), {"native": "2.5"}),
    Figure(
        "peak memory, MB",
        {"record": "memory"},
        ("peak_mb",),
        {"native": "280", "native gguf": "110"},
    ),
    Figure(
        "same bits in any tree", _FORWARD, ("same_bits",), {"native": "True", "native int8": "True"}
    ),
]


class Line(NamedTuple):
    figure: str
    goal: str
    measured: str


def table(records: list[Record]) -> Table:
    """Return a table of all goals, measured or not, and of other figures."""
    lines = (*_by_way(records), *_by_instructions(records), *_starts(records))
    rows = [list(line) for line in lines if (line.goal, line.measured) != (NOTHING, NOTHING)]
    return Table("cpu", "Goals and this run", Line._fields, rows)


def _by_way(records: list[Record]) -> Iterator[Line]:
    for name, wanted, place, goals in FIGURES:
        for way in KINDS:
            if wanted["record"] == "summary":  # one for all ways
                value = _at(_first(records, wanted), (*place, way))
            else:
                value = _at(_first(records, wanted | {"way": way}), place)
            yield Line(f"{name}: {way}", goals.get(way, NOTHING), value)


def _by_instructions(records: list[Record]) -> Iterator[Line]:
    for isa in ISAS:
        record = _first(records, {"record": "isa", "isa": isa})
        for rows in ISA_ROWS:
            goal = NOTHING if isa == "portable" else "over 1"
            value = _at(record, ("speedup_over_huggingface", str(rows)))
            yield Line(f"native with {isa} / Hugging Face, rows: {rows}", goal, value)


def _starts(records: list[Record]) -> Iterator[Line]:
    for record in records:
        if record["record"] == "start":
            for cache in ("cold", "warm"):
                yield Line(
                    f"{cache} start to first token, s: {record['way']}",
                    NOTHING,
                    _at(record, (f"{cache}_s",)),
                )


def _first(records: list[Record], wanted: dict[str, str]) -> Record | None:
    return next((record for record in records if wanted.items() <= record.items()), None)


def _at(record: Any, place: tuple[str, ...]) -> str:
    for key in place:
        record = record.get(key) if record else None
    return NOTHING if record is None else str(record)
