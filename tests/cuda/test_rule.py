"""auto's rule by the kernels of csrc/worth.cu, on a GPU and on the host, where the lanes of a block run in lock step.

On the host their results are the bits of the C++ ops, as both run the same arithmetic in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine import ops
from specengine.ops import Drafted, Limits, Nodes, Notes, Prices, SearchState, Throughput, cuda
from specengine.ops.tree import TokenTree
from specengine.policies.auto import auto, search
from tests.csrc.test_spec import COMPILER, CSRC, build_and_run

VOCABULARY, DRAFT_VOCABULARY = 60, 40
TREE = ("tokens", "parents", "depths", "log_probs", "path_log_probs", "ancestors")
# budget, width, rounds, passes
SHAPES = [(64, 8, 2, 12), (5, 3, 1, 4), (20, 1, 3, 6), (100, 16, 2, 3)]


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler (g++ or clang++) on the path")
def test_logic_of_the_lanes_under_the_sanitizers(tmp_path: Path) -> None:
    run = build_and_run(tmp_path / "device_rule_test", CSRC / "tests" / "device_rule_test.cpp")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all checks passed" in run.stdout


def copied(given: Any, device: str = "cpu") -> Any:
    if isinstance(given, tuple):
        parts = [copied(part, device) for part in given]
        return type(given)(*parts) if hasattr(given, "_fields") else tuple(parts)
    return given.to(device, copy=True) if isinstance(given, Tensor) else given


def root_alone(width: int, device: str) -> Nodes:
    ids = torch.zeros(width, dtype=torch.int64, device=device)
    return Nodes(ids, torch.ones(1, dtype=torch.int32, device=device))


class Search:
    """A tree and books of a search, as auto has them, with costs that make passes pay, mostly."""

    def __init__(self, budget: int, width: int, rounds: int, passes: int, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        capacity = 1 + budget * (passes + 1)
        tree = TokenTree(capacity, "cpu")
        self.tree, self.counters = tree.arrays, tree.counters
        self.counts, self.notes = (
            search._counts(torch.device("cpu")),
            search._notes(capacity, torch.device("cpu")),
        )
        widths = [n for n in auto.WIDTHS if n < width] + [width]
        verify = torch.linspace(1.0, 1.4, budget + 1) * 1e-3 * (1 + 0.3 * self.uniform(budget + 1))
        draft = torch.linspace(0.03, 0.08, width + 1) * 1e-3 * (1 + 0.3 * self.uniform(width + 1))
        prices = Prices(torch.zeros(budget + 1), torch.zeros(width + 1), torch.tensor(widths))
        recent, one = torch.tensor([8.0, 8.0 * float(verify[1])]), torch.zeros(1)
        count = torch.zeros(1, dtype=torch.int32)
        self.throughput = Throughput(
            verify, draft, prices, recent, one, count, one + 1e-4, torch.zeros(0)
        )
        ops.update_throughput(self.throughput, count)
        self.limits = Limits(math.log(auto.MIN_PATH), budget, rounds, passes)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.random)

    def drafted(self, mapped: bool, marked: bool) -> Drafted:
        width = len(self.throughput.draft) - 1
        logits = torch.randn(width, DRAFT_VOCABULARY, generator=self.random) * 3
        ids = (
            torch.randperm(VOCABULARY, generator=self.random)[:DRAFT_VOCABULARY] if mapped else None
        )
        marks = (
            torch.randint(8, logits.shape, generator=self.random).to(torch.uint8)
            if marked
            else None
        )
        return Drafted(logits, ids, False, marks)

    def outcome(self, kept: Nodes) -> tuple[Nodes, Tensor]:
        """Return a path down the kept nodes, padded, and the tokens chosen on it."""
        parents, there, path = self.tree[1].tolist(), kept.ids[: int(kept.live)].tolist(), [0]
        while below := [node for node in there if node and parents[node] == path[-1]]:
            path.append(below[int(torch.randint(len(below), (1,), generator=self.random))])
        chosen = [*(int(self.tree[0][node]) for node in path[1:]), VOCABULARY]
        padding = [0] * 3
        ids, tokens = torch.tensor(path + padding), torch.tensor(chosen + padding)
        return Nodes(ids, torch.tensor([len(path)], dtype=torch.int32)), tokens

    def books(self) -> tuple[Any, ...]:
        state = SearchState(self.counts, self.notes, self.throughput)
        return self.tree, self.counters, state

    def checked(self, name: str, device: str, exact: bool, given: Callable[[Any], tuple]) -> Any:
        """Run an op by its kernel on a copy of the books, and otherwise on them; return what the latter returns."""
        books = copied(self.books(), device)
        found = getattr(cuda, name)(*given(books))
        run: Callable[..., Any] = getattr(ops, name)
        wanted = run(*given(self.books())) if exact else ops.by_meaning(run, *given(self.books()))
        alike((found, books), (wanted, self.books()), exact, name)
        return wanted

    def grown(self, frontier: Nodes, drafted: Drafted, device: str, exact: bool) -> Nodes:
        def given(books: Any) -> tuple:
            there = books[0][0].device.type
            return (
                *books[:2],
                copied(frontier, there),
                copied(drafted, there),
                *books[2:],
                self.limits,
            )

        return self.checked("grow_likely", device, exact, given)

    def learnt(self, path: Nodes, chosen: Tensor, device: str, exact: bool) -> None:
        def given(books: Any) -> tuple:
            there = books[0][0].device.type
            return books[0], books[1][0], *copied((path, chosen), there), *books[2:]

        self.checked("count_outcomes", device, exact, given)


def leaves(given: Any) -> list[Any]:
    """Tensors of a result or of changed books, without padding: that writes to the entry behind the last node."""
    if isinstance(given, Notes):
        return [part[:-1] for part in given]
    if isinstance(given, Nodes):
        return [given.ids[: int(given.live)], given.live]
    return (
        [leaf for part in given for leaf in leaves(part)] if isinstance(given, tuple) else [given]
    )


def alike(found: Any, wanted: Any, exact: bool, what: str) -> None:
    for number, (one, other) in enumerate(zip(leaves(found), leaves(wanted), strict=True)):
        if not isinstance(other, Tensor):
            assert one == other
        elif exact or not other.is_floating_point():
            assert torch.equal(one.cpu(), other), (what, number)
        else:
            torch.testing.assert_close(
                one.cpu(), other, rtol=1e-4, atol=1e-5, msg=lambda text: f"{what}: {text}"
            )


@pytest.mark.sliced
@pytest.mark.parametrize("exact", [True, False], ids=["bits of C++", "meaning"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(2))
def test_cycles_are_what_they_mean(
    device: str, shape: tuple[int, int, int, int], seed: int, exact: bool
) -> None:
    if exact and (device != "cpu" or ops.backends()["grow_likely"].name != "cpp"):
        pytest.skip(
            "a GPU rounds exp and log in its own way"
            if device != "cpu"
            else "the C++ ops are not built"
        )
    search = Search(*shape, seed)
    starts = search.limits.rounds, None, (shape[0], math.log(0.5))
    skipped, patience = torch.zeros(1, dtype=torch.int32), 2
    keeps = None, (auto.LEAVES, auto.MAX_FREE, math.log(auto.MIN_FREE)), shape[0]
    levels = 0
    for cycle in range(3):
        tokens, (size, passes, _) = search.tree[0], search.counters
        tokens[0], size[0], passes[0] = cycle, 1, 0
        pays = search.checked(
            "start_search",
            device,
            exact,
            lambda books: (
                books[0],
                books[1][0],
                *books[2:],
                *starts,
                copied(skipped, books[0][0].device.type),
                patience,
            ),
        )
        assert pays.tolist() in ([0], [1])
        frontier = root_alone(shape[1], "cpu")
        while int(frontier.live):
            passes += 1
            levels += 1
            frontier = search.grown(
                frontier, search.drafted(cycle % 2 == 0, cycle > 1), device, exact
            )
        kept = search.checked(
            "keep_likely", device, exact, lambda books: (books[0], books[1][0], *books[2:], *keeps)
        )
        both = search.tree, *kept
        alike(
            cuda.extract(*copied(both, device)), ops.by_meaning(ops.extract, *both), True, "extract"
        )
        search.learnt(*search.outcome(kept), device, exact)
    assert levels > 3


def test_a_pass_is_due_after_skipped_ones(device: str) -> None:
    """Where no pass pays."""
    search = Search(6, 3, 1, 4, 0)
    search.throughput.prices.draft.fill_(9.0)
    tree, (size, *_), state = copied(search.books(), device)
    size.fill_(1)
    skipped = torch.zeros(1, dtype=torch.int32, device=device)
    for drafts, count in (0, 1), (0, 2), (1, 0), (0, 1):
        found = cuda.start_search(tree, size, state, 1, None, (1, -1.0), skipped, 2)
        assert (int(found), int(skipped)) == (drafts, count)
    search.throughput.prices.draft.zero_()
    state.throughput.prices.draft.zero_()
    found = cuda.start_search(tree, size, state, 1, None, (1, -1.0), skipped, 2)
    assert (int(found), int(skipped)) == (1, 0)


def test_grown_nodes_take_the_place_of_a_wide_frontier(device: str) -> None:
    """A capture reads them there; one node that stands for the root is left alone."""
    for width in (1, 2, 3):
        search = Search(6, 3, 1, 4, 0)
        search.counters[0].fill_(8)
        search.tree[1][1:8] = 0
        tree, counters, state = copied(search.books(), device)
        counters[0].fill_(1)
        frontier = root_alone(width, device)
        drafted = copied(search.drafted(False, False), device)
        drafted = drafted._replace(logits=drafted.logits[:width])
        found = cuda.grow_likely(tree, counters, frontier, drafted, state, search.limits)
        assert (found.ids.data_ptr() == frontier.ids.data_ptr()) is (width == 3)
        assert len(found.ids) == 3
        if width < 3:
            assert (frontier.ids.tolist(), int(frontier.live)) == ([0] * width, 1)


def test_a_tree_without_room_is_left_alone(device: str) -> None:
    search = Search(6, 3, 1, 1, 0)
    search.counters[0].fill_(8)
    search.tree[1][1:8] = 0
    search.counters[1].fill_(1)
    tree, counters, state = copied(search.books(), device)
    frontier = Nodes(
        torch.tensor([0, 1, 2], device=device),
        torch.full((1,), 3, dtype=torch.int32, device=device),
    )
    drafted = copied(search.drafted(False, False), device)
    before = copied(tree)
    cuda.grow_likely(tree, counters, frontier, drafted, state, search.limits._replace(least=-50.0))
    assert [int(number) for number in counters] == [8, 1, 1]
    alike(copied(tree), before, True, "tree")


def test_there_is_no_further_pass_behind_the_last(device: str) -> None:
    search = Search(64, 8, 2, 12, 1)
    for passes, live in ((11, True), (12, False)):
        search.counters[0].fill_(1)
        search.counters[1].fill_(passes)
        tree, counters, state = copied(search.books(), device)
        frontier = Nodes(
            torch.zeros(8, dtype=torch.int64, device=device),
            torch.ones(1, dtype=torch.int32, device=device),
        )
        drafted = copied(search.drafted(False, False), device)
        found = cuda.grow_likely(tree, counters, frontier, drafted, state, search.limits)
        assert (int(found.live) > 0) is live
        assert live or found.ids.tolist() == [0] * 8
        assert int(counters[0]) > 1


def test_larger_searches_run_by_their_meaning(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a block has not the memory."""
    monkeypatch.setattr(cuda, "MAX_SHARED", 100)
    launch = cuda.launch

    def extract_alone(kernel: cuda.Kernel, *given: Any) -> None:
        assert kernel is cuda.EXTRACT
        launch(kernel, *given)

    monkeypatch.setattr(cuda, "launch", extract_alone)
    test_cycles_are_what_they_mean(device, SHAPES[1], 0, False)


