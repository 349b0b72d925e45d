"""Copying from a text: what followed the same words there, and how often that was right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specengine.drafters._suffixes import Context, Suffixes, predicted

# Share of positions at which a match of so many tokens was followed by the token that followed it before; of 0.7M
# tokens that the embedded model wrote. They stand until a text has shown its own.
PRIOR_HITS = (0.17, 0.45, 0.53, 0.65, 0.7, 0.74, 0.78, 0.93)
PRIOR_WEIGHT = 8.0  # matches that the prior counts for
MOST = 0.98  # of the probability that a match can take
LONGEST = len(PRIOR_HITS)


class Mixture(NamedTuple):
    """A distribution mixed with copies: the share that is left of it, and the probability that each token gains."""

    left: float
    copied: dict[int, float]


class Copies:
    """The continuations of the longest suffix that stands in a text, weighted by how often such matches were right.

    The weight of a match of m tokens is the share of the tokens so far that one of m tokens had foretold.
    """

    def __init__(self) -> None:
        self.text = Suffixes(1, LONGEST)
        self.forget_hits()

    def forget_hits(self) -> None:
        self._hits = [PRIOR_WEIGHT * share for share in PRIOR_HITS]
        self._tries = [PRIOR_WEIGHT] * LONGEST

    def judge(self, context: Context, token: int) -> None:
        """Learn from `token` having come after `context`."""
        match = next(iter(self.text.matches(context)), None)
        if match is not None:
            length, followers = match
            self._tries[length - 1] += 1
            self._hits[length - 1] += followers.get(token, 0) / followers.total

    def mixed_into(self, mixture: Mixture | None, context: Context) -> Mixture | None:
        """The mixture with the continuations of `context` on top; None: nothing is copied so far."""
        match = self.text.likeliest(context)
        if match is None:
            return mixture
        length, followers = match
        weight = min(self._hits[length - 1] / self._tries[length - 1], MOST)
        copied = {token: weight * share for token, share in followers}
        if mixture is None:
            return Mixture(1 - weight, copied)
        for token, probability in mixture.copied.items():
            copied[token] = copied.get(token, 0.0) + (1 - weight) * probability
        return Mixture(mixture.left * (1 - weight), copied)


class ComposedCopies:
    """The copies of several texts: of prompt and answer, and of a text that the caller expects the answer to be like.

    Where both match, those of the expected text are mixed in last, so they weigh most.
    """

    def __init__(self) -> None:
        self._written, self._expected = Copies(), Copies()

    def begin(self, prompt: list[int], expected: Sequence[int]) -> None:
        """Copy from `prompt` and what follows it, and from `expected` as if it followed.

        `prompt` is without its last token, which is the first of `expected` unless that is empty.
        """
        self._written.text.become(prompt)
        self._expected.text = predicted(self._written.text, expected)
        for copies in (self._written, self._expected):
            copies.forget_hits()

    def clear(self) -> None:
        self._written.text.restart()
        self.begin([], [])

    def context(self) -> Context:
        """The end of the text so far."""
        return self._written.text.context()

    def observe(self, tokens: Sequence[int]) -> None:
        """The text went on with these tokens."""
        for token in tokens:
            context = self.context()
            for copies in (self._written, self._expected):
                copies.judge(context, token)
            self._written.text.extend([token])

    def after(self, context: Context) -> Mixture | None:
        """What is copied after `context`; None where nothing matches."""
        return self._expected.mixed_into(self._written.mixed_into(None, context), context)
