"""Answers constrained to a schema or a grammar: valid, the same with any draft, and faster where it forces."""

import json
from functools import cache
from typing import Any

import pytest

pytest.importorskip("llguidance")
import jsonschema

from specengine import Engine
from specengine.drafters._wrappers import Guided
from specengine.drafters.lookup import Lookup
from specengine.drafters.ngram import NGram
from specengine.errors import InputError
from specengine.ops.select import FREE
from specengine.ops.tree import TokenTree
from specengine.request import grammars
from specengine.request.grammars import MAX_TEXT, Vocabularies, compiled
from tests.engine.engines import PROMPT, engine_of, tokenizer
from tests.request.schemas import closed
from tests.toy import POLICIES

SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"enum": ["Ada", "Alan"]},
        "year": {"type": "integer", "minimum": 1, "maximum": 99},
    },
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


@pytest.mark.sliced
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
    found = engine.generate(
        [7], grammar='start: "the only answer that there is"', max_new_tokens=64
    )
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


@pytest.mark.parametrize("count", [1, 9, 30])
def test_cut_short_an_answer_is_the_beginning_of_one(count: int) -> None:
    whole = plain_answer(0)
    for draft in ("none", "ngram"):
        engine = engine_of(draft=draft, policy="chain", tokenizer=tokenizer())
        found = engine.generate(PROMPT, json_schema=SCHEMA, max_new_tokens=count)
        assert (found.token_ids, found.finish_reason) == (whole.token_ids[:count], "length")


MANY = {"type": "object", "properties": {f"k{place}": {} for place in range(1000)}}
# the library gives up behind the comma
DEAD_END = {"anyOf": [{"const": "x"}, closed(a={"enum": [1, 2]}, b=MANY)]}


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_where_the_library_gives_up_midway_the_option_is_named(draft: str) -> None:
    engine = engine_of(draft=draft, policy="chain", tokenizer=tokenizer())
    bias = [[tokenizer()("{")["input_ids"], 100.0]]
    with pytest.raises(InputError, match=r"^json_schema: .*behind \d+ tokens: .*Current row"):
        engine.generate(PROMPT, json_schema=DEAD_END, max_new_tokens=64, sequence_bias=bias)
    assert (
        engine.generate(PROMPT, json_schema=SCHEMA, max_new_tokens=64).token_ids
        == plain_answer(0).token_ids
    )


def test_a_constraint_stands_behind_any_beginning_after_the_library_gave_up() -> None:
    constraint = Vocabularies(tokenizer(), 260).constraint(
        "json_schema", compiled("json_schema", DEAD_END), []
    )
    ids = tokenizer()('{"a": 1, "b": {')["input_ids"]
    before = [constraint.allowed(ids[:place]) for place in range(8)]
    assert all(allowed.any() for allowed in before)
    assert not constraint.allowed(ids[:8]).any()
    assert constraint.fault is not None
    assert all((constraint.allowed(ids[:place]) == before[place]).all() for place in range(8))
    assert tokenizer().decode(constraint.forced(ids[:1])) == '"a": '


def test_what_takes_long_to_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_SECONDS", 0.001)
    slow = {"enum": [f"value {place}" for place in range(9999)]}
    with pytest.raises(InputError, match=r"^json_schema: .*takes more than"):
        compiled("json_schema", slow)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("json_schema", {"const": "x" * MAX_TEXT}, "characters, accepted up to"),
        (
            "json_schema",
            {"properties": {str(place): {} for place in range(1501)}},
            "1501 properties",
        ),
        (
            "json_schema",
            {"patternProperties": {str(place): {} for place in range(51)}},
            "51 patternProperties",
        ),
        (
            "grammar",
            'start: "a" | b\nb: %json {"patternProperties": {' + '"": {}, ' * 2 + "}}",
            "is not accepted",
        ),
        (
            "grammar",
            "start: %json "
            + json.dumps({"patternProperties": {str(place): {} for place in range(51)}}),
            "51 patternProperties",
        ),
    ],
)
def test_what_is_too_large_is_refused(field: str, value: Any, words: str) -> None:
    with pytest.raises(InputError, match=f"^{field}: .*{words}"):
        compiled(field, value)


def test_marks_tell_what_is_forced_from_what_else_is_free() -> None:
    drafter = Lookup(NGram(longest=2, shortest=1))
    drafter.begin([1, 2, 3])
    constraint = Vocabularies(tokenizer(), 260).constraint(
        "grammar", compiled("grammar", 'start: "ab" /[a-z]/'), []
    )
    tree = TokenTree(8)
    found = Guided(drafter, constraint, []).free(tree, tree.root_alone(), 4, -1.0)
    assert found is not None
    assert found.marks == [FREE, FREE]
