"""Choose tokens, decide where an answer ends, and report log-probabilities."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specengine import ops
from specengine.errors import InputError, NumericalError, ProcessorError
from specengine.ops.choose import signed as signed
from specengine.records import TokenLogprob
from specengine.request.text import Decoder, TextStream

Processor = Callable[[Tensor, Tensor], Tensor]
MINUS_INF = float("-inf")


class History:
    """Hold the committed tokens and, during a walk, those of the path so far: `ids` is int64 [1, length].

    capacity: the number of tokens that there is room for; it doubles when they fill it.
    """

    def __init__(
        self, tokens: Sequence[int], capacity: int, device: torch.device | str = "cpu"
    ) -> None:
        self._ids = torch.empty(1, max(capacity, len(tokens), 1), dtype=torch.int64, device=device)
        self._ids[0, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64, device="cpu")
        self.length = len(tokens)
        self._new: list[int] = []  # tokens that `_ids` lacks

    @property
    def ids(self) -> Tensor:
        if self._new:
            while self.length > self._ids.shape[1]:
                self._ids = torch.cat([self._ids, torch.empty_like(self._ids)], dim=1)
            new = torch.tensor(self._new, dtype=torch.int64, device="cpu")
            self._ids[0, self.length - len(new) : self.length] = new
            self._new = []
        return self._ids[:, : self.length]

    def append(self, token: int) -> None:
        self._new.append(token)
        self.length += 1


class RowFilter(NamedTuple):
    """Temperature and truncation of a sampler whose choices read no history, in the order in which they are applied.

    temperature: above 0; top_k: 1 or more; top_p: above 0 up to 1; min_p: 0 to 1. The values below keep all tokens.
    """

    temperature: float = 1.0
    top_k: int = 1 << 62
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        """Return whether tokens are left out."""
        return self[1:] != RowFilter()[1:]


class Sampler:
    """Choose the target's token at a position from its logits, the tokens before it and the seed.

    Greedy if `seed` is None: the processors' argmax, the lowest id winning ties. Otherwise the Gumbel-max draw
    whose noise is a pure function of (seed, absolute position, token): a tree around the position cannot change it.
    logprobs: the number of likeliest tokens to report log-probabilities of, besides those of the chosen tokens; None:
    report none. coupled: whether drafts may know the noise, which changes no choice. takes_largest: whether a choice is
    the largest logit, and nothing else of the logits is read.
    """

    def __init__(
        self,
        processors: Sequence[Processor] = (),
        seed: int | None = None,
        logprobs: int | None = None,
        *,
        coupled: bool = True,
    ) -> None:
        self.processors = list(processors)
        self.seed, self.logprobs, self.coupled = seed, logprobs, coupled
        self.takes_largest = seed is None and not self.processors and logprobs is None

    @property
    def couples(self) -> bool:
        """Return whether there is noise that drafts may know."""
        return self.coupled and self.seed is not None

    @property
    def reads_history(self) -> bool:
        """Return whether a choice depends on more than the logits, the seed and the position."""
        return self.row_filter is None

    @property
    def row_filter(self) -> RowFilter | None:
        """Return what the processors do to a row of logits; None where they read more than the row, or are unknown."""
        row_filter, rank = RowFilter(), -1
        for item in self.processors:
            before, rank = rank, RANKS.get(type(item), -1)
            if rank <= before or any(
                getattr(item, name, value) != value for name, value in USUAL.items()
            ):
                return None
            name = RowFilter._fields[rank]
            row_filter = row_filter._replace(**{name: getattr(item, name)})
        return row_filter

    @property
    def temperature(self) -> float:
        """Return the temperature that tokens are drawn at; 0 if they are not drawn."""
        drawn = math.prod(
            float(item.temperature)
            for item in self.processors
            if isinstance(item, TemperatureLogitsWarper)
        )
        return 0.0 if self.seed is None else drawn

    @property
    def truncates(self) -> bool:
        """Return whether only the likely tokens can be drawn."""
        return any(isinstance(item, TRUNCATIONS) for item in self.processors)

    def chooser_of_tree(
        self, logits: Tensor, history: History, depths: Tensor
    ) -> Callable[[int], int | None]:
        """Return a function from node to chosen token, for logits [nodes, vocabulary] of a tree.

        None if no logit is finite. It reads `history` when called: the tokens from the start to the node. On a device
        the choices that read no history are made at once. depths: int64 [nodes], those of the tree.
        """
        reads = self.processors if self.seed is None else self.reads_history
        if logits.device.type == "cpu" or reads:
            return lambda node: self.choose(logits[node], history)
        depths_read = [] if self.seed is None else depths.tolist()
        chosen = self.choose_rows(logits, [history.length + depth for depth in depths_read])
        return lambda node: chosen[node] if chosen[node] >= 0 else None

    def choose_rows(self, logits: Tensor, positions: Sequence[int]) -> list[int]:
        """Return the result of `choose` for each row, [nodes, vocabulary], at its position; -1 for None.

        One transfer from a device. Only for choices that do not read the history.
        """
        if self.seed is None:
            return ops.choose_tokens(logits).tolist()
        filters = cast(RowFilter, self.row_filter)
        whole = ops.sent([signed(self.seed), filters.top_k, *positions], torch.int64, logits.device)
        shares = [filters.temperature, filters.top_p, filters.min_p, 1.0]
        divisor, top_p, min_p, one = ops.sent(shares, torch.float32, logits.device).split(1)
        if filters.truncates:
            logits, divisor = (
                ops.truncate(logits, divisor, ops.Truncation(whole[1:2], top_p, min_p)),
                one,
            )
        return ops.choose_tokens(logits, whole[2:], whole[:1], divisor).tolist()

    def choose(self, logits: Tensor, history: History) -> int | None:
        """Return the token chosen by one row of logits, [vocabulary]; None if none is finite."""
        if self.seed is None and not self.processors:
            token = int(logits.argmax())
            if torch.isfinite(logits[token]):
                return token  # NaN and +inf would have won the argmax: there are none
            token = int(ops.choose_tokens(logits[None]))
            return token if token >= 0 else None
        scores = logits.float()
        if not torch.isfinite(scores.max()):
            scores = scores.masked_fill(~torch.isfinite(scores), MINUS_INF)
            if scores.max() == MINUS_INF:
                return None
        scores = self._process(scores, history)
        return (
            int(scores.argmax())
            if self.seed is None
            else ops.keyed_gumbel_argmax(scores, self.seed, history.length)
        )

    def _process(self, scores: Tensor, history: History) -> Tensor:
        rows = scores[None].clone() if self.processors else scores[None]
        for processor in self.processors:
            name = type(processor).__name__
            try:
                rows = processor(history.ids, rows)
            except InputError:
                raise
            except Exception as error:
                raise ProcessorError(
                    f"logits processor {name} raised {type(error).__name__}: {error}"
                ) from error
            if not isinstance(rows, Tensor) or rows.shape != (1, *scores.shape):
                got = (
                    f"shape {tuple(rows.shape)}"
                    if isinstance(rows, Tensor)
                    else type(rows).__name__
                )
                raise ProcessorError(
                    f"logits processor {name} returned {got}, not shape {(1, *scores.shape)}"
                )
            best = float(rows.max())
            if not math.isfinite(best):
                fault = "left no token" if best == MINUS_INF else "returned NaN or infinity"
                raise ProcessorError(
                    f"logits processor {name} {fault} at position {history.length}"
                )
        return rows[0]


def refuse_no_choice(token: int | None, position: int) -> int:
    """Return `token`; raise NumericalError if it is None: the logits at `position` were all NaN or infinite."""
    if token is None:
        raise NumericalError(
            f"the target's logits at position {position} are NaN or infinite throughout"
        )
    return token


class PresenceFrequencyPenalty(LogitsProcessor):
    """Subtract `presence` once and `frequency` per occurrence for each token generated since `prompt_length`.

    The OpenAI definition, as in vLLM: the prompt's own tokens do not count.
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens, counts = input_ids[0, self.prompt_length :].unique(return_counts=True)
        scores = scores.clone()
        scores[0, tokens] -= self.presence + self.frequency * counts.to(scores.dtype)
        return scores


