"""The kinds of cases: each makes one of a random generator, runs it, and says what became of it."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specengine import Engine, policies
from specengine.checkpoints.eagle import save_head
from specengine.cli import main
from specengine.drafters.small_model import SmallModel
from specengine.errors import SpecEngineError
from specengine.models.huggingface import HuggingFaceTarget
from specengine.options import LoadOptions
from specengine.request.options import GenerationOptions
from tests.checkpoints.layouts import LAYER_IDS, NESTED, speculators
from tests.fuzz import folders, lives, living
from tests.fuzz.mutations import NUMBERS, TEXTS, mutated, near, nested, strange
from tests.fuzz.outcomes import ANSWERED, MOST_LINE, REFUSED, Finding, Outcome, refused
from tests.heads import LLAMA3, YARN, deep
from tests.toy import byte_tokenizer, head_config, near_copy, policy_for, random_state

TOKENS = "6"
PROMPT = "The answer is"
HEAD_FIELDS = (
    LAYER_IDS,
    "eagle_config",
    "rope_parameters",
    "rope_scaling",
    "norm_output",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "attention_bias",
    "bias",
    "target_hidden_size",
    "draft_vocab_size",
    "speculators_model_type",
    "transformer_layer_config",
    "partial_rotary_factor",
    "hidden_act",
    "architectures",
)
TARGET_FIELDS = (
    "rope_parameters",
    "rope_scaling",
    "layer_types",
    "sliding_window",
    "quantization_config",
    "auto_map",
    "dtype",
    "torch_dtype",
    "pretraining_tp",
    "bos_token_id",
    "text_config",
    "is_encoder_decoder",
    "id2label",
    "model_type",
    "architectures",
    "head_dim",
)


class Workplace:
    """A tiny target with its tokenizer, a head of each layout, and engines, in a folder that cases write to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = deep(max_position_embeddings=256)
        self.target, self.head, self.spoiled = (
            folder / "target",
            folder / "head",
            folder / "spoiled",
        )
        model.save_pretrained(self.target)
        byte_tokenizer().save_pretrained(self.target)
        config = head_config(layer_ids=(1, 3, 4), draft_vocab_size=200)
        save_head(config, random_state(config), self.head)
        self.target_config = json.loads((self.target / "config.json").read_text())
        self.head_configs = [
            json.loads((self.head / "config.json").read_text()) | {"rope_scaling": rope}
            for rope in (None, LLAMA3, YARN)
        ] + [NESTED]
        self.tensors = load_file(self.head / "model.safetensors")
        self.other_tensors = speculators(config, random_state(config))
        shutil.copytree(self.target, self.spoiled)
        self.tokenizer = byte_tokenizer()
        self.engine = Engine(
            HuggingFaceTarget(model),
            SmallModel(near_copy(num_hidden_layers=2)),
            policy_for("eagle"),
            self.tokenizer,
        )
        self.plain = Engine(HuggingFaceTarget(model), None, None, self.tokenizer)
        self.model = model
        self.answer = self.command("--policy", "plain")

    def command(self, *more: str) -> tuple[Outcome, str]:
        """`specengine generate` with the spoiled target, or the sound one; what became of it, and the answer."""
        out, err = io.StringIO(), io.StringIO()
        given = [
            "generate",
            PROMPT,
            "--max-new-tokens",
            TOKENS,
            "--json",
            "--offline",
            "--temperature",
            "0",
            *more,
        ]
        if "--model" not in more:
            given += ["--model", str(self.target)]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(given)
        lines = [
            line for line in err.getvalue().splitlines() if line.startswith("specengine: error: ")
        ]
        if status == 0 and not lines:
            return Outcome(ANSWERED), json.dumps(json.loads(out.getvalue())["token_ids"])
        if status != 2 or len(lines) != 1 or len(lines[0]) > MOST_LINE:
            raise Finding(f"status {status}, standard error: {err.getvalue()[-600:]}")
        return Outcome(REFUSED, "on the command line"), ""


