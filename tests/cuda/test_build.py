"""Tests of when extensions are built."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest


def names(setup_script: ModuleType) -> list[str]:
    return [extension.name for extension in setup_script.extensions()]


def test_the_forward_on_cpus_can_be_left_out(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pybind11")
    for asked, wanted in (("", True), ("1", True), ("0", False)):
        monkeypatch.setenv("SPECENGINE_CPU", asked)
        assert (setup_script.CPU in names(setup_script)) is wanted
    monkeypatch.setenv("SPECENGINE_CPU", "no")
    with pytest.raises(SystemExit, match="SPECENGINE_CPU: got 'no'"):
        setup_script.cpu_is_wanted()


def test_files_are_compiled_at_once(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four files meet, which one after the other never do; objects keep the order of the files."""
    together = threading.Barrier(4, timeout=20)

    class Compiler:
        def compile(self, sources: list[str], *, output_dir: str) -> list[str]:
            together.wait()
            return [f"{output_dir}/{source}.o" for source in sources]

    compiler = Compiler()
    monkeypatch.setenv("SPECENGINE_JOBS", "4")
    setup_script.compile_at_once(compiler, setup_script.jobs())
    assert compiler.compile(["a", "b", "c", "d"], output_dir="x") == [
        "x/a.o",
        "x/b.o",
        "x/c.o",
        "x/d.o",
    ]
    for wrong in ("0", "many", "-1"):
        monkeypatch.setenv("SPECENGINE_JOBS", wrong)
        with pytest.raises(SystemExit, match=f"SPECENGINE_JOBS: got '{wrong}'"):
            setup_script.jobs()


def test_all_processors_compile_where_memory_allows(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECENGINE_JOBS", raising=False)
    monkeypatch.setattr(
        setup_script.os, "sched_getaffinity", lambda process: set(range(8)), raising=False
    )
    for gigabytes, expected in ((64, 8), (5, 5), (0, 1)):
        monkeypatch.setattr(
            setup_script, "free_memory", lambda count=gigabytes: count * setup_script.BYTES_PER_JOB
        )
        assert setup_script.jobs() == expected
    monkeypatch.delattr(setup_script.os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(setup_script.os, "cpu_count", lambda: None)
    assert setup_script.jobs() == 1


def test_memory_of_a_container_bounds_what_is_free(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = setup_script.free_memory()
    assert whole > 0
    monkeypatch.setattr(setup_script, "cgroup_memory", lambda: [("3000", "1000")])
    assert setup_script.free_memory() == 2000
    monkeypatch.setattr(setup_script, "cgroup_memory", list)
    monkeypatch.setattr(
        setup_script.Path, "read_text", lambda path: (_ for _ in ()).throw(OSError())
    )
    assert setup_script.free_memory() > 0  # without /proc, from the memory that the machine has


def test_headers_of_torch_stand_in_for_pybind11(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without a network that has torch."""
    monkeypatch.setitem(sys.modules, "pybind11", None)
    monkeypatch.setenv("SPECENGINE_CPU", "0")
    (extension,) = setup_script.extensions()
    assert extension.name == setup_script.OPS
    assert "-std=c++17" in extension.extra_compile_args
    assert any(
        Path(folder, "pybind11", "pybind11.h").is_file() for folder in extension.include_dirs
    )


def test_without_pybind11_nothing_is_built(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine without a network `setup.py build_ext` runs with what is there."""
    monkeypatch.setitem(sys.modules, "pybind11", None)
    monkeypatch.setattr(setup_script, "find_spec", lambda name: None)
    assert setup_script.extensions() == []
    assert "specengine._ops was not built" in capsys.readouterr().err