def test_blocks_of_the_default_ask_for_no_more_memory_than_a_launch_has() -> None:
    policy = auto.Auto()
    args = cuda.LevelArgs(
        rows=policy.width,
        places=10,
        capacity=policy.capacity,
        nodes=policy.budget,
        width=policy.width,
        tried=6,
    )
    args.rounds = policy.rounds
    shared = (
        cuda.level_bytes(args),
        cuda.keep_bytes(policy.capacity, policy.budget),
        cuda.outcome_bytes(policy.capacity),
    )
    assert max(shared) <= cuda.PLAIN_SHARED


@pytest.mark.gpu
def test_a_level_captured_once() -> None:
    """Replays are the levels of a search: what they read stands on the device."""
    search = Search(*SHAPES[0], 5)
    tree, counters, state = copied(search.books(), "cuda")
    frontier = root_alone(8, "cuda")
    drafted = copied(search.drafted(False, False), "cuda")
    given = tree, counters, frontier, drafted, state, search.limits
    before = copied(given, "cuda")
    cuda.grow_likely(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cuda.grow_likely(*given)
    for into, values in zip(
        leaves(given[:2]) + leaves(state),
        leaves(before[:2]) + leaves(before[4]),
        strict=True,
    ):
        into.copy_(values)
    nodes, passes = root_alone(8, "cpu"), search.counters[1]
    for _ in range(6):
        passes += 1
        counters[1].add_(1)
        step = search.drafted(False, False)
        drafted.logits.copy_(step.logits)
        for part, values in zip(frontier, nodes, strict=True):
            part.copy_(values)
        graph.replay()
        nodes = ops.by_meaning(
            ops.grow_likely,
            search.tree,
            search.counters,
            nodes,
            step,
            *search.books()[2:],
            search.limits,
        )
        alike(
            (copied(found), copied((tree, counters))), (nodes, search.books()[:2]), False, "replay"
        )
        if not int(nodes.live):
            break
