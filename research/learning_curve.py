"""Acceptance and calibration of a head at points of its training, and a prediction for more text.

Each --stage is the folder of a training run: log.jsonl, and a folder for each saved head, named by its step. Later
stages continue earlier ones, so tokens and processor hours add up. Every head drafts alone, greedily, with EAGLE's tree
of 60 nodes. The last record is a line through acceptance against the logarithm of the tokens, through the ends of the
stages (through all heads if there are fewer than three ends), and its prediction for twice as many tokens.

    python -m research.learning_curve --start HEAD --start-tokens 2500000 --stage FIRST --stage SECOND --data TEXT \\
        --prompts PROMPTS --per-set 60 --out FILE
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from bench import provenance, workloads
from bench.arguments import add_arguments
from research import bootstrap
from research.head_shapes import with_head
from research.losses import acceptance_length, by_rank, cpu_seconds, observations, taught, timed
from specengine import Engine, checkpoints as models, policies
from specengine.train.draft.options import TrainOptions
from specengine.train.draft.training import LOG, Epochs
from specengine.train.text.corpus import Corpus

TREE = {"width": 10, "expansions": 6, "budget": 60}


class Point(NamedTuple):
    """A head and the cost of its training so far. hours: processor hours, if a log has them."""

    folder: Path
    stage: int
    step: int
    tokens: int
    hours: float | None
    is_end: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "model", "prompts", "out", per_set=60, max_new_tokens=96)
    parser.add_argument("--start", type=Path, help="the head that the first stage started from")
    parser.add_argument("--start-tokens", type=int, default=0, help="tokens that it was trained on")
    parser.add_argument(
        "--stage", type=Path, action="append", required=True, help="repeatable, in order"
    )
    parser.add_argument("--batch-tokens", type=int, default=1024, help="of a step of every stage")
    parser.add_argument(
        "--data",
        type=Path,
        action="append",
        required=True,
        help="training text with held-back texts",
    )
    args = parser.parse_args()
    found = points(args.stage, args.batch_tokens, args.start, args.start_tokens)
    provenance.show(measure(found, args), args.out)


def points(
    stages: Sequence[Path], batch_tokens: int, start: Path | None, start_tokens: int
) -> list[Point]:
    """Return the heads in the order of their training. Tokens count repetitions."""
    found = [] if start is None else [Point(start, 0, 0, start_tokens, None, True)]
    tokens, hours = start_tokens, 0.0
    for number, stage in enumerate(stages, 1):
        log = [json.loads(line) for line in (stage / LOG).read_text().splitlines()]
        last = max(entry["step"] for entry in log)
        steps = sorted(int(path.name) for path in stage.iterdir() if path.name.isdigit())
        if not steps:
            raise SystemExit(f"stage: {stage} has no folder of a head that is named by its step")
        for step in steps:
            taken = cpu_seconds([entry for entry in log if entry["step"] <= step]) / 3600
            seen = tokens + step * batch_tokens
            found.append(
                Point(stage / str(step), number, step, seen, round(hours + taken, 3), step == last)
            )
        tokens, hours = tokens + last * batch_tokens, hours + cpu_seconds(log) / 3600
    return found


def measure(found: Sequence[Point], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    items = workloads.read(args.prompts, args.per_set)
    first = Engine.from_pretrained(args.model, draft="ngram")
    model = AutoModelForCausalLM.from_pretrained(
        models.resolve(args.model), dtype=torch.bfloat16, trust_remote_code=False
    )
    held_back = [
        text for data in args.data for text in Epochs(Corpus.open(data), TrainOptions()).held_back
    ]
    counts = []
    for point in found:
        engine = with_head(first, point.folder, policies.make("eagle", **TREE))
        answers = [timed(engine, item.text, args.max_new_tokens, None)[1:] for item in items]
        counts.append(answers)
        head, teacher = taught(point.folder, model)
        observed = observations(head, teacher, held_back)
        yield {
            "record": "head",
            **{name: value for name, value in point._asdict().items() if name != "folder"},
            "prompts": len(items),
            "acceptance_length": round(acceptance_length(answers), 3),
            "acceptance_length_interval": bootstrap.interval(
                [acceptance_length(sample) for sample in bootstrap.samples(answers)]
            ),
            "temperatures": list(head.config.temperatures),
            "by_rank": by_rank(observed),
        }
    yield {"record": "doubling"} | doubling(found, counts)


def doubling(found: Sequence[Point], counts: Sequence[Sequence[tuple[int, int]]]) -> dict[str, Any]:
    """Predict the gain of twice as many tokens, by a line through acceptance against log2 of the tokens.

    counts: of each head, tokens and cycles of each prompt; its interval comes of drawing prompts, the same for all.
    """
    ends = [number for number, point in enumerate(found) if point.is_end and point.tokens]
    fitted = (
        ends if len(ends) >= 3 else [number for number, point in enumerate(found) if point.tokens]
    )
    doublings = [math.log2(found[number].tokens) for number in fitted]

    def slope(prompts: Sequence[int]) -> float:
        lengths = [
            acceptance_length([counts[number][prompt] for prompt in prompts]) for number in fitted
        ]
        return statistics.linear_regression(doublings, lengths).slope

    everything = range(len(counts[0]))
    return {
        "heads": len(fitted),
        "tokens": 2 * found[-1].tokens,
        "more_acceptance_length": round(slope(everything), 3),
        "more_acceptance_length_interval": bootstrap.interval(
            [slope(s) for s in bootstrap.samples(everything)]
        ),
    }


if __name__ == "__main__":
    main()
