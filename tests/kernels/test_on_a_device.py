"""Tests for a device: many random trees, captures, and the sanitizers. A few trees run interpreted as well."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install -e '.[kernels]'")
from specengine_kernels import frontier, verification

from tests import toy
from tests.kernels.all_kernels import KERNELS, number, random

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TREES = 1000 if DEVICE == "cuda" else 2
SANITIZER = shutil.which("compute-sanitizer") or shutil.which(
    "compute-sanitizer", path="/usr/local/cuda/bin"
)


@pytest.mark.parametrize("name", KERNELS)
def test_random_trees(name: str) -> None:
    for seed in range(TREES):
        KERNELS[name](seed, DEVICE)


@pytest.mark.gpu
@pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer, of the CUDA toolkit")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool: str) -> None:
    program = [sys.executable, "-m", "tests.kernels.all_kernels", "3"]
    command = [str(SANITIZER), "--tool", tool, "--error-exitcode", "9", *program]
    # with torch's own cache the tool would see whole blocks, and no step out of a tensor
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.gpu
def test_choices_and_walk_captured_once() -> None:
    """One graph for every tree of up to 64 nodes: sizes, seed and positions are read on the device."""
    logits, chosen = (
        torch.zeros(64, 32000, device="cuda"),
        torch.zeros(64, dtype=torch.int64, device="cuda"),
    )
    workspace, positions = (
        verification.workspace_for(logits),
        torch.zeros(64, dtype=torch.int64, device="cuda"),
    )
    seed, temperature = (
        torch.zeros(1, dtype=torch.int64, device="cuda"),
        torch.ones(1, device="cuda"),
    )
    tokens, parents, path = (torch.zeros(64, dtype=torch.int64, device="cuda") for _ in range(3))
    size, count, bonus = (
        number(1, "cuda"),
        number(0, "cuda"),
        torch.zeros(1, dtype=torch.int64, device="cuda"),
    )

    def verify() -> None:
        verification.choose_tokens(
            logits, positions, seed, temperature, chosen=chosen, workspace=workspace
        )
        verification.walk(tokens, parents, chosen, size, path, count, bonus)

    verify()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verify()
    for case in range(20):
        tree = toy.random_tree(case, 1 + 3 * case, 30)
        logits[:, :30].copy_(random(64, 30, seed=case) * 20)
        positions.copy_(torch.arange(64) + case)
        seed.fill_(case)
        for into, values in ((tokens, tree.tokens), (parents, tree.parents)):
            into[: tree.size] = values.cuda()
        size.copy_(tree.size)
        graph.replay()
        drawn = verification.reference(logits.cpu(), positions.cpu(), case)
        assert chosen.tolist() == drawn.tolist()
        wanted = verification.reference_walk(tree.tokens, tree.parents, drawn[: tree.size])
        assert (path[: int(count)].tolist(), int(bonus)) == wanted


@pytest.mark.gpu
def test_growth_captured_once() -> None:
    """Replays hang layer after layer under the tree, as calls do."""
    trees = []
    for captured in (True, False):
        whole = [torch.zeros(256, dtype=torch.int64, device="cuda") for _ in range(3)]
        real = [torch.zeros(256, device="cuda") for _ in range(2)]
        words = torch.zeros(256, 4, dtype=torch.int64, device="cuda")
        words[0, 0] = 1
        tree = frontier.Tree(*whole, *real, words, number(1, "cuda"))
        tree.parents[0] = -1
        ids, refused = torch.zeros(40, dtype=torch.int64, device="cuda"), number(0, "cuda")
        parents, tokens = (torch.zeros(40, dtype=torch.int64, device="cuda") for _ in range(2))
        edges, count = torch.zeros(40, device="cuda"), number(0, "cuda")

        grow = partial(frontier.append_nodes, tree, parents, tokens, edges, count, ids, refused)
        if captured:
            grow()  # of no nodes: loads the kernel
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                grow()
        for layer in range(6):
            generator = torch.Generator().manual_seed(layer)
            size = int(tree.size)
            parents.copy_(torch.randint(0, size, (40,), generator=generator))
            tokens.copy_(torch.randint(0, 999, (40,), generator=generator))
            edges.copy_(-random(40, seed=layer).abs())
            count.fill_(7 * layer)
            graph.replay() if captured else grow()
        trees.append((tree, ids))
    for one, other in zip((*trees[0][0], trees[0][1]), (*trees[1][0], trees[1][1]), strict=True):
        assert torch.equal(one, other)