class TopP(LogitsProcessor):
    """Keep the smallest set of most likely tokens whose probability reaches `top_p` (nucleus sampling).

    The same set as transformers' TopPLogitsWarper, without sorting the vocabulary: the candidates are widened until
    they hold enough probability.
    """

    def __init__(self, top_p: float, first: int = 256) -> None:
        self.top_p, self.first = top_p, first

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        row = scores[0]
        total = row.logsumexp(-1)
        count = min(self.first, row.shape[0])
        while True:
            values, ids = row.topk(count)
            probabilities = (values - total).exp()
            # probability of the more likely tokens
            before = probabilities.cumsum(-1) - probabilities
            if before[-1] >= self.top_p or count == row.shape[0]:
                break
            count = min(8 * count, row.shape[0])
        inside = (before < self.top_p) | (
            torch.arange(count, device=row.device, dtype=torch.int64) == 0
        )
        result = torch.full_like(scores, MINUS_INF)
        result[0, ids[inside]] = values[inside]
        return result


# processors of a row alone, in the order in which they are applied
RANKS = {
    kind: rank
    for rank, kind in enumerate((TemperatureLogitsWarper, TopKLogitsWarper, TopP, MinPLogitsWarper))
}
USUAL = {"filter_value": MINUS_INF, "min_tokens_to_keep": 1}  # of these processors
TRUNCATIONS = (TopP, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper, TypicalLogitsWarper)


