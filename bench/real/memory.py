"""Resident memory of one way that answers one prompt: python -m bench.real.memory MODEL WAY PROMPT TOKENS."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from specengine.benchmark.ways import PLAIN, Spec
from specengine.engine import Engine


def resident() -> int:
    """Return the bytes that are resident now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def main(arguments: list[str]) -> int:
    model, way, prompt, tokens = arguments
    spec = Spec.of(way)
    policy = PLAIN if spec.policy == PLAIN else spec.make()
    engine = Engine.from_pretrained(model, spec.draft, policy)
    loaded = resident()
    engine.generate(prompt, max_new_tokens=int(tokens), temperature=0.0)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"loaded_bytes": loaded, "answered_bytes": resident(), "peak_bytes": peak}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
