"""Wrong arguments to the extensions are exceptions: nothing is written but what was handed over to be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, strategies as st
from torch import Tensor

from tests.border.calls import (
    MEMORY,
    OPS,
    OPTIONAL,
    WRONG,
    Arguments,
    Memory,
    at,
    misaligned,
    replaced,
    spread,
    tensors_of,
)
from tests.border.networks import (
    CPU,
    FREQUENCIES,
    blocks,
    decoder,
    hybrid,
    mamba,
    passed,
    routed,
    sparse,
    uneven,
    weights,
)
from tests.examples import examples

_ops = pytest.importorskip("specengine._ops")
_cpu = pytest.importorskip("specengine._cpu")
NAMES = [*OPS, *CPU, *MEMORY]
REFUSED = (ValueError, TypeError)
MADE: dict[str, Any] = {}


def function(
    name: str,
) -> tuple[Callable[..., Any], Callable[[Memory], Arguments], set[tuple[int, ...]]]:
    """The function, what builds right arguments of it, and which of these may be None."""
    if name in OPS:
        return getattr(_ops, name), OPS[name], OPTIONAL[name]
    make, method, build, optional = (CPU | MEMORY)[name]
    if make.__name__ not in MADE:
        MADE[make.__name__] = make(_cpu if name in CPU else _ops)
    return (
        getattr(MADE[make.__name__], method),
        build,
        {(place,) if isinstance(place, int) else place for place in optional},
    )


def outcome(run: Callable[..., Any], memory: Memory, arguments: Arguments) -> Any:
    """The refusal, or None where the call went through; memory beside the arguments stays as it is."""
    try:
        run(*arguments)
    except REFUSED as error:
        refusal = error
    else:
        refusal = None
    assert memory.intact()
    return refusal


def test_every_function_is_called() -> None:
    functions = {name for name in dir(_ops) if callable(getattr(_ops, name))}
    assert functions == {*OPS, "Copies", "SearchState", "SuccessorTable", "Suffixes", "TextMemory"}
    methods = {
        f"{kind}.{name}"
        for kind in ("Decoder", "Eagle")
        for name in vars(getattr(_cpu, kind))
        if name[0] != "_"
    }
    decoders = {blocks, hybrid, mamba, passed, routed, uneven}
    kinds = {
        make: "Decoder" if make in decoders else make.__name__.capitalize()
        for make, *_ in CPU.values()
    }
    assert methods == {
        "Decoder.memory",
        "Decoder.own_channels",
        *(f"{kinds[make]}.{method}" for make, method, _, _ in CPU.values()),
    }


@pytest.mark.parametrize("name", NAMES)
def test_right_arguments_are_taken(name: str) -> None:
    run, build, optional = function(name)
    memory = Memory()
    assert outcome(run, memory, build(memory)) is None
    for place in optional:
        memory = Memory()
        assert outcome(run, memory, replaced(build(memory), place, None)) is None


# Logits of float16 are taken, and so is all of an attention where its queries are.
HALVES = {
    "top_children",
    "best_candidates",
    "top_entropy",
    "mix_rows",
    "classify_row",
    "couple",
    "grow_likely",
}
HALVES |= {"strict_cached_attention"}


@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_another_kind_are_refused_by_name(name: str) -> None:
    run, build, optional = function(name)
    for place in tensors_of(build(Memory())):
        for kind, wrong in WRONG.items():
            memory = Memory()
            arguments = build(memory)
            if kind in ("float16", "float64", "int16", "complex") and (name, place) == (
                "compact_kv",
                (0,),
            ):
                continue  # rows of any dtype are moved
            if (
                kind == "float16"
                and name in HALVES
                and place == ((3, 0) if name == "grow_likely" else (0,))
            ):
                continue
            if (
                kind in ("a number", "an address")
                and name == "best_candidates"
                and place in optional
            ):
                continue
            refusal = outcome(run, memory, replaced(arguments, place, wrong(at(arguments, place))))
            if kind != "rank":  # a single number may stand in any shape
                assert refusal is not None, (place, kind)
                assert "got " in str(refusal), (place, kind)
                assert "accepted " in str(refusal), (place, kind)
        memory = Memory()
        refusal = outcome(run, memory, replaced(build(memory), place, None))
        assert (refusal is None) == (place in optional), place


@pytest.mark.parametrize("name", NAMES)
def test_other_sizes_and_strides_never_reach_beyond_a_tensor(name: str) -> None:
    run, build, _ = function(name)
    for place in tensors_of(build(Memory())):
        shape = at(build(Memory()), place).shape
        for axis in range(len(shape)):
            for size in {0, shape[axis] - 1, shape[axis] + 1}:
                memory = Memory()
                arguments = build(memory)
                other = list(shape)
                other[axis] = size
                wrong = memory.put(torch.zeros(other, dtype=at(arguments, place).dtype))
                outcome(run, memory, replaced(arguments, place, wrong))
        for change in (
            spread,
            misaligned,
            lambda t: t[:1].expand_as(t),
            lambda t: t.movedim(0, -1),
        ):
            memory = Memory()
            arguments = build(memory)
            if at(arguments, place).element_size() > 1:
                outcome(run, memory, replaced(arguments, place, change(at(arguments, place))))


@pytest.mark.parametrize("name", NAMES)
def test_strided_outputs_are_refused(name: str) -> None:
    """So nothing is lost in a copy."""
    run, build, _ = function(name)
    arguments = build(Memory())
    before = [at(arguments, place).clone() for place in tensors_of(arguments)]
    run(*arguments)
    for place, old in zip(tensors_of(arguments), before, strict=True):
        if old.numel() > 1 and not torch.equal(at(arguments, place), old):
            memory = Memory()
            again = build(memory)
            assert (
                outcome(run, memory, replaced(again, place, spread(at(again, place)))) is not None
            ), place


DENSE = {"update_throughput", "bind_search", "start_search", "keep_likely"}  # all that they read


@pytest.mark.parametrize(
    "name",
    [name for name in (*OPS, *MEMORY) if name not in DENSE],
)
def test_strided_inputs_give_the_results_of_dense_ones(name: str) -> None:
    run, make, _ = function(name)

    def build(memory: Memory) -> Arguments:
        torch.manual_seed(0)
        return make(memory)

    def results(arguments: Arguments) -> list[Tensor]:
        found = run(*arguments)
        parts = [found] if not isinstance(found, tuple) else list(found)
        tensors = [
            torch.as_tensor(parts[place[0]] if len(place) == 1 else at(parts, place))
            for place in _all(parts)
        ]
        return [*tensors, *(at(arguments, place).clone() for place in tensors_of(arguments))]

    wanted, taken = results(build(Memory())), 0
    for place in tensors_of(build(Memory())):
        memory = Memory()
        arguments = build(memory)
        if at(arguments, place).numel() < 2:
            continue
        arguments = replaced(arguments, place, spread(at(arguments, place)))
        try:
            found = results(arguments)
        except REFUSED:
            continue
        taken += 1
        for right, value in zip(wanted, found, strict=True):
            torch.testing.assert_close(value, right, rtol=0, atol=0, equal_nan=True)
    assert taken


def _all(parts: list[Any]) -> list[tuple[int, ...]]:
    return [
        *tensors_of(parts),
        *((place,) for place, part in enumerate(parts) if isinstance(part, int)),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_values_that_are_no_index_never_become_an_address(name: str) -> None:
    run, build, _ = function(name)
    for place in tensors_of(build(Memory())):
        if at(build(Memory()), place).dtype.is_floating_point:
            values: tuple[float, ...] = (float("nan"), float("inf"), -float("inf"), 1e30, 1.0)
        else:
            values = (-1, 3, 1000, 2**31 - 1, -(2**31), 2**40, 2**62, -(2**62))
        for value in values:
            memory = Memory()
            arguments = build(memory)
            tensor = at(arguments, place)
            if not tensor.dtype.is_floating_point and tensor.dtype is not torch.bool:
                limits = torch.iinfo(tensor.dtype)
                value = min(max(value, limits.min), limits.max)
            tensor.fill_(value)
            outcome(run, memory, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_out_of_range_never_become_an_address(name: str) -> None:
    run, build, _ = function(name)
    for place, given_number in enumerate(build(Memory())):
        if isinstance(given_number, bool) or not isinstance(given_number, int | float):
            continue
        for value in (-1, 0, 1, 2**31 - 1, 2**40, 2**63 - 1, -(2**63)):
            memory = Memory()
            arguments = build(memory)
            arguments[place] = type(given_number)(value)
            outcome(run, memory, arguments)


@examples(300, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_mixture_of_wrong_arguments_does_no_harm(data: st.DataObject) -> None:
    run, build, _ = function(data.draw(st.sampled_from(NAMES)))
    memory = Memory()
    arguments = build(memory)
    for place in data.draw(
        st.lists(st.sampled_from(list(tensors_of(arguments))), min_size=1, max_size=4, unique=True)
    ):
        tensor = at(arguments, place)
        if not isinstance(tensor, Tensor):
            continue
        kind = data.draw(st.sampled_from(["values", "shape", *WRONG]))
        if kind == "values" and not tensor.dtype.is_floating_point and tensor.device.type == "cpu":
            number = data.draw(st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 40))
            tensor.view(-1)[data.draw(st.integers(0, max(0, tensor.numel() - 1))) :].fill_(
                number % 256 if tensor.dtype is torch.uint8 else number
            )
        elif kind == "shape":
            shape = data.draw(st.lists(st.integers(0, 9), max_size=5))
            arguments = replaced(
                arguments, place, memory.put(torch.zeros(shape, dtype=tensor.dtype))
            )
        elif kind in WRONG:
            arguments = replaced(arguments, place, WRONG[kind](tensor))
    outcome(run, memory, arguments)


def test_what_is_no_plain_tensor_but_has_its_memory_is_taken() -> None:
    """Parameters, subclasses with storage, tensors that want gradients, those of inference mode."""
    scores = torch.tensor([3.0, 1.0, 2.0])
    with torch.inference_mode():
        made = torch.tensor([3.0, 1.0, 2.0])

    class Named(Tensor):
        pass

    live = torch.tensor([3], dtype=torch.int32)
    for given_scores in (
        torch.nn.Parameter(scores),
        scores.as_subclass(Named),
        scores.clone().requires_grad_(),
        made,
    ):
        found, count = _ops.select_best(given_scores, live, 2, None)
        assert found.tolist() == [0, 2]
        assert count.tolist() == [2]


def test_rows_may_stand_at_any_distance() -> None:
    wide = torch.rand(3, 40)
    for given_rows in (
        wide[:, :20],
        wide[::2, 5:25],
        wide[:1].expand(3, -1),
        wide.to(torch.bfloat16)[:, :30],
    ):
        rows, best = given_rows.shape[0], given_rows.float().argmax(1)
        columns = _ops.top_children(given_rows, 1, True)[1]
        assert len(columns) == rows
        assert columns[:, 0].tolist() == best.tolist()


# ---------------------------------------------------------------------------------------------------- copies


def test_nodes_of_no_tree_are_refused() -> None:
    made, live = MEMORY["plan"][0](_ops), torch.ones(1, dtype=torch.int32)
    tokens, scores = torch.arange(3), torch.zeros(3)
    for parents in ([-1, 2, 1], [-1, -1, 0], [-1, 1, 0], [-1, 3, 0], [-1, 2**40, 0]):
        above, below = torch.tensor(parents), torch.tensor([1])
        with pytest.raises(ValueError, match=r"parents: got .*, accepted earlier nodes"):
            made.plan((tokens, above), below, live, 2)
        with pytest.raises(ValueError, match=r"parents: got .*, accepted earlier nodes"):
            made.free(
                (tokens, above, scores, torch.tensor([3], dtype=torch.int32)),
                below,
                live,
                4,
                -9.0,
                None,
            )
    sized = tokens, tokens - 1, scores, torch.tensor([2], dtype=torch.int32)
    with pytest.raises(ValueError, match="nodes: got 2"):
        made.free(sized, torch.tensor([2]), live, 4, -9.0, None)
    for path in ([3], [-1], [0, 2**40]):
        with pytest.raises(ValueError, match="path: got"):
            _ops.SuccessorTable().learn(
                tokens, path, torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
            )


@pytest.mark.parametrize(
    ("arguments", "name"), [(([], 8.0, 0.98, 8), "hits"), (([0.5], 8.0, 0.98, 0), "followers")]
)
def test_copies_of_no_length_are_refused(arguments: tuple[Any, ...], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: got 0"):
        _ops.Copies(*arguments)


def test_a_memory_of_texts_refuses_what_it_cannot_hold() -> None:
    for size in (-1, 1 << 31, 1 << 62):
        with pytest.raises(ValueError, match="bytes: got"):
            _ops.TextMemory(size)
        with pytest.raises(ValueError, match="bytes: got"):
            _ops.TextMemory(0).limit(size)
    memory = _ops.TextMemory(0)
    for tokens in ([1, 2, 3, 4, -1], [1, 2, 3, 4, 1 << 31]):
        with pytest.raises(ValueError, match="tokens: got"):
            memory.add(tokens)
    with pytest.raises(ValueError, match="vocabulary: got"):
        memory.read(b"", 1 << 40)
    for method, wrong in (("add", ["a"]), ("recall", "abc"), ("records", [[0.5]])):
        with pytest.raises(TypeError):
            getattr(memory, method)(wrong)
    assert memory.texts() == memory.recall([-7, 1 << 62, 0]) == []


def test_experts_read_and_write_in_bounds() -> None:
    _, build, _ = function("decoder")
    for count, counts in ((6, [2, 1, 1]), (6, [2, 3, 1]), (1, [1, 1, 1]), (6, [6, 1, 1])):
        memory = Memory()
        made = weights(_cpu, **sparse(count))
        network = decoder(_cpu, made, routing=("normalised sigmoid", [*counts, 2], [0.0, 1.0]))
        arguments = build(memory)
        arguments[16] = memory.put(torch.zeros(1, 3, counts[0], dtype=torch.int32))
        assert network.forward(*arguments) == int(arguments[15].sum())
        assert memory.intact()
        for wrong in (arguments[16][:, :, :0], arguments[16].long(), arguments[16][:, :-1]):
            with pytest.raises(ValueError, match="routing: got"):
                network.forward(*arguments[:16], wrong)


def test_windows_and_positions_of_part_of_a_head_are_taken() -> None:
    run, build, _ = function("decoder")
    for changes in (
        {"places": [(0, 1), (-1, 0)]},
        {"ropes": [([1.0], 1.0), (FREQUENCIES, 1.0)], "places": [(1, 2), (0, (1 << 31) - 1)]},
        {"activation": "gelu_tanh", "numbers": [1e-5, 0.5, 2.0, 0.5, -3.0, 30.0, 1.0]},
    ):
        memory = Memory()
        decoder(_cpu, **changes).forward(*build(memory))
        assert memory.intact()
        assert run is not None
