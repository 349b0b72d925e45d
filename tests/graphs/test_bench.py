"""bench.graphs measures every way and counts the answers that differ."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import graphs as bench
from bench import report
from specengine import policies
from specengine.drafters.eagle import Eagle
from specengine.errors import InputError
from specengine.models.huggingface import CausalLM
from tests import toy

pytestmark = pytest.mark.usefixtures("one_thread")


def test_it_measures_all_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specengine.cuda_graphs.FEWEST_SLOTS", 256)
    model, tokenizer = toy.tiny("llama", max_position_embeddings=1024), toy.byte_tokenizer()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    arguments = ["--model", str(tmp_path / "model"), "--draft", "ngram", "--policy", "chain", "--dtype", "float32"]
    sizes = ["--per-set", "1", "--rounds", "1", "--max-new-tokens", "6", "--device", "cpu"]
    bench.main([*arguments, *sizes, "--strict", "--out", str(tmp_path / "out.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    kinds = [row["record"] for row in rows]
    assert kinds == ["provenance", "settings", *["captures"] * 4, "summary", "row"]
    captured = ["plain, graphs", "chain", "chain, graphs"]
    captured += ["plain, graphs, strict", "chain, graphs, strict"]
    ways = ["transformers", "transformers, static cache", "plain", *captured]
    assert list(rows[-1]["tokens_per_second"]) == ways
    assert all(rate > 0 for rate in rows[-1]["tokens_per_second"].values())
    assert rows[-1]["differs_from_plain"] == []
    assert rows[2]["captured"] == ["finish greedy", "finish sampled", "verify"]
    assert rows[-1]["cycle_ms"]["chain, graphs"]["verify"] > 0
    assert rows[-2]["host_waits"] == {}  # counted on a CUDA device


@pytest.fixture
def tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments for a tiny random model without a head."""
    monkeypatch.setattr("specengine.cuda_graphs.FEWEST_SLOTS", 256)
    model, tokenizer = toy.tiny("llama", max_position_embeddings=1024), toy.byte_tokenizer()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = ["--per-set", "2", "--rounds", "1", "--max-new-tokens", "4", "--device", "cpu", "--dtype", "float32"]
    return ["--model", str(tmp_path / "model"), "--draft", "ngram", *sizes, "--out", str(tmp_path / "out.jsonl")]


def records_of(arguments: list[str], *more: str) -> tuple[int, list[dict[str, Any]]]:
    status = bench.main([*arguments, *more])
    return status, [json.loads(line) for line in Path(arguments[-1]).read_text().splitlines()]


def test_what_is_refused_is_listed_and_the_rest_runs(tiny_model: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise InputError("states of another size")

    monkeypatch.setattr(policies.find("specdecpp"), "grow", refuse)
    status, records = records_of(tiny_model, "--policy", "chain", "--policy", "specdecpp")
    dropped = {record["way"]: record["reason"] for record in records if record["record"] == "not run"}
    assert status == 0  # no fault
    assert not any(record["fault"] for record in records if record["record"] == "not run")
    assert list(dropped) == ["specdecpp", "specdecpp, graphs"]
    assert all(reason.startswith("InputError: ") for reason in dropped.values())
    (summary,) = (record for record in records if record["record"] == "summary")
    assert list(summary["tokens_per_second"])[-2:] == ["chain", "chain, graphs"]
    assert sorted(table.kind for table in report.tables(records)) == ["graphs", "not-run"]


def test_a_fault_in_a_later_answer_is_told_by_the_status(
    tiny_model: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, answered = bench._engine, []

    def fails_third(engine: Any, length: int) -> Any:
        way = real(engine, length)

        def run(prompt: list[int]) -> bench.Answer:
            answered.append(prompt)
            if len(answered) == 3:  # the first warms it up, the second is the first prompt's
                raise IndexError("out of reach")
            return way(prompt)

        return run if engine.policy is not None and not engine.target.captured else way

    monkeypatch.setattr(bench, "_engine", fails_third)
    status, records = records_of(tiny_model, "--policy", "chain")
    (dropped,) = (record for record in records if record["record"] == "not run")
    assert status == 1
    assert (dropped["way"], dropped["reason"], dropped["fault"]) == ("chain", "IndexError: out of reach", True)
    rows = [record for record in records if record["record"] == "row"]
    assert ["chain" in row["tokens_per_second"] for row in rows] == [True, False]
    (summary,) = (record for record in records if record["record"] == "summary")
    assert list(summary["tokens_per_second"])[-1] == "chain, graphs"
    assert "chain failed: IndexError" in capsys.readouterr().err


def test_what_others_are_told_against_is_needed() -> None:
    def fail() -> None:
        raise InputError("no")

    with pytest.raises(InputError):
        bench.Field().attempt("plain, graphs", fail)
    with pytest.raises(InputError, match="nonsense"):
        bench.main(["--policy", "nonsense", "--model", "unread"])


def test_every_policy_by_default_on_a_device() -> None:
    def default(device: str, *policy: str) -> list[str]:
        return bench._policies(argparse.Namespace(policy=list(policy), device=device))

    assert default("cpu") == list(bench.POLICIES)
    assert default("cuda:0")[:4] == list(bench.POLICIES)
    assert sorted([*default("cuda"), "plain"]) == sorted(policies.names())
    assert default("cuda", "ltd") == ["ltd"]


def test_heads_on_a_device_share_their_weights() -> None:
    model = toy.tiny("llama", num_hidden_layers=4)
    lm = CausalLM(model)

    def engine(kind: str) -> Any:
        head = toy.tiny_head(toy.head_config(3, model))
        return SimpleNamespace(drafter=Eagle(head, lm), target=SimpleNamespace(device=torch.device(kind)))

    for kind, shared in (("cuda", True), ("cpu", False)):
        field, first, second = bench.Field(), engine(kind), engine(kind)
        field.engines["plain"] = SimpleNamespace(drafter=None)  # type: ignore[assignment]
        for name, made in (("first", first), ("second", second)):
            field._share_head(made)
            field.engines[name] = made
        heads = [engine.drafter.head.module.parameters() for engine in (first, second)]
        pairs = list(zip(*heads, strict=True))
        assert [one.data_ptr() == other.data_ptr() for one, other in pairs] == [shared] * len(pairs)


def test_it_counts_answers_that_differ() -> None:
    first = {"plain": 2, "x": 3, "plain, graphs, strict": 3, "y, strict": 3, "z, strict": 2}
    ways = {name: (lambda prompt, token=token: bench.Answer([1, token])) for name, token in first.items()}
    item = bench.workloads.Workload("set", "id", ("text",))
    assert bench._measure(bench.Field(ways), item, [1], 1)["differs_from_plain"] == ["x", "z, strict"]  # type: ignore[arg-type]


def test_a_way_is_not_charged_what_the_one_before_left_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(bench, "_finish", lambda: said.append("finish"))
    ways = {name: (lambda prompt, name=name: said.append(name) or bench.Answer([1])) for name in ("plain", "x")}
    bench._measure(bench.Field(ways), bench.workloads.Workload("set", "id", ("text",)), [1], 2)  # type: ignore[arg-type]
    assert said == ["finish", "plain", "finish", "finish", "x", "finish"] * 2


def test_waits_of_the_profiler_itself_are_not_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def within(function: Any) -> dict[str, int]:
        own = {"cudaDeviceSynchronize": 2}
        return own | {"cudaStreamSynchronize": 5} if function() else own

    monkeypatch.setattr(bench, "_waits_within", within)
    assert bench._host_waits(lambda prompt: bench.Answer(prompt), [1]) == {"cudaStreamSynchronize": 5}
