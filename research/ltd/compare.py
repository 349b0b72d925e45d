"""Learning to Draft against the EAGLE beam, on logged candidate trees and live: see `python -m research.ltd`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench import workloads
from bench.costs_record import costs_record
from bench.verdicts import Answers, resampled, speed
from research.ltd.candidates import CandidateOptions, CandidateTrees, log_candidates
from research.ltd.curve import plot
from research.ltd.outcomes import Outcomes
from research.ltd.train import say
from research.ltd.training import PAIR, read_log
from specengine import Engine, checkpoints as models
from specengine.costs import find_costs
from specengine.errors import InputError
from specengine.policies import _ltd
from specengine.policies._ltd import Networks


def _engine(args: argparse.Namespace) -> Engine:
    model = AutoModelForCausalLM.from_pretrained(
        models.resolve(args.model), dtype=getattr(torch, args.dtype), trust_remote_code=False
    )
    options: dict[str, Any] = {"lookup": False} if args.no_lookup else {}
    return Engine.from_pretrained(model, args.draft, **options)


def _prompts(args: argparse.Namespace, engine: Engine) -> list[list[int]]:
    return [
        engine.stream(item.text, max_new_tokens=1).prompt
        for item in workloads.read(args.prompts, args.per_set)
    ]


def log(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    engine = _engine(args)
    options = CandidateOptions(
        args.max_new_tokens, args.width, args.expansions, temperature=args.temperature
    )
    name = Path(args.model).name if args.model else models.embedded.NAME
    trees = log_candidates(
        engine, _prompts(args, engine), args.folder, options, name=name, progress=say
    )
    yield {"record": "log", **trees.manifest, "trees": sum(map(len, trees.answers()))}


def curves(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the figures of training runs, and plot their curves next to the result file."""
    for folder in args.folder:
        trained, entries = _ltd.load(str(folder / PAIR)), read_log(folder)
        facts = {name: trained.facts[name] for name in ("options", "ground", "pairs", "kept")}
        yield {"record": "training", "training": folder.name, **facts}
        yield from ({"record": "log", "training": folder.name, **entry} for entry in entries)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            plot(entries, args.out.with_name(f"{args.out.stem}-{folder.name}.svg"))


# ---------------------------------------------------------------------------------------------------- on logged trees


