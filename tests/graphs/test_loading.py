"""`graphs` as an option: what it loads, what it refuses, and how the command line passes it on."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from specengine import Engine
from specengine.cli.given import load_options
from specengine.cli.parser import add_model
from specengine.drafters.ngram import NGram
from specengine.drafters.small_model import SmallModel
from specengine.engine.captured import NOTE
from specengine.errors import UnsupportedModelError
from specengine.models.huggingface import HuggingFaceTarget
from specengine.models.native import NativeTarget
from tests import toy
from tests.graphs.engines import DEVICE, PROMPT, model, near_copy

pytestmark = pytest.mark.usefixtures("one_thread")


def kinds(draft: Any, policy: str | None = None, **options: Any) -> tuple[type, bool, type]:
    """Return the target's class, whether it is captured, and the draft's class."""
    engine = Engine.from_pretrained(model(), draft, policy, **options)
    assert (engine.drivers.own.captured is not None) == engine.target.captured
    return type(engine.target), engine.target.captured, type(engine.drafter)


def test_graphs_decide_what_is_loaded() -> None:
    assert kinds(near_copy(), graphs=True) == (HuggingFaceTarget, True, SmallModel)
    assert kinds("ngram", graphs=True) == (HuggingFaceTarget, True, NGram)
    assert kinds(None, "plain", graphs=True) == (HuggingFaceTarget, True, type(None))
    assert kinds(SmallModel(near_copy()), graphs=True) == (HuggingFaceTarget, True, SmallModel)
    for graphs in (None, False) if DEVICE.type == "cpu" else (False,):
        without = {"graphs": graphs, "lookup": False}
        assert kinds(near_copy(), backend="huggingface", **without) == (
            HuggingFaceTarget,
            False,
            SmallModel,
        )
        on_cpu = NativeTarget if DEVICE.type == "cpu" else HuggingFaceTarget
        assert kinds(near_copy(), **without) == (on_cpu, False, SmallModel)


def test_an_engine_loaded_with_graphs_answers_as_one_without() -> None:
    expected = Engine.from_pretrained(model(), policy="plain").generate(PROMPT, max_new_tokens=8)
    found = Engine.from_pretrained(model(), near_copy(), "talon", graphs=True).generate(
        PROMPT, max_new_tokens=8
    )
    assert found.token_ids == expected.token_ids
    noted = "graphs: without a CUDA device the padded forwards run uncaptured"
    about_graphs = [note for note in found.stats.notes if note.startswith("graphs")]
    assert about_graphs == [*([] if DEVICE.type == "cuda" else [noted]), NOTE]
    assert len(found.stats.host_shares) == found.stats.num_spec_steps > 1
    assert not expected.stats.notes


def test_strict_verification_under_graphs() -> None:
    engine = Engine.from_pretrained(model(), near_copy(), graphs=True, strict=True)
    assert isinstance(engine.target, HuggingFaceTarget)
    assert engine.target.strict_rows == 64
    prompt = [1, 2, 3]
    plain = Engine(engine.target, None, None).generate(prompt, max_new_tokens=8)
    assert engine.generate(prompt, max_new_tokens=8).token_ids == plain.token_ids


def test_models_that_cannot_be_captured_are_refused() -> None:
    dense = toy.tiny("Gemma2", name="Gemma2", num_key_value_heads=2, head_dim=8, sliding_window=128)
    assert HuggingFaceTarget(dense).lm.attention == "dense mask"
    with pytest.raises(
        UnsupportedModelError, match=r"graphs: the attention of .* runs with a dense mask"
    ):
        Engine.from_pretrained(dense, "ngram", graphs=True)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(
        UnsupportedModelError, match=r"graphs: .* has dynamic positions, which the host reads"
    ):
        Engine.from_pretrained(toy.tiny("llama", rope_parameters=rope), "ngram", graphs=True)
    with pytest.raises(UnsupportedModelError, match="dense mask"):
        SmallModel(dense, captured=True)


def test_the_command_lines_flag() -> None:
    parser = argparse.ArgumentParser()
    add_model(parser)
    assert load_options(parser.parse_args(["--graphs"]))["graphs"] is True
    assert load_options(parser.parse_args(["--no-graphs"]))["graphs"] is False
    assert load_options(parser.parse_args([]))["graphs"] is None
