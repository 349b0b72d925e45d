"""Networks of wrong weights, sizes or blocks are refused by the extension."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.border.calls import Memory, replaced
from tests.border.networks import (
    CPU,
    GATED,
    HEADS,
    HIDDEN,
    LAYERS,
    MAMBA,
    MEMORY_OF,
    NO_ROUTING,
    NUMBERS,
    OWN,
    SLOTS,
    VOCABULARY,
    blocks,
    decoder,
    eagle,
    forward_of_passed,
    forward_of_uneven,
    hybrid,
    mamba,
    passed,
    sparse,
    uneven,
    weights,
)

_cpu = pytest.importorskip("specengine._cpu")
# sizes that go together
LATENT, WIDE = [32, 8, 8, 8, 0, 1e-6], [LAYERS, HIDDEN, VOCABULARY, 4, 1, 40]


# ---------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("f32", 0, torch.ones(16, 8, dtype=torch.float64)), "rows: got float64"),
        (("f32", 0, torch.ones(16, 8, dtype=torch.bfloat16)), "rows: got bfloat16"),
        (("bf16", 0, torch.ones(16, 8, dtype=torch.bfloat16)), "kind: got bf16"),
        (("q8_0", 0, torch.zeros(34 * 4, dtype=torch.uint8)), "rows: got uint8|kind: got q8_0"),
        (("i8", 0, torch.zeros(128, dtype=torch.int8)), "rows: got int8"),
        (("f32", 0, torch.ones(17, 8)), "rows: got 17"),
        (("f32", 0, torch.ones(24, 8)[:, :7]), "rows: got float32"),
        (("f32", 8, torch.ones(16, 8)), "first: got 8"),
        (("f32", -16, torch.ones(16, 8)), "first: got -16"),
        (("f32", 16, torch.ones(24, 8)), "rows: got 24"),
        (("f32", 1 << 40, torch.ones(16, 8)), "rows: got 16"),
        (("f32", 0, torch.ones(24, 8, device="meta")), "rows: got float32"),
        (("f32", 0, torch.nn.Parameter(torch.ones(24, 8)).to_sparse()), "rows: got float32"),
        (("what", 0, torch.ones(24, 8)), "kind: got what"),
    ],
)
def test_weights_of_another_kind_or_size_are_not_packed(
    arguments: tuple[Any, ...], message: str
) -> None:
    made = _cpu.Weights(1)
    made.add_matrix("m", "f32", 24, 8)
    with pytest.raises(ValueError, match=message):
        made.pack("m", *arguments, None)
    made.pack("m", "f32", 0, torch.ones(24, 8), None)
    made.pack("m", "f32", 16, torch.ones(8, 8), None)


@pytest.mark.parametrize(
    "order",
    [
        torch.arange(24),
        torch.arange(23, dtype=torch.int32),
        torch.full((24,), 24, dtype=torch.int32),
        torch.full((24,), -1, dtype=torch.int32),
    ],
)
def test_an_order_that_leads_elsewhere_is_refused(order: Tensor) -> None:
    made = _cpu.Weights(1)
    made.add_matrix("m", "f32", 24, 8)
    with pytest.raises(ValueError, match="order: got"):
        made.pack("m", "f32", 0, torch.ones(24, 8), order)
    with pytest.raises(ValueError, match="rows: got 16"):
        made.pack("m", "f32", 0, torch.ones(16, 8), torch.arange(24, dtype=torch.int32))


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (-1, 8), (8, -8), (1 << 40, 8), (8, 33, 1)])
def test_matrices_of_no_size_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises((ValueError, TypeError)):
        _cpu.Weights(1).add_matrix("m", "q8_0", *shape)


def test_vectors_are_float32() -> None:
    wrong = (
        torch.ones(8, dtype=torch.bfloat16),
        torch.ones(0),
        torch.ones(2, 4),
        torch.ones(16)[::2],
        [1.0],
        None,
    )
    for values in wrong:
        with pytest.raises(ValueError, match="values: got"):
            _cpu.Weights(1).add_vector("v", values)


@pytest.mark.parametrize("kind", [decoder, eagle])
def test_a_network_is_made_of_weights_that_fit_it(kind: Callable[..., Any]) -> None:
    layer = "layers.0." if kind is eagle else "model.layers.0."
    norm = "norm.weight" if kind is eagle else "model.norm.weight"
    wrong: dict[str, tuple[int, ...]] = {
        f"{layer}self_attn.q_proj.weight": (
            HEADS[0] * HEADS[2] - 1,
            2 * HIDDEN if kind is eagle else HIDDEN,
        ),
        f"{layer}self_attn.k_proj.weight": (
            HEADS[1] * HEADS[2] + 1,
            2 * HIDDEN if kind is eagle else HIDDEN,
        ),
        f"{layer}self_attn.v_proj.weight": (HEADS[1] * HEADS[2], 16),
        f"{layer}self_attn.o_proj.weight": (HIDDEN, 16),
        f"{layer}mlp.up_proj.weight": (GATED + 16, HIDDEN),
        f"{layer}mlp.down_proj.weight": (HIDDEN, GATED - 16),
        f"{layer}self_attn.q_proj.bias": (3,),
        f"{layer}self_attn.q_norm.weight": (3,),
        f"{layer}self_attn.k_norm.weight": (HEADS[0] * HEADS[2],),
        f"{layer}attention_output_norm.weight": (HIDDEN - 1,),
        f"{layer}mlp_output_norm.weight": (1,),
        f"{layer}input_layernorm.weight": (HIDDEN - 1,),
        norm: (HIDDEN + 1,),
        "lm_head.weight": (VOCABULARY + 960, HIDDEN),
    }
    for name, shape in wrong.items():
        with pytest.raises(ValueError, match=name.removesuffix(".weight").replace(".", r"\.")):
            kind(_cpu, weights(_cpu, eagle=kind is eagle, **{name: shape}))
    needed = [norm, f"{layer}self_attn.k_proj.weight", f"{layer}mlp.down_proj.weight"]
    for name in (
        *needed,
        *[f"{layer}post_attention_layernorm.weight"] * (kind is eagle),
    ):  # a decoder may lack it
        with pytest.raises(ValueError, match="no weights"):
            kind(_cpu, weights(_cpu, eagle=kind is eagle, without=name))


def test_a_network_without_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="weights: got None"):
        _cpu.Decoder(
            "portable",
            "bfloat16",
            [0, 8, 8, 1, 1, 2],
            "silu",
            NUMBERS,
            None,
            [],
            [],
            NO_ROUTING,
            [],
            [],
            {},
        )
    with pytest.raises(ValueError, match="weights: got None"):
        _cpu.Eagle(
            "portable", "bfloat16", [8, 8, 1, 1, 2, 0], [True, True, False], 1e-5, None, [1.0], 1.0
        )
    with pytest.raises(ValueError, match="instruction set: this machine has no abacus"):
        _cpu.Decoder(
            "abacus",
            "bfloat16",
            [0, 8, 8, 1, 1, 2],
            "silu",
            NUMBERS,
            _cpu.Weights(1),
            [],
            [],
            NO_ROUTING,
            [],
            [],
            {},
        )


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [LAYERS, HIDDEN, VOCABULARY, 4, 2],
        [LAYERS, HIDDEN, VOCABULARY, 4, 3, 8],
        [LAYERS, HIDDEN, VOCABULARY, 4, 0, 8],
        [LAYERS, HIDDEN, VOCABULARY, 4, 2, 7],
        [LAYERS + 1, HIDDEN, VOCABULARY, 4, 2, 8],
        [-1, HIDDEN, VOCABULARY, 4, 2, 8],
        [LAYERS, HIDDEN, 1 << 40, 4, 2, 8],
    ],
)
def test_a_decoder_of_other_sizes_is_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"got|no weights"):
        decoder(_cpu, sizes=sizes)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"ropes": [([1.0] * 5, 1.0)]}, "frequencies: got 5, accepted 1 to half the head size"),
        ({"ropes": [([], 1.0)]}, "frequencies: got 0"),
        ({"ropes": []}, "positions: got 0, accepted -1 to -1"),
        ({"places": [(0, 0)] * (LAYERS - 1)}, "places: got 1, accepted one of each layer"),
        ({"places": [(0, 0), (1, 0)]}, "positions: got 1, accepted -1 to 0"),
        ({"places": [(0, 0), (-2, 0)]}, "positions: got -2"),
        ({"places": [(0, 0), (0, -1)]}, "window: got -1"),
        ({"places": [(0, 0), (0, 1 << 31)]}, "window: got 2147483648"),
        ({"activation": "gelu"}, "activation: got gelu, accepted silu, gelu_tanh, clamped or relu"),
        ({"numbers": NUMBERS[:4]}, "numbers: got 4, accepted 7"),
        ({"numbers": [1e-5, -1.0, *NUMBERS[2:]]}, "attention scale: got -1"),
        ({"numbers": [1e-5, 0.0, math.inf, *NUMBERS[3:]]}, "factors: got inf"),
        ({"numbers": [1e-5, 0.0, 1.0, math.nan, *NUMBERS[4:]]}, "factors: got"),
        ({"numbers": [1e-5, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]}, "divisor: got 0"),
        ({"numbers": [*NUMBERS[:5], -1.0, 1.0]}, "cap: got -1"),
        ({"numbers": [*NUMBERS[:6], math.inf]}, "factors: got inf"),
        ({"keeps": [(2, 8, -1)]}, "keeps: got 1, accepted one of each layer, or none"),
        (
            {"keeps": [(*HEADS[1:], 0), (*HEADS[1:], -1)]},
            "keys of layer: got 0, accepted -1, a layer before, or -2 less the number of a slab",
        ),
        ({"keeps": [(*HEADS[1:], -2), (*HEADS[1:], -4)]}, "keys of layer: got -4"),
        (
            {"keeps": [(*HEADS[1:], -1), (*HEADS[1:], -2)]},
            "keys: got a slab that no layer reads, or layers that write one",
        ),
        ({"keeps": [(*HEADS[1:], -3)] * 2}, "keys: got a slab that no layer reads"),
        ({"keeps": [(*HEADS[1:], -2), (4, 8, -2)]}, "keys: got layers of other heads for slab 0"),
        ({"keeps": [(*HEADS[1:], -2), (*HEADS[1:], 0)]}, "keys: got those of layer 0"),
        (
            {"keeps": [(*HEADS[1:], -1), (HEADS[1], 7, -1)]},
            "head size: got 7, accepted an even number",
        ),
        ({"keeps": [(*HEADS[1:], -1), (0, HEADS[2], -1)]}, "heads: got 0"),
        (
            {"keeps": [(*HEADS[1:], -1)] * 2, "ropes": [([1.0] * 5, 1.0)]},
            "frequencies: got 5, accepted up to 4",
        ),
        ({"keeps": [(*HEADS[1:], -1)] * 2, "ropes": [([], 1.0)]}, "frequencies: got 0"),
        (
            {"routing": ("argmax", [1, 1, 1, 2], [0.0, 1.0])},
            "scores: got argmax, accepted softmax or sigmoid",
        ),
        ({"routing": ("softmax", [1, 1], [0.0, 1.0])}, "routing: got 2, accepted 4 counts"),
        (
            {"routing": ("softmax", [1, 1, 1, 3], [0.0, 1.0])},
            "best experts of a group: got 3, accepted 1 or 2",
        ),
        ({"routing": ("softmax", [1, 1, 1, 2], [0.0])}, "routing: got 1, accepted 2 numbers"),
        ({"routing": ("softmax", [1, 1, 1, 2], [-1.0, 1.0])}, "least weight: got -1"),
        ({"routing": ("softmax", [1, 1, 1, 2], [0.0, math.nan])}, "factor of experts: got nan"),
        ({"traits": {"a tail": []}}, "traits: got a tail, accepted query factors"),
        ({"traits": {"parallel": [1.0]}}, "numbers of a trait: got 1"),
        ({"traits": {"ahead": [1.0]}}, "ahead: got 1, accepted one of each layer"),
        ({"traits": {"ahead": [1.0, 2.0]}}, "ahead: got 2, accepted 0 or 1"),
        ({"traits": {"ahead": [1.0, 0.5]}}, "ahead: got 0, accepted whole numbers"),
        (
            {"traits": {"ahead": [1.0, 0.0]}, "keeps": [(*HEADS[1:], -2), (*HEADS[1:], -3)]},
            "ahead: got a layer that reads another model's keys",
        ),
        ({"traits": {"latent": LATENT[:5]}}, "latent: got 5, accepted 5 sizes and an epsilon"),
        ({"traits": {"latent": LATENT}}, "head size: got 8, accepted one key-value head"),
        ({"traits": {"latent": [32, 8, 2.5, 8, 0, 1e-6]}}, "sizes of latent attention: got 2"),
        (
            {"traits": {"latent": [32, 8, 7, 8, 0, 1e-6]}},
            "sizes of latent attention: got 7, accepted even",
        ),
        ({"traits": {"latent": [32, 0, 8, 8, 0, 1e-6]}}, "sizes of latent attention: got 0"),
        (
            {"traits": {"latent": [40, 8, 8, 8, 0, 1e-6]}},
            "channels of a latent: got 40, accepted a multiple of 32",
        ),
        (
            {"traits": {"latent": LATENT}, "sizes": WIDE, "recurrence": [HIDDEN, 3, 0, 0, 0, 0, 0]},
            "latent: got 32",
        ),
        (
            {"traits": {"latent": LATENT}, "sizes": WIDE, "ropes": [([1.0] * 5, 1.0)]},
            "frequencies: got 5, accepted at",
        ),
        (
            {"traits": {"latent": LATENT}, "sizes": WIDE, "keeps": [(1, 8, -1)] * 2},
            "keeps: got 8, accepted those of",
        ),
        (
            {"traits": {"latent": LATENT}, "sizes": WIDE, "keeps": [(1, 40, -2), (1, 40, -3)]},
            "keeps: got 40, accepted those of",
        ),
        ({"traits": {"latent": LATENT}, "sizes": WIDE}, "q_proj"),
    ],
)
def test_other_blocks_of_a_decoder_are_refused(changes: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        decoder(_cpu, **changes)


@pytest.mark.parametrize(
    ("counts", "refusal"),
    [
        ([0, 1, 1], "chosen experts: got 0, accepted 1 to 6"),
        ([7, 1, 1], "chosen experts: got 7, accepted 1 to 6"),
        ([3, 3, 1], "chosen experts: got 3, accepted 1 to 2"),
        ([-1, 1, 1], "chosen experts: got -1"),
        ([1, 4, 1], "groups of experts: got 1 of 4 for 6 experts"),
        ([1, 0, 0], "groups of experts: got 0 of 0"),
        ([1, 3, 4], "groups of experts: got 4 of 3"),
        ([1, 3, 0], "groups of experts: got 0 of 3"),
    ],
)
def test_experts_that_are_not_there_are_not_chosen(counts: list[int], refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        decoder(_cpu, weights(_cpu, **sparse()), routing=("softmax", [*counts, 2], [0.0, 1.0]))


def test_experts_of_other_sizes_are_refused() -> None:
    routing = ("softmax", [2, 1, 1, 2], [0.0, 1.0])
    wrong = {
        "router.weight": (6, HIDDEN + 1),
        "router.choice": (5,),
        "experts.5.up_proj.weight": (GATED + 1, HIDDEN),
        "experts.2.down_proj.weight": (HIDDEN, GATED - 1),
        "shared.gate.weight": (2, HIDDEN),
    }
    for name, shape in wrong.items():
        with pytest.raises(ValueError, match=name.removesuffix(".weight").replace(".", r"\.")):
            decoder(_cpu, weights(_cpu, **sparse(**{name: shape})), routing=routing)
    with pytest.raises(ValueError, match=r"no weights model\.layers\.0\.mlp\.experts\.6\.up_proj"):
        decoder(_cpu, weights(_cpu, **sparse(**{"router.weight": (7, HIDDEN)})), routing=routing)


def test_layers_of_other_heads_have_slabs_of_their_own() -> None:
    memory = Memory()
    network, arguments = uneven(_cpu), forward_of_uneven(memory)
    network.forward(*arguments)
    assert memory.intact()
    for slabs, refusal in (
        (arguments[5][0], "slabs: got 1, accepted 2"),
        (arguments[5][:1], "slabs: got 1, accepted 2"),
        (arguments[5][::-1], "slab: got"),
        ((arguments[5][0], arguments[5][1].bfloat16()), "slabs of one dtype"),
    ):
        with pytest.raises(ValueError, match=refusal):
            network.forward(*arguments[:5], slabs, *arguments[6:])


def test_a_layer_may_read_the_keys_of_one_before() -> None:
    memory = Memory()
    network, arguments = (
        uneven(_cpu, reads=0, without="model.layers.1.self_attn.k_proj.weight"),
        forward_of_uneven(memory),
    )
    network.forward(*arguments[:5], arguments[5][0], *arguments[6:])  # one layer's keys and values
    assert memory.intact()


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"model.layers.1.mlp_conv.base_kernel": (3 * HIDDEN,)}, "mlp_conv.base_kernel: got .96"),
        (
            {"model.layers.1.mlp_conv.kernel_projection.weight": (4 * 8 + 1, HIDDEN)},
            "kernel_projection: got .33, 32., accepted .32, 32.",
        ),
        (
            {"model.layers.1.mlp_conv.kernel_projection.weight": (4 * 7, HIDDEN)},
            "mlp_conv.base_kernel: channels that groups do not divide",
        ),
        (
            {"model.layers.1.mlp_conv.kernel_projection.weight": (4 * 8, HIDDEN + 1)},
            "kernel_projection: got .32, 33., accepted .32, 32.",
        ),
        ({"model.layers.0.mlp_output_norm.weight": (HIDDEN,)}, ""),
        ({"model.layers.1.mlp_output_norm.weight": (HIDDEN,)}, "attention and a network alone"),
        ({"model.fc.weight": (HIDDEN + 1, HIDDEN)}, "model.fc: got .33, 32."),
        ({"model.hidden_norm.weight": (HIDDEN + 1,)}, "model.hidden_norm.weight: got .33."),
        (
            {"model.layers.0.self_attn.q_norm.weight": (HEADS[0] * HEADS[2],)},
            "model.fc: accepted where all layers have keys",
        ),
    ],
)
def test_convolutions_and_fusions_that_do_not_fit_are_refused(
    changes: dict[str, Any], refusal: str
) -> None:
    if not refusal:
        blocks(_cpu, **changes)
        return
    with pytest.raises(ValueError, match=refusal):
        blocks(_cpu, **changes)


def test_a_decoder_without_a_fusion_does_not_remember() -> None:
    arguments = torch.arange(3), 0, torch.ones(3, HIDDEN), torch.zeros(LAYERS, 2, 2, SLOTS, 8), 1
    with pytest.raises(ValueError, match=r"fusion: got 0, accepted a decoder with model\.fc"):
        decoder(_cpu).remember(*arguments)


def test_slabs_of_another_model_are_read_and_never_written() -> None:
    """Each lane's rows see its prefix alone, which may be no slot or all that there are."""
    memory = Memory()
    network, arguments = passed(_cpu), forward_of_passed(memory)
    slabs = [slab for lane in arguments[5] for slab in lane]
    before = [slab.clone() for slab in slabs]
    for prefixes in ([SLOTS, 2], [0, SLOTS]):
        arguments[1] = arguments[2] = prefixes
        arguments[6].fill_(math.nan)
        network.forward_from(*arguments)
        assert torch.isfinite(arguments[6]).all()
        for slab, other in zip(slabs, before, strict=True):
            assert torch.equal(slab, other)
    states = arguments[6].clone()
    slabs[0].add_(1.0)  # the second layer's, of the lane that sees no slot
    network.forward_from(*arguments)
    assert torch.equal(arguments[6], states)
    slabs[2].add_(1.0)
    network.forward_from(*arguments)
    assert not torch.equal(arguments[6][-1], states[-1])
    assert memory.intact()
    words = (torch.ones(3, 1, dtype=torch.int64), None)
    for place, other, refusal in (
        (1, [SLOTS + 1, 2], "prefix: got 17"),
        (3, words, "words: got .*, accepted None, as rows see the prefix alone"),
        (5, (arguments[5][0], arguments[5][1][:1]), "slabs: got 1, accepted 2"),
        (5, arguments[5][:1], "lanes: got 1, accepted 2, one of each lane"),
    ):
        with pytest.raises(ValueError, match=refusal):
            network.forward_from(*arguments[:place], other, *arguments[place + 1 :])
    arguments[1] = arguments[2] = [SLOTS + 1, 2]
    with pytest.raises(ValueError, match="slab: got"):
        network.forward_from(*arguments)


