"""The logic of the kernels on the host, and their answers, on a GPU and emulated.

Emulated means that the kernels' sources are compiled by g++ with csrc/tests/emulated/cuda_runtime.h.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specengine import cuda, reference
from specengine.errors import InputError
from specengine.tree import TokenTree
from tests.test_native import COMPILER, build_and_run

CSRC = Path(__file__).resolve().parents[2] / "csrc"


# ---- the logic, on the host under the sanitizers


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler (g++ or clang++) on the path")
def test_logic_of_the_kernels_on_the_host(tmp_path: Path) -> None:
    run = build_and_run(CSRC / "tests" / "device_logic_test.cpp", tmp_path / "device_logic_test")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all checks passed" in run.stdout


# ---- the answers, against the reference


def emulated_source(file: Path) -> str:
    return re.sub(r"([\w<>]+)<<<(.*?)>>>\(", r"emulated::launch(\1, \2)(", file.read_text(encoding="utf-8"))


LOOP_STUBS = """
#include "spec/device_abi.hpp"
int spec_loop_create(void*, void*, void*, const int32_t*, int32_t*, int, void**) { return 1; }
int spec_loop_launch(void*, void*) { return 1; }
int spec_loop_destroy(void*) { return 1; }
"""


@pytest.fixture(scope="module")
def emulated_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C++ compiler (g++ or clang++) on the path")
    folder = tmp_path_factory.mktemp("emulated")
    sources = {file.stem: emulated_source(file) for file in CSRC.glob("*.cu") if file.stem != "graph"}
    sources["graph"] = LOOP_STUBS
    for name, text in sources.items():
        (folder / f"{name}.cpp").write_text(text)
    files = [str(folder / f"{name}.cpp") for name in sources]
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", f"-I{CSRC / 'tests' / 'emulated'}", f"-I{CSRC}"]
    done = subprocess.run([COMPILER, *flags, *files, "-o", str(folder / "_cuda.so")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "_cuda.so"


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of the tensors that the kernels take."""
    if request.param == "cuda":
        assert cuda.LIBRARY.exists(), f"on a GPU the library is tested too; build it by: {cuda.BUILD}"
        return "cuda"
    monkeypatch.setattr(cuda, "LIBRARY", request.getfixturevalue("emulated_library"))
    monkeypatch.setattr(cuda, "DEVICE", "cpu")
    monkeypatch.setattr(cuda, "_run", lambda name, _, *given: cuda.check(getattr(cuda.library(), name)(*given, None)))
    return "cpu"


def random_parents(size: int, generator: torch.Generator) -> Tensor:
    parents = [-1] + [int(torch.randint(node, (1,), generator=generator)) for node in range(1, size)]
    return torch.tensor(parents)


@pytest.mark.parametrize("size", [1, 2, 64, 65, 300, 1024, 1100])
def test_walk(device: str, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for _ in range(10):
        parents, tokens = random_parents(size, generator), torch.randperm(size, generator=generator)
        chosen = torch.randint(size, (size,), generator=generator)
        node = int(torch.randint(size, (1,), generator=generator))
        while node > 0:
            chosen[parents[node]] = tokens[node]
            node = int(parents[node])
        given = [values.to(device) for values in (tokens, parents, chosen)]
        assert cuda.walk(*given) == reference.walk(tokens, parents, chosen)


def test_walk_of_a_part_gives_the_bonus_token(device: str) -> None:
    tokens, parents = torch.tensor([0, 5, 6, 7], device=device), torch.tensor([-1, 0, 1, 2], device=device)
    chosen, size = torch.tensor([5, 6, 7, 8], device=device), torch.tensor([3], dtype=torch.int32, device=device)
    path, count, bonus = torch.empty_like(tokens), torch.empty_like(size), tokens.new_empty(1)
    cuda.walk_into(tokens, parents, chosen, path, count, bonus, size)
    assert path[: int(count)].tolist() == [0, 1, 2]
    assert int(bonus) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [3, 64, 80])
def test_compact_kv(device: str, dtype: torch.dtype, head_size: int) -> None:
    generator = torch.Generator().manual_seed(head_size)
    slab = torch.randn(3, 2, 2, 100, head_size, generator=generator).to(dtype)
    for taken in (1, 2, 9, 40):
        path = [0, *(1 + torch.randperm(60, generator=generator)[: taken - 1]).sort().values.tolist()]
        expected, got = slab.clone(), slab.clone().to(device)
        reference.compact_kv(expected, 30, path)
        cuda.compact_kv(got, 30, path)
        assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("budget", [1, 3, 60, 256])
@pytest.mark.parametrize("batch", [1, 10])
def test_best_first(device: str, budget: int, batch: int) -> None:
    generator = torch.Generator().manual_seed(budget)
    expected, queues = reference.BestFirst(budget, batch, 4, "cpu"), cuda.BestFirst(budget, batch, 4, device)
    for step in range(15):
        count = int(torch.randint(2 * budget + 2, (1,), generator=generator))
        whole = [torch.randint(5, (count,), generator=generator) for _ in range(3)]
        scores = -torch.randint(20 if step % 2 else 10000, (count,), generator=generator).float() / 8
        scores[scores == 0] = -math.inf
        given = *whole, scores / 2, scores
        expected.push(*given)
        queues.push(*(values.to(device) for values in given))
        assert queues.bound == expected.bound
        a, b = (one.fill() if step % 7 == 6 else one.pop() for one in (queues, expected))
        for mine, theirs in zip(a[:4], b[:4], strict=True):
            assert mine.tolist() == theirs.tolist()
        assert a.mass == pytest.approx(b.mass, rel=1e-12)


