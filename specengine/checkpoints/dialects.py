"""The configs of EAGLE draft heads: what each producer's fields mean, read into EagleConfig and written back.

Two layouts exist: the official one of the EAGLE repository, which SpecForge, AngelSlim and SGLang share, and that of
speculators (vLLM). Some fields have one name and two meanings; what cannot be told from the config is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers.activations import ACT2FN

from specengine.checkpoints.fields import MOST_SIZE, Fields, refused
from specengine.errors import CheckpointError, shown
from specengine.models.eagle import DEFAULT_THETA, ROPE_TYPES, EagleConfig, rope_frequencies

Layout = Literal["official", "speculators"]
Producer = Literal["eagle", "specforge", "speculators"]

SPECULATORS_TYPES = {"eagle": 1, "eagle3": 3}
# A name's beginning on disk, and in EagleHead.
PREFIXES: dict[tuple[Layout, int], dict[str, str]] = {
    ("official", 1): {},
    ("official", 3): {"midlayer.": "layers.0."},
    ("speculators", 1): {"transformer.": "layers.0.", "fusion_fc.": "fc."},
    ("speculators", 3): {},
}
_ORIGINAL = "original_max_position_embeddings"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_TEMPERATURES = "draft_temperatures"  # ours; other engines, which read no probabilities, do without
_MOST_DEPTHS = 64
_MOST_FEATURES = 64
MOST_TOKENS = 64  # of a chain
_MOST_POSITIONS = 1 << 30
# Numbers of rotary sets beside rope_theta: least and most, and by type those that it needs and those that it may have.
_ROPE_NUMBERS = {
    "factor": (1.0, 1e6),
    "low_freq_factor": (1e-3, 1e6),
    "high_freq_factor": (1e-3, 1e6),
    "attention_factor": (1e-3, 1e3),
    "beta_fast": (1e-3, 1e6),
    "beta_slow": (1e-3, 1e6),
    "mscale": (0.0, 1e3),
    "mscale_all_dim": (0.0, 1e3),
}
_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor",),
}
_ROPE_MAY: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", _ORIGINAL),
}
_ROPE_WITHOUT_EFFECT = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")


@dataclass(frozen=True)
class Verifier:
    """What the speculators layout says of the target.

    name           a Hub id or a path, from which engines load the target when they are given the head alone
    architectures  as in the target's config.json
    tokens         length of the chain that is drafted per cycle where nobody asks for another
    """

    name: str | None = None
    architectures: tuple[str, ...] = ()
    tokens: int = 3


@dataclass(frozen=True)
class Dialect:
    """How a checkpoint was read.

    producer  whose meaning the fields have: eagle (the EAGLE repository), specforge (and AngelSlim) or speculators
    notes     what was not stated and how it was taken, for people
    """

    layout: Layout
    producer: Producer
    version: Literal[1, 3]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"EAGLE-{self.version}, {self.layout} layout, fields as {self.producer} means them"


# ---------------------------------------------------------------------------------------------------- reading configs


def names_head(raw: Mapping[str, Any]) -> bool:
    """Whether a config is that of a draft head and of nothing else. EAGLE-1's in the official layout does not tell."""
    return "speculators_model_type" in raw or "draft_vocab_size" in raw


def read_config(
    raw: Mapping[str, Any],
    names: Iterable[str],
    producer: Producer | None = None,
    layer_ids: tuple[int, ...] | None = None,
) -> tuple[EagleConfig, Dialect]:
    """What a config says of a head whose tensors are called `names`; CheckpointError for what it should not.

    producer, layer_ids: as of checkpoints.load_head.
    """
    reader = _Reader(raw, frozenset(names), producer, layer_ids)
    config = reader.config()
    _require_frequencies(config)
    return config, Dialect(reader.layout, reader.producer, reader.version, tuple(reader.notes))


