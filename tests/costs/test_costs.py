"""Costs of a cycle: tables of them, their JSON, their measurement, and the files that keep them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specengine import Engine
from specengine.costs import PassCosts, interpolated, measuring
from specengine.costs.measuring import SyntheticCycles, processor_times, share_of_others, stored
from specengine.drafters import Drafter
from specengine.drafters.eagle import EagleDraft
from specengine.drafters.lookup import Lookup
from specengine.drafters.ngram import NGram
from specengine.drafters.small_model import SmallModel
from specengine.errors import InputError
from specengine.models import Target
from specengine.models.families import Routes
from specengine.models.huggingface import HuggingFaceTarget
from specengine.models.native import NativeTarget
from specengine.ops.tree import TokenTree
from tests import toy
from tests.costs.kept import unlawful
from tests.models.native_engines import lm_of, needs_extension

pytestmark = pytest.mark.usefixtures("one_thread")

POINTS = st.dictionaries(st.integers(1, 120), st.floats(0.001, 1000), min_size=1, max_size=9)
RISING = POINTS.map(lambda points: dict(zip(sorted(points), sorted(points.values()), strict=True)))
STEPS = {1: 1.0, 16: 1.0, 17: 2.0, 32: 2.0, 33: 3.0}


def costs_of(verify: dict[int, float], **more: Any) -> PassCosts:
    return PassCosts("mine", verify, {1: 0.5}, **more)


# ---- tables


@given(POINTS)
def test_tables_hit_the_points(points: dict[int, float]) -> None:
    verify, draft = PassCosts("mine", points, points).table(120, 120, 0)
    assert verify[0] == draft[0] == 0
    assert torch.equal(verify, draft)
    assert [float(verify[n]) for n in points] == pytest.approx(list(points.values()))
    assert verify[1:].tolist() == pytest.approx([interpolated(points, n) for n in range(1, 121)])


@given(POINTS)
def test_between_points_costs_are_between_theirs(points: dict[int, float]) -> None:
    known = sorted(points)
    for left, right in itertools.pairwise(known):
        ends = sorted((points[left], points[right]))
        assert all(
            ends[0] * 0.999 <= interpolated(points, n) <= ends[1] * 1.001
            for n in range(left, right + 1)
        )


@given(RISING)
def test_rising_points_make_rising_tables(points: dict[int, float]) -> None:
    table = costs_of(points).table(200, 1, 0).verify
    assert (table.diff() >= -1e-3 * table[1:]).all()


def test_steps_survive() -> None:
    table = costs_of(STEPS).table(40, 1, 0).verify
    assert table[[1, 9, 16, 17, 25, 32, 33]].tolist() == [1, 1, 1, 2, 2, 2, 3]


def test_behind_the_points_the_last_slope_goes_on_where_it_rises() -> None:
    assert interpolated({1: 1.0, 3: 2.0}, 7) == 4
    assert interpolated({1: 2.0, 3: 1.0}, 7) == 1


def test_each_token_of_context_adds_its_growth() -> None:
    costs = costs_of(
        {1: 10.0, 3: 14.0}, context=64, verify_growth={1: 0.1, 3: 0.3}, draft_growth={1: 0.01}
    )
    verify, draft = costs.table(3, 2, 164)
    assert verify.tolist() == pytest.approx([0, 20, 32, 44])
    assert draft.tolist() == pytest.approx([0, 1.5, 1.5])
    assert (
        costs.table(3, 2, 10).verify.tolist()
        == costs.table(3, 2, 64).verify.tolist()
        == [0, 10, 12, 14]
    )


def test_padded_costs_are_those_of_the_next_point() -> None:
    widths = costs_of({1: 1.0, 8: 2.0, 16: 3.0, 64: 5.0}, padded=True)
    few, more, most = [2.0] * 7, [3.0] * 8, [5.0] * 48
    assert widths.table(64, 1, 0).verify.tolist() == [0, 1.0, *few, *more, *most]
    assert widths.table(40, 1, 0).verify.tolist() == [0, 1.0, *few, *more, *[4.0] * 24]
    assert widths.table(5, 1, 0).verify.tolist() == pytest.approx([0, 1.0, *[1 + 4 / 7] * 4])


@pytest.mark.parametrize("points", [{1: 1.0, 2: 3.0, 20: 3.0}, {20: 3.0}])
def test_padded_costs_of_one_width_are_flat(points: dict[int, float]) -> None:
    """As files of earlier versions have them."""
    table = costs_of(points, padded=True).table(20, 3, 0)
    assert table.verify.tolist() == [0, points.get(1, 3.0), *[3.0] * 19]
    assert table.draft.tolist() == [0, *[table.draft[-1]] * 3]


def test_each_width_grows_with_the_context() -> None:
    costs = costs_of({1: 1.0, 8: 2.0, 16: 3.0}, padded=True, verify_growth={1: 0.0, 16: 0.15})
    verify = costs.table(16, 1, 10).verify
    assert verify[2:9].tolist() == pytest.approx([2.0 + 10 * 0.07] * 7)
    assert verify[9:].tolist() == pytest.approx([4.5] * 8)


def test_tables_are_the_callers_own() -> None:
    costs = costs_of(STEPS)
    costs.table(4, 4, 0).verify.fill_(7)
    assert costs.table(4, 4, 0).verify.tolist() == [0, 1, 1, 1, 1]


def test_a_cycle_with_its_overhead() -> None:
    assert costs_of(STEPS, overhead=0.25).cycle(17, [1, 4]) == 2 + 2 * 0.5 + 0.25
    assert PassCosts("published", {1: 1.0, 60: 1.2}, {1: 0.07}).cycle(1, [1]) == pytest.approx(1.07)
    with pytest.raises(InputError, match="nodes, width"):
        costs_of(STEPS).table(0, 1, 0)


# ---- JSON


@given(POINTS, POINTS, st.integers(0, 5000), st.floats(0, 10), st.booleans())
def test_json_round_trip(
    points: dict[int, float], growth: Any, context: int, overhead: float, flag: bool
) -> None:
    costs = PassCosts("mine", points, points, "here", flag, overhead, context, growth, {}, flag)
    assert PassCosts.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verify": {}}, "costs.verify"),
        ({"verify": [1.0]}, "costs.verify"),
        ({"draft": {"0": 1.0}}, "costs.draft"),
        ({"draft": {"one": 1.0}}, "costs.draft"),
        ({"draft": {"1": "fast"}}, "costs.draft"),
        ({"draft": {"1": float("nan")}}, "costs.draft"),
        ({"verify_growth": {"1": -1.0}}, "costs.verify_growth"),
        ({"name": 3}, "costs.name"),
        ({"measured": 1}, "costs.measured"),
        ({"overhead": -1}, "costs.overhead"),
        ({"overhead": True}, "costs.overhead"),
        ({"context": 1.5}, "costs.context"),
        ({"prefill": 1.0}, "costs.prefill: unknown"),
        ({"experts": {"2": 8.0}, "all_experts": 64}, "costs.experts"),
        ({"experts": {"1": 8.0}, "all_experts": 4}, "costs.experts"),
    ],
)
def test_malformed_json_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PassCosts.from_dict(costs_of(STEPS).to_dict() | change)


def test_json_without_a_field_or_of_another_kind() -> None:
    with pytest.raises(InputError, match=r"costs\.draft: got nothing"):
        PassCosts.from_dict({"name": "mine", "verify": {"1": 1.0}})
    with pytest.raises(InputError, match="got list"):
        PassCosts.from_dict([])


# ---- measuring


def tables_pair(vocabulary: int = 6) -> tuple[Target, Drafter]:
    return toy.ToyTarget(toy.Tables(vocabulary, 1)), toy.ToyDrafter(toy.Tables(vocabulary, 2))


def hugging_face(
    drafter: Callable[[HuggingFaceTarget], Drafter], family: str = "llama", **options: Any
) -> Any:
    captured = options.pop("captured", False)
    target = HuggingFaceTarget(toy.tiny(family, **options), captured=captured)
    return target, drafter(target)


def small(_: Any) -> Drafter:
    return SmallModel(toy.near_copy())


def eagle(target: HuggingFaceTarget) -> Drafter:
    return EagleDraft(toy.tiny_head(toy.head_config(layer_ids=(0, 1, 1))), target.lm)


PAIRS: dict[str, Callable[[], tuple[Target, Drafter]]] = {
    "tables": tables_pair,
    "two tokens": lambda: tables_pair(2),
    "small model": lambda: hugging_face(small),
    "lookup": lambda: hugging_face(lambda target: Lookup(small(target))),
    "eagle": lambda: hugging_face(eagle),
    "short context": lambda: hugging_face(lambda _: NGram(), "gpt2", max_position_embeddings=20),
    "captured": lambda: hugging_face(
        lambda _: SmallModel(toy.near_copy(), captured=True), captured=True
    ),
    "captured eagle": lambda: hugging_face(eagle, captured=True),
    "native": lambda: (NativeTarget(lm_of("llama")), NGram()),
    "captured ngram": lambda: hugging_face(lambda _: NGram(), captured=True),
}


@pytest.mark.sliced(4)
@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, marks=needs_extension if pair == "native" else ()) for pair in PAIRS],
)
def test_measured_costs_leave_the_parts_as_they_were(pair: str) -> None:
    target, drafter = PAIRS[pair]()
    engine = Engine(target, drafter, toy.policy_for("eagle"))
    prompt = [1, 0, 1, 1, 0]

    def answer() -> list[int]:
        return [
            token
            for cycle in engine.answer(prompt, max_new_tokens=9, temperature=0.0)
            for token in cycle.tokens
        ]

    before, noise = answer(), torch.random.get_rng_state()
    costs = measuring.measure(target, drafter, seconds=0.2)
    assert not target.tokens
    assert not getattr(drafter, "tokens", [])
    assert torch.equal(torch.random.get_rng_state(), noise)
    assert {1, 64} <= costs.verify.keys()
    assert {1, 16} <= costs.draft.keys()
    assert min(*costs.verify.values(), *costs.draft.values()) > 0
    assert costs.padded == target.captured
    assert costs.measured
    assert costs.context == min(64, target.max_context - 16)
    assert answer() == before


class Clock:
    """Stands for the module `time`: seconds pass where a test says so, and a microsecond whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    process_time = monotonic

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(measuring, "time", found)
    return found


