"""Regret of `auto`'s counted acceptance rates when the true probabilities drift.

A draft states the probability p of its first token and splits the rest. Acceptance follows other probabilities, with
log odds a x + b of the stated x, where a and b drift or jump. In every cycle the rule of `auto` chooses the number of
nodes to verify: by its own counts, by the stated probabilities, and by the true ones. The loss of a cycle is the
difference to the true ones, in expected tokens.

    python -m research.regret --out FILE --plot FILE.svg
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench import provenance
from bench.arguments import add_arguments
from research.curve import draw
from specengine import ops
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree
from specengine.policies.auto import Auto
from specengine.records import Outcome

PRICE, CHILDREN, EVERY = 0.08, 5, 50  # tokens of a node; of the root; cycles of a point


def law(kind: str, cycle: int, cycles: int) -> tuple[float, float]:
    """Return slope and shift of the log-odds at a cycle."""
    if kind == "still":
        return 0.6, 0.8
    if kind == "jumps":
        return (0.6, 0.8) if cycle < cycles // 2 else (1.2, -1.5)
    turn = 2 * math.pi * cycle / cycles
    return 0.9 + 0.4 * math.sin(turn), 1.2 * math.cos(turn)


def losses(kind: str, cycles: int, seed: int) -> dict[str, list[float]]:
    """Return the losses per cycle, by the probabilities that decide."""
    draw, policy = random.Random(seed), Auto()
    price = torch.arange(CHILDREN + 2).float() * PRICE
    lost: dict[str, list[float]] = {"counted": [], "stated": []}
    for cycle in range(cycles):
        slope, shift = law(kind, cycle, cycles)
        first = draw.betavariate(1.2, 1.2)
        stated = [first] + [(1 - first) * 0.5**place for place in range(1, CHILDREN)]
        odds = [math.log(p / (1 - p)) for p in stated]
        true = [1 / (1 + math.exp(-(slope * x + shift))) for x in odds]
        true = [chance / max(1.0, sum(true)) for chance in true]
        tree, step = (
            TokenTree.root(9, policy.capacity),
            Step(torch.tensor([stated]).log(), normalized=True),
        )
        policy.grow(tree, tree.root_alone().where(False), Step(torch.zeros(0, 1)))
        tree.passes += 1
        policy.grow(tree, tree.root_alone(), step)
        counted = dict(
            zip(
                tree.tokens[1 : len(tree)].tolist(), tree.log_probs[1:].exp().tolist(), strict=False
            )
        )
        best = _worth(true, true, price)
        lost["counted"].append(
            best - _worth([counted.get(place, 0.0) for place in range(CHILDREN)], true, price)
        )
        lost["stated"].append(best - _worth(stated, true, price))
        drawn, token = draw.random(), CHILDREN
        for place, chance in enumerate(true):
            if (drawn := drawn - chance) < 0:
                token = place
                break
        policy.learn(Outcome(tree, tree.root_alone(), torch.tensor([token]), None))
    return lost


def _worth(believed: list[float], true: list[float], price: torch.Tensor) -> float:
    """Return the value, by true probabilities, of the nodes that the believed ones would verify."""
    paths = torch.tensor([0.0, *(math.log(max(chance, 1e-9)) for chance in believed)])
    kept = (
        ops.select_worth(paths, torch.tensor([len(paths)], dtype=torch.int32), price, len(paths))
        .alive()
        .tolist()
    )
    return sum(true[node - 1] for node in kept if node) - PRICE * (len(kept) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=5)
    add_arguments(parser, "out")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    records = provenance.show(measure(args), args.out)
    if args.plot:
        draw(args.plot, (9.0, 3.0), lambda figure: _draw(figure, records))


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for kind in ("still", "drifts", "jumps"):
        runs = [losses(kind, args.cycles, seed) for seed in range(args.seeds)]
        for who in ("counted", "stated"):
            means = [
                sum(run[who][cycle] for run in runs) / len(runs) for cycle in range(args.cycles)
            ]
            points = [
                round(sum(means[at : at + EVERY]) / EVERY, 5) for at in range(0, args.cycles, EVERY)
            ]
            total = round(sum(means) / len(means), 5)
            yield {"record": "regret", "law": kind, "by": who, "per_cycle": total, "points": points}


def _draw(figure: Any, records: list[dict[str, Any]]) -> None:
    laws = list(dict.fromkeys(record["law"] for record in records))
    panels = figure.subplots(1, len(laws), sharey=True)
    for panel, kind in zip(panels, laws, strict=True):
        for record in records:
            if record["law"] == kind:
                panel.plot(
                    [EVERY * at for at in range(len(record["points"]))],
                    record["points"],
                    label=record["by"],
                )
        panel.set_title(kind)
        panel.set_xlabel("cycles")
    panels[0].set_ylabel("expected tokens lost per cycle")
    panels[0].legend()


if __name__ == "__main__":
    main()
