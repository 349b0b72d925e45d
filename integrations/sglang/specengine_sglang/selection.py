"""Select the drafted tokens that SGLang verifies: its beam stays as it is, a policy grows and keeps a tree within it.

SGLang's EAGLE worker drafts `steps` levels with `topk` nodes each, whatever the tree, and then verifies a fixed count
of nodes. So a policy is asked over what was drafted: it gets the distributions of the nodes that the beam drafted
from, `topk` tokens each, and none for other nodes. Where it keeps fewer nodes than are verified, the likeliest others
fill the rest, and where it keeps more, its likeliest are taken.

A drafted token's number in SGLang: 0 to topk - 1 in level 1; in level i + 1 topk + (i - 1) * topk^2 + row * topk +
column, `row` being the place in the beam of the node that it hangs under.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specengine import policies
from specengine.errors import InputError
from specengine.ops import Nodes
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree
from specengine.policies import TreePolicy

ROOT = -1  # its number
# Those that look at probabilities alone: no entropy, which topk tokens do not give, no history, no costs, no states.
ACCEPTED = ("chain", "dyjoint", "dymax", "eagle", "fixed", "opt_tree", "salf", "talon")


def chosen_policy(name: str, options: str = "") -> TreePolicy:
    """The policy `name` or `name/preset`; options: `key=value`, between spaces. InputError for what is not known."""
    if name.partition("/")[0] not in ACCEPTED:
        raise InputError(f"policy: got {name!r}, accepted {', '.join(ACCEPTED)}")
    pairs = [option.partition("=") for option in options.split()]
    return policies.make(name, **{key: value for key, _, value in pairs})


def organize(
    policy: TreePolicy,
    scores: list[Tensor],
    tokens: list[Tensor],
    parents: list[Tensor],
    num_draft_token: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Organize draft results as SGLang's organize_draft_results does, with the policy's choice.

    scores   float [requests, 1, topk], then [requests, topk, topk] for each level: path probabilities
    tokens   int64 [requests, topk], then [requests, topk^2]
    parents  int64 [requests, topk + 1], then [requests, topk]: numbers of the nodes that the next level hangs under

    Returns parents of all levels but the last, [requests, ...], and the chosen tokens' numbers, ascending, and ids,
    int64 [requests, num_draft_token - 1].
    """
    device, ids = tokens[0].device, torch.cat(tokens, dim=1)
    host = [[part.cpu() for part in parts] for parts in (scores, tokens, parents)]
    rows = [
        select(policy, *([part[request] for part in parts] for parts in host), num_draft_token - 1)
        for request in range(ids.shape[0])
    ]
    chosen = torch.stack(rows).to(device)
    joined = torch.cat(parents[:-1], dim=1) if len(parents) > 1 else ids.new_empty(ids.shape[0], 0)
    return joined, chosen, ids.gather(1, chosen)


def select(
    policy: TreePolicy,
    scores: list[Tensor],
    tokens: list[Tensor],
    parents: list[Tensor],
    count: int,
) -> Tensor:
    """Numbers of the `count` tokens to verify of one request, ascending and closed under parent, int64 [count].

    scores, tokens, parents: as of `organize`, without the requests.
    """
    drafted = _Drafted.of(scores, tokens, parents)
    kept = set(_kept(policy, drafted))
    order = sorted(
        range(len(drafted.scores)),
        key=lambda number: (number not in kept, -drafted.scores[number], number),
    )
    return torch.tensor(sorted(order[:count]))


@dataclass
class _Drafted:
    """scores, tokens: of each number; first: of each number that was drafted from, that of its first child."""

    scores: list[float]
    tokens: list[int]
    first: dict[int, int]
    topk: int

    @classmethod
    def of(cls, scores: list[Tensor], tokens: list[Tensor], parents: list[Tensor]) -> _Drafted:
        topk = scores[0].shape[-1]
        first = {ROOT: 0}
        for level, beam in enumerate(parents[: len(scores) - 1]):
            start = topk + level * topk * topk
            numbers = beam[1:] if level == 0 else beam  # the first list begins with the root
            first |= {number: start + row * topk for row, number in enumerate(numbers.tolist())}
        flat = [value for level in scores for value in level.flatten().tolist()]
        return cls(flat, [token for level in tokens for token in level.tolist()], first, topk)

    def children(self, number: int) -> range:
        start = self.first.get(number)
        return range(0) if start is None else range(start, start + self.topk)

    def score(self, number: int) -> float:
        return 1.0 if number == ROOT else self.scores[number]


def _kept(policy: TreePolicy, drafted: _Drafted) -> list[int]:
    """Numbers that the policy keeps of the tree that it grows."""
    tree = TokenTree.root(0, policy.capacity)
    number_of = {0: ROOT}
    policy.begin(0)
    frontier = tree.root_alone()
    while int(frontier.live):
        nodes = frontier.ids[: int(frontier.live)].tolist()
        size = len(tree)
        tree.passes += 1
        frontier = policy.grow(
            tree, Nodes.of(torch.tensor(nodes)), _step(drafted, [number_of[node] for node in nodes])
        )
        _number_new(tree, size, drafted, number_of)
        known = [
            node
            for node in frontier.ids[: int(frontier.live)].tolist()
            if number_of[node] in drafted.first
        ]
        frontier = Nodes.of(torch.tensor(known, dtype=torch.int64))
    kept = policy.keep(tree)
    return [number_of[node] for node in kept.ids[: int(kept.live)].tolist() if node]


def _step(drafted: _Drafted, numbers: list[int]) -> Step:
    """The distributions of these nodes, a column for each token that any of them was followed by."""
    followed = [drafted.children(number) for number in numbers]
    ids = sorted({drafted.tokens[child] for children in followed for child in children})
    column = {token: place for place, token in enumerate(ids)}
    logits = torch.full((len(numbers), len(ids)), -math.inf)
    for row, (number, children) in enumerate(zip(numbers, followed, strict=True)):
        for child in children:
            share = drafted.scores[child] / max(drafted.score(number), 1e-30)
            logits[row, column[drafted.tokens[child]]] = math.log(max(min(share, 1.0), 1e-30))
    return Step(logits, torch.tensor(ids), normalized=True)


def _number_new(tree: TokenTree, size: int, drafted: _Drafted, number_of: dict[int, int]) -> None:
    parents, tokens = tree.parents[: len(tree)].tolist(), tree.tokens[: len(tree)].tolist()
    for node in range(size, len(tree)):
        children = drafted.children(number_of[parents[node]])
        number_of[node] = next(child for child in children if drafted.tokens[child] == tokens[node])