def head(place: Workplace, pick: random.Random) -> tuple[Any, Callable[[], Outcome]]:
    """A head's config.json, or a tensor of it, spoiled: never another answer than the target's own."""
    sound = pick.choice(place.head_configs)
    raw = mutated(sound, pick, HEAD_FIELDS) if pick.random() < 0.85 else sound
    if isinstance(raw.get("transformer_layer_config"), dict) and pick.random() < 0.6:
        raw = raw | {
            "transformer_layer_config": mutated(raw["transformer_layer_config"], pick, HEAD_FIELDS)
        }
    tensors = dict(place.other_tensors if "speculators_model_type" in sound else place.tensors)
    spoiled = "no tensor"
    if raw is sound or pick.random() < 0.2:
        spoiled = pick.choice(sorted(tensors))
        tensors |= _spoiled(spoiled, tensors.pop(spoiled), pick)

    def run() -> Outcome:
        _write_json(place.head / "config.json", raw)
        save_file(tensors, place.head / "model.safetensors")
        outcome, answer = place.command(
            "--draft", str(place.head), "--no-lookup", "--policy", "eagle/cpu"
        )
        if outcome.kind == ANSWERED and answer != place.answer[1]:
            raise Finding(f"another answer: {answer}, not {place.answer[1]}")
        return outcome

    return {"config": raw, "tensor": spoiled}, run


def target(place: Workplace, pick: random.Random) -> tuple[Any, Callable[[], Outcome]]:
    """A target's config.json, spoiled."""
    raw = mutated(place.target_config, pick, TARGET_FIELDS)
    text = pick.choice(("", "[", "[" * 100_000, "null", '"x"')) if pick.random() < 0.02 else None

    def run() -> Outcome:
        _write_json(place.spoiled / "config.json", raw, text)
        backend = ("--backend", "huggingface") if pick.random() < 0.3 else ()
        return place.command("--model", str(place.spoiled), "--draft", "none", *backend)[0]

    return raw if text is None else text[:20], run


def prompt(place: Workplace, pick: random.Random) -> tuple[Any, Callable[[], Outcome]]:
    """A prompt of any shape, with special text live or not."""
    message = {"role": pick.choice(("user", "system", "assistant")), "content": pick.choice(TEXTS)}
    makers: list[Callable[[], Any]] = [
        lambda: pick.choice(TEXTS) + "a" * pick.choice((0, 3, 400)),
        lambda: [pick.choice((*NUMBERS, *range(20))) for _ in range(pick.randint(0, 6))],
        lambda: [
            mutated(message, pick, ("name", "tool_calls", "type"))
            for _ in range(pick.randint(1, 3))
        ],
        lambda: [message | {"content": [mutated({"type": "text", "text": "hi"}, pick)]}],
        lambda: strange(pick),
        lambda: torch.full(
            [pick.randint(0, 3) for _ in range(pick.randint(0, 3))], pick.randint(-2, 300)
        ),
        lambda: torch.full([3], pick.choice((0.5, float("nan")))),
        lambda: nested(pick.choice((2, 40, 5000))),
        lambda: pick.choice((b"hi", {1, 2}, iter([1, 2]), object(), range(3), 1j)),
    ]
    given = pick.choice(makers)()
    options = {
        "raw": pick.random() < 0.3,
        "allow_special_text": pick.random() < 0.5,
        "max_new_tokens": 4,
    }
    return (given, options), lambda: _asked(place, given, options)


def options(place: Workplace, pick: random.Random) -> tuple[Any, Callable[[], Outcome]]:
    """Options of a generation; answers are those of plain decoding."""
    sound = {
        "max_new_tokens": 5,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "no_repeat_ngram_size": 3,
        "stop_strings": ["q"],
        "eos_token_id": [3],
        "bad_words_ids": [[5], [6, 7]],
        "sequence_bias": [[[8], 1.0]],
        "suppress_tokens": [9],
        "min_new_tokens": 2,
        "policy": "eagle/cpu",
        "policy_options": {},
        "prediction": "abc",
    }
    chosen = {name: sound[name] for name in pick.sample([*sound], pick.randint(1, 5))} | {
        "seed": 1,
        "max_new_tokens": 5,
    }
    given = mutated(chosen, pick, tuple(GenerationOptions.__dataclass_fields__))
    return given, lambda: _asked(place, [1, 2, 3], given)


