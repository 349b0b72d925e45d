"""The table of model types by how they are served, from the sweep over all of transformers' language models."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

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
    verdicts = table["verdicts"]
    causal = {kind: verdict for kind, verdict in verdicts.items() if kind in CAUSAL}
    rows += [
        f"| {how} | {', '.join(f'`{kind}`' for kind, served in causal.items() if served == verdict)} |"
        for verdict, how in HOW.items()
    ]
    others = [f"`{kind}`" for kind, served in causal.items() if served not in {NATIVE, *HOW}]
    rows.append(f"| not, or not tried | {', '.join(others)} |")
    pictures = Counter(verdicts[kind] for kind in verdicts.keys() - causal.keys())
    drafted = sum(count for verdict, count in pictures.items() if verdict.startswith("trees"))
    plainly = pictures["plainly"]
    others_too = pictures.total() - drafted - plainly
    rows.append(
        f"| with pictures too | {drafted} with trees, {plainly} plainly, {others_too} not |"
    )
    source = f"Drawn from `tests/sweep/verdicts.json`: transformers {table['transformers']}."
    return "\n".join(["| served | model types |", "|---|---|", *rows, "", source])
