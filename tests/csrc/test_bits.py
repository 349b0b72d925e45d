"""csrc/cpu's law: a token has the same bits in every tree, at every place of it, and in plain decoding."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

_cpu = pytest.importorskip("specengine._cpu")

SETS = {numerics: _cpu.instruction_sets(numerics) for numerics in ("bfloat16", "integer")}
CONTEXTS = [0, 1, 28, 31, 32, 33, 61, 63, 64, 65, 90, 95, 96, 97, 200, 1000]
LAYERS, HIDDEN, GATED, VOCABULARY = 2, 48, 40, 37


@dataclass
class Tiny:
    """A random model. heads: query heads, key-value heads, channels of each."""

    numerics: str
    instruction_set: str
    kind: str
    cache: torch.dtype
    heads: tuple[int, int, int]
    seed: int = 0
    decoder: Any = field(init=False)
    _slabs: dict[int, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        weights = _cpu.Weights(1)
        queries, keys, size = self.heads
        shapes = {"model.embed_tokens": (VOCABULARY, HIDDEN)}
        for layer in range(LAYERS):
            prefix = f"model.layers.{layer}."
            shapes |= {
                prefix + "self_attn.q_proj": (queries * size, HIDDEN),
                prefix + "self_attn.k_proj": (keys * size, HIDDEN),
                prefix + "self_attn.v_proj": (keys * size, HIDDEN),
                prefix + "self_attn.o_proj": (HIDDEN, queries * size),
                prefix + "mlp.gate_proj": (GATED, HIDDEN),
                prefix + "mlp.up_proj": (GATED, HIDDEN),
                prefix + "mlp.down_proj": (HIDDEN, GATED),
            }
        for name, (outputs, inputs) in shapes.items():
            values = torch.randn(outputs, inputs, generator=generator) * (3.0 / inputs**0.5)
            values = values.bfloat16() if self.kind == "bf16" else values
            weights.add_matrix(name + ".weight", self.kind, outputs, inputs)
            weights.pack(
                name + ".weight", "bf16" if self.kind == "bf16" else "f32", 0, values, None
            )
        ones = torch.ones(HIDDEN)
        norms = [
            f"model.layers.{i}.{n}layernorm.weight"
            for i in range(LAYERS)
            for n in ("input_", "post_attention_")
        ]
        for name in [*norms, "model.norm.weight"]:
            weights.add_vector(name, ones)
        frequencies = (10000.0 ** -(torch.arange(0, size, 2) / size)).tolist()
        sizes = [LAYERS, HIDDEN, VOCABULARY, *self.heads]
        form = (
            "silu",
            [1e-5, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0],
            weights,
            [(frequencies, 1.0)],
            [(0, 0)] * LAYERS,
            ("softmax", [0, 1, 1, 2], [0.0, 1.0]),
            [],
            [],
            {},
        )
        self.decoder = _cpu.Decoder(self.instruction_set, self.numerics, sizes, *form)

    def slab(self, context: int) -> Tensor:
        """A cache with `context` random slots; what stands behind them must not count.

        Two slots at a time have the same keys and values that all but cancel, so that a sum in another order or another
        grouping is another sum by far more than what rounding it to bfloat16 hides.
        """
        if context not in self._slabs:
            generator = torch.Generator().manual_seed(context)
            _, keys, size = self.heads
            slab = torch.randn(LAYERS, 2, keys, context, size, generator=generator)
            pairs = slab[..., : context // 2 * 2, :].unflatten(3, (-1, 2))
            pairs[:, 0, ..., 1, :] = pairs[:, 0, ..., 0, :]
            pairs[:, 1, ..., 0, :] *= 3000.0
            pairs[:, 1, ..., 1, :] -= pairs[:, 1, ..., 0, :]
            self._slabs = {context: pad(slab, (0, 0, 0, 128), value=torch.nan).to(self.cache)}
        return self._slabs[context].clone()

    def run(
        self,
        slab: Tensor,
        tokens: list[int],
        positions: list[int],
        start: int,
        *,
        prefix: int | None = None,
        seen: list[list[int]] | None = None,
        threads: int = 1,
    ) -> Tensor:
        """Logits and the states of the first layer's input and behind the final norm, side by side, as bits.

        seen    for each row the slots from `prefix` on that it sees; without it all up to its own
        """
        rows, prefix = len(tokens), start if prefix is None else prefix
        token, position = torch.tensor(tokens), torch.tensor(positions)
        words = torch.zeros(rows, (start + rows - prefix + 63) // 64, dtype=torch.int64)
        for row, slots in enumerate(seen or []):
            for slot in slots:
                bit = (slot - prefix) % 64
                words[row, (slot - prefix) // 64] |= (1 << bit) if bit < 63 else -(1 << 63)
        logits, states = torch.empty(rows, VOCABULARY), torch.empty(rows, 2 * HIDDEN)
        mask, layers = None if seen is None else words, [1, LAYERS]
        given = position, prefix, start, mask, token, slab, layers, states, logits, None, None
        self.decoder.forward(*given, LAYERS, threads, None, 0, None, None)
        assert logits.isfinite().all()
        return torch.cat((logits, states), 1).view(torch.int32)


Tree = list[tuple[int, int]]  # of each node its parent, -1 for the root, and its token


def random_tree(rows: int, seed: int) -> Tree:
    chance = random.Random(seed)
    deep = chance.choice([1, 2, 5, rows])  # how far back a parent may stand
    return [
        (chance.randrange(max(0, i - deep), i) if i else -1, chance.randrange(VOCABULARY))
        for i in range(rows)
    ]


def chain(rows: int) -> Tree:
    return [(i - 1, i * 7 % VOCABULARY) for i in range(rows)]


def path_to(tree: Tree, node: int) -> list[int]:
    path = [node]
    while tree[path[0]][0] >= 0:
        path.insert(0, tree[path[0]][0])
    return path


def in_tree(model: Tiny, tree: Tree, context: int, *, parts: int = 1, threads: int = 1) -> Tensor:
    """All nodes in one forward, or in several, each seeing what the ones before it have put into the cache."""
    slab, out = model.slab(context), []
    bounds = [len(tree) * i // parts for i in range(parts + 1)]
    for first, last in itertools.pairwise(bounds):
        nodes = range(first, last)
        paths = [path_to(tree, node) for node in nodes]
        out.append(
            model.run(
                slab,
                [tree[node][1] for node in nodes],
                [context + len(path) - 1 for path in paths],
                context + first,
                prefix=context,
                seen=[[context + node for node in path] for path in paths],
                threads=threads,
            )
        )
    return torch.cat(out)


def one_by_one(model: Tiny, tree: Tree, context: int) -> Tensor:
    """Each node as plain decoding of its path gives it, one row a forward."""
    out: dict[int, Tensor] = {}
    for leaf in sorted(set(range(len(tree))) - {parent for parent, _ in tree}):
        slab = model.slab(context)
        for depth, node in enumerate(path_to(tree, leaf)):
            row = model.run(slab, [tree[node][1]], [context + depth], context + depth)
            out.setdefault(node, row)
    return torch.cat([out[node] for node in range(len(tree))])


def models() -> list[Any]:
    found = []
    for numerics, names in SETS.items():
        for name in names:
            pairs = name in ("amx", "avx512bf16")
            plain = "int_i8" if numerics == "integer" else "bf16" if pairs else "f32"
            for kind, cache in (("bf16", torch.bfloat16), (plain, torch.float32)):
                for heads in ((6, 2, 32), (3, 1, 20), (2, 2, 96)):
                    label = f"{numerics}-{name}-{kind}-{str(cache)[6:]}-{heads[2]}"
                    found.append(pytest.param(Tiny(numerics, name, kind, cache, heads), id=label))
    return found


@pytest.fixture(scope="module", params=models())
def model(request: pytest.FixtureRequest) -> Tiny:
    return request.param


@pytest.mark.sliced
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_tree_has_the_bits_of_plain_decoding(model: Tiny, context: int) -> None:
    rows = random.Random(context).choice([1, 5, 16, 17, 40, 64])
    tree = random_tree(rows, context)
    assert torch.equal(in_tree(model, tree, context), one_by_one(model, tree, context))


@pytest.mark.sliced(18)
@pytest.mark.parametrize("context", [0, 60, 93])
def test_a_long_chain_has_the_bits_of_plain_decoding(model: Tiny, context: int) -> None:
    """As a tree and as a prompt, deeper than any chunk of slots that is summed together."""
    tree = chain(100)
    plain = one_by_one(model, tree, context)
    assert torch.equal(in_tree(model, tree, context), plain)
    prompt = model.run(
        model.slab(context), [t for _, t in tree], list(range(context, context + 100)), context
    )
    assert torch.equal(prompt, plain)


def test_parts_and_threads_do_not_count(model: Tiny) -> None:
    tree = random_tree(64, 5)
    whole = in_tree(model, tree, 70)
    for parts, threads in ((1, 3), (2, 1), (7, 2)):
        assert torch.equal(in_tree(model, tree, 70, parts=parts, threads=threads), whole)


def test_one_key_more_or_less_is_noticed(model: Tiny) -> None:
    """What the other tests rest on: these logits tell a path from one with another slot in it."""
    slab = model.slab(64)
    seen = [[64], [64, 65], [64, 66]]
    tokens, positions = [1, 2, 3], [64, 65, 65]
    right = model.run(slab, tokens, positions, 64, seen=seen)
    more = model.run(slab, tokens, positions, 64, seen=[*seen[:2], [64, 65, 66]])
    less = model.run(slab, tokens, positions, 64, seen=[*seen[:2], [66]])
    for other in (more, less):
        assert torch.equal(right[:2], other[:2])
        assert not torch.equal(right[2], other[2])
    short = model.run(slab, tokens, positions, 64, prefix=63, seen=seen)
    assert not torch.equal(right[0], short[0])


@pytest.mark.parametrize("kind", ["int_i8", "bf16", "f32"])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_integer_numerics_have_the_same_bits_on_every_set(kind: str, cache: torch.dtype) -> None:
    tree, first = random_tree(40, 3), None
    for name in SETS["integer"]:
        bits = in_tree(Tiny("integer", name, kind, cache, (6, 2, 32)), tree, 70)
        assert first is None or torch.equal(bits, first), name
        first = bits


def test_numerics_are_those_of_the_weights() -> None:
    for numerics, kind in (("integer", "i8"), ("bfloat16", "int_i8")):
        with pytest.raises(ValueError, match=f"{numerics} numerics do not multiply {kind}"):
            Tiny(numerics, SETS[numerics][-1], kind, torch.float32, (6, 2, 32))
    with pytest.raises(ValueError, match="numerics: got octal, accepted bfloat16 or integer"):
        _cpu.instruction_sets("octal")


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS["integer"])
def test_integers_keep_the_law_with_any_number_of_rows_and_far_into_a_text(name: str) -> None:
    model = Tiny("integer", name, "int_i8", torch.bfloat16, (6, 2, 32))
    for context in (0, 700, 4000):
        for rows in range(1, 65) if context < 4000 else (1, 7, 16, 33, 64):
            tree = random_tree(rows, rows + context)
            assert torch.equal(in_tree(model, tree, context), one_by_one(model, tree, context)), (
                context,
                rows,
            )
