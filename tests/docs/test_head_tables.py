"""docs.build.head_tables: tables of research.losses, of a file as it writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs.build import head_tables, results as result_files

FILE = "losses.jsonl"
ERRORS = {"calibration": 0.141, "standard_calibration": 0.052}


def rank(number: int, accuracy: float) -> dict[str, object]:
    found = {"accuracy": accuracy, **ERRORS}
    bounds = {f"{name}_interval": [value - 0.01, value + 0.02] for name, value in found.items()}
    return {"rank": number, "rows": 900, **found, **bounds}


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, object]] = [
        {"record": "provenance", "device": "a machine", "date": "2026-01-01"}
    ]
    for loss, steps, accuracy in (("eagle", 3445, 0.312), ("talf", 1572, 0.35)):
        by_rank = [rank(1, accuracy), rank(2, accuracy - 0.05)]
        rows.append(
            {
                "record": "head",
                "loss": loss,
                "steps": steps,
                "cpu_seconds": 7200,
                "by_rank": by_rank,
            }
        )
    for loss in ("eagle", "talf"):
        for tree, tau in (("beam", 1.912), ("salf", 1.74)):
            bounds = {"mean_acceptance_length_interval": [tau - 0.1, tau + 0.1]}
            rows.append(
                {
                    "record": "cell",
                    "loss": loss,
                    "tree": tree,
                    "mean_acceptance_length": tau,
                    **bounds,
                }
            )
    beside = {"record": "beside", "loss": "talf", "first": "eagle"}
    for tree, tau in (("beam", 0.05), ("salf", -0.1)):
        bounds = {"mean_acceptance_length_interval": [tau - 0.1, tau + 0.02]}
        rows.append(beside | {"tree": tree, "mean_acceptance_length": tau, **bounds})
    for loss, shares, more in (
        ("eagle", [0.49, 0.375], [0.0, 0.0]),
        ("talf", [0.42, 0.38], [-0.07, 0.005]),
    ):
        bounds = {"more_interval": [[share - 0.01, share + 0.01] for share in more]}
        rows.append({"record": "ahead", "loss": loss, "hits": shares, "more": more, **bounds})
    rows.append(beside | {"by_rank": [rank(1, -0.004), rank(2, 0.031)]})
    (tmp_path / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)


def cells(made: str) -> list[list[str]]:
    """Return the cells of a markdown table, header first."""
    lines = [line for line in made.splitlines() if line.startswith("|") and set(line) - set("|- ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_acceptance_by_loss() -> None:
    assert cells(head_tables.loss_acceptance(FILE)) == [
        ["loss", "steps", "processor hours", "tau, beam", "tau, salf"],
        ["`eagle`", "3,445", "2.00", "1.91 (1.81 to 2.01)", "1.74 (1.64 to 1.84)"],
        ["`talf`", "1,572", "2.00", "1.91 (1.81 to 2.01)", "1.74 (1.64 to 1.84)"],
    ]


def test_agreement_by_distance() -> None:
    assert cells(head_tables.loss_ahead(FILE)) == [
        ["agreement in %", "1 ahead", "2 ahead"],
        ["`eagle`", "49.0", "37.5"],
        ["`talf`", "42.0", "38.0"],
        ["minus `eagle`", "-7.0 (-8.0 to -6.0)", "+0.5 (-0.5 to +1.5)"],
    ]


def test_differences_of_losses() -> None:
    assert cells(head_tables.loss_acceptance_beside(FILE)) == [
        ["tau minus `eagle`", "beam", "salf"],
        ["`talf`", "+0.05 (-0.05 to +0.07)", "-0.10 (-0.20 to -0.08)"],
    ]
    header, accuracy, *_ = cells(head_tables.loss_ranks_beside(FILE))
    assert header == ["minus `eagle`", "in percentage points", "rank 1", "rank 2"]
    assert accuracy == ["`talf`", "accuracy", "-0.4 (-1.4 to +1.6)", "+3.1 (+2.1 to +5.1)"]
