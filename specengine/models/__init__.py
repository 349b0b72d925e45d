"""Run a causal LM or a draft head over the rows of a tree; `Target` is the model whose output must not change."""

import math
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from specengine.errors import UnsupportedModelError, require_supported
from specengine.ops.select import LARGEST, top_children
from specengine.ops.tree import TokenTree

CPU = torch.device("cpu")


class SharedRows:
    """Rows of one text that a model runs with those of other texts; what they give does not depend on these.

    drafts   whether they are a draft pass
    model    its `run_lanes` fills the results of rows of this model, or of all with the same `weights_of`
    seconds  that their run took
    error    of a run that failed
    """

    drafts: ClassVar[bool] = False
    model: Any
    seconds: float = 0.0
    error: BaseException | None = None


class Chosen(NamedTuple):
    """The result of verifying a tree greedily. tokens: the choice after every node, -1 where no logit is finite."""

    tokens: list[int]
    features: Tensor | None
    successors: "Successors | None"


class ModelFacts:
    """Facts of a loaded model and of how it runs here, for users and for loading."""

    name: str = ""
    max_context: int
    vocab_size: int
    device: torch.device
    dtype: torch.dtype  # of the weights, or the one that they stand for
    generation_config: Any = None  # the model's own defaults
    backend: str = ""  # the forward that runs it, and why, in words
    captured: bool = False  # whether its cycles run as CUDA graphs
    paths: bool = False  # whether every path of a tree is verified by a row of its own
    model_seconds: float  # spent in model forwards since it was loaded
    # int32 [nodes], of the last verified tree: experts that a node's row used and none before it; None: not counted
    experts: Tensor | None = None

    @property
    def notes(self) -> list[str]:
        """Return notes for the user on how the model runs here; they appear in the statistics."""
        return []


class Target(ModelFacts, ABC):
    """The model whose tokens are committed. It owns its KV cache; `tokens` are those the cache holds.

    `features` in the results are the hidden states that a trained draft reads, float [rows, features * hidden size];
    None where none are wanted.
    """

    tokens: list[int]
    successors: int = 0  # number of each node's likeliest next tokens that are wanted

    def running(self) -> AbstractContextManager[None]:
        """Return the context manager that cycles run in."""
        return nullcontext()

    @abstractmethod
    def reserve(self, tokens: int, scratch: int) -> None:
        """Make room for `tokens` committed tokens and trees of up to `scratch` nodes."""

    def cached(self, tokens: list[int]) -> int:
        """Return how many of `tokens` the cache holds already."""
        return common_prefix(self.tokens, tokens)

    def want(self, features: tuple[int, ...] = (), successors: int = 0) -> None:
        """Give these results from now on.

        features: hidden states, numbered as in transformers' `hidden_states`; successors: number of the likeliest next
        tokens of every verified node, fewer of a small vocabulary. Raises UnsupportedModelError for hidden states that
        the target does not give.
        """
        require_supported(
            f"{type(self).__name__}: gives no hidden states, and this draft reads them",
            not features,
        )
        self.successors = min(successors, self.vocab_size)

    @abstractmethod
    def prefill(self, tokens: list[int], keep: int | None = None) -> Tensor | None:
        """Run a prompt into the cache; return the features of the tokens that were run.

        The first `keep` tokens, which the cache must hold, are not run again; by default none that it holds are.
        There are no logits: the engine leaves out the prompt's last token, which becomes the root of the first tree.
        """

    def rate(self, tokens: list[int]) -> Tensor:
        """Run `tokens` after those in the cache and keep them; return the logits after each, [tokens, vocabulary].

        Call it in pieces for a long text. Raises UnsupportedModelError if the target cannot do it.
        """
        raise UnsupportedModelError(f"{type(self).__name__}: gives no logits of a prompt")

    @abstractmethod
    def verify(self, tree: TokenTree) -> tuple[Tensor, Tensor | None]:
        """Return the logits of every node given its own path, [nodes, vocabulary], and the nodes' features."""

    def choose(self, tree: TokenTree) -> Chosen | None:
        """Verify greedily, without logits; return None if that is no cheaper than `verify`."""
        return None

    @abstractmethod
    def commit(self, tree: TokenTree, path: list[int]) -> None:
        """Keep the keys and values of the accepted path; drop those of the other nodes."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all tokens."""


def free_memory(device: torch.device = CPU) -> int:
    """Return the bytes of memory that may be had; more than any machine has where the system is silent."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return next(
            1024 * int(line.split()[1])
            for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
            if line.startswith("MemAvailable:")
        )
    except (OSError, ValueError, StopIteration):
        return 1 << 50


def common_prefix(left: list[int], right: list[int]) -> int:
    """Return the length of the longest common prefix."""
    return next(
        (place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )


class Successors(NamedTuple):
    """The target's likeliest next tokens after some nodes, best first, the lower token first of equals.

    tokens: int64 [nodes, count]; logits: float32 alike, before any processor. Where no logit is finite: -1 and -inf.
    """

    tokens: Tensor
    logits: Tensor

    @classmethod
    def of(cls, logits: Tensor, count: int) -> "Successors":
        """Select from logits [nodes, vocabulary], on their device; +inf takes the place of an entry."""
        values, tokens = top_children(logits, count, normalized=True)
        missing = (values == -math.inf) | (values >= LARGEST)
        return cls(tokens.masked_fill(missing, -1), values.masked_fill(missing, -math.inf))
