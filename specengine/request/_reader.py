"""A process that reads grammars or fills chat templates, run as a script by `readers`.

It imports neither torch nor this package. Argument: what `readers.ReadingProcess` writes, as JSON. A line of standard
input is a question, and a line of standard output answers it; both are JSON.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

MAX_TEXT = 1 << 24  # characters of a filled template


def main() -> None:
    limits = json.loads(sys.argv[1])
    sys.path += [folder for folder in limits["path"] if folder not in sys.path]
    answer = {"llguidance": read_grammars, "transformers": fill_templates}[limits["package"]](
        limits["folder"]
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this
    _limit(limits["memory"] + limits["stack"])
    if limits["niceness"] and hasattr(os, "nice"):
        os.nice(limits["niceness"])

    def read() -> None:
        print(flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(*json.loads(line))), flush=True)

    threading.stack_size(limits["stack"])
    reader = threading.Thread(target=read)
    reader.start()
    reader.join()


def read_grammars(folder: str) -> Callable[..., str]:
    """Return what reads a grammar within limits, and says what is wrong with it, or nothing."""
    _skip_module("llguidance", folder)
    from llguidance._lib import LLMatcher, LLParserLimits

    def read(grammar: str, limits: dict[str, Any]) -> str:
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(
            grammar, limits=LLParserLimits(**limits)
        )
        return str(messages[0]) if is_wrong else ""

    return read


def fill_templates(folder: str) -> Callable[..., dict[str, str]]:
    """Return what fills a chat template with a conversation, by transformers."""
    for name in ("transformers", "transformers.utils"):
        _skip_module(name, os.path.join(os.path.dirname(folder), *name.split(".")))
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError:  # of a version that needs those modules
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        from transformers.utils.chat_template_utils import render_jinja_template

    def fill(conversation: Any, options: dict[str, Any]) -> dict[str, str]:
        try:
            text = str(render_jinja_template([conversation], **options)[0][0])
        except MemoryError:
            raise  # the process has grown enough
        except Exception as error:  # a template raises what it likes
            return {"fault": str(error) or type(error).__name__}
        fault = f"it makes a text of {len(text)} characters, accepted up to {MAX_TEXT}"
        return {"fault": fault} if len(text) > MAX_TEXT else {"text": text}

    return fill


def _skip_module(name: str, folder: str) -> None:
    """Let modules of a package be imported without its own, which imports much more for some tenths of a second."""
    package: Any = types.ModuleType(name)
    package.__path__ = [folder]
    sys.modules[name] = package


def _limit(more: int) -> None:
    """Limit the address space to `more` bytes than there are, where the system has such a limit."""
    with contextlib.suppress(
        ImportError, OSError, ValueError
    ):  # a Mac has no such limit, Windows no such module
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/statm") as sizes:
            now = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))


main()