@pytest.mark.parametrize(
    ("wrong", "refusal"),
    [
        ({"model.own_norm.weight": (7,)}, "model.own_projection: got 12 outputs, accepted 14"),
        ({"model.own_embedding.weight": (VOCABULARY, 13)}, "model.own_embedding: got"),
        ({"model.layers.1.own_gate.weight": (8, HIDDEN)}, "own_gate: got"),
        ({"model.layers.0.scale": (2,)}, "scale: got"),
    ],
)
def test_inputs_of_single_layers_fit_together(
    wrong: dict[str, tuple[int, ...]], refusal: str
) -> None:
    with pytest.raises(ValueError, match=refusal):
        uneven(_cpu, **wrong)


def test_embeddings_of_single_layers_are_read() -> None:
    found, tokens = torch.empty(2, LAYERS * OWN), torch.tensor([1, 2])
    network = uneven(_cpu)
    assert network.own_channels == LAYERS * OWN
    network.own_embedding(tokens, found)
    with pytest.raises(ValueError, match="tokens: got"):
        network.own_embedding(torch.tensor([1, VOCABULARY]), found)
    assert decoder(_cpu).own_channels == 0
    with pytest.raises(ValueError, match="inputs of single layers: got 0"):
        decoder(_cpu).own_embedding(tokens, found)