def policy(place: Workplace, pick: random.Random) -> tuple[Any, Callable[[], Outcome]]:
    """A policy by name with spoiled options."""
    name = pick.choice([name for name in policies.names() if name not in ("plain", "ltd")])
    fields = policies.find(name).__dataclass_fields__
    known = [field for field in fields if not field.startswith("_") and fields[field].init]
    defaults = vars(policies.make(name))
    given: dict[str, Any] = {}
    for field in pick.sample(known, min(len(known), pick.randint(1, 2))):
        given[field] = near(defaults.get(field), pick) if pick.random() < 0.6 else strange(pick)
    asked = {"policy": name, "policy_options": given, "max_new_tokens": 4}
    return asked, lambda: _asked(place, [1, 2, 3], asked)


def loading(place: Workplace, pick: random.Random) -> tuple[Any, Callable[[], Outcome]]:
    """Arguments of Engine.from_pretrained for a loaded model."""
    sound = {
        "draft": "ngram",
        "policy": "eagle",
        "lookup": None,
        "draft_options": {},
        "policy_options": {},
        "strict": False,
    }
    known = tuple(
        name
        for name in LoadOptions.names()
        if name not in ("progress", "tokenizer", "trust_remote_code")
    )
    given = mutated(sound, pick, known) | {"offline": True}

    def run() -> Outcome:
        try:
            Engine.from_pretrained(place.model, **given).generate([1, 2, 3], max_new_tokens=3)
        except SpecEngineError as error:
            return refused(error)
        return Outcome(ANSWERED)

    return given, run


SPOILED = {
    "head": head,
    "target": target,
    "prompt": prompt,
    "options": options,
    "policy": policy,
    "loading": loading,
}
GIVEN = {
    "living": living.living,
    "settings": living.settings,
    "weights": living.weights,
    "folders": folders.folders,
}
LIVES = {"lives": lives.lives}
KINDS = SPOILED | GIVEN | LIVES


def _asked(place: Workplace, given: Any, options: dict[str, Any]) -> Outcome:
    """The answer to a prompt, which must be that of plain decoding with the same seed."""
    try:
        found = place.engine.generate(given, **options)
    except SpecEngineError as error:
        return refused(error)
    plainly = {
        name: value
        for name, value in options.items()
        if name not in ("policy", "policy_options", "prediction")
    }
    plainly["seed"] = getattr(found, "seed", options.get("seed"))
    if isinstance(given, list | str | torch.Tensor):
        expected = place.plain.generate(given, **plainly)
        if list(_tokens(expected)) != list(_tokens(found)) and "max_time" not in options:
            raise Finding(
                f"another answer than plain decoding's: {_tokens(found)}, not {_tokens(expected)}"
            )
    return Outcome(ANSWERED)


def _tokens(result: Any) -> Any:
    return result.flatten().tolist() if isinstance(result, torch.Tensor) else result.token_ids


def _spoiled(name: str, tensor: torch.Tensor, pick: random.Random) -> dict[str, torch.Tensor]:
    kind = pick.choice(
        (
            "missing",
            "renamed",
            "zero",
            "huge",
            "nan",
            "half",
            "ints",
            "flat",
            "short",
            "empty",
            "extra",
        )
    )
    changed = {
        "zero": lambda: torch.zeros_like(tensor),
        "huge": lambda: torch.full_like(tensor, 1).to(torch.float32) * 3e38,
        "nan": lambda: torch.full(tensor.shape, float("nan")),
        "half": lambda: tensor.to(torch.float16),
        "ints": lambda: tensor.to(torch.int32),
        "flat": lambda: tensor.flatten().clone(),
        "short": lambda: tensor[:-1].clone(),
        "empty": lambda: tensor[:0].clone(),
        "extra": lambda: tensor,
    }
    if kind == "missing":
        return {}
    if kind == "renamed":
        return {name + "_": tensor}
    made = {name: changed[kind]()}
    return made | {"x" + name: tensor.clone()} if kind == "extra" else made


def _write_json(file: Path, raw: Any, text: str | None = None) -> None:
    try:
        text = json.dumps(raw) if text is None else text
    except RecursionError:
        text = "[" * 5000 + "]" * 5000
    file.write_text(text, encoding="utf-8")
