"""What a trace file holds: JSON, one record per line, in this order.

trace   the file: format, model, draft, policy, versions
query   one generation: prompt, prompt_tokens, seed
cycle   one round of it, the fields of TracedCycle
end     its end: finish_reason (null where it was stopped from outside), stats (Stats.to_dict)

A file holds any number of queries, each with its cycles and its end. A run that was killed leaves a file without the
last end, and perhaps with half a line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

FORMAT = 1
_TEMPLATE_MARK = re.compile(r"<\|[^|]{1,40}\|>|\[/?INST\]|<(?:start|end)_of_turn>")
ROOT, ACCEPTED, REJECTED, PRUNED = "root", "accepted", "rejected", "pruned"
ORIGINS = ("draft", "copied", "recycled", "forced")


@dataclass(frozen=True)
class TracedCycle:
    """One cycle: everything that was drafted, and what became of it. Nodes are numbered as drafted, 0 is the root.

    tokens, texts, parents   by node; the root's parent is -1, a node's parent comes before it
    probabilities            by node, the draft's of the edge to it; 1 at the root
    path_probabilities       by node, their product from the root
    kept                     nodes that the target verified, ascending, the root included; the others were pruned
    accepted                 the accepted path, the root first
    committed                token ids: those of the accepted path below the root, then the target's own
    committed_texts          their texts, token by token
    text                     what the committed tokens added to the answer; it may lag inside a character
    passes                   draft passes
    seconds                  by part, the fields of cycle.Seconds
    origins                  by node, where it comes from: the draft itself, a copy from the text, what the target said
                             after the same token before, or a grammar that forces it; None at the root and where that
                             is not known. None as a whole where none is, as in files of earlier versions
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

    @cached_property
    def depths(self) -> list[int]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    @cached_property
    def children(self) -> list[list[int]]:
        """Of each node, its children, the most likely first; ties as drafted."""
        children: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return [sorted(nodes, key=lambda node: -self.probabilities[node]) for nodes in children]

    @cached_property
    def ranks(self) -> list[int]:
        """Of each node, its place among its siblings, from 1; 0 at the root."""
        ranks = [0] * len(self.tokens)
        for nodes in self.children:
            for rank, node in enumerate(nodes, start=1):
                ranks[node] = rank
        return ranks

    @cached_property
    def states(self) -> list[str]:
        """Of each node: root, accepted, rejected (verified, but not accepted) or pruned (never verified)."""
        states = [PRUNED] * len(self.tokens)
        for node in self.kept:
            states[node] = REJECTED
        for node in self.accepted:
            states[node] = ACCEPTED
        states[0] = ROOT
        return states


@dataclass(frozen=True)
class Query:
    """One generation: its prompt, its cycles, and how it ended (None where the run was stopped before)."""

    prompt: str
    prompt_tokens: list[int]
    seed: int | None
    cycles: list[TracedCycle] = field(default_factory=list)
    finish_reason: str | None = None
    stats: dict[str, Any] | None = None

    @property
    def title(self) -> str:
        """The last thing said in the prompt, without the marks of a chat template, on one line."""
        parts = [part.strip() for part in _TEMPLATE_MARK.split(self.prompt)]
        spoken = [part for part in parts if len(part.split()) > 1] or parts
        return " ".join(spoken[-1].removeprefix("user\n").split())

    @property
    def tau(self) -> float:
        """Mean acceptance length: tokens committed per verification; 0 without a cycle."""
        return self._mean([len(cycle.committed) for cycle in self.cycles])

    @property
    def delta(self) -> float:
        """Mean draft passes per verification."""
        return self._mean([cycle.passes for cycle in self.cycles])

    @property
    def verified(self) -> float:
        """Mean nodes verified per cycle, the root included."""
        return self._mean([len(cycle.kept) for cycle in self.cycles])

    @property
    def drafted(self) -> float:
        """Mean draft nodes proposed per cycle, the root excluded."""
        return self._mean([len(cycle.tokens) - 1 for cycle in self.cycles])

    def _mean(self, values: list[int]) -> float:
        return fmean(values) if values else 0.0


@dataclass(frozen=True)
class Trace:
    """A trace file. `truncated`: its last line is incomplete and was left out."""

    file: Path
    model: str
    draft: str
    policy: str
    versions: dict[str, str]
    queries: list[Query] = field(default_factory=list)
    truncated: bool = False
