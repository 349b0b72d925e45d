"""Tests that a trace is what the engine did."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from research.drafting import draft_tree
from specengine import policies
from specengine.errors import InputError
from specengine.ops.tree import TokenTree
from specengine.records import Cycle, Seconds
from specengine.trace import Trace, TracedCycle, TraceWriter, read_trace
from specengine.trace.records import ACCEPTED, PRUNED, REJECTED, ROOT
from specengine.trace.writer import traced
from tests.examples import examples
from tests.toy import CPU, LetterTokenizer, ToyDrafter, policy_for
from tests.trace.runs import DRAFT, PROMPT, toy_engine, write


@pytest.mark.parametrize("name", ["chain", "eagle", "fixed", "random", "plain"])
@examples(10)
@given(seed=st.integers(0, 1000), temperature=st.sampled_from([0.0, 1.0]), normalized=st.booleans())
def test_a_trace_is_what_the_engine_did(
    name: str,
    seed: int,
    temperature: float,
    normalized: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    policy = None if name == "plain" else policy_for(name, seed)
    kind = {} if policy is None else {"normalized": normalized}
    file = tmp_path_factory.mktemp("trace") / "run.jsonl"
    trace, cycles = write(file, toy_engine(policy, **kind), temperature=temperature, seed=seed)
    (query,) = trace.queries
    assert len(query.cycles) == len(cycles)
    for found, cycle in zip(query.cycles, cycles, strict=True):
        check_cycle(found, cycle)
    assert sum(len(cycle.committed) for cycle in query.cycles) == 24
    assert "".join(cycle.text for cycle in query.cycles) == LetterTokenizer().decode(
        [token for cycle in cycles for token in cycle.tokens]
    )
    assert query.stats is not None
    assert query.tau == pytest.approx(query.stats["mean_acceptance_length"])
    assert query.delta == pytest.approx(query.stats["mean_draft_passes"])
    assert query.verified == pytest.approx(query.stats["num_spec_tokens"] + 1)
    assert (query.finish_reason, query.seed, query.prompt_tokens) == ("length", seed, PROMPT)


def check_cycle(traced: TracedCycle, cycle: Cycle) -> None:
    """The traced tree holds the verified one, and everything else that was drafted."""
    tree = cycle.tree
    assert [traced.tokens[node] for node in traced.kept] == tree.tokens.tolist()
    assert [traced.depths[node] for node in traced.kept] == tree.depths.tolist()
    assert len(traced.tokens) - 1 == cycle.drafted
    assert traced.committed == cycle.tokens
    assert traced.passes == int(tree.passes)
    for name, log_probs in (
        ("probabilities", tree.log_probs),
        ("path_probabilities", tree.path_log_probs),
    ):
        kept = [getattr(traced, name)[node] for node in traced.kept]
        assert kept == pytest.approx(log_probs.exp().tolist(), rel=1e-4)
    assert [traced.tokens[node] for node in traced.accepted] == tree.tokens[cycle.path].tolist()
    counts = {state: traced.states.count(state) for state in (ROOT, ACCEPTED, REJECTED, PRUNED)}
    assert counts[ROOT] == 1
    assert counts[ACCEPTED] == cycle.accepted
    assert counts[REJECTED] == len(tree) - 1 - cycle.accepted
    assert counts[PRUNED] == cycle.drafted + 1 - len(tree)
    for nodes in traced.children:
        assert [traced.ranks[node] for node in nodes] == list(range(1, len(nodes) + 1))
        likely = [traced.probabilities[node] for node in nodes]
        assert likely == sorted(likely, reverse=True)


def test_a_beam_with_a_small_budget_shows_what_it_pruned(written: Trace) -> None:
    for query in written.queries:
        for cycle in query.cycles:
            assert (len(cycle.tokens) - 1, len(cycle.kept)) == (3 + 2 * 9, 5)
            assert cycle.states.count(PRUNED) == 21 - 4


def test_tracing_does_not_change_the_answer(tmp_path: Path) -> None:
    engine = toy_engine(policy_for("eagle"))
    expected = engine.generate(PROMPT, max_new_tokens=24)
    _, cycles = write(tmp_path / "run.jsonl", engine)
    assert [token for cycle in cycles for token in cycle.tokens] == expected.token_ids


def test_the_header_describes_the_engine(written: Trace) -> None:
    assert (written.model, written.draft) == ("ToyTarget", "toy")
    assert written.policy == "Eagle(width=3, expansions=2, budget=5)"
    assert {"specengine", "torch", "transformers", "python"} == set(written.versions)


def test_a_cycle_that_no_engine_made_is_its_kept_tree() -> None:
    draft = draft_tree(0, _begun(ToyDrafter(DRAFT)), policy_for("fixed"), Seconds(), CPU)
    tree = draft.tree
    cycle = Cycle(tree, [0], [5], Seconds(), len(draft.grown) - 1)
    found = traced(cycle, "", str)
    assert found.kept == list(range(len(tree)))
    check_cycle(found, cycle)


def _begun(drafter: ToyDrafter) -> ToyDrafter:
    drafter.begin(PROMPT)
    return drafter


def test_a_draft_gives_the_tree_it_was_taken_from() -> None:
    policy = policies.make("eagle", width=3, expansions=2, budget=5)
    draft = draft_tree(0, _begun(ToyDrafter(DRAFT)), policy, Seconds(), CPU)
    assert draft.kept is not None
    assert torch.equal(draft.grown.tokens[draft.kept], draft.tree.tokens)
    assert (len(draft.grown) - 1, len(draft.tree)) == (21, 5)
    plain = draft_tree(0, None, None, Seconds(), CPU)
    assert (len(plain.grown), plain.grown, plain.kept) == (1, plain.tree, None)


def test_probabilities_that_are_no_numbers_count_as_zero() -> None:
    tree = TokenTree.root(0, 5)
    log_probs = torch.tensor([float("nan"), float("-inf"), 1e-6, 0.0])
    tree.add(torch.zeros(4, dtype=torch.int64), torch.tensor([1, 2, 3, 4]), log_probs)
    found = traced(Cycle(tree, [0], [5], Seconds()), "", str)
    assert found.probabilities == found.path_probabilities == [1.0, 0.0, 0.0, 1.0, 1.0]


def test_a_generation_that_is_broken_off_leaves_a_readable_query(tmp_path: Path) -> None:
    engine, file = toy_engine(policy_for("chain")), tmp_path / "run.jsonl"
    with TraceWriter(file, engine) as trace:
        pieces = trace.follow(engine.stream(PROMPT))
        next(pieces)
        assert len(read_trace(file).queries[0].cycles) == 1  # each record is there at once
        pieces.close()
        for _ in trace.follow(engine.stream(PROMPT, max_new_tokens=5)):
            pass
    broken, whole = read_trace(file).queries
    assert (len(broken.cycles), broken.finish_reason, whole.finish_reason) == (1, None, "length")
    assert broken.stats is not None
    assert broken.stats["num_spec_steps"] == 1


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"trace: .*missing.* cannot be written"):
        TraceWriter(tmp_path / "missing" / "run.jsonl", toy_engine(None))
