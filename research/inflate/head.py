"""The large draft head, and the map of its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from research.inflate.places import Axis
from research.inflate.plan import Plan
from research.inflate.tensors import CONSTANT, Maker, Rule, layer_rules, rule_of, silence
from specengine.checkpoints import eagle as checkpoints
from specengine.models.eagle import EagleConfig


def large_head(
    small: EagleConfig, weights: Mapping[str, Tensor], plan: Plan, maker: Maker
) -> checkpoints.State:
    config, hidden = plan.head_config, plan.head_hidden
    assert config is not None
    assert hidden is not None
    assert plan.head_heads is not None
    draft = config.draft_vocab_size
    features = (
        hidden.repeated(2) if small.version == 1 else plan.hidden.repeated(small.num_features)
    )
    reads = hidden if small.version == 1 else hidden.repeated(2)
    intermediate = Axis.leading(small.intermediate_size, config.intermediate_size)
    rules = layer_rules(hidden, reads, plan.head_heads, intermediate) | {
        "embed_tokens": Rule(plan.tokens, hidden),
        "fc": Rule(hidden, features),
        "input_norm": Rule.norm(features),
        "fc_norm": Rule.norm(plan.hidden),
        "norm": Rule.norm(hidden),
        "lm_head": Rule(Axis.leading(small.draft_vocab_size, draft), hidden, random=True),
    }
    state = {
        name: maker.tensor(rule_of(rules, name), weights[name]) for name in weights if name != "d2t"
    }
    if "d2t" in weights:
        state["d2t"] = _offsets(weights["d2t"], small.vocab_size, draft).to(maker.device)
    for place in hidden.constants:
        _carry_constant(state, place, features.constants[0])
        if small.version == 3:
            silence(state["lm_head.weight"], draft - small.draft_vocab_size, place)
    return state


def _carry_constant(state: checkpoints.State, place: int, feature: int) -> None:
    """Carry the constant from the first input of the fusion layer, through the norms, to the vocabulary head."""
    state["fc.weight"][place, feature] = 1.0
    for name in ("norm.weight", "input_norm.weight", "fc_norm.0.weight"):
        if name in state:
            state[name][place if name == "norm.weight" else feature] = 1.0
    if "embed_tokens.weight" in state:
        state["embed_tokens.weight"][:, place] = CONSTANT


def _offsets(d2t: Tensor, vocab: int, columns: int) -> Tensor:
    """Return the map of the draft's vocabulary; its added columns lead to the target's added tokens."""
    more = columns - len(d2t)
    ids = torch.cat([d2t.cpu() + torch.arange(len(d2t)), vocab + torch.arange(more)])
    return ids - torch.arange(columns)
