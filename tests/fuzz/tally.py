"""The result file of engine lives: what was run and found so far, from which a later run goes on."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specengine.benchmark.records import provenance
from tests.fuzz.lives import drawn
from tests.fuzz.running import FOUND, Ran

COUNTED = ("family", "policy", "draft", "numbers")


@dataclass
class Tally:
    """Lives of one seed, from number 0 on: outcomes, what they were made of, and those in which something was found."""

    file: Path
    seed: int
    runs: list[dict[str, Any]] = field(default_factory=list)
    cases: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    parts: dict[str, Counter[str]] = field(
        default_factory=lambda: {name: Counter() for name in (*COUNTED, "act")}
    )
    findings: list[dict[str, str]] = field(default_factory=list)
    # found by an earlier run, not by a later one
    mended: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path, seed: int, arguments: list[str]) -> Tally:
        """Return what a file says of this seed, for a run with these arguments; a new one where there is no file."""
        tally = cls(file, seed)
        if file.exists():
            *tally.runs, row = map(json.loads, file.read_text().splitlines())
            if row["seed"] != seed:
                raise SystemExit(f"--out: {file} is of seed {row['seed']}, not {seed}")
            tally.cases, tally.seconds, tally.findings = (
                row["cases"],
                row["seconds"],
                row["findings"],
            )
            tally.outcomes, tally.mended = Counter(row["outcomes"]), row.get("mended", [])
            tally.parts = {name: Counter(row[name]) for name in tally.parts}
        run = provenance("python -m tests.fuzz", arguments)
        tally.runs += [run | {"first": tally.cases}]
        return tally

    def add(self, name: str, made: Ran) -> None:
        """Count the life of this name."""
        given = drawn(random.Random(name))
        for part in COUNTED:
            self.parts[part][given[part]] += 1
        self.parts["act"].update(act["act"] for act in given["acts"])
        self.cases += 1
        self.seconds = round(self.seconds + made.seconds, 2)
        self.outcomes[made.outcome] += 1
        if made.outcome == FOUND:
            self.findings.append({"case": name, "error": made.error})

    def again(self, run: Callable[[str], Ran]) -> None:
        """Run again the lives in which earlier runs found something."""
        before, self.findings = self.findings, []
        for finding in before:
            made = run(finding["case"])
            found = {"case": finding["case"], "error": made.error}
            self.findings += [found] if made.outcome == FOUND else []
            self.mended += [] if made.outcome == FOUND else [finding]
            self.outcomes.subtract([FOUND])
            self.outcomes[made.outcome] += 1

    def write(self) -> None:
        """Replace the file."""
        row = {"record": "lives", "seed": self.seed, "cases": self.cases, "seconds": self.seconds}
        row |= {"outcomes": dict(self.outcomes), "differences": len(self.findings)}
        row |= {name: dict(sorted(counts.items())) for name, counts in self.parts.items()}
        row |= {"findings": self.findings, "mended": self.mended}
        temporary = self.file.with_suffix(".new")
        temporary.write_text("".join(json.dumps(one) + "\n" for one in (*self.runs, row)))
        temporary.replace(self.file)