class Slow(toy.ToyTarget):
    """A forward takes `seconds` for each block of 16 rows, and for 100 tokens of context as much again."""

    def __init__(self, clock: Clock, seconds: float, max_context: int = 1 << 16) -> None:
        super().__init__(toy.Tables(), max_context)
        self.clock, self.seconds = clock, seconds

    def prefill(self, tokens: list[int], keep: int | None = None) -> None:
        if len(tokens) > (keep or 0):
            self.clock.now += self.seconds * -(-(len(tokens) - (keep or 0)) // 64)
        super().prefill(tokens, keep)

    def verify(self, tree: TokenTree) -> tuple[Tensor, None]:
        self.sizes.append(len(tree))
        self.clock.now += self.seconds * (-(-len(tree) // 16) + len(self.tokens) / 100)
        return torch.zeros(len(tree), self.vocab_size), None


def test_without_a_draft(clock: Clock) -> None:
    costs = measuring.measure(Slow(clock, 0.001), None)
    assert costs.draft == {1: 0.0}
    assert costs.verify[64] > costs.verify[1] > 0


def test_steps_and_the_contexts_part_are_found(clock: Clock) -> None:
    costs = measuring.measure(Slow(clock, 0.001), None, seconds=3.0)
    table = costs.table(64, 1, 64).verify
    assert float(table[17] - table[16]) == pytest.approx(0.001, rel=0.05)
    assert abs(table[32] - table[17]) < 0.0001
    assert costs.verify_growth[1] == pytest.approx(1e-5, rel=0.05)


class Sparse(Slow):
    """Each token has two experts of 200 to itself, and reading one takes 0.2 ms."""

    EXPERT = 0.0002

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, 0.001)
        self.vocab_size, self.lm = 100, SimpleNamespace(routes=Routes(1, 2, 200))

    def verify(self, tree: TokenTree) -> tuple[Tensor, None]:
        found = super().verify(tree)
        tokens = tree.tokens.tolist()
        self.experts = torch.tensor(
            [0 if token in tokens[:i] else 2 for i, token in enumerate(tokens)]
        )
        self.clock.now += self.EXPERT * float(self.experts.sum())
        return found


def test_the_price_of_an_expert_is_found(clock: Clock) -> None:
    target = Sparse(clock)
    costs = measuring.measure(target, None, seconds=3.0)
    assert costs.expert == pytest.approx(Sparse.EXPERT, rel=0.02)
    assert costs.all_experts == 200
    assert costs.experts[1] == 2
    assert costs.experts.keys() == costs.verify.keys()
    tree = SyntheticCycles(target, None, 64)._tree_of(16)
    assert costs.experts[16] == 2 * len(set(tree.tokens.tolist()))
    assert PassCosts.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs
    assert not costs.beside(2).experts
    assert clock.now < 4
    dense = measuring.measure(Slow(clock, 0.001), None, seconds=3.0)
    assert (dense.experts, dense.all_experts, dense.expert) == ({}, 0, 0.0)


def test_a_slow_target_keeps_to_its_time(clock: Clock) -> None:
    target = Slow(clock, 0.04)
    costs = measuring.measure(target, None, seconds=0.2)
    assert clock.now < 1.5  # prefill 1, then 1 + 2 nodes' cycles at least, of up to 5 forwards
    assert len(target.sizes) <= 5
    assert len(costs.verify) >= 2


def test_a_fast_target_takes_few_cycles(clock: Clock) -> None:
    target = Slow(clock, 0.0001)
    measuring.measure(target, toy.ToyDrafter(toy.Tables()))
    assert sum(target.sizes) < 64 * measuring.MAX_CYCLES
    assert clock.now < measuring.SECONDS / 2


def test_an_error_leaves_empty_caches() -> None:
    target, drafter = tables_pair()
    target.verify = lambda tree: (_ for _ in ()).throw(RuntimeError("no memory"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no memory"):
        measuring.measure(target, drafter)
    assert not target.tokens
    with pytest.raises(InputError, match="seconds: got 0"):
        measuring.measure(target, drafter, seconds=0)


# ---- stored costs


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[PassCosts]:
    """Made-up costs, one more each time that something is measured; files go to a folder of the test."""
    made: list[PassCosts] = []

    def measure(*_: Any) -> PassCosts:
        made.append(costs_of(STEPS, source="measured", overhead=float(len(made)), measured=True))
        return made[-1]

    monkeypatch.setattr(stored, "measure", measure)
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path / "cache"))
    return made


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget all costs, as in a new process."""
    monkeypatch.setattr(stored, "_loaded", {})


def test_what_was_measured_is_found_again(
    measured: list[PassCosts], tmp_path: Path, monkeypatch: Any
) -> None:
    target, drafter = tables_pair()
    first = stored.find(target, drafter)
    assert stored.find(target, drafter) is first
    forget(monkeypatch)
    assert stored.find(*tables_pair()) == first
    assert len(measured) == 1
    assert stored.find(target, drafter, fresh=True) == measured[1] != first
    (file,) = (tmp_path / "cache" / "costs").iterdir()
    content = json.loads(file.read_text())
    assert content["key"] == stored.identity(target, drafter)
    assert content["key"]["model"] == "ToyTarget"
    assert PassCosts.from_dict(content["costs"]) == measured[1]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"key": {}}', '{"key": {}, "costs": {}}', "\ud800", "[" * 100000],
)
def test_a_damaged_file_is_measured_again(
    measured: list[PassCosts], monkeypatch: Any, text: str
) -> None:
    pair = tables_pair()
    stored.find(*pair)
    file = stored.path(stored.identity(*pair))
    file.write_bytes(text.encode(errors="surrogatepass"))
    forget(monkeypatch)
    assert stored.find(*pair) == measured[1]
    assert json.loads(file.read_text())["costs"]["overhead"] == 1


@pytest.mark.parametrize(
    "value", ["1e308", "3601", "NaN", "-1", "Infinity", "1e999", "9" * 400, '"x"', "null"]
)
@pytest.mark.parametrize("field", ["overhead", "verify", "draft", "verify_growth"])
def test_costs_that_no_machine_has_are_measured_again(
    measured: list[PassCosts], monkeypatch: Any, field: str, value: str
) -> None:
    pair = tables_pair()
    stored.find(*pair)
    file = stored.path(stored.identity(*pair))
    content = json.loads(file.read_text())
    content["costs"][field] = "HERE" if field == "overhead" else {"1": "HERE"}
    file.write_text(json.dumps(content).replace('"HERE"', value))
    forget(monkeypatch)
    assert stored.find(*pair) == measured[1]
    forget(monkeypatch)
    assert stored.find(*pair) == measured[1], "the file is whole again"


def test_a_foreign_file_is_measured_again(measured: list[PassCosts], monkeypatch: Any) -> None:
    pair = tables_pair()
    stored.find(*pair)
    file = stored.path(stored.identity(*pair))
    content = json.loads(file.read_text())
    for change in (
        {"key": {**content["key"], "model": "another"}},
        {"costs": {**content["costs"], "verify": {}}},
    ):
        file.write_text(json.dumps(content | change))
        forget(monkeypatch)
        stored.find(*pair)
    assert len(measured) == 3


# ---- provisional costs


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine whose time and load the test sets; costs that are measured carry its load."""
    machine: dict[str, Any] = {"now": 1e9, "load": 0.0, "measured": 0}

    def measure(*_: Any) -> PassCosts:
        machine["measured"] += 1
        return costs_of(
            STEPS,
            source="measured",
            measured=True,
            load=machine["load"],
            spread=machine.get("spread", {}),
        )

    monkeypatch.setattr(stored, "measure", measure)
    monkeypatch.setattr("time.time", lambda: machine["now"])
    monkeypatch.setattr(stored, "share_of_others", lambda _: machine["load"])
    return machine


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("restarts", [False, True], ids=["one process", "another process"])
def test_costs_of_a_busy_machine_are_measured_again_on_a_quiet_one(
    quiet: dict[str, Any], monkeypatch: Any, restarts: bool
) -> None:
    pair = tables_pair()
    quiet["load"] = 0.5
    assert stored.find(*pair).doubt == "other programs took 50% of the processors"
    for later, others, measured in [(400, 0.5, 1), (10, 0.0, 2), (400, 0.0, 2)]:
        if restarts:
            forget(monkeypatch)
        quiet["now"] += later
        quiet["load"] = others
        costs = stored.find(*pair)
        assert quiet["measured"] == measured
    assert costs.doubt is None
    file = stored.path(stored.identity(*pair))
    assert json.loads(file.read_text())["when"] == 1e9 + 410


@pytest.mark.usefixtures("measured")
def test_measuring_again_takes_a_bounded_share_of_the_time(quiet: dict[str, Any]) -> None:
    pair = tables_pair()
    quiet["spread"] = {1: 0.1, 8: 0.9}
    for _ in range(3000):
        assert stored.find(*pair).doubt == "times of 8 rows were scattered"
        quiet["now"] += 1.0
    assert 3 <= quiet["measured"] <= 1 + 3000 * stored.MAX_SHARE / measuring.SECONDS


@pytest.mark.usefixtures("measured")
def test_costs_are_not_measured_again_while_other_texts_are_answered(quiet: dict[str, Any]) -> None:
    target, drafter = tables_pair()
    quiet["load"] = 0.5
    stored.find(target, drafter)
    quiet.update(load=0.0, now=2e9)
    target.others = 1  # type: ignore[attr-defined]
    stored.find(target, drafter)
    assert quiet["measured"] == 1
    target.others = 0  # type: ignore[attr-defined]
    stored.find(target, drafter)
    assert quiet["measured"] == 2


@pytest.mark.parametrize(
    "verify", [{1: 1.0, 8: 0.5}, {1: 1.0, 16: 795.0}, {1: 1.0, 2: 1.15, 4: 1.44, 8: 3.63, 16: 10.8}]
)
def test_a_file_that_breaks_a_law_is_measured_again(
    measured: list[PassCosts], monkeypatch: Any, verify: dict[int, float]
) -> None:
    pair = tables_pair()
    stored.find(*pair)
    file = stored.path(stored.identity(*pair))
    content = json.loads(file.read_text())
    content["costs"]["verify"] = {str(n): cost for n, cost in verify.items()}
    file.write_text(json.dumps(content))
    assert unlawful(file.parent) == [file]
    forget(monkeypatch)
    assert stored.find(*pair) == measured[1]
    assert unlawful(file.parent) == []


# ---- load


STAT = "cpu  {user} 0 100 5000 30 0 0 {steal} 7 0\ncpu0 1 2 3\n"


@pytest.mark.parametrize(
    ("user", "steal", "share"), [(200, 0, 0.25), (100, 100, 0.25), (0, 0, 0.0), (2000, 0, 1.0)]
)
def test_load_is_what_others_took(
    tmp_path: Path, monkeypatch: Any, user: int, steal: int, share: float
) -> None:
    """Of four processors in 2 seconds, hundredths of a second; this process takes none."""
    file = tmp_path / "stat"
    file.write_text(STAT.format(user=1000, steal=10))
    clock = iter([0.0, 2.0, 2.0])
    monkeypatch.setattr(measuring, "PROCESSOR_TIMES", file)
    monkeypatch.setattr(
        measuring, "time", SimpleNamespace(monotonic=lambda: next(clock), process_time=lambda: 5.0)
    )
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    before = processor_times()
    file.write_text(STAT.format(user=1000 + user, steal=10 + steal))
    assert share_of_others(before) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "cpu\n", "cpu a b c d e f g h\n", None])
