"""A right call of every function of both extensions, in memory whose surroundings are watched."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

GUARD = 64  # elements before and behind
NODES, CAPACITY, ROWS, COLUMNS, CHILDREN, MOST = 5, 12, 3, 20, 4, 6
CELLS, KNOTS, LEVELS, PLACES = 2 * 8 * 4 * 5, 15, 8, 10


@dataclass
class Memory:
    """Tensors between values that no call may change."""

    held: list[tuple[Tensor, int, int]] = field(default_factory=list, repr=False)

    def put(self, values: Tensor) -> Tensor:
        """A contiguous copy of `values` amidst guards."""
        count = values.numel()
        whole = torch.full((count + 2 * GUARD,), 77, dtype=torch.int64).to(values.dtype)
        whole[GUARD : GUARD + count] = values.reshape(-1)
        self.held.append((whole, GUARD, GUARD + count))
        return whole[GUARD : GUARD + count].view(values.shape)

    def intact(self) -> bool:
        mark = torch.tensor(77)
        return all(
            bool(
                (whole[:first] == mark.to(whole.dtype)).all()
                and (whole[last:] == mark.to(whole.dtype)).all()
            )
            for whole, first, last in self.held
        )


Arguments = list[Any]
Builder = Callable[[Memory], Arguments]
OPS: dict[str, Builder] = {}
OPTIONAL: dict[str, set[tuple[int, ...]]] = {}  # places of arguments that may be None


def call(optional: tuple[int | tuple[int, ...], ...] = ()) -> Callable[[Builder], Builder]:
    def note(build: Builder) -> Builder:
        OPS[build.__name__] = build
        OPTIONAL[build.__name__] = {
            (place,) if isinstance(place, int) else place for place in optional
        }
        return build

    return note


def one(memory: Memory, value: float, dtype: torch.dtype = torch.int32) -> Tensor:
    return memory.put(torch.tensor([value], dtype=dtype))


def whole(memory: Memory, *values: int) -> Tensor:
    return memory.put(torch.tensor(values, dtype=torch.int64))


def ids(memory: Memory, count: int) -> Tensor:
    return memory.put(torch.zeros(count, dtype=torch.int64))


def real(memory: Memory, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return memory.put(-torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def tree(memory: Memory) -> tuple[Tensor, ...]:
    """A chain of NODES nodes with room for CAPACITY."""
    numbers = torch.arange(CAPACITY)
    words = torch.where(numbers < NODES, (1 << (numbers + 1)) - 1, 0)[:, None]
    parents = numbers - 1
    return (
        memory.put(numbers + 100),
        memory.put(parents),
        memory.put(numbers),
        real(memory, CAPACITY),
        real(memory, CAPACITY),
        memory.put(words),
    )


def counts(memory: Memory) -> tuple[Tensor, ...]:
    tables = [memory.put(torch.rand(CELLS, KNOTS) + 0.5) for _ in range(3)]
    profile = [
        memory.put(torch.rand(*shape) + 0.5)
        for shape in ((LEVELS, PLACES), (LEVELS,), (LEVELS, PLACES))
    ]
    return (*tables, *profile, one(memory, 1, torch.int64))


def notes(memory: Memory) -> tuple[Tensor, ...]:
    flags = torch.zeros(CAPACITY + 1, dtype=torch.bool)
    made = real(memory, CAPACITY + 1), ids(memory, CAPACITY + 1), ids(memory, CAPACITY + 1)
    return (*made, memory.put(flags), memory.put(flags))


def net(memory: Memory, inputs: int, hidden: int = 7) -> tuple[Tensor, ...]:
    shapes = (hidden, inputs), (hidden,), (1, hidden), (1,)
    return tuple(real(memory, *shape, seed=number) for number, shape in enumerate(shapes))


@call()
def ancestor_words(m: Memory) -> Arguments:
    return [whole(m, -1, 0, 1, 0)]


def memory_words(m: Memory, rows: int) -> Tensor:
    return m.put(torch.zeros(rows, 1, dtype=torch.int64))


@call()
def append_nodes(m: Memory) -> Arguments:
    given = whole(m, 0, 1, 4), whole(m, 7, 8, 9), real(m, 3)
    return [tree(m), one(m, NODES), *given, one(m, 3), one(m, 0)]


@call(optional=(5, 6, 7))
def append_children(m: Memory) -> Arguments:
    chosen = m.put(torch.ones(ROWS, CHILDREN, dtype=torch.bool))
    tokens = m.put(torch.arange(ROWS * CHILDREN).view(ROWS, CHILDREN))
    frontier = whole(m, 1, 2, 4), one(m, ROWS)
    counters = one(m, NODES), one(m, 2), one(m, 0)
    return [tree(m), counters, frontier, tokens, real(m, ROWS, CHILDREN), chosen, MOST, one(m, 4)]


@call()
def subtree(m: Memory) -> Arguments:
    return [whole(m, -1, 0, 0, 1, 3), memory_words(m, 5), whole(m, 0, 1, 3), one(m, 3)]


@call()
def tree_mask(m: Memory) -> Arguments:
    return [memory_words(m, 4), 9]


@call(optional=(3,))
def select_best(m: Memory) -> Arguments:
    return [real(m, 9), one(m, 8), MOST, one(m, 4)]


@call()
def walk(m: Memory) -> Arguments:
    given = whole(m, 1, 2, 3, 4), whole(m, -1, 0, 0, 2), whole(m, 3, 1, 4, 2)
    return [*given, one(m, 4)]


@call()
def compact_kv(m: Memory) -> Arguments:
    return [real(m, 2, 2, 1, 8, 4), whole(m, 0, 2, 3), one(m, 3), one(m, 4)]


@call()
def top_children(m: Memory) -> Arguments:
    return [real(m, ROWS, COLUMNS), 4, False]


@call(optional=(4, 5, 6))
def best_candidates(m: Memory) -> Arguments:
    limits = one(m, 5), one(m, -20.0, torch.float32), one(m, -30.0, torch.float32)
    return [real(m, ROWS, COLUMNS), real(m, ROWS, seed=1), one(m, ROWS), MOST, *limits, False]


@call()
def top_entropy(m: Memory) -> Arguments:
    return [real(m, ROWS, COLUMNS), 5, False]


@call()
def mix_rows(m: Memory) -> Arguments:
    shares = [1.0, 0.5, 0.25], [COLUMNS + 3, 2 * COLUMNS + 9], [0.5, 0.75]
    return [real(m, ROWS, COLUMNS), 2, *shares, False]


@call()
def mlp(m: Memory) -> Arguments:
    return [real(m, 4, 6), net(m, 6)]


@call()
def classify_paths(m: Memory) -> Arguments:
    return [real(m, ROWS, CHILDREN), real(m, ROWS), one(m, 2), net(m, 3)]


@call()
def classify_row(m: Memory) -> Arguments:
    return [real(m, 1, COLUMNS), 5, one(m, 2), net(m, 12), False]


@call(optional=(4,))
def step_queues(m: Memory) -> Arguments:
    budget, found = 8, 4
    lowest = torch.full((budget,), -math.inf)
    empty = ids(m, budget), ids(m, budget), ids(m, budget)
    queues = (m.put(lowest), m.put(lowest), m.put(lowest), *empty, one(m, -math.inf, torch.float32))
    given = (
        whole(m, 0, 1, 1, 0),
        whole(m, 3, 4, 5, 6),
        real(m, found),
        real(m, found, seed=1),
        one(m, found),
    )
    nodes = (whole(m, 0, 2), one(m, 2)), ids(m, CAPACITY), m.put(torch.arange(COLUMNS)), one(m, 1)
    return [queues, given, *nodes, (3, 6, 0.0, True)]


@call()
def strict_cached_attention(m: Memory) -> Arguments:
    keys, values = real(m, 2, CAPACITY, 6, seed=1), real(m, 2, CAPACITY, 6, seed=2)
    nodes = m.put(torch.tensor([[0, 0, 0], [0, 1, 0], [0, 2, 4]], dtype=torch.int32))
    seen = m.put(torch.tensor([1, 2, 3], dtype=torch.int32))
    return [real(m, 4, ROWS, 6), keys, values, (nodes, seen), one(m, 5), one(m, 3), 0.4]


@call()
def beam_observation(m: Memory) -> Arguments:
    given = real(m, 7), whole(m, 0, 1, 1, 2, 2, 2, 2), one(m, 7), one(m, 1), one(m, 40, torch.int64)
    return [*given, (2, False, 6, -1.0, 2, (100.0, 10.0))]


@call()
def best_action(m: Memory) -> Arguments:
    layers = [real(m, 5, 4), real(m, 5), real(m, 3, 5), real(m, 3)]
    return [real(m, 4), layers, "tanh"]


@call()
def chances(m: Memory) -> Arguments:
    return [real(m, 4), whole(m, 0, 1, 2, 1), m.put(torch.rand(3, KNOTS) + 0.1)]


def throughput(m: Memory) -> tuple[Any, ...]:
    verify, draft, *priced = (m.put(torch.rand(size) + 0.5) for size in (9, 4, 9, 4))
    real_ones = one(m, 0.3, torch.float32), one(m, 3), one(m, 0.1, torch.float32)
    experts = m.put(torch.rand(8) / 4)
    return (
        verify,
        draft,
        (*priced, whole(m, 1, 2, 3)),
        m.put(torch.rand(2) + 0.5),
        *real_ones,
        experts,
    )


@call(optional=((3, 1), (3, 3)))
def grow_likely(m: Memory) -> Arguments:
    marks = m.put(torch.ones(ROWS, COLUMNS, dtype=torch.uint8))
    drafted = real(m, ROWS, COLUMNS), m.put(torch.arange(COLUMNS)), False, marks, None
    frontier, counters = (whole(m, 1, 2, 4), one(m, ROWS)), (one(m, NODES), one(m, 2), one(m, 0))
    return [
        tree(m),
        counters,
        frontier,
        drafted,
        counts(m),
        notes(m),
        throughput(m),
        (-30.0, MOST, 2, 4),
    ]


def chain(nodes: Any, most: int, least: float) -> tuple[list[Any], ...]:
    """Free continuations: a node below the first one that was asked for, and one below that."""
    size = len(nodes[0]) and int(nodes[0][0]) + 1
    return [size - 1, size], [200, 201], [-0.1, -0.2], [5, 6], [0, 12]


@call(optional=(6,))
def start_search(m: Memory) -> Arguments:
    books = counts(m), notes(m), throughput(m)
    return [tree(m), one(m, 1), *books, 2, chain, (6, -2.0)]


@call(optional=(5,))
def keep_likely(m: Memory) -> Arguments:
    noted = notes(m)
    noted[3][4] = True  # the last of the chain waits
    return [tree(m), one(m, NODES), counts(m), noted, throughput(m), chain, (3, 4, -2.0), MOST]


@call(optional=(6,))
def root_rows(m: Memory) -> Arguments:
    given = whole(m, 100, 101), whole(m, 1, 2, 3, 4), one(m, 2), one(m, 7), memory_words(m, 3)
    return [*given, 3, real(m, 4)]


@call(optional=(6,))
def level_rows(m: Memory) -> Arguments:
    frontier = whole(m, 1, 2, 4), one(m, ROWS)
    return [
        tree(m),
        one(m, NODES),
        frontier,
        one(m, 7),
        one(m, 2),
        memory_words(m, CAPACITY + 1),
        real(m, 4),
    ]


@call()
def extract(m: Memory) -> Arguments:
    return [tree(m), whole(m, 0, 1, 2), one(m, 3)]


@call()
def count_outcomes(m: Memory) -> Arguments:
    path = whole(m, 0, 1, 2), one(m, 3)
    return [tree(m), one(m, NODES), path, whole(m, 101, 102, 5), counts(m), notes(m), throughput(m)]


@call()
def update_throughput(m: Memory) -> Arguments:
    return [throughput(m), one(m, 2)]


@call()
def select_worth(m: Memory) -> Arguments:
    return [real(m, 9), one(m, 8), m.put(torch.arange(9) * 0.1), MOST]


@call()
def next_pass(m: Memory) -> Arguments:
    waiting = m.put(torch.ones(9, dtype=torch.bool))
    prices = m.put(torch.arange(9) * 0.05), m.put(torch.arange(5) * 0.01), whole(m, 1, 2, 4)
    tables = m.put(torch.rand(LEVELS, PLACES)), prices
    return [real(m, 9), real(m, 9, seed=1), waiting, one(m, 8), *tables, 3]


@call()
def keyed_gumbel_argmax(m: Memory) -> Arguments:
    return [real(m, 300), 7, 3]


@call(optional=(1,))
def couple(m: Memory) -> Arguments:
    given = real(m, ROWS, COLUMNS), m.put(torch.arange(COLUMNS)), whole(m, 4, 5, 6)
    numbers = one(m, 9, torch.int64), one(m, 0.7, torch.float32)
    return [*given, *numbers]


# ---------------------------------------------------------------------------------------------------- the forward

HIDDEN, VOCABULARY, GATED, HEADS, LAYERS, SLOTS = 32, 40, 48, (4, 2, 8), 2, 16
FREQUENCIES = [1.0, 0.5, 0.25, 0.125]
# epsilon, scale of scores, factors on embeddings and what is added, divisor, cap, factor on inputs of single layers
NUMBERS = [1e-5, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]
NO_ROUTING = ("softmax", [0, 1, 1, 2], [0.0, 1.0])
NUMERICS = "bfloat16"


def weights(
    cpu: Any,
    *,
    eagle: bool = False,
    without: str = "",
    kind: str = "f32",
    **changes: tuple[int, ...],
) -> Any:
    """Packed random weights of a decoder or a head; changes: other shapes of tensors, dots as two underscores."""
    made, random = cpu.Weights(1), torch.Generator().manual_seed(0)
    for name, shape in (
        shapes(eagle) | {name.replace("__", "."): size for name, size in changes.items()}
    ).items():
        values = torch.randn(shape, generator=random)
        if name == without:
            continue
        if len(shape) == 1:
            made.add_vector(name, values)
            continue
        made.add_matrix(name, kind, *shape)
        made.pack(name, "f32", 0, values, None)
    return made


def shapes(eagle: bool) -> dict[str, tuple[int, ...]]:
    queries, keys, size = HEADS
    found: dict[str, tuple[int, ...]] = {}
    width = 2 * HIDDEN if eagle else HIDDEN
    for prefix in ["layers.0."] if eagle else [f"model.layers.{layer}." for layer in range(LAYERS)]:
        found |= {
            f"{prefix}self_attn.q_proj.weight": (queries * size, width),
            f"{prefix}self_attn.k_proj.weight": (keys * size, width),
            f"{prefix}self_attn.v_proj.weight": (keys * size, width),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, queries * size),
            f"{prefix}mlp.gate_proj.weight": (GATED, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (GATED, HIDDEN),
            f"{prefix}mlp.down_proj.weight": (HIDDEN, GATED),
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        }
    if eagle:
        norms: dict[str, tuple[int, ...]] = {
            "layers.0.hidden_norm.weight": (HIDDEN,),
            "norm.weight": (HIDDEN,),
        }
        return (
            found
            | norms
            | {"fc.weight": (HIDDEN, 3 * HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
        )
    return found | {
        "model.norm.weight": (HIDDEN,),
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    }


def decoder(cpu: Any, made: Any = None, **changes: Any) -> Any:
    """changes: sizes, activation, numbers, ropes, places, routing, recurrence, keeps or traits."""
    given = {
        "sizes": [LAYERS, HIDDEN, VOCABULARY, *HEADS],
        "activation": "silu",
        "numbers": NUMBERS,
        "weights": weights(cpu) if made is None else made,
        "ropes": [(FREQUENCIES, 1.0)],
        "places": [(0, 0)] * LAYERS,
        "routing": NO_ROUTING,
        "recurrence": [],
        "keeps": [],
        "traits": {},
    }
    return cpu.Decoder(_set(cpu), NUMERICS, *(given | changes).values())


def eagle(cpu: Any, made: Any = None, sizes: list[int] | None = None) -> Any:
    sizes = [HIDDEN, VOCABULARY, *HEADS, 0] if sizes is None else sizes
    given = weights(cpu, eagle=True) if made is None else made
    return cpu.Eagle(_set(cpu), NUMERICS, sizes, [True, True, False], 1e-5, given, FREQUENCIES, 1.0)


def _set(cpu: Any) -> str:
    return str(cpu.instruction_sets(NUMERICS)[-1])


def slab(m: Memory, layers: int = LAYERS, dtype: torch.dtype = torch.float32) -> Tensor:
    return real(m, layers, 2, HEADS[1], SLOTS, HEADS[2], dtype=dtype)


def forward_of_decoder(m: Memory) -> Arguments:
    best = m.put(torch.zeros(ROWS, 2, dtype=torch.int64)), real(m, ROWS, 2)
    out = real(m, ROWS, 2 * HIDDEN), real(m, 2, VOCABULARY), *best
    given = (
        whole(m, 4, 5, 5),
        4,
        4,
        m.put(torch.tensor([[1], [3], [5]])),
        whole(m, 1, 2, 3),
        slab(m),
    )
    return [
        *given,
        [0, LAYERS],
        *out,
        LAYERS,
        1,
        None,
        0,
        m.put(torch.zeros(ROWS, dtype=torch.int32)),
        None,
    ]


def sparse(count: int = 6, **wrong: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors that make the first layer's network one of experts."""
    prefix = "model.layers.0.mlp."
    found: dict[str, tuple[int, ...]] = {f"{prefix}router.weight": (count, HIDDEN)}
    for above in (*(f"experts.{expert}" for expert in range(count)), "shared"):
        found |= {f"{prefix}{above}.{part}_proj.weight": (GATED, HIDDEN) for part in ("gate", "up")}
        found |= {f"{prefix}{above}.down_proj.weight": (HIDDEN, GATED)}
    return found | {f"{prefix}{name}": shape for name, shape in wrong.items()}


