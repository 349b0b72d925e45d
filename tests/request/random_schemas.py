"""Random JSON schemas, and random whole answers to each: another library checks that each answer meets its schema.

    python -m tests.request.random_schemas --count 10000 --out bench/results/random-schemas.jsonl

Answers are random tokens among those that the constraint allows, without a model. An answer is read twice, its numbers
as decimals and as float64, and has to meet the schema both times. Schemas that are refused are counted by reason.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
import sys
from collections import Counter
from decimal import Decimal
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator, ValidationError

from specengine.errors import InputError
from specengine.request.grammars import Constraint, Vocabularies, compiled
from tests.toy import byte_tokenizer

Schema = dict[str, Any]
tokenizer = cache(byte_tokenizer)
END = 257
CHECKER = Draft202012Validator.FORMAT_CHECKER
FORMATS = [
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
]
INTEGER_FORMATS = ["int8", "int32", "int64", "uint8", "uint32", "uint64"]
EDGES = [2**31, 2**53 - 1, 2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**15]
PATTERNS = ["^[a-z]{1,3}$", "^\\d{2}-\\d{2}$", "ab", "^(x|yy)+$", "^[^a]$"]
WORDS = ["a", "name", "é", "x y", '"', "key", "<", "\\"]
MAX_TOKENS = 300


def number_bound(chance: random.Random) -> Any:
    """Return a number of an ordinary or an extreme size, an integer or not."""
    kind = chance.randrange(6)
    if kind == 0:
        return chance.choice([0, 1, -1, 0.5, 100, 1e-3, -0.001, 1e-5, 0.1, 99.95])
    if kind == 1:
        return chance.randint(-1000, 1000)
    if kind == 2:
        return chance.choice([1, -1]) * chance.choice(EDGES) + chance.randint(-2, 2)
    if kind == 3:
        return round(chance.uniform(-10, 10), chance.randint(1, 6))
    if kind == 4:
        return chance.choice([1, -1]) * chance.randint(1, 99) * float(f"1e-{chance.randint(1, 12)}")
    return float(chance.randint(-(10**6), 10**6))


def number(chance: random.Random) -> Schema:
    schema: Schema = {"type": chance.choice(["number", "integer"])}
    bounds = sorted((number_bound(chance), number_bound(chance)))
    if chance.random() < 0.3:
        bounds[1] = bounds[0] + chance.choice([1, 0.5, 0.001, 3])
    if chance.random() < 0.8:
        schema[chance.choice(["minimum", "exclusiveMinimum"])] = bounds[0]
    if chance.random() < 0.8:
        schema[chance.choice(["maximum", "exclusiveMaximum"])] = bounds[1]
    if chance.random() < 0.15:
        schema["multipleOf"] = chance.choice([2, 3, 7, 0.5, 0.01, 0.25, 100, 0.1])
    if schema["type"] == "integer" and chance.random() < 0.15:
        schema["format"] = chance.choice(INTEGER_FORMATS)
    return schema


def text(chance: random.Random) -> Schema:
    schema: Schema = {"type": "string"}
    kind = chance.randrange(4)
    if kind == 0:
        schema["format"] = chance.choice(FORMATS)
    elif kind == 1:
        schema["pattern"] = chance.choice(PATTERNS)
    elif kind == 2:
        schema["maxLength"] = chance.randint(0, 8)
        schema["minLength"] = chance.randint(0, schema["maxLength"])
    else:
        return {
            "enum": [
                chance.choice(WORDS),
                number_bound(chance),
                chance.choice([None, True, [], {"a": 1.5}]),
            ]
        }
    return schema


def any_schema(chance: random.Random, depth: int = 2) -> Schema:
    """Return a random schema of up to `depth` levels around numbers and texts."""
    kind = chance.randrange(9 if depth else 4)
    if kind < 2:
        return number(chance)
    if kind == 2:
        return text(chance)
    if kind == 3:
        return chance.choice(
            [{"type": "null"}, {"type": "boolean"}, {"const": number_bound(chance)}]
        )
    inner = any_schema(chance, depth - 1)
    other = any_schema(chance, depth - 1)
    if kind == 4:
        low = chance.randint(0, 2)
        return {
            "type": "array",
            "items": inner,
            "minItems": low,
            "maxItems": low + chance.randint(0, 2),
        }
    if kind == 5:
        return {"anyOf": [inner, other]}
    if kind == 6:
        return {"type": "array", "prefixItems": [inner, other], "items": False, "minItems": 2}
    if kind == 7:
        beside = {
            key: value for key, value in number(chance).items() if key not in ("type", "format")
        }
        return {"allOf": [number(chance), beside]}
    names = chance.sample(WORDS, 2)
    schema = {
        "type": "object",
        "properties": dict(zip(names, (inner, {"$ref": "#/$defs/other"}), strict=True)),
    }
    schema |= {"required": names[: chance.randint(0, 2)], "$defs": {"other": other}}
    schema |= chance.choice(
        [{"additionalProperties": False}, {"additionalProperties": inner, "maxProperties": 3}]
    )
    return schema


def definitions_lifted(schema: Schema) -> Schema:
    """Return the schema with all definitions at its root, each with a name of its own."""
    definitions: Schema = {}

    def lifted(node: Any) -> Any:
        if isinstance(node, list):
            return [lifted(item) for item in node]
        if not isinstance(node, dict):
            return node
        node = dict(node)
        if "$defs" in node and "properties" in node:
            name = f"d{len(definitions)}"
            definitions[name] = None
            definitions[name] = lifted(node.pop("$defs")["other"])
            properties = {
                key: {"$ref": f"#/$defs/{name}"}
                if value == {"$ref": "#/$defs/other"}
                else lifted(value)
                for key, value in node["properties"].items()
            }
            rest = {key: lifted(value) for key, value in node.items() if key != "properties"}
            return rest | {"properties": properties}
        return {key: lifted(value) for key, value in node.items()}

    result: Schema = lifted(schema)
    return result | ({"$defs": definitions} if definitions else {})


def random_schema(seed: int) -> Schema:
    return definitions_lifted(any_schema(random.Random(seed)))


@cache
def vocabularies() -> Vocabularies:
    return Vocabularies(tokenizer(), 260)


def random_answer(constraint: Constraint, chance: random.Random) -> str | None:
    """Return a random text that the constraint takes as whole; None where it does not end."""
    tokens: list[int] = []
    closing = [END, *tokenizer()('"}],')["input_ids"]]
    while len(tokens) < MAX_TOKENS and not constraint.complete(tokens):
        allowed = np.flatnonzero(constraint.allowed(tokens)).tolist()
        if not allowed:
            return None
        ends = [token for token in closing if token in allowed]
        token = chance.choice(ends) if ends and chance.random() < 0.3 else chance.choice(allowed)
        if token == END:
            break
        tokens.append(token)
    else:
        if not constraint.complete(tokens):
            return None
    return str(tokenizer().decode(tokens))


def broken(schema: Schema, answer: str) -> str | None:
    """Return why an answer does not meet its schema, read with decimals and with float64."""
    written = json.dumps(schema)
    for kind in (Decimal, float):
        try:
            Draft202012Validator(
                json.loads(written, parse_float=kind), format_checker=CHECKER
            ).validate(json.loads(answer, parse_float=kind))
        except ValidationError as error:
            if kind is float and error.validator == "multipleOf":
                continue  # in float64 0.3 is no multiple of 0.1
            return f"{kind.__name__}: {error.message:.200}"
    return None


def judged(seed: int, answers: int) -> tuple[Counter[str], list[dict[str, Any]], str | None]:
    """Return the counts of one schema, its answers that break it, and why it is refused."""
    schema, counts = random_schema(seed), Counter[str](schemas=1)
    try:
        constraint = vocabularies().constraint(
            "json_schema", compiled("json_schema", schema), [END]
        )
    except InputError as error:
        return counts + Counter(refused=1), [], str(error)
    wrong = []
    for turn in range(answers):
        answer = random_answer(constraint, random.Random(f"{seed} {turn}"))
        counts["unfinished" if answer is None else "finished"] += 1
        if answer is not None and (why := broken(schema, answer)) is not None:
            wrong.append(
                {"record": "broken", "seed": seed, "schema": schema, "answer": answer, "why": why}
            )
    return counts + Counter(broken=len(wrong)), wrong, None


def reason(message: str) -> str:
    """Return a refusal without its values."""
    words = message.removeprefix("json_schema: it is not accepted (")
    return re.sub(r"-?\d[\d.e+-]*", "N", words)[:60].rstrip(" )")


def main() -> None:
    from importlib.metadata import version

    from specengine.benchmark.records import provenance

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="schemas")
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    parser.add_argument("--answers", type=int, default=3, help="to each schema")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    counts, reasons, wrong = Counter[str](), Counter[str](), list[dict[str, Any]]()
    seeds = range(args.seed, args.seed + args.count)
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for one, found, why in pool.imap(
            partial(judged, answers=args.answers), seeds, chunksize=50
        ):
            counts += one
            wrong += found
            if why is not None:
                reasons[reason(why)] += 1
            for row in found:
                print(json.dumps(row), flush=True)
    libraries = {name: version(name) for name in ("llguidance", "jsonschema")}
    rows = [provenance("python -m tests.request.random_schemas", sys.argv[1:]) | libraries]
    names = ("schemas", "refused", "finished", "unfinished", "broken")
    rows += [{"record": "random schemas", **{name: counts[name] for name in names}}]
    rows += [
        {"record": "refused", "reason": why, "schemas": count}
        for why, count in reasons.most_common()
    ]
    print(json.dumps(rows[1]))
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows + wrong))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
