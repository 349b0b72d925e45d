"""Blocks that a layer may have, with the names of their parts in csrc/cpu, in transformers and in GGUF files."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

SLIDING = "sliding_attention"  # a layer with a window, as transformers' configs call it
# of the mixers' parts: a few weights for each channel
CONVOLUTIONS = "short_conv.conv", "linear_attn.conv1d", "mamba.conv1d"
# a mixer's vectors by their names in GGUF files
STATES = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "D": "ssm_d"}
NO_LIMITS = (0.0, float("inf"))
LATENT = "self_attn.kv_b_proj"  # keys and values of all heads, made of latents
ROUTER_NORM = "router_norm"  # of ExpertsWithDense: is divided by the root of the hidden size
# of GatedDelta, here and in GGUF files: multiplies by its weights whatever a family's other norms do
GATED_NORMS = ".linear_attn.norm", ".ssm_norm.weight"


@dataclass(frozen=True)
class Name:
    """The name of a module in transformers' state dict, and in GGUF files; or of a tensor that is no module's."""

    transformers: str
    gguf: str

    def below(self, above: "Name") -> "Name":
        """Return the whole name of this module of the module `above`."""
        return Name(f"{above.transformers}.{self.transformers}", f"{above.gguf}.{self.gguf}")


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; inner: width of its feed-forward network; eps: of its norms."""

    layers: int
    hidden: int
    inner: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float


class Part(NamedTuple):
    """A module of the native forward.

    native  its name in csrc/cpu
    name    its name in the model. Parts of one name are stored as one tensor, their rows in the order of the parts
    size    its number of outputs: rows of its matrix
    """

    native: str
    name: Name
    size: int


def present(*modules: tuple[str, Name | None, int]) -> Iterator[Part]:
    """Yield the parts that a model has: native name, name and size of each; one without a name is not there."""
    yield from (Part(native, name, size) for native, name, size in modules if name is not None)


class Place(NamedTuple):
    """How the attention of one layer sees positions.

    rope    the key of its parameters in the config's `rope_parameters`; empty if all layers share them, None if the
            layer turns nothing
    window  how many places a token sees, including its own; None for all
    reads   the layer before whose keys and values it reads, or -2 less the number of another model's layer; None if it
            has its own
    """

    rope: str | None
    window: int | None
    reads: int | None = None


