"""Hostile and random schemas: an answer meets its schema and is what plain decoding gives, or the schema is refused."""

import contextlib
import json
from functools import cache
from random import Random
from typing import Any

import pytest

pytest.importorskip("llguidance")
from hypothesis import given, strategies as st
from jsonschema.validators import validator_for

from specengine import Engine
from specengine.errors import InputError
from tests.engine.engines import engine_of, tokenizer
from tests.examples import examples
from tests.request.schemas import REFUSED, any_schema, hostile

HOSTILE = hostile()
NEW_TOKENS = 100
# of patterns: Python's, by which answers are checked, differs
OTHER_DIALECT = {r"^\p{Lu}$", "^(?i)ab$", "^(?<name>a)$"}
PROMPT = [7, 70, 7, 70]


@cache
def engine(draft: str) -> Engine:
    return engine_of(draft=draft, policy="chain", tokenizer=tokenizer())


def answer(draft: str, schema: Any) -> Any:
    return engine(draft).generate(
        PROMPT, json_schema=schema, max_new_tokens=NEW_TOKENS, temperature=1.0, seed=1
    )


def check(schema: Any) -> bool:
    """Return whether the schema is accepted. AssertionError if an answer does not meet it."""
    try:
        plain = answer("none", schema)
    except InputError:
        for draft in ("none", "ngram"):
            with pytest.raises(InputError, match=r"^json_schema: "):
                answer(draft, schema)
        return False
    drafted = answer("ngram", schema)
    assert drafted.token_ids == plain.token_ids
    assert drafted.finish_reason == plain.finish_reason
    if plain.finish_reason == "stop":
        given = json.loads(schema.removeprefix("\ufeff")) if isinstance(schema, str) else schema
        kind = validator_for(given)
        found, dialect = json.loads(plain.text), given.get("pattern") in OTHER_DIALECT
        with contextlib.suppress(RecursionError):  # of the validator, over long chains
            if not dialect:
                kind.check_schema(given)
                kind(given, format_checker=kind.FORMAT_CHECKER).validate(found)
    return True


@pytest.mark.sliced(11)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_met_or_refused_by_name(name: str) -> None:
    assert check(HOSTILE[name]) == (name not in REFUSED)


@examples(60, derandomize=True)
@given(st.integers(0, 1 << 32))
def test_random_schemas(seed: int) -> None:
    assert check(any_schema(Random(seed)))
