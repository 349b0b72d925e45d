"""A tokenizer that several threads share: it gives what the tokenizer gives, and fails nobody."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

from specengine.request.prompts import token_ids
from specengine.request.text import SharedTokenizer
from tests.toy import byte_tokenizer


def _wrong(tokenizer: Any, most_seconds: float) -> int:
    """Read one text as text and with special tokens, and write it, in threads of their own. Return wrong results."""
    text = "a text <|end|> of some length, " * 20
    kinds: list[dict[str, Any]] = [{"split_special_tokens": True}, {"split_special_tokens": False}]
    right = [byte_tokenizer()(text, **kind)["input_ids"] for kind in kinds]
    acts: list[tuple[Callable[[], Any], Any]] = [
        (lambda: tokenizer(text, **kinds[0])["input_ids"], right[0]),
        (lambda: tokenizer(text, **kinds[1])["input_ids"], right[1]),
        (lambda: tokenizer.decode(right[1]), byte_tokenizer().decode(right[1])),
    ]
    wrong, end = list[int](), time.perf_counter() + most_seconds

    def work(act: Callable[[], Any], expected: Any) -> None:
        while time.perf_counter() < end and not wrong:
            try:
                if act() != expected:
                    wrong.append(1)
            except RuntimeError:  # it is borrowed already
                wrong.append(1)

    threads = [threading.Thread(target=work, args=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(wrong)


def test_a_shared_tokenizer_serves_several_threads() -> None:
    shared: Any = SharedTokenizer.of(byte_tokenizer())
    assert _wrong(shared, 0.5) == 0
    assert shared("one")["input_ids"] == byte_tokenizer()("one")["input_ids"]
    assert len(shared) == len(byte_tokenizer())
    assert copy.deepcopy(shared)("one")["input_ids"] == shared("one")["input_ids"]
    assert shared.decode(shared.encode("one")) == "one"


def test_one_that_is_not_shared_does_not() -> None:
    """A negative control: what sets a tokenizer for a text meets one who uses it."""
    assert _wrong(byte_tokenizer(), 20.0) > 0


def test_what_cannot_be_called_is_shared_as_such() -> None:
    class Plain:
        def encode(self, text: str) -> list[int]:
            return [*text.encode()]

        def decode(self, tokens: list[int]) -> str:
            return bytes(tokens).decode()

    shared = SharedTokenizer.of(Plain())
    assert not callable(shared)
    assert token_ids("ab", shared, raw=True, vocab_size=256, max_context=8) == [97, 98]
    assert SharedTokenizer.of(None) is None
