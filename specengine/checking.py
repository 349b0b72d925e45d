"""Check that an answer is the target's own: token for token, or up to near-ties of the target's logits."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine.errors import InputError, require_input
from specengine.models import Target, common_prefix
from specengine.models.kv_cache import CachedTarget
from specengine.ops.tree import TokenTree
from specengine.request.prompts import Prompt
from specengine.request.sampling import History, Sampler, refuse_no_choice
from specengine.request.text import Decoder

if TYPE_CHECKING:
    from specengine.engine import Engine, TextGeneration
    from specengine.records import GenerationResult

# The largest logit gap that counts as rounding. Most logits of language models are below 32. Between 16 and 32,
# neighbouring values are 2**-3 apart in bfloat16 (8 significant bits), 2**-6 in float16 (11) and 2**-19 in float32
# (24). Two candidates with an error of two such steps each can swap over four steps: 0.5 and 0.0625. In float32 the
# rounding of the logit itself is the smaller part: sums of thousands of terms over tens of layers, in another order,
# differ by about 1e-5, and 1e-3 leaves room for larger models. Typical gaps are several units.
NEAR_TIE_LOGITS = {torch.bfloat16: 0.5, torch.float16: 0.0625, torch.float32: 1e-3}

_GAP_STEPS, _GAP_UNIT = 22, 64 / 2**22  # of gaps, about 2e-5; those above 64 count as infinite
_DRAFT_OPTIONS = ("prediction", "policy", "policy_options")  # plain decoding does not take them
_NOT_COMPARABLE = ("max_time", "stopping_criteria", "streamer", "return_dict_in_generate")

Verdict = Literal["exact", "near-tie", "mismatch"]


@dataclass(frozen=True)
class Flip:
    """A committed token that differs from the target's choice after the same tokens, run one at a time.

    position  index in the answer, from 0
    token     the committed token
    wanted    the reference's token; after the first difference, the target's choice
    gap       by how much one of the two logits would have to move to swap the tokens; inf if no move does, such as for
              a banned token
    """

    position: int
    token: int
    wanted: int
    gap: float


@dataclass(frozen=True)
class Certificate:
    """The result of a comparison.

    verdict    exact: the same tokens; near-tie: other tokens, each within `tolerance` of the target's choice after the
               tokens before it; mismatch: anything else, a wrong end included
    tolerance  the largest logit gap of a near-tie
    flips      all tokens that differ from the target's choices, in order
    reference  the tokens of plain decoding
    answer     the speculative answer
    """

    verdict: Verdict
    tolerance: float
    flips: tuple[Flip, ...]
    reference: list[int]
    answer: "GenerationResult"

    @property
    def flip(self) -> Flip | None:
        """The flip that decides the verdict: the first beyond the tolerance, otherwise the first."""
        beyond = [flip for flip in self.flips if flip.gap > self.tolerance]
        return next(iter(beyond or self.flips), None)

    @property
    def position(self) -> int | None:
        """Position of the deciding flip, or of the first difference; None if the answer is exact."""
        if self.flip is not None:
            return self.flip.position
        return (
            None
            if self.verdict == "exact"
            else common_prefix(self.reference, self.answer.token_ids)
        )

    @property
    def gap(self) -> float | None:
        return self.flip.gap if self.flip is not None else None

    @property
    def tokens(self) -> tuple[int, int] | None:
        """The wanted and the committed token of the deciding flip."""
        return (self.flip.wanted, self.flip.token) if self.flip is not None else None

    def to_dict(self) -> dict[str, Any]:
        """Return the result JSON-ready. An infinite gap is None."""
        return {
            "verdict": self.verdict,
            "position": self.position,
            "gap": _finite(self.gap),
            "tokens": self.tokens,
            "tolerance": self.tolerance,
            "flips": [vars(flip) | {"gap": _finite(flip.gap)} for flip in self.flips],
            "num_tokens": len(self.answer.token_ids),
            "mean_acceptance_length": self.answer.stats.mean_acceptance_length,
        }


def certify(
    plain: "Engine",
    speculative: "Engine",
    prompt: Prompt,
    *,
    reference: list[int] | None = None,
    tolerance: float | None = None,
    **options: Any,
) -> Certificate:
    """Compare the answer of `speculative` with plain decoding, and explain each difference.

    plain      an engine with policy `plain` on the same model, for the reference and the logits of near-ties
    reference  tokens to compare with instead of plain decoding's
    tolerance  largest logit gap of a near-tie; by default NEAR_TIE_LOGITS for the target's dtype
    options    those of Engine.generate. A sampled answer is compared with plain sampling with the same seed

    After the first difference, every token is compared with the target's choice after the answer so far. So an error
    after a near-tie is found as well. If no seed is given, one is drawn.
    """
    for name in _NOT_COMPARABLE:
        require_input(f"{name}: not supported in a comparison", options.get(name) is None)
    if options.get("seed") is None:
        options["seed"] = int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu"))
    if reference is None:
        plain_options = {
            name: value for name, value in options.items() if name not in _DRAFT_OPTIONS
        }
        reference = plain.generate(prompt, **plain_options).token_ids
    generation = speculative.stream(prompt, **options)
    answer = generation.run()
    limit = near_tie_logits(plain.target) if tolerance is None else tolerance
    judged = _judge(plain, generation, answer.token_ids, reference, limit)
    verdict = judged.verdict if judged.end in (None, answer.finish_reason) else "mismatch"
    return Certificate(verdict, limit, judged.flips, reference, answer)


class Judged(NamedTuple):
    """Verdict and flips as in a Certificate. end: the reason why the options end the answer there, or None."""

    verdict: Verdict
    flips: tuple[Flip, ...]
    end: str | None


def judge(
    plain: "Engine", prompt: Prompt, tokens: list[int], reference: list[int], **options: Any
) -> Judged:
    """Judge an existing answer, `tokens`, as `certify` does."""
    return _judge(
        plain, plain.stream(prompt, **options), tokens, reference, near_tie_logits(plain.target)
    )


def _judge(
    plain: "Engine",
    generation: "TextGeneration",
    tokens: list[int],
    reference: list[int],
    limit: float,
) -> Judged:
    differences = (
        () if tokens == reference else tuple(_flips(plain.target, generation, tokens, reference))
    )
    end = _end(generation, tokens, Decoder(plain.tokenizer))
    near = tokens == reference or (differences and all(flip.gap <= limit for flip in differences))
    if end is None or not near:
        return Judged("mismatch", differences, end)
    return Judged("near-tie" if differences else "exact", differences, end)


def near_tie_logits(target: Target) -> float:
    """Return the tolerance for the dtype of the target's weights. Raise InputError if none is known."""
    require_input(
        f"tolerance: no default for a {type(target).__name__}, pass one",
        isinstance(target, CachedTarget),
    )
    dtype = target.dtype
    require_input(f"tolerance: no default for {dtype}, pass one", dtype in NEAR_TIE_LOGITS)
    return NEAR_TIE_LOGITS[dtype]


