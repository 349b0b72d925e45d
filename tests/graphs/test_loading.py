"""`graphs` as an option: what it loads, what it refuses, and how the command line passes it on."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from specengine.drafters._captured_eagle import CapturedEagle
from specengine.drafters._captured_small_model import CapturedSmallModel
from specengine.targets.captured import CapturedTarget

from specengine import Engine
from specengine.captured import NOTE
from specengine.checkpoints.eagle import HeadOptions
from specengine.cli.arguments import add_model_arguments, load_options
from specengine.cuda_graphs import Graphs
from specengine.drafters.eagle import Eagle
from specengine.drafters.lookup import Lookup
from specengine.drafters.ngram import NGram
from specengine.drafters.small_model import SmallModel
from specengine.errors import InputError, UnsupportedModelError
from specengine.targets.huggingface import HuggingFaceTarget
from specengine.targets.native import NativeTarget
from tests import toy
from tests.graphs.engines import DEVICE, PROMPT, model, near_copy

pytestmark = pytest.mark.usefixtures("one_thread")


def kinds(draft: Any, policy: str | None = None, **options: Any) -> tuple[type, type]:
    engine = Engine.from_pretrained(model(), draft, policy, **options)
    return type(engine.target), type(engine.drafter)


def test_graphs_decide_what_is_loaded() -> None:
    assert kinds(near_copy(), graphs=True) == (CapturedTarget, CapturedSmallModel)
    assert kinds("ngram", graphs=True) == (CapturedTarget, NGram)
    assert kinds(None, "plain", graphs=True) == (CapturedTarget, type(None))
    for graphs in (None, False) if DEVICE.type == "cpu" else (False,):
        without = {"graphs": graphs, "lookup": False}
        assert kinds(near_copy(), backend="huggingface", **without) == (HuggingFaceTarget, SmallModel)
        on_cpu = NativeTarget if DEVICE.type == "cpu" else HuggingFaceTarget
        assert kinds(near_copy(), **without) == (on_cpu, SmallModel)


def test_an_engine_loaded_with_graphs_answers_as_one_without() -> None:
    expected = Engine.from_pretrained(model(), policy="plain").generate(PROMPT, max_new_tokens=8)
    found = Engine.from_pretrained(model(), near_copy(), "talon", graphs=True).generate(PROMPT, max_new_tokens=8)
    assert found.token_ids == expected.token_ids
    noted = "graphs: without a CUDA device the padded forwards run uncaptured"
    assert found.stats.notes == [*([] if DEVICE.type == "cuda" else [noted]), NOTE]
    assert len(found.stats.host_shares) == 1  # of the first cycle, which the host made
    assert not expected.stats.notes


def test_a_head_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = toy.head_config(3, model())
    monkeypatch.setattr(
        "specengine.drafters.eagle.load_head", lambda *_, **__: (config, toy.random_state(config), None)
    )
    target = CapturedTarget(model())
    for graphs, kind in ((True, CapturedEagle), (None, Eagle)):
        assert type(Eagle.from_folder(tmp_path, target.lm, HeadOptions(), graphs=graphs)) is kind


def test_strict_verification_under_graphs() -> None:
    engine = Engine.from_pretrained(model(), near_copy(), graphs=True, strict=True)
    assert isinstance(engine.target, CapturedTarget)
    assert engine.target.strict
    prompt = [1, 2, 3]
    plain = Engine(engine.target, None, None).generate(prompt, max_new_tokens=8)
    assert engine.generate(prompt, max_new_tokens=8).token_ids == plain.token_ids


def test_a_draft_whose_passes_would_not_be_captured_is_refused() -> None:
    with pytest.raises(InputError, match="graphs, draft: a SmallModel is taken as it is"):
        Engine.from_pretrained(model(), SmallModel(near_copy()), graphs=True)
    with pytest.raises(InputError, match="graphs, draft: a Lookup is taken as it is"):
        Engine.from_pretrained(model(), Lookup(SmallModel(near_copy())), graphs=True)
    Engine.from_pretrained(model(), Lookup(CapturedSmallModel(near_copy())), graphs=True)
    Engine.from_pretrained(model(), CapturedSmallModel(near_copy()), graphs=True)


def test_models_that_cannot_be_captured_are_refused() -> None:
    dense = toy.tiny("Gemma2", name="Gemma2", num_key_value_heads=2, head_dim=8, sliding_window=128)
    assert HuggingFaceTarget(dense).lm.attention == "dense mask"
    with pytest.raises(UnsupportedModelError, match=r"graphs: the attention of .* runs with a dense mask"):
        Engine.from_pretrained(dense, "ngram", graphs=True)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UnsupportedModelError, match=r"graphs: .* has dynamic positions, which the host reads"):
        Engine.from_pretrained(toy.tiny("llama", rope_parameters=rope), "ngram", graphs=True)
    with pytest.raises(UnsupportedModelError, match="dense mask"):
        CapturedSmallModel(dense)


@pytest.mark.gpu
def test_a_function_that_waits_for_the_device_cannot_be_captured() -> None:
    given = torch.ones(1, device=DEVICE)
    with pytest.raises(UnsupportedModelError, match="graphs: waiting cannot be captured"):
        Graphs(DEVICE).run("waiting", [given], lambda: given * float(given))


def test_the_command_lines_flag() -> None:
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    assert load_options(parser.parse_args(["--graphs"]))["graphs"] is True
    assert load_options(parser.parse_args(["--no-graphs"]))["graphs"] is False
    assert load_options(parser.parse_args([]))["graphs"] is None
