"""Checking that an answer is the target's own: token for token, or up to near-ties of the target's logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine.errors import InputError
from specengine.models import Target, common_prefix
from specengine.models.huggingface import HuggingFaceTarget
from specengine.models.native import NativeTarget
from specengine.ops.tree import TokenTree
from specengine.records import GenerationResult
from specengine.request.prompts import Prompt
from specengine.request.sampling import History, Sampler, refuse_no_choice
from specengine.request.text import decoder

if TYPE_CHECKING:
    from specengine.engine import Engine, TextGeneration

# The largest logit gap that counts as rounding. Logits of language models lie mostly below 32, and between 16 and 32
# neighbouring values are 2**-3 apart in bfloat16 (8 significant bits), 2**-6 in float16 (11) and 2**-19 in float32
# (24). Two candidates with an error of two such steps each can swap over four steps: 0.5 and 0.0625. In float32 the
# logit's own rounding is the smaller part: sums of thousands of terms over tens of layers, in another order, differ
# by some 1e-5, and 1e-3 leaves room for larger models. The middle of a real answer has gaps of several units.
NEAR_TIE_LOGITS = {torch.bfloat16: 0.5, torch.float16: 0.0625, torch.float32: 1e-3}

_LARGEST_GAP = 64.0  # gaps beyond this count as infinite
_GAP_STEPS = 22  # halvings: gaps are found to 64 / 2**22, about 2e-5
_FOR_THE_DRAFT = ("prediction", "policy", "policy_options")  # which plain decoding has none of
_NOT_COMPARABLE = ("max_time", "stopping_criteria", "streamer", "return_dict_in_generate")

Verdict = Literal["exact", "near-tie", "mismatch"]


@dataclass(frozen=True)
class Flip:
    """A token that the target, run one token at a time over the same tokens before it, would not have committed.

    position  in the answer, 0 is its first token
    token     the one that was committed
    wanted    the reference's token, or the target's choice once the reference has been left
    gap       logits by which one of both would have to move to swap them, as the target sees them; inf where no
              move does it (a ban, say)
    """

    position: int
    token: int
    wanted: int
    gap: float


@dataclass(frozen=True)
class Certificate:
    """What a comparison found.

    verdict    exact: the same tokens; near-tie: other tokens, but each within `tolerance` of the target's choice
               given the tokens before it; mismatch: anything else, a wrong end included
    flips      all tokens that differ from the target's choices, in order
    reference  the tokens that the answer was compared with
    answer     the answer that was judged
    """

    verdict: Verdict
    tolerance: float
    flips: tuple[Flip, ...]
    reference: list[int]
    answer: GenerationResult

    @property
    def flip(self) -> Flip | None:
        """The flip that decided: the first beyond the tolerance, else the first."""
        beyond = [flip for flip in self.flips if flip.gap > self.tolerance]
        return next(iter(beyond or self.flips), None)

    @property
    def position(self) -> int | None:
        """Where the answer first leaves the reference, or what decided a mismatch; None where it is exact."""
        if self.flip is not None:
            return self.flip.position
        return None if self.verdict == "exact" else common_prefix(self.reference, self.answer.token_ids)

    @property
    def gap(self) -> float | None:
        return self.flip.gap if self.flip is not None else None

    @property
    def tokens(self) -> tuple[int, int] | None:
        """The wanted token and the committed one."""
        return (self.flip.wanted, self.flip.token) if self.flip is not None else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; an infinite gap is None."""
        flips = [vars(flip) | {"gap": _finite(flip.gap)} for flip in self.flips]
        return {
            "verdict": self.verdict,
            "position": self.position,
            "gap": _finite(self.gap),
            "tokens": self.tokens,
            "tolerance": self.tolerance,
            "flips": flips,
            "num_tokens": len(self.answer.token_ids),
            "mean_acceptance_length": self.answer.stats.mean_acceptance_length,
        }


