"""Overhead: plain decoding compared with transformers' `generate`, time outside the models, peak memory.

Everything is measured in one run, interleaved, and reported as medians over rounds. Memory is the peak resident set
while one long prompt is answered (Linux only), weights included; each way gets a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench import provenance, workloads
from bench.arguments import add_arguments
from bench.short_models import first_layers
from specengine import Engine, checkpoints as models
from specengine.benchmark.ways import EngineDecoder, Generate, WayDecoder

GREEDY = {"temperature": 0.0}
PARAGRAPH = workloads.BUILT_IN["edit"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "model", "dtype", "max_new_tokens", "out", device="cpu", rounds=5)
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 1500])
    parser.add_argument("--memory-context", type=int, default=2000)
    parser.add_argument(
        "--memory-of", choices=["plain", "ngram", "small_model"], help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.memory_of:
        print(_peak_memory(args))
        return
    provenance.show(_records(args), args.out)


def _records(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    yield from _speed(args)
    yield from _host_share(args)
    if args.device == "cpu":
        yield from _memory(args)


def _load(args: argparse.Namespace) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        models.resolve(args.model), dtype=getattr(torch, args.dtype), trust_remote_code=False
    )
    return model.to(args.device)


def _prompt(engine: Engine, length: int) -> list[int]:
    ids = engine.tokenizer(PARAGRAPH)["input_ids"]
    return (ids * (length // len(ids) + 1))[:length]


def _speed(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model = _load(args)
    plain = Engine.from_pretrained(model, policy="plain")
    tokens = args.max_new_tokens
    for context in args.contexts:
        prompt = _prompt(plain, context)
        ways: dict[str, WayDecoder] = {
            "huggingface": Generate(model, GREEDY, [], min_new_tokens=tokens),
            "plain": EngineDecoder(plain, GREEDY | {"eos_token_id": []}),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for round_ in range(args.rounds + 1):
            for name, answer in ways.items():
                taken = answer(prompt, tokens).seconds
                if round_:  # the first round warms up
                    seconds[name].append(taken)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        ratios = [a / b for a, b in zip(seconds["huggingface"], seconds["plain"], strict=True)]
        yield {
            "record": "plain against huggingface",
            "context": context,
            "new_tokens": tokens,
            "dtype": args.dtype,
            "tokens_per_second": {
                name: round(tokens / value, 2) for name, value in medians.items()
            },
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }


def _host_share(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model = _load(args)
    drafts = {"ngram": lambda: "ngram", "small_model": lambda: first_layers(model, 4)}
    policies = ("chain", "fixed", "eagle", None)
    settings = [("plain", "none"), *((policy, draft) for draft in drafts for policy in policies)]
    for policy, draft in settings:
        engine = Engine.from_pretrained(
            model, drafts[draft]() if draft != "none" else None, policy, memory="off"
        )
        for sampling in (
            {},
            {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 0},
        ):
            result = engine.generate(
                PARAGRAPH, max_new_tokens=args.max_new_tokens, eos_token_id=[], **sampling
            )
            stats = result.stats
            yield {
                "record": "time outside the models",
                "policy": stats.policy or "plain",
                "draft": draft,
                "sampling": bool(sampling),
                "dtype": args.dtype,
                "median_host_share": round(stats.median_host_share, 4),
                "ms_per_cycle": {
                    part: round(1e3 * getattr(stats, f"time_{part}_s") / stats.num_spec_steps, 3)
                    for part in ("draft", "policy", "verify", "walk", "commit", "model", "host")
                },
                "verified_nodes": round(stats.num_spec_tokens + 1, 2),
                "mean_acceptance_length": round(stats.mean_acceptance_length, 3),
            }


def _memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    peaks = {}
    for way in ("plain", "ngram", "small_model"):
        command = [
            sys.executable,
            "-m",
            "bench.overhead",
            "--memory-of",
            way,
            "--dtype",
            args.dtype,
        ]
        command += ["--memory-context", str(args.memory_context)] + (
            ["--model", args.model] if args.model else []
        )
        peaks[way] = int(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
        )
    ratios = {way: round(peak / peaks["plain"], 3) for way, peak in peaks.items()}
    return [
        {
            "record": "peak memory",
            "context": args.memory_context,
            "kib": peaks,
            "ratio_to_plain": ratios,
        }
    ]


def _peak_memory(args: argparse.Namespace) -> int:
    """Return the peak resident set in KiB while loading the model and answering one long prompt."""
    model = _load(args)
    draft = {"plain": None, "ngram": "ngram", "small_model": None}[args.memory_of]
    policy = "plain" if args.memory_of == "plain" else None
    if args.memory_of == "small_model":
        draft = first_layers(model, 4)
    engine = Engine.from_pretrained(model, draft, policy, memory="off")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading the weights
    engine.generate(_prompt(engine, args.memory_context), max_new_tokens=64, eos_token_id=[])
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


if __name__ == "__main__":
    main()
