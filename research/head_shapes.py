"""Compare shapes of a draft head by predicted tokens per second.

`train` resizes one head to each shape (units of the MLP x tokens of the vocabulary) and trains each for the same number
of steps on the same text. `measure` counts acceptance on prompts, measures draft passes and verifications on this
machine, and predicts the speed from both. Counters do not depend on other work on the machine, and the heads' costs are
measured in turn.

    python -m research.head_shapes train --data TEXT --heads FOLDER --start HEAD --shape 1536x8192 --shape 3072x12288
    python -m research.head_shapes measure --heads FOLDER --prompts PROMPTS --per-set 60 --out FILE
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench import provenance, workloads
from bench.arguments import add_arguments
from bench.costs_record import costs_record
from specengine import Engine, checkpoints as models
from specengine.benchmark.workloads import Workload
from specengine.checkpoints.eagle import load_head
from specengine.costs import PassCosts, Points, measuring
from specengine.drafters.eagle import EagleDraft
from specengine.models.huggingface import HuggingFaceTarget
from specengine.models.native import NativeTarget
from specengine.policies import TreePolicy, make
from specengine.records import Cycle
from specengine.train.draft.options import TrainOptions, make_loss
from specengine.train.draft.training import train_draft
from specengine.train.text.corpus import Corpus

TREES = {
    "eagle of 60": lambda: make("eagle", width=10, expansions=6, budget=60),
    "salf/cpu": lambda: make("salf/cpu"),
}
LOSS = make_loss("ttt", steps=6, anchors=0.25, decay=0.8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    trains = commands.add_parser("train")
    trains.set_defaults(run=train)
    trains.add_argument("--data", type=Path, required=True, help="folder of training text")
    trains.add_argument("--start", required=True, help="the head to resize")
    trains.add_argument(
        "--shape", action="append", required=True, metavar="UNITSxTOKENS", help="repeatable"
    )
    trains.add_argument("--steps", type=int, default=300)
    trains.add_argument("--rate", type=float, default=6e-4)
    measures = commands.add_parser("measure")
    measures.set_defaults(run=show)
    add_arguments(measures, "prompts", "out", per_set=60, max_new_tokens=96)
    measures.add_argument("--rounds", type=int, default=3, help="measurements of the costs")
    for command in (trains, measures):
        add_arguments(command, "model")
        command.add_argument("--heads", type=Path, required=True, help="folder of a head per shape")
    args = parser.parse_args()
    args.run(args)


def train(args: argparse.Namespace) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        models.resolve(args.model), dtype=torch.bfloat16, trust_remote_code=False
    )
    corpus = Corpus.open(args.data)
    least = load_head(args.start).config.draft_vocab_size
    shapes = {shape: tuple(map(int, shape.split("x"))) for shape in args.shape}
    if any(tokens < least for _, tokens in shapes.values()):
        raise SystemExit(
            f"--shape: accepted: {least:,} tokens or more, which {args.start} has: a vocabulary only grows"
        )
    for shape, (units, tokens) in shapes.items():
        options = TrainOptions(
            steps=args.steps,
            batch_tokens=1024,
            lengths=(512, 1024),
            learning_rate=args.rate,
            start=args.start,
            intermediate_size=units,
            draft_vocab_size=tokens,
            average=0.99,
            validate_every=args.steps,
        )
        print(shape, flush=True)
        train_draft(
            model,
            corpus,
            args.heads / shape,
            options,
            LOSS,
            name=args.model or models.embedded.NAME,
        )


def show(args: argparse.Namespace) -> None:
    provenance.show(measure(args), args.out)


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    first = Engine.from_pretrained(args.model, draft="ngram")
    engines = {}
    for folder in sorted(path for path in args.heads.iterdir() if (path / "config.json").is_file()):
        engines[folder.name] = with_head(first, folder, make("salf/cpu"))
    costs = _measured(engines, args.rounds)
    items = workloads.read(args.prompts, args.per_set)
    for name, engine in engines.items():
        yield costs_record(replace(costs[name], name=name))
        found = load_head(args.heads / name)
        facts = {
            "record": "head",
            "shape": name,
            "units": found.config.intermediate_size,
            "tokens": found.config.draft_vocab_size,
            "parameters": sum(t.numel() for t in found.state.values() if t.is_floating_point()),
        }
        for tree, policy in TREES.items():
            yield (
                facts
                | {"tree": tree}
                | _predicted(engine, policy(), items, args.max_new_tokens, costs[name])
            )


def with_head(first: Engine, folder: Path, policy: TreePolicy) -> Engine:
    """Return an engine with the target of `first` and the head in `folder`."""
    assert isinstance(first.target, NativeTarget | HuggingFaceTarget)
    drafter = EagleDraft.of(load_head(folder), first.target.lm, folder.name)
    return Engine(first.target, drafter, policy, first.tokenizer)


def _measured(engines: dict[str, Engine], rounds: int) -> dict[str, PassCosts]:
    """Return median costs by head. All heads share the costs of the target."""
    found: dict[str, list[PassCosts]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            found[name].append(measuring.measure(engine.target, engine.drafter))
    every = [costs for of_head in found.values() for costs in of_head]
    verify, overhead = (
        _medians([one.verify for one in every]),
        _median([one.overhead for one in every]),
    )
    return {
        name: replace(
            of_head[0],
            draft=_medians([one.draft for one in of_head]),
            verify=verify,
            overhead=overhead,
        )
        for name, of_head in found.items()
    }


def _medians(points: list[Points]) -> Points:
    """Return medians at the numbers of nodes that most measurements have; a slow one skips some."""
    counts = Counter(n for each in points for n in each)
    return {
        n: _median([each[n] for each in points if n in each])
        for n in sorted(counts)
        if counts[n] > len(points) / 2
    }


def _median(values: list[float]) -> float:
    return statistics.median(values)


def _predicted(
    engine: Engine, policy: TreePolicy, items: list[Workload], length: int, costs: PassCosts
) -> dict[str, Any]:
    serving = Engine(engine.target, engine.drafter, policy, engine.tokenizer)
    cycles: list[Cycle] = []
    for item in items:
        cycles += [
            piece.cycle
            for piece in serving.stream(item.text, max_new_tokens=length, temperature=0.0)
        ]
    tokens, seconds = (
        sum(len(cycle.tokens) for cycle in cycles),
        sum(_seconds(cycle, costs) for cycle in cycles),
    )
    return {
        "prompts": len(items),
        "acceptance_length": round(tokens / len(cycles), 3),
        "predicted_tokens_per_s": round(tokens / seconds, 1),
        "predicted_over_plain": round(tokens * costs.plain / seconds, 3),
    }


def _seconds(cycle: Cycle, costs: PassCosts) -> float:
    """Return predicted seconds. All passes after the first count as the width of the nodes with children."""
    tree = cycle.tree if cycle.grown is None else cycle.grown
    passes = int(cycle.tree.passes)
    parents = len(set(tree.parents[1 : len(tree)].tolist()) - {0})
    width = round(parents / (passes - 1)) if passes > 1 else 0
    return costs.cycle(len(cycle.tree), [1] * min(passes, 1) + [max(width, 1)] * max(passes - 1, 0))


if __name__ == "__main__":
    main()
