"""Folders that a long job fills shard by shard, and goes on with when it was interrupted."""

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
    """How a kind of folder is called in messages."""

    field: str
    what: str  # the folder holds
    subject: str  # what of it was begun, with the verb
    redo: str  # how to make it again


@dataclass(frozen=True)
class ShardFolder:
    """A manifest, and shards numbered from 0, each a safetensors file that is written whole or not at all."""

    folder: Path
    manifest: Mapping[str, Any]

    FORMAT: ClassVar[int]
    MANIFEST: ClassVar[str]
    contents: ClassVar[Contents]

    @classmethod
    def open(cls: type[Folder], folder: Path) -> Folder:
        """InputError where `folder` is none of this kind, or one of another format."""
        file, contents = folder / cls.MANIFEST, cls.contents
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{contents.field}: {folder} is no folder of {contents.what} ({error})") from error
        if not isinstance(manifest, dict) or manifest.get("format") != cls.FORMAT:
            raise InputError(f"{contents.field}: {file} has another format than {cls.FORMAT}; {contents.redo} again")
        return cls(folder, manifest)

    @classmethod
    def create(cls: type[Folder], folder: Path, manifest: Mapping[str, Any]) -> Folder:
        """A new folder, or the one that is there if it was begun in the same way.

        InputError naming the first entry of `manifest` that differs from that of the folder.
        """
        wanted = {"format": cls.FORMAT, **json.loads(json.dumps(manifest))}
        if (folder / cls.MANIFEST).is_file():
            found = cls.open(folder)
            for name in {**found.manifest, **wanted}:
                if found.manifest.get(name) != wanted.get(name):
                    raise InputError(
                        f"{name}: {cls.contents.subject.format(folder)} begun with {found.manifest.get(name)!r}, got "
                        f"{wanted.get(name)!r}; go on with the same, or take another folder"
                    )
            return found
        folder.mkdir(parents=True, exist_ok=True)
        with atomic(folder / cls.MANIFEST) as part:
            part.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        return cls(folder, wanted)

    def shard(self, number: int) -> Path:
        return self.folder / f"{number:05d}.safetensors"

    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]" * 5 + ".safetensors"))

    def save(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        with atomic(self.shard(number)) as part:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part)

    def load(self, file: Path, read: Callable[[dict[str, Tensor]], T]) -> T:
        """What `read` makes of a shard's tensors; InputError where the shard is damaged."""
        try:
            return read(load_file(file))
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
            redo = f"delete it and {self.contents.redo.split()[0]} it again"
            raise InputError(f"{self.contents.field}: {file} is damaged ({error}); {redo}") from error
