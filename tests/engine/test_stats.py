"""Tests of a generation's statistics."""

import pytest
import torch

from specengine.ops.tree import TokenTree
from specengine.records import Cycle, Seconds, Stats
from tests.engine.engines import PROMPT, engine_of

pytestmark = pytest.mark.usefixtures("one_thread")


def cycle_of(depth: int, accepted: int, *, drafted: int, total: float, model: float) -> Cycle:
    """A chain of `depth` draft nodes, `accepted` of them accepted."""
    tree = TokenTree.root(0, depth + 1)
    for node in range(depth):
        tree.add(torch.tensor([node]), torch.tensor([node]), torch.zeros(1))
    tree.passes = depth
    seconds = Seconds(
        draft=0.1, policy=0.2, verify=0.3, walk=0.4, commit=0.5, total=total, model=model
    )
    return Cycle(tree, list(range(accepted + 1)), [1] * (accepted + 1), seconds, drafted)


def test_stats_add_up() -> None:
    stats = Stats(num_generated_tokens=8, ttft_s=0.5, elapsed_s=4.0)
    for depth, accepted, model in ((4, 3, 0.5), (4, 0, 0.9), (2, 2, 0.8)):
        stats.add(cycle_of(depth, accepted, drafted=9, total=1.0, model=model))
    assert (stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (
        3,
        10,
        5,
    )
    assert stats.acceptance_histogram == [1, 0, 1, 1]
    assert stats.reached_histogram == [0, 0, 1, 0, 2]
    assert stats.acceptance_rate_per_position == [2 / 3, 2 / 3, 1 / 2, 0.0]
    assert stats.mean_acceptance_length == 8 / 3
    assert stats.mean_accepted_draft_tokens == 5 / 3
    assert stats.draft_acceptance_rate == 0.5
    assert (stats.mean_draft_passes, stats.num_spec_tokens) == (10 / 3, 10 / 3)
    assert (stats.tokens_per_second, stats.tpot_s) == (2.0, 0.5)
    assert stats.median_host_share == pytest.approx(0.2)
    assert stats.time_host_s == pytest.approx(0.8)
    parts = (
        stats.time_draft_s,
        stats.time_policy_s,
        stats.time_verify_s,
        stats.time_walk_s,
        stats.time_commit_s,
    )
    assert parts == pytest.approx((0.3, 0.6, 0.9, 1.2, 1.5))
    as_dict = stats.to_dict()
    assert as_dict["mean_acceptance_length"] == 8 / 3
    assert "host_shares" not in as_dict
    stats.notes.append("a note")
    assert "acceptance length  2.67 over 3 verifications" in stats.report()
    assert stats.report().endswith("note               a note")


def test_plain_steps_are_counted_where_a_policy_might_have_drafted() -> None:
    stats = Stats(policy="Auto()", plain_reason="no draft promised more than it costs")
    for depth in (0, 2, 0):
        assert "plain steps" not in stats.report() or stats.num_plain_steps
        stats.add(cycle_of(depth, 0, drafted=depth, total=1.0, model=0.5))
    assert stats.num_plain_steps == stats.to_dict()["num_plain_steps"] == 2
    assert stats.to_dict()["plain_reason"] == stats.plain_reason
    assert "\nplain steps        2 of 3 (no draft promised more than it costs)\n" in stats.report()
    for other, depth in ((Stats(), 0), (Stats(policy="Auto()"), 1)):
        other.add(cycle_of(depth, 0, drafted=depth, total=1.0, model=0.5))
        assert other.num_plain_steps == 0
        assert "plain steps" not in other.report()


def test_stats_of_nothing_are_zero() -> None:
    stats = Stats()
    derived = [value for name, value in stats.to_dict().items() if isinstance(value, int | float)]
    assert set(derived) == {0}
    assert stats.acceptance_rate_per_position == []
    assert "0 verifications" in stats.report()


@pytest.mark.parametrize("draft", ["none", "ngram", "recycling", "small_model"])
def test_stats_of_a_generation_are_consistent(draft: str) -> None:
    engine = engine_of("llama", draft)
    stream = engine.stream(PROMPT, max_new_tokens=30)
    cycles = [piece.cycle for piece in stream]
    stats = stream.stats
    assert (
        stats.num_generated_tokens
        == 30
        == stats.num_emitted_in_steps
        == sum(len(cycle.tokens) for cycle in cycles)
    )
    assert (
        stats.num_spec_steps
        == len(cycles)
        == sum(stats.acceptance_histogram)
        == sum(stats.reached_histogram)
    )
    assert stats.num_accepted_draft_tokens == sum(cycle.accepted for cycle in cycles)
    assert stats.num_draft_tokens == sum(len(cycle.tree) - 1 for cycle in cycles)
    for cycle in cycles:
        seconds = cycle.seconds
        parts = seconds.draft + seconds.policy + seconds.verify + seconds.walk + seconds.commit
        assert 0 < parts <= seconds.total * 1.01 + 1e-5
        assert 0 < seconds.model < seconds.total
    assert 0 < stats.median_host_share < 1
    assert 0 < stats.ttft_s <= stats.elapsed_s
    assert stats.draft == ("" if draft == "none" else engine.drafter.name)
    assert stats.policy == ("" if draft == "none" else repr(engine.policy))
    assert stats.plain_reason == ("" if draft == "none" else "nothing was proposed")
    assert stats.num_plain_steps == (
        0 if draft == "none" else sum(len(cycle.tree) == 1 for cycle in cycles)
    )
