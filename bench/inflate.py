"""Real cost without big weights: a small model and its head inside a model of any larger shape, with the same outputs.

Every tensor has the large shape and is read in full, so time and memory are the large model's; what the small model
does not fill is zero where it would be felt and random elsewhere, so acceptance is the small model's.

- Channels beyond the hidden size stay zero: nothing writes there (rows of o_proj, down_proj, embeddings). A norm over
  h channels among H sees a mean square smaller by h / H: its eps shrinks likewise, its weight by the square root.
- Rotary channel i of a head of size d turns as channel m * i of one of size m * d; queries grow by sqrt(m), for
  attention divides by the square root of the head size.
- A key-value head keeps its group of query heads; a group larger than the large model's gets copies of that head.
- More heads, intermediate channels and layers are random, and nothing reads them (zero o_proj and down_proj).
- More tokens: see `ExtraTokens`. More draft columns are always silent, so the draft's choices stay the same.

Equal means to rounding: in bfloat16 the rescaled weights of norms and queries are rounded once more.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from bench import provenance
from specengine import models
from specengine.errors import InputError, UnsupportedModelError
from specengine.models import checkpoints, embedded
from specengine.models.eagle_head import EagleConfig, Rope, Rotation

# What stands for the tokens that the small model does not have.
#   copies  rows of rare tokens (the later half of the ids: merges come in order of frequency) once more. A copy's
#           logit equals its original's, whose id is lower, so greedy answers stay the same; sampled ones do not.
#   silent  logits below -2 ** 19, so that sampled answers stay the same as well. They come from one channel that
#           carries a constant, so small that no norm feels it.
ExtraTokens = Literal["copies", "silent"]

CONSTANT = 2.0**-40  # its square is lost beside any mean square that is not
SILENCE = -(2.0**80)  # times the constant, over a root mean square of up to 2 ** 20: still below -2 ** 19
STD = 0.02  # of random weights


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model.

    head_dim     None: hidden / heads
    draft_vocab  columns of a head that drafts a part of the vocabulary; None: as many as it has. A head that drafts
                 all of the small model's tokens has a column for each of the large one's.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    head_dim: int | None = None
    draft_vocab: int | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.hidden % self.heads:
            raise InputError(
                f"shape: {self.heads} heads must be a multiple of {self.kv_heads} key-value heads, and hidden size "
                f"{self.hidden} one of the heads"
            )

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self.heads, self.kv_heads, self.head_dim or self.hidden // self.heads)


SHAPES = {"8b": Shape(4096, 32, 32, 8, 14336, 128256, draft_vocab=32000)}  # Llama 3.1 8B and its EAGLE-3 head


class AttentionShape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int


class Inflated(NamedTuple):
    """A model and its head, if any, for `eagle_head.head_from`."""

    model: LlamaForCausalLM
    head_config: EagleConfig | None
    head_state: checkpoints.State | None


def inflate(
    model: PreTrainedModel,
    head_config: EagleConfig | None,
    head_state: Mapping[str, Tensor] | None,
    shape: Shape,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    *,
    extra_tokens: ExtraTokens = "copies",
    seed: int = 0,
) -> Inflated:
    """`model` (Llama) and its EAGLE head in `shape`, with the same outputs to rounding.

    Built layer by layer in `dtype` on `device`, so nothing is ever held twice. The head's layer has the sizes of the
    target's; the hidden states it reads are renumbered. The output layer is untied, for the embeddings' further
    channels must be zero. InputError or UnsupportedModelError where the small model does not fit into the shape.
    """
    maker = Maker(dtype, torch.device(device), torch.Generator(device).manual_seed(seed))
    plan = _plan(model, head_config, shape, dtype, extra_tokens)
    target = _target(model, plan, maker)
    if head_config is None or head_state is None:
        return Inflated(target, None, None)
    return Inflated(target, plan.head_config, _head(head_config, head_state, plan, maker))


# ---------------------------------------------------------------------------------------------------- places


@dataclass(frozen=True)
class Axis:
    """Where the channels of a small axis stand in a large one.

    places, sources  int64 [n]: at places[i] stands the small channel sources[i]
    gaps             int64: places that must be zero even among random ones
    constants        places whose channel carries the constant, too small to be felt but by the weights that silence
    """

    small: int
    size: int
    places: Tensor
    sources: Tensor
    gaps: Tensor
    constants: tuple[int, ...] = ()

    @classmethod
    def leading(cls, small: int, size: int, *, constant: bool = False) -> Axis:
        """The small channels come first, the constant one behind them."""
        channels = torch.arange(small)
        return cls(small, size, channels, channels, channels[:0], (small,) if constant else ())

    def repeated(self, times: int) -> Axis:
        """Several such axes side by side."""

        def shifted(channels: Tensor, by: int) -> Tensor:
            return torch.cat([channels + i * by for i in range(times)])

        return Axis(
            self.small * times,
            self.size * times,
            shifted(self.places, self.size),
            shifted(self.sources, self.small),
            shifted(self.gaps, self.size),
            tuple(place + i * self.size for i in range(times) for place in self.constants),
        )


def token_axis(small: int, size: int) -> Axis:
    """Every token's row, and behind them those of the rarer half over and over."""
    first = small - max(small // 2, 1)
    copies = first + torch.arange(size - small) % (small - first)
    places = torch.arange(size)
    return Axis(small, size, places, torch.cat([places[:small], copies]), places[:0])


class Heads(NamedTuple):
    """Axes of all heads' channels, [heads * head size], and the factor on queries."""

    queries: Axis
    keys: Axis
    query_scale: float


def place_heads(small: AttentionShape, large: AttentionShape) -> Heads:
    """Each small key-value head with its queries, in as many large ones as its group needs; InputError if too many."""
    times = large.head_dim // small.head_dim
    if large.head_dim % small.head_dim or (small.head_dim % 2 and times > 1):
        raise InputError(
            f"shape: heads of {large.head_dim} channels are no multiple of the model's {small.head_dim}, so rotary "
            "frequencies do not match"
        )
    group, room = small.heads // small.kv_heads, large.heads // large.kv_heads
    spread = -(-group // room)
    if small.kv_heads * spread > large.kv_heads:
        raise InputError(
            f"shape: {small.kv_heads} groups of {group} query heads need {small.kv_heads * spread} key-value heads "
            f"with up to {room} query heads each, the shape has {large.kv_heads}"
        )
    keys = [(j * spread + copy_, j) for j in range(small.kv_heads) for copy_ in range(spread)]
    queries = [
        ((j * spread + i // room) * room + i % room, j * group + i) for j in range(small.kv_heads) for i in range(group)
    ]
    return Heads(_head_axis(queries, small, large, True), _head_axis(keys, small, large, False), math.sqrt(times))


def _head_axis(pairs: list[tuple[int, int]], small: AttentionShape, large: AttentionShape, queries: bool) -> Axis:
    """pairs: large head and the small one that stands there; its other channels are gaps."""
    half, times = small.head_dim // 2, large.head_dim // small.head_dim
    channels = torch.arange(small.head_dim)
    within = channels // half * (large.head_dim // 2) + channels % half * times
    at, of = torch.tensor(pairs).T
    places = (at[:, None] * large.head_dim + within).flatten()
    used = (at[:, None] * large.head_dim + torch.arange(large.head_dim)).flatten()
    count, size = (small.heads, large.heads) if queries else (small.kv_heads, large.kv_heads)
    return Axis(
        count * small.head_dim,
        size * large.head_dim,
        places,
        (of[:, None] * small.head_dim + channels).flatten(),
        used[~torch.isin(used, places)],
    )


def layer_places(small: int, large: int) -> list[int]:
    """Where each small layer stands, evenly among layers that change nothing: its input is what it was."""
    return [i * large // small for i in range(small)]


# ---------------------------------------------------------------------------------------------------- tensors


@dataclass(frozen=True)
class Rule:
    """How a large tensor is made of a small one: where its rows and columns stand, and a factor.

    columns  None for a vector
    random   what only ever meets zeros, or is never read, is random instead of zero
    """

    rows: Axis
    columns: Axis | None = None
    scale: float = 1.0
    random: bool = False

    @classmethod
    def norm(cls, axis: Axis) -> Rule:
        return cls(axis, scale=math.sqrt(axis.small / axis.size))


@dataclass(frozen=True)
class Maker:
    """Makes large tensors."""

    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    def tensor(self, rule: Rule, small: Tensor | None) -> Tensor:
        """small: None for a tensor of a layer that the small model does not have."""
        large = self._filled(rule)
        if small is None:
            return large
        part = small.detach().to(self.device)
        part = (part if rule.scale == 1.0 else part.double() * rule.scale).to(self.dtype)
        places, part = rule.rows.places.to(self.device), part[rule.rows.sources.to(self.device)]
        if rule.columns is None:
            large[places] = part
        else:
            columns = rule.columns
            part = part[:, columns.sources.to(self.device)]
            large[places[:, None], columns.places.to(self.device)] = part
        return large

    def _filled(self, rule: Rule) -> Tensor:
        columns = rule.columns
        size = [rule.rows.size] if columns is None else [rule.rows.size, columns.size]
        if not rule.random or columns is None:
            return torch.zeros(size, dtype=self.dtype, device=self.device)
        large = torch.empty(size, dtype=self.dtype, device=self.device).normal_(std=STD, generator=self.generator)
        large[rule.rows.gaps.to(self.device)] = 0.0
        return large


def _layer_rules(hidden: Axis, reads: Axis, heads: Heads, intermediate: Axis) -> dict[str, Rule]:
    """By module name; hidden: of the residual, reads: of what the attention reads."""
    norms = ("input_layernorm", "post_attention_layernorm", "hidden_norm")
    return {
        "q_proj": Rule(heads.queries, reads, heads.query_scale, random=True),
        "k_proj": Rule(heads.keys, reads, random=True),
        "v_proj": Rule(heads.keys, reads, random=True),
        "o_proj": Rule(hidden, heads.queries),
        "gate_proj": Rule(intermediate, hidden, random=True),
        "up_proj": Rule(intermediate, hidden, random=True),
        "down_proj": Rule(hidden, intermediate),
        **{name: Rule.norm(hidden) for name in norms},
    }


def _rule(rules: Mapping[str, Rule], name: str) -> Rule:
    """Of the tensor `...module.weight`, `...module.bias` or `...module.number.weight`."""
    *_, outer, module, kind = ["", *name.split(".")]
    rule = rules[outer if module.isdigit() else module]
    return Rule(rule.rows, None, rule.scale) if kind == "bias" else rule


# ---------------------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Plan:
    """What was found to fit.

    silent_tokens  how many tokens at the end of the vocabulary are silent
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


def _plan(
    model: PreTrainedModel, head: EagleConfig | None, shape: Shape, dtype: torch.dtype, extra: ExtraTokens
) -> Plan:
    if not isinstance(model, LlamaForCausalLM):
        raise UnsupportedModelError(f"{type(model).__name__}: only LlamaForCausalLM can be inflated")
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
    _refuse_smaller("model", small, shape)
    heads, large = place_heads(small.attention, shape.attention), _large_config(config, shape, dtype)
    _refuse_other_rope("model", _target_rotation(config), _target_rotation(large), heads)
    more = shape.vocab - small.vocab
    head_config = None if head is None else _large_head_config(head, small, shape, extra)
    draft_more = 0 if head is None or head_config is None else head_config.draft_vocab_size - head.draft_vocab_size
    silent = extra == "silent" and more > 0
    head_constant = draft_more > 0 or (silent and head is not None and head.version == 1)
    constant = silent or head_constant
    if constant:
        _refuse_no_constant(small, shape, head if head_constant else None, dtype)
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
    head_heads = place_heads(AttentionShape(head.num_heads, head.num_kv_heads, head.head_dim), shape.attention)
    assert head_config is not None
    _refuse_other_rope("head", _head_rotation(head), _head_rotation(head_config), head_heads)
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


def _large_head_config(head: EagleConfig, small: Shape, shape: Shape, extra: ExtraTokens) -> EagleConfig:
    for name, size in (("hidden_size", shape.hidden), ("intermediate_size", shape.intermediate)):
        if getattr(head, name) > size:
            raise InputError(f"shape: {name} {size} is smaller than the head's {getattr(head, name)}")
    if head.target_hidden_size != small.hidden or head.vocab_size != small.vocab:
        raise InputError(
            f"head: it was made for hidden size {head.target_hidden_size} and vocabulary {head.vocab_size}, the model "
            f"has {small.hidden} and {small.vocab}"
        )
    if head.qk_norm:
        raise UnsupportedModelError("head: it normalises queries and keys, which is not supported")
    if head.fusion_norm != "none" and head.hidden_size != head.target_hidden_size:
        raise UnsupportedModelError("head: norms of the target's and of its own width would need two different eps")
    if head.version == 1 and extra == "copies" and shape.vocab > small.vocab:
        raise InputError("extra_tokens: an EAGLE-1 head reads the target's logits, so its choices need silent tokens")
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
        layer_ids=None if head.version == 1 else tuple(places[i] for i in head.feature_ids(small.layers)),
    )


def _draft_vocab(head: EagleConfig, shape: Shape) -> int:
    if head.draft_vocab_size == head.vocab_size:
        return shape.vocab
    wanted = head.draft_vocab_size if shape.draft_vocab is None else shape.draft_vocab
    most = head.draft_vocab_size + shape.vocab - head.vocab_size  # the further columns need tokens of their own
    if not head.draft_vocab_size <= wanted <= most:
        raise InputError(f"shape: draft vocabulary {wanted}; from {head.draft_vocab_size} to {most} is possible")
    return wanted


def _refuse_smaller(what: str, small: Shape, large: Shape) -> None:
    for name in ("hidden", "layers", "intermediate", "vocab"):
        if getattr(large, name) < getattr(small, name):
            raise InputError(
                f"shape: {name} {getattr(large, name)} is smaller than the {what}'s {getattr(small, name)}"
            )


def _refuse_no_constant(small: Shape, shape: Shape, head: EagleConfig | None, dtype: torch.dtype) -> None:
    if dtype is torch.float16:
        raise InputError("dtype: silent tokens and draft columns need the range of bfloat16 or float32")
    if shape.hidden <= max(small.hidden, 0 if head is None else head.hidden_size):
        raise InputError(f"shape: silent tokens and draft columns need a channel more than hidden {shape.hidden}")
    if head is not None and (head.norm_before_residual or head.norm_recurrent):
        raise UnsupportedModelError(
            "head: its recurrent state is normalised, which does not keep the constant channel that silent tokens and "
            "draft columns need"
        )


def _refuse_other_rope(what: str, small: Rotation, large: Rotation, heads: Heads) -> None:
    """Both at position 1, [..., head size]: equal where the small head's channels stand, or InputError."""
    channels = heads.queries.places[: small[0].shape[-1]] % large[0].shape[-1]
    for mine, theirs in zip(small, large, strict=True):
        if not torch.allclose(mine, theirs[..., channels], rtol=1e-5, atol=0.0):
            raise InputError(
                f"shape: the {what}'s rotary frequencies depend on the head size in a way that heads of "
                f"{large[0].shape[-1]} channels do not contain; keep its {small[0].shape[-1]}"
            )


def _target_rotation(config: LlamaConfig) -> Rotation:
    return LlamaRotaryEmbedding(config)(torch.zeros(1), torch.ones(1, 1, dtype=torch.int64))


def _head_rotation(config: EagleConfig) -> Rotation:
    return Rope(config)(torch.ones(1, 1, dtype=torch.int64), torch.float32)


# ---------------------------------------------------------------------------------------------------- building


def _target(model: LlamaForCausalLM, plan: Plan, maker: Maker) -> LlamaForCausalLM:
    with torch.device("meta"):
        large = LlamaForCausalLM(plan.config)
    sources = dict(zip(layer_places(len(model.model.layers), len(large.model.layers)), model.model.layers, strict=True))
    rules = _layer_rules(plan.hidden, plan.hidden, plan.heads, plan.intermediate)
    for i, layer in enumerate(large.model.layers):
        small = sources[i].state_dict() if i in sources else {}
        layer.load_state_dict(_layer_state(layer, small, rules, plan.hidden, maker), assign=True)
    outer = {
        "model.embed_tokens.weight": Rule(plan.tokens, plan.hidden),
        "model.norm.weight": Rule.norm(plan.hidden),
        "lm_head.weight": Rule(_spoken(plan.tokens, plan.silent_tokens), plan.hidden, random=True),
    }
    state = {name: maker.tensor(rule, model.get_parameter(name)) for name, rule in outer.items()}
    for place in plan.hidden.constants:
        state["model.embed_tokens.weight"][:, place] = CONSTANT
        state["model.norm.weight"][place] = 1.0
        _silence(state["lm_head.weight"], plan.silent_tokens, place)
    large.load_state_dict(state, assign=True, strict=False)
    large.model.rotary_emb = LlamaRotaryEmbedding(plan.config).to(maker.device)
    large.generation_config = copy.deepcopy(model.generation_config)
    return large.eval().requires_grad_(False)


def _layer_state(
    layer: torch.nn.Module, small: Mapping[str, Tensor], rules: Mapping[str, Rule], hidden: Axis, maker: Maker
) -> dict[str, Tensor]:
    """small: empty for a layer that changes nothing."""
    norm = torch.ones(hidden.small)
    return {
        name: maker.tensor(_rule(rules, name), small[name] if small else norm if "norm" in name else None)
        for name in layer.state_dict()
    }


def _spoken(tokens: Axis, silent: int) -> Axis:
    """The tokens whose logits are the small model's."""
    return Axis.leading(tokens.small, tokens.size) if silent else tokens


def _silence(vocabulary_head: Tensor, rows: int, place: int) -> None:
    vocabulary_head[len(vocabulary_head) - rows :, place] = SILENCE


def _head(small: EagleConfig, weights: Mapping[str, Tensor], plan: Plan, maker: Maker) -> checkpoints.State:
    config, hidden = plan.head_config, plan.head_hidden
    assert config is not None
    assert hidden is not None
    assert plan.head_heads is not None
    draft = config.draft_vocab_size
    features = hidden.repeated(2) if small.version == 1 else plan.hidden.repeated(small.num_features)
    reads = hidden if small.version == 1 else hidden.repeated(2)
    intermediate = Axis.leading(small.intermediate_size, config.intermediate_size)
    rules = _layer_rules(hidden, reads, plan.head_heads, intermediate) | {
        "embed_tokens": Rule(plan.tokens, hidden),
        "fc": Rule(hidden, features),
        "input_norm": Rule.norm(features),
        "fc_norm": Rule.norm(plan.hidden),
        "norm": Rule.norm(hidden),
        "lm_head": Rule(Axis.leading(small.draft_vocab_size, draft), hidden, random=True),
    }
    state = {name: maker.tensor(_rule(rules, name), weights[name]) for name in weights if name != "d2t"}
    if "d2t" in weights:
        state["d2t"] = _offsets(weights["d2t"], small.vocab_size, draft).to(maker.device)
    for place in hidden.constants:
        _carry_constant(state, place, features.constants[0])
        if small.version == 3:
            _silence(state["lm_head.weight"], draft - small.draft_vocab_size, place)
    return state


def _carry_constant(state: checkpoints.State, place: int, feature: int) -> None:
    """From the first thing that the fusion layer reads, through the norms around it, to the vocabulary head."""
    state["fc.weight"][place, feature] = 1.0
    for name in ("norm.weight", "input_norm.weight", "fc_norm.0.weight"):
        if name in state:
            state[name][place if name == "norm.weight" else feature] = 1.0
    if "embed_tokens.weight" in state:
        state["embed_tokens.weight"][:, place] = CONSTANT


def _offsets(d2t: Tensor, vocab: int, columns: int) -> Tensor:
    """The map of the draft's vocabulary, its further columns leading to the target's further tokens."""
    more = columns - len(d2t)
    ids = torch.cat([d2t.cpu() + torch.arange(len(d2t)), vocab + torch.arange(more)])
    return ids - torch.arange(columns)


# ---------------------------------------------------------------------------------------------------- command line


def parse_shape(text: str) -> Shape:
    """`8b`, or sizes in the order of Shape's fields, separated by x."""
    if text in SHAPES:
        return SHAPES[text]
    sizes = text.split("x")
    if len(sizes) not in (6, 7, 8) or not all(size.isdigit() and int(size) for size in sizes):
        known = ", ".join(SHAPES)
        raise argparse.ArgumentTypeError(
            f"{text!r}: accepted are {known} and HIDDENxLAYERSxHEADSxKVHEADSxINTERMEDIATExVOCAB[xHEADDIM[xDRAFTVOCAB]]"
        )
    return Shape(*map(int, sizes))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=parse_shape, required=True, help="8b or sizes, see the module's Shape")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the model; FOLDER/head: its head")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--draft", type=Path, help="folder of its EAGLE head; default: the one that ships for it")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--extra-tokens", default="copies", choices=["copies", "silent"])
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    args = parser.parse_args(arguments)

    path = models.resolve(args.model)
    draft = args.draft or embedded.draft_head(path)
    head = None if draft is None else checkpoints.load_head(draft)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    config, state = (None, None) if head is None else (head.config, head.state)
    inflated = inflate(
        model,
        config,
        state,
        args.shape,
        getattr(torch, args.dtype),
        args.device,
        extra_tokens=args.extra_tokens,
        seed=args.seed,
    )
    _save(inflated, args.out, path, "official" if head is None else head.dialect.layout)
    _note(args.out / "provenance.json", args.shape, path, draft)
    count = sum(parameter.numel() for parameter in inflated.model.parameters())
    print(f"{args.out}: {count / 1e9:.3f} B parameters", file=sys.stderr)


def _save(inflated: Inflated, folder: Path, source: str, layout: Any) -> None:
    inflated.model.save_pretrained(folder)
    if any((Path(source) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    if inflated.head_config is not None and inflated.head_state is not None:
        checkpoints.save_head(
            inflated.head_config, inflated.head_state, folder / "head", layout, target=Path(folder).name
        )


def _note(path: Path, shape: Shape, model: str, draft: Path | None) -> None:
    made = {"model": Path(model).name, "draft": None if draft is None else Path(draft).name, "shape": asdict(shape)}
    path.write_text(json.dumps(provenance.provenance() | {"record": "inflated", **made}, indent=1) + "\n")


if __name__ == "__main__":
    main()
