"""bench.perplexity scores what the model's own forward and loss score, and sees a way that computes something else."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from bench import perplexity
from bench.cpu.ways import Given
from bench.perplexity import REFERENCE, WAYS, main
from specengine import Engine
from specengine.errors import NumericalError
from specengine.models import native
from specengine.models.huggingface import CausalLM
from specengine.models.native import weights
from specengine.models.native.weights import Weight
from tests.models.native_engines import needs_extension
from tests.models.native_variants import write_gguf
from tests.toy import byte_tokenizer, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
WINDOW, WINDOWS = 48, 4
NATIVE = [way for way in WAYS if way.startswith("native")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with its tokenizer, a GGUF file of another one, and a text."""
    folder = tmp_path_factory.mktemp("bench-perplexity")
    tiny(hidden_size=64, intermediate_size=128, head_dim=16, initializer_range=0.2).save_pretrained(
        folder / "model"
    )
    byte_tokenizer().save_pretrained(folder / "model")
    write_gguf(folder / "other.gguf", "llama", "q4_1")
    letters = random.Random(0).choices("abcdefgh ,.\nö", k=WINDOW * WINDOWS + 40)
    (folder / "text.txt").write_text("".join(letters), encoding="utf-8")
    return folder


def run(folder: Path, *ways: str, window: int = WINDOW) -> dict[str, dict[str, Any]]:
    """The records by way."""
    out = folder / "out.jsonl"
    command = [
        "--model",
        str(folder / "model"),
        "--text",
        str(folder / "text.txt"),
        "--out",
        str(out),
    ]
    command += ["--window", str(window), "--tokens", str(window * WINDOWS + 20)]
    assert (
        main(
            [
                *command,
                "--gguf",
                str(folder / "other.gguf"),
                *(part for way in ways for part in ("--way", way)),
            ]
        )
        == 0
    )
    first, *records = [json.loads(line) for line in out.read_text().splitlines()]
    assert first["record"] == "provenance"
    return {record["way"]: record for record in records}


@torch.inference_mode()
def own(folder: Path, model: PreTrainedModel) -> float:
    """Perplexity by the loss that the model's own forward gives for a window."""
    ids = AutoTokenizer.from_pretrained(folder / "model")((folder / "text.txt").read_text())[
        "input_ids"
    ]
    windows = [torch.tensor([ids[WINDOW * i : WINDOW * (i + 1)]]) for i in range(WINDOWS)]
    return math.exp(sum(model(window, labels=window).loss.item() for window in windows) / WINDOWS)


def model_of(folder: Path, way: str) -> PreTrainedModel:
    name = folder / ("other.gguf" if "gguf" in way else "model")
    return Engine.from_pretrained(
        str(name), "none", backend="huggingface", dtype="float32"
    ).target.model  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(("way", "tolerance"), [(REFERENCE, 1e-5), ("huggingface", 0.02)])
def test_transformers_scores_as_the_models_own_loss(
    folder: Path, way: str, tolerance: float
) -> None:
    record = run(folder, way)[way]
    assert record["perplexity"] == pytest.approx(own(folder, model_of(folder, way)), rel=tolerance)
    assert record["perplexity"] == pytest.approx(math.exp(record["nats_per_token"]), rel=1e-4)
    assert record["tokens"] == WINDOWS * (WINDOW - 1)


@needs_extension
@pytest.mark.parametrize("way", NATIVE)
def test_native_ways_score_as_the_models_own_loss(folder: Path, way: str) -> None:
    record = run(folder, way)[way]
    assert record["perplexity"] == pytest.approx(own(folder, model_of(folder, way)), rel=0.02)
    assert record["backend"].startswith("native")


@needs_extension
def test_ways_are_compared_with_those_that_ran(folder: Path) -> None:
    found = run(folder)
    assert list(found) == list(WAYS)
    for number, (way, record) in enumerate(found.items()):
        bases = [base for base in perplexity.BASES if base in list(found)[: number + 1]]
        quotients = {base: record["perplexity"] / found[base]["perplexity"] for base in bases}
        assert record["over"] == pytest.approx(quotients, rel=1e-4)
        assert ("nats_from_float32" in record) == (way != REFERENCE)
        assert all((error > 0) == (base != way) for base, error in record["over_error"].items())
    apart = found["native int8"]["nats_from_float32"]
    assert 0 < apart["mean"] < apart["max"]
    assert run(folder, "native int8")["native int8"]["over"] == {}


@needs_extension
@pytest.mark.parametrize("kind", ["huggingface", "native"])
def test_every_window_starts_fresh(folder: Path, kind: str) -> None:
    target = Given(str(folder / "model")).only(kind, byte_tokenizer()).target
    window = torch.arange(40, 60)
    twice = perplexity.nats(target, torch.stack([window, window.flip(0), window]))
    assert torch.equal(twice[0], twice[2])
    longer = perplexity.nats(target, torch.cat([window, window])[None])[0]
    assert torch.allclose(longer[:19], twice[0], atol=0.05)
    assert (longer[20:] - twice[2]).abs().max() > 0.1


