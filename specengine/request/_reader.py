"""A process that reads grammars, run as a script by `readers`: it imports neither torch nor this package.

Arguments: the folder of llguidance, bytes of memory and of stack, and niceness. A line of standard input is a grammar
and the limits for it, as JSON; a line of standard output says what is wrong with it, or nothing.
"""

import contextlib
import json
import os
import sys
import threading
import types
from typing import Any


def main() -> None:
    folder, *numbers = sys.argv[1:]
    memory, stack, niceness = map(int, numbers)
    package: Any = types.ModuleType("llguidance")
    package.__path__ = [folder]  # its own module imports much more, for a few tenths of a second
    sys.modules["llguidance"] = package
    from llguidance._lib import LLMatcher, LLParserLimits

    _limit(memory + stack)
    if niceness and hasattr(os, "nice"):
        os.nice(niceness)

    def read() -> None:
        print("ready", flush=True)
        for line in sys.stdin:
            grammar, limits = json.loads(line)
            is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LLParserLimits(**limits))
            print(json.dumps(messages[0] if is_wrong else ""), flush=True)

    threading.stack_size(stack)
    reader = threading.Thread(target=read)
    reader.start()
    reader.join()


def _limit(more: int) -> None:
    """Limit the address space to `more` bytes than there are, where the system has such a limit."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # a Mac has no such limit, Windows no such module
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/statm") as sizes:
            now = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))


main()
