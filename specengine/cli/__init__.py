"""The command `specengine`. Answers go to standard output, everything else to standard error.

Exit status: 0, or 1 where `check` found a mismatch, 2 for an error in what was asked, 70 for one that nobody
expected, 130 after Ctrl-C.
"""

import contextlib
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from specengine.cli.commands import make_parser
from specengine.cli.parser import RANKS
from specengine.cli.terminal import OutputError, prepare, say, tell
from specengine.errors import DrafterError, PolicyError, SpecEngineError, require_input

SPLIT = ("generate", "chat", "serve")  # commands that run one engine


def main(arguments: Sequence[str] | None = None, ready: Callable[[], None] = lambda: None) -> int:
    """Run one command; returns the exit status. Malformed arguments end in argparse's SystemExit(2).

    ready: called between reading the arguments and the command's own work.
    """
    prepare()
    parsed: Any = None
    try:
        parsed = make_parser().parse_args(arguments)
        ready()
        model = parsed.loads(parsed)
        require_input(
            f"torchrun: accepted with the commands {', '.join(SPLIT)}",
            RANKS == 1 or parsed.run.partition(":")[0].rpartition(".")[2] in SPLIT,
        )
        if RANKS > 1 and os.environ.get("RANK", "0") != "0":
            return _follow(parsed)
        if model is not None:
            tell(f"Loading {model}")
        # imports the command's module, which may take seconds for torch and transformers
        run = pkgutil.resolve_name(parsed.run)
        if (threads := getattr(parsed, "threads", None)) is not None:
            import torch

            torch.set_num_threads(threads)
        status: int = run(parsed)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return _stopped(parsed)
    except (BrokenPipeError, OutputError) as error:
        return _lost(error)
    except Exception as error:
        return _failed(parsed, error)


def _failed(parsed: Any, error: Exception) -> int:
    """Report an error. Return the exit status."""
    if _of_ctrl_c(error):
        return _stopped(parsed)
    if getattr(parsed, "debug", False):
        raise error
    expected = isinstance(error, SpecEngineError)
    kind = "" if expected else f"{type(error).__name__}: "
    hint = (
        ""
        if expected and not isinstance(error, PolicyError | DrafterError)
        else " (--debug shows where)"
    )
    _report(f"error: {kind}{' '.join(str(error).split())}{hint}")
    return 2 if expected else 70


def _of_ctrl_c(error: BaseException | None) -> bool:
    """Return whether an error was made of Ctrl-C, as by a module whose import was interrupted."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _lost(error: OSError) -> int:
    """Report that standard output cannot be written, unless its reader has gone. Return the exit status."""
    _silence(sys.stdout)
    if isinstance(error, BrokenPipeError):
        _silence(sys.stderr)
        return 1
    _report(f"error: standard output cannot be written ({error.strerror or error})")
    return 2


def _report(text: str) -> None:
    try:
        say(f"specengine: {text}")
    except OSError:
        _silence(sys.stderr)


def _stopped(parsed: Any) -> int:
    """Say where an interrupted command would continue. Return the exit status."""
    place = getattr(parsed, getattr(parsed, "goes_on", ""), None)
    if place is None:
        return 130
    if str(place) == "-" or str(place).startswith(("/dev/", "/proc/")):
        text = f"stopped; nothing continues {place}; the same command begins anew"
    elif os.path.isfile(place) or os.path.isdir(place):
        text = (
            f"stopped; {place} keeps what was done so far, and the same command goes on from there"
        )
    else:
        text = f"stopped before anything was written to {place}; the same command begins anew"
    _report(text)
    return 130


def _silence(stream: TextIO) -> None:
    """Discard what Python still flushes at its exit to a stream whose reader has gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):  # without a file
        os.dup2(nowhere, stream.fileno())


def _follow(parsed: Any) -> int:
    """Run a rank other than the first: its engine follows the first one's, and it neither reads nor prints."""
    from specengine.cli import given

    given.recipe(parsed, progress=lambda line: None).load()
    return 0
