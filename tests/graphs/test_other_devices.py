"""Devices without float64 (Apple's), on a pretended one that refuses it; devices that are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from specengine import Engine, ops
from specengine.drafters.eagle import EagleDraft
from specengine.errors import UnsupportedModelError
from specengine.models.huggingface import HuggingFaceTarget
from specengine.ops import _meanings
from specengine.options import LoadOptions
from tests import toy
from tests.graphs import pretended, replays
from tests.ops.backends import choose

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
]


@pytest.fixture(autouse=True)
def _meanings_run(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "reference")


@contextmanager
def without_float64() -> Iterator[None]:
    """Run with a device that refuses float64, as torch does on mps."""
    run = pretended.Device.run

    def refusing(self: Any, name: str, *given: Any, **options: Any) -> Any:
        found = run(self, name, *given, **options)
        if any(
            part.dtype is torch.float64 for part in pretended.of_class(pretended.OnDevice, found)
        ):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_meanings, "NO_FLOAT64", ("cuda",))
        patch.setattr(pretended.Device, "run", refusing)
        _meanings.precision.cache_clear()
        try:
            with pretended.cuda():
                yield
        finally:
            _meanings.precision.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["auto", "svip", "ddd", "opt_tree", "salf", "ltd"])
def test_trees_grow_and_tokens_are_drawn_without_float64(policy: str) -> None:
    """Noise in float32 draws the tokens of float64 but where two are as good as equal."""
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.6, "top_p": 0.9, "seed": 5},
    ]
    model, _ = replays.on_the_host("eagle3", True)
    host = Engine(HuggingFaceTarget(model), None, None)
    expected = [replays.answer(host, way)[0] for way in ways]
    with without_float64():
        with pytest.raises(TypeError, match="float64"):
            torch.zeros(1, device=pretended.CUDA).double()
        there, moved = replays.on_the_device("eagle3", True)
        target = HuggingFaceTarget(there)
        engine = Engine(target, EagleDraft(moved, target.lm), toy.policy_for(policy, 3))
        assert [replays.answer(engine, way)[0] for way in ways] == expected
        assert engine.policy is not None


def test_noise_of_float32_is_that_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    from specengine.ops import choose as module

    words = torch.cat(
        [torch.arange(1000), torch.arange(2**32 - 3000, 2**32), torch.randint(0, 2**32, (5000,))]
    )
    expected = module._gumbel(words)
    monkeypatch.setattr(module, "doubled", lambda values: values.float())
    found = module._gumbel(words)
    assert found.dtype is torch.float32
    assert torch.allclose(found.double(), expected, rtol=1e-6, atol=1e-6)
    assert expected.max() > 22
    assert expected.min() < -3


def test_float64_is_for_devices_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops.precision(torch.device("cpu")) is torch.float64
    assert ops.precision(torch.device("mps")) is torch.float32


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_old_cards_are_refused_bfloat16(
    dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Before weights are read, with the dtypes that would run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    toy.tiny("llama").bfloat16().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(
        UnsupportedModelError,
        match=r"bfloat16 .* 8\.0 or newer, Tesla T4 has 7\.5; give dtype='float16'",
    ):
        Engine.from_pretrained(
            str(tmp_path), policy="plain", dtype=dtype, tokenizer=toy.byte_tokenizer()
        )
    assert LoadOptions.of({"device": "cuda", "dtype": "float16"}).device == torch.device("cuda")
