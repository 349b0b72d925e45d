"""Every shipped program on every card: it fits, needs no more than cards.json says, and orders what it shares.

`make test` compiles the programs of the largest tiles for the two cards with the least room, `make test-all` the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels import cards
from tests.kernels.cards import ROOM, SHIPPED, compiled, more, needs, table

pytest.importorskip("triton", reason="needs triton: pip install -e '.[kernels]'")
import triton
from specengine_kernels import tree_attention

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
compiles = pytest.mark.skipif(
    not all((TOOLS / tool).exists() for tool in ("ptxas", "cuobjdump", "nvdisasm")),
    reason="needs the CUDA tools of triton's wheel",
)
VERSION = "triton " + ".".join(triton.__version__.split(".")[:2])
LARGEST = [["attention", 64, 4, size, "bfloat16"] for size in (128, 256)]
OF_ONE_LANE = ("_add_up",)  # what it makes of its sums is one number a row, which one lane stores
H100 = tree_attention.Tiles(128, 64, 8, 3)


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("card", ["sm_86", "gfx942"])
def test_heads_of_128_and_256_channels_fit_the_smallest_cards(card: str) -> None:
    programs = compiled(LARGEST, card)
    assert {program["case"][3] for program in programs} == {128, 256}
    assert not [
        program for program in programs if program["shared"] > ROOM[card] or program["spills"]
    ]


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("card", ROOM)
def test_programs_of_a_card(card: str) -> None:
    programs = compiled(SHIPPED, card)
    assert not more(needs(programs), table().get(VERSION, {}).get(card, {}), ROOM[card])
    assert not [program for program in programs if program["races"]]
    assert not [
        each for each in programs if each.get("lopsided") and each["kernel"] not in OF_ONE_LANE
    ]


@pytest.mark.slow
@pytest.mark.skipif(cards.nvcc() is None, reason="needs nvcc, of the CUDA toolkit")
@pytest.mark.parametrize("card", [card for card in ROOM if card.startswith("sm_")])
def test_programs_of_the_library(card: str) -> None:
    assert not more(
        cards.needs_of_library(card),
        table().get(cards.nvcc_version(), {}).get(card, {}),
        ROOM[card],
    )


def test_what_needs_more_than_the_table_says_is_seen() -> None:
    held = {"_walk walk 64": [30, 0, 0, 512]}
    assert not more({"_walk walk 64": [29, 0, 0, 512]}, held, 1024)
    for numbers, room in (
        ([31, 0, 0, 512], 1024),
        ([30, 8, 0, 512], 1024),
        ([30, 0, 2, 512], 1024),
        ([30, 0, 0, 8], 4),
    ):
        assert len(more({"_walk walk 64": numbers}, held, room)) == 1
    assert "--write" in more({"_walk walk 65": [1, 0, 0, 0]}, held, 1024)[0]
    assert not more({"_walk walk 65": [1, 0, 0, 0]}, {}, 1024)


def test_the_table_holds_the_tried_versions_and_all_cards() -> None:
    assert {"triton 3.6", "triton 3.7"} <= set(table())
    for version, found in table().items():
        assert set(found) == {
            card for card in ROOM if card.startswith("sm_") or version.startswith("triton")
        }
        assert (
            len({frozenset(programs) for programs in found.values()}) == 1
        )  # on each the same programs
        for card, programs in found.items():
            assert all(shared <= ROOM[card] for *_, shared in programs.values())


@pytest.mark.slow
@compiles
@pytest.mark.parametrize(
    ("fault", "module", "words", "case"),
    [
        ("races", "frontier", "tl.debug_barrier()", ["append", 60, 256]),
        ("races", "kv_compaction", "tl.debug_barrier()", ["compaction", 32, 8, 128, "bfloat16"]),
        ("lopsided", "top_children", "**EVEN,", ["children", 3, 5003, 10, "float32"]),
    ],
)
def test_a_fault_is_seen(
    fault: str, module: str, words: str, case: list[Any], tmp_path: Path
) -> None:
    """The programs without what they have against it: a count is loaded and stored, rows are moved in place, lanes sum.

    With it two calls gave log-probabilities that differed in their last bit: a key met another lane each time.
    """
    folder = tmp_path / "specengine_kernels"
    folder.mkdir()
    for source in Path(tree_attention.__file__).parent.glob("*.py"):
        text = source.read_text()
        less = text.replace(words, "pass" if fault == "races" else "")
        (folder / source.name).write_text(less if source.stem == module else text)
    program = (
        f"from tests.kernels import aot; from specengine_kernels import {module}; "
        f"print({module}.__file__); aot.main()"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(cards.ROOT)]),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(case)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    where, *programs = done.stdout.splitlines()
    assert Path(where).parent == folder
    assert any(json.loads(line)[fault] for line in programs)
    assert not any(program[fault] for program in compiled([case]))


def test_tiles_follow_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 keeps its own, and so does a machine without a device; a card is asked once."""
    asked = []

    def properties(device: torch.device) -> Any:
        asked.append(device)
        optin = {0: 232448, 1: 101376, 2: 166912, 3: 0}[device.index or 0]
        return SimpleNamespace(shared_memory_per_block_optin=optin, shared_memory_per_block=65536)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    tree_attention.shared_bytes.cache_clear()

    def tiles(place: str, rows: int = 256, size: int = 128) -> tree_attention.Tiles:
        return tree_attention.tiles_for(
            rows, size, torch.bfloat16, tree_attention.shared_bytes(torch.device(place))
        )

    assert tiles("cpu") == tiles("cuda:0") == H100
    assert (
        tiles("cuda:1") == tiles("cuda:2") == tiles("cuda:3") == (128, 32, 8, 3)
    )  # the last says no more than 64 KB
    assert tiles("cuda:1", size=256) == (64, 16, 8, 3)
    assert tiles("cuda:0", size=256) == (64, 32, 8, 3)
    assert tiles("cuda:0", 64) == (64, 64, 4, 2)
    assert tiles("cuda:1", 64) == (64, 32, 4, 3)
    assert len(asked) == 4
    tree_attention.shared_bytes.cache_clear()
