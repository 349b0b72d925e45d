"""Engines over loaded models that change between turns: each answer is that of the model as it is then.

What the model itself says of an answer decides: every greedy token is the likeliest by its own forward, but for
rounding. A sampled answer is that of a new engine over a copy of it.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine import Engine
from specengine.errors import SpecEngineError
from specengine.models.huggingface import HuggingFaceTarget
from tests.backend import PACKS
from tests.fuzz import changes, forms
from tests.fuzz.outcomes import ANSWERED, Finding, Outcome, first_line, refused
from tests.fuzz.settings import SETTINGS
from tests.toy import byte_tokenizer, near_copy, tiny

Case = tuple[Any, Callable[[], Outcome]]
NATIVE = ("llama", "qwen2", "qwen3", "mistral")
FAMILIES = (*NATIVE, "gemma", "gpt_neox")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TURNS = ("generate", "generate", "session", "session", "sampled", "score", "given up")
TOKENS = 6
# of the largest logit: what the rounding of two layers leaves undecided
UNDECIDED = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


def living(_: Any, pick: random.Random) -> Case:
    """Changes of a loaded model, and now and then of its draft, before the engine and between its turns."""
    given = _start(pick)
    given["before"] = _some_changes(pick, 1) if pick.random() < 0.3 else []
    given["steps"] = [_turn(pick, [])]
    for _ in range(pick.choice((1, 2, 3))):
        given["steps"].append(_turn(pick, _some_changes(pick, pick.choice((1, 1, 2)))))
    return given, lambda: Life(given).run()


def settings(_: Any, pick: random.Random) -> Case:
    """Settings of the process around a model's making, the engine's loading, or some turns."""
    given = _start(pick) | {"before": []}
    names = sorted(SETTINGS)
    chosen = pick.sample(names, pick.choice((1, 1, 2)))
    given["loaded within"] = chosen if pick.random() < 0.4 else []
    given["made within"] = (
        pick.choice(("no gradients", "inference mode")) if pick.random() < 0.15 else None
    )
    given["steps"] = [_turn(pick, []) for _ in range(3)]
    for step in pick.sample(given["steps"], pick.choice((1, 2))):
        step["within"] = chosen
    return given, lambda: Life(given).run()


def weights(_: Any, pick: random.Random) -> Case:
    """Weights that are no plain tensors, before the engine or beside it."""
    given = _start(pick)
    form = [
        pick.choice(sorted(forms.FORMS)),
        "draft" if pick.random() < 0.1 else "target",
        pick.randrange(2**31),
    ]
    given["before"] = [form] if pick.random() < 0.7 else []
    given["steps"] = [_turn(pick, [])]
    given["steps"].append(_turn(pick, _some_changes(pick, 1) if given["before"] else [form]))
    return given, lambda: Life(given).run()


def _start(pick: random.Random) -> dict[str, Any]:
    family, draft = (
        pick.choice(FAMILIES),
        pick.choice(("none", "recycling", "ngram", "small model")),
    )
    dtype = pick.choice(("float32", "float32", "bfloat16"))
    backend = pick.choice(
        (None, None, None, "huggingface", "huggingface", "native" if family in NATIVE else None)
    )
    options = {
        "backend": backend,
        "lookup": pick.choice((None, False))
        if draft in ("none", "ngram")
        else pick.choice((None, False, True)),
        "pack": None if backend == "native" else pick.choice((None, None, False, PACKS)),
        "strict": dtype == "bfloat16" and pick.random() < 0.2,
    }
    return {
        "family": family,
        "tied": pick.random() < 0.2,
        "eager": pick.random() < 0.15,
        "dtype": dtype,
        "options": options,
        "draft": draft,
        "policy": None if draft == "none" else pick.choice(("eagle/cpu", "chain", "talon", "auto")),
    }


def _some_changes(pick: random.Random, count: int) -> list[list[Any]]:
    where = "draft" if pick.random() < 0.1 else "target"
    return [
        [pick.choice(sorted(changes.CHANGES)), where, pick.randrange(2**31)] for _ in range(count)
    ]


def _turn(pick: random.Random, changed: list[list[Any]]) -> dict[str, Any]:
    prompt = [pick.randrange(60) for _ in range(pick.choice((1, 5, 24)))]
    return {
        "changes": changed,
        "turn": pick.choice(TURNS),
        "prompt": prompt,
        "refresh": pick.random() < 0.1,
    }


class Life:
    """A model, an engine over it, and what is asked of both; an engine that cannot be made is made again later."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given, self.dtype = given, DTYPES[given["dtype"]]
        self.tokenizer = byte_tokenizer()
        with within([name] if (name := given.get("made within")) else []):
            more: dict[str, Any] = {"tie_word_embeddings": given["tied"]}
            self.model = tiny(given["family"], **more).to(self.dtype)
            small = given["draft"] == "small model"
            self.draft = near_copy(given["family"], **more).to(self.dtype) if small else None
        self.engine: Engine | None = None
        self.session: Any = None
        self.left: list[str] = []  # in another state than it was found
        if given["eager"]:
            self.model.set_attn_implementation("eager")

    def run(self) -> Outcome:
        for change in self.given["before"]:
            self.change(*change)
        outcome = Outcome(ANSWERED)
        for step in self.given["steps"]:
            for change in step["changes"]:
                self.change(*change)
            outcome = self.turn(step)
        self.engine = None
        last = self.turn(self.given["steps"][-1] | {"turn": "generate"})
        if self.left:
            raise Finding(self.left[0])
        return outcome if outcome.kind != ANSWERED else last

    def change(self, name: str, where: str, seed: int) -> None:
        """Apply a change; skip one that torch says does not apply to this model."""
        model, pick = (
            self.model if where == "target" or self.draft is None else self.draft,
            random.Random(seed),
        )
        with contextlib.suppress(
            AttributeError, LookupError, RuntimeError, TypeError, ValueError, BufferError
        ):
            if name in forms.FORMS:
                forms.change(model, pick, name)
            else:
                changes.CHANGES[name](model, pick)

    def turn(self, step: dict[str, Any]) -> Outcome:
        before = state_of(self.model)
        try:
            if self.engine is None:
                with within(self.given.get("loaded within", [])):
                    self.engine = self.new_engine()
                self.session = self.engine.session()
            elif step["refresh"] and hasattr(self.engine, "refresh"):
                self.engine.refresh()
            with within(step.get("within", [])):
                check = getattr(self, "_" + step["turn"].replace(" ", "_"))(
                    self.engine, step["prompt"]
                )
        except SpecEngineError as error:
            return refused(error)
        finally:
            if (now := state_of(self.model)) != before:
                self.left.append(f"the model had {before}, and has {now}")
        check()
        return Outcome(ANSWERED)

    def new_engine(self) -> Engine:
        draft = self.draft if self.draft is not None else self.given["draft"]
        more = {"policy_options": {"costs": "8b-l40"}} if self.given.get("policy") == "auto" else {}
        options = (
            self.given["options"]
            | more
            | {"tokenizer": self.tokenizer, "offline": True, "progress": str}
        )
        return Engine.from_pretrained(self.model, draft, self.given.get("policy"), **options)

    # ---- turns: each asks, and gives what checks the answer

    def _generate(self, engine: Engine, prompt: list[int]) -> Callable[[], None]:
        found = engine.generate(prompt, max_new_tokens=TOKENS, temperature=0.0).token_ids
        return lambda: check_greedy(self.model, prompt, found)

    def _session(self, engine: Engine, prompt: list[int]) -> Callable[[], None]:
        text = "".join(chr(97 + token % 26) for token in prompt)
        messages = [*self.session.messages, {"role": "user", "content": text}]
        found = self.session.generate(text, max_new_tokens=TOKENS, temperature=0.0).token_ids
        ids = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        return lambda: check_greedy(self.model, list(ids), found)

    def _given_up(self, engine: Engine, prompt: list[int]) -> Callable[[], None]:
        stream = engine.stream(prompt, max_new_tokens=40, temperature=0.0)
        tokens = list(next(iter(stream)).cycle.tokens)
        stream.close()
        return lambda: check_greedy(self.model, prompt, tokens, len(tokens))

    def _sampled(self, engine: Engine, prompt: list[int]) -> Callable[[], None]:
        asked: dict[str, Any] = {"max_new_tokens": TOKENS, "temperature": 1.0, "seed": 7}
        found = engine.generate(prompt, **asked).token_ids

        def check() -> None:
            if any(not 0 <= token < logits_of(self.model, prompt).shape[-1] for token in found):
                raise Finding(f"tokens that do not exist: {found}")
            if dtypes_of(self.model) == {torch.float32}:
                with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):
                    own = copy.deepcopy(self.model)
                    expected = (
                        Engine(HuggingFaceTarget(own), None, None)
                        .generate(prompt, **asked)
                        .token_ids
                    )
                    if found != expected:
                        raise Finding(
                            f"another sampled answer than a new engine's: {found}, not {expected}"
                        )

        return check

    def _score(self, engine: Engine, prompt: list[int]) -> Callable[[], None]:
        ids = [*prompt, 5, 9]
        found = [float(each.logprob) for each in engine.score(ids)]

        def check() -> None:
            logits = logits_of(self.model, ids)
            expected = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0]
            distance = float((torch.tensor(found) - expected).abs().max())
            if not distance <= 2 * undecided(self.model, ids, logits):
                raise Finding(f"log-probabilities are off by {distance:.3g}")

        return check