def routed(cpu: Any) -> Any:
    """Return a decoder whose first layer has experts, of which each row uses two."""
    return decoder(cpu, weights(cpu, **sparse()), routing=("softmax", [2, 1, 1, 2], [0.0, 1.0]))


def forward_of_routed(m: Memory) -> Arguments:
    return [*forward_of_decoder(m)[:-1], m.put(torch.zeros(1, ROWS, 2, dtype=torch.int32))]


def lanes_of_decoder(m: Memory) -> Arguments:
    """Return the rows of `forward_of_decoder` and one more, of another text."""
    best = m.put(torch.zeros(ROWS + 1, 2, dtype=torch.int64)), real(m, ROWS + 1, 2)
    out = real(m, ROWS + 1, 2 * HIDDEN), real(m, 2, VOCABULARY), *best
    words = m.put(torch.tensor([[1], [3], [5]])), m.put(torch.tensor([[1]]))
    given = (
        (whole(m, 4, 5, 5), whole(m, 2)),
        [4, 2],
        [4, 2],
        words,
        whole(m, 1, 2, 3, 4),
        (slab(m), slab(m)),
    )
    return [*given, [0, LAYERS], *out, 1, [], []]


OWN = 6  # channels of each layer's own inputs


def uneven(cpu: Any, reads: int = -1, without: str = "", **wrong: tuple[int, ...]) -> Any:
    """Return a decoder whose layers have other heads, the second without values, or keys; with inputs of their own."""
    prefix, (queries, keys, size) = "model.layers.1.", HEADS
    own: dict[str, tuple[int, ...]] = {
        f"{prefix}self_attn.q_proj.weight": (queries * 2 * size, HIDDEN),
        f"{prefix}self_attn.k_proj.weight": (2 * size, HIDDEN),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, queries * 2 * size),
        f"{prefix}self_attn.v_norm.weight": (2 * size,),
        "model.own_embedding.weight": (VOCABULARY, LAYERS * OWN),
        "model.own_projection.weight": (LAYERS * OWN, HIDDEN),
        "model.own_norm.weight": (OWN,),
    }
    for layer in range(LAYERS):
        above = f"model.layers.{layer}."
        own |= {f"{above}own_gate.weight": (OWN, HIDDEN), f"{above}own_out.weight": (HIDDEN, OWN)}
        own |= {f"{above}own_norm.weight": (HIDDEN,), f"{above}scale": (1,)}
    if reads >= 0:
        own = {name: shape for name, shape in own.items() if "self_attn" not in name}
    keeps = [(keys, size, -1), (keys, size, reads) if reads >= 0 else (1, 2 * size, -1)]
    made = weights(cpu, without=without or f"{prefix}self_attn.v_proj.weight", **own | wrong)
    return decoder(cpu, made, keeps=keeps, numbers=[*NUMBERS[:5], 2.0, 0.5])


