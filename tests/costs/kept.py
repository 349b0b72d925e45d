"""Kept costs that no machine has: the check over a cache folder after a run of tests."""

from __future__ import annotations

import json
from pathlib import Path

from specengine.costs import PassCosts
from specengine.costs.laws import fault
from specengine.errors import InputError


def unlawful(folder: Path, since: float = 0.0) -> list[Path]:
    """Return the files, measured after that time, whose costs break a law; damaged ones are not costs."""
    faulty = []
    for file in sorted(folder.glob("*.json")):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            costs = PassCosts.from_dict(content["costs"])
            when = float(content["when"])
        except (OSError, ValueError, KeyError, TypeError, InputError):
            continue
        if when >= since and (fault(costs.verify) or fault(costs.draft)):
            faulty.append(file)
    return faulty
