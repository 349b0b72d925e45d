"""Tokenizers by decoder, many of which write text anew when more tokens come."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

WORDS = [
    "[UNK]",
    "it",
    "do",
    "'",
    "s",
    "n",
    "t",
    "ve",
    "re",
    "m",
    "##ing",
    "##s",
    ".",
    ",",
    "?",
    "!",
    "a",
    "b",
]
LETTERS = [
    "<unk>",
    "<pad>",
    "|",
    "a",
    "b",
    "'",
    "s",
    " ",
    ".",
    "ab",
    "ba",
    "aa",
    "  ",
    "▁",
    "▁a",
    "b</w>",
    "</w>",
]


def fast(
    decoder: Any, vocabulary: Sequence[str], kind: Any = models.WordLevel, **options: Any
) -> Any:
    """Make a tokenizer of these tokens; each is a token id by its place."""
    core = Tokenizer(
        kind({token: place for place, token in enumerate(vocabulary)}, unk_token=vocabulary[0])
    )
    core.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=core, **options)


class InPython(PreTrainedTokenizer):
    """Joins words as a tokenizer written in Python does, by a rule for the whole text."""

    def __init__(self, join: Callable[[list[str]], str], **options: Any) -> None:
        self.join = join
        super().__init__(**options)

    @property
    def vocab_size(self) -> int:
        return len(WORDS)

    def get_vocab(self) -> dict[str, int]:
        return {word: place for place, word in enumerate(WORDS)}

    def _tokenize(self, text: str) -> list[str]:
        return text.split()

    def _convert_token_to_id(self, token: str) -> int:
        return self.get_vocab().get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return WORDS[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self.join(tokens)


class Bare:
    """A tokenizer with `encode` and `decode` alone, whose decoder joins apostrophes."""

    def encode(self, text: str) -> list[int]:
        return [WORDS.index(word) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(WORDS[token] for token in tokens).replace(" ' ", "'")


class Shouting(PreTrainedTokenizerFast):
    """A fast tokenizer whose class decodes by a rule of its own."""

    def _decode(self, *given: Any, **options: Any) -> str:
        return super()._decode(*given, **options).replace("a b", "A B")


def shouting() -> Any:
    core = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token=WORDS[0])
    )
    return Shouting(tokenizer_object=core)


def in_sequence(*parts: Any) -> Any:
    return decoders.Sequence(list(parts))


MADE: dict[str, Callable[[], Any]] = {
    "wordpiece, cleaned by transformers": lambda: fast(
        decoders.WordPiece(prefix="##", cleanup=True),
        WORDS,
        models.WordPiece,
        clean_up_tokenization_spaces=True,
    ),
    "wordpiece, cleaned by its decoder": lambda: fast(
        decoders.WordPiece(cleanup=True), WORDS, models.WordPiece
    ),
    "wordpiece": lambda: fast(decoders.WordPiece(cleanup=False), WORDS, models.WordPiece),
    "words, cleaned": lambda: fast(None, WORDS, clean_up_tokenization_spaces=True),
    "fused before it is cleaned": lambda: fast(
        in_sequence(
            decoders.Replace("a", " ' "), decoders.Fuse(), decoders.WordPiece(cleanup=True)
        ),
        WORDS,
    ),
    "ctc": lambda: fast(decoders.CTC(), LETTERS),
    "ctc, cleaned": lambda: fast(decoders.CTC(), LETTERS, clean_up_tokenization_spaces=True),
    "suffixes": lambda: fast(decoders.BPEDecoder(suffix="</w>"), LETTERS),
    "metaspace": lambda: fast(decoders.Metaspace(), LETTERS),
    "metaspace, never first": lambda: fast(decoders.Metaspace(prepend_scheme="never"), LETTERS),
    "strip": lambda: fast(decoders.Strip("a", 1, 0), LETTERS),
    "fused strip": lambda: fast(in_sequence(decoders.Fuse(), decoders.Strip(" ", 2, 0)), LETTERS),
    "fused strip of letters": lambda: fast(
        in_sequence(decoders.Fuse(), decoders.Strip("a", 0, 1)), LETTERS
    ),
    "replace": lambda: fast(decoders.Replace("ab", "c"), LETTERS),
    "fused replace": lambda: fast(
        in_sequence(decoders.Fuse(), decoders.Replace("ab", "c")), LETTERS
    ),
    "fused replaces": lambda: fast(
        in_sequence(decoders.Fuse(), decoders.Replace("aba", "b"), decoders.Replace("b's", "xyz")),
        LETTERS,
    ),
    "fused replace of a regex": lambda: fast(
        in_sequence(decoders.Fuse(), decoders.Replace(Regex("a+b"), "c")), LETTERS
    ),
    "replace after bytes": lambda: fast(
        in_sequence(decoders.ByteLevel(), decoders.Replace("ab", "é")), LETTERS
    ),
    "in Python": lambda: InPython(
        lambda words: " ".join(words).replace(" ##", "").replace(" ' ", "'")
    ),
    "in Python, cleaned": lambda: InPython(" ".join, clean_up_tokenization_spaces=True),
    "in Python, stripped": lambda: InPython(
        lambda words: "".join(words).replace("it", " it ").strip()
    ),
    "a class of its own": shouting,
    "bare": Bare,
}
APPENDING = ("wordpiece", "ctc", "suffixes", "metaspace", "strip", "replace", "fused strip")


@cache
def rewriting(name: str) -> Any:
    return MADE[name]()


def size_of(tokenizer: Any) -> int:
    return len(WORDS) if isinstance(tokenizer, Bare) else int(tokenizer.vocab_size)
