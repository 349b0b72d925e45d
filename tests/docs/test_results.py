"""docs.build.results and docs.build.policy_tables: how tables name machines, and which columns they have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs.build import policy_tables, results


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (
            "Intel(R) Xeon(R) Processor (amx_bf16), 2 threads of 2 cores",
            "Intel Xeon (amx_bf16), 2 cores",
        ),
        ("AMD EPYC (avx512f), 1 threads of 2 cores", "AMD EPYC (avx512f), 1 of 2 cores"),
        ("NVIDIA H200, 16 threads of 16 cores", "NVIDIA H200, 16 cores"),
        ("AMD EPYC, 2 threads of 22 cores", "AMD EPYC, 2 of 22 cores"),
    ],
)
def test_a_machine_has_its_name_and_the_cores_that_ran(device: str, name: str) -> None:
    assert results.machine(device) == name


def test_columns_without_a_figure_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = {"record": "summary", "set": results.ALL, "tau": 2.5, "delta": 1.0, "verified": 4.0}
    rows = [
        {"record": "provenance", "device": "a machine", "date": "2026-01-01"},
        {**summary, "way": "eagle", "speed_mean": 1.5},
        {**summary, "way": "talon"},
    ]
    (tmp_path / "policies.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    lines = policy_tables.policies("policies.jsonl").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:4]]
    assert cells[0] == ["policy", "tau", "delta", "nodes verified", "speed over plain"]
    assert cells[2:] == [
        ["`eagle`", "2.50", "1.00", "4.0", "1.50"],
        ["`talon`", "2.50", "1.00", "4.0", "–"],
    ]
