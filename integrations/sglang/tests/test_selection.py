"""Tests that choices fit SGLang's own code: its beam, its choice of nodes, its tree building and its greedy walk.

SGLang's functions are read from its files and run on the CPU, its Triton kernels interpreted; skipped without it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from specengine_sglang.selection import ACCEPTED, chosen_policy, organize, select
from torch import Tensor

from specengine.errors import InputError

TOPK, STEPS, COUNT, VOCABULARY = 4, 4, 12, 50
QLEN_ONLY = 1  # of its modes of masks: the drafted nodes alone


def sglang_functions(file: str, *names: str) -> dict[str, Any]:
    """Functions of one file of SGLang, without the imports of the file, many of which need a GPU."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("SGLang is not installed")
    path = Path(spec.submodule_search_locations[0]) / file
    body = [
        part
        for part in ast.parse(path.read_text()).body
        if isinstance(part, ast.FunctionDef) and part.name in names
    ]
    assert len(body) == len(names), f"{file} has other functions than {names}"
    for function in body:
        function.decorator_list = [
            kind for kind in function.decorator_list if ast.unparse(kind).startswith("triton")
        ]
    code = [
        "from __future__ import annotations\n",
        *(ast.unparse(function) + "\n" for function in body),
    ]
    made = Path(os.environ["SGLANG_PARTS"]) / f"{path.stem}_parts.py"
    made.write_text(
        "import torch\nimport triton\nimport triton.language as tl\nfrom typing import *\n"
        + "".join(code[1:])
    )
    part = importlib.util.spec_from_file_location(made.stem, made)
    assert part is not None
    assert part.loader is not None
    module = importlib.util.module_from_spec(part)
    part.loader.exec_module(module)
    return vars(module)


@pytest.fixture(autouse=True)
def _parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PARTS", str(tmp_path))


def drafted(requests: int, seed: int = 0) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """A beam as SGLang's worker drafts it, by its own select_top_k_tokens, from random distributions."""
    names = ("select_top_k_tokens", "_select_top_k_tokens_first", "_select_top_k_tokens_later")
    made = sglang_functions("srt/speculative/spec_utils.py", *names)
    made["fast_topk"] = lambda values, count, dim: torch.topk(values, count, dim=dim)
    random = torch.Generator().manual_seed(seed)
    lists: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    scores, rows = None, requests
    for step in range(STEPS):
        probabilities = (2 * torch.randn(rows, VOCABULARY, generator=random)).softmax(-1)
        best = probabilities.topk(TOPK, dim=-1)
        _, _, scores, info = made["select_top_k_tokens"](
            step, best.values, best.indices, None, scores, TOPK
        )
        for found, part in zip(lists, info, strict=True):
            found.append(part)
        rows = requests * TOPK
    return lists


def built(parents: Tensor, chosen: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Build the tree of a choice by SGLang's kernel."""
    kernel = sglang_functions(
        "kernels/ops/speculative/spec_tree.py", "sgl_build_tree_kernel_efficient_triton"
    )
    requests, nodes = chosen.shape[0], COUNT
    places = torch.full((3, requests, nodes), -1, dtype=torch.int64)
    mask = torch.ones(requests * nodes * nodes, dtype=torch.bool)
    positions = torch.zeros(requests * nodes, dtype=torch.int64)
    sums = torch.cumsum(lengths, 0) - lengths
    kernel["sgl_build_tree_kernel_efficient_triton"][(requests,)](
        parents.contiguous(), chosen, lengths, sums, mask, positions, *places,
        topk=TOPK, depth=STEPS, draft_token_num=nodes, tree_mask_mode=QLEN_ONLY, batch_size=requests,
        parent_list_stride=parents.shape[1], selected_index_stride=nodes - 1,
    )  # fmt: skip
    return {
        "mask": mask.view(requests, nodes, nodes),
        "positions": positions.view(requests, nodes),
        "next": places[1],
        "sibling": places[2],
    }


def parents_of(number: int, parents: Tensor) -> int:
    """The number that `number` hangs under, -1 for the root: parent_list holds the beams one after another."""
    return int(parents[number // TOPK]) if number >= TOPK else -1


@pytest.mark.parametrize("name", ACCEPTED)
def test_sglangs_kernel_builds_the_tree_that_was_chosen(name: str) -> None:
    scores, tokens, parents = drafted(requests=3)
    joined, chosen, ids = organize(chosen_policy(name), scores, tokens, parents, COUNT)
    lengths = torch.tensor([7, 0, 30])
    made = built(joined, chosen, lengths)
    assert torch.equal(ids, torch.cat(tokens, dim=1).gather(1, chosen))
    for request in range(3):
        numbers = chosen[request].tolist()
        assert numbers == sorted(set(numbers))
        node_of = {-1: 0} | {number: place for place, number in enumerate(numbers, start=1)}
        above = {0: {0}}
        for number in numbers:
            parent = parents_of(number, joined[request])
            assert parent in node_of, "a node without its parent"
            above[node_of[number]] = above[node_of[parent]] | {node_of[number]}
        wanted = torch.zeros(COUNT, COUNT, dtype=torch.bool)
        for node, ancestors in above.items():
            wanted[node, list(ancestors)] = True
        assert torch.equal(made["mask"][request], wanted)
        depths = torch.tensor([len(above[node]) - 1 for node in range(COUNT)])
        assert torch.equal(made["positions"][request], lengths[request] + depths)
        children = {node for node in range(COUNT) if made["next"][request, node] >= 0}
        assert children == {node_of[parents_of(number, joined[request])] for number in numbers}


def test_eagles_own_rule_chooses_what_sglang_chooses() -> None:
    scores, tokens, parents = drafted(requests=4, seed=3)
    made = sglang_functions("srt/speculative/eagle_utils.py", "organize_draft_results")
    made["maybe_detect_oob"] = lambda *_: None
    theirs = made["organize_draft_results"](scores, tokens, parents, COUNT)
    policy = chosen_policy("eagle", f"width={TOPK} expansions={STEPS - 1} budget={COUNT}")
    for found, wanted in zip(organize(policy, scores, tokens, parents, COUNT), theirs, strict=True):
        assert torch.equal(found, wanted)


def test_another_policy_chooses_otherwise() -> None:
    scores, tokens, parents = drafted(requests=4, seed=3)
    wide = chosen_policy("fixed", "branching=4")
    eagle = chosen_policy("eagle", f"width={TOPK} expansions={STEPS - 1} budget=6")
    _, chosen, _ = organize(wide, scores, tokens, parents, 6)
    _, others, _ = organize(eagle, scores, tokens, parents, 6)
    assert (chosen < TOPK).sum() == 4 * TOPK  # level 1 whole, then the likeliest of the rest
    assert not torch.equal(chosen, others)


def test_a_policys_nodes_are_cut_to_the_likeliest_where_fewer_are_verified() -> None:
    scores = [torch.tensor([[0.6, 0.3]]), torch.tensor([[0.5, 0.05], [0.2, 0.08]])]
    tokens = [torch.tensor([1, 2]), torch.tensor([3, 4, 5, 6])]
    parents = [torch.tensor([-1, 0, 1]), torch.tensor([2, 4])]
    assert select(chosen_policy("fixed", "branching=2,2"), scores, tokens, parents, 2).tolist() == [
        0,
        2,
    ]


def test_what_sglang_cannot_ask_is_refused() -> None:
    with pytest.raises(InputError, match=r"policy: got 'dynatree', accepted chain, dyjoint"):
        chosen_policy("dynatree")
    with pytest.raises(InputError, match=r"unknown option 'nodes'"):
        chosen_policy("talon", "nodes=3")
