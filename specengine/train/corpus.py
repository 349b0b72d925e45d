"""A folder of training text: token ids of conversations, and which of them the target wrote as answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specengine.errors import InputError
from specengine.models.files import atomic

FORMAT = 1
MANIFEST = "corpus.json"


class Text(NamedTuple):
    """tokens: int32 [length]; answers: bool [length], the tokens that the target wrote as answers."""

    tokens: Tensor
    answers: Tensor


@dataclass(frozen=True)
class Corpus:
    """The shards of a folder. Each is a file of its own, written whole or not at all."""

    folder: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """InputError where `folder` is no corpus, or one of another format."""
        file = folder / MANIFEST
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"data: {folder} is no folder of training text ({error})") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise InputError(f"data: {file} has another format than {FORMAT}; write the text again")
        return cls(folder, manifest)

    @classmethod
    def create(cls, folder: Path, manifest: Mapping[str, Any]) -> Corpus:
        """A new corpus, or the one that is there if it was begun in the same way.

        InputError naming the first entry of `manifest` that differs from that of the corpus in `folder`.
        """
        wanted = {"format": FORMAT, **json.loads(json.dumps(manifest))}
        if (folder / MANIFEST).is_file():
            found = cls.open(folder)
            for name in {**found.manifest, **wanted}:
                if found.manifest.get(name) != wanted.get(name):
                    raise InputError(
                        f"{name}: the text in {folder} was begun with {found.manifest.get(name)!r}, got "
                        f"{wanted.get(name)!r}; go on with the same, or take another folder"
                    )
            return found
        folder.mkdir(parents=True, exist_ok=True)
        with atomic(folder / MANIFEST) as part:
            part.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        return cls(folder, wanted)

    def shard(self, number: int) -> Path:
        return self.folder / f"{number:05d}.safetensors"

    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]" * 5 + ".safetensors"))

    def numbers(self) -> list[int]:
        return [int(file.name.split(".")[0]) for file in self.shards()]

    def add(self, number: int, texts: list[Text]) -> None:
        tensors = {
            "tokens": torch.cat([text.tokens for text in texts]).to(torch.int32),
            "answers": torch.cat([text.answers for text in texts]),
            "lengths": torch.tensor([len(text.tokens) for text in texts], dtype=torch.int64),
        }
        with atomic(self.shard(number)) as part:
            save_file(tensors, part)

    def read(self, number: int) -> list[Text]:
        """The texts of a shard; InputError where it is damaged."""
        return _read(self.shard(number))

    def __iter__(self) -> Iterator[Text]:
        """All texts, shard by shard; InputError for a damaged shard."""
        for file in self.shards():
            yield from _read(file)


def _read(file: Path) -> list[Text]:
    try:
        tensors = load_file(file)
        tokens, answers, lengths = (tensors[name] for name in ("tokens", "answers", "lengths"))
        if not len(tokens) == len(answers) == int(lengths.sum()):
            raise ValueError("its tensors do not fit together")
        pieces = [split.split(lengths.tolist()) for split in (tokens, answers)]
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise InputError(f"data: {file} is damaged ({error}); delete it and write it again") from error
    return [Text(*text) for text in zip(*pieces, strict=True)]