def huggingface_model(target: Target) -> PreTrainedModel:
    """Return the target's model as transformers runs it. Read from its files if the C++ forward packed the weights."""
    if not isinstance(target, CachedTarget):
        raise InputError(f"target: {type(target).__name__} is not a Hugging Face model")
    return target.model


def huggingface_tokens(engine: "Engine", prompt: Prompt, **options: Any) -> list[int]:
    """Return the greedy answer of transformers' own `generate` on the engine's model.

    options: those of Engine.generate. Raise InputError for sampling, where transformers draws other noise, and for
    options that `generate` does not have.
    """
    generation = engine.stream(prompt, **options)
    settings = generation.options
    require_input(
        "temperature, do_sample: transformers draws other noise; compare greedy answers",
        not settings.samples,
    )
    for name in ("presence_penalty", "frequency_penalty", "logits_processor", *_NOT_COMPARABLE):
        require_input(
            f"{name}: not available in a comparison with transformers' generate",
            not getattr(settings, name),
        )
    names = "repetition_penalty no_repeat_ngram_size bad_words_ids sequence_bias suppress_tokens min_new_tokens"
    arguments = {
        name: getattr(settings, name)
        for name in names.split()
        if getattr(settings, name) is not None
    }
    if settings.stops:
        arguments |= {"stop_strings": settings.stops, "tokenizer": engine.tokenizer}
    if settings.eos_token_ids:
        arguments |= {
            "eos_token_id": settings.eos_token_ids,
            "pad_token_id": settings.eos_token_ids[0],
        }
    ids = torch.tensor([generation.prompt], device=engine.target.device, dtype=torch.int64)
    model: Any = huggingface_model(engine.target)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=settings.max_new_tokens,
        do_sample=False,
        **arguments,
    )
    return out[0, ids.shape[1] :].tolist()


