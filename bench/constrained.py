"""Speed of constrained answers: plain decoding, trees, and trees with forced tokens.

Methods are measured as in `specengine bench`, with medians over rounds. Their answers must be equal and match the
schema. "without forced" are trees whose tokens are checked against the schema, but forced tokens are left to the draft.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jsonschema

from bench import provenance
from bench.arguments import add_arguments
from specengine import Engine, policies
from specengine.benchmark.choice import Comparison
from specengine.benchmark.measuring import Run
from specengine.benchmark.summaries import ALL, Answer, summaries
from specengine.benchmark.ways import PLAIN, EngineDecoder, Engines, Way
from specengine.benchmark.workloads import Workload
from specengine.options import LoadOptions
from specengine.request.grammars import Constraint
from specengine.request.text import Decoder

_PERSON = (
    "Extract the person.\n\nDr. Maria Keller, born in 1961 in Basel, has taught physics at the university of Bern "
    "since 1998. She lives in Thun, is married, and can be reached at m.keller@example.org."
)
_ORDER = (
    "Write the order as JSON.\n\nHello, I am Tom Reed, 12 Mill Lane, Leeds. Please send me 3 blue mugs at 4.50 each "
    "and 1 tea pot at 19.99. Express delivery, I pay by card."
)
_TICKET = (
    "Classify this ticket.\n\nSince the update this morning nobody in our office can log in any more. "
    "It is urgent!"
)
_TEXT = {"type": "string", "maxLength": 40}


def _object(**properties: Any) -> dict[str, Any]:
    names = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


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
            delivery=_object(
                method={"enum": ["standard", "express"]}, payment={"enum": ["card", "invoice"]}
            ),
        ),
    ),
    "enums": (
        _TICKET,
        _object(
            category={
                "enum": [
                    "authentication_failure",
                    "billing_question",
                    "feature_request",
                    "performance_problem",
                ]
            },
            severity={"enum": ["critical_outage", "major_degradation", "minor_inconvenience"]},
            affected_component={
                "enum": ["login_service", "payment_service", "reporting_service", "user_interface"]
            },
            customer_sentiment={"enum": ["frustrated", "neutral", "satisfied"]},
            recommended_action={
                "enum": [
                    "escalate_to_engineering",
                    "reply_with_instructions",
                    "close_without_action",
                ]
            },
            requires_human_review={"type": "boolean"},
        ),
    ),
}


@contextlib.contextmanager
def nothing_forced() -> Iterator[None]:
    """Disable forced tokens inside the context."""
    forced = Constraint.forced
    Constraint.forced = lambda self, tokens: []  # type: ignore[method-assign]
    try:
        yield
    finally:
        Constraint.forced = forced  # type: ignore[method-assign]


class Unforced(EngineDecoder):
    """Trees without forced tokens."""

    def __call__(self, prompt: list[int], length: int) -> Answer:
        with nothing_forced():
            return super().__call__(prompt, length)


def records(engine: Engine, rounds: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Yield a record per schema and method. Raise RuntimeError if answers differ or do not match their schema."""
    engines, plain = Engines(engine, LoadOptions()), Comparison.plain(engine)
    for name, (prompt, schema) in REQUESTS.items():
        options = {"temperature": 0.0, "json_schema": schema}
        ways = [
            Way(PLAIN, partial(EngineDecoder, plain, options)),
            Way("without forced", partial(_decoder, Unforced, engines, options)),
            Way("forced", partial(_decoder, EngineDecoder, engines, options)),
        ]
        run = Run(plain, ways, options, length=tokens, rounds=rounds)
        found = list(run.records([Workload("schemas", name, (prompt,))]))
        rows = {record["way"]: record for record in found if record["record"] == "row"}
        if any(rows.get(way.name, {"verdict": "lost"})["verdict"] != "exact" for way in ways):
            raise RuntimeError(f"{name}: the answers differ")
        answer = next(record["tokens"] for record in found if record["record"] == "answer")
        text = Decoder(engine.tokenizer)(answer)
        if len(answer) < tokens:
            jsonschema.validate(json.loads(text), schema)
        for summary in summaries(found):
            row = rows[summary["way"]]
            if summary["set"] == ALL:
                yield {
                    "record": "constrained",
                    "schema": name,
                    "way": row["way"],
                    "new_tokens": row["new_tokens"],
                    "finish_reason": "stop" if len(answer) < tokens else "length",
                    "tokens_per_second": round(summary["tokens_per_second"], 1),
                    "over_plain": round(summary["speed_total"], 3),
                    "seconds": row["seconds"],
                    "verifications": row["cycles"],
                    "draft_passes": row["passes"],
                    "answer": text,
                }


def _decoder(kind: type[EngineDecoder], engines: Engines, options: dict[str, Any]) -> EngineDecoder:
    policy: Any = engines.first.policy  # with its options, such as given costs
    return kind(
        engines.make(policies.make("auto") if policy is None else dataclasses.replace(policy)),
        options,
    )


def main(load: Callable[[], Engine] = Engine.from_pretrained) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "out", rounds=5, max_new_tokens=160)
    args = parser.parse_args()
    provenance.show(records(load(), args.rounds, args.max_new_tokens), args.out)


if __name__ == "__main__":
    main()
