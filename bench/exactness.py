"""Exactness: speculative output against plain decoding, token for token, over policies, drafts and seeds.

Greedy output is compared with Hugging Face `generate(do_sample=False)`, sampled output with plain sampling under
the same seed. In float32 every difference counts; in lower precision each first difference is certified as a near-tie
of the target's logits or reported as a mismatch. Every finished row is kept, so a stopped run can be resumed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench import provenance, workloads
from specengine import Engine, checking
from specengine import checkpoints as models
from specengine.drafters.small_model import first_layers

POLICIES: dict[str, dict[str, Any]] = {
    "chain": {"length": 3},
    "eagle": {"width": 3, "expansions": 2, "budget": 10},
    "fixed": {"branching": (3, 2)},
}
SAMPLING = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--prompts", type=Path, help="folder of .jsonl prompt sets; default: a few built-in prompts")
    parser.add_argument("--per-set", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--seeds", nargs="*", default=["greedy", "0", "1", "2"], help="greedy, and seeds to sample with"
    )
    parser.add_argument("--draft-layers", type=int, default=2, help="first layers of the target used as small_model")
    parser.add_argument("--out", type=Path, default=Path("exactness.jsonl"))
    args = parser.parse_args()

    path = models.resolve(args.model)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype)).to(args.device)
    engines = _engines(model, args.draft_layers)
    partial = args.out.with_suffix(provenance.ROWS)
    rows = [json.loads(line) for line in partial.read_text().splitlines()] if partial.exists() else []
    done = {_key(row) for row in rows}
    prompts = workloads.read(args.prompts, args.per_set)
    partial.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("a") as log:
        for seed in (None if seed == "greedy" else int(seed) for seed in args.seeds):
            for item in prompts:
                for row in _compare(engines, item, seed, args.max_new_tokens, done):
                    rows.append(row)
                    log.write(json.dumps(row) + "\n")
                    log.flush()
    provenance.write(args.out, [_summary(rows, args.dtype), *rows])  # and the partial file goes
    print(json.dumps(_summary(rows, args.dtype), indent=1))
    return 1 if any(row["verdict"] == "mismatch" for row in rows) else 0


def _engines(model: PreTrainedModel, layers: int) -> dict[tuple[str, str], Engine]:
    engines = {("plain", "none"): Engine.from_pretrained(model, policy="plain")}
    for policy, options in POLICIES.items():
        for name, draft in (("ngram", "ngram"), ("small_model", first_layers(model, layers))):
            engines[policy, name] = Engine.from_pretrained(model, draft, policy, policy_options=options)
    return engines


def _compare(
    engines: dict[tuple[str, str], Engine], item: workloads.Workload, seed: int | None, length: int, done: set[Any]
) -> Iterator[dict[str, Any]]:
    wanted = [key for key in engines if (item.set, item.id, *key, seed) not in done]
    if seed is not None:
        wanted = [key for key in wanted if key[0] != "plain"]
    if not wanted:
        return
    plain = engines["plain", "none"]
    options: dict[str, Any] = {"max_new_tokens": length}
    if seed is not None:
        options |= SAMPLING | {"seed": seed}
    prompt = plain.stream(item.text, **options).prompt
    expected = plain.generate(prompt, **options).token_ids if seed is not None else _huggingface(plain, prompt, length)
    for policy, draft in wanted:
        began = time.perf_counter()
        certificate = checking.certify(plain, engines[policy, draft], prompt, reference=expected, **options)
        row = {
            "record": "row",
            "set": item.set,
            "id": item.id,
            "policy": policy,
            "draft": draft,
            "seed": seed,
            "tokens": len(expected),
            "differences": _differences(expected, certificate.answer.token_ids),
            "verdict": certificate.verdict,
            "position": certificate.position,
            "gap": certificate.gap,
            "mean_acceptance_length": round(certificate.answer.stats.mean_acceptance_length, 3),
            "seconds": round(time.perf_counter() - began, 2),
        }
        print(*row.values(), file=sys.stderr, flush=True)
        yield row


def _huggingface(plain: Engine, prompt: list[int], length: int) -> list[int]:
    ids = torch.tensor([prompt], device=plain.target.device)
    out = plain.target.model.generate(  # type: ignore[attr-defined]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


def _differences(expected: list[int], got: list[int]) -> int:
    longer = max(len(expected), len(got))
    return longer - sum(a == b for a, b in zip(expected, got, strict=False))


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["set"], row["id"], row["policy"], row["draft"], row["seed"]


def _summary(rows: list[dict[str, Any]], dtype: str) -> dict[str, Any]:
    verdicts = [row["verdict"] for row in rows]
    return {
        "record": "summary",
        "dtype": dtype,
        "runs": len(rows),
        "tokens": sum(row["tokens"] for row in rows),
        "differing_tokens": sum(row["differences"] for row in rows),
        "verdicts": {verdict: verdicts.count(verdict) for verdict in ("exact", "near-tie", "mismatch")},
    }


if __name__ == "__main__":
    raise SystemExit(main())
