"""Records of a generation: the Cycle of each round, the Stats over all rounds, and the result."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from specengine.ops import Nodes, TokenTree

if TYPE_CHECKING:
    from specengine.models import Successors

SHOWN = 200  # characters of an answer in its repr


class TokenLogprob(NamedTuple):
    """A token, its natural log-probability given all tokens before it, and the most likely tokens at its place.

    The log-probabilities come from the target's logits in float32, before temperature, processors and constraints.
    `top` is sorted, the most likely token first and the lower one of equals. Values that are not finite become -inf.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Seconds:
    """Wall-clock seconds of one cycle by step. `model` is the share of `total` spent in forwards of draft and target.

    split: whether the steps were measured
    captured: whether the steps ran as graphs. Where a whole cycle stays on a device, its times are the device's:
        `draft` has the policy's time, `verify` that of walk and commit, and both count as `model`
    """

    draft: float = 0.0
    policy: float = 0.0
    verify: float = 0.0
    walk: float = 0.0
    commit: float = 0.0
    total: float = 0.0
    model: float = 0.0
    split: bool = True
    captured: bool = False

    @property
    def host(self) -> float:
        """Seconds outside the forwards of the two models."""
        return self.total - self.model


@dataclass(frozen=True)
class Cycle:
    """One round of decoding: the verified tree, the accepted path, the committed tokens.

    tree     the verified tree; its root is the last token committed before this cycle
    path     accepted node ids, the root (0) first
    tokens   the committed tokens: those of path[1:], then the bonus token (cut short at a stop)
    seconds  wall-clock time by step
    drafted  number of draft nodes before the policy's `keep`, root excluded
    features the target's hidden states of the tree's nodes, [nodes, features * hidden size], if the draft reads them
    grown    the tree before `keep`, with all `drafted` nodes; None if no engine ran the cycle
    kept     int64 [len(tree)], the nodes of `grown` that make up `tree`, in its order; None for all nodes
    successors  the target's predictions after each node, rejected ones included, if the draft reads them and the cycle
                did not stay on a device
    origins  by node of `grown`: draft, copied, recycled or forced (by a grammar); None for the root and for nodes
             drafted in graphs. Set if TextGeneration.answer.origins.wanted is
    logprobs log-probabilities of `tokens`, if requested
    experts  int32 [len(tree)]: how many experts of the target, over all layers, each node's row used and none before it
             did; None where they are not counted
    learnt   whether the policy has learnt from it inside a graph, so that its times are all that is new
    repeated of a cycle from which a policy that rests learns, where the draft copies: how many of the last tokens of
             prompt and answer stand in them before, one after the other, 32 at most; else 0
    end      the drafted node that carries the answer's last token, an end token; it is no part of `path`, as nothing
             follows it. None where the draft did not propose that token
    """

    tree: TokenTree
    path: list[int]
    tokens: list[int]
    seconds: Seconds
    drafted: int = 0
    features: Tensor | None = field(default=None, repr=False, compare=False)
    grown: TokenTree | None = field(default=None, repr=False, compare=False)
    kept: Tensor | None = field(default=None, repr=False, compare=False)
    successors: "Successors | None" = field(default=None, repr=False, compare=False)
    origins: list[str | None] | None = field(default=None, repr=False, compare=False)
    logprobs: list[TokenLogprob] | None = field(default=None, repr=False, compare=False)
    experts: Tensor | None = field(default=None, repr=False, compare=False)
    learnt: bool = field(default=False, repr=False, compare=False)
    repeated: int = field(default=0, repr=False, compare=False)
    end: int | None = None

    @property
    def agreed(self) -> list[int]:
        """Nodes whose tokens were committed, an end token included; the root (0) first."""
        return self.path if self.end is None else [*self.path, self.end]

    @property
    def accepted(self) -> int:
        """Number of committed tokens that the draft proposed."""
        return len(self.path) - 1 + (self.end is not None)