def forward_of_uneven(m: Memory) -> Arguments:
    arguments = forward_of_decoder(m)
    other = real(m, 1, 2, 1, SLOTS, 2 * HEADS[2])
    arguments[5] = (slab(m, 1), other)
    return arguments


DELTA = [
    96,
    4,
    1,
    1,
    32,
    32,
    0,
]  # channels and taps of a convolution, heads of keys and values, sizes of both, norms


def hybrid(cpu: Any, recurrence: list[int] = DELTA, **changes: tuple[int, ...]) -> Any:
    """Return a decoder whose second layer has the gated delta rule, with other shapes of its tensors."""
    prefix, channels, taps, values = (
        "model.layers.1.linear_attn.",
        DELTA[0],
        DELTA[1],
        DELTA[3] * DELTA[5],
    )
    own: dict[str, tuple[int, ...]] = {
        "in_proj_qkv.weight": (channels, HIDDEN),
        "in_proj_z.weight": (values, HIDDEN),
        "in_proj_b.weight": (DELTA[3], HIDDEN),
        "in_proj_a.weight": (DELTA[3], HIDDEN),
        "out_proj.weight": (HIDDEN, values),
        "conv1d.weight": (taps * channels,),
        "A_log": (DELTA[3],),
        "dt_bias": (DELTA[3],),
        "norm.weight": (DELTA[5],),
    }
    shapes = {prefix + name: shape for name, shape in (own | changes).items()}
    return decoder(cpu, weights(cpu, **shapes), recurrence=recurrence)


