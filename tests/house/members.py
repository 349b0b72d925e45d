"""Members of the three interfaces, as house.md counts them.

A member is a name without an underscore that the class itself defines or annotates: methods, properties, class
methods, attributes with or without a value. What it inherits does not count.
"""

from __future__ import annotations

import specengine.drafters
import specengine.policies


def members(cls: type) -> list[str]:
    """Return the public members that the class itself has, sorted."""
    names = {*vars(cls), *vars(cls).get("__annotations__", {})}
    return sorted(name for name in names if not name.startswith("_"))


def measure() -> dict[str, int]:
    """Return the members of each interface by name."""
    classes = specengine.policies.TreePolicy, specengine.drafters.Drafter, _target()
    return {f"members of {cls.__name__}": len(members(cls)) for cls in classes}


def _target() -> type:
    """Return the class Target, wherever it is: the base that an engine's own annotation names."""
    from typing import get_type_hints

    from specengine import Engine

    return next(hint for name, hint in get_type_hints(Engine.__init__).items() if name == "target")
