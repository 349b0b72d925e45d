"""Toys to decode with: targets and drafts made of probability tables, random trees, tiny random models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated

from specengine import policies
from specengine.costs import PassCosts
from specengine.drafters import Drafter
from specengine.errors import UnsupportedModelError
from specengine.models import Target
from specengine.models.configs import auto_class
from specengine.models.eagle import EagleConfig, EagleHead, head_from
from specengine.ops import Nodes
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree
from specengine.policies import TreePolicy
from specengine.policies.baselines.specdecpp import Specdecpp
from specengine.records import Cycle

CPU = torch.device("cpu")

# ---------------------------------------------------------------------------------------------------- tables


class Tables:
    """Random conditional distributions over `vocabulary` tokens: one row for each sequence of the last `order` tokens.

    concentration  of the Dirichlet distribution that rows come from
    exact          share of rows with exact zeros, or with one token of probability one, or with ties
    like, share    a mixture: `share` of each row comes from the tables `like`, so that a draft agrees now and then
    """

    def __init__(
        self,
        vocabulary: int = 6,
        seed: int = 0,
        *,
        concentration: float = 0.5,
        exact: float = 0.0,
        order: int = 3,
        like: Tables | None = None,
        share: float = 0.0,
    ) -> None:
        self.vocabulary, self.seed, self.order = vocabulary, seed, order
        self._concentration, self._exact, self._like, self._share = (
            concentration,
            exact,
            like,
            share,
        )
        self._rows: dict[tuple[int, ...], np.ndarray] = {}

    def probabilities(self, context: Sequence[int]) -> np.ndarray:
        """float64 [vocabulary]: the distribution after `context`."""
        key = tuple(context[-self.order :])
        if key not in self._rows:
            self._rows[key] = self._draw(np.random.default_rng([self.seed, len(key), *key]), key)
        return self._rows[key]

    def logits(self, context: Sequence[int]) -> Tensor:
        """float32 [vocabulary]: natural logs of `probabilities`, -inf where they are zero."""
        return torch.from_numpy(_log(self.probabilities(context))).float()

    def _draw(self, random: np.random.Generator, key: tuple[int, ...]) -> np.ndarray:
        row = random.dirichlet([self._concentration] * self.vocabulary) + 1e-9
        if random.random() < self._exact:
            kind = random.integers(3)
            if kind == 0:
                row[random.permutation(self.vocabulary)[: self.vocabulary // 2]] = 0.0
            elif kind == 1:
                row = np.eye(self.vocabulary)[random.integers(self.vocabulary)]
            else:
                row = np.repeat(random.dirichlet([1.0] * 2), -(-self.vocabulary // 2))[
                    : self.vocabulary
                ]
        if self._like is not None:
            row = self._share * self._like.probabilities(key) + (1 - self._share) * row / row.sum()
        return row / row.sum()


def _log(probabilities: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(probabilities)


# ---------------------------------------------------------------------------------------------------- target and draft


class ToyTarget(Target):
    """A target that reads its logits from tables; its "cache" is the list of tokens."""

    device = CPU

    def __init__(self, tables: Tables, max_context: int = 1 << 16) -> None:
        self.tables, self.vocab_size, self.max_context = tables, tables.vocabulary, max_context
        self.tokens: list[int] = []
        self.model_seconds = 0.0
        self.sizes: list[int] = []  # of the trees verified

    def reserve(self, tokens: int, scratch: int) -> None:
        self.reserved = (tokens, scratch)

    def prefill(self, tokens: list[int], keep: int | None = None) -> None:
        self.tokens = list(tokens)

    def verify(self, tree: TokenTree) -> tuple[Tensor, None]:
        self.sizes.append(len(tree))
        root = int(tree.tokens[0])
        rows = [
            self.tables.logits([*self.tokens, root, *tree.path_tokens(node)])
            for node in range(len(tree))
        ]
        return torch.stack(rows), None

    def commit(self, tree: TokenTree, path: list[int]) -> None:
        self.tokens += tree.tokens[path].tolist()

    def reset(self) -> None:
        self.tokens = []


class ToyDrafter(Drafter):
    """A draft that reads its distributions from tables.

    columns     target ids of its columns, where its vocabulary is a part of the target's, in another order
    normalized  hand out log-probabilities, with -inf for what is not proposed
    """

    name = "toy"

    def __init__(
        self, tables: Tables, *, columns: Sequence[int] | None = None, normalized: bool = False
    ) -> None:
        self.tables, self.normalized = tables, normalized
        self.columns = None if columns is None else torch.tensor(columns)
        self.tokens: list[int] = []  # committed, the current root excluded
        self.stepped: list[list[int]] = []  # nodes of each step of the current tree
        self.paths: list[list[list[int]]] = []  # tokens below the root that lead to them

    def begin(self, prompt: list[int], features: Any = None, hints: Any = None) -> None:
        self.tokens = list(prompt)

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        nodes = frontier.alive()
        self.stepped = (
            [nodes.tolist()] if int(tree.passes) == 0 else [*self.stepped, nodes.tolist()]
        )
        root = int(tree.tokens[0])
        paths = [tree.path_tokens(node) for node in nodes.tolist()]
        self.paths = [*self.paths[: len(self.stepped) - 1], paths]
        logits = torch.stack([self.tables.logits([*self.tokens, root, *path]) for path in paths])
        if self.columns is not None:
            logits = logits[:, self.columns]
        return Step(logits, self.columns, self.normalized, hidden_states(logits))

    def accept(self, cycle: Cycle) -> None:
        self.tokens += [int(cycle.tree.tokens[0]), *cycle.tokens[:-1]]

    def reset(self) -> None:
        self.tokens = []


HIDDEN_SIZE = 576  # of the states that the shipped SpecDec++ head reads


def hidden_states(logits: Tensor) -> Tensor:
    """float32 [rows, HIDDEN_SIZE], made of the distributions."""
    probabilities = logits.float().softmax(-1).nan_to_num()
    return probabilities[:, torch.arange(HIDDEN_SIZE, device=logits.device) % logits.shape[1]]


class AnyDraftSpecdecpp(Specdecpp):
    """SpecDec++ for drafts that give no hidden states, or those of another width."""

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        if step.hidden is None or step.hidden.shape[1] != HIDDEN_SIZE:
            step = replace(step, hidden=hidden_states(step.logits))
        return super().grow(tree, frontier, step)


def nodes_of(ids: Sequence[int]) -> Nodes:
    """Return Nodes of these ids, without padding."""
    return Nodes(
        torch.tensor(list(ids), dtype=torch.int64), torch.tensor([len(ids)], dtype=torch.int32)
    )


@dataclass
class RandomShape(TreePolicy):
    """Trees of random shape: any of the better tokens, nodes of mixed depth in a step, a random part of all kept."""

    seed: int = 0
    passes: int = 6
    most: int = 4  # nodes per step and children per node

    _random: np.random.Generator = field(init=False, repr=False)
    _waiting: list[int] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    @property
    def capacity(self) -> int:
        return 1 + self.passes * self.most**2

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        if int(tree.passes) == 1:
            self._waiting = []
        log_probs = step.logits if step.normalized else step.logits.log_softmax(-1)
        for row, parent in enumerate(frontier.alive().tolist()):
            proposed = log_probs[row].argsort(descending=True, stable=True)[
                : int((log_probs[row] > -math.inf).sum())
            ]
            if self._random.random() < 0.8:
                proposed = proposed[: self.most]
            count = int(self._random.integers(0, min(self.most, len(proposed)) + 1))
            chosen = proposed[self._random.permutation(len(proposed))[:count]]
            tokens = chosen if step.token_ids is None else step.token_ids[chosen]
            parents = torch.full_like(chosen, parent)
            self._waiting += (
                tree.add(parents, tokens, log_probs[row, chosen].float()).alive().tolist()
            )
        if int(tree.passes) >= self.passes:
            return nodes_of([])
        self._waiting = self._random.permutation(self._waiting).astype(int).tolist()
        drawn = int(self._random.integers(0, self.most + 1))
        picked, self._waiting = self._waiting[:drawn], self._waiting[drawn:]
        return nodes_of(picked)

    def keep(self, tree: TokenTree) -> Nodes:
        share = self._random.choice([0.5, 0.9, 1.0])
        kept = [0]
        for node, parent in enumerate(tree.trimmed().parents.tolist()):
            if node and parent in kept and self._random.random() < share:
                kept.append(node)
        return nodes_of(kept)


POLICIES = [*(name for name in policies.names() if name != "plain"), "random"]
# that stay, so that trees do not depend on a clock
COSTS = PassCosts("toy", {1: 1.0, 10: 1.2}, {1: 0.1})


def policy_for(name: str, seed: int = 0) -> TreePolicy:
    """A small instance of any of POLICIES: `random` is RandomShape, the others are made by name."""
    if name == "random":
        return RandomShape(seed)
    if name == "specdecpp":
        return AnyDraftSpecdecpp(width=3, expansions=4, budget=10)
    small: dict[str, dict[str, Any]] = {
        "chain": {"length": 4},
        "eagle": {"width": 3, "expansions": 3, "budget": 10},
        "fixed": {"branching": (3, 2, 1)},
        "talon": {"budget": 10, "width": 3},
        "salf": {"budget": 10, "batch": 3},
        "opt_tree": {"nodes": 7, "threshold": 0.1, "max_depth": 4},
        "dynatree": {"base_depth": 2, "max_depth": 4, "nodes": 20},
        "ddd": {"width": 3, "expansions": 4, "budget": 10, "checks": (1, 2, 3)},
        "svip": {"width": 3, "expansions": 4, "budget": 10},
        "gammatune": {"width": 3, "expansions": 4, "budget": 10, "height": 3},
        "disco": {"width": 3, "expansions": 4, "budget": 10},
        "c2t": {"children": 3, "layer": 4, "max_depth": 4, "hard_cap": 12, "beta": 0.05},
        "ltd": {"networks": "cpu"},
        "dymax": {"length": 5},
        "dyjoint": {"length": 5},
        "auto": {"budget": 10, "width": 3, "max_passes": 4, "costs": COSTS},
        "smart": {"budget": 10, "children": 4, "width": 4, "passes": 4, "costs": COSTS},
        "ddtree": {"budget": 10, "block": 4},
        "caddtree": {"budget": 10, "block": 4, "costs": COSTS},
        "cast": {"budget": 10, "children": 3, "width": 3, "passes": 4, "costs": COSTS},
    }
    return policies.make(name, **small.get(name, {}))


def histories(name: str, ways: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group the generations that one engine may make if whole cycles are captured, so that trees stay the same.

    A policy that learns on the device does so from the cycle behind the end of an answer too.
    """
    learns = policies.find(name).learn is not TreePolicy.learn
    return [[way] for way in ways] if learns else [ways]