@pytest.mark.parametrize(
    ("recurrence", "refusal"),
    [
        ([96, 4, 1, 1, 32, 32], "sizes: got 6, accepted 7 numbers"),
        ([97, 4, 1, 1, 32, 32, 0], "channels: got 97, accepted 96"),
        ([0, 4, 0, 0, 0, 0, 0], "channels: got 0"),
        ([96, 0, 1, 1, 32, 32, 0], "taps: got 0"),
        ([96, 5, 1, 1, 32, 32, 0], "accepted .480."),
        ([96, 1 << 20, 1, 1, 32, 32, 0], "taps: got 1048576"),
        ([96, 4, 0, 1, 32, 32, 0], "value heads: got 1"),
        ([96, 4, 2, 1, 16, 32, 0], "value heads: got 1, accepted a multiple of the key heads"),
        ([96, 4, 1, 1, 42, 16, 0], "key size: got 42, accepted a multiple of 4"),
        ([96, 4, 1, 1, 40, 16, 0], "keys of 40 channels, accepted multiples of 16"),
        ([96, 4, 1, 1, 32, 40, 0], "value size: got 40, accepted a multiple of 16"),
        ([96, 4, 1, 1, 32, 32, 2], "norms: got 2, accepted 0 or a divisor"),
        ([96, 4, 1, 1, 1 << 33, 32, 0], "sizes: got 8589934592"),
        ([96, 4, 0, 0, 0, 0, 0], "the recurrence has no heads"),
        ([128, 4, 1, 2, 32, 32, 0], "accepted"),
    ],
)
def test_recurrences_of_other_sizes_are_refused(recurrence: list[int], refusal: str) -> None:
    assert hybrid(_cpu).memory().bytes > 0
    with pytest.raises(ValueError, match=refusal):
        hybrid(_cpu, recurrence)