def test_load_is_unknown_where_the_system_does_not_tell(
    tmp_path: Path, monkeypatch: Any, text: str | None
) -> None:
    file = tmp_path / "stat"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(measuring, "PROCESSOR_TIMES", file)
    assert processor_times() is None
    assert share_of_others(processor_times()) is None


def test_a_folder_that_cannot_be_written(
    measured: list[PassCosts], tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path / "file"))
    pair = tables_pair()
    found = stored.find(*pair)
    assert "cannot be written" in found.source
    assert stored.find(*pair) is found
    assert len(measured) == 1


def test_the_key_follows_what_costs_depend_on() -> None:
    def key(
        dtype: torch.dtype = torch.float32, drafter: Drafter | None = None, **options: Any
    ) -> dict[str, Any]:
        captured = options.pop("captured", False)
        return stored.identity(
            HuggingFaceTarget(toy.tiny(**options).to(dtype), captured=captured), drafter
        )

    base = key()
    assert key() == base
    others = [
        key(torch.bfloat16),
        key(num_hidden_layers=3),
        key(rope_theta=5e5),
        key(captured=True),
        key(drafter=NGram()),
        key(drafter=SmallModel(toy.near_copy())),
        key(drafter=SmallModel(toy.near_copy(intermediate_size=96))),
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    others.append(key())
    torch.set_num_threads(threads)
    places = {stored.path(found) for found in (base, *others)}
    assert len(places) == 1 + len(others)
    assert key() == base
