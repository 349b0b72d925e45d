"""bench/kernels: its cases, its ways against float64 where they run on this machine, and what it prints."""

from __future__ import annotations

import json

import pytest
import torch

from bench.kernels import WAYS, attention, timing
from bench.kernels.__main__ import main
from bench.kernels.cases import (
    CASES,
    Attention,
    Case,
    Compaction,
    Rule,
    Search,
    Selection,
    floor_of,
    kind_of,
)
from bench.kernels.inputs import INPUTS
from bench.kernels.truth import MAX_ERROR, error_of, truth
from bench.kernels.way import Unavailable, Way

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
SMALL: list[Case] = [
    Attention(9, 40, 4, 2, 16),
    Attention(70, 3, 3, 1, 16),
    Selection(3, 700, 20, gated=False),
    Selection(3, 700, 20, gated=True),
    Compaction(2, 5, 2, 16, 10),
    Search(12, 4),
    Search(60, 10),
    Rule(3, 700, 9),
]
HERE = ("torch", "specengine")
ON_DEVICES = ("specengine", "efficient", "cudnn")
ON_CPU = [
    way for way in WAYS if way.needs in HERE and not any(word in way.name for word in ON_DEVICES)
]


@pytest.mark.parametrize("way", ON_CPU, ids=lambda way: f"{way.kind}: {way.name}")
def test_baselines_are_right(way: Way) -> None:
    try:
        check(way, torch.device("cpu"))
    except Unavailable as reason:  # where the C++ extension is not built
        pytest.skip(str(reason))


@pytest.mark.parametrize(
    "kind", ["selection", "compaction"]
)  # the interpreter cannot multiply bfloat16
def test_own_kernels_are_right(kind: str, device: torch.device) -> None:
    pytest.importorskip("triton")
    check(next(way for way in WAYS if way.kind == kind and way.name == "specengine"), device)


def check(way: Way, device: torch.device) -> None:
    for case in SMALL:
        if kind_of(case) == way.kind:
            inputs = INPUTS[way.kind](case, device)
            wanted = truth(case, inputs)
            reached = way.result(case, way.prepare(case, inputs)())
            assert error_of(case, reached, wanted) <= MAX_ERROR[way.kind]
            assert error_of(case, reached + 0.5, wanted) > MAX_ERROR[way.kind]


def test_floor_of_llama_8b() -> None:
    """kernels.md §0:4.2 and 5.5 us on an H200, for 64 nodes behind 4096 slots."""
    floor = floor_of(Attention(64, 4096))
    assert floor.bytes / 4.3e12 * 1e6 == pytest.approx(4.2, abs=0.1)
    assert floor.operations / 790e12 * 1e6 == pytest.approx(5.5, abs=0.1)


def test_dry_run_lists_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--dry-run", "--kernel", "selection", "--way", "specengine"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["record"] for row in rows} == {"selection"}
    assert len(rows) == 2 * sum(isinstance(case, Selection) for case in CASES)
    assert all(len(row["ways"]) == 1 for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run it")
def test_needs_a_device() -> None:
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        main([])


@pytest.mark.gpu
@pytest.mark.slow
def test_quick_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick", "--way", "specengine"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(row["median"] > 0 for row in rows if "way" in row)
    assert {row["record"] for row in rows} >= {"versions", "launch floor"}


def test_inputs_that_cannot_be_made_are_rows_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the largest cases they may not fit beside what others hold; the cases behind go on."""

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setitem(INPUTS, "selection", fail)
    monkeypatch.setattr(timing, "floors", lambda _: {})
    monkeypatch.setattr(timing, "installed", lambda _: True)
    ways = [way for way in WAYS if way.kind == "selection"]
    rows = list(timing.rows_of(Selection(1, 100), ways, True))
    assert [row["way"] for row in rows] == [way.name for way in ways]
    assert {row["skipped"] for row in rows} == {"OutOfMemoryError: too large"}


@pytest.mark.parametrize("needed", attention.BLOCKS)
def test_flex_attention_gets_tiles_that_fit(
    needed: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(*_: object, kernel_options: dict[str, int], **__: object) -> dict[str, int]:
        if kernel_options != needed:
            raise RuntimeError("no valid tiles")
        return kernel_options

    monkeypatch.setattr(attention, "compiled_flex", lambda *_: (compiled, None))
    case = Attention(9, 40, 4, 2, 16)
    assert attention.flex(case, INPUTS["attention"](case, torch.device("cpu")))() == needed