@dataclass
class _Reader:
    """Reads one config; what it had to assume goes to `notes`."""

    raw: Mapping[str, Any]
    names: frozenset[str]
    asked_producer: Producer | None
    asked_layer_ids: tuple[int, ...] | None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fields = Fields(self.raw)
        self.layout: Layout = "speculators" if "speculators_model_type" in self.raw else "official"
        self.producer = self._producer()
        self.version = self._version()

    def config(self) -> EagleConfig:
        return self._speculators() if self.layout == "speculators" else self._official()

    def _producer(self) -> Producer:
        found: Producer = "eagle"
        if self.layout == "speculators":
            found = "speculators"
        elif "eagle_config" in self.raw or "LlamaForCausalLMEagle3" in self.fields.texts("architectures"):
            found = "specforge"
        if self.asked_producer is None:
            return found
        if (self.asked_producer == "speculators") != (self.layout == "speculators"):
            raise CheckpointError(f"producer: got {self.asked_producer!r}, but the config has the {self.layout} layout")
        return self.asked_producer

    def _version(self) -> Literal[1, 3]:
        if self.layout == "speculators":
            kind = self.raw["speculators_model_type"]
            if not isinstance(kind, str) or kind not in SPECULATORS_TYPES:
                known = ", ".join(SPECULATORS_TYPES)
                raise CheckpointError(f"speculators_model_type: got {shown(kind)}, known are {known}")
            return 1 if SPECULATORS_TYPES[kind] == 1 else 3
        third = "draft_vocab_size" in self.raw or any(name.endswith("hidden_norm.weight") for name in self.names)
        return 3 if third else 1

    def _official(self) -> EagleConfig:
        fields, version = self.fields, self.version
        common = self._layer(fields)
        layer = PREFIXES["official", 3] if version == 3 else {}
        names = {with_prefix(name, layer) for name in self.names}
        biased = [part for part in "qkvo" if f"layers.0.self_attn.{part}_proj.bias" in names]
        if fields.flag("attention_bias") and not biased:
            # SpecForge copies the field from the target's config and makes none.
            self.notes.append("attention_bias is set, but there are no biases: taken as none")
        common |= {"qkv_bias": fields.flag("qkv_bias", default=bool(set(biased) - {"o"})), "o_bias": "o" in biased}
        if version == 1:
            return EagleConfig(version=1, **common, fc_bias=fields.flag("bias", default=True))
        return EagleConfig(version=3, **common, **self._variants(), norm_logits=self._norm_logits())

    def _speculators(self) -> EagleConfig:
        if "transformer_layer_config" not in self.fields:
            raise CheckpointError("transformer_layer_config: is missing")
        layer = Fields(self.fields.part("transformer_layer_config"))
        kind = layer.raw.get("model_type")
        if kind not in ("llama", "qwen3"):
            # Older releases take a missing type as llama, newer ones as qwen3, which has other tensors.
            raise CheckpointError(f"transformer_layer_config.model_type: got {shown(kind)}, accepted llama or qwen3")
        if "sliding_attention" in layer.texts("layer_types"):
            raise CheckpointError("transformer_layer_config.layer_types: sliding-window drafts are not supported")
        bias = layer.flag("attention_bias")
        common = self._layer(layer) | {"qkv_bias": bias, "o_bias": bias, "qk_norm": kind == "qwen3"}
        if self.version == 1:
            if self.fields.flag("layernorms"):
                raise CheckpointError("layernorms: this variant of EAGLE-1 is not supported")
            return EagleConfig(version=1, **common, fc_bias=self.fields.flag("fusion_bias"))
        return EagleConfig(version=3, **common, **self._variants(), norm_recurrent=self.fields.flag("norm_output"))

    def _layer(self, fields: Fields) -> dict[str, Any]:
        """The fields that all layouts share."""
        sizes = {name: fields.size(name) for name in ("hidden_size", "intermediate_size", "vocab_size")}
        heads = fields.size("num_attention_heads")
        kv_heads = fields.size("num_key_value_heads", heads)
        target = self.fields.size("target_hidden_size", sizes["hidden_size"])
        activation = fields.text("hidden_act", "silu")
        if heads % kv_heads:
            raise CheckpointError(f"num_attention_heads: got {heads}, no multiple of {kv_heads} key-value heads")
        if activation not in ACT2FN:
            raise CheckpointError(f"hidden_act: unknown name {shown(activation)}")
        if self.version == 1 and target != sizes["hidden_size"]:
            raise CheckpointError(f"target_hidden_size: got {target}, EAGLE-1 needs {sizes['hidden_size']}")
        own_embeddings = "embed_tokens.weight" in self.names
        if not own_embeddings and target != sizes["hidden_size"]:
            raise CheckpointError("embed_tokens.weight: is missing, and the target's embeddings have another width")
        return sizes | {
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": self._head_dim(fields, sizes["hidden_size"], heads),
            "target_hidden_size": target,
            "draft_vocab_size": self._draft_vocab_size(sizes["vocab_size"]),
            "rms_norm_eps": fields.number("rms_norm_eps", 1e-6, least=1e-30, most=1.0),
            "hidden_act": activation,
            "rope": self._rope(fields),
            "max_position_embeddings": fields.size("max_position_embeddings", 2048, _MOST_POSITIONS),
            "own_embeddings": own_embeddings,
            "temperatures": tuple(fields.numbers(_TEMPERATURES, count=_MOST_DEPTHS, least=0.05, most=20.0)),
        }

    def _variants(self) -> dict[str, Any]:
        """EAGLE-3's fields that have the same name and meaning in all layouts."""
        each, whole = self.fields.flag("fc_norm"), self.fields.flag("norm_before_fc")
        if each and whole:
            raise CheckpointError("fc_norm, norm_before_fc: only one of them can be set")
        return {
            "layer_ids": self._layer_ids(),
            "fusion_norm": "each" if each else "whole" if whole else "none",
            "norm_before_residual": self.fields.flag("norm_before_residual"),
        }

    def _norm_logits(self) -> bool:
        """SpecForge's `norm_output`: logits are read behind the final norm. Speculators means another thing by it."""
        if "norm_output" not in self.fields:
            return True
        if self.producer == "specforge":
            return self.fields.flag("norm_output")
        if self.asked_producer is None:
            raise CheckpointError(
                "norm_output: SpecForge and speculators mean different things by it, and the config tells of neither; "
                "pass producer='specforge', or producer='eagle' to ignore the field"
            )
        self.notes.append("norm_output is ignored: the EAGLE repository has no such field")
        return True

    def _layer_ids(self) -> tuple[int, ...] | None:
        inputs = self.fields.ids(_LAYER_IDS, _MOST_FEATURES)
        outputs = Fields(self.fields.part("eagle_config")).ids(_LAYER_IDS, _MOST_FEATURES)
        if self.asked_layer_ids is not None:
            self.notes.append(f"layer ids as given: hidden states {listed(self.asked_layer_ids)}")
            return tuple(self.asked_layer_ids)
        # In SpecForge's eagle_config an id names the layer whose output is read, elsewhere the one whose input it is.
        counted = [i + 1 for i in outputs]
        if inputs and outputs and inputs != counted:
            raise CheckpointError(
                f"{_LAYER_IDS}: stands in the config ({listed(inputs)}) and in its eagle_config ({listed(outputs)}), "
                "where the ids count otherwise; pass layer_ids"
            )
        if not (inputs or outputs):
            self.notes.append("no layer ids: hidden states 2, L/2 and L - 3 of the target's L layers")
            return None
        ids = tuple(inputs or counted)
        self.notes.append(
            f"layer ids {listed(outputs or inputs)} of the config count layers; as transformers counts hidden states, "
            f"from the embeddings, the head reads {listed(ids)}"
        )
        return ids

    def _draft_vocab_size(self, vocab_size: int) -> int:
        if self.version == 1:
            return vocab_size
        size = self.fields.size("draft_vocab_size", vocab_size)
        if size > vocab_size:
            raise CheckpointError(f"draft_vocab_size: got {size}, more than the target's {vocab_size}")
        return size

    def _head_dim(self, fields: Fields, hidden_size: int, heads: int) -> int:
        if "head_dim" not in fields and hidden_size % heads:
            raise CheckpointError(
                f"head_dim: is missing, and hidden_size {hidden_size} is no multiple of {heads} heads"
            )
        size = fields.size("head_dim", hidden_size // heads)
        if size % 2:
            raise CheckpointError(f"head_dim: got {size}, an even size is needed, of which halves are rotated")
        if heads * size > MOST_SIZE:
            raise CheckpointError(f"num_attention_heads, head_dim: got {heads} and {size}, accepted up to {MOST_SIZE}")
        return size

    def _rope(self, fields: Fields) -> dict[str, Any]:
        """The draft's own rotary parameters; never the target's, which drafts were not trained with."""
        stated = Fields(fields.part("rope_parameters") or fields.part("rope_scaling"))
        if any(isinstance(value, dict) for value in stated.raw.values()):
            raise CheckpointError(f"rope_parameters: one set is needed, got those of {', '.join(stated.raw)}")
        kind = stated.text("rope_type", stated.text("type", "default"))
        if kind not in ROPE_TYPES:
            raise CheckpointError(f"rope_type: got {shown(kind)}, accepted {', '.join(ROPE_TYPES)}")
        if any(part.number("partial_rotary_factor", 1.0, least=0, most=1) != 1.0 for part in (fields, stated)):
            raise CheckpointError("partial_rotary_factor: only whole heads are rotated")
        theta = {"least": 1.0, "most": 1e15}
        chosen = stated if "rope_theta" in stated else fields
        if "rope_theta" not in chosen:
            self.notes.append(f"no rope_theta: {DEFAULT_THETA}, with which the EAGLE repository trains")
        rope = {"rope_type": kind, **_rope_numbers(stated, kind)}
        return rope | {"rope_theta": chosen.number("rope_theta", DEFAULT_THETA, **theta)}


def _rope_numbers(stated: Fields, kind: str) -> dict[str, Any]:
    """What a rotary set of this type says beside its theta; CheckpointError for what it lacks or should not have."""
    needed, possible = _ROPE_NEEDS[kind], _ROPE_MAY.get(kind, ())
    known = (*_ROPE_WITHOUT_EFFECT, *needed, *possible)
    unknown = [name for name in stated.raw if name not in known]
    if unknown:
        found = f"unknown field {shown(unknown[0])} of type {kind}"
        raise CheckpointError(f"rope_parameters: {found}, known are {', '.join(known)}")
    numbers: dict[str, Any] = {}
    for name in (*needed, *(name for name in possible if name in stated)):
        if name not in stated:
            raise CheckpointError(f"rope_parameters: type {kind} needs {name}")
        if name == _ORIGINAL:
            numbers[name] = stated.size(name, most=_MOST_POSITIONS)
        elif name == "truncate":
            numbers[name] = stated.flag(name)
        else:
            least, most = _ROPE_NUMBERS[name]
            numbers[name] = stated.number(name, least=least, most=most)
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise refused("low_freq_factor", numbers["low_freq_factor"], "less than high_freq_factor")
    return numbers


def _require_frequencies(config: EagleConfig) -> None:
    """Raise CheckpointError where the rotary set, each number of it in range, makes no positions."""
    try:
        frequencies, scale = rope_frequencies(config)
    except (ArithmeticError, ValueError) as error:
        raise CheckpointError(f"rope_parameters: {error}") from error
    if not (bool(frequencies.isfinite().all()) and math.isfinite(scale)):
        raise CheckpointError(f"rope_parameters: {shown(dict(config.rope))} give frequencies that are not finite")


# ---------------------------------------------------------------------------------------------------- writing configs


def with_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """`name` with its beginning replaced, where the table has it."""
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def listed(ids: Iterable[int]) -> str:
    return ", ".join(map(str, ids))


def official_config(config: EagleConfig, dtype: str) -> dict[str, Any]:
    """As SpecForge writes it, which the EAGLE repository, SGLang and vLLM read; dtype: of the weights."""
    _refuse("official", norm_recurrent=config.norm_recurrent, qk_norm=config.qk_norm)
    raw = _layer_config(config) | {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": False}
    raw["torch_dtype"] = dtype
    if config.target_hidden_size != config.hidden_size:
        raw["target_hidden_size"] = config.target_hidden_size
    if config.version == 1:
        return raw | {"architectures": ["LlamaForCausalLM"], "bias": config.fc_bias, "qkv_bias": config.qkv_bias}
    _refuse("official", fc_bias=config.fc_bias)
    raw |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": config.draft_vocab_size}
    raw |= {"qkv_bias": config.qkv_bias} | _variant_fields(config)
    if config.qkv_bias and config.o_bias:
        raw["attention_bias"] = True  # vLLM reads no other field of an EAGLE-3 head's biases
    if not config.norm_logits:
        raw["norm_output"] = False  # left out where it is true, which vLLM takes as what speculators means by it
    if config.layer_ids is not None:
        raw[_LAYER_IDS] = list(config.layer_ids)
        raw["eagle_config"] = {_LAYER_IDS: [i - 1 for i in config.layer_ids]}
    return raw


def speculators_config(config: EagleConfig, dtype: str, verifier: Verifier) -> dict[str, Any]:
    """As speculators writes it and vLLM reads it; dtype: of the weights.

    CheckpointError without the verifier's name: readers of this layout load what a head shares with its target from
    there.
    """
    if not verifier.name:
        found = f"target: got {verifier.name!r}"
        raise CheckpointError(f"{found}, accepted the name of the model that the head was made for")
    if type(verifier.tokens) is not int or not 1 <= verifier.tokens <= MOST_TOKENS:
        raise refused("tokens", verifier.tokens, f"a whole number, 1 to {MOST_TOKENS}")
    _refuse("speculators", norm_logits_false=not config.norm_logits)
    if config.qkv_bias != config.o_bias:
        raise CheckpointError("qkv_bias, o_bias: the speculators layout knows only both or none")
    layer = _layer_config(config) | {"attention_bias": config.qkv_bias, "num_hidden_layers": 1}
    layer["model_type"] = "qwen3" if config.qk_norm else "llama"
    algorithm = "eagle" if config.version == 1 else "eagle3"
    raw: dict[str, Any] = {"speculators_model_type": algorithm, "transformer_layer_config": layer, "dtype": dtype}
    raw["speculators_config"] = {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": verifier.tokens}],
        "verifier": {"architectures": list(verifier.architectures), "name_or_path": verifier.name},
    }
    if config.version == 1:
        return raw | {"architectures": ["EagleSpeculator"], "fusion_bias": config.fc_bias, "layernorms": False}
    _refuse("speculators", fc_bias=config.fc_bias)
    layer["num_aux_hidden_states"] = config.num_features  # vLLM counts the layer ids of the official layout alone
    same = config.target_hidden_size == config.hidden_size
    return raw | {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if same else config.target_hidden_size,
        "norm_output": config.norm_recurrent,
        _LAYER_IDS: None if config.layer_ids is None else list(config.layer_ids),
        **_variant_fields(config),
    }


def _layer_config(config: EagleConfig) -> dict[str, Any]:
    rope = dict(config.rope)
    scaling = None if rope["rope_type"] == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
    ours = {_TEMPERATURES: list(config.temperatures)} if config.temperatures else {}
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
        "max_position_embeddings": config.max_position_embeddings,
        **ours,
    }


def _variant_fields(config: EagleConfig) -> dict[str, bool]:
    return {
        "fc_norm": config.fusion_norm == "each",
        "norm_before_fc": config.fusion_norm == "whole",
        "norm_before_residual": config.norm_before_residual,
    }


def unread(config: EagleConfig, layout: Layout) -> list[str]:
    """What engines that read this layout would not do as this head means it, a line each; usual heads have none.

    Found in the sources of vLLM 0.32, speculators 0.9 and SGLang 0.5.23.
    """
    if config.version == 1:
        return (
            [] if layout == "official" else ["vLLM and speculators have no reader of EAGLE-1 in this layout any more"]
        )
    partly = config.qkv_bias != config.o_bias
    found = {
        "vLLM knows no head whose logits are read before the final norm": not config.norm_logits,
        "vLLM drops biases that only some of the attention's projections have": partly,
        f"vLLM runs no hidden_act but silu, this head has {config.hidden_act}": config.hidden_act != "silu",
    }
    if layout == "official":
        found |= {
            "SGLang ignores norm_before_residual": config.norm_before_residual,
            "SGLang drops the biases of queries, keys and values": config.qkv_bias,
        }
    else:
        wide = config.target_hidden_size != config.hidden_size
        found["speculators loads no head whose hidden size is not the target's"] = wide
        found["speculators loads no head that reads a hidden state twice"] = _repeats(config.layer_ids)
    return [line for line, there in found.items() if there]


def _repeats(ids: tuple[int, ...] | None) -> bool:
    return ids is not None and len(set(ids)) < len(ids)


def _refuse(layout: Layout, **variants: bool) -> None:
    for name, there in variants.items():
        if there:
            raise CheckpointError(f"{name}: the {layout} layout has no word for it")