@pytest.mark.parametrize(
    ("recurrence", "changes", "refusal"),
    [
        ([80, 4, 0, 0, 0, 0, 0], {}, "the recurrence has no heads"),
        (MAMBA, {"in_proj_xbc.weight": (79, HIDDEN)}, r"mamba\.in_proj_xbc"),
        (MAMBA, {"in_proj_z.weight": (33, HIDDEN)}, r"mamba\.in_proj_z"),
        (MAMBA, {"in_proj_dt.weight": (1, HIDDEN)}, r"mamba\.in_proj_dt"),
        (MAMBA, {"out_proj.weight": (HIDDEN, 31)}, r"mamba\.out_proj"),
        (MAMBA, {"conv1d.weight": (80,)}, r"mamba\.conv1d"),
        (MAMBA, {"conv1d.bias": (79,)}, r"mamba\.conv1d\.bias"),
        (MAMBA, {"norm.weight": (16,)}, r"mamba\.norm"),
        (MAMBA, {"A_log": (1,)}, r"mamba\.A_log"),
        (MAMBA, {"dt_bias": (3,)}, r"mamba\.dt_bias"),
        (MAMBA, {"D": (1,)}, r"mamba\.D"),
        (MAMBA, {"in_proj_dt.factor": (2,)}, r"mamba\.in_proj_dt\.factor: got .2., accepted .1."),
    ],
)
def test_state_spaces_of_other_sizes_are_refused(
    recurrence: list[int], changes: dict[str, tuple[int, ...]], refusal: str
) -> None:
    for norms in (MAMBA[-1], 0):
        assert mamba(_cpu, [*MAMBA[:-1], norms]).memory().bytes > 0
    with pytest.raises(ValueError, match=refusal):
        mamba(_cpu, recurrence, **changes)


