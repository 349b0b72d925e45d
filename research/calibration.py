"""Calibration of a head by the rank of the token before: probability of its best token, and how often it is right.

Along held-back text, every ranked token is followed, likely or not (SALF & TALF, §3.1). The temperatures of the head
are also scaled, because the paper's error falls with sharpness alone. In served trees, only tokens that the target
accepted are followed. There `chance` is the error that exact probabilities would show with as many outcomes.

    python -m research.calibration --head HEAD --data TEXT --prompts PROMPTS --per-set 60 --out FILE
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from bench import provenance, workloads
from bench.arguments import add_arguments
from research.losses import PLACES, TREES, sibling_ranks, taught
from research.ranks import RANKS, by_rank, calibration_error
from specengine import Engine, checkpoints as models
from specengine.records import Cycle
from specengine.train.draft.options import TrainOptions
from specengine.train.draft.training import Epochs
from specengine.train.text.corpus import Corpus, Text

SCALES = (1.0, 0.5, 0.25)  # of the head's temperatures
DRAWS = 100


class Outcome(NamedTuple):
    """The best child of an accepted node: rank of the parent (0: the root), draft probability, acceptance."""

    behind: int
    stated: float
    hit: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "model", "prompts", "out", per_set=60, max_new_tokens=96)
    parser.add_argument(
        "--head", type=Path, action="append", required=True, help="folder of a head; repeatable"
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="training text with held-back texts"
    )
    provenance.show(measure(args := parser.parse_args()), args.out)


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    held_back = Epochs(Corpus.open(args.data), TrainOptions()).held_back
    prompts = [item.text for item in workloads.read(args.prompts, args.per_set)]
    model = AutoModelForCausalLM.from_pretrained(
        models.resolve(args.model), dtype=torch.bfloat16, trust_remote_code=False
    )
    policy, options = TREES["beam"]
    for head in args.head:
        for row in along(head, model, held_back):
            yield {"record": "text", "head": head.name, **row}
        engine = Engine.from_pretrained(
            args.model, str(head), policy, policy_options=options, lookup=False
        )
        for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
            found = [
                outcome
                for number, prompt in enumerate(prompts)
                for piece in engine.stream(
                    prompt, max_new_tokens=args.max_new_tokens, temperature=temperature, seed=number
                )
                for outcome in outcomes(piece.cycle)
            ]
            for row in served(found):
                yield {
                    "record": "served",
                    "head": head.name,
                    "sampling": name,
                    "prompts": len(prompts),
                    **row,
                }


def along(folder: Path, model: Any, texts: Sequence[Text]) -> Iterator[dict[str, Any]]:
    """Yield records after every ranked token, with the head's temperatures and with lower ones."""
    head, teacher = taught(folder, model)
    config = head.config
    for scale in SCALES:
        head.config = replace(
            config, temperatures=tuple(scale * given for given in config.temperatures or (1.0,))
        )
        found = by_rank(head, teacher, texts, anchors=PLACES)
        yield {"temperatures_scale": scale, "by_rank": [report.to_dict() for report in found]}


def outcomes(cycle: Cycle) -> list[Outcome]:
    """Return the outcomes of one cycle: best children of the root and of each accepted node that has one."""
    tree = cycle.tree
    parents, stated, ranks = (
        tree.parents.tolist(),
        tree.log_probs.exp().tolist(),
        [0, *sibling_ranks(tree)],
    )
    on_path = set(cycle.agreed)
    return [
        Outcome(ranks[parents[node]], stated[node], node in on_path)
        for node in range(1, len(tree))
        if ranks[node] == 1 and parents[node] in on_path
    ]


def served(found: Sequence[Outcome]) -> Iterator[dict[str, Any]]:
    """Yield records after the root (0) and by rank from 1; the last rank includes all higher ones."""
    generator = torch.Generator().manual_seed(0)
    for behind in range(RANKS + 1):
        own = [outcome for outcome in found if min(outcome.behind, RANKS) == behind]
        if not own:
            continue
        stated = torch.tensor([outcome.stated for outcome in own])
        hits = torch.tensor([float(outcome.hit) for outcome in own])
        right = [
            calibration_error(torch.bernoulli(stated, generator=generator), stated)
            for _ in range(DRAWS)
        ]
        yield {
            "behind": behind,
            "outcomes": len(own),
            "accuracy": round(float(hits.mean()), 4),
            "stated": round(float(stated.mean()), 4),
            "error": round(calibration_error(hits, stated), 4),
            "chance": round(statistics.mean(right), 4),
        }


if __name__ == "__main__":
    main()
