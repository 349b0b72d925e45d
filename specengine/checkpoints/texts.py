"""Texts of earlier requests that drafts copy from: by owner, bounded in bytes, on disk where a folder is named.

    FOLDER/TOKENS-OWNER.memory   a header, then a record per text: count, checksum, and token ids of 32 bits

A record counts only if it is whole, so a process may be killed at any moment. A file is rewritten as another one that
takes its place. What does not begin as such a file is refused, and stays as it is.
"""

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specengine.errors import InputError, require_input
from specengine.files import atomic, cache_dir, lines_of, read_text, writing

LIMIT = 64 << 20  # bytes of all texts with their index
MAX_OWNERS = 64  # whose texts are kept in memory
MAX_FILE = 1 << 20  # bytes of a file of a corpus


class OwnedTexts:
    """The texts of one owner. index: a TextMemory of csrc/spec/memory.hpp; file: None for none; header: of the file.

    Raises InputError where the file is another one, OSError where it cannot be used.
    """

    def __init__(self, index: Any, file: Path | None, header: bytes, vocab_size: int) -> None:
        self.index, self._file, self._header = index, file, header
        if file is not None and file.exists():
            data = file.read_bytes()
            require_input(
                f"memory: {file} is of another program, version or tokenizer; name another folder",
                header.startswith(data[: len(header)]),
            )
            if not self.index.read(data[len(header) :], vocab_size) or len(data) < len(header):
                self._write(file)

    def add(self, prompt: list[int], answer: list[int]) -> None:
        """Keep a text, unless it is there. Raises OSError where it cannot be written."""
        tokens, file = [*prompt, *answer], self._file
        if not self.index.add(tokens) or file is None:
            return
        if not file.exists() or file.stat().st_size > self.index.bytes:
            self._write(file)
        else:
            with open(os.open(file, os.O_WRONLY | os.O_APPEND), "wb", buffering=0) as end:
                end.write(self.index.records([tokens]))

    def _write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with atomic(file, 0o600) as temporary:
            temporary.write_bytes(self._header + self.index.records(self.index.texts()))


class Memory:
    """Texts by owner: a draft copies from those of its own request's owner alone.

    make: makes an index of that many bytes; folder: of files, None for none; limit: bytes of all owners, of
    which each has an equal share. Owners that asked longest ago go where there are more than MAX_OWNERS.
    """

    def __init__(
        self,
        make: Callable[[int], Any],
        vocab_size: int,
        tokenizer: Any = None,
        folder: Path | None = None,
        limit: int = LIMIT,
    ) -> None:
        self._make, self._vocab_size, self._limit = make, vocab_size, limit
        self._folder = folder
        vocabulary = sorted(getattr(tokenizer, "get_vocab", dict)().items()) if folder else []
        self._tokens = hashlib.sha256(json.dumps([vocab_size, vocabulary]).encode()).hexdigest()
        self._owners = OrderedDict[str, OwnedTexts]()
        self._guard = threading.Lock()

    def of(self, owner: str = "") -> OwnedTexts:
        """Return the texts of an owner. Raises InputError where they are on disk and cannot be read."""
        with self._guard:
            if owner not in self._owners:
                while len(self._owners) >= MAX_OWNERS:
                    self._owners.popitem(last=False)
                share = self._limit // (len(self._owners) + 1)
                name = hashlib.sha256(owner.encode()).hexdigest()[:16] if owner else "all"
                file = self._folder / f"{self._tokens[:16]}-{name}.memory" if self._folder else None
                header = f"specengine memory 1\n{self._tokens}\n".encode()
                with writing(file or Path(), "memory"):
                    new = OwnedTexts(self._make(share), file, header, self._vocab_size)
                for texts in self._owners.values():
                    texts.index.limit(share)
                self._owners[owner] = new
            self._owners.move_to_end(owner)
            return self._owners[owner]


def folder_of(name: str | None) -> Path | None:
    """Return the folder that memory= names; None where nothing is written."""
    return (
        cache_dir() / "memory"
        if name == "disk"
        else None
        if name in (None, "process")
        else Path(str(name))
    )


def corpus(place: Path) -> Iterator[str]:
    """Yield the texts of a JSONL file, one a line, or of the files in a folder that are text. InputError.

    A line is a string, or an object or list whose strings make up the text, without roles of messages. Left out of a
    folder are hidden files, and those above MAX_FILE bytes.
    """
    if not place.is_dir():
        for number, line in enumerate(lines_of(place), 1):
            try:
                text = "\n".join(_strings(json.loads(line or '""')))
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"memory_from: {place}, line {number} is not JSON ({error})"
                ) from error
            if text:
                yield text
        return
    for file in sorted(place.rglob("*")):
        hidden = any(name.startswith(".") for name in file.relative_to(place).parts)
        if not hidden and file.is_file() and file.stat().st_size <= MAX_FILE:
            try:
                text = read_text(file)
            except (OSError, ValueError):
                continue
            if "\0" not in text:
                yield text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        items = value if isinstance(value, list) else [value[key] for key in value if key != "role"]
        for item in items:
            yield from _strings(item)
