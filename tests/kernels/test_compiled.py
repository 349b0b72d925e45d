"""Every shipped configuration compiled for sm_90 as the launchers launch it: spills, room, tensor cores, loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.cards import ATTENTION, NODES, REST, ROOM, compiled

triton = pytest.importorskip("triton", reason="needs triton: pip install -e '.[kernels]'")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all((TOOLS / tool).exists() for tool in ("ptxas", "cuobjdump", "nvdisasm")),
        reason="needs the CUDA tools of triton's wheel",
    ),
]
# Triton 3.7 reserves a byte in some kernels; that no instruction touches it, the count of spills says
SINCE_3_7 = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
UNTOUCHED_STACK = 8 if SINCE_3_7 else 0
# Tiles were chosen with 3.6. In shapes that are not shipped 3.7 moves up to four registers to memory and back
FEW_SPILLS = 8 if SINCE_3_7 else 0
# 128 rows of 128 do not fit into 4 warps
SPILLING = ["attention", 64, 4, 128, "bfloat16", 1, [128, 64, 4, 2]]
FULL = {
    **{
        t: [["attention", n, 4, d, t] for n in NODES for d in (64, 80, 96, 256)]
        for t in ("bfloat16", "float16")
    },
    "rest": [
        *(
            ["attention", 64, 4, size, "float32", splits]
            for size in (64, 80, 128, 256)
            for splits in (1, 4)
        ),
        *(
            ["attention", 64, groups, 128, "bfloat16", splits]
            for groups in (1, 3, 7, 8)
            for splits in (1, 16)
        ),
        *(["strict", 4, size, t] for size in (64, 80, 128, 256) for t in ("bfloat16", "float32")),
        *(["strict", groups, 128, "float16"] for groups in (1, 7, 8)),
        *(
            ["selection", w, v, 256, t]
            for w in (1, 16, 64)
            for v in (32000, 151936)
            for t in ("float16", "float32")
        ),
        *(
            ["children", w, v, 32, t]
            for w in (1, 16, 64)
            for v in (32000, 151936)
            for t in ("float16", "float32")
        ),
        *(
            ["entropy", w, v, 1000, False, t]
            for w in (1, 16)
            for v in (32000, 151936)
            for t in ("float16", "float32")
        ),
        *(["compaction", 32, 8, size, t] for size in (80, 256) for t in ("bfloat16", "float32")),
    ],
}


def check(kernels: list[dict[str, Any]], cases: list[list[Any]], spills: int = 0) -> None:
    assert {json.dumps(kernel["case"]) for kernel in kernels} == {
        json.dumps(case) for case in cases
    }
    for kernel in kernels:
        assert kernel["spills"] <= spills, kernel
        assert kernel["stack"] <= UNTOUCHED_STACK + 4 * spills, kernel
        assert kernel["shared"] <= ROOM["sm_90"], kernel
        name, half = kernel["kernel"], "float32" not in kernel["case"]
        if name == "_attend":
            case, nodes, groups = kernel["case"][:3]
            rows = 64 if case == "strict" else nodes * groups
            assert kernel["async_16_bytes"], kernel
            assert not half or (kernel["wgmma"] if rows > 32 else kernel["mma"]), kernel
        wide = ("_stats", "_filter", "_compact", "_sums", "_count", "_split", "_outline", "_pick")
        if name in (*wide, "_add_rms_norm", "_gather_norms", "_silu_mul"):
            assert kernel["load_16_bytes"], kernel


@pytest.fixture(scope="module")
def shipped() -> list[dict[str, Any]]:
    return compiled([*ATTENTION, *REST, SPILLING])


def test_shipped_configurations(shipped: list[dict[str, Any]]) -> None:
    check([kernel for kernel in shipped if kernel["case"] != SPILLING], ATTENTION + REST)


def test_strict_sums_of_shared_and_own_tiles_are_one_program(shipped: list[dict[str, Any]]) -> None:
    """Two that mean the same may be compiled to other roundings."""
    for case in (case for case in REST if case[0] == "strict"):
        launched = [
            kernel for kernel in shipped if kernel["case"] == case and kernel["kernel"] == "_attend"
        ]
        assert [kernel["grid"][0] for kernel in launched][1] == 64
        assert len({kernel["code"] for kernel in launched}) == 1


def test_the_check_sees_spills(shipped: list[dict[str, Any]]) -> None:
    assert [kernel["spills"] > 0 for kernel in shipped if kernel["case"] == SPILLING] == [True]


@pytest.mark.parametrize("part", FULL)  # so that processes can share them
def test_all_head_sizes_groups_and_types(part: str) -> None:
    check(compiled(FULL[part]), FULL[part], FEW_SPILLS)