MAMBA = [80, 4, 1, 2, 24, 16, 2]


def mamba(cpu: Any, recurrence: list[int] = MAMBA, **changes: tuple[int, ...]) -> Any:
    """Return a decoder whose second layer has Mamba-2, with other shapes of its tensors."""
    prefix, channels, heads, values = (
        "model.layers.1.mamba.",
        MAMBA[0],
        MAMBA[3],
        MAMBA[3] * MAMBA[5],
    )
    own: dict[str, tuple[int, ...]] = {
        "in_proj_z.weight": (values, HIDDEN),
        "in_proj_xbc.weight": (channels, HIDDEN),
        "in_proj_dt.weight": (heads, HIDDEN),
        "out_proj.weight": (HIDDEN, values),
        "conv1d.weight": (MAMBA[1] * channels,),
        "conv1d.bias": (channels,),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "D": (heads,),
        "norm.weight": (values,),
    }
    shapes = {prefix + name: shape for name, shape in (own | changes).items()}
    return decoder(cpu, weights(cpu, **shapes), recurrence=recurrence)


MEMORY_OF = 13  # the place of a memory in the arguments of a forward; how many of its slots are committed stands behind


def forward_from_inputs(m: Memory) -> Arguments:
    where = forward_of_decoder(m)
    return [*where[:4], real(m, ROWS, HIDDEN), where[5], real(m, ROWS, HIDDEN), 1]


