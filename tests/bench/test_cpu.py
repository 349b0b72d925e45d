"""The CPU benchmark counts right, and records nothing for a way that did not run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from bench import random_gguf
from bench.cpu import answers, forwards, goals, rows as cpu_rows
from bench.cpu.__main__ import main
from bench.cpu.ways import KINDS, Given, Unavailable
from specengine import Engine
from specengine.benchmark import peers
from specengine.benchmark.records import NOTHING
from specengine.benchmark.ways import EngineDecoder
from specengine.ops.tree import TokenTree
from tests.models.native_engines import needs_extension
from tests.toy import Tables, ToyTarget, byte_tokenizer, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with its tokenizer, and two prompt sets."""
    folder = tmp_path_factory.mktemp("bench-cpu")
    tiny(max_position_embeddings=512).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "prompts").mkdir()
    for name in ("one", "two"):
        line = json.dumps({"question_id": 7, "turns": [f"{name} and {name} and {name}"]})
        (folder / "prompts" / f"{name}.jsonl").write_text(line + "\n")
    return folder


def run(folder: Path, *options: str) -> list[dict[str, Any]]:
    out = folder / "out.jsonl"
    command = [
        "--model",
        str(folder / "model"),
        "--dtype",
        "float32",
        "--prompts",
        str(folder / "prompts"),
    ]
    assert (
        main(
            [
                *command,
                "--per-set",
                "1",
                "--max-new-tokens",
                "6",
                "--rounds",
                "2",
                "--out",
                str(out),
                *options,
            ]
        )
        == 0
    )
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert found[0]["record"] == "provenance"
    return found[1:]


def of(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["record"] == kind]


# ---------------------------------------------------------------------------------------------------- forwards


def test_forwards_stand_beside_a_read_of_their_weights(folder: Path) -> None:
    (record,) = run(folder, "--part", "forward", "--way", "huggingface", "--rows", "4", "2")
    linears = (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48) * 2 + 32 * 260
    assert record["weights_mb"] == pytest.approx(4 * linears / 1e6, abs=0.06)
    assert list(record["ms"]) == ["1", "2", "4"]
    assert record["over_1_row"]["1"] == record["speedup_over_huggingface"]["4"] == 1.0
    assert record["over_read"]["4"] > 0


