"""Compare whole answers, and the time to the first token, with other CPU engines on one GGUF file.

Every engine runs in a process of its own and answers the same token ids in turn, so that load on the machine meets all
of them. Answers are greedy and all of one length.

    python -m bench.cpu.peers --python llama_cpp ENV/bin/python --python openvino ENV/bin/python [--prompts FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import provenance, workloads
from bench.arguments import add_arguments
from bench.cpu.answers import fresh
from bench.cpu.peer import Peer
from specengine import Engine
from specengine.checkpoints import embedded

SCRIPT = Path(__file__).with_name("peer_answers.py")
PEERS = ("llama_cpp", "openvino", "transformers")
PLAIN, AUTO = "specengine, plain", "specengine, auto"
Record = dict[str, Any]
Way = Callable[[list[int], int], tuple[list[int], float]]


def answer(peer: Peer, way: str, ids: list[int], tokens: int) -> tuple[list[int], float]:
    """Return another engine's answer and its seconds."""
    found = peer.ask(json.dumps({"ids": ids, "tokens": tokens, "way": way}))
    return found["ids"], found["seconds"]


class Own:
    """Ways of this engine. An answer has no earlier one's cached tokens, and a round not what an earlier one learnt."""

    def __init__(self, file: Path | None) -> None:
        self._engine = Engine.from_pretrained(None if file is None else str(file), memory="off")
        self.tokenizer: Any = self._engine.tokenizer
        self.backend = self._engine.target.backend
        self._plain = Engine(self._engine.target, None, None, self.tokenizer)
        self.renew()

    def renew(self) -> None:
        """Start a round."""
        self._auto = fresh(self._engine)

    @property
    def ways(self) -> dict[str, Way]:
        return {
            PLAIN: lambda *given: _timed(self._plain, *given),
            AUTO: lambda *given: _timed(self._auto, *given),
        }


def _timed(engine: Engine, ids: list[int], tokens: int) -> tuple[list[int], float]:
    engine.reset()
    began = time.perf_counter()
    result = engine.generate(ids, max_new_tokens=tokens, eos_token_id=[])
    return list(result.token_ids), time.perf_counter() - began


def compared(
    ways: dict[str, Way],
    prompts: list[tuple[str, list[int]]],
    tokens: int,
    rounds: int,
    renew: Callable[[], None],
) -> Iterator[Record]:
    """Yield a record per prompt, seconds being medians over the rounds, then one over all prompts."""
    seconds: dict[tuple[str, str], list[float]] = {}
    answers: dict[tuple[str, str], list[int]] = {}
    for turn in range(rounds):
        renew()
        for number, (name, ids) in enumerate(prompts):
            for way in list(ways) if (turn + number) % 2 == 0 else list(ways)[::-1]:
                answers[name, way], spent = ways[way](ids, tokens)
                seconds.setdefault((name, way), []).append(spent)
    rates: dict[str, dict[str, float]] = {}
    for name, ids in prompts:
        medians = {way: statistics.median(seconds[name, way]) for way in ways}
        rates[name] = {way: len(answers[name, way]) / spent for way, spent in medians.items()}
        yield {
            "record": "answer",
            "prompt": name,
            "prompt_tokens": len(ids),
            "tokens_per_second": {way: round(rate, 2) for way, rate in rates[name].items()},
            "same_as_plain": {
                way: _common(answers[name, PLAIN], answers[name, way]) for way in ways
            },
        }
    yield {
        "record": "summary",
        "prompts": len(prompts),
        "tokens": tokens,
        "tokens_per_second": {
            way: round(statistics.harmonic_mean(r[way] for r in rates.values()), 2) for way in ways
        },
        "auto_over": {
            way: round(statistics.median(r[AUTO] / r[way] for r in rates.values()), 3)
            for way in ways
        },
        "least_auto_over_plain": round(min(r[AUTO] / r[PLAIN] for r in rates.values()), 3),
    }


def _common(first: list[int], second: list[int]) -> int:
    """Return the number of tokens before two answers differ."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )


def records(args: argparse.Namespace) -> Iterator[Record]:
    torch.set_num_threads(args.threads)
    file = args.file or embedded.gguf()
    own = Own(args.file)
    ways, peers = own.ways, []
    for name, python in args.python:
        try:
            peers.append(
                peer := Peer(
                    name, [python, str(SCRIPT), name, str(file), "--threads", str(args.threads)]
                )
            )
        except RuntimeError as error:
            yield {"record": "skipped", "engine": name, "reason": str(error)}
            continue
        for way in peer.about:
            ways[f"{name}, {way}"] = partial(answer, peer, way)
    yield {
        "record": "settings",
        "file": Path(file).name,
        "backend": own.backend,
        "threads": args.threads,
    }
    read = workloads.read(args.prompts, args.per_set)
    prompts = [(f"{item.set}/{item.id}", _ids(own.tokenizer, item.text)) for item in read]
    for run in ways.values():
        run(prompts[0][1], args.max_new_tokens)
    yield from compared(ways, prompts, args.max_new_tokens, args.rounds, own.renew)
    first = {way: run for way, run in ways.items() if "lookup" not in way and way != AUTO}
    for count in args.prompt_tokens:
        seconds: dict[str, list[float]] = {way: [] for way in first}
        for turn in range(args.first_rounds):
            # an engine may keep the last prompt
            ids = [(token + 1 + turn) % 1000 + 300 for token in range(count)]
            for way, run in first.items():
                seconds[way].append(run(ids, 1)[1])
        medians = {way: round(statistics.median(spent), 4) for way, spent in seconds.items()}
        over = {way: round(medians[PLAIN] / spent, 3) for way, spent in medians.items()}
        yield {
            "record": "first token",
            "prompt_tokens": count,
            "seconds": medians,
            "specengine_over": over,
        }
    for peer in peers:
        peer.stop()


def _ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a user's message, or of a text to go on with if the file has no chat template."""
    if tokenizer.chat_template is None:
        return list(tokenizer(text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(found, add_special_tokens=False)["input_ids"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu.peers", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--file", type=Path, help="a GGUF file; default: the embedded model's, with its head"
    )
    parser.add_argument(
        "--python",
        nargs=2,
        action="append",
        default=[],
        metavar=("ENGINE", "PYTHON"),
        help=f"another engine and its Python: {', '.join(PEERS)}",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--prompt-tokens", type=int, nargs="*", default=[500, 1433, 5005], help="for first tokens"
    )
    parser.add_argument("--first-rounds", type=int, default=3, help="rounds of first tokens")
    add_arguments(parser, "prompts", "max_new_tokens", "out", per_set=2, rounds=2)
    args = parser.parse_args(arguments)
    if unknown := {name for name, _ in args.python} - set(PEERS):
        parser.error(f"--python: got {', '.join(sorted(unknown))}, accepted {', '.join(PEERS)}")
    provenance.show(records(args), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