def _apart(heads: int, sizes: list[int]) -> list[int]:
    """Return rows that stand by head, that many of each part in a row, in the order of the parts."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [
        head * sum(sizes) + start + row
        for start, size in zip(starts, sizes, strict=True)
        for head in range(heads)
        for row in range(size)
    ]


class QueryFactors(NamedTuple):
    """Factors on turned queries, which grow with the position.

    every    how many positions each factor is of
    factors  those of the first positions, of the next, and so on; the last one is of all that follow
    """

    every: int
    factors: tuple[float, ...]


@dataclass(frozen=True)
class Attention:
    """Attention with rotary positions, which turn the first half of a head's channels with the second half.

    v               None where values are what keys are made of
    reads           the layer before whose keys and values are read, so that k, v and k_norm are None; None for its own
    q_norm, k_norm  RMS norms of queries and keys before the rotation, or None: of each head or, if `whole_norms`, of
                    the channels of all heads as one
    unweighted      norms of each head that have no weights: of q_norm, k_norm and v_norm
    windows         the layers whose windows the config's `sliding_window` is: none, all, or those that its
                    `layer_types` calls sliding_attention
    turns           whether a layer of a config turns channels by position
    partial         whether `partial_rotary_factor` counts: then the first channels of a head alone may be turned
    neighbours      channels 2 i and 2 i + 1 of a head are turned together instead
    sinks           scores of each head besides those of places, of no value; or None
    gates           whose sigmoids multiply what heads give, or None; of the name of q: rows of gates stand after each
                    head's queries
    head_gates      a gate for each head instead, which multiplies all that it gives
    query_factors   those of a config, or None
    """

    q: Name = Name("self_attn.q_proj", "attn_q")
    k: Name | None = Name("self_attn.k_proj", "attn_k")
    v: Name | None = Name("self_attn.v_proj", "attn_v")
    o: Name = Name("self_attn.o_proj", "attn_output")
    q_norm: Name | None = None
    k_norm: Name | None = None
    whole_norms: bool = False
    windows: str = "none"
    turns: Callable[[Any, int], bool] = lambda config, layer: True
    partial: bool = False
    neighbours: bool = False
    sinks: Name | None = None
    gates: Name | None = None
    head_gates: Name | None = None
    query_factors: Callable[[Any], QueryFactors | None] = lambda config: None
    reads: int | None = None
    unweighted: tuple[str, ...] = ()

    def place(self, config: Any, layer: int) -> Place:
        """Return how a layer of this config sees positions."""
        kinds, window = getattr(config, "layer_types", None), None
        if self.windows == "all" or (
            self.windows == "by type" and kinds and kinds[layer] == SLIDING
        ):
            window = config.sliding_window
        ropes = getattr(config, "rope_parameters", None) or {}
        rope = kinds[layer] if kinds and isinstance(ropes.get(kinds[layer]), dict) else ""
        return Place(rope if self.turns(config, layer) else None, window, self.reads)

    def orders(self, shape: Shape) -> dict[str, list[int]]:
        """Return the stored row for each row of a module's parts, where these are not one after the other."""
        return (
            {self.q.transformers: _apart(shape.heads, [shape.head_dim] * 2)}
            if self.gates == self.q
            else {}
        )

    @property
    def refused(self) -> str:
        """Return why csrc/cpu has no attention of these sizes; empty where it has."""
        return ""

    def turnable(self, head_dim: int) -> int:
        """Return how many channels of a head positions may turn."""
        return head_dim

    def turned_rows(self, native: str, shape: Shape) -> tuple[int, int] | None:
        """Return the rows of a head in this part, and the first of those that are turned; None where none is."""
        return (shape.head_dim, 0) if native in ("q_proj", "k_proj") else None

    def kept(self, layers: int) -> int:
        """Return how many layers a cache has for that many layers of this attention."""
        return layers

    def parts(self, shape: Shape) -> Iterator[Part]:
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        return present(
            ("self_attn.q_proj", self.q, queries),
            ("self_attn.gate_proj", self.gates, queries),
            ("self_attn.gate_proj", self.head_gates, shape.heads),
            ("self_attn.k_proj", self.k, keys),
            ("self_attn.v_proj", self.v, keys),
            ("self_attn.o_proj", self.o, shape.hidden),
            ("self_attn.q_norm", self.q_norm, queries if self.whole_norms else shape.head_dim),
            ("self_attn.k_norm", self.k_norm, keys if self.whole_norms else shape.head_dim),
            ("self_attn.sinks", self.sinks, shape.heads),
        )


