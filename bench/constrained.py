"""Speed of constrained answers: plain decoding, trees, and trees in which forced tokens stand.

The ways answer the same requests in turns, after a round that warms up; medians over rounds. Their answers must be
the same, and each meets its schema. "without forced" is trees whose tokens are checked against the schema, but where
what the schema forces is proposed like anything else: by the draft, at what it costs there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema

from bench import provenance
from specengine import Engine
from specengine.request.grammars import Constraint

_PERSON = (
    "Extract the person.\n\nDr. Maria Keller, born in 1961 in Basel, has taught physics at the university of Bern "
    "since 1998. She lives in Thun, is married, and can be reached at m.keller@example.org."
)
_ORDER = (
    "Write the order as JSON.\n\nHello, I am Tom Reed, 12 Mill Lane, Leeds. Please send me 3 blue mugs at 4.50 each "
    "and 1 tea pot at 19.99. Express delivery, I pay by card."
)
_TICKET = (
    "Classify this ticket.\n\nSince the update this morning nobody in our office can log in any more. It is urgent!"
)
_TEXT = {"type": "string", "maxLength": 40}


def _object(**properties: Any) -> dict[str, Any]:
    names = list(properties)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "person": (
        _PERSON,
        _object(
            full_name=_TEXT,
            year_of_birth={"type": "integer", "minimum": 1900, "maximum": 2030},
            place_of_birth=_TEXT,
            occupation=_TEXT,
            employer=_TEXT,
            place_of_residence=_TEXT,
            email_address={"type": ["string", "null"], "maxLength": 40},
        ),
    ),
    "order": (
        _ORDER,
        _object(
            customer=_object(name=_TEXT, address=_object(street=_TEXT, city=_TEXT)),
            items={
                "type": "array",
                "items": _object(
                    product=_TEXT,
                    quantity={"type": "integer", "minimum": 1, "maximum": 99},
                    unit_price={"type": "number", "minimum": 0, "maximum": 999},
                ),
                "minItems": 2,
                "maxItems": 2,
            },
            delivery=_object(method={"enum": ["standard", "express"]}, payment={"enum": ["card", "invoice"]}),
        ),
    ),
    "enums": (
        _TICKET,
        _object(
            category={"enum": ["authentication_failure", "billing_question", "feature_request", "performance_problem"]},
            severity={"enum": ["critical_outage", "major_degradation", "minor_inconvenience"]},
            affected_component={"enum": ["login_service", "payment_service", "reporting_service", "user_interface"]},
            customer_sentiment={"enum": ["frustrated", "neutral", "satisfied"]},
            recommended_action={"enum": ["escalate_to_engineering", "reply_with_instructions", "close_without_action"]},
            requires_human_review={"type": "boolean"},
        ),
    ),
}
WAYS: dict[str, dict[str, Any]] = {"plain": {"policy": "plain"}, "without forced": {}, "forced": {}}


@contextlib.contextmanager
def nothing_forced() -> Iterator[None]:
    """Within it the schema forces nothing that a draft would know of."""
    forced = Constraint.forced
    Constraint.forced = lambda self, tokens: []  # type: ignore[method-assign]
    try:
        yield
    finally:
        Constraint.forced = forced  # type: ignore[method-assign]


def answer(engine: Engine, way: str, name: str, tokens: int) -> tuple[Any, float]:
    """The result and its seconds."""
    prompt, schema = REQUESTS[name]
    messages = [{"role": "user", "content": prompt}]
    with nothing_forced() if way == "without forced" else contextlib.nullcontext():
        began = time.perf_counter()
        result = engine.generate(messages, json_schema=schema, max_new_tokens=tokens, temperature=0, **WAYS[way])
        return result, time.perf_counter() - began


def records(engine: Engine, rounds: int, tokens: int) -> Iterator[dict[str, Any]]:
    """One record per schema and way; RuntimeError where answers differ or do not meet their schema."""
    for name, (_, schema) in REQUESTS.items():
        results: dict[str, list[tuple[Any, float]]] = {way: [] for way in WAYS}
        for _ in range(rounds + 1):
            for way in WAYS:
                results[way].append(answer(engine, way, name, tokens))
        said = {tuple(result.token_ids) for found in results.values() for result, _ in found}
        if len(said) > 1:
            raise RuntimeError(f"{name}: the answers differ")
        result = results["forced"][-1][0]
        if result.finish_reason == "stop":
            jsonschema.validate(json.loads(result.text), schema)
        plain = _median(results["plain"])
        for way, found in results.items():
            stats = found[-1][0].stats
            yield {
                "record": "constrained",
                "schema": name,
                "way": way,
                "new_tokens": len(result.token_ids),
                "finish_reason": result.finish_reason,
                "tokens_per_second": round(len(result.token_ids) / _median(found), 1),
                "over_plain": round(plain / _median(found), 3),
                "seconds": [round(seconds, 4) for _, seconds in found[1:]],
                "verifications": stats.num_spec_steps,
                "draft_passes": stats.num_draft_passes,
                "policy": stats.policy,
                "answer": result.text,
            }


def _median(found: Sequence[tuple[Any, float]]) -> float:
    return statistics.median(seconds for _, seconds in found[1:])  # the first round warms up


def main(load: Callable[[], Engine] = Engine.from_pretrained) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for row in provenance.kept(records(load(), args.rounds, args.max_new_tokens), args.out):
        print(json.dumps(row), flush=True)
        rows.append(row)
    if args.out:
        provenance.write(args.out, rows)


if __name__ == "__main__":
    main()
