"""python -m specengine, and the command `specengine`: the command line as a process of its own."""

import os
import signal
import sys
from typing import Any, NoReturn

CTRL_C = 130  # exit status


def _end(*_: Any) -> NoReturn:
    """End at once: threads that still compute are not waited for, and nothing is left to write."""
    os._exit(CTRL_C)


def run() -> NoReturn:
    """Run one command and end the process. Ctrl-C ends it with status 130 at any moment, without a traceback."""
    # as nohup lets a process ignore it
    takes = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if takes:
        signal.signal(signal.SIGINT, _end)
    from specengine.cli import main

    def ready() -> None:
        if takes:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    sys.unraisablehook = _reported
    try:
        status = main(ready=ready)
    except KeyboardInterrupt:  # a second one
        status = CTRL_C
    if takes:
        signal.signal(signal.SIGINT, _end)
    if status == CTRL_C:
        _end()
    sys.exit(status)


def _reported(problem: Any) -> None:
    """Interrupt again where Ctrl-C met a callback, which Python cannot end: it would report it and go on."""
    if not issubclass(problem.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(problem)
        return
    import threading

    threading.Timer(0.02, signal.raise_signal, [signal.SIGINT]).start()


if __name__ == "__main__":
    run()
