"""goose's own providers, from its development kit, over chat completions and Anthropic's messages."""

import asyncio
import json
from typing import Any

import pytest

goose = pytest.importorskip("goose")

ASKED = "Say what the river does."
TOOL = {"type": "object", "properties": {"command": {"type": "string"}}}
PROVIDERS = {
    "openai": lambda base: goose.openai_provider(
        "any", f"{base}/v1"
    ),  # it posts to /chat/completions
    "anthropic": lambda base: goose.anthropic_provider("any", base, []),
}


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest, scripted_server: str) -> Any:
    return PROVIDERS[request.param](scripted_server)


def asked(text: str) -> tuple[Any, str, list[Any]]:
    model = goose.ProviderModelConfig(model_name="claude", max_tokens=400, context_limit=100_000)
    content = [goose.MessageContent.TEXT(text)]
    return model, "Be brief.", [goose.ProviderMessage(role=goose.MessageRole.USER, content=content)]


def test_whole_and_streamed(provider: Any) -> None:
    async def both() -> tuple[Any, str]:
        whole = await provider.complete(*asked("Hello"), [])
        stream, streamed = await provider.stream(*asked("Hello"), []), ""
        while (chunk := await stream.next_chunk()) is not None:
            streamed += getattr(chunk, "text", None) or ""
        return whole, streamed

    whole, streamed = asyncio.run(both())
    assert whole.content[0].text == streamed == "You said: Hello"
    assert whole.usage.output_tokens


def test_it_calls_a_tool(provider: Any) -> None:
    tool = goose.ProviderTool(
        name="shell", description="Run it", input_schema_json=json.dumps(TOOL)
    )
    answer = asyncio.run(provider.complete(*asked(ASKED), [tool]))
    (call,) = json.loads(answer.message_json)["content"]
    assert call["type"] == "toolRequest"
    assert call["toolCall"]["value"] == {
        "name": "shell",
        "arguments": {"command": "echo the river runs"},
    }
