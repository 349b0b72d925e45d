"""The records of a trace file. It is JSON, one record per line, in this order:

trace   the file: format, model, draft, policy, versions
query   one generation: prompt, prompt_tokens, seed
cycle   one cycle: the fields of TracedCycle
end     the end of the query: finish_reason (null if it was stopped from outside), stats (Stats.to_dict)

A file has any number of queries, each with its cycles and its end. The file of a killed run has no last end, and its
last line may be incomplete. Its content is untrusted: every field is checked, and nothing in it is run.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from specengine.errors import InputError, require_input, require_value, restating, shown

FORMAT = 1
_TEMPLATE_MARK = re.compile(r"<\|[^|]{1,40}\|>|\[/?INST\]|<(?:start|end)_of_turn>")
ROOT, ACCEPTED, REJECTED, PRUNED = "root", "accepted", "rejected", "pruned"
ORIGINS = ("draft", "copied", "recycled", "forced")


@dataclass(frozen=True)
class TracedCycle:
    """One cycle: all drafted nodes and what became of them. Nodes are numbered in the order of drafting, 0 is the root.

    tokens, texts, parents   by node; the root's parent is -1, a node's parent comes before it
    probabilities            by node, the draft's probability of the edge to it; 1 at the root
    path_probabilities       by node, the product of the probabilities from the root
    kept                     nodes that the target verified, ascending, the root included; the others were pruned
    accepted                 the accepted path, the root first
    committed                token ids: those of the accepted path below the root, then the target's own, unless the
                             path ends with the answer's end token
    committed_texts          their texts, token by token
    text                     the text that the committed tokens added; it may lag inside a character
    passes                   number of draft passes
    seconds                  by step, the fields of records.Seconds
    origins                  by node: draft, copied (from the text), recycled (the target's predictions after the same
                             token before) or forced (by a grammar); None for the root and for unknown origins. None
                             instead of a list if all are unknown, as in files of earlier versions
    """

    tokens: list[int]
    texts: list[str]
    parents: list[int]
    probabilities: list[float]
    path_probabilities: list[float]
    kept: list[int]
    accepted: list[int]
    committed: list[int]
    committed_texts: list[str]
    text: str
    passes: int
    seconds: dict[str, float]
    origins: list[str | None] | None = None

    @property
    def has_own(self) -> bool:
        """Return whether the last committed token is the target's own."""
        return len(self.committed) == len(self.accepted)

    @cached_property
    def depths(self) -> list[int]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    @cached_property
    def children(self) -> list[list[int]]:
        """The children of each node, the most likely first; equals in the order of drafting."""
        children: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return [sorted(nodes, key=lambda node: -self.probabilities[node]) for nodes in children]

    @cached_property
    def ranks(self) -> list[int]:
        """The rank of each node among its siblings, from 1; 0 for the root."""
        places = {n: rank for nodes in self.children for rank, n in enumerate(nodes, start=1)}
        return [places.get(node, 0) for node in range(len(self.tokens))]

    @cached_property
    def states(self) -> list[str]:
        """The state of each node: root, accepted, rejected (verified, but not accepted) or pruned (never verified)."""
        verified = dict.fromkeys(self.kept, REJECTED) | dict.fromkeys(self.accepted, ACCEPTED)
        return [ROOT, *(verified.get(node, PRUNED) for node in range(1, len(self.tokens)))]


