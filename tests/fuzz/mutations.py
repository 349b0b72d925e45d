"""Values that nobody expects, and how a sound one is turned into one of them."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

NUMBERS = (0, -1, 1, 2, 7, 10, 255, 256, 2**31, 2**63, 2**64, -(2**63), 10**12, 10**400)
REALS = (0.0, -0.0, -1.0, 0.5, 1e-300, 1e-30, 1e30, 1e300, 3e38, math.nan, math.inf, -math.inf)
TEXTS = (
    "",
    "x",
    "true",
    "false",
    "none",
    "0",
    "1e9",
    "\ud800",
    "caf\udce9",
    "\0",
    "\n\n",
    "<|end|>",
    "\ue000",
    "é" * 300,
)


def strange(pick: random.Random, depth: int = 0) -> Any:
    """Any JSON-like value, now and then a nested one."""
    kinds = [
        None,
        True,
        False,
        pick.choice(NUMBERS),
        pick.choice(REALS),
        pick.choice(TEXTS),
        {},
        [],
    ]
    if depth < 3:
        kinds += [[strange(pick, depth + 1) for _ in range(pick.randint(1, 3))]]
        kinds += [{pick.choice(TEXTS): strange(pick, depth + 1)}]
    return nested(pick.choice((40, 3000))) if pick.random() < 0.02 else pick.choice(kinds)


def nested(depth: int) -> Any:
    """Lists in lists."""
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


def near(value: Any, pick: random.Random) -> Any:
    """Return a value of the same kind as `value`, or nearly."""
    if isinstance(value, bool):
        return pick.choice((not value, int(value), str(value).lower()))
    if isinstance(value, int):
        small = max(-(2**63), min(value, 2**63))
        return pick.choice(
            (value + 1, value - 1, -value, value // 2, small * 10**6, float(small), str(small))
        )
    if isinstance(value, float):
        return pick.choice((-value, value * 1e9, value * 1e-9, str(value)))
    if isinstance(value, str):
        return pick.choice((value + "x", value[:-1], value.upper(), [value], value * 50))
    if isinstance(value, list):
        return pick.choice(
            (
                value * 2,
                value[:-1],
                value[::-1],
                [*value, value[0] if value else 0],
                {str(i): item for i, item in enumerate(value)},
            )
        )
    if isinstance(value, dict):
        return pick.choice(
            (list(value.items()), {**value, "extra": 1}, dict(list(value.items())[1:]), [value])
        )
    return strange(pick)


def mutated(
    sound: dict[str, Any], pick: random.Random, known: tuple[str, ...] = ()
) -> dict[str, Any]:
    """`sound` with one to three changes: a field replaced, left out, added, renamed, or changed further down.

    known: names of further fields, beside invented ones.
    """
    found = copy.deepcopy(sound)
    for _ in range(pick.choice((1, 1, 1, 2, 3))):
        _change(found, pick, known)
    return found


def _change(part: dict[str, Any], pick: random.Random, known: tuple[str, ...]) -> None:
    name = pick.choice([*part] or ["x"])
    kind = pick.random()
    if isinstance(part.get(name), dict) and part[name] and kind < 0.5:
        _change(part[name], pick, ())
    elif kind < 0.35:
        part[name] = strange(pick)
    elif kind < 0.65:
        part[name] = near(part.get(name), pick)
    elif kind < 0.75:
        part.pop(name, None)
    elif kind < 0.95:
        part[pick.choice([*known, "x", ""])] = strange(pick)
    else:
        part[name + "_"] = part.pop(name, None)