def compare(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    pairs = {name: _ltd.load(name).networks for name in args.networks}
    if len({networks.shape for networks in pairs.values()}) > 1:
        raise InputError(
            "networks: they are for trees of different shapes; compare them one at a time"
        )
    shape, costs = next(iter(pairs.values())).shape, find_costs(args.costs)
    folders = [CandidateTrees.open(folder) for folder in args.folder]
    trees = Outcomes.of([answer for folder in folders for answer in folder.answers()], shape, costs)
    yield costs_record(costs)
    manifests = [dict(folder.manifest) for folder in folders]
    yield {"record": "log", "trees": len(trees), "folders": manifests, "shape": asdict(shape)}
    searched = {"eagle, best on these trees": trees}
    if args.grid:
        answers = [a for folder in args.grid for a in CandidateTrees.open(folder).answers()]
        searched["eagle, best on the training's trees"] = Outcomes.of(answers, shape, costs)
    others = best_on_others(trees)
    beam, grid = trees.by_answer(*args.default), trees.by_answer(*others)

    def row(way: str, depths: Any, sizes: Any, /, **facts: Any) -> dict[str, Any]:
        own = trees.by_answer(depths, sizes)
        figures = trees.speed(depths, sizes)._asdict()
        every = replace(trees, each=True).speed(depths, sizes).speed
        return {
            "record": "replay",
            "way": way,
            **{name: round(value, 4) for name, value in figures.items()},
            "speed_at_every_position": round(every, 4),
            "over_eagle": over(own, beam, costs.name),
            "over_grid": over(own, grid, costs.name),
            **facts,
        }

    yield row("eagle", *args.default, depth=args.default[0], size=args.default[1])
    for name, source in searched.items():
        depth, size = best_of_grid(source)
        yield row(name, depth, size, depth=depth, size=size)
    yield row(
        "eagle, best on the other half of the answers",
        *others,
        settings=sorted(set(zip(*(each.tolist() for each in others), strict=True))),
    )
    for name, networks in pairs.items():
        label = Path(name).parent.name if Path(name).is_file() else name
        for what, fixed_depth, fixed_size in (
            ("ltd", None, None),
            ("ltd, its depth", None, args.default[1]),
            ("ltd, its size", args.default[0], None),
        ):
            depths, sizes = decided(trees, networks, fixed_depth, fixed_size)
            choices = {"depths": _counts(depths), "sizes": _counts(sizes)}
            yield row(f"{what}: {label}", depths, sizes, **choices)
    # at each tree by itself, also where they are visited in turn
    yield row("the best depth and size of each tree, foreseen", *foreseen(trees))


def over(own: Answers, other: Answers, costs: str) -> list[float]:
    """Return the speed over another's on the same answers, and its 95 % interval over answers."""
    return resampled(
        [{"by_answer": own}, {"by_answer": other}],
        lambda drawn: speed(drawn[0], costs) / speed(drawn[1], costs),
    )


def best_on_others(trees: Outcomes) -> tuple[Any, Any]:
    """Return for each tree, int64 [trees], the depth and the size that are best on every other answer, its own not."""
    numbers = np.unique(trees.answers)
    best = [best_of_grid(trees.part(numbers[half::2])) for half in (1, 0)]
    half = np.searchsorted(numbers, trees.answers) % 2
    return tuple(np.array(best).T[:, half])


def best_of_grid(trees: Outcomes) -> tuple[int, int]:
    """Return the depth and size with the highest throughput on these trees."""
    shape = trees.shape
    grid = [
        (depth, size) for depth in range(shape.least, shape.expansions + 1) for size in shape.sizes
    ]
    return max(grid, key=lambda point: trees.speed(*point).speed)


def decided(
    trees: Outcomes, networks: Networks, depth: int | None, size: int | None
) -> tuple[Any, Any]:
    """Return depths and sizes, int64 [trees], by the networks, or by a fixed number instead of one of them."""
    depths = trees.depths_by(networks) if depth is None else trees.all_trees(depth)
    return depths, trees.sizes_by(networks, depths) if size is None else trees.all_trees(size)


def foreseen(trees: Outcomes) -> tuple[Any, Any]:
    """Return depths and sizes that maximise throughput given the target's choices: an upper bound for any policy."""
    shape, everything, rate = trees.shape, np.arange(len(trees)), 1.0
    grid = [
        (depth, size) for depth in range(shape.least, shape.expansions + 1) for size in shape.sizes
    ]
    tokens = np.stack(
        [trees.committed(everything, *map(trees.all_trees, point)) for point in grid], 1
    )
    cost = np.array([trees.cost(*map(np.asarray, point)) for point in grid]) / trees.costs.plain
    for _ in range(20):
        best = (tokens - rate * cost).argmax(1)
        rate = tokens[everything, best].sum() / cost[best].sum()
    points = np.array(grid)[best]
    return points[:, 0], points[:, 1]


def _counts(values: Any) -> dict[int, int]:
    return {
        int(value): int(count)
        for value, count in zip(*np.unique(values, return_counts=True), strict=True)
    }


# ---------------------------------------------------------------------------------------------------- live


def agree(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare the engine's cycles under random depths and sizes with the table's reward for the same cycles, and, by
    depth and by size, with the replay of logged trees of the same prompts."""
    from research.ltd.environments import WALLCLOCK_UNIT, cycle_facts
    from research.ltd.steered import Finished, SteeredEngine, decision_seconds

    engine, costs, networks = (
        _engine(args),
        find_costs(args.costs),
        _ltd.load(args.networks[0]).networks,
    )
    shape, device = networks.shape, engine.target.device
    own = {
        which: round(1e6 * decision_seconds(networks, which, device), 1)
        for which in ("depth", "size")
    }
    yield {"record": "decisions", "networks": args.networks[0], "microseconds": own}
    steered = SteeredEngine(
        engine, _prompts(args, engine), shape, "size", None, length=args.max_new_tokens
    )
    random = np.random.default_rng(0)
    action: int | None = None
    seconds: list[float] = []
    facts: list[dict[str, Any]] = []
    actions: list[tuple[int, int]] = []
    while len(facts) < args.cycles:
        found = steered.next(action)
        if isinstance(found, Finished):
            seconds.append(found.seconds)
            facts.append(cycle_facts(found.cycle))
            actions.append((len(facts[-1]["widths"]) - 1, shape.sizes[action]))  # type: ignore[index]
        else:
            action = int(random.integers(len(shape.sizes)))
    steered.close()
    predicted = [costs.cycle(fact["verified"], fact["widths"]) for fact in facts]
    live = [
        fact["tokens"] * WALLCLOCK_UNIT / spent for spent, fact in zip(seconds, facts, strict=True)
    ]
    table = [
        fact["tokens"] * costs.plain / cost for fact, cost in zip(facts, predicted, strict=True)
    ]
    yield {
        "record": "agreement",
        "cycles": len(facts),
        "spearman_of_rewards": round(spearman(live, table), 4),
        "spearman_of_seconds": round(spearman(seconds, predicted), 4),
        "seconds_over_predicted": round(
            float(np.median(np.array(seconds) / np.array(predicted))), 6
        ),
    }
    if args.candidates:
        trees = Outcomes.of(list(CandidateTrees.open(args.candidates).answers()), shape, costs)
        yield _by_setting(trees, np.array(actions), np.array(live))


def _by_setting(trees: Outcomes, actions: Any, live: Any) -> dict[str, Any]:
    """Return mean rewards, measured and replayed, of each depth and of each size, with the other one random."""
    shape, found = trees.shape, {}
    depths, sizes = np.arange(max(1, shape.least), shape.expansions + 1), np.array(shape.sizes)
    every, deep, many = np.meshgrid(np.arange(len(trees)), depths, sizes, indexing="ij")
    replayed = (
        trees.committed(every, deep, many) * trees.costs.plain / trees.cost(deep[:1], many[:1])
    )
    for place, depth in enumerate(depths):
        found[f"depth {depth}"] = live[actions[:, 0] == depth].mean(), replayed[:, place].mean()
    for place, size in enumerate(sizes):
        found[f"size {size}"] = live[actions[:, 1] == size].mean(), replayed[:, :, place].mean()
    return {
        "record": "agreement by setting",
        "trees": len(trees),
        "spearman": round(spearman(*zip(*found.values(), strict=True)), 4),
        "live_and_replayed": {
            name: [round(float(value), 4) for value in pair] for name, pair in found.items()
        },
    }


def spearman(a: Any, b: Any) -> float:
    """Return the rank correlation. Equal values share their mean rank."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Any) -> Any:
    _, place, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[place]