def forward_of_mamba(m: Memory) -> Arguments:
    return forward_of_hybrid(m, made_mamba())


def forward_of_hybrid(m: Memory, network: Any = None) -> Arguments:
    network = network or made_hybrid()
    memory = network.memory()
    network.forward(
        whole(m, 0, 1),
        0,
        0,
        None,
        whole(m, 3, 4),
        slab(m),
        [],
        None,
        None,
        None,
        None,
        LAYERS,
        1,
        memory,
        0,
        None,
        None,
    )
    arguments = forward_of_decoder(m)
    arguments[1:3], arguments[MEMORY_OF : MEMORY_OF + 2] = [2, 2], [memory, 2]
    return arguments


@cache
def made_hybrid() -> Any:
    return hybrid(importlib.import_module("specengine._cpu"))


@cache
def made_mamba() -> Any:
    return mamba(importlib.import_module("specengine._cpu"))


@cache
def target() -> Any:
    return decoder(importlib.import_module("specengine._cpu"))


def forward_of_eagle(m: Memory) -> Arguments:
    where = whole(m, 4, 5, 5), 4, 4, m.put(torch.tensor([[1], [3], [5]]))
    hidden = real(m, ROWS, 3 * HIDDEN), real(m, 2, HIDDEN), whole(m, 1, 0, 1)
    out = slab(m, 1), real(m, ROWS, HIDDEN), real(m, 2, VOCABULARY)
    return [target(), *where, whole(m, 1, 2, 3), *hidden, *out, 1]