def test_a_memory_is_one_of_its_decoder() -> None:
    network, build = hybrid(_cpu), CPU["hybrid"][2]
    with pytest.raises(ValueError, match="recurrent layers: got 0"):
        decoder(_cpu).memory()
    right = build(Memory())
    for memory in (None, object(), 3):
        with pytest.raises((ValueError, TypeError), match=r"memory: got None|incompatible"):
            network.forward(*replaced(right, (MEMORY_OF,), memory))
    with pytest.raises(ValueError, match="memory: got 1, accepted one of this decoder"):
        decoder(_cpu).forward(
            *replaced(CPU["decoder"][2](Memory()), (MEMORY_OF,), right[MEMORY_OF])
        )
    for committed in (-1, 1, 3, 1 << 40):
        with pytest.raises(ValueError, match=r"committed|memory: holds slots 2 to 2"):
            network.forward(*replaced(right, (MEMORY_OF + 1,), committed))
    assert network.forward(*right) == 0  # experts
    assert (right[MEMORY_OF].folded, right[MEMORY_OF].marked) == (2, 0)


def test_paths_of_a_memory_are_of_slots_that_were_run() -> None:
    network = hybrid(_cpu)
    arguments = CPU["hybrid"][2](Memory())
    network.forward(*arguments)
    memory = arguments[MEMORY_OF]
    for length, path, count in (
        (2, [0, 3], 2),
        (2, [1, 0], 2),
        (2, [-1], 1),
        (1, [0], 1),
        (3, [2], 1),
        (-1, [0], 1),
    ):
        with pytest.raises(ValueError, match=r"path: |length: "):
            memory.keep(length, torch.tensor(path), count)
    for wrong in (
        torch.tensor([0.0]),
        torch.tensor([[0]]),
        None,
        torch.tensor([0], dtype=torch.int32),
    ):
        with pytest.raises((ValueError, TypeError)):
            memory.keep(2, wrong, 1)
    with pytest.raises(ValueError, match="path: "):
        memory.keep(2, torch.tensor([0]), 2)
    memory.keep(2, torch.tensor([0, 2]), 2)
    assert [memory.reach(length) for length in (5, 2, 1, -3)] == [5, 2, 0, 0]
    memory.crop(-3)
    assert memory.folded == 0


