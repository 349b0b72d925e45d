"""Strict verification under graphs: forwards of one number of rows, and a node's bits are those of plain decoding."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine import Engine, policies
from specengine.drafters.eagle import EagleDraft
from specengine.drafters.small_model import SmallModel
from specengine.errors import UnsupportedModelError
from specengine.models.huggingface import PADDED_ROWS, HuggingFaceTarget, strict_rows
from specengine.ops.tree import TokenTree
from tests import toy
from tests.engine.test_strict import specdecpp
from tests.graphs.engines import DEVICE, frozen

PROMPT = [5, 9, 2, 31, 7, 12]
NAMES = [name for name in policies.names() if name != "plain"]


@cache
def bfloat16(seed: int = 0) -> PreTrainedModel:
    return toy.tiny(
        "qwen3",
        seed=seed,
        hidden_size=64,
        intermediate_size=128,
        head_dim=32,
        num_attention_heads=2,
    ).to(DEVICE, torch.bfloat16)


def strict_target(**options: Any) -> HuggingFaceTarget:
    try:
        return HuggingFaceTarget(bfloat16(), captured=True, strict=True, **options)
    except UnsupportedModelError as error:
        pytest.skip(str(error))


def path_to(tree: TokenTree, node: int) -> list[int]:
    return [int(tree.tokens[0]), *tree.path_tokens(node)]


@torch.inference_mode()
def verified(target: HuggingFaceTarget, prompt: list[int], tree: TokenTree) -> Tensor:
    target.reset()
    target.prefill(prompt)
    target.reserve(len(prompt), len(tree))
    return target.verify(tree)[0].clone()


@torch.inference_mode()
def plain_logits(target: HuggingFaceTarget, prompt: list[int], path: list[int]) -> Tensor:
    """Logits behind the last token of `path`, decoded a token at a time."""
    target.reset()
    target.prefill(prompt)
    for token in path:
        tree = TokenTree.root(token)
        logits, _ = target.verify(tree)
        target.commit(tree, [0])
    return logits[0].clone()


@pytest.mark.parametrize("nodes", [40, PADDED_ROWS, 2 * PADDED_ROWS + 12])
def test_each_node_has_the_bits_of_plain_decoding(nodes: int) -> None:
    """Behind a prompt of more than one chunk, in trees of one forward and of several."""
    target, prompt = strict_target(), PROMPT * 11
    tree = toy.random_tree(1, nodes, 64, root=3)
    logits = verified(target, prompt, tree)
    for node in range(0, len(tree), 11):
        assert torch.equal(logits[node], plain_logits(target, prompt, path_to(tree, node))), node


def test_the_control_without_it_has_other_bits() -> None:
    target, prompt = HuggingFaceTarget(bfloat16(), captured=True), PROMPT * 20
    tree = toy.random_tree(0, 24, 64, root=3)
    logits = verified(target, prompt, tree)
    assert not all(
        torch.equal(logits[n], plain_logits(target, prompt, path_to(tree, n))) for n in range(24)
    )


def test_a_larger_cache_changes_nothing() -> None:
    target, tree = strict_target(), toy.random_tree(2, 30, 64, root=3)
    before = verified(target, PROMPT * 11, tree)
    target.reserve(5000, 0)
    assert torch.equal(verified(target, PROMPT * 11, tree), before)


@pytest.mark.sliced(1)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_answers_equal_plain_decoding_under_every_policy(
    name: str, sampled: bool, tmp_path: Path
) -> None:
    target = strict_target()
    options: dict[str, Any] = {"max_new_tokens": 12} | (
        {"temperature": 1.0, "seed": 5} if sampled else {}
    )
    wanted = Engine(target, None, None).generate(PROMPT, **options).token_ids
    drafter: Any = SmallModel(bfloat16(seed=1), target.vocab_size)
    policy = None
    if name == "specdecpp":
        drafter, policy = specdecpp(target, tmp_path, EagleDraft)
    with frozen():
        result = Engine(target, drafter, policy or toy.policy_for(name)).generate(PROMPT, **options)
    assert result.token_ids == wanted
    assert result.stats.num_draft_tokens > 0


@pytest.mark.parametrize("penalty", [1.0, 1.3], ids=["device", "host"])
def test_every_forward_has_one_number_of_rows(
    penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, seen = strict_target(), set()
    forward = target.lm.forward
    monkeypatch.setattr(
        target.lm, "forward", lambda rows, *rest: seen.add(len(rows)) or forward(rows, *rest)
    )
    drafter = SmallModel(bfloat16(seed=1), target.vocab_size)
    for policy in (None, policies.make("eagle", width=10, expansions=2, budget=100)):
        engine = Engine(target, None if policy is None else drafter, policy)
        engine.warmup(40)
        engine.generate(PROMPT, max_new_tokens=4, repetition_penalty=penalty)
    assert seen == {PADDED_ROWS}


def test_a_device_whose_products_follow_the_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = HuggingFaceTarget(bfloat16(), captured=True)
    forward, place = target.lm.forward, torch.arange(PADDED_ROWS, device=DEVICE)[:, None]
    noise = torch.where(place == PADDED_ROWS - 1, 1.01, 1.0).to(torch.bfloat16)

    def shifted(*given: Any) -> Any:
        logits, features = forward(*given)
        return logits * noise, features

    if DEVICE.type == "cpu":
        assert strict_rows(target.lm, padded=True) == PADDED_ROWS
    monkeypatch.setattr(target.lm, "forward", shifted)
    with pytest.raises(
        UnsupportedModelError, match=r"strict: on this .* changes with its place among 64 rows"
    ):
        strict_rows(target.lm, padded=True)