@dataclass(frozen=True)
class Query:
    """One generation: prompt, cycles, and finish reason (None if the run was stopped before its end)."""

    prompt: str
    prompt_tokens: list[int]
    seed: int | None
    cycles: list[TracedCycle] = field(default_factory=list)
    finish_reason: str | None = None
    stats: dict[str, Any] | None = None

    @property
    def title(self) -> str:
        """The last turn of the prompt, without the marks of a chat template, on one line."""
        turns = [turn.strip() for turn in _TEMPLATE_MARK.split(self.prompt)]
        texts = [turn for turn in turns if len(turn.split()) > 1] or turns
        return " ".join(texts[-1].removeprefix("user\n").split())

    @property
    def tau(self) -> float:
        """Mean acceptance length: tokens committed per verification; 0 without cycles."""
        return fmean([len(cycle.committed) for cycle in self.cycles] or [0])

    @property
    def delta(self) -> float:
        """Mean draft passes per verification."""
        return fmean([cycle.passes for cycle in self.cycles] or [0])

    @property
    def verified(self) -> float:
        """Mean number of verified nodes per cycle, the root included."""
        return fmean([len(cycle.kept) for cycle in self.cycles] or [0])

    @property
    def drafted(self) -> float:
        """Mean number of drafted nodes per cycle, the root excluded."""
        return fmean([len(cycle.tokens) - 1 for cycle in self.cycles] or [0])


@dataclass(frozen=True)
class Trace:
    """A trace file. `truncated`: its last line is incomplete and was skipped."""

    file: Path
    model: str
    draft: str
    policy: str
    versions: dict[str, str]
    queries: list[Query] = field(default_factory=list)
    truncated: bool = False


Check = tuple[str, Callable[[Any], bool]]


def read_trace(file: Path) -> Trace:
    """Return the trace in `file`.

    An incomplete last line, as a killed run leaves it, is skipped and reported. Raise InputError naming line and field
    for any other error.
    """
    with restating(
        OSError,
        lambda error: InputError(f"trace: {file} cannot be read ({error.strerror or error})"),
    ):
        lines = file.read_bytes().split(b"\n")
    header: dict[str, Any] = {}
    queries: list[dict[str, Any]] = []
    truncated = False
    for number, line in enumerate(lines, start=1):
        where = f"{file}, line {number}"
        try:
            record = _parsed(line, where)
        except InputError:
            if number < len(lines):
                raise
            truncated = line != b""
        else:
            _take(record, where, header, queries)
    require_input(f"trace: {file} has no records", bool(header))
    return Trace(file, **header, queries=[Query(**query) for query in queries], truncated=truncated)


def _take(
    record: dict[str, Any], where: str, header: dict[str, Any], queries: list[dict[str, Any]]
) -> None:
    """Add a record to the header or the queries. Raise InputError unless it is whole and stands where it may."""
    kind = record.pop("record", None)
    require_value(
        f"trace: {where}: record",
        kind,
        ", ".join(_FIELDS),
        isinstance(kind, str) and kind in _FIELDS,
    )
    require_input(
        f"trace: {where}: record: got {kind}, but a trace begins with a record trace",
        bool(header) or kind == "trace",
    )
    require_input(
        f"trace: {where}: format: got {shown(record.get('format'))}, this specengine reads {FORMAT}",
        kind != "trace" or record.get("format") == FORMAT,
    )
    record = {**_DEFAULTS.get(kind, {}), **record}
    checks = _FIELDS[kind]
    for name, (accepted, holds) in checks.items():
        require_input(f"trace: {where}: {kind}.{name} is missing", name in record)
        require_value(f"trace: {where}: {kind}.{name}", record[name], accepted, holds(record[name]))
    unknown = sorted(record.keys() - checks.keys())
    require_input(
        f"trace: {where}: {kind}.{', '.join(unknown[:1])} is unknown, known are {', '.join(checks)}",
        not unknown,
    )
    if kind == "trace":
        require_input(f"trace: {where}: record: a second record trace", not header)
        header |= {name: value for name, value in record.items() if name != "format"}
    elif kind == "query":
        queries.append({**record, "cycles": []})
    else:
        require_input(
            f"trace: {where}: record: got {kind} outside a query",
            bool(queries) and "stats" not in queries[-1],
        )
        if kind == "cycle":
            _check_tree(record, where)
            queries[-1]["cycles"].append(TracedCycle(**record))
        else:
            queries[-1].update(record)


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    with restating(
        (ValueError, RecursionError),
        lambda error: InputError(f"trace: {where} is not JSON ({error})"),
    ):
        record = json.loads(line, parse_constant=_no_number)
    require_value(f"trace: {where}", record, "an object", isinstance(record, dict))
    return record


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


