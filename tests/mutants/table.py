"""The mutants of this folder's .toml files: what each changes, why that is wrong, and which tests notice it."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class StaleError(ValueError):
    """The text that a mutant replaces does not occur exactly once in its file."""


@dataclass(frozen=True)
class Mutant:
    """One small plausible mistake.

    file   to change, from the root of the sources
    old    text that occurs exactly once in it
    new    text in its place
    why    why that is wrong
    tests  files or node ids: at least one test of them that `make test` runs must fail
    slow   the same for tests that only `make test-all` runs, where `make test` has none
    """

    name: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()

    def text(self, root: Path = ROOT) -> str:
        """Return the text of the changed file. Raises StaleError if `old` does not occur exactly once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if (count := text.count(self.old)) != 1:
            raise StaleError(
                f"{self.name}: its old text occurs {count} times in {self.file}, it must occur once"
            )
        return text.replace(self.old, self.new)

    def changes_nothing(self, root: Path = ROOT) -> bool:
        """Return whether the program stays the same: only comments and the layout differ, if anything does."""
        before, after = (root / self.file).read_text(encoding="utf-8"), self.text(root)
        if self.file.endswith(".py"):
            return ast.dump(ast.parse(before)) == ast.dump(ast.parse(after))
        return _tokens(before) == _tokens(after)


def _tokens(text: str) -> str:
    """Return C++ text without comments and without spaces between signs."""
    return re.sub(r"\s*(\W)\s*", r"\1", " ".join(re.sub(r"//[^\n]*", "", text).split()))


def mutants(files: Iterable[Path] | None = None) -> list[Mutant]:
    """Read the mutants of these files, or of all. Raises ValueError for names used twice and for unknown fields."""
    known = {field.name for field in fields(Mutant)}
    listed: list[Mutant] = []
    for file in sorted(HERE.glob("*.toml")) if files is None else files:
        for row in tomllib.loads(file.read_text(encoding="utf-8"))["mutant"]:
            if unknown := row.keys() - known:
                raise ValueError(
                    f"{file.name}: unknown {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}"
                )
            tests = {kind: tuple(row.get(kind, ())) for kind in ("tests", "slow")}
            if not any(tests.values()):
                raise ValueError(f"{file.name}: {row['name']} names no test")
            listed.append(Mutant(**(row | tests)))
    names = [mutant.name for mutant in listed]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"names used twice: {', '.join(twice)}")
    return listed


def named(listed: Sequence[Mutant], names: Sequence[str]) -> list[Mutant]:
    """Return the mutants of these names, or all without names. Raises ValueError for unknown ones."""
    if unknown := set(names) - {mutant.name for mutant in listed}:
        raise ValueError(f"no mutant is called {', '.join(sorted(unknown))}")
    return [mutant for mutant in listed if not names or mutant.name in names]
