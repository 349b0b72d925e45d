"""Records of a run, the file that keeps them so that a stopped run goes on, and tables in Markdown."""

import json
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import specengine
from specengine import ops
from specengine.errors import InputError, require_input
from specengine.files import CPU_FACTS, processor_name, require_same, write_whole, writing

Record = dict[str, Any]

NOTHING = "–"
PACKAGE = Path(specengine.__file__).parent


@dataclass(frozen=True)
class Table:
    """A table. `kind` is what --only picks."""

    kind: str
    title: str
    header: tuple[str, ...]
    rows: list[list[str]]

    def markdown(self) -> str:
        widths = [
            max(len(row[i]) for row in (self.header, *self.rows)) for i in range(len(self.header))
        ]
        lines = [self.header, ["-" * width for width in widths], *self.rows]
        text = "\n".join(
            "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
            for row in lines
        )
        return f"**{self.title}**\n\n{text}"


def number(record: Record, name: str, digits: int) -> str:
    return f"{record[name]:.{digits}f}" if name in record else NOTHING


# of the provenance
SAME = "commit", "device", "specengine", "torch", "transformers", "python", "backends"


class Log:
    """Records of one run, in a file where one is given.

    file        may be there: then it is of a run with the same settings on the same machine and versions, InputError
                otherwise, and `records` are what it holds; a line that was cut off half-way is measured again
    provenance  the first record, settings the second
    """

    def __init__(self, file: Path | None, provenance: Record, settings: Record) -> None:
        self._file = file
        # as they come back from a file
        self.records: list[Record] = json.loads(json.dumps([provenance, settings]))
        if file is None or _is_empty(file):
            return
        provenance, settings = self.records
        self.records = read(file)
        require_same("provenance", file, self.records[0], provenance, SAME)
        require_same("settings", file, self.records[1], settings, tuple(self.records[1] | settings))
        with writing(file), file.open("r+b") as log:  # without the text after the last whole record
            log.truncate(log.read().rfind(b"\n") + 1)

    @property
    def resumed(self) -> bool:
        return len(self.records) > 2

    def add(self, record: Record) -> None:
        """Add a record. It is on disk before this returns; InputError where that fails."""
        self.records.append(record)
        if self._file is not None:
            with writing(self._file):
                if not self._file.stat().st_size:
                    head = [json.dumps(each) + "\n" for each in self.records[:2]]
                    write_whole(self._file, "".join(head))
                with self._file.open("a", encoding="ascii", newline="\n") as log:
                    log.write(json.dumps(record) + "\n")


def _is_empty(file: Path) -> bool:
    """Return whether the file is empty; a missing file is created."""
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
        return not file.stat().st_size


def read(file: Path) -> list[Record]:
    """Return the records that a run has written, complete or not; InputError for any other file."""
    try:
        lines = file.read_bytes().split(b"\n")[:-1]
        records = [json.loads(line) for line in lines]
    except OSError as error:
        raise InputError(f"file: {file} cannot be read ({error.strerror or error})") from error
    except ValueError:
        records = []
    kinds = [record.get("record") if isinstance(record, dict) else None for record in records]
    require_input(
        f"file: {file} was not written by `specengine bench --out`",
        kinds[:2] == ["provenance", "settings"] and None not in kinds,
    )
    return records


# ---- provenance of figures: command, commit, device and versions


def provenance(program: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the first record of a result file; the commit is empty where the package is no checkout."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name()
    return {
        "record": "provenance",
        "command": f"{program} {shlex.join(public(arguments))}".strip(),
        "commit": _git("describe", "--always", "--abbrev=12", "--dirty=+changes", "--exclude=*"),
        "date": time.strftime("%Y-%m-%d"),
        "device": f"{device}, {torch.get_num_threads()} threads of {os.cpu_count()} cores",
        "specengine": specengine.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "backends": {op: backend.name for op, backend in ops.backends(torch.device("cpu")).items()},
    }


def public(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without the folders of this machine."""
    return [Path(argument).name if argument.startswith("/") else argument for argument in arguments]


def _git(*arguments: str) -> str:
    """Return git's output; empty where the package is in no checkout of its own, as in a user's .venv."""
    try:
        for command in (("ls-files", "--error-unmatch", "__init__.py"), arguments):
            done = subprocess.run(
                ["git", *command], cwd=PACKAGE, capture_output=True, text=True, check=True
            )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _cpu_name() -> str:
    words = CPU_FACTS.read_text().split() if CPU_FACTS.exists() else []
    features = [each for each in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if each in words]
    return f"{processor_name()} ({', '.join(features[:2])})"
