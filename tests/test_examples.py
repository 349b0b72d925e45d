"""Property tests draw the share of their examples that the profile has."""

import pytest
from hypothesis import settings

from tests.examples import examples


@pytest.mark.parametrize(
    ("profile", "stated", "drawn"),
    [
        ("ci", 500, 500),
        ("ci", 4, 4),
        ("quick", 500, 125),
        ("quick", 60, 15),
        ("quick", 30, 10),
        ("quick", 8, 8),
    ],
)
def test_a_profile_has_a_share_of_the_examples(profile: str, stated: int, drawn: int) -> None:
    settings.register_profile("before", settings.default)
    settings.load_profile(profile)
    try:
        made = examples(stated, derandomize=True)
    finally:
        settings.load_profile("before")
    assert (made.max_examples, made.derandomize, made.deadline) == (drawn, True, None)
