"""Numbers and formats of schemas: kept exactly, as a decimal and as a float64, or refused by name."""

import json
from functools import cache
from typing import Any

import pytest

pytest.importorskip("llguidance")

from specengine.errors import InputError
from specengine.request import schemas
from specengine.request.grammars import Vocabularies, compiled
from tests.engine.engines import tokenizer
from tests.request import random_schemas

NEVER = 257
INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}


@cache
def vocabularies() -> Vocabularies:
    return Vocabularies(tokenizer(), 260)


def meets(text: str, schema: Any, field: str = "json_schema") -> bool:
    """Return whether the text is a whole answer."""
    constraint = vocabularies().constraint(field, compiled(field, schema), [NEVER])
    ids = tokenizer()(text)["input_ids"]
    is_allowed = all(constraint.allows(ids[:place], ids[place]) for place in range(len(ids)))
    return is_allowed and (constraint.complete(ids) or constraint.allows(ids, NEVER))


def number(**bounds: Any) -> dict[str, Any]:
    return {"type": "number", **bounds}


def integer(**bounds: Any) -> dict[str, Any]:
    return {"type": "integer", **bounds}


@pytest.mark.parametrize(
    ("schema", "met", "unmet"),
    [
        (
            number(exclusiveMinimum=0, exclusiveMaximum=0.001),
            ["0.0005", "0.00098"],
            ["0", "0.0", "0.001", "0." + "0" * 400 + "1", "0.000" + "9" * 40, "1e-4"],
        ),
        (
            number(exclusiveMinimum=100, exclusiveMaximum=100.5),
            ["100.1", "100.48"],
            ["100", "100.5", "100." + "0" * 30],
        ),
        (
            number(exclusiveMinimum=-0.5, exclusiveMaximum=0),
            ["-0.1"],
            ["-0", "0", "-0.5", "-0." + "0" * 20 + "1"],
        ),
        (
            number(exclusiveMinimum=0, exclusiveMaximum=1e-40),
            ["0." + "0" * 41 + "5"],
            ["0", "0." + "0" * 39 + "2"],
        ),
        (
            number(minimum=0.1, maximum=0.3),
            ["0.1", "0.3", "0.25"],
            ["0.0999", "0.30000000000000000001"],
        ),
        (number(exclusiveMaximum=1, minimum=0), ["0", "0.98", "0.9990"], ["1", "0." + "9" * 30]),
        (integer(exclusiveMinimum=0, maximum=3), ["1", "3"], ["0", "4"]),
        (integer(minimum=2.5, exclusiveMaximum=5.0), ["3", "4"], ["2", "5"]),
        (
            integer(minimum=2**53, maximum=2**53 + 2),
            [str(2**53 + 1)],
            [str(2**53 - 1), str(2**53 + 3)],
        ),
        (INT64, ["0", str(2**63 - 1), str(-(2**63) + 1024)], [str(2**63), str(-(2**63) - 1)]),
        ({"const": 2**63 - 1}, [str(2**63 - 1)], [str(2**63 - 2)]),
        ({"allOf": [number(minimum=1), number(exclusiveMaximum=2)]}, ["1", "1.5"], ["2", "0.5"]),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": number(exclusiveMinimum=0, maximum=0.5)}},
            ["0.5"],
            ["0"],
        ),
        (
            {"items": number(exclusiveMinimum=0, maximum=0.5), "type": "array"},
            ["[0.5, 0.1]"],
            ["[0.5, 0]"],
        ),
        (
            {"additionalProperties": number(exclusiveMinimum=0, maximum=0.5), "type": "object"},
            ['{"a": 0.5}'],
            ['{"a": 0}'],
        ),
        (
            {"properties": {"const": number(exclusiveMinimum=0, maximum=0.5)}, "type": "object"},
            ['{"const": 0.5}'],
            ['{"const": 0}'],
        ),
        (number(multipleOf=0.25, exclusiveMinimum=0, maximum=1), ["0.25", "1"], ["0", "0.3"]),
        (integer(format="int32"), [str(2**31 - 1)], [str(2**31)]),
        ({"type": ["integer", "null"], "format": "uint8"}, ["255", "null"], ["256", "-1"]),
        (number(format="double"), ["1.5e3"], ['"1"']),
    ],
)
def test_numbers_are_kept_exactly(schema: Any, met: list[str], unmet: list[str]) -> None:
    assert [text for text in met if not meets(text, schema)] == []
    assert [text for text in unmet if meets(text, schema)] == []


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (integer(minimum=2**53 + 1, maximum=2**53 + 7), "minimum: 9007199254740993 cannot be kept"),
        (
            integer(minimum=-(2**63), maximum=-(2**63) + 2),
            "maximum: -9223372036854775806 cannot be kept",
        ),
        (integer(minimum=2**64), "minimum: 18446744073709551616 cannot be kept"),
        ({"const": 2**53 + 1}, "const: 9007199254740993 cannot be kept"),
        ({"enum": [1, [{"a": -(2**63)}]]}, "enum: -9223372036854775808 cannot be kept"),
        (
            '{"type": "number", "maximum": 0.12345678901234567891}',
            "maximum: 0.12345678901234567891 cannot be kept",
        ),
        ('{"const": 1e99999999999999999999}', "exponent"),
        (number(multipleOf=0), "multipleOf: 0 cannot be kept"),
        (integer(multipleOf=1000003), "multipleOf: accepted are up to"),
        ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, "multipleOf: accepted are up to"),
        (integer(format="int33"), "format: 'int33' is unknown"),
        ({"type": "string", "format": "int32"}, "format: 'int32' is unknown"),
        ({"$ref": "#/enum/0", "enum": [integer(minimum=2**53 + 1)]}, "leads to a value"),
        (
            {"patternProperties": {"a": {"anyOf": [integer(maximum=2**53 + 1)]}}},
            "maximum: 9007199254740993 cannot",
        ),
    ],
)
def test_numbers_that_cannot_be_kept_are_refused_by_name(schema: Any, words: str) -> None:
    with pytest.raises(InputError, match=f"^json_schema: .*{words}"):
        compiled("json_schema", schema)


