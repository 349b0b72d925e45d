"""Captured cycles launch and wait no more than launches.json says; less is written there by launches.py --write."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from tests.graphs import launches

pytest.importorskip("triton", reason="launchers of kernels are counted")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
]
KNOWN = json.loads(launches.TABLE.read_text())


def test_no_more_is_launched_than_the_table_says() -> None:
    found, known = launches.table(launches.WAYS["kernels"], ("auto", "eagle")), KNOWN["kernels"]
    assert set(found["ops"]) <= set(known["ops"])
    for name, row in found.items():
        over = {
            part: (count, known[name][part])
            for part, count in row.items()
            if count > known[name][part]
        }
        assert not over, f"{name}: launches, and as many as there may be: {over}"


@pytest.mark.slow
def test_no_more_is_launched_by_meanings() -> None:
    with pytest.MonkeyPatch.context() as patch:
        launches.choose(patch, launches.WAYS["meanings"])
        for name in ("eagle", "talon"):
            found = launches.counted(name, {})
            assert all(count <= KNOWN["meanings"][name][part] for part, count in found.items()), (
                name,
                found,
            )


def test_goals_stay_reached() -> None:
    for name, figure in launches.figures(KNOWN["kernels"]).items():
        reached = name in launches.REACHED
        assert (figure <= launches.GOALS[name]) is reached, (
            f"{name}: {figure}; the goal is {launches.GOALS[name]}"
        )


@pytest.mark.parametrize("rows", ["lanes", "trees of lanes"])
def test_a_layer_of_several_texts_launches_what_one_text_does(rows: str) -> None:
    alone, together = KNOWN["kernels"][f"a layer of {rows}"].values()
    assert together <= alone


def test_texts_of_a_pool_wait_for_each_other_little() -> None:
    """Behind each other come joined rows, and what texts learn in common; else each has a branch."""
    alone, chains = (KNOWN["kernels"][name] for name in ("auto", "chains of lanes"))
    assert all(chains[part] <= alone[part] + 20 for part in launches.PARTS)
    assert all(3 * chains[part] <= 8 * alone[part] for part in launches.PARTS)


def test_a_short_prompt_launches_no_more_than_the_table_says() -> None:
    found, known = launches.prompts(), KNOWN["prompts"]["a short one"]
    assert all(found[name] <= count for name, count in known.items()), (found, known)
    assert 10 * known["as a tree"] < known["eagerly"]


FAST = [("auto", "head", "greedy"), ("eagle", "recycling", "greedy")]


@pytest.mark.parametrize(
    ("policy", "draft", "sampling"),
    [
        *FAST,
        *(
            pytest.param(*way, marks=pytest.mark.slow)
            for way in itertools.product(("auto", "eagle"), launches.DRAFTS, launches.SAMPLINGS)
            if way not in FAST
        ),
    ],
)
def test_the_host_waits_no_more_than_the_table_says(policy: str, draft: str, sampling: str) -> None:
    """By cycle, as acceptance may change with a model's numbers."""
    found, known = (
        launches.waits_of(policy, draft, sampling),
        KNOWN["waits"][f"{policy}, {draft}, {sampling}"],
    )
    assert found["waits"] * known["cycles"] <= known["waits"] * found["cycles"], (found, known)


def test_trees_that_grow_in_graphs_wait_for_their_passes_and_their_record_alone() -> None:
    """auto reads whether the first pass pays, and whether another one follows each but the last that may be.

    At the end of the answer one more cycle is under way, and the table's cycles leave out the first.
    """
    more = 2 + 4  # of a cycle of as many passes as there may be
    for sampling in ("greedy", "sampled"):
        auto, eagle = (
            KNOWN["waits"][f"{policy}, head, {sampling}"] for policy in ("auto", "eagle")
        )
        assert auto["waits"] <= auto["cycles"] + auto["passes"] + more
        assert eagle["waits"] <= eagle["cycles"] + 3


def test_the_table_has_every_way() -> None:
    assert list(KNOWN["kernels"])[:-8] == list(KNOWN["meanings"])[:-1] == list(launches.NAMES)
    wanted = [
        f"{p}, {d}, {s}"
        for p in launches.NAMES[:2]
        for d in launches.DRAFTS
        for s in launches.SAMPLINGS
    ]
    assert list(KNOWN["waits"]) == wanted
