"""Tests of how many programs Triton compiles: each takes 0.5 to 3 s on a device while somebody waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton: pip install -e '.[kernels]'")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
WIDTHS, VOCABULARY = (1, 8, 16, 32, 64), 128256  # padded rows of a level, columns of their logits
SERVING: list[list[Any]] = [
    *(["attention", 16, 4, 128, "bfloat16", None, None, slots] for slots in range(64, 20000, 1000)),
    *(
        ["selection", width, VOCABULARY, most, "bfloat16"]
        for width in WIDTHS
        for most in (33, 48, 60, 64)
    ),
    *(
        ["children", width, VOCABULARY, k, "bfloat16"]
        for width in WIDTHS
        for k in (1, 7, 10, 16, 31)
    ),
    *(
        ["entropy", width, VOCABULARY, top, False, "bfloat16"]
        for width in WIDTHS
        for top in (1, 16, 999, 1000)
    ),
    *(
        ["choice", nodes, VOCABULARY, sampled, "bfloat16"]
        for nodes in range(1, 65)
        for sampled in (False, True)
    ),
    *(["record", 64, longest, 64] for longest in (8, 14, 60)),
    *(["append", most, capacity] for most in (9, 12, 16) for capacity in (65, 100, 128)),
    *(["compaction", layers, heads, 128, "bfloat16"] for layers in (16, 32) for heads in (1, 7, 8)),
    *(["gather", width, 4096, "bfloat16"] for width in WIDTHS),
    *(["enter", width, 4096, "bfloat16"] for width in WIDTHS),
    *(["level", width, capacity] for width in (8, 5) for capacity in (769, 833)),
    *(
        ["rope", rows, 4, 128, "bfloat16", way]
        for rows in WIDTHS
        for way in ("", "stepwise", "normed")
    ),
    *(["norm", rows, 4096, "bfloat16", adds] for rows in (*WIDTHS, 1000) for adds in (False, True)),
    *(["gate", rows, 14336, "bfloat16"] for rows in (*WIDTHS, 1000)),
    *(
        ["packed", rows, outputs, 4096, kind, "bfloat16"]
        for rows in (*WIDTHS, 1000)
        for outputs in (1024, 6144, 28672)
        for kind in ("rows", "q4_k")
    ),
    *(["couple", rows, 32000, "bfloat16", True] for rows in WIDTHS),
    *(["couple", rows, VOCABULARY, "bfloat16", False] for rows in WIDTHS),
]
# of each kernel, for all of these together
SERVED = {
    "tree_attention._attend": 2,  # with splits and without
    "tree_attention._merge": 1,
    "candidate_selection._stats": 5,  # one for each width, as here
    "candidate_selection._filter": 5,
    "candidate_selection._rank": 1,
    "coupling._couple": 2,  # with a vocabulary of the draft's own and without
    "entropy._sums": 2,
    "entropy._count": 2,
    "entropy._split": 2,
    "entropy._add_up": 2,
    "top_children._outline": 2,
    "top_children._pick": 2,
    "top_children._place": 2,
    "kv_compaction._compact": 1,
    "verification._peak": 1,
    "verification._draw": 1,
    "verification._merge": 1,
    "verification._record": 1,
    "frontier._append": 1,
    "frontier._gather": 1,
    "frontier._rows": 1,
    "rms_norm._gather_norms": 1,
    "rope_store._rope_store": 3,
    "rms_norm._add_rms_norm": 2,
    "silu_mul._silu_mul": 1,
    "packed_linear._multiply": 12,  # codes of 8 and 4 bits, tiles of 16, 32 and 64 rows, whole and in splits
    "packed_linear._add_splits": 1,
}
# of random trees, however many, in float32
RANDOM = {
    "tree_attention._attend": 2,
    "tree_attention._merge": 1,
    "strict_attention._attend": 1,
    "strict_attention._add_up": 1,
    "candidate_selection._stats": 5,
    "candidate_selection._filter": 12,
    "candidate_selection._rank": 3,
    "coupling._couple": 6,
    "entropy._sums": 7,
    "entropy._count": 3,
    "entropy._split": 3,
    "entropy._add_up": 5,
    "top_children._outline": 4,
    "top_children._pick": 4,
    "top_children._place": 2,
    "kv_compaction._compact": 1,
    "verification._peak": 4,
    "verification._draw": 4,
    "verification._merge": 1,
    "verification._walk": 5,
    "verification._record": 5,
    "frontier._append": 9,
    "frontier._gather": 2,
    "frontier._rows": 4,
    "rms_norm._gather_norms": 2,
    "rope_store._rope_store": 3,
    "rms_norm._add_rms_norm": 4,
    "silu_mul._silu_mul": 3,
    "packed_linear._multiply": 26,  # of seven kinds, whole and in splits, with a bias and without
    "packed_linear._add_splits": 4,
    "recurrence._convolve": 8,
    "recurrence._recur": 12,  # of a tree and of a text, with the delta rule and without
    "recurrence._advance": 3,
}


def programs(cases: list[list[Any]]) -> dict[str, int]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [
        sys.executable,
        "-m",
        "tests.kernels.aot",
        "--programs",
        *(json.dumps(case) for case in cases),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("cases", "table"), [(SERVING, SERVED), ([["random_trees", 60]], RANDOM)])
def test_programs_of_each_kernel(cases: list[list[Any]], table: dict[str, int]) -> None:
    found = programs(cases)
    more = {name: count for name, count in found.items() if count > table.get(name, 0)}
    assert set(found) == set(table)
    assert not more, f"more than {table}"


def test_a_size_that_makes_programs_is_seen() -> None:
    """The counter can fail: rows of other lengths are cut otherwise."""
    assert programs(
        [["selection", 1, columns, 8, "float32"] for columns in (128, 1000, 1024, 4096)]
    ) != programs([["selection", 1, 128, 8, "float32"]])