def within(names: Sequence[str]) -> contextlib.ExitStack:
    """These settings, entered when they are asked for."""
    stack = contextlib.ExitStack()
    for name in names:
        stack.enter_context(SETTINGS[name]())
    return stack


@torch.no_grad()
def state_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return the state that an engine must not change: modes of modules, and attention maps if the model gives them."""
    modes = [module.training for module in model.modules()]
    found: dict[str, Any] = {"modules in training": f"{sum(modes)} of {len(modes)}"}
    with contextlib.suppress(Exception):  # a model that does not run
        maps = model(
            input_ids=torch.tensor([[1, 2]]), output_attentions=True, use_cache=False
        ).attentions
        found["attention maps"] = len([each for each in maps or () if each is not None])
    return found


def check_greedy(
    model: PreTrainedModel, prompt: list[int], found: list[int], count: int = TOKENS
) -> None:
    """Raise Finding where a token of an answer of at most `count` is not the model's, or the answer ends elsewhere."""
    ends = model.generation_config.eos_token_id or []
    ends = [ends] if isinstance(ends, int) else ends
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if any(not 0 <= token < vocabulary for token in found):
        raise Finding(f"tokens that do not exist: {found} of {vocabulary}")
    whole = logits_of(model, [*prompt, *found])
    logits = whole[len(prompt) - 1 :]
    behind = (
        logits.max(-1).values[: len(found)]
        - logits[:-1].gather(-1, torch.tensor(found)[:, None])[:, 0]
    )
    if not bool((behind <= undecided(model, [*prompt, *found], whole)).all()):
        own = logits.argmax(-1).tolist()[: len(found)]
        raise Finding(f"another answer than the model's: {found}, not {own}")
    ended = found[-1] in ends or int(logits[-1].argmax()) in ends
    if any(token in ends for token in found[:-1]) or not (len(found) == count or ended):
        raise Finding(f"another end than the model's: {found}, which ends with any of {ends}")


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """float32 [tokens, vocabulary]; Finding where the model itself does not run any more."""
    try:
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    except Exception as error:
        raise Finding(
            f"an answer, though the model itself gives none: {first_line(error)}"
        ) from error


def undecided(model: PreTrainedModel, ids: list[int], logits: Tensor) -> float:
    """Return how far apart two logits can be for rounding to decide between them.

    In half precision both are as far from float32's as the model's own are, or a few times that.
    """
    dtypes = dtypes_of(model)
    share = max(UNDECIDED[dtype] for dtype in dtypes) * float(logits.abs().max())
    if dtypes <= {torch.float32, torch.float64}:
        return share
    with contextlib.suppress(Exception):  # what cannot be copied, or cast
        exact = logits_of(copy.deepcopy(model).float(), ids)
        return max(share, 4 * float((exact - logits).abs().max()))
    return share


def dtypes_of(model: PreTrainedModel) -> set[torch.dtype]:
    floating = [weight.dtype for weight in model.parameters() if weight.dtype in UNDECIDED]
    return set(floating) or {torch.float32}
