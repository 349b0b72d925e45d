"""DFlash heads: the block's logits against a recomputation without caches, and answers equal to plain decoding."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    PreTrainedModel,
)
from transformers.cache_utils import DFlashCache

from specengine import policies
from specengine.checkpoints.eagle import (
    Checkpoint,
    HeadOptions,
    HeadReading,
    is_head,
    load_head,
    save_head,
)
from specengine.cli import main
from specengine.drafters import another, cache_of, copy_prompt, forget
from specengine.drafters.dflash import Dflash
from specengine.engine import Engine, Pool
from specengine.errors import CheckpointError, InputError, UnsupportedModelError
from specengine.models.dflash import DflashConfig, DflashHead
from specengine.models.eagle import head_from
from specengine.models.huggingface import HuggingFaceTarget
from specengine.models.native import NativeDflashHead, NativeTarget, from_model, lm as native_lm
from specengine.ops import Nodes
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree
from specengine.records import Cycle, Seconds
from tests.heads import BLOCK, LAYERS, LLAMA3, MASK, block_config as config_of, deep
from tests.toy import (
    POLICIES,
    VOCABULARY,
    byte_tokenizer,
    head_config,
    policy_for,
    random_state,
    tiny_head,
)

PROMPT = [*range(40, 52)]
pytestmark = pytest.mark.usefixtures("one_thread")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer, one state": {
        "num_layers": 1,
        "layer_ids": (4,),
        "windows": (0,),
        "causal": (False,),
    },
    "windows": {"windows": (4, 0, 9), "causal": (True, False, True)},
    "windows both ways": {"windows": (4, 4, 4)},
    "causal": {"causal": (True, True, True)},
    "biases": {"qkv_bias": True, "o_bias": True, "rms_norm_eps": 1e-3},
    "two positions": {"block_size": 2},
}


def draft_for(target: HuggingFaceTarget, config: DflashConfig, cls: Any = Dflash) -> Any:
    return cls(tiny_head(config), target.lm)


# ---------------------------------------------------------------------------------------------------- the block


def norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps) * weight


def turned(heads: Tensor, positions: Tensor, theta: float, share: float = 1.0) -> Tensor:
    """Rotate pairs (i, i + half) of [rows, heads, size] by the positions of the rows, the first share of the pairs."""
    half = heads.shape[-1] // 2
    turns = theta ** (-torch.arange(half) / half) * (torch.arange(half) < share * half)
    angles = positions[:, None, None] * turns
    first, second = heads[..., :half], heads[..., half:]
    turn = angles.cos(), angles.sin()
    return torch.cat([first * turn[0] - second * turn[1], second * turn[0] + first * turn[1]], -1)


def convolved(
    rows: Tensor,
    source: Tensor,
    layer: dict[str, Tensor],
    name: str,
    side: int,
    config: DflashConfig,
) -> Tensor:
    """DFlash2's convolution before (side 0) or after a part of a layer, channel by channel; the rows without one."""
    if not config.taps:
        return rows
    base = layer[f"{name}_conv.base_kernel"][side]
    groups = config.hidden_size // config.group_size
    dynamic = (source @ layer[f"{name}_conv.kernel_projection.weight"].T).view(
        len(rows), 2, config.taps, groups
    )
    out = torch.zeros_like(rows)
    for row in range(len(rows)):
        for tap in range(min(config.taps, row + 1)):
            for channel in range(config.hidden_size):
                kernel = base[tap, channel] + dynamic[row, side, tap, channel // config.group_size]
                out[row, channel] += kernel * rows[row - tap, channel]
    return out


def block_logits(
    weights: dict[str, Tensor], config: DflashConfig, model: PreTrainedModel, tokens: list[int]
) -> Tensor:
    """Logits of the positions after `tokens` that masks stand for."""
    states = block_states(weights, config, model, tokens)
    return model.get_output_embeddings()(states[1:])


@torch.inference_mode()
def block_states(
    weights: dict[str, Tensor], config: DflashConfig, model: PreTrainedModel, tokens: list[int]
) -> Tensor:
    """States after `tokens`, the last of which is the block's first, by the paper's section on the architecture.

    Every row of the context and of the block is computed anew, head by head.
    """
    known, last = tokens[:-1], tokens[-1]
    eps, theta = config.rms_norm_eps, config.rope["rope_theta"]
    share = config.rope.get("partial_rotary_factor", 1.0)
    activation = torch.nn.functional.silu
    if config.hidden_act == "gelu_pytorch_tanh":
        activation = partial(torch.nn.functional.gelu, approximate="tanh")
    features = torch.zeros(0, 32 * config.num_features)
    if known:
        states = model(torch.tensor([known]), output_hidden_states=True).hidden_states
        assert config.layer_ids is not None
        features = torch.cat([states[i][0] for i in config.layer_ids], -1)
    context = norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    block = torch.tensor([last] + [MASK] * (config.block_size - 1))
    hidden, count, size = model.get_input_embeddings().weight[block], len(known), config.head_dim
    hidden = hidden * math.sqrt(config.hidden_size) if config.gemma4 else hidden
    places = torch.arange(count + len(block))
    for number in range(config.num_layers):
        prefix = f"layers.{number}."
        layer = {
            name.removeprefix(prefix): weight
            for name, weight in weights.items()
            if name.startswith(prefix)
        }

        def project(
            name: str, rows: Tensor, *, normed: bool, layer: dict[str, Tensor] = layer
        ) -> Tensor:
            out = rows @ layer[f"self_attn.{name}_proj.weight"].T
            out = out + layer.get(f"self_attn.{name}_proj.bias", torch.zeros(()))
            heads = out.unflatten(-1, (-1, size))
            return norm(heads, layer[f"self_attn.{name}_norm.weight"], eps) if normed else heads

        normed = norm(hidden, layer["input_layernorm.weight"], eps)
        rows = convolved(normed, normed, layer, "attention", 0, config)
        seen = torch.cat([context, rows])
        query = turned(project("q", rows, normed=True), places[count:], theta, share)
        key = turned(project("k", seen, normed=True), places, theta, share)
        value = project("k" if config.shared_values else "v", seen, normed=False)
        if config.gemma4:
            value = norm(value, torch.ones(size), eps)
        attended = []
        for row, at in enumerate(places[count:].tolist()):
            for head in range(config.num_heads):
                group = head // (config.num_heads // config.num_kv_heads)
                scores = key[:, group] @ query[row, head] / (1 if config.gemma4 else size**0.5)
                for other in places.tolist():
                    window = config.windows[number]
                    if (window and other <= at - window) or (config.causal[number] and other > at):
                        scores[other] = -torch.inf
                attended.append(scores.softmax(0) @ value[:, group])
        out = torch.cat(attended).view(len(block), -1) @ layer["self_attn.o_proj.weight"].T
        out = out + layer.get("self_attn.o_proj.bias", torch.zeros(()))
        out = convolved(out, normed, layer, "attention", 1, config)
        before_mlp = "post_attention_layernorm.weight"
        if config.gemma4:
            out = norm(out, layer[before_mlp], eps)
            before_mlp = "pre_feedforward_layernorm.weight"
        hidden = hidden + out
        normed = norm(hidden, layer[before_mlp], eps)
        rows = convolved(normed, normed, layer, "mlp", 0, config)
        gate = activation(rows @ layer["mlp.gate_proj.weight"].T)
        up = rows @ layer["mlp.up_proj.weight"].T
        out = (gate * up) @ layer["mlp.down_proj.weight"].T
        out = convolved(out, normed, layer, "mlp", 1, config)
        if config.gemma4:
            out = norm(out, layer["post_feedforward_layernorm.weight"], eps)
        hidden = (hidden + out) * layer.get("layer_scalar", torch.ones(1))
    return norm(hidden, weights["norm.weight"], eps)


class Checking(Dflash):
    """Compares all positions of every block with the recomputed ones; may propose what the target will choose."""

    worst, checked = 0.0, 0

    def root(self, tree: TokenTree) -> Step:
        filled = self.cache.length
        stable = self.cache.slab[:, :, :, :filled].clone()
        step = super().root(tree)
        assert torch.equal(self.cache.slab[:, :, :, :filled], stable)
        if step.token_ids is None and step.logits.shape[1] > 1:
            tokens = [*self._tokens, int(tree.tokens[0])]
            expected = block_logits(
                self.weights_of(), self.head.config, self.target.model, tokens
            ).log_softmax(-1)
            rows = step.logits if step.further is None else torch.cat([step.logits, step.further])
            self.worst = max(self.worst, float((rows - expected).abs().max()))
            self.checked += 1
        return step

    def weights_of(self) -> dict[str, Tensor]:
        return self.head.module.state_dict()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_block_is_what_the_paper_computes(variant: str) -> None:
    target = HuggingFaceTarget(deep())
    draft = draft_for(target, config_of(**VARIANTS[variant]), Checking)
    Engine(target, draft, policies.make("ddtree", budget=12, block=4)).generate(
        PROMPT, max_new_tokens=12
    )
    assert draft.checked >= 3
    assert draft.worst < 1e-4


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_native_pass_is_what_the_paper_computes(variant: str) -> None:
    config, target = config_of(**VARIANTS[variant]), NativeTarget(from_model(deep()))
    state = random_state(config)
    draft = Checking(NativeDflashHead(config, state, target.lm), target.lm)
    draft.weights_of = lambda: state  # type: ignore[method-assign]
    policy = policies.make("ddtree", budget=12, block=4)
    Engine(target, draft, policy).generate(PROMPT, max_new_tokens=12)
    assert draft.checked >= 3
    assert draft.worst < 1e-4


def test_which_heads_run_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, kinds, add = from_model(deep().bfloat16()), set(), native_lm.add_weight
    monkeypatch.setattr(native_lm, "add_weight", lambda *weight: kinds.add(add(*weight)))
    for config in (*(config_of(**variant) for variant in VARIANTS.values()), config_of(taps=3)):
        state = random_state(config)
        checkpoint = Checkpoint(config, state, HeadReading("", "", ""))
        head = Dflash.of(checkpoint, lm, "").head
        assert type(head) is NativeDflashHead
        assert head.cache.slab.dtype is torch.bfloat16
        assert kinds == {"i8", ""}  # matrices, vectors
        assert not [name for name in head.module.state_dict() if "layers" in name]
    config = config_of(hidden_act="gelu_new")
    with pytest.raises(UnsupportedModelError, match="a DFlash head with activation gelu_new"):
        NativeDflashHead(config, random_state(config), lm)
    checkpoint = Checkpoint(config, random_state(config), HeadReading("", "", ""))
    assert type(Dflash.of(checkpoint, lm, "").head) is DflashHead


GEMMA4: dict[str, Any] = {
    "gemma4": True,
    "shared_values": True,
    "hidden_act": "gelu_pytorch_tanh",
    "rope": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
SHAPES: dict[str, dict[str, Any]] = {
    "whole tile": {"block_size": 16},
    "more than two": {"block_size": 33, "windows": (5, 0, 40), "causal": (True, False, False)},
    "one key-value head": {"block_size": 9, "num_kv_heads": 1, "windows": (3, 3, 0)},
    "other sizes": {
        "hidden_size": 36,
        "target_hidden_size": 36,
        "intermediate_size": 50,
        "num_heads": 6,
        "num_kv_heads": 3,
        "head_dim": 10,
        "taps": 3,
        "group_size": 6,
        "block_size": 11,
        "qk_norm": False,
    },
    "Gemma 4": GEMMA4 | {"num_kv_heads": 1, "block_size": 11},
    "Gemma 4, values of their own": GEMMA4 | {"shared_values": False, "qkv_bias": True},
    "taps, groups: 1, 1": {"taps": 1},
    "taps, groups: 2, 32": {"taps": 2, "group_size": 32, "causal": (True, False, True)},
    "taps, groups: 4, 8": {"taps": 4, "group_size": 8, "windows": (6, 6, 6), "block_size": 21},
    "more taps than rows": {"taps": 4, "group_size": 2, "block_size": 2},
}


def small_kernels(config: DflashConfig) -> dict[str, Tensor]:
    """Random weights, with kernels so small that products of convolved rows do not add up to large states."""
    return {
        name: tensor * (0.2 if "kernel_projection" in name else 1.0)
        for name, tensor in random_state(config).items()
    }


@torch.inference_mode()
def blocks_of(head: DflashHead, *, pieces: tuple[int, ...] = (21, 1, 40)) -> Tensor:
    """States of a block after each piece of a text, and keys and values of the whole text, side by side."""
    random, end, config = torch.Generator().manual_seed(5), 0, head.config
    head.cache.reserve(160)
    head.cache.slab.fill_(torch.nan)
    states = []
    for rows in pieces:
        features = torch.randn(
            rows, config.num_features * config.target_hidden_size, generator=random
        )
        tokens = torch.zeros(rows, dtype=torch.int64)
        head._prefill(features, tokens, torch.arange(end, end + rows))
        end += rows
        block = torch.randn(config.block_size, config.hidden_size, generator=random)
        states.append(head._run_block(block, end).flatten())
    return torch.cat([*states, head.cache.slab[:, :, :, :end].float().flatten()])


@pytest.mark.parametrize("shape", SHAPES)
def test_states_keys_and_values_are_those_of_the_network(shape: str) -> None:
    config = config_of(**SHAPES[shape])
    lm, state = from_model(deep(hidden_size=config.hidden_size)), small_kernels(config)
    network = head_from(config, state, torch.float32, torch.device("cpu"))
    expected = blocks_of(DflashHead(network, lm, pack=False))
    native = NativeDflashHead(config, state, lm)
    computed = blocks_of(native)
    torch.testing.assert_close(computed, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(blocks_of(copy.copy(native)), computed)


def test_every_tensor_and_tap_changes_the_states() -> None:
    config = config_of(taps=3, group_size=8, windows=(5, 0, 5), causal=(True, False, False))
    lm, state = from_model(deep()), small_kernels(config)
    states = blocks_of(NativeDflashHead(config, state, lm), pieces=(9,))
    changes = {name: tensor * 1.5 + 0.25 for name, tensor in state.items()}
    for name, tensor in state.items():
        for place in range(6 if name.endswith("base_kernel") else 0):  # of sides and taps
            changed = tensor.clone()
            changed.view(6, 32)[place, 3] += 0.5
            changes[f"{name}:{place}"] = changed
    for name, changed in changes.items():
        head = NativeDflashHead(config, state | {name.partition(":")[0]: changed}, lm)
        assert (blocks_of(head, pieces=(9,)) - states).abs().max() > 1e-3, name
    for field, value in (("windows", (5, 0, 6)), ("causal", (True, True, False))):
        head = NativeDflashHead(replace(config, **{field: value}), state, lm)
        assert (blocks_of(head, pieces=(9,)) - states).abs().max() > 1e-3, field


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_several_texts_in_one_pass_are_those_of_each_alone(dtype: torch.dtype) -> None:
    config, random = config_of(taps=3, windows=(4, 0, 9)), torch.Generator().manual_seed(3)
    lm = from_model(deep().to(dtype))
    heads = [NativeDflashHead(config, small_kernels(config), lm)]
    heads += [copy.copy(heads[0]) for _ in range(2)]
    alone, blocks, places, starts = [], [], [], [7, 30, 1]
    for head, start, rows in zip(heads, starts, (6, 11, 5), strict=True):
        head.cache.reserve(48)
        features = torch.randn(start, 3 * 32, generator=random)
        head._prefill(features, torch.zeros(start, dtype=torch.int64), torch.arange(start))
        blocks.append(torch.randn(rows, 32, generator=random))
        places.append(torch.arange(start, start + rows))
        alone.append(head._run_block(blocks[-1], start))
    together = torch.empty(22, 32)
    slabs = tuple(head.cache.slab for head in heads)
    decoder, given = heads[0].weights_of, torch.cat(blocks)
    arguments = tuple(places), starts, starts, (None,) * 3, given, slabs, together, None, 2
    decoder.forward_from(*arguments)
    assert torch.equal(together, torch.cat(alone))
    words = torch.ones(6, 1, dtype=torch.int64), None, None
    with pytest.raises(ValueError, match="None, as layers say what rows see"):
        decoder.forward_from(*arguments[:3], words, *arguments[4:])


@torch.inference_mode()
def test_the_cache_after_accepted_paths_of_any_length_is_that_of_a_fresh_draft() -> None:
    """After a partial acceptance, cycles without a draft pass, and rows beyond the room of one pass."""
    target = HuggingFaceTarget(deep())
    draft, text = draft_for(target, config_of(), Checking), list(PROMPT)
    target.want(draft.traits.features)
    target.reserve(256, 8)
    draft.begin(text, target.prefill(text))
    root = 7
    for number, accepted in enumerate([0, 3, 1, 5, 2, 0, 4]):
        tree = TokenTree.root(root, 8)
        if number % 3 != 2:
            draft.root(tree)
        frontier = tree.root_alone()
        for depth in range(5):
            token = torch.tensor([(root * 31 + depth) % VOCABULARY])
            frontier = tree.add(frontier.ids[:1], token, torch.zeros(1))
        _, features = target.verify(tree)
        path = list(range(accepted + 1))
        tokens = [*tree.tokens[1 : accepted + 1].tolist(), (root * 17 + 5) % VOCABULARY]
        target.commit(tree, path)
        draft.accept(Cycle(tree, path, tokens, Seconds(), features=features))
        text, root = [*text, root, *tokens[:-1]], tokens[-1]
        assert draft._tokens == text
    assert draft.worst < 1e-4
    fresh = draft_for(target, config_of())
    target.reset()
    fresh.begin(text, target.prefill(text))
    tree = TokenTree.root(root, 8)
    steps = [one.root(tree) for one in (draft, fresh)]
    assert (steps[0].further - steps[1].further).abs().max() < 1e-4
    slots = len(text)
    assert draft.cache.length == fresh.cache.length == slots
    slabs = [one.cache.slab[:, :, :, :slots] for one in (draft, fresh)]
    assert (slabs[0] - slabs[1]).abs().max() < 1e-4


@torch.inference_mode()
def test_memory_that_was_never_written_is_not_read() -> None:
    target, rows = HuggingFaceTarget(deep()), []
    for poison in (0.0, float("nan")):
        draft = draft_for(target, config_of(windows=(4, 0, 9)))
        target.want(draft.traits.features)
        target.reset()
        draft.begin(PROMPT, target.prefill(PROMPT))
        draft.cache.reserve(256)
        draft.cache.slab[:, :, :, draft.cache.length :] = poison
        rows.append(draft.root(TokenTree.root(7, 32)).further)
    assert torch.equal(*rows)


@torch.inference_mode()
def test_a_long_prompt_is_taken_in_by_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    target, rows = HuggingFaceTarget(deep()), []
    prompt = [(7 * i) % VOCABULARY for i in range(40)]
    for most in (1024, 7):
        monkeypatch.setattr("specengine.models.eagle.PREFILL_ROWS", most)
        draft = draft_for(target, config_of(windows=(4, 0, 9)))
        target.want(draft.traits.features)
        target.reset()
        draft.begin(prompt, target.prefill(prompt))
        rows.append(draft.root(TokenTree.root(3, 4)).further)
    assert (rows[0] - rows[1]).abs().max() < 1e-4


@torch.inference_mode()
def test_nodes_get_the_distribution_of_their_depth_and_none_beyond_the_block() -> None:
    target = HuggingFaceTarget(deep())
    draft = draft_for(target, config_of())
    target.want(draft.traits.features)
    draft.begin(PROMPT, target.prefill(PROMPT))
    tree = TokenTree.root(7, 16)
    step = draft.root(tree)
    assert step.normalized
    assert step.further is not None
    assert step.further.shape == (BLOCK - 2, VOCABULARY)
    assert torch.allclose(step.logits.exp().sum(), torch.ones(()))
    frontier = tree.root_alone()
    for depth in range(1, BLOCK + 1):
        frontier = tree.add(frontier.ids[:1], torch.tensor([depth]), torch.zeros(1))
        row = draft.step(tree, frontier).logits
        if depth < BLOCK - 1:
            assert torch.equal(row[0], step.further[depth - 1])
        else:
            assert (row == -torch.inf).all()
    mixed = draft.step(tree, Nodes.of(torch.tensor([3, 1]))).logits
    assert torch.equal(mixed, step.further[[2, 0]])


# ---------------------------------------------------------------------------------------------------- answers


@pytest.mark.sliced
@pytest.mark.parametrize("policy", POLICIES)
def test_answers_equal_plain_decoding(policy: str) -> None:
    target = HuggingFaceTarget(deep())
    engine = Engine(target, draft_for(target, config_of()), policy_for(policy))
    plain = Engine(HuggingFaceTarget(deep()), None, None)
    for options in ({}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 5}):
        for prompt in ([5], [5, 6], PROMPT, [9] * 30):
            expected = plain.generate(prompt, max_new_tokens=14, **options)
            result = engine.generate(prompt, max_new_tokens=14, **options)
            assert result.token_ids == expected.token_ids


class Knowing(Dflash):
    """Proposes the answer that plain decoding gives, with one token in five wrong, so that paths end anywhere."""

    answer: list[int]

    def root(self, tree: TokenTree) -> Step:
        step = super().root(tree)
        if self._rows.shape[1] == 1:
            return step
        at = len(self._tokens) + 1
        for row, token in enumerate(self.answer[at : at + len(self._rows) - 1]):
            self._rows[row].fill_(-20.0)
            self._rows[row, (token + ((at + row) % 5 == 0)) % VOCABULARY] = 0.0
        return Step(self._rows[:1], normalized=True, further=self._rows[1:-1])


@pytest.mark.parametrize("policy", ["ddtree", "caddtree", "chain", "auto", "eagle"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "drawn"])
def test_accepted_blocks_and_stops_inside_them(policy: str, options: dict[str, Any]) -> None:
    model = deep()
    expected = Engine(HuggingFaceTarget(model), None, None).generate(
        PROMPT, max_new_tokens=40, **options
    )
    target = HuggingFaceTarget(deep())
    draft = draft_for(target, config_of(), Knowing)
    draft.answer = [*PROMPT, *expected.token_ids]
    engine = Engine(target, draft, policy_for(policy))
    result = engine.generate(PROMPT, max_new_tokens=40, **options)
    assert result.token_ids == expected.token_ids
    if policy != "auto":
        assert result.stats.num_spec_steps < 40 / 1.5
    for stop in (7, 8, 9):
        end = expected.token_ids[stop]
        cut = engine.generate(PROMPT, max_new_tokens=40, eos_token_id=end, **options)
        first = expected.token_ids.index(end)
        assert cut.token_ids == expected.token_ids[: first + 1]


def test_turns_and_forgetting() -> None:
    target = HuggingFaceTarget(deep())
    draft, tokenizer = draft_for(target, config_of(), Checking), byte_tokenizer()
    session = Engine(target, draft, policies.make("ddtree", budget=9, block=3), tokenizer).session()
    for turn, text in enumerate(("Hi", "And now?", "Bye")):
        messages = [*session.messages, {"role": "user", "content": text}]
        result = session.generate(text, max_new_tokens=7)
        fresh = Engine(HuggingFaceTarget(deep()), None, None, tokenizer)
        assert result.token_ids == fresh.generate(messages, max_new_tokens=7).token_ids
        assert (result.stats.num_cached_prompt_tokens > 0) == (turn > 0)
    assert draft.worst < 1e-4
    held = draft.cache.nbytes
    draft.cache.reserve(4096)
    assert draft.cache.nbytes > held
    assert cache_of(draft) is draft.cache
    forget(draft)
    assert (draft.cache.length, draft.cache.nbytes) == (0, held)
    assert draft._tokens == []


@pytest.mark.parametrize("cut", [0, 1, 5, 11, 14])
@torch.inference_mode()
def test_a_prompt_that_leaves_the_last_one_is_run_again_from_there(cut: int) -> None:
    target = HuggingFaceTarget(deep())
    draft = draft_for(target, config_of(), Checking)
    Engine(target, draft, policies.make("ddtree", budget=9, block=3)).generate(
        PROMPT, max_new_tokens=4
    )
    prompt = [*target.tokens[:cut], 99, 98, 97]
    cached = min(target.cached(prompt), draft.cached(prompt))
    assert cached >= cut - 1
    draft.begin(prompt, target.prefill(prompt, cached))
    draft.root(TokenTree.root(3, 8))
    assert draft.worst < 1e-4


@torch.inference_mode()
def test_copies_draft_for_texts_of_their_own() -> None:
    target = HuggingFaceTarget(deep())
    draft = draft_for(target, config_of(), Checking)
    target.want(draft.traits.features)
    draft.begin(PROMPT, target.prefill(PROMPT))
    twin: Any = another(draft)
    copy_prompt(twin, draft, len(PROMPT) - 2)
    assert twin.cache is not draft.cache
    target.reset()
    prompt = [*PROMPT[:-2], 3, 4]
    twin.begin(prompt, target.prefill(prompt)[twin.cached(prompt) :])  # type: ignore[index]
    twin.root(TokenTree.root(9, 8))
    draft.root(TokenTree.root(8, 8))
    assert (twin.checked, draft.checked) == (1, 1)
    assert max(twin.worst, draft.worst) < 1e-4


# ---------------------------------------------------------------------------------------------------- on disk

RAW: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 2, 4]},
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 40,
    "layer_types": ["full_attention"] * 3,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_target_layers": LAYERS,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,
}