def test_schemas_in_grammars_are_kept_as_well() -> None:
    grammar = "start: %json " + json.dumps(number(exclusiveMinimum=0, maximum=0.5)) + ' "!"'
    assert meets("0.5!", grammar, "grammar")
    assert not meets("0!", grammar, "grammar")
    with pytest.raises(InputError, match=r"^grammar: .*minimum: 9007199254740993 cannot be kept"):
        compiled("grammar", "start: %json " + json.dumps(integer(minimum=2**53 + 1)))


@pytest.mark.parametrize(
    ("name", "met", "unmet"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "1999-12-31"],
            ["2023-02-29", "1900-02-29", "2024-04-31", "0000-01-01"],
        ),
        (
            "date-time",
            ["2024-02-29T23:59:59.5Z", "1999-01-01T00:00:00+23:59"],
            ["1999-01-01T12:00:60Z", "2023-02-29T00:00:00Z", "1999-01-01T24:00:00Z"],
        ),
        ("time", ["23:59:59Z"], ["12:30:60Z", "23:59:59"]),
        ("hostname", ["a-b.example"], ["-a", "a" * 64, ".".join(["a" * 60] * 5), "1.2.3.4"]),
    ],
)
def test_formats_are_kept_exactly(name: str, met: list[str], unmet: list[str]) -> None:
    schema = {"type": "string", "format": name}
    assert [text for text in met if not meets(json.dumps(text), schema)] == []
    assert [text for text in unmet if meets(json.dumps(text), schema)] == []


def test_a_format_beside_a_pattern_is_kept() -> None:
    schema = {"type": ["string", "null"], "format": "date", "pattern": "^2"}
    assert meets('"2024-02-29"', schema)
    assert meets("null", schema)
    assert not meets('"1999-12-31"', schema)


def test_a_schema_that_needs_no_rewrite_stays_as_it_is() -> None:
    schema = {
        "type": "object",
        "properties": {"minimum": integer(minimum=1)},
        "default": {"a": 0.5},
        "x": [None, True],
    }
    assert schemas.rewritten(schemas.decoder().decode(json.dumps(schema))) == schema


@pytest.mark.parametrize("seed", range(0, 120, 40))
def test_answers_to_random_schemas_meet_them(seed: int) -> None:
    for one in range(seed, seed + 40):
        _, wrong, _ = random_schemas.judged(one, 1)
        assert wrong == []


def test_the_other_checker_finds_what_the_library_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "rewritten", lambda schema: schema)
    monkeypatch.setattr(schemas, "decoder", json.JSONDecoder)
    monkeypatch.setattr(
        random_schemas,
        "random_schema",
        lambda seed: number(exclusiveMinimum=0, exclusiveMaximum=1e-8),
    )
    compiled.__globals__["_compiled"].cache_clear()
    wrong = [row for seed in range(20) for row in random_schemas.judged(seed, 3)[1]]
    compiled.__globals__["_compiled"].cache_clear()
    assert any("less than" in row["why"] for row in wrong)