def certify(
    plain: Engine,
    speculative: Engine,
    prompt: Prompt,
    *,
    reference: list[int] | None = None,
    tolerance: float | None = None,
    **options: Any,
) -> Certificate:
    """Compare `speculative`'s answer with plain decoding's, and explain each difference.

    plain      an engine with policy `plain` on the same model: it gives the reference and the logits of near-ties
    reference  tokens to compare with instead, from plain decoding with the same options or from elsewhere
    tolerance  largest logit gap of a near-tie; by default NEAR_TIE_LOGITS for the target's dtype
    options    those of Engine.generate. A sampled answer is compared with plain sampling with the same seed

    After the first difference every later token is judged against the target's choice given the answer so far, so
    a fault behind a near-tie is found as well. Where options are random and no seed is given, one is drawn.
    """
    for name in _NOT_COMPARABLE:
        if options.get(name) is not None:
            raise InputError(f"{name}: answers cannot be compared with it")
    if options.get("seed") is None:
        options["seed"] = int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu"))
    if reference is None:
        asked = {name: value for name, value in options.items() if name not in _FOR_THE_DRAFT}
        reference = plain.generate(prompt, **asked).token_ids
    generation = speculative.stream(prompt, **options)
    answer = generation.run()
    limit = near_tie_logits(plain.target) if tolerance is None else tolerance
    judged = _judge(plain, generation, answer.token_ids, reference, limit)
    verdict = judged.verdict if judged.end in (None, answer.finish_reason) else "mismatch"
    return Certificate(verdict, limit, judged.flips, reference, answer)


class Judged(NamedTuple):
    """As in a Certificate; end: for which reason the options end the answer where it ends, None where they do not."""

    verdict: Verdict
    flips: tuple[Flip, ...]
    end: str | None


def judge(plain: Engine, prompt: Prompt, tokens: list[int], reference: list[int], **options: Any) -> Judged:
    """An answer that is there already, `tokens`, as `certify` would judge it."""
    return _judge(plain, plain.stream(prompt, **options), tokens, reference, near_tie_logits(plain.target))


def _judge(plain: Engine, generation: TextGeneration, tokens: list[int], reference: list[int], limit: float) -> Judged:
    found = () if tokens == reference else tuple(_flips(plain.target, generation, tokens, reference))
    end = _end(generation, tokens, decoder(plain.tokenizer))
    verdict: Verdict = "mismatch"
    if end is not None:
        if tokens == reference:
            verdict = "exact"
        elif found and all(flip.gap <= limit for flip in found):
            verdict = "near-tie"
    return Judged(verdict, found, end)


def flips(plain: Engine, prompt: Prompt, tokens: list[int], **options: Any) -> list[Flip]:
    """Where `tokens`, an answer from wherever, are not the target's own choices given those before them.

    plain: as in `certify`; options: those of Engine.generate.
    """
    return list(_flips(plain.target, plain.stream(prompt, **options), tokens, []))


def near_tie_logits(target: Target) -> float:
    """The tolerance for the dtype of the target's weights."""
    if not isinstance(target, HuggingFaceTarget | NativeTarget):
        raise InputError(f"tolerance: none is known for a {type(target).__name__}, give one")
    dtype = target.dtype
    if dtype not in NEAR_TIE_LOGITS:
        raise InputError(f"tolerance: none is known for {dtype}, give one")
    return NEAR_TIE_LOGITS[dtype]


def huggingface_model(target: Target) -> PreTrainedModel:
    """The target's model as transformers runs it; read where the native forward has packed its weights."""
    if not isinstance(target, HuggingFaceTarget | NativeTarget):
        raise InputError(f"target: {type(target).__name__} is no Hugging Face model")
    return target.model


