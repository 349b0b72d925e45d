"""Stop strings in text that grows token by token."""

from __future__ import annotations

import pytest

from specengine.request.sampling import History, Stopper
from specengine.request.text import Decoder


class Bytes:
    """A tokenizer whose tokens are the bytes of SentencePiece, or, if `letters`, characters."""

    def __init__(self, letters: bool) -> None:
        self.letters = letters

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(token) if self.letters else f"<0x{token:02X}>"


def reasons(text: str, stops: list[str], letters: bool) -> list[str | None]:
    """The reason after each byte of a text, up to the first one."""
    # a function's text is never held back
    decode = Bytes(letters).decode if letters else Decoder(Bytes(letters))
    stopper, found = Stopper(20, stop_strings=stops, decode=decode), list[str | None]()
    for token in text.encode():
        found.append(stopper.reason(token, History([token], 1)))
        if found[-1] is not None:
            break
    return found


@pytest.mark.parametrize("letters", [True, False])
@pytest.mark.parametrize(("text", "after"), [("ab;cd", 3), (";", 1), ("é;é", 3), ("abc", None)])
def test_an_answer_ends_with_the_token_that_completes_one(
    text: str, after: int | None, letters: bool
) -> None:
    """Also within a run of bytes, whose text is held back as long as it goes on."""
    expected = [None] * len(text.encode()) if after is None else [*[None] * (after - 1), "stop"]
    assert reasons(text, [";"], letters) == expected


@pytest.mark.parametrize("stops", [["!", "wxyz"], ["wxyz", "!"], ["wxyz"]])
def test_the_longest_may_begin_far_before_the_shortest(stops: list[str]) -> None:
    assert reasons("abwxyzab", stops, letters=True) == [None] * 5 + ["stop"]
