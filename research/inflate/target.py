"""The large target: layers that hold a small one, layers that change nothing, and the vocabulary around them."""

from __future__ import annotations

import copy

import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from research.inflate.places import Axis, layer_places
from research.inflate.plan import Plan
from research.inflate.tensors import CONSTANT, Maker, Rule, layer_rules, layer_state, silence


def large_target(model: LlamaForCausalLM, plan: Plan, maker: Maker) -> LlamaForCausalLM:
    with torch.device("meta"):
        large = LlamaForCausalLM(plan.config)
    sources = dict(
        zip(
            layer_places(len(model.model.layers), len(large.model.layers)),
            model.model.layers,
            strict=True,
        )
    )
    rules = layer_rules(plan.hidden, plan.hidden, plan.heads, plan.intermediate)
    for i, layer in enumerate(large.model.layers):
        small = sources[i].state_dict() if i in sources else {}
        layer.load_state_dict(layer_state(layer, small, rules, plan.hidden, maker), assign=True)
    outer = {
        "model.embed_tokens.weight": Rule(plan.tokens, plan.hidden),
        "model.norm.weight": Rule.norm(plan.hidden),
        "lm_head.weight": Rule(_spoken(plan.tokens, plan.silent_tokens), plan.hidden, random=True),
    }
    state = {name: maker.tensor(rule, model.get_parameter(name)) for name, rule in outer.items()}
    for place in plan.hidden.constants:
        state["model.embed_tokens.weight"][:, place] = CONSTANT
        state["model.norm.weight"][place] = 1.0
        silence(state["lm_head.weight"], plan.silent_tokens, place)
    large.load_state_dict(state, assign=True, strict=False)
    large.model.rotary_emb = LlamaRotaryEmbedding(plan.config).to(maker.device)
    large.generation_config = copy.deepcopy(model.generation_config)
    return large.eval().requires_grad_(False)


def _spoken(tokens: Axis, silent: int) -> Axis:
    """Return the tokens whose logits are the small model's."""
    return Axis.leading(tokens.small, tokens.size) if silent else tokens