def random_tree(seed: int, size: int, vocabulary: int, root: int = 0) -> TokenTree:
    """A tree of `size` nodes under random parents, siblings distinct."""
    random = np.random.default_rng(seed)
    tree, taken = TokenTree.root(root, size), set[tuple[int, int]]()
    while len(tree) < size:
        parent, token = int(random.integers(len(tree))), int(random.integers(vocabulary))
        if (parent, token) in taken:
            continue
        taken.add((parent, token))
        tree.add(
            torch.tensor([parent]),
            torch.tensor([token]),
            torch.tensor([-float(random.exponential())]),
        )
    return tree


# ---------------------------------------------------------------------------------------------------- noise


def keyed_gumbel(seeds: np.ndarray, position: int, vocabulary: int) -> np.ndarray:
    """The noise of ops.keyed_gumbel_argmax for many seeds: float64 [seeds, vocabulary].

    Written from its definition (Philox4x32-10, Salmon et al. 2011), so that it checks the other.
    """
    mask = np.uint64(0xFFFFFFFF)
    blocks = -(-vocabulary // 4)
    index = np.arange(blocks, dtype=np.uint64)[None]
    key0, key1 = (seeds[:, None] & mask), (seeds[:, None] >> np.uint64(32))
    c0 = np.broadcast_to(index, (len(seeds), blocks)).copy()
    c1, c2 = np.full_like(c0, position & 0xFFFFFFFF), np.full_like(c0, position >> 32)
    c3 = np.zeros_like(c0)
    for _ in range(10):
        high = (c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57))
        c0, c2 = (high[1] >> np.uint64(32)) ^ c1 ^ key0, (high[0] >> np.uint64(32)) ^ c3 ^ key1
        c1, c3 = high[1] & mask, high[0] & mask
        key0, key1 = (key0 + np.uint64(0x9E3779B9)) & mask, (key1 + np.uint64(0xBB67AE85)) & mask
    words = np.stack([c0, c1, c2, c3], axis=2).reshape(len(seeds), -1)[:, :vocabulary]
    return -np.log(-np.log((words + 0.5) / 2.0**32))


