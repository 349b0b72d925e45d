"""Folders that a long job fills shard by shard and resumes, and one of text: token ids, and masks of answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specengine.errors import InputError, require_or
from specengine.files import atomic, write_whole

T = TypeVar("T")
Folder = TypeVar("Folder", bound="ShardFolder")


class Contents(NamedTuple):
    """Names of a kind of folder, for messages."""

    field: str
    content: str  # content of the folder
    subject: str  # beginning of a sentence about a started folder, with its verb
    redo: str  # how to create it again


@dataclass(frozen=True)
class ShardFolder:
    """A manifest, and shards numbered from 0. Each is a safetensors file, written completely or not at all."""

    folder: Path
    manifest: Mapping[str, Any]

    FORMAT: ClassVar[int]
    MANIFEST: ClassVar[str]
    contents: ClassVar[Contents]

    @classmethod
    def open(cls: type[Folder], folder: Path) -> Folder:
        """Open a folder. Raise InputError if it is of another kind or format."""
        file, contents = folder / cls.MANIFEST, cls.contents
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(
                f"{contents.field}: {folder} is not a folder of {contents.content} ({error})"
            ) from error
        if not isinstance(manifest, dict) or manifest.get("format") != cls.FORMAT:
            raise InputError(
                f"{contents.field}: {file} has another format than {cls.FORMAT}; {contents.redo} again"
            )
        return cls(folder, manifest)

    @classmethod
    def create(cls: type[Folder], folder: Path, manifest: Mapping[str, Any]) -> Folder:
        """Create a folder, or open it if it was begun with the same manifest.

        Raise InputError naming the first entry of `manifest` that differs.
        """
        expected = {"format": cls.FORMAT, **json.loads(json.dumps(manifest))}
        if (folder / cls.MANIFEST).is_file():
            existing = cls.open(folder)
            for name in {**existing.manifest, **expected}:
                if existing.manifest.get(name) != expected.get(name):
                    raise InputError(
                        f"{name}: {cls.contents.subject.format(folder)} begun with {existing.manifest.get(name)!r}, "
                        f"got {expected.get(name)!r}; use the same, or another folder"
                    )
            return existing
        write_whole(folder / cls.MANIFEST, json.dumps(expected, indent=2) + "\n")
        return cls(folder, expected)

    def shard(self, number: int) -> Path:
        return self.folder / f"{number:05d}.safetensors"

    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]" * 5 + ".safetensors"))

    def save(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        with atomic(self.shard(number)) as temporary:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)

    def load(self, file: Path, read: Callable[[dict[str, Tensor]], T]) -> T:
        """Return `read` of a shard's tensors. Raise InputError if the shard is damaged."""
        try:
            return read(load_file(file))
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise InputError(
                f"{self.contents.field}: {file} is damaged ({error}); delete it and "
                f"{self.contents.redo.split()[0]} it again"
            ) from error


class States(NamedTuple):
    """What a target had at each token of a text, as it serves.

    features  bfloat16 [length, features * hidden size], the hidden states that a draft reads
    ids       int32 [length, count], the likeliest next tokens, the best first; only in front of an answer's tokens
    logs      bfloat16 [length, count], their log-probabilities
    """

    features: Tensor
    ids: Tensor
    logs: Tensor


class Text(NamedTuple):
    """A conversation. tokens: int32 [length]; answers: bool [length], true for tokens of answers."""

    tokens: Tensor
    answers: Tensor
    states: States | None = None

    def begin(self, count: int) -> Text:
        """Return the first `count` tokens. Nothing is read or copied."""
        states = (
            None if self.states is None else States(*(values[:count] for values in self.states))
        )
        return Text(self.tokens[:count], self.answers[:count], states)


class Corpus(ShardFolder):
    """A folder of texts, in shards."""

    FORMAT = 1
    MANIFEST = "corpus.json"
    contents = Contents("data", "training text", "the text in {} was", "write the text")

    def numbers(self) -> list[int]:
        return [int(file.name.split(".")[0]) for file in self.shards()]

    def add(self, number: int, texts: list[Text], seconds: float = 0.0) -> None:
        """Write a shard. seconds: that writing its texts took."""
        tensors = {
            "tokens": torch.cat([text.tokens for text in texts]).to(torch.int32),
            "answers": torch.cat([text.answers for text in texts]),
            "lengths": torch.tensor(
                [len(text.tokens) for text in texts], dtype=torch.int64, device="cpu"
            ),
            "seconds": torch.tensor([seconds], dtype=torch.float64, device="cpu"),
        }
        states = [text.states for text in texts if text.states is not None]
        tensors |= {
            name: torch.cat([getattr(values, name) for values in states])
            for name in States._fields
            if states
        }
        self.save(number, tensors)

    def seconds(self, number: int) -> float:
        """Return how long writing a shard took. Raise InputError if it is damaged."""
        return self.load(
            self.shard(number),
            lambda tensors: float(tensors["seconds"]) if "seconds" in tensors else 0.0,
        )

    def read(self, number: int) -> list[Text]:
        """Return the texts of a shard; states stay on disk until they are used. Raise InputError if it is damaged."""
        return self.load(self.shard(number), _texts)

    def __iter__(self) -> Iterator[Text]:
        """Yield all texts, shard by shard. Raise InputError for a damaged shard."""
        return itertools.chain.from_iterable(map(self.read, self.numbers()))


def _texts(tensors: dict[str, Tensor]) -> list[Text]:
    lengths = tensors["lengths"].tolist()
    names = ["tokens", "answers", *(name for name in States._fields if name in tensors)]
    require_or(
        ValueError,
        "its tensors have different lengths",
        {len(tensors[name]) for name in names} == {sum(lengths)},
    )
    texts = zip(*(tensors[name].split(lengths) for name in names), strict=True)
    return [
        Text(tokens, answers, States(*states) if states else None)
        for tokens, answers, *states in texts
    ]
