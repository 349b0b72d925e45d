"""An option is declared once: the command line, the server and batches know exactly what its declaration says."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from specengine.errors import InputError
from specengine.request import declared
from specengine.request.declared import DeclaredOptions, RequestField, declarations, number, option
from specengine.request.options import GenerationOptions

FLAGS = {name: each for name, each in declarations().items() if each.help is not None}
FIELDS = {name: each for name, each in declarations().items() if each.field is not None}


def generate_parser() -> argparse.ArgumentParser:
    from specengine.cli.commands import make_parser

    action = next(
        each for each in make_parser()._actions if isinstance(each, argparse._SubParsersAction)
    )
    return action.choices["generate"]


def test_declarations_need_neither_torch_nor_transformers() -> None:
    code = "import sys, specengine.request.declared; print([n for n in ('torch', 'transformers') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_file_ends_with_the_options_and_each_has_a_text() -> None:
    tree = ast.parse(Path(declared.__file__).read_text(encoding="utf-8"))
    last = tree.body[-1]
    assert isinstance(last, ast.ClassDef)
    fields, texts = last.body[1::2], last.body[2::2]
    assert [field.target.id for field in fields] == list(declarations())  # type: ignore[attr-defined]
    assert all(
        isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) for text in texts
    )
    assert len(fields) == len(texts)


def test_generation_options_declares_none_of_its_own() -> None:
    assert [field.name for field in dataclasses.fields(GenerationOptions)] == list(declarations())


def test_flags_are_those_of_the_command_line() -> None:
    group = next(each for each in generate_parser()._action_groups if each.title == "generation")
    known = {action.dest: action.help for action in group._group_actions if action.dest != "system"}
    assert known == {each.dest: each.help for each in FLAGS.values()}


def test_fields_are_those_of_requests() -> None:
    from specengine.protocol.requests import ChatRequest, CompletionRequest

    assert {each.field_name for each in FIELDS.values()} <= set(ChatRequest.model_fields)
    assert {each.field_name for each in FIELDS.values()} <= set(CompletionRequest.model_fields)
    assert len({each.field_name for each in FIELDS.values()}) == len(FIELDS)
    for each in FIELDS.values():
        assert each.field is not None
        assert each.field.written or each.reader is not None, each.name


def test_an_error_names_the_clients_field() -> None:
    from specengine.protocol.problems import of_error

    for name, each in declarations().items():
        assert of_error(InputError(f"{name}: got 1")).param == each.field_name
    assert of_error(InputError("min_new_tokens: got 1")).param == "min_tokens"
    assert of_error(InputError("grammar: got 1"), {"grammar": "tools"}).param == "tools"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("top_k", -1, {"top_k": 0}),
        ("top_k", 7, {"top_k": 7}),
        ("seed", -1, {}),
        ("seed", 0, {"seed": 0}),
        ("min_tokens", 0, {}),
        ("min_tokens", 3, {"min_new_tokens": 3}),
        ("repetition_penalty", 2, {"repetition_penalty": 2}),
        ("policy", "plain", {"policy": "plain"}),
        ("temperature", None, {}),
    ],
)
def test_a_field_becomes_its_option(field: str, value: object, expected: dict[str, object]) -> None:
    from specengine.protocol.preparing import CheckedRequest
    from specengine.protocol.requests import CompletionRequest
    from specengine.protocol.settings import Settings

    request = CompletionRequest.model_validate({"prompt": "a", field: value})
    assert CheckedRequest(request, Settings("model")).options == expected


def test_options_made_of_objects_or_of_the_clock_are_none_of_a_batch_line() -> None:
    from specengine.batch.lines import LINE_OPTIONS

    others = {name for name in declarations() if name not in LINE_OPTIONS}
    assert others == {
        "max_time", "logits_processor", "stopping_criteria", "streamer", "generation_config",
        "return_dict_in_generate", "policy", "policy_options",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "accepted"),
    [(0, False), (1e-9, True), (1, True), (1.5, False), (True, False), ("1", False)],
)
def test_a_reader_keeps_to_its_range(value: object, accepted: bool) -> None:
    reader = number(0, 1, "above 0, at most 1", open_low=True)
    assert reader.limits == {"gt": 0, "le": 1}
    if accepted:
        reader.check("share", value)
    else:
        with pytest.raises(
            InputError, match=r"^share: got .*, accepted (a number, )?above 0, at most 1$"
        ):
            reader.check("share", value)


def test_a_declaration_keeps_what_it_was_given() -> None:
    @dataclasses.dataclass
    class Own(DeclaredOptions):
        share: float | None = option(
            number(0, 1, "0 to 1"), help="a share", field=RequestField("portion")
        )

    field = next(field for field in dataclasses.fields(Own) if field.name == "share")
    made = dataclasses.replace(field.metadata["declaration"], name="share")
    assert (made.dest, made.field_name, made.help, made.default, made.line) == (
        "share", "portion", "a share", None, True,
    )  # fmt: skip