# ---------------------------------------------------------------------------------------------------- tiny models

VOCABULARY = 260  # 256 bytes and four special tokens, which TOKENIZER has
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GROUPED),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", _GROUPED),
    "mistral": ("Mistral", {**_GROUPED, "sliding_window": 128}),
    "gemma": ("Gemma", {"num_key_value_heads": 1, "head_dim": 16}),
    "phi": ("Phi", {"num_key_value_heads": 4}),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt2": ("GPT2", {"n_inner": 48}),
}
MINISTRAL: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
# transformers 5.17 normalises the outputs of all of a Bamba's groups at once
NORMED_GROUPS = 2 if "group_size" in signature(BambaRMSNormGated).parameters else 1
# More that the native forward knows; the tests of tests/models have them, others do with those above.
NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": (
        "Bamba",
        {
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_n_groups": NORMED_GROUPS,
        },
    ),
    "cohere": ("Cohere", {"num_key_value_heads": 2, "logit_scale": 0.3}),
    "cohere2": (
        "Cohere2",
        {
            "num_key_value_heads": 2,
            "sliding_window": 24,
            "sliding_window_pattern": 2,
            "logit_scale": 0.3,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **_LATENT,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.3,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_LATENT,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {
                key: value for key, value in MINISTRAL.items() if key != "llama_4_scaling_beta"
            },
        },
    ),
    "falcon_h1": (
        "FalconH1",
        {
            "num_key_value_heads": 2,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_state": 8,
            "mamba_n_groups": 2,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.6,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.7,
            "key_multiplier": 0.8,
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.9,
            "ssm_multipliers": [0.7, 1.2, 1.6, 1.4, 0.6],
            "mlp_multipliers": [0.9, 1.1],
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {
            **_LATENT,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "v_head_dim": 20,
        },
    ),
    "stablelm": ("StableLm", {"num_key_value_heads": 2}),
    "starcoder2": ("Starcoder2", {"num_key_value_heads": 2, "sliding_window": 24}),
    "ernie4_5": ("Ernie4_5", {**_GROUPED, "tie_word_embeddings": False}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 40,
            "moe_num_shared_experts": 2,
        },
    ),
    "exaone4": (
        "Exaone4",
        {"num_key_value_heads": 2, "sliding_window": 24, "sliding_window_pattern": 2},
    ),
    "gemma3_text": (
        "Gemma3Text",
        {
            **_GROUPED,
            "sliding_window": 24,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 12,
        },
    ),
    "gemma4_text": (
        "Gemma4Text",
        {
            **_GROUPED,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "sliding_window": 24,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": VOCABULARY,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma4_unified_text": (
        "Gemma4UnifiedText",
        {
            **_GROUPED,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 24,
            "global_head_dim": 16,
        },
    ),
    "glm4": ("Glm4", {"num_key_value_heads": 2, "head_dim": 16}),
    "glm4_moe": (
        "Glm4Moe",
        {
            **_GROUPED,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **_GROUPED,
            "sliding_window": 24,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "granite": (
        "Granite",
        {
            "num_key_value_heads": 2,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
    ),
    "granitemoe": (
        "GraniteMoe",
        {
            "num_key_value_heads": 2,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
            "num_local_experts": 5,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            "num_key_value_heads": 2,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
            "num_local_experts": 5,
            "shared_intermediate_size": 40,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_n_groups": NORMED_GROUPS,
        },
    ),
    "ministral3": ("Ministral3", {**_GROUPED, "rope_parameters": MINISTRAL}),
    "mixtral": ("Mixtral", {**_GROUPED, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "lfm2": (
        "Lfm2",
        {
            "num_key_value_heads": 2,
            "block_multiple_of": 16,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "conv", "full_attention"],
        },
    ),
    "lfm3": (
        "Lfm3",
        {
            **_GROUPED,
            "conv_L_cache": 5,
            "sliding_window": 12,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "sliding_attention", "full_attention"],
        },
    ),
    "muse_glimmer_text": (
        "MuseGlimmerText",
        {
            **_GROUPED,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "layer_rope_theta": [1e4, 0, 1e4],
            "sliding_window": 24,
            "qk_scale_factor": 1.7,
            "output_multiplier": 0.4,
            "final_logit_softcapping": 6.0,
            "rms_norm_eps": 0.01,
            "post_norm_eps": 0.3,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "layers_block_type": [
                "linear_attention",
                "mlp",
                "full_attention",
                "linear_attention",
                "moe",
            ],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2}),
    "olmo3": ("Olmo3", {"num_key_value_heads": 2, "sliding_window": 24}),
    "olmoe": ("Olmoe", {"num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 3}),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "sliding_window": 24}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_key_value_heads": 2,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **_GROUPED,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeText",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3_5_text": (
        "Qwen3_5Text",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "seed_oss": ("SeedOss", {**_GROUPED, "attention_bias": True}),
    "smollm3": ("SmolLM3", {"num_key_value_heads": 2, "no_rope_layer_interval": 2}),
}
_HEADS = {
    "GPT2": "GPT2LMHeadModel",
    "Gemma3Text": "Gemma3ForCausalLM",
    "Gemma4Text": "Gemma4ForCausalLM",
    "Gemma4UnifiedText": "Gemma4UnifiedForCausalLM",
    "Qwen3_5Text": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeText": "Qwen3_5MoeForCausalLM",
}
# transformers 5.17, of tests/cuda/pins.txt, has no such language models
NEWEST = "lfm3", "muse_glimmer_text"


def tiny(
    family: str = "llama", seed: int = 0, *, name: str | None = None, **changes: Any
) -> PreTrainedModel:
    """A random float32 model of that family, two layers deep, whose attention matters to its output.

    family: a key of FAMILIES or NATIVE, or with `name` anything that transformers calls ...Config and ...ForCausalLM.
    """
    stem, own = {**FAMILIES, **NATIVE}.get(family, (name or family, {}))
    try:
        config = getattr(transformers, f"{stem}Config")(**{**_COMMON, **own, **changes})
        head = getattr(transformers, _HEADS.get(stem, f"{stem}ForCausalLM"), None)
        head = head or auto_class(config)._model_mapping[type(config)]
    except (AttributeError, UnsupportedModelError):
        if family not in NEWEST:
            raise
        pytest.skip(f"transformers {transformers.__version__} has no causal {stem}")
    torch.manual_seed(seed)
    model = head(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim < 3 and parameter_name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.1)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
            if buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model


def near_copy(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """A draft that often agrees with `tiny(family)`, of the same changes: that model with noise on its weights."""
    model = tiny(family, **changes)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter += 0.04 * parameter.std() * torch.randn_like(parameter)
    return model


TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")


def byte_tokenizer(
    template: str | None = TEMPLATE, extra: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per byte, four special tokens and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, *extra]})
    tokenizer.chat_template = template
    return tokenizer


class LetterTokenizer:
    """Token i is the i-th letter; what toy targets need to stream text and to meet stop strings."""

    chat_template = None

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") for letter in text]}


class RecordingStreamer:
    """Notes what it is given, as transformers' streamers get it."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.puts.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.ended += 1


def hooked(module: torch.nn.Module, change: Callable[[Tensor], Tensor]) -> Any:
    """Pass the module's output through `change`; a context manager, as torch's hook handles are."""
    return module.register_forward_hook(lambda _module, _inputs, output: change(output))


# ---------------------------------------------------------------------------------------------------- draft heads


def head_config(
    version: Literal[1, 3] = 3, model: PreTrainedModel | None = None, **changes: Any
) -> EagleConfig:
    """The config of a small head for `model`, by default one of `tiny`'s; an EAGLE-3 head drafts 200 of its tokens."""
    hidden_size = 32 if model is None else model.config.hidden_size
    sizes: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": 40,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "target_hidden_size": hidden_size,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY if version == 1 else 200,
    }
    return EagleConfig(version=version, **(sizes | changes))


def random_state(config: EagleConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random float32 weights with which attention matters, and a random map of the vocabulary."""
    random = torch.Generator().manual_seed(seed)
    # nothing normalises EAGLE-1's states as they are fed back
    gain = 0.7 if config.version == 1 else 1.5
    state = config.network().state_dict()
    for name, tensor in state.items():
        if name == "d2t":
            ids = torch.randperm(config.vocab_size, generator=random)[: len(tensor)].sort().values
            state[name] = ids - torch.arange(len(tensor))
        elif "norm" in name:
            state[name] = 0.5 + torch.rand(tensor.shape, generator=random)
        else:
            state[name] = (
                torch.randn(tensor.shape, generator=random) * gain / tensor.shape[-1] ** 0.5
            )
    return state


def tiny_head(config: EagleConfig, seed: int = 0) -> EagleHead:
    """A random float32 head."""
    return head_from(config, random_state(config, seed), torch.float32, CPU)
