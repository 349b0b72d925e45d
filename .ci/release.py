"""Check that this checkout can be released: its names agree, it builds, and it works where it is installed.

    make release [PYTHONS="python3.11 python3.12 python3.13 python3.14"]

1. The version of `specengine/__init__.py` is the newest of CHANGELOG.md, with a date, and nothing stands above it.
2. The source distributions and this machine's wheel are built into an empty dist/, and `twine check --strict` accepts
   all of them.
3. In a new environment of each Python that is there the wheel, or where it is of another Python what pip builds of the
   source distribution, passes `tests/installed_wheel.py`.

Needs pip's index. Nothing is published or tagged; the exit status is 1 at the first thing that does not hold.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST, TRIALS = ROOT / "dist", ROOT / "build" / "release"
HEADING = re.compile(r"^## \[(?P<version>[^\]]+)\](?: - (?P<date>\d{4}-\d\d-\d\d))?$", re.MULTILINE)


def require_dated(changelog: str, version: str) -> str:
    """Return the date of the version's section; SystemExit where it is not the newest, or changes stand above it."""
    sections = [*HEADING.finditer(changelog)]
    if sections and sections[0]["version"] == "Unreleased":
        first, *sections = sections
        end = sections[0].start() if sections else len(changelog)
        if changelog[first.end() : end].strip():
            raise SystemExit("CHANGELOG.md: changes stand under Unreleased")
    if not sections or sections[0]["version"] != version:
        raise SystemExit(f"CHANGELOG.md: its newest version is not {version}, that of specengine")
    if sections[0]["date"] is None:
        raise SystemExit(
            f"CHANGELOG.md: [{version}] has no date, accepted [{version}] - YYYY-MM-DD"
        )
    return str(sections[0]["date"])


def run(*command: str | Path, **environment: str) -> None:
    """Run a command in the checkout; SystemExit, naming it, where it fails."""
    print("+", *command, flush=True)
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: exit status {done.returncode}")


def build() -> None:
    """Make dist/ anew: source distributions and wheels, all accepted by twine."""
    shutil.rmtree(DIST, ignore_errors=True)
    run("make", "sdist", "wheels")
    run(sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q", "twine")
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir()))


def try_on(python: str, version: str) -> None:
    """Install into a new environment of this Python as a user does, and use what is installed."""
    folder = TRIALS / Path(python).name
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder)
    own = folder / "bin" / "python"
    pip = own, "-m", "pip", "install", "--disable-pip-version-check", "-q", "-c", "constraints.txt"
    wheel = next(iter(DIST.glob(f"specengine-{version}-{tag_of(own)}-*.whl")), None)
    heads = [file for file in DIST.glob("*.whl") if not file.name.startswith("specengine-")]
    source = wheel or DIST / f"specengine-{version}.tar.gz"
    run(*pip, f"{source}[serve]", *heads, SPECENGINE_STRICT_BUILD="1")
    run(own, "-P", "tests/installed_wheel.py")


def tag_of(python: Path) -> str:
    """Return the tag of a Python's wheels, such as cp311-cp311."""
    say = "import sys; print('cp%d%d' % sys.version_info[:2])"
    tag = subprocess.run([python, "-c", say], capture_output=True, text=True, check=True)
    return "-".join([tag.stdout.strip()] * 2)


def main(pythons: list[str]) -> None:
    version = re.search(
        r'^__version__ = "([^"]+)"$',
        (ROOT / "specengine" / "__init__.py").read_text(),
        re.MULTILINE,
    )
    assert version is not None
    date = require_dated((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version[1])
    there = [path for python in pythons if (path := shutil.which(python))]
    if not there:
        raise SystemExit(f"PYTHONS: none of {', '.join(pythons)} is on the path")
    build()
    for python in there:
        try_on(python, version[1])
    absent = [python for python in pythons if shutil.which(python) is None]
    print(f"{version[1]} of {date} can be released; tried on {', '.join(map(str, there))}", end="")
    print(f"; not there: {', '.join(absent)}" if absent else "")


if __name__ == "__main__":
    main(sys.argv[1:])
