"""Tokenizers with tokens that write nothing: special ones, ids that they do not know, empty words."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models
from transformers import AddedToken, PreTrainedTokenizer, PreTrainedTokenizerFast

from tests.toy import byte_tokenizer

BEYOND = 300  # no token of any of these tokenizers


class Words(PreTrainedTokenizer):
    """Written in Python: an id that it does not know is an error, one of its words is empty, blanks go at the ends."""

    WORDS = ("a", "b", " ", "", "ab", "é", "c ")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    @property
    def vocab_size(self) -> int:
        return len(self.WORDS)

    def get_vocab(self) -> dict[str, int]:
        return {word: place for place, word in enumerate(self.WORDS)}

    def _tokenize(self, text: str) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int | None:
        return self.get_vocab().get(token)

    def _convert_id_to_token(self, index: int) -> str | None:
        return self.WORDS[index] if index < len(self.WORDS) else None

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens).strip()


class Plain:
    """A tokenizer with only `encode` and `decode`, without options."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join("abcdefgh"[token] for token in tokens)


@cache
def words() -> PreTrainedTokenizer:
    return Words(additional_special_tokens=["<|x|>"])


@cache
def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(extra=["<|x|>"])
    tokenizer.add_tokens([AddedToken("<|quiet|>", special=True)])
    return tokenizer


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Make a tokenizer like SentencePiece's: a blank begins a word; unknown characters are written as bytes."""
    pieces = ["<unk>", "▁", "▁a", "a", "b", ".", *(f"<0x{byte:02X}>" for byte in range(256))]
    core = Tokenizer(
        models.BPE(vocab={piece: place for place, piece in enumerate(pieces)}, merges=[])
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|x|>", "<|y|>"]})
    return tokenizer


def special(tokenizer: Any, text: str = "<|x|>") -> int:
    return int(tokenizer.convert_tokens_to_ids(text))
