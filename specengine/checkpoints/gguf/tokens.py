"""The tokens of a GGUF file: their texts and kinds, and which of them end an answer.

As llama.cpp finds them (src/llama-vocab.cpp, llama_vocab::impl::load): the file's own ids, and well-known texts, for
many files name one end alone. An id outside of the vocabulary is none, as there. Other than there, a byte-level file
that names no end has none but those texts.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

from specengine.checkpoints.gguf.file import GGUFFile
from specengine.errors import CheckpointError


class TokenKind(IntEnum):
    """Kinds of tokens, by their number in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_SENTENCEPIECE_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}  # where the file names none
_IS_ID = re.compile(r"tokenizer\.ggml\.\w+_token_id")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = frozenset(
    {
        *("</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>"),
        *("<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "<turn|>", "<|tool_response>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    }
)
# Marks of files and repositories, which end an answer as well: the file's id, or the first of these texts.
_FILE_MARKS = {
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep_token_id": ("<|file_sep|>",),
}
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # of gpt-oss
# With all of one set there, `<|end|>` ends a part of an answer alone.
_WITH_PARTS = (
    {"<|return|>", "<|call|>"},
    {"<|return|>", "<|calls|>"},
    {"<|flush|>", "<|call|>"},
    {"<|flush|>", "<|calls|>"},
)


def special_id(file: GGUFFile, key: str, vocabulary: int) -> int | None:
    """Return the token id that the file gives for a role, as eos_token_id; None where there is none.

    An id outside of the vocabulary, of so many tokens, is as if the file gave none. CheckpointError for other values.
    """
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if value is not None and type(value) is not int:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.{key} must be a token id, not {str(value)[:80]}")
    if value is not None and 0 <= value < vocabulary:
        return value
    default = _SENTENCEPIECE_IDS.get(key) if file.metadata.get("tokenizer.ggml.model") == "llama" else None
    return default if default is not None and default < vocabulary else None


def end_ids(file: GGUFFile, vocabulary: int) -> int | list[int] | None:
    """Return the tokens that end an answer, the file's eos first, as a config has them. Raises as `special_id`.

    Ids outside of the vocabulary are noted on stderr.
    """
    texts = file.metadata.get("tokenizer.ggml.tokens")
    texts = texts if isinstance(texts, list) and all(isinstance(text, str) for text in texts) else []
    vocabulary = len(texts) or vocabulary
    eos, ends = special_id(file, "eos_token_id", vocabulary), Tokens(file, texts, vocabulary).ends
    _note_outside(file, vocabulary, "" if ends else "; no token ends an answer: give eos_token_id= or max_new_tokens=")
    ordered = [*([eos] if eos in ends else []), *sorted(ends - {eos})]
    return None if not ordered else ordered[0] if len(ordered) == 1 else ordered


def _note_outside(file: GGUFFile, vocabulary: int, ending: str) -> None:
    ids = {key: value for key, value in file.metadata.items() if _IS_ID.fullmatch(key) and type(value) is int}
    for key, value in ids.items():
        if not 0 <= value < vocabulary:
            own = f"{file.path.name}: {key} = {value} is no token of {vocabulary}, and not read"
            print(own + (ending if key.removeprefix("tokenizer.ggml.") in _END_KEYS else ""), file=sys.stderr)


@dataclass(frozen=True)
class Tokens:
    """The texts of tokens in the order of their ids; vocabulary: rows of the model's embeddings."""

    file: GGUFFile
    texts: list[str]
    vocabulary: int

    @cached_property
    def ids(self) -> dict[str, int]:
        """Ids by text."""
        return {text: number for number, text in enumerate(self.texts)}

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(self._named_ends - self._parts - self._words)

    @cached_property
    def kinds(self) -> list[TokenKind]:
        """The kind of each token, as the file says; tokens that end an answer or mark a file are control."""
        stated = self.file.metadata.get("tokenizer.ggml.token_type", [])
        kinds = [TokenKind(value) if value in _NUMBERS else TokenKind.NORMAL for value in stated]
        kinds += [TokenKind.NORMAL] * (len(self.texts) - len(kinds))
        changed = {
            TokenKind.CONTROL: self._of(*_END_TEXTS) | self._file_marks,
            TokenKind.USER_DEFINED: self._of(*_ALWAYS_SHOWN) | self._parts,
            TokenKind.NORMAL: self._words,
        }
        for kind, numbers in changed.items():
            for number in numbers:
                kinds[number] = kind
        return kinds

    @cached_property
    def _named_ends(self) -> set[int]:
        given = {special_id(self.file, key, self.vocabulary) for key in _END_KEYS}
        return self._of(*_END_TEXTS) | self._file_marks | {number for number in given if number is not None}

    @cached_property
    def _file_marks(self) -> set[int]:
        found = set()
        for key, texts in _FILE_MARKS.items():
            number = special_id(self.file, key, self.vocabulary)
            known = [self.ids[text] for text in texts if text in self.ids]
            found |= {number} if number is not None else set(known[:1])
        return found

    @cached_property
    def _parts(self) -> set[int]:
        """Tokens that end a part of an answer alone."""
        there = {self.texts[number] for number in self._named_ends if number < len(self.texts)}
        return self._of("<|end|>") if any(texts <= there for texts in _WITH_PARTS) else set()

    @cached_property
    def _words(self) -> set[int]:
        """Tokens with the text of an end that are words: Gemma 4's `</s>`."""
        return self._of("</s>") if "<|tool_response>" in self.ids else set()

    def _of(self, *texts: str) -> set[int]:
        return {self.ids[text] for text in texts if text in self.ids}


_NUMBERS: frozenset[Any] = frozenset(TokenKind)
