"""Exactness: speculative output against plain decoding, token for token, over policies, drafts and seeds.

Greedy answers of every policy and draft, and of transformers' `generate(do_sample=False)`, are compared with plain
decoding's, sampled ones with plain sampling's under the same seed. In float32 every difference counts; in lower
precision each first difference is certified as a near-tie of the target's logits or reported as a mismatch. The
answers of an interrupted run stay in FILE.rows, and the same command resumes from them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench import provenance, workloads
from bench.arguments import add_arguments
from bench.short_models import first_layers
from specengine import Engine, checkpoints as models, policies
from specengine.benchmark.choice import Comparison
from specengine.benchmark.measuring import Run
from specengine.benchmark.records import Log, Record
from specengine.benchmark.summaries import VERDICTS
from specengine.benchmark.ways import (
    GENERATE,
    PLAIN,
    EngineDecoder,
    Way,
    baseline,
    parse,
    without_memory,
)
from specengine.benchmark.workloads import Workload, digest
from specengine.options import LoadOptions

POLICIES = ("chain,length=3", "eagle,width=3,expansions=2,budget=10", "fixed,branching=3,2")
SAMPLING = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(
        parser,
        "model",
        "prompts",
        "per_set",
        max_new_tokens=64,
        dtype="float32",
        device="cpu",
        out=Path("exactness.jsonl"),
    )
    parser.add_argument(
        "--seeds",
        nargs="*",
        default=["greedy", "0", "1", "2"],
        help="greedy, and seeds to sample with",
    )
    parser.add_argument(
        "--draft-layers", type=int, default=2, help="first layers of the target used as small_model"
    )
    args = parser.parse_args()
    items = workloads.read(args.prompts, args.per_set)
    named = ("model", "dtype", "device", "max_new_tokens", "seeds", "draft_layers")
    settings = {
        "record": "settings",
        **{name: getattr(args, name) for name in named},
        "of_prompts": digest(items),
    }
    growing = args.out.with_suffix(provenance.ROWS)
    log = Log(growing, provenance.provenance(), settings)
    for record in _records(args, items, list(log.records)):
        log.add(record)
    summary = _summary(log.records, args.dtype)
    log.add(summary)
    growing.replace(args.out)
    print(json.dumps(summary, indent=1))
    return int(summary["verdicts"]["mismatch"] > 0)


def _records(
    args: argparse.Namespace, items: list[Workload], done: list[Record]
) -> Iterator[Record]:
    model = AutoModelForCausalLM.from_pretrained(
        models.resolve(args.model), dtype=getattr(torch, args.dtype), trust_remote_code=False
    )
    model = model.to(args.device)
    drafts = {"ngram": "ngram", "small_model": first_layers(model, args.draft_layers)}
    engines = {
        name: Engine.from_pretrained(model, draft, "chain", memory="off")
        for name, draft in drafts.items()
    }
    plain = Comparison.plain(engines["ngram"])
    for seed in (None if seed == "greedy" else int(seed) for seed in args.seeds):
        options: dict[str, Any] = (
            {"temperature": 0.0} if seed is None else SAMPLING | {"seed": seed}
        )
        ways = [Way(PLAIN, lambda options=options: EngineDecoder(plain, options))]  # type: ignore[misc]
        ways += [
            _way(engine, f"{name}:{policy}", options)
            for name, engine in engines.items()
            for policy in POLICIES
        ]
        if seed is None:
            ends = plain.stream([0], max_new_tokens=1).options.eos_token_ids
            ways.append(baseline(GENERATE, plain, options, ends, "", LoadOptions()))
        run = Run(plain, ways, options, length=args.max_new_tokens, say=_say)
        own = [record for record in done if record.get("seed", "") == seed]
        yield from (record | {"seed": seed} for record in run.records(items, own))


def _way(engine: Engine, name: str, options: dict[str, Any]) -> Way:
    def start() -> EngineDecoder:
        policy, own = parse(name.partition(":")[2])
        assert engine.drafter is not None
        drafter = without_memory(engine.drafter)
        return EngineDecoder(
            Engine(engine.target, drafter, policies.make(policy, **own), engine.tokenizer), options
        )

    return Way(name, start)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _summary(records: list[Record], dtype: str) -> Record:
    rows = [record for record in records if record["record"] == "row" and record["way"] != PLAIN]
    verdicts = [row["verdict"] for row in rows]
    return {
        "record": "summary",
        "dtype": dtype,
        "runs": len(rows),
        "tokens": sum(row["new_tokens"] for row in rows),
        "verdicts": {verdict: verdicts.count(verdict) for verdict in VERDICTS},
    }


if __name__ == "__main__":
    raise SystemExit(main())
