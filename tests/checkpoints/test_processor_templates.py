"""Chat templates wherever transformers' processor finds them, and templates that read lists of parts alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specengine import Engine
from specengine.checkpoints import pretrained
from specengine.checkpoints.pretrained import taking_texts
from specengine.errors import InputError
from specengine.options import LoadOptions
from tests.checkpoints.gguf_files import write_model
from tests.serve.served import NAME, served
from tests.toy import byte_tokenizer, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
PLAIN = "{% for m in messages %}<u>{{ m['content'] }}</u>{% endfor %}<a>"
TOOLS = "{% for m in messages %}<t>{{ m['content'] }}</t>{% endfor %}<a>"
# As of LLaVA: pictures first, then texts; a content that is a text has neither.
PARTS = (
    "{% for m in messages %}<u>{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %}</u>{% endfor %}<a>"
)
INDEXED = "{% for m in messages %}<u>{{ m['content'][0]['text'] }}</u>{% endfor %}<a>"
NAMED = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOLS}]


def in_json(name: str, template: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        file = folder / name
        held = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(
            json.dumps(held | {"processor_class": "LlavaProcessor", "chat_template": template})
        )

    return write


def as_text(name: str, template: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(template)

    return write


PLACES: dict[str, tuple[Callable[[Path], None], ...]] = {
    "chat_template.json": (in_json("chat_template.json", PLAIN),),
    "chat_template.jinja": (as_text("chat_template.jinja", PLAIN),),
    "processor_config.json": (in_json("processor_config.json", PLAIN),),
    "processor_config.json, named": (
        in_json("processor_config.json", {"default": PLAIN, "tool_use": TOOLS}),
    ),
    "processor_config.json, a list": (in_json("processor_config.json", NAMED),),
    "tokenizer_config.json": (in_json("tokenizer_config.json", PLAIN),),
    "tokenizer_config.json, a list": (in_json("tokenizer_config.json", NAMED),),
    "additional templates": (
        as_text("additional_chat_templates/tool_use.jinja", TOOLS),
        as_text("chat_template.jinja", PLAIN),
    ),
    "additional templates, and the processor's": (
        as_text("additional_chat_templates/tool_use.jinja", TOOLS),
        in_json("chat_template.json", PLAIN),
    ),
    "the processor's own first": (
        in_json("chat_template.json", "other"),
        in_json("processor_config.json", PLAIN),
    ),
    "the tokenizer's own first": (
        in_json("chat_template.json", "other"),
        in_json("tokenizer_config.json", PLAIN),
    ),
    "of parts": (in_json("chat_template.json", PARTS),),
    "of parts, in the tokenizer's": (as_text("chat_template.jinja", PARTS),),
    "of first parts": (in_json("processor_config.json", INDEXED),),
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}


def folder_with(place: Path, name: str) -> Path:
    tiny("llama").save_pretrained(place)
    without = byte_tokenizer()
    without.chat_template = None
    without.save_pretrained(place)
    for write in PLACES[name]:
        write(place)
    return place


def prompt_of(engine: Engine, prompt: Any, **options: Any) -> str:
    stream = engine.stream(prompt, max_new_tokens=1, **options)
    list(stream)
    return engine.tokenizer.decode(list(stream.prompt))


@pytest.mark.sliced(5)
@pytest.mark.parametrize("backend", [None, "huggingface"])
@pytest.mark.parametrize("name", PLACES)
def test_prompts_are_put_into_the_template(name: str, backend: str | None, tmp_path: Path) -> None:
    engine = Engine.from_pretrained(
        str(folder_with(tmp_path / "model", name)), "ngram", backend=backend
    )
    assert prompt_of(engine, "hi") == "<u>hi</u><a>"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
    assert prompt_of(engine, messages) == "<u>hi</u><u>so</u><a>"
    assert (
        prompt_of(engine, [{"role": "user", "content": [{"type": "text", "text": "hi"}]}])
        == "<u>hi</u><a>"
    )
    assert prompt_of(engine, "hi", raw=True) == "hi"
    assert isinstance(engine.tokenizer.chat_template, dict) == (
        "list" in name or "named" in name or "additional" in name
    )
    if isinstance(engine.tokenizer.chat_template, dict):
        filled = engine.tokenizer.apply_chat_template(messages[:1], tools=[TOOL], tokenize=False)
        assert filled == "<t>hi</t><a>"


def test_a_tokenizer_by_its_path_has_the_template(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", "of parts")
    engine = Engine.from_pretrained(tiny("llama"), "ngram", tokenizer=folder)
    assert prompt_of(engine, "hi") == "<u>hi</u><a>"


def test_a_gguf_file_may_have_a_template_of_parts(tmp_path: Path) -> None:
    changes = {"tokenizer.chat_template": PARTS}
    engine = Engine.from_pretrained(write_model(tmp_path / "model.gguf", metadata=changes), "ngram")
    assert prompt_of(engine, "hi") == "<u>hi</u><a>"


@pytest.mark.parametrize("name", ["chat_template.json", "of parts"])
def test_a_server_answers_by_the_template(name: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", name)
    messages = [{"role": "user", "content": "hi"}]
    with served(lambda: Engine.from_pretrained(str(folder), "ngram")) as server:
        filled = server.post({"messages": messages}, "/apply-template").json()
        assert filled == {"prompt": "<u>hi</u><a>"}
        answer = server.post({"model": NAME, "messages": messages, "max_tokens": 2})
        assert answer.status_code == 200
        assert answer.json()["usage"]["prompt_tokens"] == len("<u>hi</u><a>")


@pytest.mark.parametrize(
    "content", ["{", "[1]", '{"chat_template": 7}', '{"chat_template": [{"name": "default"}]}']
)
@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
def test_a_damaged_file_is_noted(
    file: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path / "model", "tokenizer_config.json")
    in_json("tokenizer_config.json", None)(folder)
    (folder / file).write_text(content)
    engine = Engine.from_pretrained(str(folder), "ngram")
    assert f"no chat template from {file} of {folder}" in capsys.readouterr().err
    assert prompt_of(engine, "hi") == "hi"
    with pytest.raises(InputError, match="no chat template"):
        engine.generate([{"role": "user", "content": "hi"}])


def test_a_template_that_takes_texts_stays_as_it_is() -> None:
    for template in (
        PLAIN,
        TOOLS,
        "{{ raise_exception('text') }}",
        "{% for m in messages %}text{% endfor %}",
    ):
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template
        assert taking_texts(tokenizer).chat_template == template


def test_a_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "chat_template.jinja")
    for code in (
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.append(1)",
        "cycler.__init__.__globals__.os.system('true')",
        "range(10000000)",
        "lipsum.__globals__.os",
    ):
        (folder / "chat_template.jinja").write_text("{{ " + code + " }}")
        engine = Engine.from_pretrained(str(folder), "ngram")
        with pytest.raises(InputError, match="the chat template does not take these messages"):
            engine.generate("hi", max_new_tokens=1)


def test_the_process_that_fills_templates_starts_before_a_model_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = list[str]()

    class Stop(Exception):
        pass

    def read(*_: object, **__: object) -> None:
        events.append("read")
        raise Stop

    monkeypatch.setattr(pretrained.FILLERS, "start", lambda: events.append("start"))
    monkeypatch.setattr(pretrained, "_native", read)
    with pytest.raises(Stop):
        pretrained.load_model(None, LoadOptions())
    assert events == ["start", "read"]