class Outcome(NamedTuple):
    """The target's choices in a tree, for a policy to learn from.

    tree    the tree as it was grown; as it was verified if the cycle stayed on a device and is learnt from on the host
    path    the accepted nodes of `tree`, the root first
    chosen  int64 [width]: the target's token after each node of the path, which need not be a child's
    cycle   the record; None inside a captured graph, where no tensor may be read on the host
    """

    tree: TokenTree
    path: Nodes
    chosen: Tensor
    cycle: Cycle | None

    @classmethod
    def of(cls, cycle: Cycle) -> Self:
        tree = cycle.tree if cycle.grown is None else cycle.grown
        chosen = torch.tensor(
            cycle.tokens[: len(cycle.path)], device=tree.device, dtype=torch.int64
        )
        path = torch.tensor(cycle.path[: len(chosen)], device=tree.device, dtype=torch.int64)
        return cls(
            tree,
            Nodes.of(path if cycle.kept is None else cycle.kept.index_select(0, path)),
            chosen,
            cycle,
        )


@dataclass(repr=False)
class Stats:
    """Counters and times of one generation, with vLLM's names where vLLM has one.

    Lengths count the bonus token. `num_draft_tokens` counts verified draft nodes, the root excluded.
    `num_plain_steps` counts verifications of a root alone under a policy, which gives the reason in `plain_reason`.
    """

    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_spec_steps: int = 0
    num_plain_steps: int = 0
    num_draft_tokens: int = 0
    num_draft_passes: int = 0
    num_emitted_in_steps: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    reached_histogram: list[int] = field(default_factory=list)
    ttft_s: float = 0.0
    elapsed_s: float = 0.0
    time_draft_s: float = 0.0
    time_policy_s: float = 0.0
    time_verify_s: float = 0.0
    time_walk_s: float = 0.0
    time_commit_s: float = 0.0
    time_model_s: float = 0.0
    time_host_s: float = 0.0
    host_shares: list[float] = field(default_factory=list, repr=False)
    policy: str = ""
    plain_reason: str = ""
    draft: str = ""
    notes: list[str] = field(default_factory=list)

    def add(self, cycle: Cycle) -> None:
        """Count one cycle."""
        self.num_spec_steps += 1
        self.num_plain_steps += bool(self.policy) and len(cycle.tree) == 1
        self.num_draft_tokens += len(cycle.tree) - 1
        self.num_emitted_in_steps += len(cycle.tokens)
        self.num_draft_passes += int(cycle.tree.passes)
        _count(self.acceptance_histogram, cycle.accepted)
        _count(self.reached_histogram, max(cycle.tree.depths.tolist()))
        seconds = cycle.seconds
        for step in ("draft", "policy", "verify", "walk", "commit", "model", "host"):
            vars(self)[f"time_{step}_s"] += getattr(seconds, step)
        if seconds.total > 0 and seconds.split:
            self.host_shares.append(seconds.host / seconds.total)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Tokens that the draft proposed and the target accepted."""
        return sum(count * cycles for count, cycles in enumerate(self.acceptance_histogram))

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per verification, the bonus token included (tau); 0 before the first cycle."""
        return self.num_emitted_in_steps / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def mean_accepted_draft_tokens(self) -> float:
        return self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted divided by verified draft tokens. Small for trees by construction."""
        return (
            self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0
        )

    @property
    def mean_draft_passes(self) -> float:
        """Draft passes per verification (delta)."""
        return self.num_draft_passes / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def num_spec_tokens(self) -> float:
        """Verified draft tokens per step, the root excluded."""
        return self.num_draft_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """Entry d: share of the cycles with a tree of depth d + 1 or more that accepted a token at depth d + 1."""
        accepted, reached = self.acceptance_histogram, self.reached_histogram
        return [sum(accepted[d:]) / sum(reached[d:]) for d in range(1, len(reached))]

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens divided by the whole wall-clock time, prefill included."""
        return self.num_generated_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first."""
        later = self.num_generated_tokens - 1
        return (self.elapsed_s - self.ttft_s) / later if later > 0 else 0.0

    @property
    def median_host_share(self) -> float:
        """Median over cycles of the share of time outside the forwards of the two models."""
        return statistics.median(self.host_shares) if self.host_shares else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return all counters, times and derived metrics, JSON-ready."""
        counted = {name: value for name, value in vars(self).items() if name != "host_shares"}
        return counted | {name: getattr(self, name) for name in _DERIVED}

    def __repr__(self) -> str:
        return f"Stats({self})"

    def __str__(self) -> str:
        return (
            f"{self.num_emitted_in_steps} tokens in {self.elapsed_s:.2f} s ({self.tokens_per_second:.1f} tokens/s), "
            f"{self.mean_acceptance_length:.2f} per verification"
        )

    def report(self) -> str:
        """Return the statistics as a short text table."""
        rates = " ".join(f"{rate:.2f}" for rate in self.acceptance_rate_per_position)
        lines = [
            f"tokens             {self.num_generated_tokens} in {self.elapsed_s:.2f} s "
            f"({self.tokens_per_second:.1f} tokens/s, first after {self.ttft_s:.2f} s)",
            f"draft, policy      {self.draft or 'none'}, {self.policy or 'plain'}",
            f"acceptance length  {self.mean_acceptance_length:.2f} over {self.num_spec_steps} verifications",
            f"per depth          {rates or '-'}",
            f"verified nodes     {self.num_spec_tokens + 1:.1f} per step, {self.mean_draft_passes:.1f} draft passes",
            f"seconds            draft {self.time_draft_s:.3f}, policy {self.time_policy_s:.3f}, verify "
            f"{self.time_verify_s:.3f}, walk {self.time_walk_s:.3f}, commit {self.time_commit_s:.3f}",
            f"outside models     {100 * self.median_host_share:.1f} % of a cycle (median)",
        ]
        if self.num_plain_steps:
            share = f"{self.num_plain_steps} of {self.num_spec_steps}"
            lines.insert(3, f"plain steps        {share} ({self.plain_reason})")
        return "\n".join(lines + [f"note               {note}" for note in self.notes])


