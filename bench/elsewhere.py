"""Compare the acceptance of an exported head in vLLM, in both layouts, with specengine's.

Greedy, the head alone, a chain of fixed length, the shipped prompts, both engines on the same token ids and in the
same dtype. VLLM_PYTHON names the Python of an environment that has vLLM.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import provenance
from bench.arguments import add_arguments
from specengine import checkpoints
from specengine.benchmark import workloads
from specengine.cli import main as specengine
from specengine.engine import Engine

SCRIPT = Path(__file__).parent.parent / "integrations" / "vllm" / "acceptance.py"
FORMATS = ("eagle", "speculators")
CERTAIN = 1.96  # standard errors: 95 %
Totals = tuple[int, list[int]]  # drafts, and how many had their first, second ... token accepted


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=3, help="length of the chain")
    add_arguments(parser, "out", per_set=1, max_new_tokens=64, dtype="float32")
    args = parser.parse_args(argv)
    provenance.show(_records(args), args.out)
    return 0


def _records(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    items = workloads.read(None, args.per_set)
    settings = {name: getattr(args, name) for name in ("tokens", "max_new_tokens", "dtype")}
    yield {"record": "settings", "prompts": [f"{item.set}/{item.id}" for item in items], **settings}
    answers, asked, here = _ours(args, [item.text for item in items])
    yield _acceptance("specengine", here)
    for name in FORMATS:
        engine = f"vllm, {name}"
        found = _in_vllm(args, name, asked)
        yield {"record": "versions", "engine": engine, **found["versions"]}
        for item, theirs, ours in zip(items, found["answers"], answers, strict=True):
            agreed = _agreed(theirs, ours)
            counts = {"tokens": len(theirs), "agreed": agreed}
            yield {
                "record": "answer",
                "engine": engine,
                "prompt": f"{item.set}/{item.id}",
                **counts,
            }
        there = found["drafts"], found["accepted"]
        yield _acceptance(engine, there)
        yield from _differences(engine, there, here)


def _ours(
    args: argparse.Namespace, texts: list[str]
) -> tuple[list[list[int]], list[list[int]], Totals]:
    """Return answers and prompts as token ids, and accepted tokens by position of the chain."""
    chain = {"length": args.tokens}
    engine = Engine.from_pretrained(
        None, None, "chain", policy_options=chain, dtype=args.dtype, lookup=False
    )
    answers, asked, drafts, accepted = [], [], 0, [0] * args.tokens
    for text in texts:
        answer = engine.stream(text, max_new_tokens=args.max_new_tokens, temperature=0.0)
        result = answer.run()
        answers.append(result.token_ids)
        asked.append(answer.prompt)
        drafts += result.stats.num_spec_steps
        for depth in range(args.tokens):
            accepted[depth] += sum(result.stats.acceptance_histogram[depth + 1 :])
    return answers, asked, (drafts, accepted)


def _in_vllm(args: argparse.Namespace, name: str, asked: list[list[int]]) -> dict[str, Any]:
    """Run the exported head in vLLM. In the speculators layout vLLM gets that folder alone."""
    with tempfile.TemporaryDirectory() as work:
        head, question, reply = (Path(work) / part for part in ("head", "asked.json", "found.json"))
        tokens = ["--tokens", str(args.tokens)] if name == "speculators" else []
        if specengine(["export", checkpoints.embedded.NAME, str(head), "--format", name, *tokens]):
            raise SystemExit("the export failed")
        config: dict[str, Any] | None = None
        model = head
        if name == "eagle":
            model = checkpoints.embedded.path()
            config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": args.tokens}
        most = max(map(len, asked)) + args.max_new_tokens + args.tokens + 1
        settings = {
            "dtype": args.dtype,
            "max_new_tokens": args.max_new_tokens,
            "max_model_len": most,
        }
        question.write_text(
            json.dumps(
                {"model": str(model), "speculative_config": config, "prompts": asked} | settings
            )
        )
        subprocess.run(
            [os.environ["VLLM_PYTHON"], SCRIPT, question, reply], stdout=sys.stderr, check=True
        )
        found: dict[str, Any] = json.loads(reply.read_text())
        return found


def _agreed(theirs: list[int], ours: list[int]) -> int:
    """Return the number of tokens before the first difference."""
    return next(
        (i for i, pair in enumerate(zip(theirs, ours, strict=False)) if len(set(pair)) > 1),
        len(theirs),
    )


def _acceptance(engine: str, totals: Totals) -> dict[str, Any]:
    drafts, accepted = totals
    counts = {
        "drafts": drafts,
        "accepted": accepted,
        "rates": [round(count / drafts, 4) for count in accepted],
    }
    length = round(1 + sum(accepted) / drafts, 3)
    return {"record": "acceptance", "engine": engine, **counts, "mean_acceptance_length": length}


def _differences(engine: str, there: Totals, here: Totals) -> Iterator[dict[str, Any]]:
    """Return differences of shares by position, with 95 % intervals for independent samples, wider than needed."""
    for position, counts in enumerate(zip(there[1], here[1], strict=True), start=1):
        left, right = counts[0] / there[0], counts[1] / here[0]
        error = math.sqrt(left * (1 - left) / there[0] + right * (1 - right) / here[0])
        bounds = [round(left - right + side * CERTAIN * error, 4) for side in (-1, 1)]
        found = {"difference": round(left - right, 4), "interval": bounds}
        yield {
            "record": "difference",
            "engine": engine,
            "against": "specengine",
            "position": position,
            **found,
        }


if __name__ == "__main__":
    sys.exit(main())