def test_a_head_reads_states_and_embeddings_of_its_own_size() -> None:
    head, build = eagle(_cpu), CPU["eagle, later"][2]
    right = build(Memory())
    assert head.forward(*right) is None
    for wrong in ([0, 1, 2], [0, -1, 1], [2**40, 0, 0]):
        with pytest.raises(ValueError, match=r"sources: got .*, accepted 0 to 1"):
            head.forward(*replaced(build(Memory()), (8,), torch.tensor(wrong)))
    for token in (-1, VOCABULARY, 2**40):
        with pytest.raises(ValueError, match="tokens: got"):
            head.forward(*replaced(build(Memory()), (5,), torch.tensor([0, token, 1])))
    for place in (7, 8):  # states and sources, where there are no features
        with pytest.raises(ValueError, match="features: got None"):
            head.forward(*replaced(build(Memory()), (place,), None))
    with pytest.raises(TypeError):
        head.forward(None, *right[1:])


@pytest.mark.parametrize("threads", [0, -1, 1 << 20])
def test_a_number_of_threads_that_is_none_is_refused(threads: int) -> None:
    with pytest.raises(ValueError, match="threads: got"):
        _cpu.Weights(threads)


@pytest.mark.skipif(_cpu is None, reason="the extension specengine._cpu is not built")
def test_a_checksum_reads_contiguous_memory_of_the_cpu_alone() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float64):
        assert _cpu.checksum(whole.to(dtype), 1) == _cpu.checksum(whole.to(dtype).clone(), 2)
    assert _cpu.checksum(torch.empty(0), 1) == _cpu.checksum(torch.empty(0, 3), 1)
    for wrong in (whole.t(), whole[:, ::2], whole.to("meta"), whole.to_sparse(), None, 3, [1.0]):
        with pytest.raises(
            (ValueError, TypeError), match=r"tensor: got .* accepted a contiguous one|incompatible"
        ):
            _cpu.checksum(wrong, 1)
    for threads in (0, -1, 1 << 40):
        with pytest.raises(ValueError, match="threads"):
            _cpu.checksum(whole, threads)
