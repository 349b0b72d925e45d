"""Time to the first token and memory of long prompts, and of the turn after them.

    python -m bench.real.contexts MODEL [--lengths 4096 16384 32000] [--out FILE]
    python -m bench.real.contexts MODEL --lengths 8 512 4096 --prompts prompts.jsonl
    specengine bench --prompts prompts.jsonl --way peer:llama.cpp --model MODEL

Each length is a session in a process of its own: a prompt of so many tokens, which are the sources of this package and
a question about them, then a second question. Both answers are greedy. The prompt's seconds are of its whole answer's
first token, so they hold what the draft reads too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import specengine
from bench.provenance import show
from bench.real.memory import sizes, weights
from specengine.engine import Engine
from specengine.files import write_whole

TOKENS = 64  # of each answer
QUESTIONS = (
    "What does this code do? Name its three main parts.",
    "Which part would you test first?",
)


def sources() -> str:
    """Return the Python files of the package, one after the other."""
    files = sorted(Path(specengine.__file__).parent.rglob("*.py"))
    return "\n\n".join(file.read_text("utf-8") for file in files)


def prompt_of(tokenizer: Any, length: int) -> str:
    """Return a prompt of some `length` tokens and a question."""
    ids = tokenizer(sources()[: 8 * length], add_special_tokens=False)["input_ids"][:length]
    return f"{tokenizer.decode(ids)}\n\n{QUESTIONS[0]}"


def measured(model: str, length: int) -> dict[str, Any]:
    """Return seconds, tokens per second and bytes of a session that begins with a prompt of so many tokens."""
    engine = Engine.from_pretrained(model)
    prompt = prompt_of(engine.tokenizer, length)
    session = engine.session()
    turns = []
    for text in (prompt, QUESTIONS[1]):
        stats = session.generate(text, max_new_tokens=TOKENS, temperature=0.0).stats
        after = stats.elapsed_s - stats.ttft_s
        turns.append(
            {
                "prompt_tokens": stats.num_prompt_tokens,
                "cached": stats.num_cached_prompt_tokens,
                "first_token_s": round(stats.ttft_s, 3),
                "tokens_per_second": round((stats.num_generated_tokens - 1) / after, 1),
            }
        )
    return {
        "record": "long prompt",
        "model": Path(model).name,
        "backend": engine.target.backend,
        "turns": turns,
        "file_bytes": weights(model),
        "resident": sizes()["resident"],
    }


def records(model: str, lengths: list[int]) -> Iterator[dict[str, Any]]:
    """Yield what a process of each length has measured."""
    for length in lengths:
        command = [sys.executable, "-m", __spec__.name, model, "--in-process", str(length)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        yield json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.real.contexts", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 32000])
    parser.add_argument("--in-process", type=int, help="measure this length alone, here")
    parser.add_argument("--prompts", type=Path, help="write the prompts there, and measure nothing")
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args(arguments)
    if args.prompts is not None:
        tokenizer = Engine.from_pretrained(args.model).tokenizer
        lines = [
            {"question_id": length, "turns": [prompt_of(tokenizer, length)]}
            for length in args.lengths
        ]
        write_whole(args.prompts, "".join(json.dumps(line) + "\n" for line in lines))
    elif args.in_process is not None:
        print(json.dumps(measured(args.model, args.in_process)))
    else:
        show(records(args.model, args.lengths), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
