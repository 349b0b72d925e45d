"""A right call of every function of both extensions, in memory whose surroundings are watched."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
        (counts(m), notes(m), throughput(m)),
        (-30.0, MOST, 2, 4),
    ]


def chain(nodes: Any, most: int, least: float) -> tuple[list[Any], ...]:
    """Free continuations: a node below the first one that was asked for, and one below that."""
    size = len(nodes[0]) and int(nodes[0][0]) + 1
    return [size - 1, size], [200, 201], [-0.1, -0.2], [5, 6], [0, 12]


@call(optional=(4,))
def start_search(m: Memory) -> Arguments:
    state = counts(m), notes(m), throughput(m)
    return [tree(m), one(m, 1), state, 2, chain, (6, -2.0), one(m, 3), 8]


@call(optional=(3,))
def keep_likely(m: Memory) -> Arguments:
    noted = notes(m)
    noted[3][4] = True  # the last of the chain waits
    state = counts(m), noted, throughput(m)
    return [tree(m), one(m, NODES), state, chain, (3, 4, -2.0), MOST]


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
    state = counts(m), notes(m), throughput(m)
    return [tree(m), one(m, NODES), path, whole(m, 101, 102, 5), state]


@call()
def bind_search(m: Memory) -> Arguments:
    return [(counts(m), notes(m), throughput(m))]


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