def later_forward_of_eagle(m: Memory) -> Arguments:
    """From earlier states instead of features."""
    arguments = forward_of_eagle(m)
    arguments[6] = None
    return arguments


def lanes_of_eagle(m: Memory) -> Arguments:
    """Return the rows of `forward_of_eagle` and one more, of another text, from an earlier state."""
    words = m.put(torch.tensor([[1], [3], [5]])), m.put(torch.tensor([[1]]))
    where = (whole(m, 4, 5, 5), whole(m, 2)), [4, 2], [4, 2], words
    features, states = (real(m, ROWS, 3 * HIDDEN), None), (None, real(m, 2, HIDDEN))
    out = (slab(m, 1), slab(m, 1)), real(m, ROWS + 1, HIDDEN), real(m, ROWS + 1, VOCABULARY)
    return [target(), *where, whole(m, 1, 2, 3, 4), features, states, (None, whole(m, 1)), *out, 1]


CPU: dict[str, tuple[Callable[[Any], Any], str, Builder, set[Any]]] = {
    "decoder": (decoder, "forward", forward_of_decoder, {3, 8, 9, 13, 15, 16}),
    "routed": (routed, "forward", forward_of_routed, {3, 8, 9, 13, 15, 16}),
    "lanes": (decoder, "forward_lanes", lanes_of_decoder, {(3, 0), (3, 1), 8, 9}),
    "from": (decoder, "forward_from", forward_from_inputs, {3}),
    "hybrid": (hybrid, "forward", forward_of_hybrid, {3, 8, 9, 15, 16}),
    "mamba": (mamba, "forward", forward_of_mamba, {3, 8, 9, 15, 16}),
    "read": (
        decoder,
        "read",
        lambda m: [real(m, ROWS, HIDDEN), real(m, ROWS, VOCABULARY), 1],
        set(),
    ),
    "embedding": (
        decoder,
        "embedding",
        lambda m: [whole(m, 0, 7, 39), real(m, ROWS, HIDDEN)],
        set(),
    ),
    "uneven": (uneven, "forward", forward_of_uneven, {3, 8, 9, 13, 15, 16}),
    "own_embedding": (
        uneven,
        "own_embedding",
        lambda m: [whole(m, 0, 7, 39), real(m, ROWS, LAYERS * OWN)],
        set(),
    ),
    "eagle": (eagle, "forward", forward_of_eagle, {4, 6, 7, 8, 11}),
    "eagle, lanes": (
        eagle,
        "forward_lanes",
        lanes_of_eagle,
        {(4, 0), (4, 1), (6, 1), (7, 0), (8, 0), 11},
    ),
    "eagle, later": (eagle, "forward", later_forward_of_eagle, {4, 11}),
}