def written(folder: Path, raw: dict[str, Any], config: DflashConfig | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(random_state(config or config_of()), folder / "model.safetensors")
    return folder


def changed(**changes: Any) -> dict[str, Any]:
    raw = copy.deepcopy(RAW)
    raw["dflash_config"] |= changes.pop("dflash_config", {})
    return raw | changes


NEAR, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("raw", "changes"),
    [
        (RAW, {}),
        (changed(block_size=None, dflash_config={"block_size": BLOCK, "use_swa": False}), {}),
        (changed(rope_theta=None, rope_parameters={"rope_theta": 10000.0}), {}),
        (changed(architectures=["LlamaForCausalLM"]), {}),
        (
            changed(layer_types=[NEAR, FULL, NEAR], sliding_window=9),
            {"windows": (9, 0, 9), "causal": (True, False, True)},
        ),
        (changed(layer_types=[NEAR] * 3, sliding_window=9, is_causal=False), {"windows": (9,) * 3}),
        (changed(dflash_config={"causal": True}), {"causal": (True,) * 3}),
    ],
    ids=["flat", "nested", "rope", "by its field", "windows", "both ways", "causal"],
)
def test_published_configs_are_read(
    tmp_path: Path, raw: dict[str, Any], changes: dict[str, Any]
) -> None:
    head = load_head(written(tmp_path, raw))
    assert is_head(tmp_path)
    assert head.config == config_of(**changes)
    assert str(head.dialect) == "DFlash, dflash layout, fields as dflash means them"
    assert head.dialect.notes == (
        "layer ids 1, 2, 4 of the config count layers; as transformers counts hidden states, from the embeddings, "
        "the head reads 2, 3, 5",
    )
    assert all(torch.equal(head.state[key], t) for key, t in random_state(config_of()).items())


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (changed(block_size=None), "block_size: got None"),
        (changed(block_size=1), "block_size: got 1, accepted 2 to 64"),
        (changed(dflash_config={"mask_token_id": VOCABULARY}), "mask_token_id: got 260"),
        (changed(dflash_config={"target_layer_ids": []}), "target_layer_ids: is missing"),
        (changed(dflash_config={"use_swa": True}), "dflash_config: unknown 'use_swa', known are "),
        (
            changed(dflash_config={"selector_rank": 4, "conv_kernel_size": 2}),
            "conv_group_size: got None, accepted a whole number",
        ),
        (changed(layer_types=[FULL]), "layer_types: got"),
        (changed(layer_types=[NEAR, FULL, "linear_attention"]), "layer_types: got"),
        (changed(layer_types=[NEAR] * 3), "sliding_window: got None"),
        (changed(is_causal=3), "is_causal: got 3, accepted true or false"),
        (changed(num_hidden_layers=0), "num_hidden_layers: got 0"),
    ],
)
def test_configs_that_say_too_little_or_what_is_not_known_are_refused(
    tmp_path: Path, raw: dict[str, Any], problem: str
) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: ") as refused:
        load_head(written(tmp_path, raw))
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"norm.weight": None}, "missing: norm.weight [32]"),
        ({"lm_head.weight": torch.zeros(VOCABULARY, 32)}, "unused: lm_head.weight [260, 32]"),
        (
            {"fc.weight": torch.zeros(32, 64)},
            "mis-shaped: fc.weight [32, 64] instead of [32, 96]",
        ),
        ({"layers.2.self_attn.q_norm.weight": None}, "layers.2.self_attn.q_norm.weight [8]"),
        ({"layers.3.mlp.up_proj.weight": torch.zeros(1)}, "unused: layers.3.mlp.up_proj.weight"),
        ({"norm.weight": torch.full((32,), torch.nan)}, "not finite: norm.weight"),
    ],
)
def test_other_tensors_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    file = written(tmp_path, RAW) / "model.safetensors"
    tensors = load_file(file) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(CheckpointError, match=r"a head of DFlash of width 32; ") as refused:
        load_head(tmp_path)
    assert problem in str(refused.value)


