"""Show traces as one self-contained HTML page, without a server or a network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from specengine.trace.records import Query, Trace, TracedCycle

PROBABILITY_DIGITS = 4
SECONDS_DIGITS = 5


def page(traces: Sequence[Trace]) -> str:
    """Return the page with all queries of these traces.

    The content of the traces is embedded as JSON that cannot end its script element, and shown as text only. The
    page's security policy allows no other script and no requests.
    """
    template, style, script = (_resource(kind) for kind in ("html", "css", "js"))
    texts = {
        "{{script-hash}}": _hash(script),
        "{{style-hash}}": _hash(style),
        "{{style}}": style,
        "{{script}}": script,
        "{{data}}": _embedded(_data(traces)),
    }
    for name, text in texts.items():  # the data last, so that nothing in it is read as a name
        template = template.replace(name, text, 1)
    return template


def _resource(kind: str) -> str:
    return resources.files("specengine.trace").joinpath(f"page.{kind}").read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the hash of a text as a source of a Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _embedded(data: Any) -> str:
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _data(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return the data for page.js, with short names and each text once."""
    return {
        "runs": [_run(trace) for trace in traces],
        "queries": [_query(query, number) for number, trace in enumerate(traces) for query in trace.queries],
    }


def _run(trace: Trace) -> dict[str, Any]:
    texts: dict[int, str] = {}
    for query in trace.queries:
        for cycle in query.cycles:
            texts.update(zip(cycle.tokens, cycle.texts, strict=True))
            texts.update(zip(cycle.committed, cycle.committed_texts, strict=True))
    return {
        "file": trace.file.name,
        "model": trace.model,
        "draft": trace.draft,
        "policy": trace.policy,
        "versions": trace.versions,
        "truncated": trace.truncated,
        "texts": texts,
    }


def _query(query: Query, run: int) -> dict[str, Any]:
    return {
        "run": run,
        "title": query.title,
        "prompt": query.prompt,
        "seed": query.seed,
        "end": query.finish_reason,
        "cycles": [_cycle(cycle) for cycle in query.cycles],
    }


def _cycle(cycle: TracedCycle) -> dict[str, Any]:
    return {
        "t": cycle.tokens,
        "p": cycle.parents,
        "e": [float(f"{value:.{PROBABILITY_DIGITS}g}") for value in cycle.probabilities],
        "k": cycle.kept if len(cycle.kept) < len(cycle.tokens) else None,
        "a": cycle.accepted,
        "c": cycle.committed,
        "s": cycle.text,
        "d": cycle.passes,
        "sec": {step: round(seconds, SECONDS_DIGITS) for step, seconds in cycle.seconds.items()},
    }
