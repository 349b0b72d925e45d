"""Folders that a long job fills shard by shard, and that it can resume after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specengine.errors import InputError
from specengine.files import atomic

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
            raise InputError(f"{contents.field}: {folder} is not a folder of {contents.content} ({error})") from error
        if not isinstance(manifest, dict) or manifest.get("format") != cls.FORMAT:
            raise InputError(f"{contents.field}: {file} has another format than {cls.FORMAT}; {contents.redo} again")
        return cls(folder, manifest)

    @classmethod
    def create(cls: type[Folder], folder: Path, manifest: Mapping[str, Any]) -> Folder:
        """Create a folder, or open it if it was begun with the same manifest.

        Raise InputError naming the first entry of `manifest` that differs.
        """
        wanted = {"format": cls.FORMAT, **json.loads(json.dumps(manifest))}
        if (folder / cls.MANIFEST).is_file():
            existing = cls.open(folder)
            for name in {**existing.manifest, **wanted}:
                if existing.manifest.get(name) != wanted.get(name):
                    raise InputError(
                        f"{name}: {cls.contents.subject.format(folder)} begun with {existing.manifest.get(name)!r}, "
                        f"got {wanted.get(name)!r}; use the same, or another folder"
                    )
            return existing
        folder.mkdir(parents=True, exist_ok=True)
        with atomic(folder / cls.MANIFEST) as temporary:
            temporary.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        return cls(folder, wanted)

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
            redo = f"delete it and {self.contents.redo.split()[0]} it again"
            raise InputError(f"{self.contents.field}: {file} is damaged ({error}); {redo}") from error
