"""The simulation of a forward on more cores: what it deals out, and its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from bench.cpu import cores

MEMORY = cores.Memory(bandwidth=60.0, of_core=20.0, slow=0.4, barrier=1.0, each=0.2)


@given(panels=st.integers(1, 20_000), threads=st.integers(1, 64))
def test_pieces_are_all_panels(panels: int, threads: int) -> None:
    pieces = cores.pieces_of(panels, threads)
    assert sum(pieces) == panels
    assert min(pieces) >= 1
    assert len(pieces) <= max(threads * cores.PIECES, panels)


@given(
    panels=st.integers(1, 2000),
    speeds=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=16),
)
def test_a_stage_takes_as_long_as_its_bytes_and_a_late_piece_at_most(
    panels: int, speeds: list[float]
) -> None:
    pieces = cores.pieces_of(panels, len(speeds))
    least = panels * 1e9 / (sum(speeds) * 1e9)
    seconds = cores.stage(panels, 1e9, speeds, steals=True)
    assert seconds >= least * (1 - 1e-9)
    assert seconds <= least + max(pieces) / min(speeds) * (1 + 1e-9)
    assert cores.stage(panels, 1e9, speeds, steals=False) >= least * (1 - 1e-9)


def test_slow_cores_hold_up_equal_shares_alone() -> None:
    rates = MEMORY.rates((1.0,) * 4 + (0.0,) * 4)
    assert sum(rates) == pytest.approx(60.0)
    stolen, equal = (cores.forward(MEMORY, rates, steals=steals) for steals in (True, False))
    assert stolen < 1.15 * cores.forward(MEMORY, MEMORY.rates((1.0,) * 8), steals=True)
    assert equal > 1.5 * stolen


def test_one_core_reads_all_weights_at_its_rate() -> None:
    milliseconds = cores.forward(MEMORY, MEMORY.rates((1.0,)), steals=True)
    assert milliseconds == pytest.approx(cores._bytes() / 20e9 * 1000)
