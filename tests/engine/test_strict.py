"""Strict verification: a node's bits are those of plain decoding, whatever tree it stands in."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine import Engine, policies
from specengine.drafters.eagle import EagleDraft
from specengine.drafters.small_model import SmallModel
from specengine.errors import UnsupportedModelError
from specengine.models.eagle import head_from
from specengine.models.huggingface import HuggingFaceTarget, strict_rows
from specengine.ops.tree import TokenTree
from specengine.policies import TreePolicy, _classifier
from tests.toy import head_config, policy_for, random_state, random_tree, tiny

NAMES = [name for name in policies.names() if name != "plain"]


# Whole vectors: a row's end would else be computed by other instructions in one forward than in another.
ROUND = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 2}


@cache
def bfloat16(seed: int = 0) -> PreTrainedModel:
    return tiny("qwen3", seed=seed, **ROUND).to(torch.bfloat16)


def strict_target() -> HuggingFaceTarget:
    try:
        return HuggingFaceTarget(bfloat16(), strict=True)
    except UnsupportedModelError as error:
        pytest.skip(str(error))


@torch.inference_mode()
def verified(target: HuggingFaceTarget, prompt: list[int], tree: TokenTree) -> Tensor:
    target.reset()
    target.prefill(prompt)
    target.reserve(len(prompt), len(tree))
    return target.verify(tree)[0]


@torch.inference_mode()
def plain_logits(target: HuggingFaceTarget, prompt: list[int], path: list[int]) -> Tensor:
    """Logits behind the last token of `path`, decoded a token at a time."""
    target.reset()
    target.prefill(prompt)
    for token in path:
        tree = TokenTree.root(token)
        logits, _ = target.verify(tree)
        target.commit(tree, [0])
    return logits[0]


@pytest.mark.parametrize("seed", range(3))
def test_each_node_has_the_bits_of_plain_decoding(seed: int) -> None:
    target, prompt = strict_target(), [5, 9, 2, 31, 7, 12]
    tree = random_tree(seed, 40, 64, root=3)  # more than one forward holds
    logits = verified(target, prompt, tree)
    for node in range(0, len(tree), 3):
        assert torch.equal(logits[node], plain_logits(target, prompt, [3, *tree.path_tokens(node)]))


def test_the_control_without_it_has_other_bits() -> None:
    strict_target()  # where that cannot be had, there is nothing to compare
    target, prompt = HuggingFaceTarget(bfloat16()), [5, 9, 2, 31, 7, 12] * 20
    tree = random_tree(0, 24, 64, root=3)
    logits = verified(target, prompt, tree)
    same = [
        torch.equal(logits[n], plain_logits(target, prompt, [3, *tree.path_tokens(n)]))
        for n in range(24)
    ]
    assert not all(same)


def specdecpp(
    target: HuggingFaceTarget, folder: Path, draft: type[EagleDraft] = EagleDraft
) -> tuple[EagleDraft, TreePolicy]:
    """Its untrained classifier for states as wide as the target's, and a random EAGLE head, for only those give any."""
    model, file = target.model, folder / "specdecpp.safetensors"
    config = head_config(3, model, layer_ids=(0, 1))
    sizes = {"hidden_size": config.hidden_size, "width": 16, "blocks": 1}
    torch.manual_seed(0)
    facts = {"depth_base": 0, "top": 1, "beta": 0.5, **sizes}
    _classifier.save(file, "specdecpp", _classifier.AcceptanceHead(**sizes), facts)
    policy = policies.make(
        "specdecpp", classifier=str(file), width=3, expansions=4, budget=10, threshold=0.8
    )
    return draft(
        head_from(config, random_state(config), torch.bfloat16, target.device), target.lm
    ), policy


@pytest.mark.sliced(7)
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_answers_equal_plain_decoding_under_every_policy(
    name: str, tmp_path: Path
) -> None:
    target = strict_target()
    plain = Engine(target, None, None)
    if name == "specdecpp":
        engine = Engine(target, *specdecpp(target, tmp_path))
    else:
        engine = Engine(target, SmallModel(bfloat16(seed=1), target.vocab_size), policy_for(name))
    options = {"temperature": 1.0, "seed": 5, "max_new_tokens": 10}
    result = engine.generate([1, 2, 3, 4], **options)
    assert result.token_ids == plain.generate([1, 2, 3, 4], **options).token_ids
    assert result.stats.num_draft_tokens > 0


def test_a_model_that_cannot_keep_it_is_refused() -> None:
    target = HuggingFaceTarget(bfloat16())
    target.lm._twin.dense = True
    with pytest.raises(
        UnsupportedModelError, match="strict: this model's attention runs with a dense mask"
    ):
        strict_rows(target.lm, padded=False)


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model() -> None:
    try:
        engine = Engine.from_pretrained(dtype="bfloat16", strict=True, policy="talon/cpu")
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    plain = Engine(engine.target, None, None, engine.tokenizer)
    prompt = "Name three rivers in France."
    assert (
        engine.generate(prompt, max_new_tokens=16).token_ids
        == plain.generate(prompt, max_new_tokens=16).token_ids
    )
