"""Chat templates: filled as transformers fills them, in a process that ends alone where one has no bounds."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from specengine import Engine
from specengine.checkpoints.pretrained import taking_texts
from specengine.errors import InputError
from specengine.request import prompts
from specengine.request.prompts import filled, token_ids
from specengine.request.readers import TEMPLATES, NoReaderError, Readers
from specengine.request.text import SharedTokenizer
from tests.serve.served import CHAT, served, tiny_engine
from tests.toy import byte_tokenizer, tiny

HELLO = [{"role": "user", "content": "Hello"}]
PLAIN = "{% for m in messages %}<u>{{ m['content'] }}</u>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "two branches": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a power": "{{ (3 ** (10 ** 9)) % 7 }}",
}
HUGE = {
    "a product": "{{ 'a' * 10 ** 10 }}",
    "a width": "{{ 'a'.center(10 ** 10) }}",
    "a filter's width": "{{ 'a' | center(10 ** 10) }}",
    "a list": "{{ ([0] * 10 ** 10) | length }}",
    "doubling": "{% set n = namespace(t='ab') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
    "a long text": "{{ 'a' * (2 ** 24 + 1) }}",
}


class Role(StrEnum):
    USER = "user"


def tokenizer_of(template: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pool = Readers(TEMPLATES)
    monkeypatch.setattr(prompts, "FILLERS", pool)
    yield
    pool.close()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("messages", "tools", "options"),
    [
        (HELLO, None, {}),
        (HELLO, None, {"add_generation_prompt": True}),
        (
            [*HELLO, {"role": "assistant", "content": "Yes", "name": None}],
            None,
            {"continue_final_message": True},
        ),
        (
            [{"role": Role.USER, "content": "\U0001f600 \u2028 {{ 1 }}"}],
            None,
            {"bos_token": "<other>"},
        ),
        (
            [{"role": "user", "content": "a", "sent": float("inf")}],
            [{"type": "function", "n": 2**70}],
            {"sent": {"b": (1,)}},
        ),
    ],
)
def test_it_is_what_transformers_makes_of_it(
    messages: Any, tools: Any, options: dict[str, Any], shared: bool
) -> None:
    tokenizer = tokenizer_of(
        "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{{ m.name is defined }}{{ m['content'] }}{% endfor %}"
        "{{ tools | tojson }}{{ sent['b'] | tojson if sent }}{% if add_generation_prompt %}<a>{% endif %}"
    )
    expected = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    assert (
        filled(SharedTokenizer.of(tokenizer) if shared else tokenizer, messages, tools, **options)
        == expected
    )


@pytest.mark.sliced(1)
@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_refused(
    name: str, own_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MAX_SECONDS", 0.2)
    with pytest.raises(
        InputError, match=r"^prompt: the chat template .* \(filling it takes more than 0.2 s\)"
    ):
        filled(tokenizer_of(ENDLESS[name]), HELLO, field="prompt")
    assert filled(tokenizer_of(PLAIN), HELLO) == "<u>Hello</u>"


@pytest.mark.sliced(2)
@pytest.mark.parametrize("name", HUGE)
def test_a_template_that_takes_memory_is_refused(name: str, own_process: None) -> None:
    with pytest.raises(
        InputError, match=r"takes more than 256 MB|makes a text of 16777217 characters"
    ):
        filled(tokenizer_of(HUGE[name]), HELLO)
    assert filled(tokenizer_of(PLAIN), HELLO) == "<u>Hello</u>"


def test_words_of_a_template_are_told() -> None:
    with pytest.raises(InputError, match="roles must alternate"):
        filled(tokenizer_of("{{ raise_exception('roles must alternate') }}"), HELLO)
    with pytest.raises(InputError, match="unknown tag 'bad'"):
        filled(tokenizer_of("{% bad %}"), HELLO)


def test_a_tokenizer_that_fills_it_by_code_of_its_own_is_asked() -> None:
    class Own(type(byte_tokenizer())):  # type: ignore[misc]
        def apply_chat_template(self, messages: Any, **options: Any) -> Any:
            return (
                {"input_ids": [1, 2, 3]}
                if options.get("return_dict")
                else f"own {messages} {options['tools']}"
            )

    tokenizer = tokenizer_of(PLAIN)
    tokenizer.__class__ = Own
    assert filled(tokenizer, HELLO, [1]) == f"own {HELLO} [1]"
    for one in (tokenizer, SharedTokenizer.of(tokenizer)):
        assert token_ids(HELLO, one, raw=False, vocab_size=9, max_context=9) == [1, 2, 3]


def test_without_processes_it_is_filled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*arguments: Any) -> str:
        raise NoReaderError

    monkeypatch.setattr(Readers, "answer", none)
    assert filled(tokenizer_of(PLAIN), HELLO, add_generation_prompt=True) == "<u>Hello</u><a>"


def test_a_filled_template_fits_the_context() -> None:
    engine = Engine.from_pretrained(tiny(), tokenizer=tokenizer_of("{{ 'a b ' * 10 ** 6 }}"))
    began = time.monotonic()
    for messages in (HELLO, "Hello"):
        with pytest.raises(InputError, match="4000000 characters, accepted at most 256 tokens"):
            engine.generate(messages, max_new_tokens=1)
        with pytest.raises(InputError, match="4000000 characters, accepted at most 256 tokens"):
            engine.generate(messages, max_new_tokens=1, allow_special_text=False)
    assert time.monotonic() - began < 60


def test_a_folder_is_loaded_whose_template_has_no_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_SECONDS", 0.2)
    template = ENDLESS["loops in loops"] + "{# text #}"
    assert taking_texts(tokenizer_of(template)).chat_template == template


@pytest.mark.slow
def test_a_server_refuses_it_and_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_SECONDS", 0.2)
    guarded = (
        "{% if messages[0]['content'] == 'bomb' %}"
        + ENDLESS["loops in loops"]
        + "{% endif %}"
        + PLAIN
    )

    def engine() -> Engine:
        made = tiny_engine()
        made.tokenizer.chat_template = guarded
        return made

    with served(engine) as server:
        for path in ("/v1/chat/completions", "/v1/messages", "/apply-template"):
            asked = {
                "messages": [{"role": "user", "content": "bomb"}],
                "max_tokens": 1,
                "model": CHAT["model"],
            }
            if path == "/apply-template":
                asked = {"messages": asked["messages"]}
            answer = server.post(asked, path)
            assert answer.status_code == 400, answer.text
            assert "filling it takes more than" in answer.text
        assert server.post(CHAT | {"max_tokens": 1}).status_code == 200


def test_ctrl_c_is_for_whoever_started_the_process(own_process: None) -> None:
    assert filled(tokenizer_of(PLAIN), HELLO) == "<u>Hello</u>"
    process = prompts.FILLERS._idle[0]._process
    process.send_signal(signal.SIGINT)
    assert filled(tokenizer_of(PLAIN), HELLO) == "<u>Hello</u>"
    assert prompts.FILLERS._idle[0]._process is process


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_imports_no_torch(own_process: None) -> None:
    assert filled(tokenizer_of(PLAIN), HELLO) == "<u>Hello</u>"
    maps = Path(f"/proc/{prompts.FILLERS._idle[0]._process.pid}/maps").read_text()
    assert "numpy" in maps
    assert "torch" not in maps
