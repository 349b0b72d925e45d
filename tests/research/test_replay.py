"""The replay simulator agrees with live runs, counts what it does not know, and reads costs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from research import replay as command
from research.drafting import draft_tree
from research.replay import Replayed, path_log_probs, replay, speedup, summary
from specengine import policies
from specengine.costs import PUBLISHED, PassCosts, find_costs, interpolated
from specengine.cycle import walk
from specengine.engine import Engine
from specengine.errors import InputError
from specengine.ops import Nodes
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree
from specengine.policies import TreePolicy
from specengine.records import Seconds
from specengine.train.classifier.options import CollectOptions
from specengine.train.classifier.trees import Trees, collect
from tests.toy import CPU, LetterTokenizer, Tables, ToyDrafter, ToyTarget

pytestmark = pytest.mark.usefixtures("one_thread")

TARGET = Tables(12, 1)
OPTIONS = CollectOptions(trees=0, length=40, width=4, expansions=3, logits=True)
PROMPTS = [[1, 2, i] for i in range(6)]
COLUMNS = [*range(11, 0, -1)]  # of the draft, in another order than the target's
INSIDE = {
    "chain": {"length": 3},
    "eagle": {"width": 3, "expansions": 2, "budget": 9},
    "fixed": {"branching": (4, 2)},
    "svip": {"width": 4, "expansions": 3, "budget": 12},
}


def engine(policy: TreePolicy, **kind: Any) -> Engine:
    return Engine(
        ToyTarget(TARGET),
        ToyDrafter(Tables(12, 2, like=TARGET, share=0.7), **kind),
        policy,
        LetterTokenizer(),
    )


@pytest.fixture(scope="module", params=[False, True], ids=["logits", "log-probabilities"])
def trees(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Trees:
    live = engine(OPTIONS.policy, normalized=request.param, columns=COLUMNS)
    return collect(live, PROMPTS, tmp_path_factory.mktemp("trees"), OPTIONS, name="toy")


def test_the_policy_that_logged_replays_as_it_ran(trees: Trees) -> None:
    normalized = trees.read(trees.shards()[0]).columns.normalized
    live = engine(OPTIONS.policy, normalized=normalized, columns=COLUMNS)
    rows = list(replay(trees, OPTIONS.policy))
    by_prompt = iter(rows)
    for prompt, file in zip(PROMPTS, trees.shards(), strict=True):
        found = [
            piece.cycle
            for piece in live.stream(prompt, max_new_tokens=OPTIONS.length, temperature=0.0)
        ]
        logged = len(trees.read(file).trees)
        assert len(found) - 1 <= logged <= len(found), (
            "the last one only where the answer's end did not cut its path"
        )
        for cycle in found[:logged]:
            row = next(by_prompt)
            assert (row.committed, len(row.widths), row.verified) == (
                len(cycle.tokens),
                int(cycle.tree.passes),
                len(cycle.tree),
            )
            assert row.drafted == cycle.drafted
    assert next(by_prompt, None) is None
    assert sum(row.missed_rows + row.missed_nodes + row.cut for row in rows) == 0


@pytest.mark.parametrize("name", INSIDE)
def test_another_policy_replays_as_it_would_run_at_these_positions(trees: Trees, name: str) -> None:
    """Live, with the draft and the target put to each logged position; where it stays inside the logged tree."""
    columns = trees.read(trees.shards()[0]).columns
    policy, inside, outside = policies.make(name, **INSIDE[name]), 0, 0
    rows = iter(list(replay(trees, policies.make(name, **INSIDE[name]))))
    for prompt, file in zip(PROMPTS, trees.shards(), strict=True):
        context = list(prompt)
        for logged in trees.read(file).trees:
            row = next(rows)
            if row.missed_rows or row.missed_nodes:
                outside += 1
            else:
                inside += 1
                check_against_live(row, context, policy, columns.normalized)
            end = int(logged.accepted.nonzero()[-1])
            context += [*logged.tree.path_tokens(end), int(logged.choices[end])]
    assert inside > 2 * outside


def check_against_live(
    row: Replayed, context: list[int], policy: TreePolicy, normalized: bool
) -> None:
    draft = engine(policy, normalized=normalized, columns=COLUMNS).drafter
    assert draft is not None
    draft.begin(context[:-1])
    tree = draft_tree(context[-1], draft, policy, Seconds(), CPU).tree
    paths = [tree.path_tokens(node) for node in range(len(tree))]
    _, tokens = walk(
        tree,
        lambda node: int(TARGET.logits([*context, *paths[node]]).argmax()),
        lambda token: False,
    )
    assert (row.committed, row.verified, len(row.widths)) == (
        len(tokens),
        len(tree),
        int(tree.passes),
    )
    logs = [
        sum(float(TARGET.logits([*context, *path[:i]])[path[i]]) for i in range(len(path)))
        for path in paths
    ]
    assert row.expected == pytest.approx(sum(map(math.exp, logs)), rel=1e-4)


def test_what_is_not_in_the_log_is_counted(tmp_path: Path) -> None:
    """The log holds the draft's best token and its best follower only; a third of the policy's nodes are in it."""
    narrow = CollectOptions(trees=0, length=40, width=1, expansions=1, logits=True)
    trees = collect(engine(narrow.policy), PROMPTS, tmp_path, narrow)
    policy = policies.make("fixed", branching=(3, 1))
    rows = list(replay(trees, policy))
    assert all(row.widths == [1, 3] and row.missed_rows == 2 for row in rows)
    assert all(row.missed_nodes == 2 and row.verified == 1 + 3 + 1 for row in rows), (
        "without a row, no children"
    )
    cut = [row for row in rows if row.cut]
    assert cut
    assert all(row.committed == 1 for row in cut), (
        "the accepted token counts, what follows it is not known"
    )
    figures = summary("wide", policy, rows, [])
    assert figures["missed_rows_share"] == pytest.approx(2 / 4, abs=1e-4)
    assert figures["missed_nodes_share"] == pytest.approx(2 / 5, abs=1e-4)
    assert figures["walks_cut"] == len(cut)


def test_path_probabilities_multiply(trees: Trees) -> None:
    logged = next(iter(trees))
    total = path_log_probs(logged)
    for node in range(1, len(total)):
        parent = int(logged.parents[node])
        assert float(total[node]) == pytest.approx(
            float(total[parent] + logged.target_log_probs[node]), abs=1e-9
        )
    leaves = (logged.tree.depths == 1).nonzero()[:, 0]
    assert float(total[leaves].exp().sum()) <= 1 + 1e-6


def test_drafts_whose_columns_change_cannot_be_logged(tmp_path: Path) -> None:
    class Changing(ToyDrafter):
        def step(self, tree: TokenTree, frontier: Nodes) -> Step:
            step = super().step(tree, frontier)
            columns = torch.arange(12).roll(int(tree.passes))
            return Step(step.logits[:, columns], columns, True)

    live = Engine(ToyTarget(TARGET), Changing(TARGET, normalized=True), OPTIONS.policy)
    with pytest.raises(InputError, match="other tokens at each step"):
        collect(live, PROMPTS, tmp_path, OPTIONS)


# ---------------------------------------------------------------------------------------------------- costs

ROW = Replayed(3, 2.0, [1, 4, 4], 13, 12, 0.002, 0, 0, False, 2, 8)


def test_costs_are_linear_between_points() -> None:
    points = {1: 10.0, 5: 30.0, 10: 40.0}
    assert [interpolated(points, n) for n in (1, 3, 5, 6, 10, 12)] == [10, 20, 30, 32, 40, 44]
    assert interpolated({1: 7.0}, 50) == 7


def test_speedups() -> None:
    costs = PassCosts("mine", {1: 0.036, 13: 0.048}, {1: 0.002, 4: 0.005})
    assert speedup(costs, [ROW]) == pytest.approx(3 * 0.036 / (0.048 + 0.002 + 2 * 0.005))
    measured = PassCosts("mine", costs.verify, costs.draft, measured=True)
    assert speedup(measured, [ROW, ROW]) == pytest.approx(3 * 0.036 / (0.048 + 0.012 + 0.002))
    published = PUBLISHED["qwen3-8b-h200"]
    assert speedup(published, [ROW]) == pytest.approx(3 / (1 + 0.074 * 3))
    assert all(costs.source for costs in PUBLISHED.values())


def test_costs_are_read_from_result_files_and_from_what_was_printed(tmp_path: Path) -> None:
    record = {
        "record": "costs",
        "verify_ms_by_nodes": {"1": 36.0, "12": 47.0},
        "draft_pass_ms_by_width": {"1": 2.0},
    }
    other = {"record": "provenance", "nested": {"a": [1, 2]}}
    lines, printed, bare = (tmp_path / name for name in ("lines.jsonl", "printed.txt", "bare.json"))
    lines.write_text(json.dumps(other) + "\n" + json.dumps(record) + "\n")
    printed.write_text(json.dumps(record, indent=1) + "\n" + json.dumps(other, indent=1) + "\n")
    bare.write_text(json.dumps(record))
    for file in (lines, printed, bare):
        found = find_costs(str(file))
        assert (found.verify, found.draft, found.measured) == (
            {1: 0.036, 12: 0.047},
            {1: 0.002},
            True,
        )
    for text in ("", "{", '{"record": "costs"}', '{"verify_ms_by_nodes": 3}'):
        bare.write_text(text)
        with pytest.raises(
            InputError, match=r"costs: .* is neither one of vicuna-13b-h200, .* nor a file"
        ):
            find_costs(str(bare))


# ---------------------------------------------------------------------------------------------------- the command


def test_run_prints_and_writes(trees: Trees, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "rows.jsonl"
    given = [
        "run",
        str(trees.folder),
        "--policy",
        "eagle,budget=9,width=3,expansions=2",
        "--policy",
        "chain",
    ]
    assert command.main([*given, "--costs", "8b-l40", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["record"] for row in rows] == ["provenance", "log", "replay", "replay"]
    assert rows[2]["tau"] > 1
    assert rows[2]["gamma"] == 9
    assert rows[2]["speedup"]["8b-l40"] == pytest.approx(
        rows[2]["tau"] / (1 + 0.05 * rows[2]["delta"]), abs=1e-3
    )
    capsys.readouterr()
    assert command.main(["run", str(trees.folder), "--policy", "eagel"]) == 2
    assert "policy: unknown name 'eagel'" in capsys.readouterr().err


def test_logs_without_rows_are_refused(tmp_path: Path, capsys: Any) -> None:
    Trees.create(tmp_path, {"logits": False})
    assert command.main(["run", str(tmp_path), "--policy", "chain"]) == 2
    assert "logged without the draft's rows" in capsys.readouterr().err