def copies(ops: Any) -> Any:
    made = ops.Copies([0.5, 0.6], 8.0, 0.98, 8)
    made.begin([100, 101, 3, 100, 101, 4], [])
    made.columns(torch.tensor([3, 101]))
    return made


def table(ops: Any) -> Any:
    return ops.SuccessorTable()


def plan_of_copies(m: Memory) -> Arguments:
    carried, parents = tree(m)[:2]
    return [(carried, parents), whole(m, 1, 0, 4), one(m, 3), 2]


def mix_of_copies(m: Memory) -> Arguments:
    carried, parents = tree(m)[:2]
    return [m.put(torch.rand(3, 5)), (carried, parents), whole(m, 1, 0, 4), one(m, 3), False]


def free_of_copies(m: Memory) -> Arguments:
    parts = tree(m)
    return [
        (parts[0], parts[1], parts[4], one(m, NODES)),
        whole(m, 1, 0, 4),
        one(m, 3),
        6,
        -9.0,
        None,
    ]


def rows_of_table(m: Memory) -> Arguments:
    return [whole(m, 5, 6, 5), [0, 2], m.put(torch.arange(8).view(4, 2)), m.put(torch.rand(4, 2))]


MEMORY: dict[str, tuple[Callable[[Any], Any], str, Builder, set[int]]] = {
    "plan": (copies, "plan", plan_of_copies, set()),
    "mix": (copies, "mix", mix_of_copies, set()),
    "free": (copies, "free", free_of_copies, {5}),
    "columns": (copies, "columns", lambda m: [whole(m, 3, 101)], {0}),
    "learn": (table, "learn", rows_of_table, set()),
}


