"""Ollama's own client."""

from typing import Any

import pytest

ollama = pytest.importorskip("ollama")
pytestmark = pytest.mark.slow

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
SHORT: dict[str, Any] = {"num_predict": 12, "temperature": 0, "num_ctx": 4096, "seed": 1}
RIVER = {"type": "object", "properties": {"river": {"enum": ["Nile", "Po"]}}, "required": ["river"]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "description": "Look a river up", "parameters": RIVER},
}


@pytest.fixture(scope="module")
def calling(calling_server: str) -> Any:
    return ollama.Client(host=calling_server)


def test_a_chat_whole_and_streamed(calling: Any) -> None:
    whole = calling.chat("llama3", HELLO, options=SHORT)
    parts = list(calling.chat("llama3", HELLO, options=SHORT, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert parts[-1].done
    assert parts[-1].eval_count == whole.eval_count <= 12
    assert whole.prompt_eval_count > 0


def test_generate_raw_and_with_the_template(calling: Any) -> None:
    whole = calling.generate("llama3", "Hello", options=SHORT)
    parts = list(calling.generate("llama3", "Hello", options=SHORT, stream=True))
    assert "".join(part.response for part in parts) == whole.response
    assert calling.generate("llama3", "Hello", options=SHORT, raw=True).prompt_eval_count == len(
        "Hello"
    )


def test_schemas_and_tools(calling: Any) -> None:
    river = calling.chat("llama3", HELLO, format={"enum": ["Nile", "Po"]}).message.content
    assert river in ('"Nile"', '"Po"')
    call = {"function": {"name": "look_up", "arguments": {"river": "Po"}}}
    turns = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "wet"},
    ]
    for streams in (False, True):
        answer = calling.chat("llama3", turns, tools=[TOOL], options=SHORT, stream=streams)
        assert (list(answer)[-1] if streams else answer).done


def test_what_there_is(calling: Any) -> None:
    assert len(calling.list().models) == len(calling.ps().models) == 1
    assert "tools" in calling.show("llama3").capabilities


def test_errors_are_the_clients_own(calling: Any) -> None:
    with pytest.raises(ollama.ResponseError, match=r"options\.mirostat") as refused:
        calling.chat("llama3", HELLO, options={"mirostat": 2})
    assert refused.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="embeddings are not offered") as refused:
        calling.embed("llama3", "Hello")
    assert refused.value.status_code == 400
