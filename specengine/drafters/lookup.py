"""A draft that also copies: its distributions mixed with what followed the same words before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from specengine.drafters import COPIED, FREE, RECYCLED, Drafter, Free, Maker, Step
from specengine.drafters._copies import ComposedCopies
from specengine.drafters._free import Leaf, Proposal, best_first
from specengine.drafters._mixing import Columns, mixed
from specengine.drafters._suffixes import Context, contexts, contexts_of
from specengine.ops import Nodes
from specengine.ops.tree import TokenTree
from specengine.options import LoadOptions
from specengine.records import Cycle

_COPIED, _RECYCLED, _BOTH = FREE | COPIED, FREE | RECYCLED, FREE | COPIED | RECYCLED


class Recycler(Protocol):
    """What recycles the target's own say: the tokens that it gave last after a token, with their probabilities."""

    def row(self, token: int) -> Mapping[int, float]: ...

    def begin(self, prompt: list[int], features: Tensor | None = None) -> None: ...

    def observe(self, cycle: Cycle) -> None: ...

    def reset(self) -> None: ...


class Lookup(Drafter):
    """`drafter`, whose distributions are mixed with the continuations of the longest suffix seen before.

    Where the last m tokens stood in the text before, p becomes (1 - w) p + w q: q are the shares of the tokens that
    followed, and w is how often matches of this length have been right in this generation so far. In the same way, with
    weights of its own, the text that the caller expects the answer to be like is mixed in on top. Tokens outside the
    draft's vocabulary get columns of their own. The distributions stay normalised, so every policy works on them as on
    the draft's own; where nothing matches they are the draft's own. Of a draft that proposes only some tokens, or none
    at a node, the same holds: its rows are log-probabilities, whose sum may be less than one.

    `recycling` is a source beside a draft with passes: `free` proposes what it knows where copies leave something.

    The idea of copying is prompt lookup decoding (Saxena 2023); the mixture is that of pointer networks (Merity et
    al. 2017) with counted instead of learnt weights.
    """

    lookup = False

    def __init__(self, drafter: Drafter, recycling: Recycler | None = None) -> None:
        self.drafter, self.recycling = drafter, recycling
        self.device, self.origin = drafter.device, drafter.origin
        self.name = f"{drafter.name} with lookup" + (" and recycling" if recycling is not None else "")
        self.features = drafter.features
        self.successors = max(getattr(source, "successors", 0) for source in self._sources)
        self.default_policy = drafter.default_policy  # type: ignore[misc]
        self._copies = ComposedCopies()
        self._columns = Columns()
        self._expected: list[int] = []

    @classmethod
    def maker(cls, draft: Any, options: LoadOptions) -> Maker | None:
        """None: it is made of another draft."""
        return None

    @property
    def model_seconds(self) -> float:  # type: ignore[override]
        return self.drafter.model_seconds

    @property
    def sharpness(self) -> float:  # type: ignore[override]
        return self.drafter.sharpness

    @property
    def notes(self) -> list[str]:
        return self.drafter.notes

    def cached(self, tokens: list[int]) -> int:
        return self.drafter.cached(tokens)

    def reserve(self, tokens: int, nodes: int, longest: int) -> None:
        self.drafter.reserve(tokens, nodes, longest)

    def expect(self, tokens: list[int]) -> None:
        self._expected = tokens

    def sampled_at(self, temperature: float) -> None:
        self.drafter.sampled_at(temperature)

    def begin(self, prompt: list[int], features: Tensor | None = None) -> None:
        self.drafter.begin(prompt, features)
        if self.recycling is not None:
            self.recycling.begin(prompt)
        self._copies.begin(prompt, self._expected)
        self._expected = []

    def root(self, tree: TokenTree) -> Step:
        return self._with_copies(self.drafter.root(tree), tree, tree.root_alone())

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        return self._with_copies(self.drafter.step(tree, frontier), tree, frontier)

    def free(self, tree: TokenTree, nodes: Nodes, most: int, least: float) -> Free | None:
        size, ids = len(tree), nodes.alive().tolist()
        tokens, parents = tree.tokens[:size].tolist(), tree.parents[:size].tolist()
        scores, before = tree.path_log_probs[:size].tolist(), contexts(self._copies.context(), tokens, parents)
        taken: dict[int, set[int]] = {node: set() for node in ids}
        for token, parent in zip(tokens, parents, strict=True):
            if parent in taken:
                taken[parent].add(token)
        leaves: list[Leaf] = [(node, before[node], scores[node], taken[node]) for node in ids]
        return best_first(leaves, size, most, least, self._proposals)

    def observe(self, cycle: Cycle) -> None:
        for source in self._sources:
            source.observe(cycle)
        self._copies.observe([int(cycle.tree.tokens[0]), *cycle.tokens[:-1]])

    def reset(self) -> None:
        for source in self._sources:
            source.reset()
        self._copies.clear()

    @property
    def _sources(self) -> list[Drafter | Recycler]:
        return [self.drafter] if self.recycling is None else [self.drafter, self.recycling]

    def _with_copies(self, step: Step, tree: TokenTree, frontier: Nodes) -> Step:
        before = contexts_of(self._copies.context(), tree, frontier.alive().tolist())
        mixtures = [self._copies.after(context) for context in before]
        if all(mixture is None for mixture in mixtures):
            return step
        return mixed(step, mixtures, self._columns.of(step))

    def _proposals(self, context: Context, least: float) -> list[Proposal]:
        """What is copied after `context`, over what is recycled, of this probability or more; the likeliest first."""
        assert context is not None
        mixture = self._copies.after(context)
        recycled: Mapping[int, float] = {} if self.recycling is None else self.recycling.row(context[0])
        left, copied = (1.0, {}) if mixture is None else mixture
        found = [
            (total, token, _RECYCLED)
            for token, probability in recycled.items()
            if (total := left * probability) >= least and token not in copied
        ]
        for token, probability in copied.items():
            both = token in recycled
            if (total := probability + left * recycled[token] if both else probability) >= least:
                found.append((total, token, _BOTH if both else _COPIED))
        if len(found) > 1:
            found.sort(reverse=True)
        return found
