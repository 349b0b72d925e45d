"""Hostile and small random JSON schemas, made by code."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]


def closed(given: Schema | None = None, /, **named: Schema) -> Schema:
    """An object with just these properties."""
    properties = {**(given or {}), **named}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def nested(depth: int, inner: Schema, wrap: Callable[[Schema], Schema]) -> Schema:
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def chain(count: int) -> Schema:
    links = {str(place): {"$ref": f"#/$defs/{place + 1}"} for place in range(count)}
    return {"$ref": "#/$defs/0", "$defs": {**links, str(count): {"enum": [1, 2]}}}


SMALL: Schema = {"enum": ["a", "b", 1]}
TEXTS = {
    "quotes": '"\'`"" \\" \\\\',
    "controls": "a\nb\tc\r\x00\x1f\x7f",
    "markup": "<tool_call></s><|end|>&amp;<!-- -->",
    "unicode": "ñ é 中文 \u202e \ufeff \u2028",
    "astral": "🙂👩‍👩‍👧 𝔘",
    "escapes": "\\u0041\\n\\/\\x",
    "json": '{"a": [1, null]}',
    "blank": " ",
    "empty": "",
    "lark": "%json {} /x/ start: [lazy]",
    "number": "1e5",
    "long": "k" * 60,
}
BOUNDS: dict[str, Schema] = {
    "small": {"type": "integer", "minimum": 0, "maximum": 9},
    "one": {"type": "integer", "minimum": 7, "maximum": 7},
    "negative": {"type": "integer", "minimum": -105, "maximum": -98},
    "around_zero": {"type": "integer", "minimum": -3, "maximum": 12},
    "exclusive": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "between_floats": {"type": "integer", "minimum": 1.5, "maximum": 3.5},
    "of_floats": {"type": "number", "minimum": 0.5, "maximum": 0.75},
    "exclusive_floats": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "negative_floats": {"type": "number", "minimum": -0.25, "maximum": 0.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 50},
    "multiple_of_tenths": {"type": "number", "multipleOf": 0.1, "minimum": 0, "maximum": 1},
    "none": {"type": "integer", "minimum": 5, "maximum": 4},
    "none_between": {"type": "integer", "exclusiveMinimum": 4, "exclusiveMaximum": 5},
    "draft_4": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "integer",
        "minimum": 3,
        "exclusiveMinimum": True,
        "maximum": 5,
    },
    "beyond_int64": {"type": "integer", "minimum": 2**64},
    "large": {"type": "integer", "minimum": 10**15, "maximum": 10**15 + 20},
}
PATTERNS = [
    "^[ab]{2}$",
    "^a|b$",
    "a{3}",
    "^\\d{4}-\\d{2}$",
    '^[^"\\\\]{3}$',
    "^(ab|cd){2}$",
    "^é{2}$",
    "^\\u0041$",
    "^[\\x00-\\x1f]$",
    "^\\S+@\\S+$",
    "^a(?=b)b$",
    "^(a)\\1$",
    "(",
    "^$",
    "^a$b",
    "^.$",
    '^["]$',
    "^\\\\$",
    "^\\/$",
    "^[a-z]{1,100000}$",
    "^\\p{Lu}$",
    "^(a+)+$",
    "^\\bword\\b$",
    "^(?i)ab$",
    "^(?<name>a)$",
]
FORMATS = [
    "date-time",
    "date",
    "time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
    "regex",
    "nonsense",
]
KEYWORDS: dict[str, Schema] = {
    "not": {"not": {"type": "integer"}},
    "if": {"if": {"type": "integer"}, "then": {"minimum": 3}},
    "contains": {"type": "array", "contains": SMALL, "maxItems": 2},
    "unique": {"type": "array", "items": SMALL, "uniqueItems": True, "maxItems": 3},
    "dependent": {"type": "object", "properties": {"a": SMALL}, "dependentRequired": {"a": ["b"]}},
    "names": {"type": "object", "propertyNames": {"pattern": "^a"}, "maxProperties": 2},
    "unevaluated": {"type": "object", "properties": {"a": SMALL}, "unevaluatedProperties": False},
    "dynamic": {"$dynamicRef": "#x", "$defs": {"a": {"$dynamicAnchor": "x", "enum": [1]}}},
    "unknown": {"enum": [1], "x-note": "y"},
    "misspelt": {"typ": "integer"},
    "type": {"type": "nonsense"},
    "type_number": {"type": 3},
    "properties_list": {"properties": [1]},
    "required_text": {"type": "object", "required": "a"},
    "length_negative": {"type": "string", "minLength": -1},
    "length_half": {"type": "string", "maxLength": 2.5},
    "lengths_crossed": {"type": "string", "minLength": 5, "maxLength": 2},
    "enum_empty": {"enum": []},
    "enum_text": {"enum": "ab"},
    "any_empty": {"anyOf": []},
    "false": {"type": "object", "properties": {"a": False}, "additionalProperties": False},
    "needs_false": closed(a=False),
    "items_false": {"type": "array", "items": False},
    "bound_text": {"type": "integer", "minimum": "3"},
    "annotations": {
        "enum": [1],
        "title": "t",
        "description": "d",
        "default": 2,
        "examples": [3],
        "deprecated": True,
    },
    "dialect": {"$schema": "https://json-schema.org/draft/2020-12/schema", "enum": [1]},
    "old_dialect": {"$schema": "http://json-schema.org/draft-04/schema#", "id": "x", "enum": [1]},
    "other_dialect": {"$schema": "https://example.com/mine", "enum": [1]},
    "guidance": {
        "x-guidance": {"lenient": True, "whitespace_flexible": True},
        "type": "array",
        "items": SMALL,
        "minItems": 2,
        "maxItems": 2,
    },
}
REFERENCES: dict[str, Schema] = {
    "itself": {"$ref": "#"},
    "itself_named": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "each_other": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
    "each_other_or": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]},
            "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"enum": [1]}]},
        },
    },
    "endless": closed(a={"$ref": "#"}),
    "endless_items": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "tree": {
        "$ref": "#/$defs/t",
        "$defs": {
            "t": closed(l={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/t"}]}, v={"enum": [1, 2]})
        },
    },
    "list": closed(next={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    "all_itself": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}},
    },
    "beside": {
        "$ref": "#/$defs/a",
        "maximum": 1,
        "$defs": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    },
    "escaped": {"$ref": "#/$defs/a~1b~0c", "$defs": {"a/b~c": SMALL}},
    "percent": {"$ref": "#/$defs/a%20b", "$defs": {"a b": SMALL}},
    "anchor": {"$ref": "#x", "$defs": {"a": {"$anchor": "x", "enum": [1]}}},
    "missing": {"$ref": "#/$defs/none"},
    "number": {"$ref": 3},
    "elsewhere": {"$ref": "https://example.com/schema"},
    "into_properties": closed(a=SMALL, b={"$ref": "#/properties/a"}),
    "property_named_so": closed({"$ref": SMALL}),
    "in_an_enum": {"enum": [{"$ref": "#/none"}, "$ref"]},
    "chain": chain(500),
    "long_chain": chain(5000),
    "nested_chain": {
        "$ref": "#/$defs/0",
        "$defs": {
            str(n): nested(20, {"$ref": f"#/$defs/{n + 1}"}, lambda x: {"items": x, "maxItems": 1})
            for n in range(100)
        }
        | {"100": {}},
    },
}
SIZES: dict[str, Schema] = {
    **{
        f"deep_{name}_{depth}": nested(depth, SMALL, wrap)
        for depth in (6, 150, 3000)
        for name, wrap in {
            "objects": lambda x: closed(a=x),
            "arrays": lambda x: {"type": "array", "items": x, "minItems": 1, "maxItems": 1},
            "any": lambda x: {"anyOf": [x]},
            "all": lambda x: {"allOf": [x]},
        }.items()
    },
    **{
        f"{name}_{size}": {"type": "string", name: size}
        for name in ("minLength", "maxLength")
        for size in (0, 3, 100_000, 10**12, 2**70)
    },
    **{
        f"{name}_{size}": {"type": "array", "items": SMALL, name: size}
        for name in ("minItems", "maxItems")
        for size in (0, 3, 10**6, 2**70)
    },
    "enum_of_10000": {"enum": [f"value {place}" for place in range(10_000)]},
    "properties_300": {
        "type": "object",
        "properties": {f"k{n}": SMALL for n in range(300)},
        "additionalProperties": False,
    },
    "properties_1400": {"type": "object", "properties": {f"k{n}": SMALL for n in range(1400)}},
    "properties_2000": {"type": "object", "properties": {f"k{n}": SMALL for n in range(2000)}},
    "patterns_51": {"type": "object", "patternProperties": {f"^k{n}$": SMALL for n in range(51)}},
    "any_of_any": {
        "allOf": [
            {"anyOf": [{"properties": {f"k{n}_{m}": SMALL}} for m in range(3)]} for n in range(20)
        ]
    },
    "text": {"const": "x" * 300_000},
}


def hostile() -> dict[str, Any]:
    """By name; a schema or its text."""
    made: dict[str, Any] = {}
    for name, text in TEXTS.items():
        made |= {
            f"key_{name}": closed({text: SMALL}),
            f"optional_key_{name}": {**closed({text: SMALL}), "required": []},
            f"const_{name}": {"const": text},
            f"enum_{name}": {"enum": [text, text + "x", None]},
            f"description_{name}": {"enum": [1], "description": text, "title": text},
        }
    made |= {f"bound_{name}": schema for name, schema in BOUNDS.items()}
    made |= {
        f"pattern_{place}": {"type": "string", "pattern": text, "maxLength": 40}
        for place, text in enumerate(PATTERNS)
    }
    made |= {f"format_{name}": {"type": "string", "format": name} for name in FORMATS}
    made |= {f"keyword_{name}": schema for name, schema in KEYWORDS.items()}
    made |= {f"reference_{name}": schema for name, schema in REFERENCES.items()}
    made |= {f"size_{name}": schema for name, schema in SIZES.items()}
    for name, value in {
        "null": None,
        "true": True,
        "zero": -0.0,
        "float": 1e-7,
        "list": [[], {}],
        "object": {"b": 1, "a": None},
    }.items():
        made |= {f"const_{name}": {"const": value}, f"enum_of_{name}": {"enum": [value, "other"]}}
    one, two = closed(kind={"const": "a"}, x=SMALL), closed(kind={"const": "b"}, y={"type": "null"})
    made |= {
        "any_of": {"anyOf": [one, two]},
        "one_of": {"oneOf": [one, two]},
        "one_of_same": {"oneOf": [one, one]},
        "one_of_types": {"oneOf": [{"enum": ["a"]}, {"type": "null"}]},
        "all_of": {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
        "all_of_objects": {
            "allOf": [
                closed(a=SMALL) | {"additionalProperties": True},
                {"required": ["b"], "properties": {"b": SMALL}},
            ],
            "maxProperties": 2,
        },
        "all_of_nothing": {"allOf": [{"type": "string"}, {"type": "null"}]},
        "any_beside": {
            "type": "object",
            "properties": {"a": SMALL},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            "additionalProperties": False,
        },
        "types": {"type": ["null", "boolean"]},
        "nullable": {"type": ["string", "null"], "enum": ["a", None]},
        "enum_of_other_type": {"type": "string", "enum": [1, "a"]},
        "enum_of_no_type": {"type": "string", "enum": [1, 2]},
        "prefix_keys": closed(a=SMALL, aa=SMALL, aaa=SMALL),
        "prefix_keys_optional": {**closed(a=SMALL, aa=SMALL, aaa=SMALL), "required": ["aaa"]},
        "prefix_consts": {"enum": ["a", "ab", "abc", 'a"', "a\\"]},
        "key_case": closed(a=SMALL, A=SMALL),
        "key_forms": closed({"é": SMALL, "e\u0301": SMALL}),
        "no_keys": closed(),
        "required_unknown": {
            "type": "object",
            "properties": {"a": SMALL},
            "required": ["b"],
            "additionalProperties": SMALL,
            "maxProperties": 2,
        },
        "required_forbidden": {
            "type": "object",
            "properties": {"a": SMALL},
            "required": ["b"],
            "additionalProperties": False,
        },
        "additional": {"type": "object", "additionalProperties": SMALL, "maxProperties": 1},
        "additional_beside": {
            **closed(a=SMALL),
            "additionalProperties": {"type": "null"},
            "maxProperties": 2,
        },
        "key_patterns": {
            "type": "object",
            "patternProperties": {"^x[0-9]$": SMALL},
            "additionalProperties": False,
            "maxProperties": 2,
        },
        "key_patterns_both": {
            "type": "object",
            "properties": {"x1": {"const": 1}},
            "patternProperties": {"^x": SMALL},
            "additionalProperties": False,
            "required": ["x1"],
        },
        "key_patterns_overlap": {
            "type": "object",
            "patternProperties": {"^a": SMALL, "b$": {"type": "null"}},
            "additionalProperties": False,
        },
        "tuple": {
            "type": "array",
            "prefixItems": [{"const": 1}, SMALL],
            "items": False,
            "minItems": 2,
        },
        "tuple_open": {
            "type": "array",
            "prefixItems": [{"const": 1}],
            "items": SMALL,
            "maxItems": 3,
        },
        "old_tuple": {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [{"const": 1}, SMALL],
            "additionalItems": False,
            "minItems": 2,
            "maxItems": 2,
        },
        "lists": {
            "type": "array",
            "items": {"type": "array", "items": SMALL, "maxItems": 2},
            "maxItems": 2,
        },
        "no_items": {"type": "array", "maxItems": 0},
        "keys_counted": {
            "type": "object",
            "properties": {"a": SMALL, "b": SMALL, "c": SMALL},
            "minProperties": 2,
            "maxProperties": 2,
            "additionalProperties": False,
        },
        "text_schema": json.dumps(closed(a=SMALL)),
        "text_twice": '{"enum": [1], "enum": [2]}',
        "text_escaped": '{"\\u0065num": [1]}',
        "text_nan": '{"const": NaN}',
        "text_half_character": '{"const": "\\ud800"}',
        "text_half_key": '{"properties": {"\\udc00": {}}}',
        "text_large_number": '{"const": 1e999}',
        "text_many_digits": '{"const": ' + "9" * 5000 + "}",
        "text_deep": '{"const": ' + "[" * 5000 + "]" * 5000 + "}",
        "text_list": "[]",
        "text_true": "true",
        "text_broken": '{"type": "object"',
        "text_mark": '\ufeff{"enum": [1]}',
    }
    return made


# What the library does not read in full, or nothing can meet, by name; all else is taken.
REFUSED = {
    "all_of_nothing",
    "bound_beyond_int64",
    "bound_none",
    "bound_none_between",
    "enum_of_no_type",
    "format_nonsense",
    "format_regex",
    "key_patterns_overlap",
    "keys_counted",
    "keyword_any_empty",
    "keyword_bound_text",
    "keyword_contains",
    "keyword_dependent",
    "keyword_dynamic",
    "keyword_enum_empty",
    "keyword_enum_text",
    "keyword_if",
    "keyword_length_half",
    "keyword_length_negative",
    "keyword_lengths_crossed",
    "keyword_names",
    "keyword_needs_false",
    "keyword_not",
    "keyword_other_dialect",
    "keyword_properties_list",
    "keyword_required_text",
    "keyword_type",
    "keyword_type_number",
    "keyword_unevaluated",
    "keyword_unique",
    "one_of_same",
    "pattern_10",
    "pattern_11",
    "pattern_12",
    "pattern_14",
    "pattern_22",
    "reference_all_itself",
    "reference_each_other",
    "reference_elsewhere",
    "reference_endless",
    "reference_endless_items",
    "reference_itself",
    "reference_itself_named",
    "reference_missing",
    "reference_number",
    "required_forbidden",
    "required_unknown",
    "size_any_of_any",
    "size_deep_all_150",
    "size_deep_all_3000",
    "size_deep_any_150",
    "size_deep_any_3000",
    "size_deep_arrays_150",
    "size_deep_arrays_3000",
    "size_deep_objects_150",
    "size_deep_objects_3000",
    "size_maxItems_1180591620717411303424",
    "size_maxLength_1000000000000",
    "size_maxLength_1180591620717411303424",
    "size_minItems_1180591620717411303424",
    "size_minLength_1000000000000",
    "size_minLength_1180591620717411303424",
    "size_patterns_51",
    "size_properties_1400",
    "size_properties_2000",
    "size_text",
    "text_broken",
    "text_deep",
    "text_half_character",
    "text_half_key",
    "text_large_number",
    "text_list",
    "text_many_digits",
    "text_nan",
    "text_true",
}


def any_schema(random: random.Random, depth: int = 2) -> Schema:
    """A small one, of what answers end within a few dozen letters."""
    kinds = ["enum", "integer", "null", "boolean"] + (
        ["object", "array", "any", "pattern"] if depth else []
    )
    kind = random.choice(kinds)
    if kind == "enum":
        return {
            "enum": random.sample(
                [*TEXTS.values(), 0, -1.5, None, True, [], {}][2:], random.randint(1, 3)
            )
        }
    if kind == "integer":
        low = random.randint(-120, 120)
        return {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 200)}
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": "^" + "".join(random.choices(["a", "[0-9]", "b?", "(c|dd)"], k=3)) + "$",
        }
    if kind == "array":
        low = random.randint(0, 2)
        return {
            "type": "array",
            "items": any_schema(random, depth - 1),
            "minItems": low,
            "maxItems": low + random.randint(0, 1),
        }
    if kind == "any":
        return {"anyOf": [any_schema(random, depth - 1) for _ in range(random.randint(1, 3))]}
    if kind == "object":
        keys = random.sample(["a", "ab", "key", "é", '"', "<"], random.randint(0, 2))
        required = [key for key in keys if random.random() < 0.6]
        made = {key: any_schema(random, depth - 1) for key in keys}
        return {
            "type": "object",
            "properties": made,
            "required": required,
            "additionalProperties": False,
        }
    return {"type": kind}