_DERIVED = [name for name, value in vars(Stats).items() if isinstance(value, property)]


def _count(histogram: list[int], index: int) -> None:
    histogram.extend([0] * (index + 1 - len(histogram)))
    histogram[index] += 1


class DrawnTree:
    """A verified tree that is drawn when it is shown. Copies and pickles of it are the drawn text."""

    def __init__(
        self, tree: TokenTree, accepted: list[int], decode: Callable[[list[int]], str]
    ) -> None:
        """accepted: the drafted nodes whose tokens were committed; decode: returns the text of token ids."""
        self.tree = tree
        self.accepted = accepted
        self.decode = decode

    def __str__(self) -> str:
        return self.tree.drawn(lambda token: repr(self.decode([token]) or token), self.accepted)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


@dataclass(frozen=True, repr=False)
class GenerationResult:
    """An answer.

    text           the answer; tokens without a text in the tokenizer add none
    token_ids      the new tokens, without the prompt
    finish_reason  stop, length or criteria
    logprobs       an entry per token, if requested
    tree           the tree of the cycle that committed the most tokens, as text by `str`; None without such a cycle
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    seed: int | None = None
    logprobs: list[TokenLogprob] | None = None
    tree: DrawnTree | str | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        text = f"{self.text[:SHOWN]!r}{'...' * (len(self.text) > SHOWN)}"
        return (
            f"GenerationResult(text={text}, finish_reason={self.finish_reason!r}, seed={self.seed})"
        )

    def __str__(self) -> str:
        return f"{self.text}\n[{self.finish_reason}: {self.stats}]"

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            "a result is one answer, no list: write result.text, or result.token_ids for the new tokens; "
            "return_dict_in_generate=False returns the tensor that transformers returns"
        )

    def _repr_html_(self) -> str:
        from html import escape

        tree = "" if self.tree is None else escape(str(self.tree))
        return (
            f"<pre style='white-space: pre-wrap'>{escape(self.text)}</pre>"
            f"<small>{escape(f'{self.finish_reason}: {self.stats}')}</small>"
            + f"<details><summary>tree of the longest step</summary><pre>{tree}</pre></details>"
            * bool(tree)
        )


class StreamPiece(NamedTuple):
    """A piece of streamed text and the cycle that committed its tokens. The pieces add up to the result's text."""

    text: str
    cycle: Cycle


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """The result with `return_dict_in_generate=True`: transformers' output with specengine's statistics."""

    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stats: Stats | None = None
    logprobs: list[TokenLogprob] | None = None