@torch.inference_mode()
def teacher_forced(target: Target, prompt: list[int], tokens: list[int]) -> Iterator[Tensor]:
    """Yield the target's logits, [vocabulary], before each of `tokens`: one forward per token, as in plain decoding."""
    target.reset()
    target.reserve(len(prompt) + len(tokens), 1)
    target.prefill(prompt[:-1])
    for token in [prompt[-1], *tokens[:-1]]:
        root = TokenTree.root(token, device=target.device)
        logits, _ = target.verify(root)
        target.commit(root, [0])
        yield logits[0]


def swap_gap(sampler: Sampler, logits: Tensor, history: History, token: int) -> float:
    """Return by how much one logit would have to move to make `token` the sampler's choice.

    The result is 0 if it is the choice already, and inf if no move suffices. Either `token` rises or the present choice
    falls; the smaller move counts. Processors and sampling noise are those of the choice, so the gap is one of raw
    logits whatever the options. Without processors and noise it is the largest logit minus the token's.
    """
    scores = logits.float()
    choice = refuse_no_choice(sampler.choose(scores, history), history.length)
    if token == choice:
        return 0.0

    def chosen_after(moved: int, by: float) -> bool:
        shifted = scores.clone()
        shifted[moved] += by
        return sampler.choose(shifted, history) == token

    return min(
        _smallest(lambda by: chosen_after(token, by)),
        _smallest(lambda by: chosen_after(choice, -by)),
    )


def _smallest(holds: Callable[[float], bool]) -> float:
    """Return the smallest move for which `holds`, which must stay true for larger ones."""
    moves = range(1, 1 + (1 << _GAP_STEPS))
    place = bisect_left(moves, True, key=lambda move: holds(move * _GAP_UNIT))
    return round(moves[place] * _GAP_UNIT, 4) if place < len(moves) else math.inf


def _flips(
    target: Target, generation: "TextGeneration", tokens: list[int], reference: list[int]
) -> Iterator[Flip]:
    prompt = generation.prompt
    sampler = generation.options.sampler(len(prompt), target.device)
    history = History(prompt, len(prompt) + len(tokens), target.device)
    first = common_prefix(reference, tokens)
    for position, (token, logits) in enumerate(
        zip(tokens, teacher_forced(target, prompt, tokens), strict=True)
    ):
        if position >= first:
            choice = refuse_no_choice(sampler.choose(logits, history), history.length)
            expected = reference[position] if position == first < len(reference) else choice
            if token != expected:
                gaps = (
                    swap_gap(sampler, logits, history, candidate) for candidate in (token, expected)
                )
                yield Flip(position, token, expected, max(gaps))
        history.append(token)


def _end(
    generation: "TextGeneration", tokens: list[int], decode: Callable[[list[int]], str]
) -> str | None:
    """Return the reason why the options end an answer after the last token; None if they do not, or end it before."""
    stopper = generation.options.stopper(decode)
    history = History(generation.prompt, len(generation.prompt) + len(tokens))
    for remaining, token in zip(range(len(tokens) - 1, -1, -1), tokens, strict=True):
        history.append(token)
        reason = stopper.reason(token, history)
        if reason is not None:
            return reason if remaining == 0 else None
    return None


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value
