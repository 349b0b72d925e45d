"""A server whose model calls the tool that it is offered, tells what the tool said, and edits a file as aider asks.

Of an agent's tools it calls the one that runs commands.

python -m tests.serve.scripted prints its address, and ends with its standard input.
"""

import json
import sys

from specengine.protocol.requests import ChatRequest, NamedChoice, Sampling
from tests.serve.saying import saying

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"river": "Po"}}\n</tool_call>'
SAYS = "echo the river runs"
SHELLS = {  # tools of agents that run commands: their arguments
    "Bash": {"command": SAYS},  # Claude Code
    "bash": {"command": SAYS, "description": "Asks the river"},  # opencode
    "exec_command": {"cmd": SAYS},  # Codex
    "shell": {"command": SAYS},  # goose
}
EDIT = "sum.py\n```\ndef add(a, b):\n    return a + b\n```"


def answer_to(request: Sampling) -> str | None:
    """Return the answer, or None for one that the model makes up within a constraint."""
    if not isinstance(request, ChatRequest) or request.tool_choice == "required":
        return None
    last = request.messages[-1]
    if last.role != "tool" and request.template_tools:
        if isinstance(request.tool_choice, NamedChoice):
            return None
        offered = {
            tool.function.name: tool.function.parameters or {} for tool in request.tools or ()
        }
        shell = next((name for name in SHELLS if name in offered), None)
        return CALL if shell is None else _call(shell, SHELLS[shell])
    if request.constraints:
        return '{"river": "Po"}'
    if last.role == "tool":
        return f"It is {last.text}."
    return EDIT if "Mend the sum" in last.text else f"You said: {last.text}"


def _call(name: str, arguments: dict[str, str]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


if __name__ == "__main__":
    with saying(context=1 << 17) as made:
        made.said = answer_to
        print(made.server.address, flush=True)
        sys.stdin.read()