@dataclass(frozen=True)
class Latent(Attention):
    """Attention whose keys and values are made of one latent for each row, but for a turned part that all heads share.

    A family's `sizes` are those of csrc/cpu: one key-value head of `rank` and `turned` channels, as the cache keeps it.

    rank           channels of a latent, a multiple of 32
    plain, turned  channels of a head's query that positions leave as they are, and those that they turn
    value          channels of a head's value
    query_rank     channels of what queries are made of, or None: of the row itself
    """

    rank: int = 0
    plain: int = 0
    turned: int = 0
    value: int = 0
    query_rank: int | None = None
    partial: bool = True

    eps: ClassVar[float] = 1e-6  # of its norms, whatever the other norms' is

    @property
    def sizes(self) -> list[float]:
        """The sizes in the order of csrc/cpu."""
        return [self.rank, self.plain, self.turned, self.value, self.query_rank or 0, self.eps]

    @property
    def refused(self) -> str:
        return (
            f"latents of {self.rank} channels for heads of {self.plain} + {self.turned} and {self.value}, known are "
            "multiples of 32 for heads of even sizes"
            if self.rank % 32
            or any(size % 2 for size in (self.plain, self.turned, self.value, self.query_rank or 0))
            else ""
        )

    def turnable(self, head_dim: int) -> int:
        return self.turned

    def turned_rows(self, native: str, shape: Shape) -> tuple[int, int] | None:
        first = {"q_proj": self.plain, "kv_a_proj": self.rank}.get(native)
        return None if first is None else (first + self.turned, first)

    def kept(self, layers: int) -> int:
        return -(-layers // 2)  # two layers' latents stand where one has keys and values

    def parts(self, shape: Shape) -> Iterator[Part]:
        queries = shape.heads * (self.plain + self.turned)
        if self.query_rank is None:
            yield Part("self_attn.q_proj", self.q, queries)
        else:
            yield from present(
                ("self_attn.q_a_proj", Name("self_attn.q_a_proj", "attn_q_a"), self.query_rank),
                (
                    "self_attn.q_a_norm",
                    Name("self_attn.q_a_layernorm", "attn_q_a_norm"),
                    self.query_rank,
                ),
                ("self_attn.q_proj", Name("self_attn.q_b_proj", "attn_q_b"), queries),
            )
        yield from present(
            (
                "self_attn.kv_a_proj",
                Name("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
                self.rank + self.turned,
            ),
            ("self_attn.kv_a_norm", Name("self_attn.kv_a_layernorm", "attn_kv_a_norm"), self.rank),
        )
        for head in range(shape.heads):
            yield Part(f"self_attn.k_b.{head}", Name(LATENT, "attn_k_b"), self.plain)
            yield Part(f"self_attn.v_b.{head}", Name(LATENT, "attn_v_b"), self.value)
        yield Part("self_attn.o_proj", self.o, shape.hidden)


def latent_of(config: Any, *, neighbours: bool) -> Latent:
    """Return the latent attention that a config of DeepSeek's names states."""
    return Latent(
        neighbours=neighbours,
        rank=config.kv_lora_rank,
        plain=config.qk_nope_head_dim,
        turned=config.qk_rope_head_dim,
        value=config.v_head_dim,
        query_rank=config.q_lora_rank,
    )


@dataclass(frozen=True)
class Mixer:
    """Stand in the place of attention or with it, with a state of all tokens before.

    csrc/cpu/recurrent.hpp says how trees run.
    """

    @property
    def refused(self) -> str:
        """Return why csrc/cpu has no mixer of these sizes; empty where it has."""
        return ""

    def orders(self, shape: Shape) -> dict[str, list[int]]:
        """Return the stored row for each row of a module's parts, where these are not one after the other."""
        return {}

    def orders_in_files(self) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Return the row in GGUF files for each row of transformers, by the file's module, and the same of columns.

        Modules in which both agree are left out.
        """
        return {}, {}

    def convolved(self, shape: Shape) -> list[float]:
        """Return what the inputs of its convolution are multiplied by, by channel; empty for nothing."""
        return []

    def parts(self, shape: Shape) -> Iterator[Part]:
        """Yield its modules."""
        raise NotImplementedError

    def recurrence(self, shape: Shape) -> list[int]:
        """Return its sizes in the order of csrc/cpu_binding.cpp."""
        raise NotImplementedError


@dataclass(frozen=True)
class ShortConvolution(Mixer):
    """out(c * convolution(b * x)) of three projections b, c and x; taps: tokens that it reads, a row's own included."""

    taps: int

    def parts(self, shape: Shape) -> Iterator[Part]:
        return present(
            ("short_conv.b_proj", Name("conv.in_proj", "shortconv.in_proj"), shape.hidden),
            ("short_conv.c_proj", Name("conv.in_proj", "shortconv.in_proj"), shape.hidden),
            ("short_conv.x_proj", Name("conv.in_proj", "shortconv.in_proj"), shape.hidden),
            ("short_conv.conv", Name("conv.conv", "shortconv.conv"), shape.hidden),
            ("short_conv.out_proj", Name("conv.out_proj", "shortconv.out_proj"), shape.hidden),
        )

    def recurrence(self, shape: Shape) -> list[int]:
        return [shape.hidden, self.taps, 0, 0, 0, 0, 0]


@dataclass(frozen=True)
class GatedDelta(Mixer):
    """The gated delta rule over convolved queries, keys and values.

    key_heads, heads      of queries and keys, and of values; the first divide the others among themselves
    key_size, value_size  channels of each, multiples of 16
    fused                 projections are stored as two, whose rows stand by key head: of the queries, keys, values and
                          gates, and of the two scalars
    """

    taps: int
    key_heads: int
    heads: int
    key_size: int
    value_size: int
    fused: bool = False

    @property
    def refused(self) -> str:
        return (
            f"{self.key_heads} and {self.heads} heads of {self.key_size} and {self.value_size} channels in its states, "
            "known are multiples of the former, and of 16"
            if self.key_size % 16 or self.value_size % 16 or self.heads % self.key_heads
            else ""
        )

    def parts(self, shape: Shape) -> Iterator[Part]:
        values = self.heads * self.value_size
        channels = self.recurrence(shape)[0]
        wide, narrow = ("qkvz", "ba") if self.fused else ("", "")
        beta, alpha = ("ssm_ba", "ssm_ba") if self.fused else ("ssm_beta", "ssm_alpha")
        return present(
            ("linear_attn", Name("linear_attn", "ssm"), self.heads),
            (
                "linear_attn.in_proj_qkv",
                Name(f"linear_attn.in_proj_{wide or 'qkv'}", "attn_qkv"),
                channels,
            ),
            (
                "linear_attn.in_proj_z",
                Name(f"linear_attn.in_proj_{wide or 'z'}", "attn_gate"),
                values,
            ),
            (
                "linear_attn.in_proj_b",
                Name(f"linear_attn.in_proj_{narrow or 'b'}", beta),
                self.heads,
            ),
            (
                "linear_attn.in_proj_a",
                Name(f"linear_attn.in_proj_{narrow or 'a'}", alpha),
                self.heads,
            ),
            ("linear_attn.conv1d", Name("linear_attn.conv1d", "ssm_conv1d"), channels),
            ("linear_attn.norm", Name("linear_attn.norm", "ssm_norm"), self.value_size),
            ("linear_attn.out_proj", Name("linear_attn.out_proj", "ssm_out"), shape.hidden),
        )

    def orders(self, shape: Shape) -> dict[str, list[int]]:
        if not self.fused:
            return {}
        each = self.heads // self.key_heads
        return {
            "linear_attn.in_proj_qkvz": _apart(
                self.key_heads, [self.key_size] * 2 + [each * self.value_size] * 2
            ),
            "linear_attn.in_proj_ba": _apart(self.key_heads, [each, each]),
        }

    def orders_in_files(self) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        # files have the heads of one key next to one another; else those of all keys take turns
        if self.fused or self.heads == self.key_heads:
            return {}, {}
        values, singles, keys = (
            self._tiled(self.value_size),
            self._tiled(1),
            2 * self.key_heads * self.key_size,
        )
        channels = [*range(keys), *(keys + row for row in values)]
        rows = {
            "attn_qkv": channels,
            "ssm_conv1d": channels,
            "attn_gate": values,
            **dict.fromkeys(("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"), singles),
        }
        return rows, {"ssm_out": values}

    def _tiled(self, size: int) -> list[int]:
        """Return the place in GGUF files of each row of the heads, `size` rows each."""
        each = self.heads // self.key_heads
        heads = [head % each * self.key_heads + head // each for head in range(self.heads)]
        return [head * size + row for head in heads for row in range(size)]

    def recurrence(self, shape: Shape) -> list[int]:
        channels = 2 * self.key_heads * self.key_size + self.heads * self.value_size
        return [channels, self.taps, self.key_heads, self.heads, self.key_size, self.value_size, 0]


@dataclass(frozen=True)
class Mamba2(Mixer):
    """The selective state spaces of Mamba-2.

    groups  of heads that share keys and queries (B and C in the paper)
    heads   of inputs (x) and states, each of `head_size` channels, a multiple of 16
    size    of a key, a multiple of 4
    norms   groups of heads whose channels are normed together; 0: none are
    module  its name in a layer
    limits  of a token's step; none, as transformers keeps to them in prompts alone
    factors     that inputs, keys and queries are multiplied by before they are convolved
    gated_last  whether gates multiply what was normed; else norms are of what was gated
    """

    taps: int
    groups: int
    heads: int
    size: int
    head_size: int
    norms: int
    module: str = "mamba"
    limits: tuple[float, ...] = NO_LIMITS
    factors: tuple[float, ...] = ()
    gated_last: bool = False

    @property
    def refused(self) -> str:
        if self.limits != NO_LIMITS:
            return f"time_step_limit {self.limits} in its config"
        return (
            f"{self.groups} groups of {self.heads} heads of {self.head_size} channels and {self.size} numbers each in "
            "its states, known are multiples of the first, of 16 and of 4"
            if self.size % 4
            or self.head_size % 16
            or self.heads % self.groups
            or self.heads % (self.norms or 1)
            else ""
        )

    def parts(self, shape: Shape) -> Iterator[Part]:
        values, channels = self.heads * self.head_size, self.recurrence(shape)[0]
        inside = Name(f"{self.module}.in_proj", "ssm_in")
        return present(
            ("mamba", Name(self.module, "ssm"), self.heads),
            ("mamba.in_proj_z", inside, values),
            ("mamba.in_proj_xbc", inside, channels),
            ("mamba.in_proj_dt", inside, self.heads),
            ("mamba.conv1d", Name(f"{self.module}.conv1d", "ssm_conv1d"), channels),
            ("mamba.norm", Name(f"{self.module}.norm", "ssm_norm") if self.norms else None, values),
            ("mamba.out_proj", Name(f"{self.module}.out_proj", "ssm_out"), shape.hidden),
        )

    def recurrence(self, shape: Shape) -> list[int]:
        channels = 2 * self.groups * self.size + self.heads * self.head_size
        return [channels, self.taps, self.groups, self.heads, self.size, self.head_size, self.norms]

    def convolved(self, shape: Shape) -> list[float]:
        keys = self.groups * self.size
        counts = (self.heads * self.head_size, keys, keys) if self.factors else ()
        return [by for by, count in zip(self.factors, counts, strict=True) for _ in range(count)]


@dataclass(frozen=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x)) * up(x)) where `gate` is None."""

    gate: Name | None = Name("mlp.gate_proj", "ffn_gate")
    up: Name = Name("mlp.up_proj", "ffn_up")
    down: Name = Name("mlp.down_proj", "ffn_down")

    def parts(self, shape: Shape) -> Iterator[Part]:
        return present(
            ("mlp.gate_proj", self.gate, shape.inner),
            ("mlp.up_proj", self.up, shape.inner),
            ("mlp.down_proj", self.down, shape.hidden),
        )


@dataclass(frozen=True)
class PlainMLP:
    """down(activation(up(x)))."""

    up: Name
    down: Name

    def parts(self, shape: Shape) -> Iterator[Part]:
        return present(
            ("mlp.gate_proj", self.up, shape.inner), ("mlp.down_proj", self.down, shape.hidden)
        )


def shared_experts(above: str) -> GatedMLP:
    """Return a gated network for all tokens, of the module `above` of a network of experts."""
    return GatedMLP(
        Name(f"mlp.{above}.gate_proj", "ffn_gate_shexp"),
        Name(f"mlp.{above}.up_proj", "ffn_up_shexp"),
        Name(f"mlp.{above}.down_proj", "ffn_down_shexp"),
    )


class Routing(NamedTuple):
    """How a router chooses experts for a token, and their weights.

    chosen      experts of a token
    scores      softmax or sigmoid, of the router's logits; after `normalised ` those chosen are divided by their sum
    least       of that sum
    factor      that weights are multiplied by
    groups      of experts of which `kept` are left to choose from, by the sum of their `rated` best scores, 1 or 2
    """

    chosen: int
    scores: str = "normalised softmax"
    least: float = 0.0
    factor: float = 1.0
    groups: int = 1
    kept: int = 1
    rated: int = 2


NO_ROUTING = Routing(0)


def by_sigmoid(config: Any) -> Routing:
    """Return the routing that DeepSeek V3 has, from the fields of a config like its own."""
    return Routing(
        config.num_experts_per_tok,
        "normalised sigmoid" if config.norm_topk_prob else "sigmoid",
        1e-20,
        config.routed_scaling_factor,
        config.n_group,
        config.topk_group,
    )


def mamba(config: Any) -> Mamba2:
    """Return the mixer that Bamba has, from the fields of a config like its own."""
    return Mamba2(
        taps=config.mamba_d_conv,
        groups=config.mamba_n_groups,
        heads=config.mamba_n_heads,
        size=config.mamba_d_state,
        head_size=config.mamba_d_head,
        norms=config.mamba_n_groups,
        limits=tuple(config.time_step_limit or NO_LIMITS),
    )


class Routes(NamedTuple):
    """Hold how many layers have experts, and over all of them how many a row uses, and how many there are."""

    layers: int
    each: int
    all: int


@dataclass(frozen=True)
class Experts:
    """The sum of some of `count` gated networks, each of `inner` channels, that a router chooses for a token.

    gate, up, down  tensors that have all experts' matrices, [count, outputs, inputs]; no gates as in GatedMLP
    choice          numbers that are added to scores where experts are chosen, or None
    scales          numbers that multiply the weights of experts that were chosen, or None
    shared          a gated network for all tokens, of `shared_inner` channels, or None; shared_gate: a module whose
                    sigmoid is its weight
    biases          whether there are stacks of biases too
    """

    count: int
    inner: int
    routing: Routing
    router: Name = Name("mlp.gate", "ffn_gate_inp")
    gate: Name | None = Name("mlp.experts.gate_up_proj", "ffn_gate_exps.weight")
    up: Name = Name("mlp.experts.gate_up_proj", "ffn_up_exps.weight")
    down: Name = Name("mlp.experts.down_proj", "ffn_down_exps.weight")
    choice: Name | None = None
    scales: Name | None = None
    shared: GatedMLP | None = None
    shared_inner: int = 0
    shared_gate: Name | None = None
    biases: bool = False

    def parts(self, shape: Shape) -> Iterator[Part]:
        yield from present(
            ("mlp.router", self.router, self.count),
            ("mlp.router.choice", self.choice, self.count),
            ("mlp.router.scales", self.scales, self.count),
        )
        stacks = list(
            present(
                ("gate", self.gate, self.inner),
                ("up", self.up, self.inner),
                ("down", self.down, shape.hidden),
            )
        )
        for number in range(self.count):
            for kind, name, size in stacks:
                native = f"mlp.experts.{number}.{kind}_proj"
                yield Part(f"{native}.weight", name, size)
                if self.biases:
                    bias = Name(f"{name.transformers}_bias", name.gguf.replace(".weight", ".bias"))
                    yield Part(f"{native}.bias", bias, size)
        if self.shared is not None:
            for part in self.shared.parts(replace(shape, inner=self.shared_inner)):
                yield part._replace(native=part.native.replace("mlp.", "mlp.shared."))
        yield from present(("mlp.shared.gate", self.shared_gate, 1))


@dataclass(frozen=True)
class ExpertsWithDense:
    """Experts next to a gated network: what is normed and added is norm(mlp(norm(x))) + norm(experts(norm(x))).

    norm, router_norm  of what the experts and their router read; the latter's weights are divided by the root of the
                       hidden size
    mlp_norm           of what the gated network gives
    output_norm        of what the experts give
    """

    experts: Experts
    norm: Name
    router_norm: Name
    mlp_norm: Name
    output_norm: Name

    def parts(self, shape: Shape) -> Iterator[Part]:
        yield from self.experts.parts(shape)
        yield from present(
            ("experts_norm", self.norm, shape.hidden),
            (ROUTER_NORM, self.router_norm, shape.hidden),
            ("dense_norm", self.mlp_norm, shape.hidden),
            ("mixed_norm", self.output_norm, shape.hidden),
        )


@dataclass(frozen=True)
class OwnInputs:
    """Inputs of single layers, `size` channels of each token for each layer.

    They are (norm(projection(x)) + embedding) / sqrt(2) of the first states x, and a layer after its network adds
    norm(out(activation(gate(x)) * inputs)).

    embedding, projection, norm       modules of the model, with all layers' rows or columns side by side
    gate, out, output_norm            modules of each layer
    """

    size: int
    embedding: Name
    projection: Name
    norm: Name
    gate: Name
    out: Name
    output_norm: Name

    def parts(self, shape: Shape) -> Iterator[Part]:
        return present(
            ("model.own_embedding", self.embedding, shape.vocabulary),
            ("model.own_projection", self.projection, shape.layers * self.size),
            ("model.own_norm", self.norm, self.size),
        )

    @property
    def axes(self) -> dict[str, int]:
        """Map the tensors that hold parts of all layers to the dimension along which these stand."""
        return {
            f"{self.embedding.transformers}.weight": 1,
            f"{self.projection.transformers}.weight": 0,
        }


@dataclass(frozen=True)
class Layer:
    """x += norm(attention(norm(x))), then x += norm(mlp(norm(x))). All linear modules may have biases.

    Norms may be None. Those of outputs are of what is added, and RMS norms. A mixer stands in the place of attention,
    which is None then, or with it: both read one norm, and are added together. Of a layer without a network that and
    its norm are None, of one with nothing else the others.

    beside  experts in parallel with the gated network, or None
    own     inputs of the layer's own, or None
    scale   a number that multiplies all that the layer gives, or None
    """

    attention_norm: Name | None = Name("input_layernorm", "attn_norm")
    attention: Attention | None = Attention()
    attention_output_norm: Name | None = None
    mlp_norm: Name | None = Name("post_attention_layernorm", "ffn_norm")
    mlp: GatedMLP | PlainMLP | Experts | None = GatedMLP()
    mlp_output_norm: Name | None = None
    mixer: Mixer | None = None
    beside: ExpertsWithDense | None = None
    own: OwnInputs | None = None
    scale: Name | None = None

    @property
    def experts(self) -> Experts | None:
        """The layer's experts, if it has some."""
        return (
            self.mlp
            if isinstance(self.mlp, Experts)
            else None
            if self.beside is None
            else self.beside.experts
        )

    @property
    def firsts(self) -> list[Attention | Mixer]:
        """The blocks before the network."""
        return [block for block in (self.mixer, self.attention) if block is not None]

    def parts(self, shape: Shape) -> Iterator[Part]:
        yield from present(
            ("input_layernorm", self.attention_norm, shape.hidden),
            ("attention_output_norm", self.attention_output_norm, shape.hidden),
            ("post_attention_layernorm", self.mlp_norm, shape.hidden),
            ("mlp_output_norm", self.mlp_output_norm, shape.hidden),
        )
        for block in (*self.firsts, self.mlp, self.beside):
            if block is not None:
                yield from block.parts(shape)
        if self.own is not None:
            yield from present(
                ("own_gate", self.own.gate, self.own.size),
                ("own_out", self.own.out, shape.hidden),
                ("own_norm", self.own.output_norm, shape.hidden),
            )
        yield from present(("scale", self.scale, 1))