def test_a_folder_is_loaded_as_the_draft(tmp_path: Path) -> None:
    model, folder = deep(), written(tmp_path / "head", RAW)
    expected = Engine(HuggingFaceTarget(deep()), None, None).generate(PROMPT, max_new_tokens=12)
    for policy in (None, "ddtree", "caddtree", "chain"):
        engine = Engine.from_pretrained(model, draft=str(folder), policy=policy)
        result = engine.generate(PROMPT, max_new_tokens=12)
        assert result.token_ids == expected.token_ids
        assert result.stats.draft.startswith("eagle (DFlash, head)")
    other = Engine.from_pretrained(
        model, draft=str(folder), draft_options={"layer_ids": (1, 2, 3)}, policy="ddtree"
    )
    assert other.drafter is not None
    assert other.drafter.traits.features == (1, 2, 3)
    assert HeadOptions().layer_ids is None


MUSE: dict[str, Any] = {
    "family": "muse_glimmer_text",
    "layer_types": None,
    "layer_rope_theta": None,
    "sliding_window": 9,
}


@pytest.mark.parametrize(
    ("dtype", "target"), [("float32", {}), ("bfloat16", {}), ("float32", MUSE), ("bfloat16", MUSE)]
)
def test_the_native_forward_takes_it_for_several_texts_at_once(
    tmp_path: Path, dtype: str, target: dict[str, Any]
) -> None:
    folder, name = written(tmp_path / "head", RAW), str(tmp_path / "model")
    deep(**target).save_pretrained(name)
    byte_tokenizer().save_pretrained(name)
    options: dict[str, Any] = {"dtype": dtype}
    plain = Engine.from_pretrained(name, policy="plain", **options)
    prompts = [PROMPT, PROMPT[:5], [9] * 20, [5]]
    for lookup in (False, True):
        engine = Engine.from_pretrained(
            name, draft=str(folder), policy="ddtree", lookup=lookup, **options
        )
        assert isinstance(engine.target, NativeTarget)
        for sampling in ({}, {"temperature": 0.8, "seed": 4}):
            answers = Pool(engine, 2).generate(prompts, max_new_tokens=14, **sampling)
            for prompt, answer in zip(prompts, answers, strict=True):
                expected = plain.generate(prompt, max_new_tokens=14, **sampling)
                assert answer.token_ids == expected.token_ids