# ---- fields


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _every(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda values: isinstance(values, list) and all(map(check, values))


_TEXT: Check = ("a string", lambda value: isinstance(value, str))
_TOKENS: Check = ("a list of token ids", _every(lambda value: _is_int(value) and value >= 0))
_NODES: Check = ("a list of node numbers", _every(_is_int))
_PROBABILITIES: Check = (
    "a list of numbers from 0 to 1",
    _every(lambda value: type(value) in (int, float) and 0 <= value <= 1),
)
_TEXTS: Check = ("a list of strings", _every(_TEXT[1]))
_ORIGINS: Check = (
    f"null or a list of {', '.join(ORIGINS)} and null",
    lambda value: value is None or _every(lambda name: name is None or name in ORIGINS)(value),
)

_DEFAULTS = {"cycle": {"origins": None}}  # fields that earlier versions did not write
_FIELDS: dict[str, dict[str, Check]] = {
    "trace": {
        "format": (str(FORMAT), _is_int),
        "model": _TEXT,
        "draft": _TEXT,
        "policy": _TEXT,
        "versions": (
            "an object of strings",
            lambda value: isinstance(value, dict) and all(map(_TEXT[1], value.values())),
        ),
    },
    "query": {
        "prompt": _TEXT,
        "prompt_tokens": _TOKENS,
        "seed": ("an integer or null", lambda value: value is None or _is_int(value)),
    },
    "cycle": {
        "tokens": _TOKENS,
        "texts": _TEXTS,
        "parents": _NODES,
        "probabilities": _PROBABILITIES,
        "path_probabilities": _PROBABILITIES,
        "kept": _NODES,
        "accepted": _NODES,
        "committed": _TOKENS,
        "committed_texts": _TEXTS,
        "text": _TEXT,
        "passes": ("0 or more", lambda value: _is_int(value) and value >= 0),
        "seconds": (
            "an object of seconds",
            lambda value: (
                isinstance(value, dict)
                and all(
                    type(number) in (int, float) and 0 <= number < math.inf
                    for number in value.values()
                )
            ),
        ),
        "origins": _ORIGINS,
    },
    "end": {
        "finish_reason": (
            "a string or null",
            lambda value: value is None or isinstance(value, str),
        ),
        "stats": ("an object", lambda value: isinstance(value, dict)),
    },
}


def _check_tree(record: dict[str, Any], where: str) -> None:
    """Raise InputError unless the lists of a cycle fit together."""

    def require(name: str, accepted: str, holds: bool) -> None:
        require_value(f"trace: {where}: cycle.{name}", record[name], accepted, holds)

    tokens, parents, kept, accepted = (
        record[name] for name in ("tokens", "parents", "kept", "accepted")
    )
    size = len(tokens)
    require("tokens", "at least the root", size > 0)
    for name in ("texts", "parents", "probabilities", "path_probabilities", "origins"):
        whole = record[name] is None or len(record[name]) == size  # origins may be left out
        require(name, f"{size} entries, as many as tokens", whole)
    ordered = parents[0] == -1 and all(
        0 <= parent < node for node, parent in enumerate(parents[1:], start=1)
    )
    require("parents", "-1 at the root, and an earlier node for every other", ordered)

    inside = {node for node in kept if 0 <= node < size}
    rising = kept[:1] == [0] and all(left < right for left, right in pairwise(kept))
    closed = (
        rising and len(inside) == len(kept) and all(parents[node] in inside for node in kept[1:])
    )
    require("kept", "ascending nodes, the root first, each with its parent", closed)
    linked = all(node in inside and parents[node] == above for above, node in pairwise(accepted))
    require("accepted", "a path of kept nodes from the root", accepted[:1] == [0] and linked)

    committed = record["committed"]
    follows = [tokens[node] for node in accepted[1:]] in (committed[:-1], committed)
    require(
        "committed",
        "the accepted tokens and one more, unless they end the answer",
        bool(committed) and follows,
    )
    count = len(committed)
    require(
        "committed_texts",
        f"{count} entries, as many as committed",
        len(record["committed_texts"]) == count,
    )
