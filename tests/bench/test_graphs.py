"""bench.graphs measures every way and counts the answers that differ."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import graphs as bench, report
from specengine import Engine, policies
from specengine.benchmark.summaries import Answer
from specengine.benchmark.ways import EngineDecoder
from specengine.drafters.eagle import EagleDraft
from specengine.errors import InputError
from specengine.models.huggingface import CausalLM, HuggingFaceTarget
from specengine.options import LoadOptions
from tests import toy

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments for a tiny random model without a head."""
    monkeypatch.setattr("specengine.ops.cuda_graphs.MIN_SLOTS", 256)
    model, tokenizer = toy.tiny("llama", max_position_embeddings=1024), toy.byte_tokenizer()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = [
        "--per-set",
        "2",
        "--rounds",
        "1",
        "--max-new-tokens",
        "4",
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    return [
        "--model",
        str(tmp_path / "model"),
        "--draft",
        "ngram",
        *sizes,
        "--out",
        str(tmp_path / "out.jsonl"),
    ]


def records_of(arguments: list[str], *more: str) -> tuple[int, list[dict[str, Any]]]:
    status = bench.main([*arguments, *more])
    return status, [json.loads(line) for line in Path(arguments[-1]).read_text().splitlines()]


def of(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["record"] == kind]


def test_transformers_can_be_left_out(tiny_model: list[str]) -> None:
    """Of a large model, which then is loaded once."""
    status, records = records_of(tiny_model, "--policy", "auto", "--ours")
    assert status == 0
    assert {row["way"] for row in of(records, "row")} == {
        "plain",
        "plain, graphs",
        "auto",
        "auto, graphs",
    }


def test_it_measures_all_ways(tiny_model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, records = records_of(tiny_model, "--policy", "chain", "--strict")
    assert status == 0
    assert [record["record"] for record in records[:2]] == ["provenance", "settings"]
    captured = ["plain, graphs", "chain, graphs", "plain, graphs, strict", "chain, graphs, strict"]
    ways = {"plain", "transformers", "transformers, static cache", "chain", *captured}
    rows, captures = of(records, "row"), of(records, "captures")
    assert {row["way"] for row in rows} == ways
    assert all(row["diverges_at"] is None and min(row["seconds"]) > 0 for row in rows)
    assert [record["way"] for record in captures] == captured
    assert captures[0]["captured"] == [
        "finish greedy",
        "finish sampled",
        "finish truncated",
        "verify",
    ]
    times = {row["way"]: row.get("median_ms", {}) for row in rows}
    assert times["chain"]["verify"] > 0
    assert times["chain, graphs"]["total"] > 0
    assert of(records, "host waits") == []  # counted on a CUDA device
    whole = {record["way"]: record for record in of(records, "summary") if record["set"] == "all"}
    assert (
        whole["transformers"]["over_transformers"]
        == whole["plain, graphs"]["over_captured_plain"]
        == 1.0
    )
    assert "over captured plain" in capsys.readouterr().out


def test_what_is_refused_is_listed_and_the_rest_runs(
    tiny_model: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise InputError("policy specdecpp: states of another size")

    monkeypatch.setattr(policies.find("specdecpp"), "grow", refuse)
    status, records = records_of(tiny_model, "--policy", "chain", "--policy", "specdecpp")
    dropped = {record["way"]: record["reason"] for record in of(records, "not run")}
    assert status == 0  # no fault
    assert not any(record["fault"] for record in of(records, "not run"))
    assert list(dropped) == ["specdecpp", "specdecpp, graphs"]
    assert all("InputError: " in reason for reason in dropped.values())
    assert [record["way"] for record in of(records, "summary")][-2:] == ["chain, graphs"] * 2
    assert sorted(table.kind for table in report.tables(records)) == [
        "differences",
        "not-run",
        "policies",
    ]


def test_a_fault_in_a_later_answer_is_told_by_the_status(
    tiny_model: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, answered = EngineDecoder.__call__, []

    def fails_third(self: EngineDecoder, prompt: list[int], length: int) -> Answer:
        if "Chain" in self.facts["policy"] and not self.engine.target.captured:
            answered.append(prompt)
            if len(answered) == 3:  # the first warms it up, the second is the first prompt's
                raise IndexError("out of reach")
        return real(self, prompt, length)

    monkeypatch.setattr(EngineDecoder, "__call__", fails_third)
    status, records = records_of(tiny_model, "--policy", "chain")
    (dropped,) = of(records, "not run")
    assert status == 1
    assert (dropped["way"], dropped["reason"], dropped["fault"]) == (
        "chain",
        "IndexError: out of reach",
        True,
    )
    assert len([row for row in of(records, "row") if row["way"] == "chain"]) == 1
    assert "chain" not in {record["way"] for record in of(records, "summary")}
    assert "chain failed: IndexError" in capsys.readouterr().err


def test_strict_answers_are_compared_with_strict_plain_decodings() -> None:
    decoders = object.__new__(bench.Decoders)
    against = {
        way.name: way.against
        for way in (decoders.ours("chain", how) for how in ("", bench.GRAPHS, bench.STRICT))
    }
    assert against == {
        "chain": "plain",
        "chain, graphs": "plain",
        "chain, graphs, strict": "plain, graphs, strict",
    }


def test_ways_can_be_left_out(tiny_model: list[str]) -> None:
    left_out = "transformers, static cache", "chain"
    status, records = records_of(
        tiny_model, "--policy", "chain", *(part for way in left_out for part in ("--skip", way))
    )
    assert status == 0
    assert {row["way"] for row in of(records, "row")} == {
        "plain",
        "transformers",
        "plain, graphs",
        "chain, graphs",
    }
    with pytest.raises(InputError, match=r"skip: got 'plain', accepted transformers, "):
        records_of(tiny_model, "--policy", "chain", "--skip", "plain")


def test_an_unknown_policy_is_refused_before_a_model_is_read() -> None:
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
        return SimpleNamespace(
            drafter=EagleDraft(head, lm), target=SimpleNamespace(device=torch.device(kind))
        )

    for kind, shared in (("cuda", True), ("cpu", False)):
        first, second, others = engine(kind), engine(kind), [SimpleNamespace(drafter=None)]
        for made in (first, second):
            bench.share_head(made, others)  # type: ignore[arg-type]
            others.append(made)
        heads = [engine.drafter.head.module.parameters() for engine in (first, second)]
        pairs = list(zip(*heads, strict=True))
        assert [one.data_ptr() == other.data_ptr() for one, other in pairs] == [shared] * len(pairs)


@pytest.mark.parametrize("strict", [False, True])
def test_engines_run_the_layers_that_the_first_one_loaded(strict: bool) -> None:
    """Merged and without a look for changed weights."""
    lm = CausalLM(toy.tiny("llama"), merge=True)
    target = HuggingFaceTarget(lm.model)
    target.lm = lm
    first = Engine(target, None, None, toy.byte_tokenizer())
    for policy in ("plain", "chain"):
        options = LoadOptions(graphs=True, strict=strict)
        engine = bench.beside(first, "recycling", policy, options)
        assert engine.target.lm is lm
        assert lm._watch is None
        assert engine.target.captured
        assert bool(engine.target.strict_rows) == strict  # type: ignore[attr-defined]
        assert engine.target.cache is not target.cache  # type: ignore[attr-defined]
        assert (engine.drafter is None) == (policy == "plain")


def test_waits_of_the_profiler_itself_are_not_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def within(function: Any) -> dict[str, int]:
        own = {"cudaDeviceSynchronize": 2}
        return own | {"cudaStreamSynchronize": 5} if function() else own

    monkeypatch.setattr(bench, "_waits_within", within)
    assert bench._host_waits(lambda: [1]) == {"cudaStreamSynchronize": 5}
