"""`serve --chat-template`: a template in place of the model's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from specengine.cli.serve import read_template, templated
from specengine.errors import InputError
from tests.serve.saying import TEMPLATE
from tests.serve.served import CHAT, served, tiny_engine

TOOL = {"type": "function", "function": {"name": "f", "description": "Do it"}}


def test_a_template_that_takes_tools(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    asked = CHAT | {"tools": [TOOL], "max_tokens": 1}
    with served(tiny_engine) as plain:
        assert plain.post(asked).status_code == 400
    with served(templated(tiny_engine, read_template(str(file)))) as server:
        assert server.post(asked).status_code == 200


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}\n{{ m.content }")
    with pytest.raises(InputError, match=r"chat_template: .*, line 2"):
        read_template(str(file))
    with pytest.raises(InputError, match="cannot read"):
        read_template(str(tmp_path / "none"))
    file.write_text("{% generation %}{{ messages[0].content }}{% endgeneration %}{% break %}"[:-11])
    assert read_template(str(file))
    assert read_template(None) is None
