"""Measured costs of a cycle on this machine, kept in the cache folder."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from specengine.calibration.identity import digest, identity
from specengine.calibration.measuring import contexts, measure
from specengine.costs import Costs
from specengine.drafters import Drafter
from specengine.errors import InputError
from specengine.files import atomic, cache_dir
from specengine.models import Target

__all__ = ["contexts", "find", "identity", "measure", "place"]

_found: dict[Path, Costs] = {}  # by file, so that a process measures once where it cannot write either


def find(target: Target, drafter: Drafter | None, *, fresh: bool = False) -> Costs:
    """The costs of these parts here: measured when they are first asked for, from then on read from the cache folder.

    fresh: measure anew, and keep that. Clears the caches of both parts where it measures. A file that is damaged or
    of other parts is measured again; where none can be written, `source` says why.
    """
    key = identity(target, drafter)
    file = place(key)
    costs = None if fresh else _found.get(file) or _read(file, key)
    if costs is None:
        costs = measure(target, drafter)
        if reason := _write(file, key, costs):
            costs = dataclasses.replace(costs, source=f"{costs.source}, not kept: {reason}")
    _found[file] = costs
    return costs


def place(key: dict[str, Any]) -> Path:
    """The file of what `identity` gave."""
    return cache_dir() / "costs" / f"{digest(key)}.json"


def _read(file: Path, key: dict[str, Any]) -> Costs | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Costs.from_dict(content["costs"]) if content["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, InputError, RecursionError):
        return None


def _write(file: Path, key: dict[str, Any], costs: Costs) -> str | None:
    """Why it could not be written, if so."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic(file) as part:
            part.write_text(json.dumps({"key": key, "costs": costs.to_dict()}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        return f"{file.parent} cannot be written ({error.strerror or error})"
    return None