def test_best_first_refuses_nan(device: str) -> None:
    queues, whole = cuda.BestFirst(3, 1, 3, device), torch.zeros(2, dtype=torch.int64, device=device)
    good, bad = torch.tensor([-1.0, -2.0], device=device), torch.tensor([-1.0, math.nan], device=device)
    with pytest.raises(InputError, match="NaN"):
        queues.push(whole, whole, whole, good, bad)
    queues.push(whole, whole, whole, good, good)
    assert queues.pop().log_probs.tolist() == [-1.0]


def arrays_of(tree: TokenTree) -> tuple[Tensor, ...]:
    names = ("tokens", "parents", "depths", "log_probs", "path_log_probs", "ancestors")
    return tuple(getattr(tree, f"_{name}") for name in names)


def test_appended_nodes_are_those_of_a_token_tree(device: str) -> None:
    """A SALF search in device memory: push by rows of the frontier, draw, append."""
    width, expected = 6, TokenTree.root(7, 130)
    made = (values.clone().to(device) for values in arrays_of(TokenTree.root(7, 130)))
    tree = cuda.TreeArrays(*made, torch.ones(1, dtype=torch.int32, device=device))
    queues = cuda.Queues(60, width, 60, device)
    whole = torch.zeros(2, width, dtype=torch.int64, device=device)
    frontier = cuda.Frontier(whole[0], whole[1], torch.full((width,), -math.inf, device=device))
    frontier.scores[0] = 0.0
    generator, tokens = torch.Generator().manual_seed(0), torch.arange(20, device=device)
    for _ in range(5):
        rows = torch.randint(width, (20,), generator=generator).to(device)
        edges = -torch.rand(20, generator=generator).to(device)
        count = torch.tensor([18], dtype=torch.int32, device=device)
        queues.push(
            frontier.nodes, frontier.depths, tokens, edges, frontier.scores[rows] + edges, rows=rows, count=count
        )
        drawn = queues.draw(threshold=0.1)
        cuda.append_nodes(tree, drawn, queues.refused, frontier)
        nodes, kept = int(drawn.nodes), int(drawn.expanded)
        added = expected.add(*(values[:nodes].cpu() for values in (drawn.parents, drawn.tokens, drawn.log_probs)))
        expand = added[drawn.expand[:kept].cpu()]
        assert frontier.nodes.tolist() == [*expand.tolist(), *[0] * (width - kept)]
        assert frontier.depths[:kept].tolist() == expected.depths[expand].tolist()
        assert frontier.scores[:kept].tolist() == expected.path_log_probs[expand].tolist()
        assert frontier.scores[kept:].tolist() == [-math.inf] * (width - kept)
        assert bool(drawn.alive) == (kept > 0 and float(drawn.mass) >= 0.1)
    cuda.append_nodes(tree, queues.draw(expands=False), queues.refused)
    size = int(tree.size)
    assert size == len(expected) + int(queues.drawn.nodes) > 20
    for mine, theirs in zip(tree[:6], arrays_of(expected), strict=True):
        assert torch.equal(mine[: len(expected)].cpu(), theirs[: len(expected)])
    assert not int(queues.refused)


def test_nodes_beyond_the_capacity_are_refused(device: str) -> None:
    made = (values.to(device) for values in arrays_of(TokenTree.root(7, 2)))
    tree = cuda.TreeArrays(*made, torch.ones(1, dtype=torch.int32, device=device))
    queues, whole = cuda.Queues(9, 9, 9, device), torch.zeros(2, dtype=torch.int64, device=device)
    edges = torch.tensor([-1.0, -2.0], device=device)
    queues.push(whole, whole, whole, edges, edges)
    cuda.append_nodes(tree, queues.draw(), queues.refused)
    assert (int(tree.size), int(queues.refused)) == (1, 1)


@pytest.mark.gpu
class TestCaptured:
    def test_step(self) -> None:
        queues = cuda.Queues(10, 3, 10)
        nodes = torch.zeros(1, dtype=torch.int64, device="cuda")
        rows, tokens = torch.zeros(4, dtype=torch.int64, device="cuda"), torch.arange(4, device="cuda")
        scores = torch.tensor([-1.0, -2.0, -3.0, -4.0], device="cuda")

        def step() -> None:
            queues.start()
            queues.push(nodes, nodes, tokens, scores, scores, rows=rows)
            queues.draw()

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        scores.copy_(torch.tensor([-4.0, -3.0, -2.0, -1.0]))
        graph.replay()
        assert queues.drawn.tokens[: int(queues.drawn.nodes)].tolist() == [3, 2, 1]

    def test_loop_runs_while_the_flag_is_set(self) -> None:
        flag, rounds, total = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(3))

        def captured(*work: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph):
                for step in work:
                    step()
            return graph

        before = captured(lambda: flag.fill_(5), lambda: total.zero_())
        body, after = captured(lambda: flag.sub_(1), lambda: total.add_(1)), captured(lambda: total.mul_(10))
        for limit, passes in ((100, 5), (3, 3)):
            loop = cuda.Loop(body, flag, rounds, limit, before, after)
            for _ in range(2):
                loop.launch()
                assert (int(rounds), int(total)) == (passes, 10 * passes)
