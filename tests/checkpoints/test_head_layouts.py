"""The folder of layouts: which of them reads a config, and which are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specengine.checkpoints import layouts
from specengine.checkpoints.eagle import load_head, save_head
from specengine.checkpoints.layouts.dflash import DflashLayout
from specengine.checkpoints.layouts.eagle import EagleLayout
from specengine.checkpoints.layouts.specforge import SpecForge
from specengine.checkpoints.layouts.speculators import Speculators
from specengine.errors import CheckpointError
from specengine.models.configs import STEADY_ROPES
from specengine.models.eagle import DEFAULT_THETA
from tests.checkpoints.layouts import FLAT, LAYER_IDS, READ, THIRD, official, write
from tests.toy import head_config, random_state


def test_each_file_is_a_layout() -> None:
    assert layouts.names() == ["dflash", "eagle", "specforge", "speculators"]
    assert [layouts.named(name) for name in layouts.names()] == [
        DflashLayout,
        EagleLayout,
        SpecForge,
        Speculators,
    ]
    assert layouts.FALLBACK in layouts.names()


@pytest.mark.parametrize(
    ("raw", "layout", "head"),
    [
        ({}, EagleLayout, False),
        ({"architectures": ["LlamaForCausalLM"]}, EagleLayout, False),
        ({"architectures": 5}, EagleLayout, False),
        (THIRD, EagleLayout, True),
        ({"eagle_config": {}}, SpecForge, True),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, SpecForge, True),
        ({"speculators_model_type": "eagle3", **THIRD}, Speculators, True),
        ({"architectures": ["DFlashDraftModel"], "block_size": 16}, DflashLayout, True),
        ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 9]}}, DflashLayout, True),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 256}, DflashLayout, True),
        ({"architectures": ["DSparkDraftModel"], "dflash_config": {}}, DflashLayout, True),
        ({"architectures": ["DFlash2DraftModel"], "dflash_config": {}}, DflashLayout, True),
        ({"architectures": ["Gemma4DSparkModel"], "markov_rank": 256}, DflashLayout, True),
        ({"architectures": ["DominoDraftModel"]}, DflashLayout, True),
        ({"architectures": ["MuseGlimmerAssistantModel"]}, DflashLayout, True),
        ({"speculators_model_type": "dflash"}, DflashLayout, True),
        (
            {"speculators_model_type": "dspark", "architectures": ["DSparkDraftModel"]},
            DflashLayout,
            True,
        ),
    ],
)
def test_a_config_is_read_by_the_layout_that_recognises_it(
    raw: dict[str, Any], layout: type[layouts.Layout], head: bool
) -> None:
    assert layouts.layout_of(raw) is layout
    assert layouts.is_head(raw) == head


def test_a_config_of_two_layouts_is_refused(tmp_path: Path) -> None:
    config = head_config(**READ)
    raw = {**FLAT, **THIRD, "eagle_config": {LAYER_IDS: [1]}, "speculators_model_type": "eagle3"}
    with pytest.raises(
        CheckpointError,
        match=r"config\.json: its fields fit several layouts: specforge, speculators$",
    ) as refused:
        load_head(write(tmp_path, raw, official(config, random_state(config))))
    assert str(tmp_path) in str(refused.value)


class Variant(SpecForge):
    """A dialect of a dialect."""


class Stranger(layouts.Layout):
    family = "strange"
    marks = ("eagle_config", "strange")

    def read_version(self) -> Any:
        return 3

    def read(self) -> dict[str, Any]:
        return self.read_layer(self.fields) | self.read_fusion([], [])


def known(monkeypatch: pytest.MonkeyPatch, **more: type[layouts.Layout]) -> None:
    """Have these layouts in the folder as well."""
    classes = {name: layouts.named(name) for name in layouts.names()} | more
    monkeypatch.setattr(layouts, "names", lambda: sorted(classes))
    monkeypatch.setattr(layouts, "named", classes.__getitem__)


def test_the_variant_of_the_layouts_that_recognise_a_config_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known(monkeypatch, variant=Variant)
    assert layouts.layout_of({"eagle_config": {}}) is Variant


def test_unrelated_layouts_are_not_chosen_between(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, stranger=Stranger)
    with pytest.raises(
        CheckpointError, match="its fields fit several layouts: specforge, test_head_layouts"
    ):
        layouts.layout_of({"eagle_config": {}})
    assert layouts.layout_of({"strange": 1}) is Stranger


def test_a_layout_without_a_writer_is_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(monkeypatch, stranger=Stranger)
    config = head_config(**READ)
    state = random_state(config)
    assert load_head(write(tmp_path, {**FLAT, **THIRD, "strange": 1}, state)).config == config
    with pytest.raises(
        CheckpointError, match="layout: got 'strange', accepted dflash, official, speculators"
    ):
        save_head(config, state, tmp_path / "other", "strange")
    with pytest.raises(CheckpointError, match="layout: strange heads can be read, but not written"):
        Stranger.written(config, "float32", layouts.Verifier())


def test_layouts_know_the_rotary_sets_of_the_head() -> None:
    """They do not import the network, so these stand twice."""
    known = (*STEADY_ROPES, "proportional")
    assert (layouts.DEFAULT_THETA, tuple(layouts._ROPE_REQUIRED)) == (DEFAULT_THETA, known)
