"""Replay trees and chains of a head for multi-token prediction (MTP) at published acceptance rates. No model runs.

Published are chances that a chain's token at each depth is accepted, given that those above it were. A replay draws
from them, for every node of every cycle, the head's chance of its first child: from a beta distribution with the
published mean, whose `spread` is not published: 0 makes all nodes equally sure, 1 most of them sure or unsure. The
other children share what the first leaves, as the shipped head's do. The head states these chances, and the target
follows them. All policies meet the same positions. Time is not measured but taken from a table of costs.

    python -m bench.mtp --costs qwen3-8b-h200 --costs 2-cores-amx --out FILE
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from bench import provenance
from bench.arguments import add_arguments
from bench.costs_record import costs_record
from research.drafting import draft_tree
from specengine import policies
from specengine.benchmark.ways import parse
from specengine.costs import PassCosts, find_costs
from specengine.cycle import walk
from specengine.drafters import Drafter
from specengine.ops import Nodes
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree
from specengine.records import Cycle, Outcome, Seconds


class Rates(NamedTuple):
    """Chances of a chain's tokens by depth, each given those above it; deeper ones are like the last."""

    source: str
    by_depth: tuple[float, ...]


PUBLISHED = {
    "gsm8k": Rates(
        "vllm-project/vllm#48892, a multi-layer MTP head on GSM8K, chains of 8, temperature 0: accepted at each "
        "position 76.17, 61.58, 51.25, 42.43, 36.40, 30.94, 27.22, 23.65 %",
        (0.762, 0.808, 0.832, 0.828, 0.858, 0.850, 0.880, 0.869),
    ),
    "deepseek-v3": Rates(
        "arXiv 2412.19437, 5.4.3: the second token, 85 to 90 %, here the same at any depth", (0.85,)
    ),
    "story": Rates(
        "ikawrakow/ik_llama.cpp#2369, chains of 3, task story: 46.58 % of drafted tokens, here the same at any depth",
        (0.664,),
    ),
}
# of the rest, by rank, as auto-chances.jsonl counted them below the root
CHILDREN = 0.26, 0.11, 0.08, 0.06, 0.03
LEAST = CHILDREN[0] / (1 + CHILDREN[0])  # chance of a first child: no other is likelier
ELSEWHERE = 99  # a token that is never drafted


@dataclass
class Head(Drafter):
    """A head that states the chances of a node's children; tokens are ranks. A position is a cycle's number."""

    rates: Rates
    spread: float
    position: int = 0
    widths: list[int] = field(default_factory=list)

    name = "replayed"

    def chances(self, path: Sequence[int]) -> tuple[list[float], float]:
        """Return the chances of the children of a node, and the number between 0 and 1 that chooses among them."""
        # zeros at the end count for nothing
        random = np.random.default_rng([self.position, *(token + 1 for token in path)])
        by_depth = self.rates.by_depth
        mean = by_depth[min(len(path), len(by_depth) - 1)]
        first = mean
        if self.spread:
            above = (mean - LEAST) / (1 - LEAST)
            first = LEAST + (1 - LEAST) * float(
                random.beta(above / self.spread, (1 - above) / self.spread)
            )
            first = min(first, 1 - 1e-4)
        return [first, *((1 - first) * share for share in CHILDREN)], float(random.random())

    def choose(self, path: Sequence[int]) -> int:
        """Return the target's token after a node."""
        chances, drawn = self.chances(path)
        for rank, chance in enumerate(chances):
            drawn -= chance
            if drawn < 0:
                return rank
        return ELSEWHERE

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        nodes = frontier.alive().tolist()
        self.widths.append(len(nodes))
        return Step(
            torch.tensor([self.chances(path_of(tree, node))[0] for node in nodes]).log(),
            normalized=True,
        )

    def begin(self, prompt: list[int], features: Any = None, hints: Any = None) -> None: ...

    def accept(self, cycle: Cycle) -> None: ...

    def reset(self) -> None: ...


