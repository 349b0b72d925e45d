"""bench.graphs measures every way and counts the answers that differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import graphs as bench
from tests import toy

pytestmark = pytest.mark.usefixtures("one_thread")


def test_it_measures_all_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specengine.graphs.FEWEST_SLOTS", 256)
    model, tokenizer = toy.tiny("llama", max_position_embeddings=1024), toy.byte_tokenizer()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    arguments = ["--model", str(tmp_path / "model"), "--draft", "ngram", "--policy", "chain", "--dtype", "float32"]
    sizes = ["--per-set", "1", "--rounds", "1", "--max-new-tokens", "6", "--device", "cpu"]
    bench.main([*arguments, *sizes, "--strict", "--out", str(tmp_path / "out.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    kinds = [row["record"] for row in rows]
    assert kinds == ["provenance", "settings", *["captures"] * 5, "summary", "row"]
    captured = ["plain, graphs, host", "plain, graphs, read", "chain", "chain, graphs, host"]
    captured += ["plain, graphs, strict", "chain, graphs, strict"]
    ways = ["transformers", "transformers, static cache", "plain", *captured]
    assert list(rows[-1]["tokens_per_second"]) == ways
    assert all(rate > 0 for rate in rows[-1]["tokens_per_second"].values())
    assert rows[-1]["differs_from_plain"] == []
    assert rows[2]["captured"] == ["verification of 1 rows"]
    assert rows[-1]["cycle_ms"]["chain, graphs, host"]["verify"] > 0
    assert rows[-2]["host_waits"] == {}  # counted on a CUDA device


def test_it_counts_answers_that_differ() -> None:
    first = {"plain": 2, "x": 3, "plain, graphs, strict": 3, "y, strict": 3, "z, strict": 2}
    ways = {name: (lambda prompt, token=token: bench.Answer([1, token])) for name, token in first.items()}
    item = bench.workloads.Workload("set", "id", "text")
    assert bench._measure(ways, item, [1], 1)["differs_from_plain"] == ["x", "z, strict"]
