"""`serve --chat-template`: a template in place of the model's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specengine import Engine
from specengine.cli.serve import read_template, templated
from specengine.drafters.ngram import NGram
from specengine.errors import InputError
from tests.backend import target_of
from tests.serve.saying import TEMPLATE
from tests.serve.served import CHAT, NAME, Served, served, tiny_engine
from tests.toy import byte_tokenizer, policy_for, tiny

TOOL = {"type": "function", "function": {"name": "f", "description": "Do it"}}


def test_a_template_that_takes_tools(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    asked = CHAT | {"tools": [TOOL], "max_tokens": 1}
    with served(tiny_engine) as plain:
        assert plain.post(asked).status_code == 400
    with served(lambda: templated(tiny_engine, read_template(file))) as server:
        assert server.post(asked).status_code == 200


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}


def roomy() -> Engine:
    model = tiny(max_position_embeddings=4096)
    return Engine(
        target_of(model), NGram(longest=3, shortest=1), policy_for("chain"), byte_tokenizer()
    )


def test_a_template_of_its_own_for_requests_with_tools() -> None:
    def prompt(server: Served, *messages: dict[str, Any], **fields: Any) -> str:
        answer = server.post({"messages": list(messages), **fields}, "/apply-template")
        assert answer.status_code == 200, answer.text
        return str(answer.json()["prompt"])

    user, system = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}
    with (
        served(lambda: templated(roomy, None)) as plain,
        served(lambda: templated(roomy, None, own=True)) as server,
    ):
        for turns in ([user], [system, user], [user, {"role": "assistant", "content": "So"}, user]):
            assert prompt(server, *turns) == prompt(plain, *turns)
            assert server.post(CHAT | {"messages": turns, "max_tokens": 1}).status_code == 200
        told = prompt(server, user, tools=[TOOL])
        assert "You are a helpful assistant." in told
        assert '{"name": "f", "description": "Do it"}\n' in told
        told = prompt(
            server,
            system,
            user,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            tools=[TOOL],
        )
        assert told.startswith("<|im_start|>system\nBe brief.\n\nYou can call")
        call = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
        assert f"<|im_start|>assistant\n{call}<|im_end|>" in told
        result = {"role": "tool", "tool_call_id": "call_1", "content": "2"}
        told = prompt(
            server, user, {"role": "assistant", "tool_calls": [CALL]}, result, tools=[TOOL]
        )
        assert (
            "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
            in told
        )
        history = [user, {"role": "assistant", "tool_calls": [CALL]}, result]
        told = prompt(server, *history)  # some clients leave `tools` out once a tool has answered
        assert told.startswith(
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi"
        )
        assert call in told
        assert "<tool_response>\n2\n</tool_response>" in told
        for fields in ({}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}):
            assert prompt(server, *history, **fields) == told
            answer = server.post(
                CHAT | {"messages": history, "max_tokens": 1, "return_token_ids": True, **fields}
            )
            assert (
                server.post({"tokens": answer.json()["prompt_token_ids"]}, "/detokenize").json()[
                    "content"
                ]
                == told
            )
        for path in ("/v1/chat/completions", "/apply-template"):
            refused = plain.post({"messages": history}, path)
            assert (refused.status_code, refused.json()["error"]["param"]) == (
                400,
                "messages[1].tool_calls",
            )
        forced = server.post(
            CHAT | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
        ).json()
        assert forced["choices"][0]["message"]["tool_calls"][0]["function"] == {
            "name": "f",
            "arguments": "{}",
        }
        assert (
            server.client.get("/props").json()["chat_template"]
            == plain.client.get("/props").json()["chat_template"]
        )
        assert "tools" in server.post({"model": NAME}, "/api/show").json()["capabilities"]


def test_a_model_that_takes_tools_keeps_its_template() -> None:
    def engine() -> Engine:
        made = tiny_engine()
        made.tokenizer = byte_tokenizer(TEMPLATE)
        return made

    assert templated(engine, None, own=True).tokenizer.chat_template == TEMPLATE


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}\n{{ m.content }")
    with pytest.raises(InputError, match=r"chat_template: .*, line 2"):
        read_template(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_template(tmp_path / "none")
    file.write_text("{% generation %}{{ messages[0].content }}{% endgeneration %}{% break %}"[:-11])
    assert read_template(file)
    assert read_template(None) is None


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ("é".encode("cp1252"), "it is not UTF-8: unexpected end of data at byte 0"),
        ("\ufeff{{ x }}".encode("utf-16-le"), "it is UTF-16, save it as UTF-8"),
        ("{{ x }}".encode("utf-32"), "it is UTF-32, save it as UTF-8"),
    ],
)
def test_a_file_of_another_encoding_is_named(data: bytes, named: str, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_bytes(data)
    with pytest.raises(InputError, match=f"chat_template: .* cannot be read .*{named}"):
        read_template(file)


def test_a_file_is_read_without_mark_and_carriage_returns(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_bytes("\ufeff{{ 'é' }}\r\n{{ x }}\r".encode())
    assert read_template(file) == "{{ 'é' }}\n{{ x }}\n"
