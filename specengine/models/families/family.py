"""A family: its layers, the names of its sizes in configs, the numbers it multiplies by, and its form in GGUF files."""

# ruff: noqa: RUF009 (the blocks are frozen)

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, NamedTuple

from specengine.models.families.blocks import (
    GATED_NORMS,
    NO_ROUTING,
    Attention,
    Layer,
    Mixer,
    Name,
    OwnInputs,
    Part,
    Place,
    Routes,
    Routing,
    Shape,
    present,
)


class Factors(NamedTuple):
    """Numbers that a model multiplies by.

    scores     of attention; 0 for one over the root of a head's size
    embedding  embeddings; by_token: where transformers' model looks them up, so that those it is given stay as they
               are; in_module: as well, by its module for them, in the model's dtype
    residual   what attention and the network add
    divisor    of logits
    cap        of what tanh leaves of logits; 0 for all
    own        embeddings that are inputs of single layers
    """

    scores: float = 0.0
    embedding: float = 1.0
    residual: float = 1.0
    divisor: float = 1.0
    cap: float = 0.0
    own: float = 1.0
    in_module: bool = False
    by_token: bool = False


class Scaled(NamedTuple):
    """What the inputs and the outputs of a module are multiplied by; its bias is added in between."""

    inputs: float = 1.0
    outputs: float = 1.0


SCALED = ("linear", "llama3", "yarn")  # kinds of positions whose factor says how far they reach
MAX_CONTEXT = 1 << 30


def stated(config: Any, field: str) -> Any:
    """Return the value of a config's field, or None; the common one, which transformers hides, if layers differ."""
    try:
        return getattr(config, field, None)
    except Exception:  # of transformers, whose name older versions lack
        return vars(config).get(field)


