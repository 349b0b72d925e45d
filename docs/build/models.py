"""The table of model types by how they are served, from the sweep over all of transformers' causal LMs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specengine.files import read_text

VERDICTS = Path(__file__).parents[2] / "tests" / "sweep" / "verdicts.json"
NATIVE = "trees, native"  # whose list is on the page about CPUs
HOW = {
    "trees": "with trees",
    "trees, dense mask": "with trees, by the model's own attention",
    "trees by paths": "with trees, path by path on the model's own cache",
    "plainly": "plainly",
}


def models() -> str:
    """Return the model types by how they are served."""
    table: dict[str, Any] = json.loads(read_text(VERDICTS))
    rows = ["| on the C++ forward on a CPU, with trees | [its families](guide/cpu.md) |"]
    rows += [
        f"| {how} | {', '.join(f'`{kind}`' for kind, found in table['verdicts'].items() if found == verdict)} |"
        for verdict, how in HOW.items()
    ]
    others = [
        f"`{kind}`" for kind, found in table["verdicts"].items() if found not in {NATIVE, *HOW}
    ]
    rows.append(f"| not, or not tried | {', '.join(others)} |")
    source = f"Drawn from `tests/sweep/verdicts.json`: transformers {table['transformers']}, tiny random models."
    return "\n".join(["| served | model types |", "|---|---|", *rows, "", source])