# ---------------------------------------------------------------------------------------------------- damage


@needs_extension
def test_logits_one_position_off_are_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run(folder, REFERENCE, "native")["native"]
    damage(native.NativeLM, lambda logits: logits.roll(1, 0), monkeypatch)
    after = run(folder, REFERENCE, "native")["native"]
    assert abs(after["perplexity"] / before["perplexity"] - 1) > 0.05
    assert after["nats_from_float32"]["mean"] > 10 * before["nats_from_float32"]["mean"]


@needs_extension
def test_a_wrong_scale_in_int8_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last layer, which the check at loading does not run."""
    real = weights.add_weight

    def doubled(weights: Any, weight: Weight, kinds: dict[str, str], following: Any = None) -> str:
        if kinds["bf16"].endswith("i8") and weight.name == "model.layers.1.mlp.down_proj.weight":
            rows = weight.rows
            weight = weight._replace(rows=lambda first, last: 2 * rows(first, last))
        return real(weights, weight, kinds, following)

    ways = (REFERENCE, "native", "native int8")
    before = run(folder, *ways)
    monkeypatch.setattr(weights, "add_weight", doubled)
    after = run(folder, *ways)
    assert after["native"] == before["native"]
    assert abs(after["native int8"]["over"]["native"] - 1) > 5 * abs(
        before["native int8"]["over"]["native"] - 1
    )
    assert (
        after["native int8"]["nats_from_float32"]["mean"]
        > 5 * before["native int8"]["nats_from_float32"]["mean"]
    )


@pytest.mark.parametrize(("value", "window"), [(math.nan, 0), (math.inf, 0), (-math.inf, 1)])
def test_what_is_not_finite_is_no_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch, value: float, window: int
) -> None:
    """-inf matters in the second window alone, where token 54 stands behind the damaged row."""
    target = (
        Given(str(folder / "model"), dtype="float32").only("huggingface", byte_tokenizer()).target
    )
    place = (torch.tensor(3), torch.tensor(54))
    damage(CausalLM, lambda logits: logits.index_put(place, torch.tensor(value)), monkeypatch)
    with pytest.raises(NumericalError, match=f"window {window}"):
        perplexity.nats(target, torch.arange(40, 60).view(2, 10))


def damage(cls: type, change: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    real = cls.extend  # type: ignore[attr-defined]

    def damaged(self: Any, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
        logits, states = real(self, *arguments, **options)
        return change(logits), states

    monkeypatch.setattr(cls, "extend", damaged)


# ---------------------------------------------------------------------------------------------------- input


@pytest.mark.parametrize(
    ("text", "options", "named", "accepted"),
    [
        (b"", (), "--text", "at least 48"),
        (b"47 tokens" + 38 * b".", (), "--text", "at least 48"),
        (b"\xff\xfe" * 100, (), "--text", "a UTF-8 file"),
        (None, (), "--text", "a UTF-8 file"),
        (b"x" * 100, ("--window", "1"), "--window", "2 or more"),
        (b"x" * 100, ("--tokens", "47"), "--tokens", "48"),
        (b"x" * 100, ("--tokens", "many"), "--tokens", "int"),
        (b"x" * 100, ("--way", "int8"), "--way", "native int8"),
    ],
)
def test_bad_input_is_named(
    folder: Path,
    tmp_path: Path,
    text: bytes | None,
    options: Any,
    named: str,
    accepted: str,
    capsys: Any,
) -> None:
    if text is not None:
        (tmp_path / "text.txt").write_bytes(text)
    command = [
        "--model",
        str(folder / "model"),
        "--text",
        str(tmp_path / "text.txt"),
        "--window",
        "48",
    ]
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--out", str(tmp_path / "out.jsonl"), *options])
    assert stopped.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert named in message
    assert accepted in message
    assert not (tmp_path / "out.jsonl").exists()


def test_there_is_no_text_of_its_own(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "--text" in capsys.readouterr().err


def test_ways_that_cannot_run_are_skipped_with_the_reason(folder: Path) -> None:
    (folder / "long.txt").write_text("x" * 300)
    out = folder / "long.jsonl"
    command = [
        "--model",
        str(folder / "model"),
        "--text",
        str(folder / "long.txt"),
        "--out",
        str(out),
    ]
    assert main([*command, "--window", "300", "--way", REFERENCE, "--way", "native gguf"]) == 0
    _, context, gguf = [json.loads(line) for line in out.read_text().splitlines()]
    assert (context["record"], gguf["record"]) == ("skipped", "skipped")
    assert "holds 256 tokens" in context["reason"]
    assert "--gguf" in gguf["reason"]


def test_the_text_is_named_without_its_folder(folder: Path) -> None:
    record = run(folder, REFERENCE)[REFERENCE]
    assert (record["text"], len(record["sha256"])) == ("text.txt", 64)
    assert str(folder) not in json.dumps(record)