@torch.inference_mode()
def test_a_target_that_norms_its_embeddings_drafts_alike_on_both_forwards() -> None:
    """As a head of Muse-Glimmer reads embeddings that are not normed."""
    model, draws = deep(**MUSE), []
    native = Engine.from_pretrained(model, policy="plain").target
    assert isinstance(native, NativeTarget)
    for target in (HuggingFaceTarget(model), native):
        draft = draft_for(target, config_of())  # type: ignore[arg-type]
        target.want(draft.traits.features)
        draft.begin(PROMPT, target.prefill(PROMPT))
        tree = TokenTree.root(3, 1)
        draft.root(tree)
        draws.append(draft._rows[:-1].argsort(descending=True, stable=True)[:, :8])
    assert torch.equal(*draws)


def test_a_head_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="hidden size 32, this one has 64"):
        Engine.from_pretrained(deep(hidden_size=64), draft=str(written(tmp_path, RAW)))
    ids = {"target_layer_ids": [1, 2, LAYERS - 1]}
    folder = written(tmp_path / "beyond", changed(dflash_config=ids))
    with pytest.raises(InputError, match="it reads hidden states 2, 3, 6; a target of 6 layers"):
        Engine.from_pretrained(deep(), draft=str(folder))
    with pytest.raises(InputError, match="does not learn from use"):
        Engine.from_pretrained(
            deep(), draft=str(written(tmp_path, RAW)), learn=str(tmp_path / "learnt")
        )
    with pytest.raises(UnsupportedModelError, match="a DFlash head is run without graphs"):
        Engine.from_pretrained(deep(), draft=str(written(tmp_path, RAW)), graphs=True)


