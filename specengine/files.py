"""Files: text as other programs write it, JSON, files that appear whole or not at all, and the cache folder."""

import codecs
import errno
import json
import os
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

from specengine.errors import (
    CacheFolderError,
    CheckpointError,
    InputError,
    require_input,
    require_intact,
    require_or,
    restating,
)

CPU_FACTS = Path("/proc/cpuinfo")  # on Linux
MARK = "\ufeff"  # at the beginning of a text: written by some programs, and no part of it
_OTHERS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def read_text(file: Path) -> str:
    """Read a UTF-8 file without its mark, with "\\n" between lines. Raises OSError, ValueError for other encodings."""
    data = file.read_bytes()
    for mark, name in _OTHERS.items():
        require_or(ValueError, f"it is {name}, save it as UTF-8", not data.startswith(mark))
    with restating(
        UnicodeDecodeError,
        lambda error: ValueError(f"it is not UTF-8: {error.reason} at byte {error.start}"),
    ):
        text = data.decode("utf-8")
    return text.removeprefix(MARK).replace("\r\n", "\n").replace("\r", "\n")


WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@contextmanager
def atomic(file: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yield a path to write to; its content becomes `file` at the end, unless there was an error.

    mode: its permissions, less what the user's umask takes from any new file.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.touch(mode)
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(file: Path, text: str) -> None:
    """Write a text file that appears whole or not at all, in a folder that is made where it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


def processor_name() -> str:
    """Return the name of the processor, as far as the system knows it."""
    try:
        lines = CPU_FACTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def read_object(file: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raises OSError if it cannot be read, ValueError if it holds something else."""
    with restating(RecursionError, lambda _: ValueError("it is nested too deep")):
        content = json.loads(read_text(file))
    require_or(ValueError, "is not a JSON object", isinstance(content, dict))
    return cast("dict[str, Any]", content)


def safetensors_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers reads of a folder; none if it reads pickles there.

    CheckpointError where the list of shards is damaged or names one that is not there. Source:
    transformers.modeling_utils._get_resolved_checkpoint_files.
    """
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    index = folder / INDEX
    if not index.is_file():
        return []
    with restating(
        (OSError, ValueError, KeyError, AttributeError, TypeError),
        lambda error: CheckpointError(f"{index}: is damaged, fetch it again ({error!r})"),
    ):
        names = sorted(set(read_object(index)["weight_map"].values()))
    require_intact(
        f"{index}: is damaged, fetch it again (weight_map names no files)",
        bool(names) and all(isinstance(name, str) for name in names),
    )
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{index}: {len(missing)} of {len(names)} files are missing, fetch them: {missing[0]}"
        )
    return [folder / name for name in names]


def cache_dir() -> Path:
    """Return the cache folder: SPECENGINE_CACHE, else `specengine` in the user's cache. It need not exist.

    Raises CacheFolderError where the user has no home folder.
    """
    chosen = os.environ.get("SPECENGINE_CACHE")
    user_cache = os.environ.get("XDG_CACHE_HOME")
    with restating(
        RuntimeError,
        lambda _: CacheFolderError(
            "there is no cache folder, as HOME is not set and this user has no home folder: set SPECENGINE_CACHE to a "
            "folder"
        ),
    ):
        return (
            Path(chosen).expanduser()
            if chosen
            else (Path(user_cache) if user_cache else Path.home() / ".cache") / "specengine"
        )


def cache_problem() -> str | None:
    """Return why nothing can be kept in the cache folder, or None. The folder is made where it is missing."""
    try:
        folder = cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            return None
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except CacheFolderError as error:
        return str(error)
    except OSError as error:
        return f"the cache folder {folder} cannot be used ({error.strerror}): set SPECENGINE_CACHE to another folder"


def lines_of(file: Path) -> list[str]:
    """Return the lines of a text file. Raises InputError for a file that is no text."""
    with restating(
        (OSError, ValueError), lambda error: InputError(f"prompts: {file} cannot be read ({error})")
    ):
        return read_text(file).split("\n")  # not splitlines: a JSON string may hold U+2028


def require_same(
    what: str, file: Path, was: dict[str, Any], now: dict[str, Any], names: tuple[str, ...]
) -> None:
    """Raise InputError where a record of an earlier run differs from this one's in one of these fields."""
    differing = [name for name in names if was.get(name) != now.get(name)]
    listed = "; ".join(
        f"{name}: {was.get(name)!r} there, {now.get(name)!r} now" for name in differing
    )
    require_input(
        f"out: {file} belongs to a run with other {what} ({listed}); name another file",
        not differing,
    )


def unwritable(file: Path, error: OSError, field: str = "out") -> InputError:
    """Return the error of an output that cannot be written. field: the argument that named it."""
    return InputError(f"{field}: {file} cannot be written ({error.strerror or error})")


def writing(file: Path, field: str = "out") -> AbstractContextManager[None]:
    """Raise `unwritable` for an OSError in this context."""
    return restating(OSError, lambda error: unwritable(file, error, field))
