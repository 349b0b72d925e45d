"""Published layouts of draft heads: one file per layout, whose name is the file's.

A layout recognises its config.json, reads it into the fields of EagleConfig, and names the tensors. What a config
leaves open is refused, or taken with a note.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from transformers.activations import ACT2FN

from specengine import registry
from specengine.errors import CheckpointError, require_intact, shown

if TYPE_CHECKING:
    from torch import Tensor

    from specengine.models.eagle import EagleConfig

FALLBACK = "eagle"  # reads configs that no layout recognises: those of EAGLE-1 have no mark
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
DEFAULT_THETA = 10000.0  # with which the EAGLE repository trains
MAX_SIZE = 1 << 24  # of any size: torch's counts of elements overflow beyond
MAX_POSITIONS = 1 << 30
MAX_DEPTHS = 64
MAX_FEATURES = 64
BLOCKS = "dflash", "dflash2", "dspark"  # speculators' types that the layout of blocks reads
_ORIGINAL = "original_max_position_embeddings"
_TEMPERATURES = "draft_temperatures"  # ours; other engines, which read no probabilities, do without
NEAR = "sliding_attention"  # as transformers names the layer, in layer_types
# Numbers of rotary sets besides rope_theta, by type: the required and the optional ones.
_ROPE_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor",),
    "proportional": ("partial_rotary_factor",),
}
_ROPE_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": (
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        _ORIGINAL,
    ),
}
_ROPE_IGNORED = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")


@dataclass(frozen=True)
class Verifier:
    """The target, as configs describe it that name the target.

    name           a Hub id or a path, from which engines load the target when they are given the head alone
    architectures  as in the target's config.json
    tokens         length of the chain that is drafted per cycle where nobody asks for another
    """

    name: str | None = None
    architectures: tuple[str, ...] = ()
    tokens: int = 3


class Layout(ABC):
    """Read one config.json. A file of this folder defines one subclass.

    family         layouts of one family have the same tensor names; `producer` chooses among them
    marks          fields that only configs of this layout have
    architectures  entries of the field `architectures` that only they have
    algorithms     those of BLOCKS that it reads
    names_target   whether a config names the target and the length of a chain

    A layout that defines `written` can be written as well, under its family's name.
    """

    family: ClassVar[str]
    marks: ClassVar[tuple[str, ...]] = ()
    architectures: ClassVar[tuple[str, ...]] = ()
    algorithms: ClassVar[tuple[str, ...]] = ()
    names_target: ClassVar[bool] = False

    def __init__(
        self,
        raw: Mapping[str, Any],
        names: Iterable[str],
        *,
        chosen: bool,
        layer_ids: tuple[int, ...] | None,
    ) -> None:
        """Start to read.

        raw: the config; names: of the tensors on disk; chosen: whether the user named the layout; layer_ids: hidden
        states to read instead of the config's.
        """
        self.fields = HeadFields(raw)
        self.names = frozenset(names)
        self.chosen, self.chosen_layer_ids = chosen, layer_ids
        self.notes: list[str] = []
        self.version = self.read_version()
        self.names = frozenset(
            with_prefix(name, self.prefixes(raw, self.version)) for name in self.names
        )

    @classmethod
    def name(cls) -> str:
        """Return the name of the layout's file."""
        return cls.__module__.rpartition(".")[2]

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        """Return whether a config can only be of this layout."""
        stated = raw.get("architectures")
        algorithm = raw.get("speculators_model_type")
        return (
            (algorithm not in BLOCKS and any(mark in raw for mark in cls.marks))
            or algorithm in cls.algorithms
            or (isinstance(stated, list) and any(name in stated for name in cls.architectures))
        )

    @abstractmethod
    def read_version(self) -> Literal[1, 3]:
        """Return the version of EAGLE; CheckpointError for any other kind of head."""

    @abstractmethod
    def read(self) -> dict[str, Any]:
        """Return the fields of EagleConfig, `version` left out; CheckpointError names the field that is refused."""

    @classmethod
    def prefixes(cls, raw: Mapping[str, Any], version: int) -> dict[str, str]:
        """Return the beginnings of tensor names on disk, and those of EagleHead's names in their place."""
        return {}

    def converted(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors under the names of EagleHead; state: those on disk, their prefixes replaced.

        Absent tensors are left absent: the loader lists all that are missing or unused.
        """
        return state

    @classmethod
    def written(cls, config: EagleConfig, dtype: str, verifier: Verifier) -> dict[str, Any]:
        """Return the config.json of a head; dtype: of its weights. CheckpointError where the layout cannot state it."""
        raise CheckpointError(f"layout: {cls.family} heads can be read, but not written")

    @classmethod
    def unread(cls, config: EagleConfig) -> list[str]:
        """Return a line for each field that engines read otherwise than the head means it; usual heads have none."""
        return []

    # ---- what configs of all layouts share

    def read_layer(self, fields: HeadFields) -> dict[str, Any]:
        """Read the sizes and numbers of the decoder layer from the object that holds them."""
        sizes = {
            name: fields.size(name) for name in ("hidden_size", "intermediate_size", "vocab_size")
        }
        heads = fields.size("num_attention_heads")
        kv_heads = fields.size("num_key_value_heads", heads)
        target = self.fields.size("target_hidden_size", sizes["hidden_size"])
        activation = fields.text("hidden_act", "silu")
        require_intact(
            f"num_attention_heads: got {heads}, not a multiple of {kv_heads} key-value heads",
            heads % kv_heads == 0,
        )
        require_intact(f"hidden_act: unknown name {shown(activation)}", activation in ACT2FN)
        hidden_size = sizes["hidden_size"]
        require_intact(
            f"head_dim: is missing, and hidden_size {hidden_size} is not a multiple of {heads} heads",
            "head_dim" in fields or hidden_size % heads == 0,
        )
        head_dim = fields.size("head_dim", hidden_size // heads)
        require_intact(f"head_dim: got {head_dim}, accepted even sizes", head_dim % 2 == 0)
        require_intact(
            f"num_attention_heads, head_dim: got {heads} and {head_dim}, accepted up to {MAX_SIZE}",
            heads * head_dim <= MAX_SIZE,
        )
        there, fits = "embed_tokens.weight" in self.names, target == hidden_size
        require_intact(
            f"target_hidden_size: got {target}, EAGLE-1 needs {hidden_size}",
            self.version != 1 or fits,
        )
        require_intact(
            "embed_tokens.weight: is missing, and the target's embeddings have another width",
            there or fits,
        )
        drafted = (
            sizes["vocab_size"]
            if self.version == 1
            else self.fields.size("draft_vocab_size", sizes["vocab_size"])
        )
        require_intact(
            f"draft_vocab_size: got {drafted}, more than the target's {sizes['vocab_size']}",
            drafted <= sizes["vocab_size"],
        )
        return sizes | {
            "own_embeddings": there,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "target_hidden_size": target,
            "draft_vocab_size": drafted,
            "rms_norm_eps": fields.number("rms_norm_eps", 1e-6, least=1e-30, most=1.0),
            "hidden_act": activation,
            "rope": self._rope(fields),
            "max_position_embeddings": fields.size("max_position_embeddings", 2048, MAX_POSITIONS),
            "temperatures": tuple(
                fields.numbers(_TEMPERATURES, count=MAX_DEPTHS, least=0.05, most=20.0)
            ),
            "sliding_window": fields.size("sliding_window")
            if fields.raw.get("layer_types") == [NEAR]
            else 0,
        }

    def read_fusion(self, ids: list[int], stated: list[int]) -> dict[str, Any]:
        """Read how EAGLE-3 fuses hidden states; ids: theirs, as transformers counts; stated: as the config does."""
        each, whole = self.fields.flag("fc_norm"), self.fields.flag("norm_before_fc")
        require_intact("fc_norm, norm_before_fc: only one of them can be set", not (each and whole))
        return {
            "layer_ids": self._layer_ids(ids, stated),
            "fusion_norm": "each" if each else "whole" if whole else "none",
            "norm_before_residual": self.fields.flag("norm_before_residual"),
        }

    def _layer_ids(self, ids: list[int], stated: list[int]) -> tuple[int, ...] | None:
        if self.chosen_layer_ids is not None:
            self.notes.append(f"layer ids as given: hidden states {listed(self.chosen_layer_ids)}")
            return tuple(self.chosen_layer_ids)
        if not ids:
            self.notes.append(
                "no layer ids: hidden states 2, L/2 and L - 3 of the target's L layers"
            )
            return None
        self.notes.append(
            f"layer ids {listed(stated)} of the config count layers; as transformers counts hidden states, "
            f"from the embeddings, the head reads {listed(ids)}"
        )
        return tuple(ids)

    def _rope(self, fields: HeadFields) -> dict[str, Any]:
        """Read the draft's own rotary parameters; never the target's, which drafts were not trained with."""
        stated = fields.nested("rope_parameters")
        stated = stated if stated.raw else fields.nested("rope_scaling")
        require_intact(
            f"rope_parameters: one set is needed, got those of {', '.join(stated.raw)}",
            not any(isinstance(value, dict) for value in stated.raw.values()),
        )
        kind = stated.text("rope_type", stated.text("type", "default"))
        require_intact(
            f"rope_type: got {shown(kind)}, accepted {', '.join(_ROPE_REQUIRED)}",
            kind in _ROPE_REQUIRED,
        )
        require_intact(
            "partial_rotary_factor: only whole heads are rotated",
            kind == "proportional"
            or all(
                one.number("partial_rotary_factor", 1.0, least=0, most=1) == 1.0
                for one in (fields, stated)
            ),
        )
        holder = stated if "rope_theta" in stated else fields
        if "rope_theta" not in holder:
            self.notes.append(
                f"no rope_theta: {DEFAULT_THETA}, with which the EAGLE repository trains"
            )
        return {
            "rope_type": kind,
            **_rope_numbers(stated, kind),
            "rope_theta": holder.number("rope_theta", DEFAULT_THETA, least=1.0, most=1e15),
        }

    # ---- what written configs of all layouts share

    @classmethod
    def refuse(cls, **variants: bool) -> None:
        """Raise CheckpointError for the first variant that a head has and the layout has no field for."""
        for name, there in variants.items():
            require_intact(f"{name}: the {cls.family} layout has no field for it", not there)

    @staticmethod
    def layer_config(config: EagleConfig) -> dict[str, Any]:
        rope = dict(config.rope)
        ours: dict[str, Any] = (
            {_TEMPERATURES: list(config.temperatures)} if config.temperatures else {}
        )
        if config.sliding_window:
            ours |= {"layer_types": [NEAR], "sliding_window": config.sliding_window}
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
            "rope_scaling": None
            if rope["rope_type"] == "default"
            else {k: v for k, v in rope.items() if k != "rope_theta"},
            "max_position_embeddings": config.max_position_embeddings,
            **ours,
        }

    @staticmethod
    def fusion_config(config: EagleConfig) -> dict[str, bool]:
        return {
            "fc_norm": config.fusion_norm == "each",
            "norm_before_fc": config.fusion_norm == "whole",
            "norm_before_residual": config.norm_before_residual,
        }

    @staticmethod
    def unread_by_vllm(config: EagleConfig) -> dict[str, bool]:
        """Return each problem that vLLM 0.32 has with some EAGLE-3 heads, and whether it has it with this one."""
        return {
            "vLLM knows no head whose logits are read before the final norm": not config.norm_logits,
            "vLLM drops biases that only some of the attention's projections have": config.qkv_bias
            != config.o_bias,
            f"vLLM runs no hidden_act but silu, this head has {config.hidden_act}": config.hidden_act
            != "silu",
        }


# ---- finding layouts


def names() -> list[str]:
    """Return the names of all layouts, sorted: those of the folder's files."""
    return registry.names(sys.modules[__name__])


def named(name: str) -> type[Layout]:
    """Return the layout of this name; InputError lists the known ones."""
    return registry.find(sys.modules[__name__], Layout, name, "producer")  # type: ignore[type-abstract]


def is_head(raw: Mapping[str, Any]) -> bool:
    """Return whether a config is that of a draft head and of nothing else. EAGLE-1's in the EAGLE layout is not."""
    return "draft_vocab_size" in raw or any(named(name).recognises(raw) for name in names())


def layout_of(raw: Mapping[str, Any]) -> type[Layout]:
    """Return the layout of a config: of those that recognise it, the variant of the others.

    CheckpointError where two recognise it and neither is a variant of the other.
    """
    matching = [one for one in map(named, names()) if one.recognises(raw)] or [named(FALLBACK)]
    matching = [
        one
        for one in matching
        if not any(other is not one and issubclass(other, one) for other in matching)
    ]
    require_intact(
        f"its fields fit several layouts: {', '.join(one.name() for one in matching)}",
        len(matching) == 1,
    )
    return matching[0]


# ---- reading fields


@dataclass(frozen=True)
class HeadFields:
    """Read the fields of one JSON object. A missing field, or null, is the default; without one it is refused.

    Methods raise CheckpointError, which names the field and what it accepts.
    """

    raw: Mapping[str, Any]

    def __contains__(self, name: str) -> bool:
        return self.raw.get(name) is not None

    def size(self, name: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """Read a whole number, 1 to `most`."""
        return self._read(
            name,
            default,
            f"a whole number, 1 to {most}",
            lambda value: type(value) is int and 1 <= value <= most,
        )

    def number(
        self, name: str, default: float | None = None, *, least: float, most: float
    ) -> float:
        """Read a number, `least` to `most`."""
        return float(
            self._read(name, default, f"a number, {least:g} to {most:g}", _is_number(least, most))
        )

    def flag(self, name: str, *, default: bool = False) -> bool:
        return self._read(name, default, "true or false", lambda value: isinstance(value, bool))

    def text(self, name: str, default: str | None = None) -> str:
        return self._read(name, default, "text", lambda value: isinstance(value, str))

    def texts(self, name: str) -> list[str]:
        """Read a list of text; empty by default."""
        return self._read_list(name, "a list of text", lambda item: isinstance(item, str))

    def ids(self, name: str = LAYER_IDS) -> list[int]:
        """Read a list of layer ids; empty by default."""
        return self._read_list(
            name,
            f"a list of at most {MAX_FEATURES} whole numbers",
            lambda item: type(item) is int and abs(item) <= MAX_SIZE,
            MAX_FEATURES,
        )

    def numbers(self, name: str, *, count: int, least: float, most: float) -> list[float]:
        """Read a list of up to `count` numbers, `least` to `most` each; empty by default."""
        numbers = self._read_list(
            name,
            f"a list of at most {count} numbers, {least:g} to {most:g}",
            _is_number(least, most),
            count,
        )
        return [*map(float, numbers)]

    def nested(self, name: str) -> HeadFields:
        """Read an object; empty by default."""
        return HeadFields(self._read(name, {}, "an object", lambda value: isinstance(value, dict)))

    def _read_list(
        self, name: str, accepted: str, holds: Callable[[Any], bool], count: float = math.inf
    ) -> list[Any]:
        return self._read(
            name,
            [],
            accepted,
            lambda value: (
                isinstance(value, list) and len(value) <= count and all(map(holds, value))
            ),
        )

    def _read(self, name: str, default: Any, accepted: str, holds: Callable[[Any], bool]) -> Any:
        value = self.raw.get(name)
        value = default if value is None else value
        require_field(name, value, accepted, holds(value))
        return value


def _is_number(least: float, most: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and least <= value <= most


def require_field(name: str, value: Any, accepted: str, holds: bool) -> None:
    """Raise CheckpointError for a field of this value unless `holds`."""
    require_intact(f"{name}: got {shown(value)}, accepted {accepted}", holds)


def listed(ids: Iterable[int]) -> str:
    return ", ".join(map(str, ids))


def with_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a tensor's name with its beginning replaced, where the table has it."""
    replaced = (
        new + name.removeprefix(old) for old, new in prefixes.items() if name.startswith(old)
    )
    return next(replaced, name)


def _rope_numbers(stated: HeadFields, kind: str) -> dict[str, Any]:
    """Read the numbers of a rotary set besides its theta; CheckpointError for missing and for unknown ones."""
    required, optional = _ROPE_REQUIRED[kind], _ROPE_OPTIONAL.get(kind, ())
    accepted = (*_ROPE_IGNORED, *required, *optional)
    unknown = [name for name in stated.raw if name not in accepted]
    require_intact(
        f"rope_parameters: unknown field {', '.join(map(shown, unknown[:1]))} of type {kind}, "
        f"known are {', '.join(accepted)}",
        not unknown,
    )
    missing = [name for name in required if name not in stated]
    require_intact(f"rope_parameters: type {kind} needs {', '.join(missing[:1])}", not missing)
    numbers = {
        name: _ROPE_READERS[name](stated, name) for name in (*required, *optional) if name in stated
    }
    if kind == "llama3":
        require_field(
            "low_freq_factor",
            numbers["low_freq_factor"],
            "less than high_freq_factor",
            numbers["low_freq_factor"] < numbers["high_freq_factor"],
        )
    return numbers


_ROPE_READERS: dict[str, Callable[[HeadFields, str], Any]] = {
    "factor": partial(HeadFields.number, least=1.0, most=1e6),
    "low_freq_factor": partial(HeadFields.number, least=1e-3, most=1e6),
    "high_freq_factor": partial(HeadFields.number, least=1e-3, most=1e6),
    "partial_rotary_factor": partial(HeadFields.number, least=0.0, most=1.0),
    "attention_factor": partial(HeadFields.number, least=1e-3, most=1e3),
    "beta_fast": partial(HeadFields.number, least=1e-3, most=1e6),
    "beta_slow": partial(HeadFields.number, least=1e-3, most=1e6),
    "mscale": partial(HeadFields.number, least=0.0, most=1e3),
    "mscale_all_dim": partial(HeadFields.number, least=0.0, most=1e3),
    "truncate": HeadFields.flag,
    _ORIGINAL: partial(HeadFields.size, most=MAX_POSITIONS),
}
