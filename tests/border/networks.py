"""Right calls of the extension for forwards: small decoders and heads of each kind of block."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.border.calls import ROWS, Arguments, Builder, Memory, real, whole

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


# channels and taps of a convolution, heads of keys and values, sizes of both, norms
DELTA = [96, 4, 1, 1, 32, 32, 0]


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
    """Return the rows of `lanes_of_decoder`, as inputs instead of tokens."""
    words = m.put(torch.tensor([[1], [3], [5]])), m.put(torch.tensor([[1]]))
    where = (whole(m, 4, 5, 5), whole(m, 2)), [4, 2], [4, 2], words
    slabs, rated = (slab(m), slab(m)), real(m, 2, VOCABULARY)
    return [*where, real(m, ROWS + 1, HIDDEN), slabs, real(m, ROWS + 1, HIDDEN), rated, 1]


def passed(cpu: Any, *reads: int) -> Any:
    """Return a decoder whose layers read slabs that another model wrote, by default the second one's first."""
    return decoder(cpu, keeps=[(*HEADS[1:], number) for number in reads or (-3, -2)])


def forward_of_passed(m: Memory) -> Arguments:
    arguments = forward_from_inputs(m)
    slabs = (slab(m, 1), slab(m, 1)), (slab(m, 1), slab(m, 1))
    return [*arguments[:3], (None, None), arguments[4], slabs, *arguments[6:]]


def blocks(cpu: Any, **changes: tuple[int, ...]) -> Any:
    """Return the layers of a DFlash head with convolutions of two taps; changes: as in `weights`."""
    fusion = {"model.fc.weight": (HIDDEN, 3 * HIDDEN), "model.hidden_norm.weight": (HIDDEN,)}
    convolution = {
        "model.layers.1.mlp_conv.kernel_projection.weight": (4 * 8, HIDDEN),
        "model.layers.1.mlp_conv.base_kernel": (4 * HIDDEN,),
    }
    return decoder(
        cpu,
        weights(cpu, **(fusion | convolution | changes)),
        places=[(0, 0), (0, 3)],
        traits={"ahead": [1.0, 0.0]},
    )


def forward_of_blocks(m: Memory) -> Arguments:
    arguments = forward_from_inputs(m)
    return [*arguments[:3], (None, None), *arguments[4:]]


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
    "from": (decoder, "forward_from", forward_from_inputs, {(3, 0), (3, 1), 7}),
    "passed": (passed, "forward_from", forward_of_passed, {(3, 0), (3, 1), 7}),
    "blocks": (blocks, "forward_from", forward_of_blocks, {(3, 0), (3, 1), 7}),
    "remember": (
        blocks,
        "remember",
        lambda m: [whole(m, 4, 5, 6), 4, real(m, ROWS, 3 * HIDDEN), slab(m), 1],
        set(),
    ),
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
