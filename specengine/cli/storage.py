"""specengine list and specengine clean: what this package keeps on the disk, and how to be rid of it."""

import argparse
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import CacheNotFound, scan_cache_dir

from specengine.checkpoints import likeness
from specengine.checkpoints.embedded import cache_folder_errors
from specengine.cli.commands import KEPT
from specengine.cli.terminal import as_json, say
from specengine.errors import InputError, require_input
from specengine.files import cache_dir

ABOUT = {  # of the cache folder's own folders
    "models": "the default model, fetched again when it is needed",
    "costs": "measured costs, measured again when they are needed",
    "downloads": "a download that was interrupted",
    "history": "what was typed into `chat`",
    "memory": "prompts and answers, kept by `--memory disk`",
}


@dataclass(frozen=True)
class Kept:
    """Something on the disk; size: in bytes; deletable: whether `clean` removes it."""

    kind: str
    name: str
    size: int
    path: str
    about: str = ""
    deletable: bool = False


def run_list(arguments: argparse.Namespace) -> int:
    stored = _all()
    if arguments.json:
        print(as_json([asdict(each) for each in stored]))
        return 0
    width = max([len(each.name) for each in stored], default=0)
    for kind in dict.fromkeys(each.kind for each in stored):
        print(kind)
        for each in stored:
            if each.kind == kind:
                print(f"  {each.name:<{width}}{_size(each.size):>10}  {each.about or each.path}")
    return 0


def run_clean(arguments: argparse.Namespace) -> int:
    what = arguments.what or KEPT
    chosen = [
        each
        for each in _all()
        if each.deletable and Path(each.path).relative_to(cache_dir()).parts[0] in what
    ]
    if not chosen:
        say(f"There is nothing to delete in {cache_dir()}")
        return 0
    for each in chosen:
        say(f"  {each.path}  {_size(each.size)}  {each.about}")
    total = _size(sum(each.size for each in chosen))
    if not arguments.yes and not _agreed(f"Delete these, {total}?"):
        say("Nothing was deleted.")
        return 1
    for each in chosen:
        _delete(Path(each.path))
    say(f"{total} deleted")
    return 0


def _agreed(question: str) -> bool:
    require_input(
        "yes: standard input is no terminal to ask at; pass --yes to delete what is listed",
        sys.stdin.isatty(),
    )
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _delete(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"clean: {path} cannot be deleted ({error.strerror or error})") from error


# ---- what there is


def _all() -> list[Kept]:
    """Return what the cache folder holds, the heads, and the models in the Hub's cache; CacheFolderError."""
    root = cache_dir()
    with cache_folder_errors(root):
        return list(_kept_in(root))


def _kept_in(root: Path) -> Iterator[Kept]:
    for folder in sorted((root / "models").glob("*")):
        if folder.is_dir():
            yield Kept("models", folder.name, _bytes(folder), str(folder), ABOUT["models"], True)
    yield from _of_the_hub()
    for head in likeness.known():
        yield Kept("heads", head.name, _bytes(head.folder), str(head.folder), f"for {head.target}")
    for name in KEPT[1:]:
        if (size := _bytes(root / name)) or (root / name).is_dir():
            files = sum(file.is_file() for file in (root / name).rglob("*"))
            count = f"{files} file{'s' * (files != 1)}"
            yield Kept("cache", name, size, str(root / name), f"{count}; {ABOUT[name]}", True)


def _of_the_hub() -> Iterator[Kept]:
    """Yield the Hub's models with a config.json, which belong to all programs here: `clean` leaves them alone."""
    try:
        repositories = scan_cache_dir().repos
    except (CacheNotFound, OSError, ValueError):
        return
    for repository in sorted(repositories, key=lambda each: str(each.repo_id)):
        if repository.repo_type == "model":
            yield Kept(
                "models of the Hub",
                repository.repo_id,
                repository.size_on_disk,
                str(repository.repo_path),
                f"delete it with: hf cache rm model/{repository.repo_id}",
            )


def _bytes(path: Path) -> int:
    """Return the bytes of a folder's files; those that links lead to are somebody else's."""
    return sum(
        file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink()
    )


def _size(count: int) -> str:
    for unit, each in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= each:
            return f"{count / each:.1f} {unit}"
    return f"{count} B"
