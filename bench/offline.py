"""Bring the default model to a machine without a network, in parts that travel one by one.

    python -m bench.offline split build/parts            # here: the model's GGUF file in parts of 24 MiB
    python -m bench.offline join build/parts FOLDER      # there: a model folder of the parts, once all have arrived

FOLDER is named as the default model, so that its draft head fits it. `join` needs the package gguf.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from specengine.checkpoints import embedded

PART = 24 << 20  # bytes


def split(file: Path, folder: Path, size: int = PART) -> list[Path]:
    """Write the file in parts of at most `size` bytes, numbered in their order."""
    folder.mkdir(parents=True, exist_ok=True)
    content, parts = file.read_bytes(), list[Path]()
    for number, first in enumerate(range(0, len(content), size)):
        parts.append(folder / f"{file.name}.{number:02}")
        parts[-1].write_bytes(content[first : first + size])
    return parts


def join(folder: Path, pinned: embedded.PinnedFile, file: Path) -> str | None:
    """Write the file that the parts of a folder make up. Returns why it is not the pinned one, or None."""
    name = Path(pinned.name).name
    file.write_bytes(b"".join(part.read_bytes() for part in sorted(folder.glob(f"{name}.*"))))
    return pinned.damage(file)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.offline", description=__doc__.splitlines()[0]
    )
    parser.add_argument("step", choices=["split", "join"])
    parser.add_argument("parts", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build", embedded.NAME))
    args = parser.parse_args(arguments)
    if args.step == "split":
        print(*split(embedded.gguf(), args.parts), sep="\n")
        return 0
    if (args.folder / "config.json").exists():
        return 0
    file = args.parts / Path(embedded.GGUF.name).name
    if (damage := join(args.parts, embedded.GGUF, file)) is not None:
        print(f"bench.offline: {damage}; not all parts are in {args.parts}", file=sys.stderr)
        return 1
    embedded.convert(file, args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
