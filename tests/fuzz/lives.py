"""Lives of engines: a family, a draft, a policy and some acts, each compared with plain decoding by the same model.

Tokens, log-probabilities' tokens, texts and reasons are those of an engine without a draft, which has the same model,
numbers and options. Pieces of a stream add up to its text. What an engine refuses, it must refuse without a draft too;
all other errors are found. A prediction must be refused where no draft copies it: with the policy `plain`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specengine import Engine
from specengine.checkpoints.eagle import save_head
from specengine.errors import InputError, SpecEngineError
from specengine.models.huggingface import HuggingFaceTarget
from specengine.request.text import Decoder
from tests.fuzz.outcomes import ANSWERED, Finding, Outcome, refused
from tests.models.mtp_checkpoints import NEMOTRON, NEXT_N, QWEN, checkpoint
from tests.sweep.small import VOCABULARY as SMALL_VOCABULARY
from tests.toy import (
    FAMILIES,
    NATIVE,
    POLICIES,
    VOCABULARY,
    byte_tokenizer,
    head_config,
    near_copy,
    policy_for,
    random_state,
    tiny,
)

MTP = (*NEXT_N, *QWEN, NEMOTRON)
ALL_FAMILIES = (*FAMILIES, *NATIVE)
ON_MODULES = ("phi", "gpt_neox", "gpt2", "gemma")  # in any case
DRAFTS = ("small model", "small model", "eagle1", "eagle3", "recycling", "ngram", "none", "mtp")
# strict, as an answer in half precision is the same in any tree only there; the others are so by themselves
NUMBERS: dict[str, dict[str, Any]] = {
    "float32": {},
    "modules": {"backend": "huggingface"},
    "captured": {},
    "bfloat16": {"strict": True},
    "integer": {"quantize": "int8", "numerics": "integer"},
}
ACTS = (
    "generate",
    "generate",
    "stream",
    "stream",
    "given up",
    "session",
    "many",
    "refresh",
    "changed",
    "score",
)
STOPS = ("a", "e", " ", "th", ["\n", "."], "\N{REPLACEMENT CHARACTER}", ["zz", "s"])
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"json_schema": {"type": "integer", "minimum": 0, "maximum": 99}},
    {"json_schema": {"enum": ["yes", "no", "perhaps"]}},
    {"grammar": "start: /[a-z]{2,5}( [a-z]{2,5}){1,2}/"},
)


def drawn(pick: random.Random) -> dict[str, Any]:
    """Return what a life is, drawn from this generator."""
    family, draft = pick.choice(ALL_FAMILIES), pick.choice(DRAFTS)
    if draft == "mtp":
        family = pick.choice(MTP)
    numbers = pick.choice(("modules", "captured") if family in ON_MODULES else tuple(NUMBERS))
    if draft == "mtp" or (numbers == "captured" and draft.startswith("eagle")):
        numbers = "float32" if family not in ON_MODULES else "modules"
    return {
        "family": family,
        "draft": draft,
        "policy": "plain" if draft == "none" else pick.choice(POLICIES),
        "numbers": numbers,
        "lookup": pick.choice((None, False)),
        "acts": [_act(pick, draft) for _ in range(pick.randint(3, 6))],
    }


def lives(place: Any, pick: random.Random) -> tuple[Any, Callable[[], Outcome]]:
    """An engine from its loading on: answers in many ways, one after the other and several at once."""
    given = drawn(pick)
    return given, lambda: Life(given, place.folder).run()


def _act(pick: random.Random, draft: str) -> dict[str, Any]:
    # whose vocabulary is smaller
    name = pick.choice([act for act in ACTS if draft != "mtp" or act != "session"])
    vocabulary = SMALL_VOCABULARY if draft == "mtp" else VOCABULARY
    prompts = [
        _prompt(pick, vocabulary) for _ in range(pick.randint(2, 4) if name == "many" else 1)
    ]
    options: dict[str, Any] = {"max_new_tokens": pick.choice((1, 2, 7, 16, 24))}
    if pick.random() < 0.4:
        options |= {"temperature": pick.choice((0.3, 1.0, 1.7)), "seed": pick.randrange(2**32)}
        options |= pick.choice(
            ({}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"coupled": False})
        )
    if pick.random() < 0.3:
        options |= pick.choice(
            (
                {"repetition_penalty": 1.3},
                {"presence_penalty": 0.8, "frequency_penalty": 0.4},
                {"no_repeat_ngram_size": 2},
                {"bad_words_ids": [[7], [11, 32]]},
                {"suppress_tokens": [*range(60, 90)]},
                {"sequence_bias": [[[32], 3.0], [[11, 7], -2.0]]},
            )
        )
    if pick.random() < 0.3:
        options["stop_strings"] = pick.choice(STOPS)
    if pick.random() < 0.3:
        options["eos_token_id"] = pick.sample(range(vocabulary), pick.choice((1, 4, 40)))
        if pick.random() < 0.4:
            options["min_new_tokens"] = pick.randint(1, options["max_new_tokens"])
    if draft != "mtp" and pick.random() < 0.12:
        options |= pick.choice(GRAMMARS) | {"eos_token_id": [VOCABULARY - 1]}
        options.pop("bad_words_ids", None)
    if pick.random() < 0.15:
        options["logprobs"] = pick.choice((0, 3))
    if draft != "none" and pick.random() < 0.15:
        options["policy"] = pick.choice((*POLICIES, "plain"))
    if draft == "ngram" and pick.random() < 0.3:
        options["prediction"] = _prompt(pick, vocabulary)
    return {
        "act": name,
        "prompts": prompts,
        "options": options,
        "after": pick.randint(1, 8),
        "seed": pick.randrange(99),
    }


def _prompt(pick: random.Random, vocabulary: int) -> list[int]:
    length = pick.choice((1, 2, 5, 17, 40, 70))
    # prompts begin alike
    stem = [random.Random(length).randrange(vocabulary) for _ in range(length)]
    return stem[: length // 2] + [pick.randrange(vocabulary) for _ in range(length - length // 2)]


class Life:
    """An engine, and one without a draft over the same model."""

    def __init__(self, given: dict[str, Any], folder: Path) -> None:
        self.given, self.folder = given, folder
        self.changes = any(act["act"] == "changed" for act in given["acts"])

    def run(self) -> Outcome:
        try:
            self.model, self.engine, self.plain = self._engines()
        except SpecEngineError as error:
            return refused(error)
        self.session, self.plain_session = self.engine.session(), self.plain.session()
        outcomes = []
        for act in self.given["acts"]:
            run: Callable[[dict[str, Any]], None] = getattr(
                self, "_" + act["act"].replace(" ", "_")
            )
            try:
                run(act)
            except SpecEngineError as error:
                if not _is_uncopied(act, error):
                    self._require_refused(act, error)
                outcomes.append(refused(error))
                continue
            if _predicts_plainly(act):
                raise Finding(
                    f"{act['act']} with {act['options']}: answered, and no draft copied the prediction"
                )
            outcomes.append(Outcome(ANSWERED))
        return max(outcomes, key=lambda outcome: outcome.kind == ANSWERED)

    def _require_refused(self, act: dict[str, Any], error: SpecEngineError) -> None:
        """Raise Finding where the engine without a draft answers what this error refuses."""
        try:
            if act["act"] == "session":
                self.plain_session.generate(_said(act), **_plainly(act["options"]))
            for prompt in act["prompts"] if act["act"] != "session" else ():
                self._expected(prompt, act)
        except type(error):
            return
        raise Finding(
            f"{act['act']} with {act['options']}: {type(error).__name__}: {error}, and plainly an answer"
        )

    def _engines(self) -> tuple[Any, Engine, Engine]:
        given = self.given
        options = {
            "tokenizer": byte_tokenizer(),
            "offline": True,
            "progress": str,
            **NUMBERS[given["numbers"]],
        }
        policy = None if given["draft"] == "none" else policy_for(given["policy"], 3)
        if given["draft"] == "mtp":
            folder = _mtp(given["family"], self.folder)
            model = None
            return (
                model,
                Engine.from_pretrained(folder, None, policy, **options),
                _plain_folder(folder),
            )
        model = _model(given["family"], given["numbers"])
        if self.changes:
            model = copy.deepcopy(model)
        if given["numbers"] == "captured":
            target = HuggingFaceTarget(model, captured=True)
            drafter = _drafter(given["draft"], given["family"], target.vocab_size)
            engine = Engine(
                target, drafter, policy if drafter is not None else None, options["tokenizer"]
            )
            return model, engine, Engine(HuggingFaceTarget(model), None, None, options["tokenizer"])
        if given["draft"] == "small model":
            draft: Any = _draft_model(given["family"], given["numbers"])
        else:
            draft = given["draft"]
            if draft.startswith("eagle"):
                draft = _head(int(draft[-1]), self.folder)
        lookup = {} if given["draft"] in ("none", "ngram") else {"lookup": given["lookup"]}
        engine = Engine.from_pretrained(model, draft, policy, **options, **lookup)
        if self.changes:
            return model, engine, Engine.from_pretrained(model, "none", **options)
        return model, engine, _plain(given["family"], given["numbers"])

    # ---- acts

    def _generate(self, act: dict[str, Any]) -> None:
        options = self._options(act)
        self._compare(self.engine.generate(act["prompts"][0], **options), act)

    def _stream(self, act: dict[str, Any]) -> None:
        stream = self.engine.stream(act["prompts"][0], **self._options(act))
        pieces = list(stream)
        assert stream.result is not None
        joined = "".join(piece.text for piece in pieces)
        if joined != stream.result.text:
            raise Finding(f"pieces {joined!r} of the text {stream.result.text!r}")
        tokens = [token for piece in pieces for token in piece.cycle.tokens]
        if tokens != stream.result.token_ids:
            raise Finding(f"cycles committed {tokens}, the result has {stream.result.token_ids}")
        self._compare(stream.result, act)

    def _given_up(self, act: dict[str, Any]) -> None:
        tokens = list[int]()
        with self.engine.stream(act["prompts"][0], **self._options(act)) as stream:
            for piece in stream:
                tokens += piece.cycle.tokens
                if len(tokens) >= act["after"]:
                    break
        expected = self._expected(act["prompts"][0], act).token_ids
        if tokens != expected[: len(tokens)]:
            raise Finding(f"given up after {tokens}, plainly {expected}")

    def _session(self, act: dict[str, Any]) -> None:
        text, options = _said(act), self._options(act)
        options.pop("prediction", None)
        found = self.session.generate(text, **options)
        expected = self.plain_session.generate(text, **_plainly(options))
        self._same(found, expected, act)
        if self.session.messages != self.plain_session.messages:
            raise Finding("another conversation than plainly")

    def _many(self, act: dict[str, Any]) -> None:
        found = self.engine.generate_many(act["prompts"], **self._options(act))
        for prompt, answer in zip(act["prompts"], found, strict=True):
            self._same(answer, self._expected(prompt, act), act)

    def _refresh(self, act: dict[str, Any]) -> None:
        self.engine.refresh()
        self._generate(act)

    def _changed(self, act: dict[str, Any]) -> None:
        if self.model is not None:
            weights = [weight for weight in self.model.parameters() if weight.ndim == 2]
            weight = random.Random(act["seed"]).choice(weights)
            with torch.no_grad():
                weight.add_(
                    0.05
                    * weight.std()
                    * torch.sin(torch.arange(weight.numel())).view_as(weight).to(weight)
                )
        self._generate(act)

    def _score(self, act: dict[str, Any]) -> None:
        ids = [*act["prompts"][0], 5, 9]
        found, expected = (list(engine.score(ids)) for engine in (self.engine, self.plain))
        if [(one.token, round(one.logprob, 2)) for one in found] != [
            (one.token, round(one.logprob, 2)) for one in expected
        ]:
            raise Finding(f"scores {found}, plainly {expected}")

    # ---- comparisons

    def _options(self, act: dict[str, Any]) -> dict[str, Any]:
        options = dict(act["options"])
        if options.get("policy") not in (None, "plain"):
            options["policy"] = policy_for(options["policy"], 5)
        return options

    def _expected(self, prompt: list[int], act: dict[str, Any]) -> Any:
        return self.plain.generate(prompt, **_plainly(act["options"]))

    def _compare(self, found: Any, act: dict[str, Any]) -> None:
        self._same(found, self._expected(act["prompts"][0], act), act)

    def _same(self, found: Any, expected: Any, act: dict[str, Any]) -> None:
        where = f"{act['act']} with {act['options']}"
        if found.token_ids != expected.token_ids:
            raise Finding(f"{where}: tokens {found.token_ids}, plainly {expected.token_ids}")
        if (found.text, found.finish_reason) != (expected.text, expected.finish_reason):
            raise Finding(
                f"{where}: {found.text!r} ({found.finish_reason}), plainly {expected.text!r}"
            )
        if "stop_strings" not in act["options"] and found.text != Decoder(self.engine.tokenizer)(
            found.token_ids
        ):
            raise Finding(f"{where}: {found.text!r} is not the text of {found.token_ids}")
        stats = found.stats
        if stats.num_generated_tokens != len(
            found.token_ids
        ) or stats.num_accepted_draft_tokens > len(found.token_ids):
            raise Finding(
                f"{where}: counted {stats.num_generated_tokens} tokens, {stats.num_accepted_draft_tokens} accepted"
            )
        for one, other in zip(found.logprobs or [], expected.logprobs or [], strict=True):
            if one.token != other.token or abs(one.logprob - other.logprob) > 1e-3:
                raise Finding(f"{where}: log-probability {one}, plainly {other}")


def _predicts_plainly(act: dict[str, Any]) -> bool:
    """Return whether a call gives a prediction to plain decoding."""
    plain = act["options"].get("policy") == "plain" and "prediction" in act["options"]
    return plain and act["act"] not in ("session", "score")  # which are called without


def _is_uncopied(act: dict[str, Any], error: SpecEngineError) -> bool:
    """Return whether this error is the refusal of such a prediction."""
    return (
        _predicts_plainly(act)
        and isinstance(error, InputError)
        and str(error).startswith("prediction: plain")
    )


def _said(act: dict[str, Any]) -> str:
    """Return what the user says in a session."""
    return "".join(chr(97 + token % 26) for token in act["prompts"][0][:20])


def _plainly(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("policy", "prediction")}


# ---- models and drafts, which lives share


@lru_cache(maxsize=64)
def _model(family: str, numbers: str) -> PreTrainedModel:
    return tiny(family).to(torch.bfloat16 if numbers in ("bfloat16", "integer") else torch.float32)


@lru_cache(maxsize=64)
def _draft_model(family: str, numbers: str) -> PreTrainedModel:
    return near_copy(family).to(_model(family, numbers).dtype)


@lru_cache(maxsize=64)
def _plain(family: str, numbers: str) -> Engine:
    options = {"tokenizer": byte_tokenizer(), "offline": True, "progress": str, **NUMBERS[numbers]}
    return Engine.from_pretrained(_model(family, numbers), "none", **options)


@lru_cache(maxsize=8)
def _plain_folder(folder: Path) -> Engine:
    return Engine.from_pretrained(
        folder, "none", tokenizer=byte_tokenizer(), offline=True, progress=str
    )


@lru_cache(maxsize=8)
def _mtp(family: str, folder: Path) -> Path:
    place = folder / f"mtp-{family}"
    checkpoint(family, place)
    return place


@lru_cache(maxsize=4)
def _head(version: Any, folder: Path) -> Path:
    config = head_config(version) if version == 1 else head_config(layer_ids=(0, 1, 1))
    save_head(config, random_state(config), folder / f"eagle-{version}")
    return folder / f"eagle-{version}"


def _drafter(draft: str, family: str, vocabulary: int) -> Any:
    from specengine.drafters.ngram import NGram
    from specengine.drafters.recycling import Recycling
    from specengine.drafters.small_model import SmallModel

    if draft == "none":
        return None
    if draft == "small model":
        return SmallModel(_draft_model(family, "float32"), vocabulary)
    return Recycling() if draft == "recycling" else NGram(longest=3, shortest=1)