def test_rounds_are_compared_with_themselves() -> None:
    assert forwards.ratio([1.0, 20.0, 3.0], [1.0, 10.0, 1.0]) == 2.0
    calls = []
    times = forwards.in_bursts({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
    assert "".join(calls) == 2 * ((forwards.BURST + 1) * "a" + (forwards.BURST + 1) * "b")
    assert {key: len(values) for key, values in times.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize("size", [1, 2, 7, 12])
def test_a_node_has_two_children_of_different_tokens(size: int) -> None:
    tree = forwards.tree(size, 260)
    assert tree.parents.tolist() == [-1, *((node - 1) // 2 for node in range(1, size))]
    assert len(set(tree.tokens.tolist())) == size


class Rounding(ToyTarget):
    """Half precision's fault made plain: in a tree, logits differ a little from what they are alone."""

    def verify(self, tree: TokenTree) -> tuple[Tensor, None]:
        logits, _ = super().verify(tree)
        return logits * (1 + 1e-6 * (len(tree) > 1)), None


@pytest.mark.parametrize(("cls", "same"), [(ToyTarget, True), (Rounding, False)])
def test_bits_are_compared_with_plain_decoding(cls: type[ToyTarget], same: bool) -> None:
    target = cls(Tables(40))
    target.prefill([1, 2, 3, 4, 5])
    assert forwards.same_bits(target, forwards.tree(9, 40)) is same
    assert target.tokens == [1, 2, 3, 4, 5]


# ---------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("part", ["plain", "default"])
def test_answers_are_counted_by_set(folder: Path, part: str) -> None:
    records = run(folder, "--part", part, "--way", "huggingface")
    rows, sums = of(records, "answers"), of(records, "summary")
    ways = [answers.GENERATE, *([answers.LOOKUP] if part == "default" else []), "huggingface"]
    assert [row["set"] for row in rows] == ["one", "two"]
    for row in rows:
        assert list(row["tokens_per_second"]) == ways
        assert set(row["new_tokens"].values()) == {6}
        assert set(row["acceptance_length"]) == ({"huggingface"} if part == "default" else set())
    assert [record["set"] for record in sums] == ["one", "two", answers.MEAN_OF_SETS]
    assert sums[-1]["speedup_over_generate"]["generate"] == 1.0
    assert "speedup_over_llama.cpp" not in sums[-1]


def test_what_a_part_loads_serves_the_others(folder: Path) -> None:
    """Weights loaded in inference mode could not be packed later."""
    given = Given(str(folder / "model"), dtype="bfloat16")
    assert len(list(forwards.forward(given, ["huggingface"], [1], 1))) == 1
    assert not any(weight.is_inference() for weight in given.transformers_model.parameters())


def test_sets_count_alike() -> None:
    def row(name: str, rate: float) -> dict[str, Any]:
        rates = {"generate": 10.0, "native": rate}
        return {
            "part": "default",
            "set": name,
            "tokens_per_second": rates,
            "acceptance_length": {"native": rate / 10},
        }

    *_, mean = answers.summaries(
        [row("one", 20.0), row("one", 40.0), row("one", 60.0), row("two", 20.0)]
    )
    assert mean["prompts"] == 4
    assert mean["speedup_over_generate"] == {"generate": 1.0, "native": 3.0}
    assert mean["acceptance_length"] == {"native": 3.0}


@pytest.mark.parametrize(("part", "ends"), [("plain", []), ("default", [2])])
def test_llama_cpp_ends_where_the_others_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part: str, ends: list[int]
) -> None:
    asked = []

    def way(
        name: str, environments: Path, model: peers.Model, ends: list[int], context: int
    ) -> Any:
        asked.append((ends, model.gguf.name, context > 6))
        return peers.Way(name, lambda: lambda prompt, length: pytest.fail("not reached"))

    monkeypatch.setattr(peers, "way", way)
    monkeypatch.setattr(Given, "end_tokens", {2})
    (folder / "x.gguf").touch()
    run(folder, "--part", part, "--way", "llama.cpp", "--gguf", str(folder / "x.gguf"))
    assert asked[0] == (ends, "x.gguf", True)


def test_a_way_that_breaks_off_is_in_no_mean(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = EngineDecoder.__call__, 0

    def failing(self: EngineDecoder, prompt: list[int], length: int) -> Any:
        nonlocal count
        count += 1
        if count == 5:  # two decoders are warmed up, each answers the first prompt
            raise RuntimeError("out of reach")
        return real(self, prompt, length)

    monkeypatch.setattr(EngineDecoder, "__call__", failing)
    records = run(folder, "--part", "default", "--way", "huggingface")
    assert [record["reason"] for record in of(records, "skipped")] == ["RuntimeError: out of reach"]
    assert ["huggingface" in row["tokens_per_second"] for row in of(records, "answers")] == [
        True,
        False,
    ]
    assert all(
        "huggingface" not in record["tokens_per_second"] for record in of(records, "summary")
    )


# ---------------------------------------------------------------------------------------------------- what is missing


def test_what_cannot_run_is_skipped_with_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "PEERS", folder)
    monkeypatch.setattr(Given, "gguf_file", lambda given: folder / "x.gguf")
    options = ("--way", "huggingface", "--way", "native gguf", "--way", "llama.cpp")
    records = run(folder, "--part", "plain", *options)
    reasons = {record["way"]: record["reason"] for record in of(records, "skipped")}
    assert set(reasons) == {"native gguf", "llama.cpp"}
    assert "has no environment llama.cpp; make it" in reasons["llama.cpp"]
    assert all("llama.cpp" not in row["tokens_per_second"] for row in of(records, "answers"))


def test_without_the_wheel_no_start_is_recorded(folder: Path) -> None:
    (record,) = run(folder, "--part", "start", "--wheel", str(folder / "absent.whl"))
    assert (record["record"], record["part"]) == ("skipped", "start")
    assert "--wheel" in record["reason"]


def test_an_engine_that_runs_as_something_else_is_not_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "specengine.engine.Engine.from_pretrained",
        lambda *_, **__: SimpleNamespace(target=object()),
    )
    with pytest.raises(Unavailable, match="huggingface"):
        Given(str(folder / "model"), dtype="float32").engine("huggingface")


def test_a_gguf_file_is_named_or_the_embedded_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path))
    with pytest.raises(Unavailable, match="--gguf"):
        Given().gguf_file()
    with pytest.raises(Unavailable, match=r"x\.gguf"):
        Given(gguf=tmp_path / "x.gguf").gguf_file()


# ---------------------------------------------------------------------------------------------------- memory and goals


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own(folder: Path) -> None:
    (record,) = run(folder, "--part", "memory", "--way", "huggingface")
    assert (record["record"], record["way"]) == ("memory", "huggingface")
    assert 0 < record["at_the_end_mb"] <= record["peak_mb"] < record["imports_mb"]


def test_goals_stand_beside_what_was_measured() -> None:
    sums = {"record": "summary", "part": "default", "set": answers.MEAN_OF_SETS}
    records: list[dict[str, Any]] = [
        {
            "record": "forward",
            "way": "native",
            "over_read": {"1": 1.3},
            "over_1_row": {"16": 1.1},
            "same_bits": True,
        },
        sums | {"speedup_over_generate": {"native int8": 9.0, "huggingface": 2.0}},
        {"record": "start", "way": "default", "cold_s": 5.5, "warm_s": 2.5},
    ]
    table = {figure: (goal, measured) for figure, goal, measured in goals.table(records).rows}
    assert table["1 row / reading its weights: native"] == ("1.25", "1.3")
    assert table["16 rows / 1 row: native"] == ("1.15", "1.1")
    assert table["64 rows / 1 row: native"] == ("2.0", NOTHING)
    assert table["same bits in any tree: native"] == ("True", "True")
    assert table["default / generate: native int8"] == ("10", "9.0")
    assert table["default / generate: huggingface"] == (NOTHING, "2.0")
    assert table["cold start to first token, s: default"] == (NOTHING, "5.5")
    assert "plain / generate: huggingface" not in table
    assert {way for figure in goals.FIGURES for way in figure.goals} <= set(KINDS)


@pytest.mark.slow
def test_rows_of_a_file_are_measured_in_processes_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    random_gguf.write(file, "Q4_0", hidden=64, inner=96, layers=2, heads=(4, 2), words=96)
    out = tmp_path / "rows.jsonl"
    asked = [
        "--file",
        str(file),
        "--numerics",
        "integer",
        "--isa",
        "portable",
        "--rows",
        "1",
        "3",
        "--rounds",
        "2",
    ]
    assert (
        cpu_rows.main(
            [*asked, "--context", "5", "--python", "llama_cpp", sys.executable, "--out", str(out)]
        )
        == 0
    )
    _, settings, *found = [json.loads(line) for line in out.read_text().splitlines()]
    assert settings == {"record": "settings", "file": "small.gguf", "context": 5}
    skipped, reading, ours = found
    assert skipped["record"] == "skipped"
    assert "llama_cpp" in skipped["reason"]
    assert (reading["label"], ours["label"]) == ("reading", "specengine, integer, portable")
    assert "portable, integer" in ours["backend"]
    assert ours["over_1_row"]["1"] == 1.0
    assert set(ours["ms"]) == {"1", "3"}


@needs_extension
def test_a_random_file_of_experts_is_one_that_loads(tmp_path: Path) -> None:
    file, experts = tmp_path / "experts.gguf", random_gguf.Experts(6, 2, 32)
    random_gguf.write(
        file,
        "Q4_0",
        hidden=64,
        inner=96,
        layers=2,
        heads=(4, 2),
        words=96,
        head=32,
        experts=experts,
    )
    engine = Engine.from_pretrained(str(file), None, policy="plain")
    assert engine.target.backend.startswith("native")
    assert (engine.target.lm.routes.layers, engine.target.lm.routes.all) == (2, 12)


def test_ratios_of_rows_are_those_within_a_round() -> None:
    found = cpu_rows.summary({1: [1.0, 10.0, 2.0], 8: [2.0, 30.0, 4.0]}, {1: [0.5, 4.0, 2.0]})
    assert found["over_1_row"] == {"1": 1.0, "8": 2.0}
    assert found["over_reading"] == 2.0
    assert found["ms"] == {"1": 2.0, "8": 4.0}
    table = cpu_rows.table([{"record": "rows", "label": "an engine", **found}])
    assert "| an engine | 2.00 | 2.00 | 2.00 |" in table
