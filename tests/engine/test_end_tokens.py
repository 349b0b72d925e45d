"""End tokens in trees: no node below one is verified, and a drafted one that ends the answer counts as accepted."""

from pathlib import Path
from typing import Any

import pytest

from specengine import Engine
from specengine.ops.tree import TokenTree
from specengine.records import Cycle
from specengine.trace.records import read_trace
from specengine.trace.views import cycle_lines
from specengine.trace.writer import TraceWriter
from tests import toy
from tests.engine import engines
from tests.graphs.engines import PROMPT, engine_of

pytestmark = pytest.mark.usefixtures("one_thread")
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.0, "seed": 2, "top_k": 40},
    {"repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 5, "logprobs": 2},
]
COUNT = 16


def below_ends(tree: TokenTree, ends: list[int]) -> list[int]:
    """Return the nodes below one that carries an end token, the root left out."""
    tokens, parents, found = tree.tokens.tolist(), tree.parents.tolist(), list[int]()
    for node in range(1, len(tokens)):
        parent = parents[node]
        if parent in found or (parent and tokens[parent] in ends):
            found.append(node)
    return found


def cycles_of(engine: Engine, **options: Any) -> tuple[list[Cycle], Any]:
    stream = engine.stream(PROMPT, max_new_tokens=COUNT, **options)
    return [piece.cycle for piece in stream], stream.result


def check(cycles: list[Cycle], result: Any, ends: list[int], plain: list[int]) -> tuple[int, int]:
    """Check an answer; return how many of its trees hold an end token, and whether the last one proposed its end."""
    assert result.token_ids == plain
    for cycle in cycles:
        assert not below_ends(cycle.tree, ends)
        assert cycle.tree.tokens[cycle.path[1:]].tolist() == cycle.tokens[: len(cycle.path) - 1]
        assert cycle.end is None or cycle is cycles[-1]
    last = cycles[-1]
    nodes = list(zip(last.tree.parents.tolist(), last.tree.tokens.tolist(), strict=True))
    proposed = (last.path[-1], last.tokens[-1]) in nodes
    if ended := last.tokens[-1] in ends:
        assert last.end == (nodes.index((last.path[-1], last.tokens[-1])) if proposed else None)
    assert last.accepted == len(last.tokens) - (not (ended and proposed))
    assert result.stats.num_accepted_draft_tokens == sum(cycle.accepted for cycle in cycles)
    assert result.stats.num_draft_tokens == sum(len(cycle.tree) - 1 for cycle in cycles)
    held = sum(bool(set(cycle.tree.tokens[1:].tolist()) & set(ends)) for cycle in cycles)
    return held, int(last.end is not None)


@pytest.mark.sliced(1)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("policy", [name for name in toy.POLICIES if name != "random"])
def test_every_policy(policy: str, captured: bool) -> None:
    engine = engine_of("small_model", policy, captured=captured)
    held = accepted = 0
    for way in WAYS:
        plain = (
            engine_of("none", "chain", captured=False)
            .generate(PROMPT, max_new_tokens=COUNT, **way)
            .token_ids
        )
        for place in (3, 6, 9):
            ends = [plain[place], plain[place - 1] + 1]
            cut = next(at for at, token in enumerate(plain) if token in ends) + 1
            counts = check(*cycles_of(engine, eos_token_id=ends, **way), ends, plain[:cut])
            held, accepted = held + counts[0], accepted + counts[1]
    assert held > 3
    assert accepted > 0


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("draft", ["eagle3", "ngram", "recycling"])
def test_every_kind_of_draft(draft: str, captured: bool) -> None:
    engine = engine_of(draft, "eagle", captured=captured)
    plain = (
        engine_of("none", "chain", captured=False).generate(PROMPT, max_new_tokens=COUNT).token_ids
    )
    ends = sorted({*range(0, toy.VOCABULARY, 5)} - set(plain[:8]))  # trees are full of them
    cut = next((at + 1 for at, token in enumerate(plain) if token in ends), COUNT)
    held, _ = check(*cycles_of(engine, eos_token_id=ends[:30]), ends[:30], plain[:cut])
    assert held > 0


@pytest.mark.parametrize("captured", [False, True])
def test_trees_go_on_below_ends_that_are_ignored(captured: bool) -> None:
    engine = engine_of("small_model", "eagle", captured=captured)
    free, result = cycles_of(engine, eos_token_id=[])
    ends = result.token_ids[:12]
    assert any(below_ends(cycle.tree, ends) for cycle in free)
    again, _ = cycles_of(engine, eos_token_id=[])
    assert [cycle.tree.tokens.tolist() for cycle in again] == [
        cycle.tree.tokens.tolist() for cycle in free
    ]


def test_a_root_that_carries_an_end_token_has_a_tree_all_the_same() -> None:
    for captured in (False, True):
        cycles, _ = cycles_of(
            engine_of("small_model", "eagle", captured=captured), eos_token_id=[PROMPT[-1]]
        )
        assert len(cycles[0].tree) > 4


def test_several_texts_at_once() -> None:
    model = engines.model_of("llama")
    engine = Engine.from_pretrained(
        model, engines.near_copy("llama"), "eagle", offline=True, memory="off"
    )
    prompts = [[3, 4, 5], [*range(30)], [7] * 9]
    free = engine.generate_many(prompts, max_new_tokens=COUNT, eos_token_id=[])
    ends = sorted({answer.token_ids[8] for answer in free})
    answers = engine.generate_many(prompts, max_new_tokens=COUNT, eos_token_id=ends)
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = engine.generate(prompt, max_new_tokens=COUNT, eos_token_id=ends)
        assert answer.token_ids == alone.token_ids
        assert answer.stats.acceptance_histogram == alone.stats.acceptance_histogram


@pytest.mark.parametrize("captured", [False, True])
def test_a_trace_shows_the_drafted_end_as_accepted(captured: bool, tmp_path: Path) -> None:
    engine = engine_of("small_model", "eagle", captured=captured)
    _, free = cycles_of(engine, eos_token_id=[])
    for place in range(2, 12):
        with TraceWriter(tmp_path / "trace", engine) as writer:
            stream = engine.stream(PROMPT, max_new_tokens=COUNT, eos_token_id=free.token_ids[place])
            last = list(writer.follow(stream))[-1].cycle
        traced = read_trace(tmp_path / "trace").queries[0].cycles[-1]
        assert len(traced.accepted) - 1 == last.accepted
        assert traced.has_own == (last.end is None)
        assert [traced.tokens[node] for node in traced.accepted[1:]] == traced.committed[
            : last.accepted
        ]
        assert (
            any(line.startswith(" " * 17 + "+") for line in cycle_lines(traced)) == traced.has_own
        )
        if last.end is not None:
            return
    raise AssertionError("no end was drafted")
