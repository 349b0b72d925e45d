"""`specengine doctor`: its figures, what it misses, and the sentence at its end."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specengine.cli import doctor, main


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "SMALLEST", 1 << 20)


def test_the_report_ends_with_the_verdict(folder: str, head: str, capsys: Any) -> None:
    assert main(["doctor", "--model", folder, "--draft", head]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [line for line in lines if line and not line.startswith(" ")]
    assert titles[:4] == ["versions", "devices", "model", "draft"]
    assert any("instruction set" in line for line in lines) or any(
        "huggingface" in line for line in lines
    )
    assert any(
        line.startswith("  share of bandwidth") and float(line.split()[-1]) > 0 for line in lines
    )
    assert any(line.split()[:4] == ["1", "time:", "1.0;", "tokens"] for line in lines)
    assert any(line.startswith("  times plain decoding") for line in lines)
    assert "missing" in lines, "this cache has no default model"
    assert lines[-1].startswith("Speculation ")


def test_json_has_the_figures(folder: str, capsys: Any) -> None:
    assert main(["doctor", "--model", folder, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["rows of a forward"]
    assert list(rows) == ["1", "2", "4", "8", "16", "32"]
    assert rows["1"]["time"] == 1
    assert all(row["tokens to pay"] >= row["time"] for row in rows.values())
    assert found["speed"]["share of bandwidth"] > 0
    assert found["observed"]["tokens per pass"] >= 1
    assert found["observed"]["times plain decoding"] > 0
    assert any("train draft FOLDER --target" in line for line in found["missing"]), (
        "recycling is its draft"
    )
    assert found["verdict"].startswith("Speculation ")


def test_without_a_draft_nothing_is_known_of_it(folder: str, capsys: Any) -> None:
    assert main(["doctor", "--model", folder, "--draft", "none"]) == 0
    out = capsys.readouterr().out
    assert "observed" not in out
    assert out.endswith("is not known: no answer was drafted.\n")


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_built", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    lines = doctor._missing(SimpleNamespace(drafter=None), "a model")  # type: ignore[arg-type]
    assert any("_cpu is not built" in line for line in lines)
    assert any("C++17 compiler, which" in line for line in lines)
    assert sum("of the extra" in line for line in lines) == len(doctor.EXTRAS)


def test_extras_are_those_of_the_package() -> None:
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for extra, packages in doctor.EXTRAS.items():
        wanted = " ".join(declared["optional-dependencies"][extra]).replace("-", "_")
        assert all(name in wanted for name in packages), extra


def test_bandwidth_is_bytes_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 100, 2))
    monkeypatch.setattr(doctor.time, "perf_counter", lambda: float(next(ticks)))
    assert doctor.bandwidth(1 << 20, torch.device("cpu")) == (1 << 20) / 2
