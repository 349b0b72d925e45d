"""Figures of an answer in the clients' formats: OpenAI's usage, llama.cpp's timings, vLLM's figures of speculation."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specengine.records import Cycle, Stats, TokenLogprob


@dataclass
class Completion:
    """Filled while the engine generates.

    text       the engine's, a stop string included
    reason     stop or length, once it is known
    passed     characters at the beginning in which no stop string counts
    by_length  by draft length, the depth of a cycle's tree: how many cycles accepted 0, 1, 2 and so on draft tokens
    first      seconds of the first cycle, which the prompt's own time does not hold
    predicted  tokens of the prediction that stand in the answer, and those that do not
    logprobs, prompt_logprobs   of the answer's tokens and of the prompt's from the second on, where they were asked for
    scored_s   seconds that the prompt's took
    """

    stats: Stats
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    passed: int = 0
    by_length: dict[int, list[int]] = field(default_factory=dict)
    first: float = 0.0
    predicted: tuple[int, int] = (0, 0)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    scored_s: float = 0.0

    def add(self, cycle: Cycle) -> None:
        self.first = self.first or cycle.seconds.total
        self.token_ids += cycle.tokens
        self.logprobs += cycle.logprobs or ()
        histogram = self.by_length.setdefault(int(cycle.tree.depths.max()), [])
        histogram.extend([0] * (cycle.accepted + 1 - len(histogram)))
        histogram[cycle.accepted] += 1

    @property
    def cached_tokens(self) -> int:
        return 0 if self.prompt_logprobs else self.stats.num_cached_prompt_tokens

    @property
    def usage(self) -> dict[str, Any]:
        stats, (accepted, rejected) = self.stats, self.predicted
        return {
            "prompt_tokens": stats.num_prompt_tokens,
            "completion_tokens": stats.num_generated_tokens,
            "total_tokens": stats.num_prompt_tokens + stats.num_generated_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            },
        }

    @property
    def timings(self) -> dict[str, Any]:
        """Return llama.cpp's timings, in milliseconds; `prompt_n` counts the tokens that were not cached."""
        stats = self.stats
        read_s = max(stats.ttft_s - self.first, 0.0)
        prompt_s, predicted_s = read_s + self.scored_s, max(stats.elapsed_s - read_s, 0.0)
        prompt_n = stats.num_prompt_tokens - self.cached_tokens
        return {
            "cache_n": self.cached_tokens,
            "prompt_n": prompt_n,
            "prompt_ms": 1000 * prompt_s,
            "prompt_per_second": prompt_n / prompt_s if prompt_s else 0.0,
            "predicted_n": stats.num_generated_tokens,
            "predicted_ms": 1000 * predicted_s,
            "predicted_per_second": stats.num_generated_tokens / predicted_s
            if predicted_s
            else 0.0,
            "draft_n": stats.num_draft_tokens,
            "draft_n_accepted": stats.num_accepted_draft_tokens,
        }

    @property
    def metrics(self) -> dict[str, Any]:
        """Return vLLM's `speculative_decoding`; `num_spec_tokens` is here the mean number of nodes of a tree."""
        stats = self.stats
        names = (
            "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps",
            "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens", "num_plain_steps", "plain_reason",
            "draft", "policy",
        )  # fmt: skip
        by_length = {str(length): self.by_length[length] for length in sorted(self.by_length)}
        figures = {name: getattr(stats, name) for name in names}
        return {
            "speculative_decoding": figures
            | {
                "plain_reason": stats.plain_reason if stats.num_plain_steps else "",
                "acceptance_histogram_by_draft_length": by_length,
            }
        }


class Piece(NamedTuple):
    """Text of one cycle and the tokens that it committed; prompt tokens for usage on the way.

    extra: fields of the chunk, for those who look at cycles.
    """

    text: str
    tokens: list[int]
    answer: Completion
    extra: dict[str, Any]
    logprobs: list[TokenLogprob] | None = None


def found_again(predicted: Sequence[int], answer: Sequence[int]) -> int:
    """Return how many tokens of a prediction occur in the answer, in its order.

    After a difference the prediction is taken up where two tokens of the answer stand in it again, further on.
    """
    places: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place in range(1, len(predicted)):
        places[predicted[place - 1], predicted[place]].append(place)
    matches = at = 0
    for index, token in enumerate(answer):
        if at < len(predicted) and predicted[at] == token:
            matches, at = matches + 1, at + 1
        elif index:
            earlier = places.get((answer[index - 1], token), [])
            first = bisect_left(earlier, at)
            if first < len(earlier):
                matches, at = matches + 1, earlier[first] + 1
    return matches
