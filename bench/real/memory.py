"""Memory of a process that loads a model and answers one prompt.

    python -m bench.real.memory MODEL WAY PROMPT TOKENS [--out FILE]

Each record has the resident bytes, and those of them that are anonymous: the rest are pages of files that processes
share, mostly libraries. It has them before there is a model, after loading and after the answer, and the peak. Shares
are of the model's file: `whole_share` of the process, `model_share` without what the imports take.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from bench.provenance import show
from specengine.benchmark.ways import PLAIN, Spec
from specengine.engine import Engine


def sizes() -> dict[str, int]:
    """Return the bytes that are resident now, those that are anonymous, and the most that were resident. Linux only."""
    names = {"VmRSS": "resident", "RssAnon": "anonymous", "VmHWM": "peak"}
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return {short: 1024 * int(values[name].split()[0]) for name, short in names.items()}


def weights(model: str) -> int:
    """Return the bytes of a model's file, or of the weights in its folder."""
    path = Path(model)
    return sum(
        part.stat().st_size for part in (path.glob("*.safetensors") if path.is_dir() else [path])
    )


def measured(model: str, way: str, prompt: str, tokens: int) -> dict[str, Any]:
    """Return the sizes by stage, in bytes, and their shares of the model's file."""
    spec = Spec.of(way)
    policy = PLAIN if spec.policy == PLAIN else spec.make()
    imported = sizes()
    engine = Engine.from_pretrained(model, spec.draft, policy)
    loaded = sizes()
    engine.generate(prompt, max_new_tokens=tokens, temperature=0.0)
    answered = sizes()
    file = weights(model)
    return {
        "record": "memory of a file",
        "model": Path(model).name,
        "way": way,
        "tokens": tokens,
        "file_bytes": file,
        "backend": engine.target.backend,
        "imported": imported,
        "loaded": loaded,
        "answered": answered,
        "peak_bytes": answered["peak"],
        "whole_share": round(answered["resident"] / file, 3),
        "anonymous_share": round(answered["anonymous"] / file, 3),
        "model_share": round((answered["resident"] - imported["resident"]) / file, 3),
        "peak_share": round(answered["peak"] / file, 3),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.real.memory", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("model")
    parser.add_argument("way")
    parser.add_argument("prompt")
    parser.add_argument("tokens", type=int)
    parser.add_argument("--out", type=Path, help="result file")
    args = parser.parse_args(arguments)
    show([measured(args.model, args.way, args.prompt, args.tokens)], args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