def test_the_command_line_describes_a_head(tmp_path: Path, capsys: Any) -> None:
    folder, model = written(tmp_path / "head", RAW), deep()
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    words = ["doctor", "--inspect", "--json", "--model", str(tmp_path / "model")]
    assert main([*words, "--draft", str(folder)]) == 0
    draft = json.loads(capsys.readouterr().out)["draft"]
    assert draft["dialect"] == "DFlash, dflash layout, fields as dflash means them"
    assert "fc.weight float32 [32, 96]" in draft["tensors"]
    assert "block_size=6" in draft["config"]
    assert "agreement" not in draft


WRITTEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperatures": {"temperatures": (1.5, 0.8)},
    "windows that see backwards": {"windows": (4, 0, 4), "causal": (True, False, True)},
    "windows both ways": {"windows": (4, 4, 4)},
    "causal": {"causal": (True, True, True)},
    "biases": {"qkv_bias": True, "o_bias": True, "rms_norm_eps": 1e-3},
    "rotary set": {"rope": LLAMA3},
}


@pytest.mark.parametrize("variant", WRITTEN)
def test_a_written_head_is_read_back(tmp_path: Path, variant: str) -> None:
    config = config_of(**WRITTEN[variant])
    state = random_state(config)
    save_head(config, state, tmp_path)
    read = load_head(tmp_path)
    assert read.config == config
    assert all(torch.equal(read.state[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("variant", "field"),
    [
        ({"windows": (4, 0, 9)}, "windows"),
        ({"causal": (True, False, False)}, "causal"),
        ({"qkv_bias": True}, "qkv_bias"),
    ],
)
def test_what_the_layout_has_no_word_for_is_not_written(
    tmp_path: Path, variant: dict[str, Any], field: str
) -> None:
    config = config_of(**variant)
    with pytest.raises(CheckpointError, match=f"{field}: the dflash layout has no field for it"):
        save_head(config, random_state(config), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", ["official", "speculators"])
def test_a_head_is_not_written_in_another_layout(tmp_path: Path, layout: str) -> None:
    message = f"layout: got {layout}, accepted dflash for DFlash heads"
    with pytest.raises(CheckpointError, match=message):
        save_head(config_of(), random_state(config_of()), tmp_path / "out", layout)
    eagle = head_config()
    with pytest.raises(CheckpointError, match="got dflash, accepted official for EAGLE-3 heads"):
        save_head(eagle, random_state(eagle), tmp_path / "out", "dflash")
    assert not (tmp_path / "out").exists()


@torch.inference_mode()
def test_temperatures_are_of_depths_and_the_last_one_of_those_below() -> None:
    target, rows = HuggingFaceTarget(deep()), []
    for temperatures in ((), (2.0, 0.5)):
        draft = draft_for(target, config_of(temperatures=temperatures))
        target.want(draft.traits.features)
        target.reset()
        draft.begin(PROMPT, target.prefill(PROMPT))
        step = draft.root(TokenTree.root(7, 32))
        rows.append(torch.cat([step.logits, step.further]))
    divided = rows[0] / torch.tensor([2.0, 0.5, 0.5, 0.5, 0.5])[:, None]
    torch.testing.assert_close(rows[1], divided.log_softmax(-1))


# ---------------------------------------------------------------------------------------------------- Muse-Glimmer


def glimmer(folder: Path, **changes: Any) -> MuseGlimmerAssistantModel:
    """Write a random assistant of Muse-Glimmer as transformers writes it, and return it."""
    torch.manual_seed(0)
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 7,
        "block_size": BLOCK,
        "mask_token_id": MASK - 2,
        "target_layer_ids": [1, 2, 4],
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**(fields | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.rand_like(parameter) + 0.5
                if parameter.ndim < 2
                else torch.randn_like(parameter) * 1.5 / parameter.shape[-1] ** 0.5
            )
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
@pytest.mark.parametrize("kinds", [None, [NEAR, FULL, NEAR]])
def test_an_assistant_of_muse_glimmer_gives_what_transformers_computes(
    tmp_path: Path, kinds: list[str] | None
) -> None:
    assistant = glimmer(tmp_path / "head", layer_types=kinds)
    base = load_head(tmp_path / "head")
    assert is_head(tmp_path / "head")
    assert base.config.windows == ((8, 8, 8) if kinds is None else (8, 0, 8))
    assert any("no vocab_size" in note for note in base.dialect.notes)
    model = deep("muse_glimmer_text", layer_types=[NEAR, FULL] * 3, layer_rope_theta=[1e4, 0] * 3)
    known, table = [(7 * i) % VOCABULARY for i in range(20)], model.get_input_embeddings().weight
    states = model.model(torch.tensor([known]), output_hidden_states=True).hidden_states
    block = torch.tensor([7, *[MASK - 2] * (BLOCK - 1)])
    cache = DFlashCache(config=assistant.config)
    cache.set_previous_accepted_tokens(len(known))
    out = assistant(
        noise_embeds=table[block][None],
        context_hidden_states=torch.cat([states[i] for i in (2, 3, 5)], -1),
        position_ids=torch.arange(20 + BLOCK)[None],
        past_key_values=cache,
    ).last_hidden_state[0, 1:]
    cap, factor = model.config.final_logit_softcapping, model.config.output_multiplier
    logits = cap * torch.tanh(model.get_output_embeddings()(out) * factor / cap)
    for target in (HuggingFaceTarget(model), NativeTarget(from_model(model))):
        draft = Dflash.of(base, target.lm, "")
        kind = NativeDflashHead if isinstance(target, NativeTarget) else DflashHead
        assert type(draft.head) is kind
        target.want(draft.traits.features)
        draft.begin(known, target.prefill(known))
        step = draft.root(TokenTree.root(7, 32))
        rows = torch.cat([step.logits, step.further])
        torch.testing.assert_close(rows, logits.log_softmax(-1), atol=1e-4, rtol=1e-4)


def test_tensors_of_an_assistant_of_muse_glimmer_are_listed_under_their_names(
    tmp_path: Path,
) -> None:
    glimmer(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    for change, problem in (
        ({"encoder.fc.weight": None}, "missing: encoder.fc.weight [32, 96]"),
        ({"encoder.output_norm_enc.weight": torch.ones(3)}, "encoder.output_norm_enc.weight [3]"),
        ({"lm_head.weight": torch.ones(VOCABULARY, 32)}, "unused: lm_head.weight [260, 32]"),
    ):
        tensors = {n: t for n, t in (whole | change).items() if t is not None}
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match="a head of DFlash of width 32; ") as refused:
            load_head(tmp_path)
        assert problem in str(refused.value)
