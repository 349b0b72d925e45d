"""EAGLE heads without a vocabulary head of their own, and for targets whose vocabulary has grown."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine import Engine
from specengine.checkpoints.eagle import load_head, one_step_agreement, save_head
from specengine.errors import CheckpointError, InputError
from specengine.models.eagle import MAX_APPENDED, head_from, with_appended_tokens
from specengine.models.huggingface import CausalLM
from tests.heads import deep
from tests.toy import CPU, VOCABULARY, head_config, random_state

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = list(range(40, 52))


def saved(folder: Path, *, without: tuple[str, ...] = (), **changes: Any) -> Path:
    """A random head on disk, some of its tensors taken away."""
    config = head_config(**changes)
    save_head(config, random_state(config), folder)
    file = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name not in without}
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def answers(target: Any, folder: Path, **options: Any) -> tuple[list[int], list[int]]:
    """With the head, and plainly."""
    given = {"max_new_tokens": 12, "eos_token_id": []}
    drafted = Engine.from_pretrained(target, folder, "eagle", **options).generate(PROMPT, **given)
    assert drafted.stats.drafted_tokens if hasattr(drafted.stats, "drafted_tokens") else True
    return drafted.token_ids, Engine.from_pretrained(target, policy="plain", **options).generate(
        PROMPT, **given
    ).token_ids


@pytest.mark.parametrize("backend", [None, "huggingface"])
def test_a_head_of_the_whole_vocabulary_reads_by_the_targets(
    tmp_path: Path, backend: str | None
) -> None:
    folder = saved(tmp_path, without=("lm_head.weight",), draft_vocab_size=VOCABULARY)
    found = load_head(folder)
    assert not found.config.own_head
    assert "lm_head.weight is missing: the target's head takes its place" in found.dialect.notes
    drafted, plain = answers(deep(), folder, backend=backend)
    assert drafted == plain


def test_its_logits_are_those_of_a_head_with_the_targets_weights(tmp_path: Path) -> None:
    target = deep()
    found = load_head(saved(tmp_path, without=("lm_head.weight",), draft_vocab_size=VOCABULARY))
    bare = head_from(found.config, found.state, torch.float32, CPU)
    config = head_config(draft_vocab_size=VOCABULARY)
    weights = {**found.state, "lm_head.weight": target.lm_head.weight.detach()}
    whole = head_from(config, weights, torch.float32, CPU)
    states = torch.randn(5, config.hidden_size)
    assert bare.logits(states) is None
    lm = CausalLM(target)
    assert torch.allclose(lm.head(bare.readout(states)), whole.logits(states), atol=1e-5)
    texts = [list(range(30, 50))]
    ours, theirs = one_step_agreement(bare, lm, texts), one_step_agreement(whole, lm, texts)
    assert [convention.hits.tolist() for convention in ours] == [
        convention.hits.tolist() for convention in theirs
    ]
    assert len(ours) > 1


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_vocab_size": 200},
        {"draft_vocab_size": VOCABULARY, "hidden_size": 24, "own_embeddings": True},
    ],
)
def test_other_heads_need_their_own(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        load_head(saved(tmp_path, without=("lm_head.weight",), **changes))


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "huggingface"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"draft_vocab_size": VOCABULARY}, {"version": 1}, {"own_embeddings": True}],
    ids=["part", "whole", "EAGLE-1", "own embeddings"],
)
def test_a_head_serves_a_target_with_appended_tokens(
    tmp_path: Path, changes: dict[str, Any], backend: str | None
) -> None:
    drafted, plain = answers(
        deep(vocab_size=VOCABULARY + 3), saved(tmp_path, **changes), backend=backend
    )
    assert drafted == plain
    target = deep(vocab_size=VOCABULARY + 3)
    prompt = [VOCABULARY, VOCABULARY + 2, 41]  # of the new tokens
    engine = Engine.from_pretrained(target, tmp_path, backend=backend)
    expected = Engine.from_pretrained(target, policy="plain", backend=backend).generate(
        prompt, max_new_tokens=8
    )
    assert engine.generate(prompt, max_new_tokens=8).token_ids == expected.token_ids


@pytest.mark.parametrize("version", [1, 3])
def test_appended_tokens_change_nothing_for_the_others(version: Literal[1, 3]) -> None:
    config = head_config(version, draft_vocab_size=VOCABULARY)
    state = random_state(config)
    grown, weights = with_appended_tokens(config, state, CausalLM(deep(vocab_size=VOCABULARY + 3)))
    assert grown.vocab_size == VOCABULARY + 3
    assert all(weights[name] is tensor for name, tensor in state.items())
    head = head_from(grown, weights, torch.float32, CPU)
    ids = head.target_ids()
    assert ids is None if version == 1 else ids.tolist() == list(range(VOCABULARY))


@pytest.mark.parametrize("size", [VOCABULARY - 1, VOCABULARY + MAX_APPENDED + 1])
def test_another_vocabulary_is_refused_with_what_to_do(tmp_path: Path, size: int) -> None:
    with pytest.raises(
        InputError, match=f"vocabulary 260, this one has {size}; train one for this target"
    ):
        Engine.from_pretrained(deep(vocab_size=size), saved(tmp_path))
