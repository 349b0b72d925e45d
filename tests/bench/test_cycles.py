"""bench.cycles takes a cycle apart: every part is there, takes its time, and together they make up the cycle."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import cycles as bench, report
from research.inflate.shape import SHAPES
from specengine import Engine, policies
from specengine.drafters.eagle import EagleDraft
from specengine.errors import InputError
from specengine.models import attention
from specengine.models.huggingface import HuggingFaceTarget
from specengine.ops import cuda_graphs as graphs
from tests.graphs.pretended import Clock, cuda, moved
from tests.ops.backends import choose

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = "--contexts 8 --lengths 5 --rows 1 4 --texts 1 3 --seconds 0 --shape 32x4x2x1x48x96x16x64"
SMALL = ["--device", "cpu", "--dtype", "float32", *SIZES.split()]
Record = dict[str, Any]


@pytest.fixture(autouse=True)
def small_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MIN_SLOTS", 256)
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path / "cache"))


def run(out: Path, *more: str) -> list[Record]:
    assert bench.main([*SMALL, *more, "--out", str(out)]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def of(records: list[Record], kind: str) -> list[Record]:
    return [record for record in records if record["record"] == kind]


def make_up_the_cycle(record: Record, least: float, most: float) -> None:
    """The parts are there, none is negative, and their sum is so many times the cycle's time."""
    assert list(record["ms"]) == ["draft", "policy", "verify", "walk", "commit"]
    assert min(record["parts_ms"].values()) >= 0
    drafts = record["policy"] != "plain"
    for part in ("verify", "walk", "commit", *["draft", "policy"] * drafts):
        assert record["ms"][part] > 0
    assert sum(record["ms"].values()) == pytest.approx(sum(record["parts_ms"].values()), abs=1e-3)
    assert least < sum(record["ms"].values()) / record["cycle_ms"] < most


def test_it_measures_policies_and_variants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "MAX_NAMES", 1000)
    out = tmp_path / "cycles.jsonl"
    variants = list(bench.VARIANTS)
    records = run(out, "--variants", *variants, "--policy", "talon", "--policy", "plain")
    first, settings = records[:2]
    assert first["record"] == "provenance"
    assert first["command"].startswith("python -m ")
    assert settings["variants"] == variants
    assert settings["policy"] == ["talon", "plain"]
    assert settings["shape"]["hidden"] == 32
    units = {("base", "plain"), *((variant, "talon") for variant in variants)}
    for kind in ("prompt", "parts", "kernels", "answer"):
        assert {(each["variant"], each["policy"]) for each in of(records, kind)} == units
    for record in of(records, "parts"):
        # by a real clock, while other programs may run: how near is tested below
        make_up_the_cycle(record, 0.0, math.inf)
    for record in of(records, "prompt"):
        assert record["of"] == 5
        assert len(record["first_token_ms"]) == len(record["prompt_ms"]) == bench.REPEATS
        assert min(*record["first_token_ms"], *record["prompt_ms"]) > 0
    verify = of(records, "verify")
    assert [each["variant"] for each in verify] == variants
    assert all(list(each["ms"]) == ["1", "4"] for each in verify)
    assert all(time > 0 for each in verify for time in each["ms"].values())
    kernels = {
        (each["variant"], each["policy"], each["of"]): each for each in of(records, "kernels")
    }
    assert {part for _, _, part in kernels} == {"level", "finish"}
    for each in kernels.values():
        assert each["us"] > 0
        assert "aten::mm" in each["by_name"]
        assert sum(calls for calls, _ in each["by_name"].values()) <= each["calls"] + 1e-6
    lanes = of(records, "lanes")
    assert [(each["variant"], each["of"]) for each in lanes] == [("base", 1), ("base", 3)]
    assert min(min(each["ms"], each["trees_ms"]) for each in lanes) > 0
    assert {each["graphs"] for each in lanes} == {2}
    answers = {each["policy"]: each for each in of(records, "answer")}
    assert answers["plain"]["draft_passes"] == 0 < answers["talon"]["draft_passes"]
    assert min(each["cycle_ms"] for each in answers.values()) > 0
    assert report.main([str(out)]) == 0
    assert "first_token_ms" in capsys.readouterr().out


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, growing = tmp_path / "cycles.jsonl", tmp_path / "cycles.rows"
    options = "--variants", "base", "--policy", "chain"
    records = run(out, *options)
    out.rename(growing)
    lines = growing.read_text().splitlines(keepends=True)
    growing.write_text("".join(lines[:-1]) + lines[-1][:9])
    asked = []
    real = bench.Cycles._answer
    monkeypatch.setattr(
        bench.Cycles, "_answer", lambda self, key: (asked.append(key), real(self, key))[1]
    )
    for name in ("_prompt", "_verify", "_parts", "_kernels"):
        monkeypatch.setattr(bench.Cycles, name, None)
    again = run(out, *options)
    assert asked == [("answer", "base", "chain", 8)]
    assert again[:-1] == records[:-1]
    assert [again[-1][name] for name in bench.KEY] == [records[-1][name] for name in bench.KEY]
    assert not growing.exists()
    monkeypatch.setattr(bench.Cycles, "_answer", None)
    assert run(out, *options) == again  # nothing is left to do


