"""How many examples a property test draws: all that it states, or the share that a profile has of them."""

from typing import Any

from hypothesis import settings

FEWEST = 10


def examples(most: int, **options: Any) -> settings:
    """Return settings of a property test with `most` examples where a profile has 100, Hypothesis' own number.

    A profile of 25 has a quarter of them, and no fewer than ten where the test states as many.
    """
    share = most * settings.default.max_examples // 100
    return settings(max_examples=min(most, max(share, FEWEST)), deadline=None, **options)
