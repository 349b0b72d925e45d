"""Answers constrained to a schema or a grammar: valid, the same with any draft, and faster where it forces."""

import json
from functools import cache
from typing import Any

import pytest

pytest.importorskip("llguidance")
import jsonschema

from specengine import Engine
from specengine.errors import InputError
from tests.engine.engines import PROMPT, engine_of, tokenizer
from tests.toy import POLICIES

SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"enum": ["Ada", "Alan"]}, "year": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["first_name", "year"],
    "additionalProperties": False,
}
WAYS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5}]


@cache
def plain_answer(way: int) -> Any:
    engine = engine_of(draft="none", tokenizer=tokenizer())
    return engine.generate(PROMPT, json_schema=SCHEMA, max_new_tokens=64, **WAYS[way])


def answer_of(engine: Engine, way: int) -> Any:
    return engine.generate(PROMPT, json_schema=SCHEMA, max_new_tokens=64, **WAYS[way])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("draft", ["small_model", "ngram", "recycling"])
@pytest.mark.parametrize("way", [0, 1])
def test_a_tree_changes_nothing(policy: str, draft: str, way: int) -> None:
    expected = plain_answer(way)
    found = answer_of(engine_of(draft=draft, policy=policy, tokenizer=tokenizer()), way)
    assert (found.token_ids, found.finish_reason) == (expected.token_ids, "stop")
    jsonschema.validate(json.loads(found.text), SCHEMA)


def test_forced_tokens_cut_cycles_without_a_pass() -> None:
    engine = engine_of(draft="ngram", policy="auto", tokenizer=tokenizer())
    found = engine.generate([7], grammar='start: "the only answer that there is"', max_new_tokens=64)
    assert found.text == "the only answer that there is"
    assert found.finish_reason == "stop"
    assert found.stats.num_spec_steps < len(found.token_ids) / 3
    assert found.stats.num_draft_passes == 0


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"json_schema": {"not": {}}}, "json_schema"),
        ({"json_schema": {"x-guidance": {"lenient": True}, "uniqueItems": True}}, "json_schema"),
        ({"json_schema": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "json_schema"),
        ({"json_schema": {"type": "string", "pattern": "(?=a)b"}}, "json_schema"),
        ({"json_schema": {"$ref": "https://example.com/schema"}}, "json_schema"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": 3}, "json_schema"),
        ({"json_object": 1}, "json_object"),
        ({"grammar": "start: nothing"}, "grammar"),
        ({"grammar": ""}, "grammar"),
        ({"grammar": 'start: "a"', "json_object": True}, "json_object, grammar"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=f"^{field}: "):
        engine_of(draft="none", tokenizer=tokenizer()).generate(PROMPT, **options)


def test_a_constraint_needs_a_tokenizer() -> None:
    with pytest.raises(InputError, match="json_object: it needs a tokenizer"):
        engine_of(draft="none").generate(PROMPT, json_object=True)