def huggingface_tokens(engine: Engine, prompt: Prompt, **options: Any) -> list[int]:
    """The greedy answer of transformers' own `generate` on the engine's model; options as in Engine.generate.

    InputError for sampling, whose noise is another one there, and for options that `generate` does not have.
    """
    generation = engine.stream(prompt, **options)
    asked = generation.options
    if asked.samples:
        raise InputError("temperature, do_sample: transformers samples with other noise, compare greedy answers")
    for name in ("presence_penalty", "frequency_penalty", "logits_processor", *_NOT_COMPARABLE):
        if getattr(asked, name):
            raise InputError(f"{name}: not available in a comparison with transformers' generate")
    names = "repetition_penalty no_repeat_ngram_size bad_words_ids sequence_bias suppress_tokens min_new_tokens"
    given = {name: getattr(asked, name) for name in names.split() if getattr(asked, name) is not None}
    if asked.stops:
        given |= {"stop_strings": asked.stops, "tokenizer": engine.tokenizer}
    if asked.eos_token_ids:
        given |= {"eos_token_id": asked.eos_token_ids, "pad_token_id": asked.eos_token_ids[0]}
    ids = torch.tensor([generation.prompt], device=engine.target.device, dtype=torch.int64)
    model: Any = huggingface_model(engine.target)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked.max_new_tokens, do_sample=False, **given
    )
    return out[0, ids.shape[1] :].tolist()


@torch.inference_mode()
def teacher_forced(target: Target, prompt: list[int], tokens: list[int]) -> Iterator[Tensor]:
    """The target's logits, [vocabulary], before each of `tokens`: one forward per token, as in plain decoding."""
    target.reset()
    target.reserve(len(prompt) + len(tokens), 1)
    target.prefill(prompt[:-1])
    for token in [prompt[-1], *tokens[:-1]]:
        root = TokenTree.root(token, device=target.device)
        logits, _ = target.verify(root)
        target.commit(root, [0])
        yield logits[0]


def swap_gap(sampler: Sampler, logits: Tensor, history: History, token: int) -> float:
    """By how much one logit would have to move to make `token` the sampler's choice: 0 if it is, inf if none does.

    Either `token` rises or the present choice falls; the smaller move counts. Processors and sampling noise are
    those of the choice itself, so the gap is one of raw logits whatever the options. Without any of them it is the
    largest logit minus the token's.
    """
    scores = logits.float()
    choice = refuse_no_choice(sampler.choose(scores, history), history.length)
    if token == choice:
        return 0.0

    def chosen_after(moved: int, by: float) -> bool:
        shifted = scores.clone()
        shifted[moved] += by
        return sampler.choose(shifted, history) == token

    return min(_smallest(lambda by: chosen_after(token, by)), _smallest(lambda by: chosen_after(choice, -by)))


def _smallest(holds: Callable[[float], bool]) -> float:
    """The smallest move for which `holds`, which stays true for larger ones."""
    low, high = 0.0, _LARGEST_GAP
    if not holds(high):
        return math.inf
    for _ in range(_GAP_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return round(high, 4)


def _flips(target: Target, generation: TextGeneration, tokens: list[int], reference: list[int]) -> Iterator[Flip]:
    prompt = generation.prompt
    sampler = generation.options.sampler(len(prompt), target.device)
    history = History(prompt, len(prompt) + len(tokens), target.device)
    first = common_prefix(reference, tokens)
    for position, (token, logits) in enumerate(zip(tokens, teacher_forced(target, prompt, tokens), strict=True)):
        if position >= first:
            choice = refuse_no_choice(sampler.choose(logits, history), history.length)
            wanted = reference[position] if position == first < len(reference) else choice
            if token != wanted:
                gaps = (swap_gap(sampler, logits, history, candidate) for candidate in (token, wanted))
                yield Flip(position, token, wanted, max(gaps))
        history.append(token)


def _end(generation: TextGeneration, tokens: list[int], decode: Callable[[list[int]], str]) -> str | None:
    """For which reason the options end an answer after the last of these tokens; None where not, or before."""
    stopper = generation.options.stopper(decode)
    history = History(generation.prompt, len(generation.prompt) + len(tokens))
    for left, token in zip(range(len(tokens) - 1, -1, -1), tokens, strict=True):
        history.append(token)
        reason = stopper.reason(token, history)
        if reason is not None:
            return reason if left == 0 else None
    return None


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value
