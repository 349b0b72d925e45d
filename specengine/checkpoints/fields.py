"""Fields of a config that someone else wrote: each is read as one type, within its range, or refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from specengine.errors import CheckpointError, shown

T = TypeVar("T")

MOST_SIZE = 1 << 24  # of any size: torch's counts of elements overflow beyond


class Fields:
    """The fields of one JSON object. What is missing or null is the default; without one it is refused.

    Methods raise CheckpointError, which names the field and what it accepts.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def __contains__(self, name: str) -> bool:
        return self.raw.get(name) is not None

    def size(self, name: str, default: int | None = None, most: int = MOST_SIZE) -> int:
        """A whole number, 1 to `most`."""
        value = self._given(name, default)
        if type(value) is not int or not 1 <= value <= most:
            raise refused(name, value, f"a whole number, 1 to {most}")
        return value

    def number(self, name: str, default: float | None = None, *, least: float, most: float) -> float:
        """A number, `least` to `most`."""
        value = self._given(name, default)
        if type(value) not in (int, float) or not least <= value <= most:
            raise refused(name, value, f"a number, {least:g} to {most:g}")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self._given(name, default)
        if not isinstance(value, bool):
            raise refused(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._given(name, default)
        if not isinstance(value, str):
            raise refused(name, value, "text")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of text; empty by default."""
        value = self._given(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise refused(name, value, "a list of text")
        return value

    def ids(self, name: str, most: int) -> list[int]:
        """A list of up to `most` whole numbers; empty by default."""
        value = self._given(name, [])
        known = isinstance(value, list) and len(value) <= most
        if not known or not all(type(item) is int and abs(item) <= MOST_SIZE for item in value):
            raise refused(name, value, f"a list of at most {most} whole numbers")
        return value

    def numbers(self, name: str, *, count: int, least: float, most: float) -> list[float]:
        """A list of up to `count` numbers, `least` to `most` each; empty by default."""
        value = self._given(name, [])
        known = isinstance(value, list) and len(value) <= count
        if not known or not all(type(item) in (int, float) and least <= item <= most for item in value):
            raise refused(name, value, f"a list of at most {count} numbers, {least:g} to {most:g}")
        return [float(item) for item in value]

    def part(self, name: str) -> dict[str, Any]:
        """An object; empty by default."""
        value = self._given(name, {})
        if not isinstance(value, dict):
            raise refused(name, value, "an object")
        return value

    def _given(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        return default if value is None else value


def refused(name: str, value: Any, accepted: str) -> CheckpointError:
    return CheckpointError(f"{name}: got {shown(value)}, accepted {accepted}")