class Stopper:
    """Decide after each committed token whether the answer ends there, and why.

    Reasons: `stop` (an end-of-sequence token, a stop string or the end of a grammar), `length` (max_new_tokens or the
    context is full), `criteria` (a StoppingCriteria).
    """

    def __init__(
        self,
        max_new_tokens: int,
        eos_token_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        criteria: Sequence[Callable[..., Any]] = (),
        decode: Callable[[list[int]], str] | None = None,
        complete: Callable[[list[int]], bool] | None = None,
        stops_after: int = 0,
    ) -> None:
        self.left = max_new_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.stop_strings = list(stop_strings)
        self.criteria = list(criteria)
        self.decode, self.complete, self.stops_after = decode, complete, stops_after
        self.tokens: list[int] = []
        self.last_reason: str | None = None
        # characters of the text after a stop string that holds a special token's text
        self.overhang = 0
        self._texts = (
            _Tail(decode, self.stop_strings) if decode is not None and self.stop_strings else None
        )
        texts: Any = decode if self._texts is not None else None
        # the text with the special tokens whose own text is in a stop string
        specials = texts.specials_in(self.stop_strings) if hasattr(texts, "specials_in") else ()
        self._shown = (
            _Tail(
                Decoder(texts.tokenizer, texts.shown | frozenset(specials)),
                self.stop_strings,
                specials,
            )
            if specials
            else None
        )

    def reason(self, token: int, history: History) -> str | None:
        """Return the reason to end after `token`, which `history` already holds; None to continue."""
        self.tokens.append(token)
        self.left -= 1
        ends = token in self.eos_token_ids or (
            self.complete is not None and self.complete(self.tokens)
        )
        if ends or (self.stop_strings and self._hit_stop_string()):
            self.last_reason = "stop"
        elif self.criteria and any(
            torch.as_tensor(criterion(history.ids, None), dtype=torch.bool, device="cpu").all()
            for criterion in self.criteria
        ):
            self.last_reason = "criteria"
        elif self.left <= 0:
            self.last_reason = "length"
        return self.last_reason

    def _hit_stop_string(self) -> bool:
        token, counts = self.tokens[-1], len(self.tokens) > self.stops_after
        hit = self._texts is not None and self._texts.push(token, counts) is not None
        if self._shown is None:
            return hit
        behind = self._shown.push(token, counts)
        if behind is not None and not hit:
            self.overhang = 0 if token in self._shown.shown else behind
        return hit or behind is not None

    @property
    def passed(self) -> int:
        """Return the characters at the beginning of the answer in which no stop string counts."""
        return 0 if self._texts is None else self._texts.passed


class _Tail:
    """Hold the end of a growing text, as far back as a stop string may begin.

    shown: special tokens that the text shows; passed: characters from the beginning that no stop string ends in.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        strings: Sequence[str],
        shown: Collection[int] = (),
    ) -> None:
        self.shown, self.passed, self._count = shown, 0, 0
        self._strings, self._stream, self._text = strings, TextStream(decode), ""
        self._longest = max(map(len, strings))

    def push(self, token: int, counts: bool = True) -> int | None:
        """Return the number of characters after the stop string that ends first, or None if there is none.

        A last token included. The text before was searched when its tokens came. counts: whether a stop string may end
        with this token.
        """
        new = self._stream.push([token])
        self._count += len(new)
        self._text = self._text[-self._longest :] + new
        text = self._text + self._stream.rest
        if not counts:
            self.passed = self._count + len(self._stream.rest.rstrip("\N{REPLACEMENT CHARACTER}"))
            return None
        end = first_stop_end(text, self._strings, self.passed - self._count + len(self._text))
        return None if end is None else len(text) - end


def first_stop_end(text: str, stop_strings: Sequence[str], passed: int = 0) -> int | None:
    """Return where the stop string ends that ends first, after the first `passed` characters; None without one."""
    places = [
        (text.find(string, max(passed - len(string) + 1, 0)), string) for string in stop_strings
    ]
    return min((place + len(string) for place, string in places if place >= 0), default=None)


def of_rows(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Return each row's token with its log-probability, and the `count` likeliest; logits: [rows, vocabulary]."""
    scores = logits.float()
    scores = scores.masked_fill(~torch.isfinite(scores), -math.inf)
    rated = scores.log_softmax(-1)
    chosen = rated.gather(
        1, torch.tensor(tokens, device=logits.device, dtype=torch.int64)[:, None]
    )[:, 0].tolist()
    if not count:
        return [TokenLogprob(token, value, []) for token, value in zip(tokens, chosen, strict=True)]
    best = ops.top_children(scores, count, normalized=True)[1]
    tops = zip(best.tolist(), rated.gather(1, best).tolist(), strict=True)
    return [
        TokenLogprob(token, value, list(zip(*top, strict=True)))
        for token, value, top in zip(tokens, chosen, tops, strict=True)
    ]