@pytest.mark.parametrize("policy", [policy for policy in bench.POLICIES if policy != "talon"])
def test_a_cycle_is_left_as_it_was(policy: str) -> None:
    """Parts of every policy that is measured by default run, and undo what they did."""
    model, head = bench.model_of(SHAPES["tiny"], torch.device("cpu"), torch.float32)
    target = HuggingFaceTarget(model, captured=True)
    engine = Engine(target, EagleDraft(head, target.lm), policies.make("eagle"))
    prompt = [*range(3, 12)]
    before = engine.generate(prompt, max_new_tokens=3, policy=policy).token_ids
    driver = engine.drivers.asked(policy).captured
    assert driver is not None
    driver.rehearse(5, 1)
    state = [part.clone() for part in (driver.target.cache.filled, *driver._lasting())]
    parts = bench.CycleParts(driver)
    for _ in range(2):
        parts.run(5)
    later = driver.target.cache.filled, *driver._lasting()
    assert all(map(torch.equal, state, later))
    assert {len(times) for times in parts.seconds.values()} == {2}
    kinds = {name.split()[-1] for name in parts.seconds}
    assert kinds == {"policy", "verify", "walk", "commit", *["draft"] * (policy != "plain")}
    assert engine.generate(prompt, max_new_tokens=3, policy=policy).token_ids == before


@torch.inference_mode()
def test_prompts_run_by_torchs_attention_as_by_ours() -> None:
    model, _ = bench.model_of(SHAPES["tiny"], torch.device("cpu"), torch.float32)
    expected = HuggingFaceTarget(model, captured=True)
    expected.want((2,))
    features = expected.prefill([*range(3, 12)], 0)
    calls = []
    real = bench.torch_attention

    def counted(*given: Any) -> Any:
        calls.append(given)
        return real(*given)

    with bench.patched(attention, "prompt_attention", counted):
        other = HuggingFaceTarget(model, captured=True)
        other.want((2,))
        torch.testing.assert_close(other.prefill([*range(3, 12)], 0), features)
    assert len(calls) >= 4
    assert attention.prompt_attention is not counted
    assert real(*(torch.zeros(1, 2, count, 8) for count in (3, 5, 5)), None) is None


def test_wrong_policies_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "model_of", None)
    with pytest.raises(InputError, match="nonsense"):
        bench.main([*SMALL, "--policy", "nonsense"])
    with pytest.raises(InputError, match="one that drafts"):
        bench.main([*SMALL, "--policy", "plain"])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    choose(monkeypatch, "reference")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "pretended")
    clock = Clock()
    with cuda(clock):
        yield clock


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("names", ["auto", "talon plain"])
def test_parts_are_graphs_whose_times_make_up_the_cycle(
    names: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = bench.model_of

    def there(shape: Any, device: torch.device, dtype: torch.dtype) -> Any:
        return tuple(map(moved, real(shape, torch.device("cpu"), dtype)))

    monkeypatch.setattr(bench, "model_of", there)
    captured = []
    run_graph = graphs.Graphs.run

    def noted(self: Any, name: str, *given: Any) -> Any:
        result = run_graph(self, name, *given)
        captured.append((name, self._captured[name].graph))
        return result

    monkeypatch.setattr(graphs.Graphs, "run", noted)
    monkeypatch.setattr(bench, "REPEATS", 1)
    monkeypatch.setattr(bench, "ANSWER", 4)
    asked = [word for policy in names.split() for word in ("--policy", policy)]
    small = [*SMALL, "--variants", "base", *asked]
    small[1] = "cuda"
    assert bench.main(small) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for parts in of(records, "parts"):
        make_up_the_cycle(parts, 0.9, 1.1)
    assert [parts["policy"] for parts in of(records, "parts")] == names.split()
    assert {name for name, _ in captured} >= {"part level draft", "part verify", "4 rows"}
    assert all(graph is not None for _, graph in captured)
    assert all(each["cycles_ms"] > 0 for each in of(records, "lanes"))
    assert not of(records, "kernels")  # this device has no profiler
    assert clock.now > 0
