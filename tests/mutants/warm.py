"""Runs pytest in forks of a process that has imported what no mutant changes, which takes longer than most tests.

Reads a JSON list per line: pytest's arguments, and the file for its output. Writes the status of the process per line:
pytest's, or minus the number of the signal that ended it, which is SIGALRM after SECONDS.
"""

import importlib
import json
import os
import signal
import sys

SECONDS = 600
# the package itself, its tests and what reads the environment when it is imported are left to each fork
LIBRARIES = (
    "torch",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "pytest",
    "_pytest.assertion.rewrite",
)
OPTIONAL = (
    "hypothesis",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.generation",
    "torch._dynamo",
)


def run(arguments: list[str], file: str) -> None:
    """Run pytest and end the process."""
    signal.alarm(SECONDS)
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    status = importlib.import_module("pytest").main(arguments)
    sys.stdout.flush()
    os._exit(int(status))


def main() -> None:
    for name in LIBRARIES:
        importlib.import_module(name)
    for name in OPTIONAL:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    for line in sys.stdin:
        arguments, file = json.loads(line)
        if (child := os.fork()) == 0:
            run(arguments, file)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
