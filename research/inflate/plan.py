"""Check that a model and its head fit into a shape, and plan the large ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from research.inflate.places import Axis, Heads, layer_places, place_heads, token_axis
from research.inflate.refusals import (
    head_rotation,
    refuse_no_constant,
    refuse_other_rope,
    refuse_smaller,
    target_rotation,
)
from research.inflate.shape import AttentionShape, ExtraTokens, Shape
from specengine.errors import InputError, UnsupportedModelError
from specengine.models.eagle import EagleConfig


@dataclass(frozen=True)
class Plan:
    """A checked plan of a large model and head.

    silent_tokens  number of silent tokens, which are the vocabulary's last
    """

    config: LlamaConfig
    head_config: EagleConfig | None
    hidden: Axis
    tokens: Axis
    silent_tokens: int
    heads: Heads
    intermediate: Axis
    head_heads: Heads | None = None
    head_hidden: Axis | None = None


def plan_for(
    model: PreTrainedModel,
    head: EagleConfig | None,
    shape: Shape,
    dtype: torch.dtype,
    extra: ExtraTokens,
) -> Plan:
    if not isinstance(model, LlamaForCausalLM):
        raise UnsupportedModelError(
            f"{type(model).__name__}: only LlamaForCausalLM can be inflated"
        )
    config = model.config
    if extra not in ("copies", "silent"):
        raise InputError(f"extra_tokens: got {extra!r}, accepted copies, silent")
    small = Shape(
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.intermediate_size,
        config.vocab_size,
        config.head_dim,
    )
    refuse_smaller("model", small, shape)
    heads, large = (
        place_heads(small.attention, shape.attention),
        _large_config(config, shape, dtype),
    )
    refuse_other_rope("model", target_rotation(config), target_rotation(large), heads)
    more = shape.vocab - small.vocab
    head_config = None if head is None else _large_head_config(head, small, shape, extra)
    draft_more = (
        0
        if head is None or head_config is None
        else head_config.draft_vocab_size - head.draft_vocab_size
    )
    silent = extra == "silent" and more > 0
    head_constant = draft_more > 0 or (silent and head is not None and head.version == 1)
    constant = silent or head_constant
    if constant:
        refuse_no_constant(small, shape, head if head_constant else None, dtype)
    plan = Plan(
        large,
        head_config,
        Axis.leading(small.hidden, shape.hidden, constant=constant),
        token_axis(small.vocab, shape.vocab),
        more if silent else 0,
        heads,
        Axis.leading(small.intermediate, shape.intermediate),
    )
    if head is None:
        return plan
    head_heads = place_heads(
        AttentionShape(head.num_heads, head.num_kv_heads, head.head_dim), shape.attention
    )
    assert head_config is not None
    refuse_other_rope("head", head_rotation(head), head_rotation(head_config), head_heads)
    return replace(
        plan,
        head_heads=head_heads,
        head_hidden=Axis.leading(head.hidden_size, shape.hidden, constant=head_constant),
    )


def _large_config(config: LlamaConfig, shape: Shape, dtype: torch.dtype) -> LlamaConfig:
    heads, kv_heads, head_dim = shape.attention
    changes = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "rms_norm_eps": config.rms_norm_eps * config.hidden_size / shape.hidden,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    large = LlamaConfig.from_dict(config.to_dict() | changes)
    large._name_or_path = config._name_or_path  # its tokenizer is found there
    return large


def _large_head_config(
    head: EagleConfig, small: Shape, shape: Shape, extra: ExtraTokens
) -> EagleConfig:
    for name, size in (("hidden_size", shape.hidden), ("intermediate_size", shape.intermediate)):
        if getattr(head, name) > size:
            raise InputError(
                f"shape: {name} {size} is smaller than the head's {getattr(head, name)}"
            )
    if head.target_hidden_size != small.hidden or head.vocab_size != small.vocab:
        raise InputError(
            f"head: it was made for hidden size {head.target_hidden_size} and vocabulary {head.vocab_size}, the model "
            f"has {small.hidden} and {small.vocab}"
        )
    if head.qk_norm:
        raise UnsupportedModelError("head: it normalises queries and keys, which is not supported")
    if head.fusion_norm != "none" and head.hidden_size != head.target_hidden_size:
        raise UnsupportedModelError(
            "head: norms of the target's and of its own width would need two different eps"
        )
    if head.version == 1 and extra == "copies" and shape.vocab > small.vocab:
        raise InputError(
            "extra_tokens: an EAGLE-1 head reads the target's logits, so its choices need silent tokens"
        )
    places = [*layer_places(small.layers, shape.layers), shape.layers]
    heads, kv_heads, head_dim = shape.attention
    return replace(
        head,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        target_hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        draft_vocab_size=_draft_vocab(head, shape),
        rms_norm_eps=head.rms_norm_eps * head.hidden_size / shape.hidden,
        layer_ids=None
        if head.version == 1
        else tuple(places[i] for i in head.feature_ids(small.layers)),
    )


def _draft_vocab(head: EagleConfig, shape: Shape) -> int:
    if head.draft_vocab_size == head.vocab_size:
        return shape.vocab
    wanted = head.draft_vocab_size if shape.draft_vocab is None else shape.draft_vocab
    # the further columns need tokens of their own
    most = head.draft_vocab_size + shape.vocab - head.vocab_size
    if not head.draft_vocab_size <= wanted <= most:
        raise InputError(
            f"shape: draft vocabulary {wanted}; from {head.draft_vocab_size} to {most} is possible"
        )
    return wanted
