"""A server whose model calls the tool that it is offered, tells what the tool said, and edits a file as aider asks.

Of Claude Code's tools it calls Bash.

python -m tests.serve.scripted prints its address, and ends with its standard input.
"""

import sys

from specengine.protocol.requests import ChatRequest, NamedChoice, Sampling
from tests.serve.saying import saying

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"river": "Po"}}\n</tool_call>'
SHELL = '<tool_call>\n{"name": "Bash", "arguments": {"command": "echo the river runs"}}\n</tool_call>'
EDIT = "sum.py\n```\ndef add(a, b):\n    return a + b\n```"


def answer_to(request: Sampling) -> str | None:
    """Return the answer, or None for one that the model makes up within a constraint."""
    if not isinstance(request, ChatRequest) or request.tool_choice == "required":
        return None
    last = request.messages[-1]
    if last.role != "tool" and request.template_tools:
        shell = any(tool.function.name == "Bash" for tool in request.tools or ())
        return None if isinstance(request.tool_choice, NamedChoice) else SHELL if shell else CALL
    if request.constraints:
        return '{"river": "Po"}'
    if last.role == "tool":
        return f"It is {last.text}."
    return EDIT if "Mend the sum" in last.text else f"You said: {last.text}"


if __name__ == "__main__":
    with saying(context=1 << 17) as made:
        made.said = answer_to
        print(made.server.address, flush=True)
        sys.stdin.read()
