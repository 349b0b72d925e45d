"""The records of a trace file. It is JSON, one record per line, in this order:

trace   the file: format, model, draft, policy, versions
query   one generation: prompt, prompt_tokens, seed
cycle   one cycle: the fields of TracedCycle
end     the end of the query: finish_reason (null if it was stopped from outside), stats (Stats.to_dict)

A file has any number of queries, each with its cycles and its end. The file of a killed run has no last end, and its
last line may be incomplete.
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
        ranks = [0] * len(self.tokens)
        for nodes in self.children:
            for rank, node in enumerate(nodes, start=1):
                ranks[node] = rank
        return ranks

    @cached_property
    def states(self) -> list[str]:
        """The state of each node: root, accepted, rejected (verified, but not accepted) or pruned (never verified)."""
        states = [PRUNED] * len(self.tokens)
        for node in self.kept:
            states[node] = REJECTED
        for node in self.accepted:
            states[node] = ACCEPTED
        states[0] = ROOT
        return states


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
        return self._mean([len(cycle.committed) for cycle in self.cycles])

    @property
    def delta(self) -> float:
        """Mean draft passes per verification."""
        return self._mean([cycle.passes for cycle in self.cycles])

    @property
    def verified(self) -> float:
        """Mean number of verified nodes per cycle, the root included."""
        return self._mean([len(cycle.kept) for cycle in self.cycles])

    @property
    def drafted(self) -> float:
        """Mean number of drafted nodes per cycle, the root excluded."""
        return self._mean([len(cycle.tokens) - 1 for cycle in self.cycles])

    def _mean(self, values: list[int]) -> float:
        return fmean(values) if values else 0.0


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