def path_of(tree: TokenTree, node: int) -> list[int]:
    """Return the tokens from the root's child to a node."""
    found = list[int]()
    while node:
        found.insert(0, int(tree.tokens[node]))
        node = int(tree.parents[node])
    return found


def replay(way: str, head: Head, costs: PassCosts, cycles: int) -> dict[str, Any]:
    """Return means per cycle of a policy, and its tokens per time over those of plain decoding.

    Cycles of the first quarter are left out: a policy that counts learns in them.
    """
    name, options = parse(way)
    policy = policies.make(name, **options | ({"costs": costs} if name == "auto" else {}))
    policy.begin(0)
    rows, time = list[tuple[int, int, int]](), 0.0
    for head.position in range(cycles):
        head.widths, seconds = [], Seconds()
        draft = draft_tree(0, head, policy, seconds, torch.device("cpu"))
        tree = draft.tree
        path, tokens = walk(
            tree,
            lambda node, tree=tree: head.choose(path_of(tree, node)),  # type: ignore[misc]
            lambda token: False,
        )
        policy.learn(
            Outcome.of(
                Cycle(
                    tree, path, tokens, seconds, len(draft.grown) - 1, None, draft.grown, draft.kept
                )
            )
        )
        if 4 * head.position >= cycles:
            rows.append((len(tokens), len(tree), len(head.widths)))
            time += costs.cycle(len(tree), head.widths)
    tau, gamma, delta = (round(statistics.fmean(column), 3) for column in zip(*rows, strict=True))
    speedup = sum(row[0] for row in rows) * costs.plain / time
    return {"tau": tau, "gamma": gamma, "delta": delta, "speedup": round(speedup, 3)}


WAYS = (
    "chain,length=1",
    "chain,length=2",
    "chain,length=3",
    "chain,length=5",
    "chain,length=8",
    "auto",
    "auto,width=1",
)


def records(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for costs in map(find_costs, args.costs):
        yield costs_record(costs)
        for law, rates in PUBLISHED.items():
            for spread in args.spread:
                about = {
                    "record": "mtp replay",
                    "costs": costs.name,
                    "rates": law,
                    "source": rates.source,
                }
                for way in args.policy or WAYS:
                    yield (
                        about
                        | {"spread": spread, "way": way}
                        | replay(way, Head(rates, spread), costs, args.cycles)
                    )


def table(found: list[dict[str, Any]]) -> str:
    """Return speed-ups over plain decoding in Markdown: the best chain, and trees."""
    lines = ["| costs | rates | spread | best chain | auto | auto, width 1 |", "|---" * 6 + "|"]
    rows: dict[tuple[str, str, float], dict[str, float]] = {}
    for record in found:
        if record["record"] == "mtp replay":
            key = record["costs"], record["rates"], record["spread"]
            rows.setdefault(key, {})[record["way"]] = record["speedup"]
    for key, ways in rows.items():
        best = max(
            (way for way in ways if way.startswith("chain")), key=lambda way: ways[way], default=""
        )
        others = (f"{ways.get(way, math.nan):.2f}" for way in ("auto", "auto,width=1"))
        cells = [
            *map(str, key),
            f"{ways.get(best, math.nan):.2f} ({best.rpartition('=')[2]})",
            *others,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.mtp", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--costs", action="append", required=True, metavar="NAME", help="published, or a file"
    )
    parser.add_argument(
        "--policy", action="append", metavar="WAY", help=f"repeatable; default: {' '.join(WAYS)}"
    )
    parser.add_argument("--spread", type=float, nargs="+", default=[0.25, 1.0])
    parser.add_argument("--cycles", type=int, default=800, help="of each policy")
    add_arguments(parser, "out")
    args = parser.parse_args(arguments)
    print(table(provenance.show(records(args), args.out)))


if __name__ == "__main__":
    main()
