"""The cache folder on disk: pinned files, and finished folders that carry a manifest."""

import contextlib
import errno
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specengine.errors import CacheFolderError, SpecEngineError
from specengine.files import read_object

MANIFEST = "specengine.json"
FULL_DISK = {errno.ENOSPC, errno.EDQUOT}
NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


@dataclass(frozen=True)
class PinnedFile:
    """A file known by its exact size in bytes and SHA-256."""

    name: str
    size: int
    sha256: str

    def damage(self, file: Path) -> str | None:
        """Why `file` is not this file, or None."""
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != self.size:
            return f"{file} has {file.stat().st_size:,} bytes instead of {self.size:,}"
        if sha256(file) != self.sha256:
            return f"{file} has another SHA-256 than {self.sha256}"
        return None


def sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_manifest(folder: Path, provenance: dict[str, Any]) -> None:
    """Records where the folder came from, and the size, SHA-256 and modification time of each of its files."""
    files = {file.name: _entry(file) for file in sorted(folder.iterdir()) if file.name != MANIFEST}
    text = json.dumps({**provenance, "files": files}, indent=2) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def provenance(folder: Path) -> dict[str, Any]:
    """What a finished folder's manifest says of where it comes from; nothing where it cannot be read."""
    try:
        return read_object(folder / MANIFEST)
    except (OSError, ValueError):
        return {}


def _entry(file: Path) -> dict[str, Any]:
    status = file.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": sha256(file)}


def folder_damage(folder: Path) -> str | None:
    """Why a finished folder cannot be trusted, or None.

    A file's content is read only when its modification time is no longer the recorded one: hashing the default model
    takes 0.2 to 0.6 s, as long as loading it.
    """
    try:
        files = read_object(folder / MANIFEST)["files"]
        for name, entry in files.items():
            if reason := _file_damage(folder / name, entry):
                return reason
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return f"{folder / MANIFEST} is missing or unreadable"
    return None


def _file_damage(file: Path, entry: dict[str, Any]) -> str | None:
    pinned = PinnedFile(file.name, entry["size"], entry["sha256"])
    unchanged = file.is_file() and file.stat().st_mtime_ns == entry["mtime_ns"] and file.stat().st_size == pinned.size
    return None if unchanged else pinned.damage(file)


@contextlib.contextmanager
def cache_folder_errors(root: Path) -> Iterator[None]:
    """Turns a full disk or a folder that refuses writing into an error that says which folder and what to do."""
    try:
        yield
    except SpecEngineError:
        raise
    except Exception as error:
        number = _error_number(error)
        if number in FULL_DISK:
            remedy = "free some space there"
        elif number in NOT_WRITABLE:
            remedy = "make it a writable folder"
        else:
            raise
        raise CacheFolderError(
            f"the cache folder {root} cannot be used ({error}): {remedy}, or set SPECENGINE_CACHE to another folder"
        ) from error


def _error_number(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    # safetensors and tokenizers write from Rust: their own exception types, the number only in the text
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match.group(1)) if match else None
