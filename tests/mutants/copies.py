"""A copy of the sources with extensions of its own, in which one file at a time is changed."""

from __future__ import annotations

import filecmp
import hashlib
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from tests.mutants.table import ROOT, Mutant

# as under that sanitizer: without clones for other instruction sets, which take most of the time
FLAGS = ("-O1", "-fPIC", "-D__SANITIZE_ADDRESS__")
SETS = ("portable", "integer_portable")  # instruction sets of the copy, which every machine runs


class BuildError(Exception):
    """The compiler refuses the sources."""


class Copy:
    """The sources in `folder`/sources. What is compiled is kept by its content: a change compiles what it reaches."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.root = root
        self.sources = folder / "sources"
        self.objects = folder / "objects"
        self.objects.mkdir(parents=True, exist_ok=True)
        self._update()
        links = self.sources / "build" / "links"
        links.mkdir(parents=True, exist_ok=True)
        for name, target in (("specengine_kernels", "kernels"), ("specengine_csrc", "csrc")):
            (links / name).unlink(missing_ok=True)
            (links / name).symlink_to(self.sources / target)
        with chdir(self.sources):
            setup = runpy.run_path("setup.py")
            setup["list_formats"]("build/formats")
            self._extensions = [
                each for each in setup["extensions"]() if each.name in (setup["OPS"], setup["CPU"])
            ]

    def _update(self) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=self.root,
            capture_output=True,
            check=True,
        )
        names = {
            name
            for name in os.fsdecode(listed.stdout).split("\0")
            if name and (self.root / name).is_file()
        }
        for name in names:
            source, target = self.root / name, self.sources / name
            if not target.is_file() or not filecmp.cmp(source, target, shallow=False):
                self._put(source, target)
        for folder in ("specengine", "kernels", "csrc", "tests"):
            for path in (self.sources / folder).rglob("*"):
                kept = (
                    path.suffix in (".pyc", ".so") or str(path.relative_to(self.sources)) in names
                )
                if path.is_file() and not kept:
                    path.unlink()

    @staticmethod
    def _put(source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
        _forget(target)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of processes that import the copy."""
        path = os.pathsep.join([str(self.sources), str(self.sources / "build" / "links")])
        # as each worker of `make test` has
        one_thread = {"OMP_NUM_THREADS": "1", "PYTEST_XDIST_WORKER": "gw0"}
        return os.environ | one_thread | {"PYTHONPATH": path}

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """Change the mutant's file. Raises StaleError, and BuildError if the compiler refuses the change."""
        target = self.sources / mutant.file
        text, before = mutant.text(self.sources), target.read_bytes()
        try:
            _forget(target)
            target.write_text(text, encoding="utf-8")
            if mutant.file.startswith("csrc/"):
                self.build()
            yield
        finally:
            _forget(target)
            target.write_bytes(before)
            if mutant.file.startswith("csrc/"):
                self.build()

    def build(self) -> None:
        """Compile what has changed, link it, and put it into the copy. Raises BuildError."""
        for extension in self._extensions:
            sources = [source for source in extension.sources if _is_built(source)]
            objects = [self._compiled(source, extension) for source in sources]
            key = _digest("\n".join(objects))
            library = self.objects / f"{extension.name}-{key}.so"
            if not library.exists():
                self._run(
                    "g++", "-shared", *objects, *extension.extra_link_args, "-o", str(library)
                )
            suffix = sysconfig.get_config_var("EXT_SUFFIX")
            target = self.sources / (extension.name.replace(".", "/") + suffix)
            new = target.with_suffix(".new")
            shutil.copyfile(library, new)
            new.replace(target)

    def _compiled(self, source: str, extension: Any) -> str:
        """Return the object file of a source, compiled if there is none of this content."""
        slug = source.replace("/", "-")
        include = [
            f"-I{folder}"
            for folder in (*extension.include_dirs, "build/formats", sysconfig.get_path("include"))
        ]
        command = ["g++", *extension.extra_compile_args, *FLAGS, *include, "-c", source]
        listed = self.objects / f"{slug}.d"
        for _ in range(2):
            if listed.exists():
                read = "".join(_digest(self.sources / file) for file in listed.read_text().split())
                compiled = self.objects / f"{slug}-{_digest(' '.join(command) + read)}.o"
                if compiled.exists():
                    return str(compiled)
            fresh = self.objects / f"{slug}.new"
            self._run(*command, "-MMD", "-MF", f"{fresh}.d", "-o", str(fresh))
            rule = Path(f"{fresh}.d").read_text().replace("\\\n", " ")
            listed.write_text(rule.partition(":")[2])
            read = "".join(_digest(self.sources / file) for file in listed.read_text().split())
            fresh.replace(self.objects / f"{slug}-{_digest(' '.join(command) + read)}.o")
        raise AssertionError(source)

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, cwd=self.sources, capture_output=True, text=True)
        if done.returncode != 0:
            raise BuildError(done.stderr[-2000:])


def _is_built(source: str) -> bool:
    stem = Path(source).stem
    return not stem.startswith("isa_") or stem.removeprefix("isa_") in SETS


def _forget(path: Path) -> None:
    """Delete the compiled form of a Python file, which is found by size and second alone."""
    if path.suffix == ".py":
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _digest(content: str | Path) -> str:
    data = content.read_bytes() if isinstance(content, Path) else content.encode()
    return hashlib.sha256(data).hexdigest()[:16]


def compiler() -> str | None:
    """Return the compiler's path; None without one, or where extensions are built otherwise."""
    return shutil.which("g++") if sys.platform == "linux" else None