# ---------------------------------------------------------------------------------------------------- hostile tensors


class Wrapper(Tensor):
    """A tensor without memory of its own, as quantised weights and sharded ones are."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def freed(like: Tensor) -> Tensor:
    """A tensor whose memory was given back, as sharded training does between uses."""
    made = like.clone()
    made.untyped_storage().resize_(0)
    return made


def spread(like: Tensor) -> Tensor:
    """The same values, every second element of a larger one."""
    return torch.stack([like, like], -1)[..., 0]


def misaligned(like: Tensor) -> Tensor:
    buffer = bytearray(like.numel() * like.element_size() + 1)
    return torch.frombuffer(buffer, dtype=like.dtype, offset=1).view(like.shape)


WRONG: dict[str, Callable[[Tensor], Any]] = {
    "float16": lambda given: given.to(torch.float16),
    "float64": lambda given: given.to(torch.float64),
    "int16": lambda given: given.to(torch.int16),
    "complex": lambda given: given.to(torch.complex64),
    "rank": lambda given: given[None, None],
    "rank 9": lambda given: given[(None,) * 9],
    "meta": lambda given: given.to("meta"),
    "wrapper": Wrapper,
    "freed": freed,
    "sparse": lambda given: given.to_sparse(),
    "a number": lambda given: 3,
    "an address": lambda given: given.data_ptr(),
    "a list": lambda given: given.tolist(),
    "a text": lambda given: "tensor",
    "numpy": lambda given: given.float().numpy(),
}


Place = tuple[int, ...]  # of an argument, and within it where it is a list


def tensors_of(arguments: Sequence[Any]) -> Iterator[Place]:
    """Yield the places of tensors."""
    for place, value in enumerate(arguments):
        if isinstance(value, Tensor):
            yield (place,)
        elif isinstance(value, list | tuple):
            yield from ((place, *below) for below in tensors_of(value))


def at(arguments: Sequence[Any], place: Place) -> Tensor:
    value = arguments[place[0]]
    return value if len(place) == 1 else at(value, place[1:])


def replaced(arguments: Sequence[Any], place: Place, by: Any) -> Arguments:
    first, *below = place
    made = list(arguments)
    made[first] = replaced(arguments[first], tuple(below), by) if below else by
    if isinstance(arguments[first], tuple) and below:
        made[first] = tuple(made[first])
    return made
