"""The processors that `--threads auto` counts, on trees as Linux describes machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from specengine import cli, replicas
from specengine.cli.commands import make_parser
from specengine.replicas import performance_cores


def machine(
    folder: Path, siblings: list[str], capacities: list[int] | None = None, listed: str = ""
) -> Path:
    """Write what Linux says of processors; siblings: of each the threads of its core."""
    for number, text in enumerate(siblings):
        place = folder / f"system/cpu/cpu{number}"
        (place / "topology").mkdir(parents=True)
        (place / "topology/thread_siblings_list").write_text(f"{text}\n")
        if capacities:
            (place / "cpu_capacity").write_text(f"{capacities[number]}\n")
    if listed:
        (folder / "cpu_core").mkdir()
        (folder / "cpu_core/cpus").write_text(f"{listed}\n")
    return folder


PAIRS = ["0-1", "0-1", "2-3", "2-3"]
HYBRID = [*PAIRS, "4", "5", "6", "7"]  # two performance cores of two threads, four others
MACHINES: dict[str, tuple[list[str], list[int] | None, str, int, int]] = {
    # siblings, capacities, list of performance cores, processors that may be used (0: all), cores
    "plain": (["0", "1"], None, "", 0, 2),
    "threads of a core": (PAIRS, None, "", 0, 2),
    "far siblings": (["0,2", "1,3", "0,2", "1,3"], None, "", 0, 2),
    "hybrid": (HYBRID, None, "0-3", 0, 2),
    "hybrid with gaps": (HYBRID, None, "0-1,3", 0, 2),
    "hybrid, half of it": (HYBRID, None, "0-3", 0b00000011, 1),
    "hybrid, the others alone": (HYBRID, None, "0-3", 0b11110000, 4),
    "three sizes": ([*"01234567"], [380] * 3 + [870] * 4 + [1024], "", 0, 5),
    "three sizes, the small ones": ([*"01234567"], [380] * 3 + [870] * 4 + [1024], "", 0b111, 3),
}


@pytest.mark.parametrize("name", MACHINES)
def test_physical_performance_cores_are_counted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    siblings, capacities, listed, mask, expected = MACHINES[name]
    mask = mask or (1 << len(siblings)) - 1
    allowed = {number for number in range(len(siblings)) if mask >> number & 1}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed, raising=False)
    assert performance_cores(machine(tmp_path, siblings, capacities, listed)) == expected


def test_where_the_system_says_nothing_all_processors_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert performance_cores(tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert performance_cores(tmp_path) == 1


COMMANDS = ("generate x", "chat", "check", "serve", "batch in.jsonl --out o", "bench", "doctor")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_run_a_model_take_threads(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "performance_cores", lambda: 5)
    parser = make_parser()
    for text, expected in (("3", 3), ("auto", 5)):
        assert parser.parse_args([*command.split(), "--threads", text]).threads == expected
    assert parser.parse_args(command.split()).threads is None
    for wrong in ("0", "-1", "some"):
        with pytest.raises(SystemExit):
            parser.parse_args([*command.split(), "--threads", wrong])


def test_a_command_runs_on_the_threads_that_it_is_given(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = torch.get_num_threads()
    try:
        assert cli.main(["doctor", "--inspect", "--threads", "3"]) == 0
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert "3 threads" in capfd.readouterr().out
