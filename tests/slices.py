"""The tiers of the suite: the cases that `make test` runs of a test with many of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence

import pytest

Case = Mapping[str, Hashable]  # of each parameter its value, or what tells it from the others


def covering(cases: Sequence[Case]) -> list[int]:
    """Return places of a few cases in which each value of each parameter stands at least once.

    Greedily: each choice adds as many new values as any can, and those used least so far beside them.
    """
    uncovered = {pair for case in cases for pair in case.items()}
    used: Counter[tuple[str, Hashable]] = Counter()
    chosen: list[int] = []
    while uncovered:
        new = [len(uncovered.intersection(case.items())) for case in cases]
        repeated = [sum(used[pair] for pair in case.items()) for case in cases]
        best = max(range(len(cases)), key=lambda place: (new[place], -repeated[place], -place))
        chosen.append(best)
        used.update(cases[best].items())
        uncovered.difference_update(cases[best].items())
    return sorted(chosen)


def spread(size: int, count: int) -> list[int]:
    """Return `count` places among `size`, at equal distances, with the first and, from two on, the last."""
    if count >= size:
        return list(range(size))
    if count == 1:
        return [0]
    return [(size - 1) * number // (count - 1) for number in range(count)]


def leave_the_rest(items: Sequence[pytest.Item]) -> None:
    """Mark as `slow` the cases of tests marked `sliced` that are not of their slice."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sliced") and not item.get_closest_marker("slow"):
            functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        count = next(iter(cases[0].get_closest_marker("sliced").args), None)  # type: ignore[union-attr]
        chosen = (
            covering([_values(case) for case in cases])
            if count is None
            else spread(len(cases), count)
        )
        for place in set(range(len(cases))).difference(chosen or [0]):
            cases[place].add_marker(pytest.mark.slow)


def _values(item: pytest.Item) -> Case:
    callspec = getattr(item, "callspec", None)
    parameters = callspec.params.items() if callspec else ()
    plain = (bool, int, float, str, type(None))
    return {
        name: (type(value), value) if isinstance(value, plain) else id(value)
        for name, value in parameters
    }
