"""bench.gpu_plan keeps to its times, goes on where it was cut off, and names what its files feed."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_plan, provenance
from bench.cycles import PAPERS
from bench.gpu_plan import PARTS, ROOT, Step

STEPS = [step for steps in PARTS.values() for step in steps]


def test_parts_keep_to_the_time_of_a_lent_device() -> None:
    limits = [sum(step.seconds for step in steps) for steps in PARTS.values()]
    assert len(limits) == 4
    assert all(limit + gpu_plan.GRACE < 540 for limit in limits)
    assert sum(limits) + 4 * gpu_plan.GRACE <= 27 * 60
    assert gpu_plan.ROWS == provenance.ROWS


@pytest.mark.parametrize("step", [step for step in STEPS if step.module != "pytest"], ids=str)
def test_commands_have_these_options(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    class Parsed(Exception): ...

    parse = argparse.ArgumentParser.parse_args

    def parse_alone(self: argparse.ArgumentParser, *given: Any, **options: Any) -> Any:
        parse(self, *given, **options)
        raise Parsed

    is_package = (ROOT / step.module.replace(".", "/")).is_dir()
    module = importlib.import_module(step.module + (".__main__" if is_package else ""))
    words = step.arguments.format(results="results").split()
    monkeypatch.setattr(sys, "argv", ["x", *words])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
    with pytest.raises(Parsed):
        module.main()
    if "--out" in words and step.feeds:
        assert words[words.index("--out") + 1] == f"results/{step.result}"


def test_the_papers_policies_are_timed_and_each_result_feeds_a_line() -> None:
    arguments = " ".join(step.arguments for step in STEPS if step.module == "bench.graphs")
    assert all(f"--policy {policy} " in arguments for policy in (*PAPERS, "auto", "eagle"))
    fed = [step for step in STEPS if step.feeds]
    assert len({step.result for step in fed}) == len(fed) == 8
    for step in fed:
        assert step.feeds is not None
        page, words = step.feeds
        assert words in (ROOT / page).read_text(), step


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu_plan", "--results", str(tmp_path / "results")]
    hidden = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "bench.gpu_plan needs a CUDA device, and torch finds none here.\n"
    assert not (tmp_path / "results").exists()


PROGRAM = """
import pathlib, sys, time
growing = pathlib.Path(sys.argv[1]).with_suffix(".rows")
with growing.open("a") as log:
    log.write("measured ")
time.sleep(float(sys.argv[2]))
growing.replace(sys.argv[1])
"""


def test_what_is_cut_off_stays_and_is_done_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "measuring.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_plan, "has_device", lambda: True)
    feeds = gpu_plan.GPU_PAGE, "a line"

    def plan(seconds: float) -> None:
        steps = (
            Step("measuring", "{results}/quick.jsonl 0", 60, "quick.jsonl", feeds),
            Step("measuring", f"{{results}}/slow.jsonl {seconds}", -54, "slow.jsonl", feeds),
            Step(
                "measuring", "{results}/else.jsonl 0", 1, "else.jsonl", None, Path("build/absent")
            ),
        )
        monkeypatch.setattr(gpu_plan, "PARTS", {"only": steps})

    plan(300)
    began = time.monotonic()
    assert gpu_plan.main(["--results", str(tmp_path)]) == 0
    assert time.monotonic() - began < 60
    printed = capsys.readouterr().out
    assert "measuring, quick.jsonl: done\n" in printed
    assert "measuring, slow.jsonl: cut off after " in printed
    assert "else.jsonl: left out, as build/absent is not there\n" in printed
    assert (
        "- quick.jsonl: docs/guide/gpu.md, 'a line'\n- slow.jsonl: cut off, in slow.rows" in printed
    )
    assert (tmp_path / "slow.rows").read_text() == "measured "
    monkeypatch.setattr(gpu_plan, "PARTS", {})
    plan(0)
    assert gpu_plan.main(["--results", str(tmp_path)]) == 0
    assert (tmp_path / "quick.jsonl").read_text() == "measured "
    assert (tmp_path / "slow.jsonl").read_text() == "measured measured "
    printed = capsys.readouterr().out
    assert "measuring, quick.jsonl: done before\nmeasuring, slow.jsonl: done\n" in printed


def test_counts_of_the_tests_become_a_record(tmp_path: Path) -> None:
    file = tmp_path / "tests-gpu.xml"
    file.write_text(
        '<testsuites><testsuite tests="9" skipped="2" failures="1" errors="1"/></testsuites>'
    )
    assert (
        gpu_plan.tests_record(file) == '{"record": "tests", "passed": 5, "failed": 2, "skipped": 2}'
    )
    assert any(
        "tests-gpu.jsonl" in line and '"passed": 5' in line for line in gpu_plan.to_commit(tmp_path)
    )