def latent_factors(config: Any) -> Factors:
    """Return the factor on scores, which grows with that of YaRN."""
    rope = config.rope_parameters
    every, factor = rope.get("mscale_all_dim") or 0.0, rope.get("factor") or 1.0
    grown = (
        0.1 * every * math.log(factor) + 1.0
        if rope.get("rope_type") != "default" and factor > 1
        else 1.0
    )
    return Factors(scores=(config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5 * grown**2)


def scaled_context(config: Any, limit: int) -> int:
    """Return how many tokens scaled positions reach: their factor times the context that they were trained for.

    limit: the context in the config, which stays where it is above the trained one, or some layers are not scaled.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    reached = []
    for parameters in [value for value in rope.values() if isinstance(value, dict)] or [rope]:
        factor: Any = parameters.get("factor")
        trained: Any = parameters.get("original_max_position_embeddings") or limit
        scaled = (
            parameters.get("rope_type", parameters.get("type")) in SCALED
            and isinstance(factor, int | float)
            and limit <= trained
        )
        reached.append(int(min(factor * trained, MAX_CONTEXT)) if scaled else limit)
    return max(min(reached), limit)


@dataclass(frozen=True)
class Fields:
    """The names of sizes and settings in transformers' config; no activation is silu.

    added_eps  of the norms of what is added; empty: eps
    """

    layers: str = "num_hidden_layers"
    hidden: str = "hidden_size"
    inner: str = "intermediate_size"
    vocabulary: str = "vocab_size"
    heads: str = "num_attention_heads"
    kv_heads: str = "num_key_value_heads"
    head_dim: str = "head_dim"
    eps: str = "rms_norm_eps"
    added_eps: str = ""
    context: str = "max_position_embeddings"
    activation: str = "hidden_act"


def has_experts(value: Callable[[str], Any]) -> bool:
    """Return whether a GGUF file's network has experts, from the function of a metadata key's value."""
    return bool(value("expert_count"))


@dataclass(frozen=True)
class GGUF:
    """The form in which GGUF files store a family.

    architecture  the value of general.architecture, which all other keys begin with
    keys          keys that this family has besides the common ones -> field of transformers' config
    flags         field of transformers' config -> the tensor of some layer whose presence sets it
    ignored       keys that change nothing where a model reads texts alone
    others        further architectures of this form
    pairs         modules whose rows stand in pairs that a rotation turns together: rows 0, 1, 2, 3 of a head are
                  transformers' rows 0, n / 2, 1, n / 2 + 1
    read          further keys, which `finish` reads
    finish        from the config's fields so far, and the function of a metadata key's value: fields to add
    holds         from the function of a metadata key's value, whether a file of this architecture is one of these;
                  None: all that no other family holds
    by_layer      keys whose values may be lists by layer, which `finish` reads; of these the first is the common one
    without       field of transformers' config -> the tensor that layers with keys of their own may lack if it is set
    constants    tensors of all layers, [head size], that hold one number -> the field of transformers' config that it
                 is; empty where it must be 1
    proportional  whether the file's factors on frequencies leave out channels, as proportional positions do
    """

    architecture: str
    keys: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    pairs: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    finish: Callable[[dict[str, Any], Callable[[str], Any]], dict[str, Any]] = (
        lambda fields, value: {}
    )
    holds: Callable[[Callable[[str], Any]], bool] | None = None
    by_layer: tuple[str, ...] = ()
    without: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, str] = field(default_factory=dict)
    proportional: bool = False


@dataclass(frozen=True)
class Family:
    """A decoder: embeddings, layers, a norm, and a head that may be tied to the embeddings.

    layer        of all layers, or a function of a config and a layer's number
    attending    a layer with the attention of a family whose layers differ
    kinds        the config's `layer_types` besides those of attention
    sizes        from a config: those that no single field states
    sizes_at     from a config and a layer's number: those of this layer that no field states
    alone        the fields of a config that has one layer alone, by config and number, besides the lists by layer
    gguf         None where no GGUF file stores the family under a name of its own
    layer_norms  norms are layer norms, with biases if the checkpoint has them; else RMS norms
    parallel     of a config, whether x += attention(norm(x)) + mlp(norm(x)), of one norm
    one_is_zero  norms multiply by 1 + their weights, and GGUF files store the sum
    plain_norms  the ends of the names of norms that do not, in csrc/cpu and in GGUF files
    normed       embeddings are normed, by no weights
    factors      those of a config
    scaled       from a config: what multiplies inputs and outputs of modules of layers, by their names in csrc/cpu
    stored       what folders have in names of tensors, and what transformers makes of it
    neutral      fields of transformers' config that change the forward, and the value that does not
    renamed      what names in files of safetensors have, and what transformers calls it
    exact        the ends of the names of tensors that are float32 in models of any dtype
    unread       from a config: modules that files hold and the model does not read
    alternating  stacks of experts are [experts, inputs, outputs], and gates and ups take turns
    activation   by its name in csrc/cpu, whatever the config's is called; empty: the config's
    causal_lm    returns the class of a causal LM where transformers has none of this type; None where it has
    """

    layer: Layer | Callable[[Any, int], Layer] = Layer()
    attending: Layer = Layer()
    kinds: tuple[str, ...] = ()
    sizes: Callable[[Any], dict[str, Any]] = lambda config: {}
    sizes_at: Callable[[Any, int], dict[str, Any]] = lambda config, number: {}
    alone: Callable[[Any, int], dict[str, Any]] = lambda config, number: {}
    fields: Fields = Fields()
    gguf: GGUF | None = None
    embedding: Name = Name("model.embed_tokens", "token_embd")
    layers: Name = Name("model.layers", "blk")
    norm: Name = Name("model.norm", "output_norm")
    head: Name = Name("lm_head", "output")
    layer_norms: bool = False
    parallel: Callable[[Any], bool] = lambda config: False
    one_is_zero: bool = False
    plain_norms: tuple[str, ...] = GATED_NORMS
    normed: bool = False
    factors: Callable[[Any], Factors] = lambda config: Factors()
    scaled: Callable[[Any], Mapping[str, Scaled]] = lambda config: {}
    stored: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    exact: tuple[str, ...] = ()
    unread: Callable[[Any], list[Name]] = lambda config: []
    alternating: bool = False
    activation: str = ""
    causal_lm: Callable[[], Any] | None = None

    def shape(self, config: Any) -> Shape:
        """Return the sizes that a config states; a head's is hidden size / heads where it states none."""
        sizes = {
            size.name: stated(config, getattr(self.fields, size.name)) for size in fields(Shape)
        }
        head_dim = sizes["head_dim"] or sizes["hidden"] // sizes["heads"]
        return Shape(**sizes | {"head_dim": head_dim} | self.sizes(config))

    def shape_at(self, config: Any, number: int) -> Shape:
        """Return the sizes of a layer, which are the config's own unless that has some by layer."""
        return replace(self.shape(config_at(config, number)), **self.sizes_at(config, number))

    @property
    def attention(self) -> Attention:
        """The attention of the layers that have one: it turns channels alike in all of them."""
        return (
            self.layer if isinstance(self.layer, Layer) else self.attending
        ).attention or Attention()

    def attention_of(self, config: Any) -> Attention:
        """Return the attention of a config's layers that have one, with its sizes."""
        return next(
            (layer.attention for layer in self.layers_of(config) if layer.attention is not None),
            self.attention,
        )

    def recurrence(self, config: Any) -> list[int]:
        """Return the sizes of the recurrent mixers, which are alike in all layers that have one; empty if none has."""
        mixer = self.mixer(config)
        return [] if mixer is None else mixer.recurrence(self.shape(config))

    def mixer(self, config: Any) -> Mixer | None:
        """Return the recurrent mixer of the first layer that has one."""
        return next(
            (layer.mixer for layer in self.layers_of(config) if layer.mixer is not None), None
        )

    def keeps(self, config: Any) -> dict[tuple[int, int], int]:
        """Return how many layers have keys and values of their own, by their number of heads and the size of one."""
        shapes = (
            self.shape_at(config, number)
            for number, layer in enumerate(self.layers_of(config))
            if layer.attention is not None and layer.attention.reads is None
        )
        return Counter((shape.kv_heads, shape.head_dim) for shape in shapes)

    def own_inputs(self, config: Any) -> OwnInputs | None:
        """Return the inputs of single layers, which are alike in all of them."""
        return self.layers_of(config)[0].own

    def layers_of(self, config: Any) -> list[Layer]:
        return [
            self.layer if isinstance(self.layer, Layer) else self.layer(config, number)
            for number in range(self.shape(config).layers)
        ]

    def routing(self, config: Any) -> Routing:
        """Return how all layers that have experts choose them."""
        return next(
            (
                layer.experts.routing
                for layer in self.layers_of(config)
                if layer.experts is not None
            ),
            NO_ROUTING,
        )

    def routes(self, config: Any) -> Routes:
        """Return how many experts there are, over all layers."""
        experts = [layer.experts for layer in self.layers_of(config) if layer.experts is not None]
        return Routes(
            len(experts),
            sum(each.routing.chosen for each in experts),
            sum(each.count for each in experts),
        )

    def places(self, config: Any) -> list[Place]:
        """Return how each layer sees positions."""
        return [
            Place(None, None) if layer.attention is None else layer.attention.place(config, number)
            for number, layer in enumerate(self.layers_of(config))
        ]

    def orders(self, config: Any) -> dict[str, list[int]]:
        """Return the stored row for each row of the parts of a module, of those that store them by head."""

        @cache
        def of_kind(layer: Layer, shape: Shape) -> dict[str, list[int]]:
            return {
                name: rows for block in layer.firsts for name, rows in block.orders(shape).items()
            }

        return {
            f"{self.layers.transformers}.{number}.{name}": rows
            for number, layer in enumerate(self.layers_of(config))
            for name, rows in of_kind(layer, self.shape_at(config, number)).items()
        }

    def parts(self, config: Any) -> Iterator[Part]:
        """Yield all modules by their whole names."""
        shape = self.shape(config)
        yield from present(
            ("model.embed_tokens", self.embedding, shape.vocabulary),
            ("model.norm", self.norm, shape.hidden),
            ("lm_head", self.head, shape.vocabulary),
        )
        if (inputs := self.own_inputs(config)) is not None:
            yield from inputs.parts(shape)
        for number, layer in enumerate(self.layers_of(config)):
            above = Name(f"{self.layers.transformers}.{number}", f"{self.layers.gguf}.{number}")
            for part in layer.parts(self.shape_at(config, number)):
                yield Part(
                    f"model.layers.{number}.{part.native}", part.name.below(above), part.size
                )


def config_at(config: Any, layer: int | str) -> Any:
    """Return the config of a layer, or of a kind of layers, where it has fields that differ by layer; else itself."""
    return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config
