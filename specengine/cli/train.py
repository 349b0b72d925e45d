"""specengine train data and draft: text written by a model, and EAGLE heads trained on it."""

import argparse
import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from specengine.cli.given import load_options, read_prompts, target_name
from specengine.cli.terminal import say
from specengine.engine import Engine
from specengine.errors import require, require_known, require_options
from specengine.models.eagle import default_layer_ids
from specengine.models.native import NativeTarget
from specengine.registry import build
from specengine.request.prompts import token_ids
from specengine.train.classifier.options import SETTINGS, ClassifierOptions, CollectOptions
from specengine.train.classifier.training import train_classifier
from specengine.train.classifier.trees import collect, questions
from specengine.train.draft.options import RECIPES, Loss, TrainOptions, make_loss
from specengine.train.draft.training import train_draft
from specengine.train.text import SynthesisOptions
from specengine.train.text.corpus import Corpus
from specengine.train.text.synthesis import write_corpus

TEXT_SHARE = 0.4  # of the hours, for writing text
MAX_TOKENS = 1 << 40  # where time, and room on the disk, say how many


def run_data(arguments: argparse.Namespace) -> int:
    recipe = require_known("recipe", arguments.recipe, RECIPES)
    options: SynthesisOptions = build(
        SynthesisOptions, asdict(recipe.text) | dict(arguments.option), "option"
    )
    prompts = list(read_prompts(arguments.prompts)) if arguments.prompts else []
    _write_text(_load(arguments), arguments.folder, options, prompts=prompts)
    print(arguments.folder)
    return 0


def run_draft(arguments: argparse.Namespace) -> int:
    recipe = require_known("recipe", arguments.recipe, RECIPES)
    options: TrainOptions = build(
        TrainOptions, asdict(recipe.training) | dict(arguments.option), "option"
    )
    loss = recipe.loss if arguments.loss is None else make_loss(arguments.loss)
    loss = build(Loss, asdict(loss) | dict(arguments.loss_option), "loss_option")
    if arguments.hours is not None:
        require("hours", f"{arguments.hours:g}", "above 0", 0 < arguments.hours < math.inf)
    corpus = None if arguments.data is None else Corpus.open(arguments.data)
    engine = _load(arguments)
    target: Any = engine.target
    seconds = None if arguments.hours is None else 3600 * arguments.hours
    if corpus is None:
        limits = {} if seconds is None else {"seconds": TEXT_SHARE * seconds}
        text = recipe.text if seconds is None else replace(recipe.text, tokens=MAX_TOKENS)
        corpus = _write_text(engine, arguments.folder / "data", text, **limits)
        seconds = None if seconds is None else (1 - TEXT_SHARE) * seconds
    model = target.lm if isinstance(target, NativeTarget) else target.model
    train_draft(
        model,
        corpus,
        arguments.folder,
        options,
        loss,
        name=target_name(engine),
        seconds=seconds,
        progress=say,
    )
    print(arguments.folder)
    return 0


def _write_text(engine: Engine, folder: Path, options: SynthesisOptions, **more: Any) -> Corpus:
    """Write text, on the native forward with the states that an EAGLE-3 head reads."""
    target: Any = engine.target
    if isinstance(target, NativeTarget):
        ids = default_layer_ids(target.lm.layers)
        more["features"] = ids if min(ids) >= 0 else ()
    return write_corpus(
        target, engine.tokenizer, folder, options, name=target_name(engine), progress=say, **more
    )


def _load(arguments: argparse.Namespace) -> Engine:
    """Return the target alone, on the native forward or as transformers has it."""
    engine = load_engine(arguments, policy="plain")
    return (
        engine
        if isinstance(engine.target, NativeTarget)
        else load_engine(arguments, policy="plain", pack=False)
    )


def run_classifier(arguments: argparse.Namespace) -> int:
    which, how = _classifier_options(arguments.kind, dict(arguments.option))
    corpus = None if arguments.data is None else Corpus.open(arguments.data)
    turns = (
        []
        if arguments.prompts is None
        else [list(turns) for turns in read_prompts(arguments.prompts)]
    )
    engine = load_engine(arguments)
    prompts = (
        [question(engine, conversation[0]) for conversation in turns]
        if corpus is None
        else questions(corpus)
    )
    trees = collect(
        engine, prompts, arguments.folder / "trees", which, name=target_name(engine), progress=say
    )
    print(
        train_classifier(
            arguments.kind,
            trees,
            arguments.folder / f"{arguments.kind}.safetensors",
            how,
            progress=say,
        )
    )
    return 0


def _classifier_options(
    kind: str, options: dict[str, str]
) -> tuple[CollectOptions, ClassifierOptions]:
    """Split the options between collecting and training; InputError for an unknown one."""
    collecting = {field.name for field in fields(CollectOptions)}
    accepted = collecting | {field.name for field in fields(ClassifierOptions)}
    require_options(options, sorted(accepted), "option: ")
    which = build(
        CollectOptions,
        {name: value for name, value in options.items() if name in collecting},
        "option",
    )
    training_options = {name: value for name, value in options.items() if name not in collecting}
    return which, build(ClassifierOptions, asdict(SETTINGS[kind]) | training_options, "option")


def load_engine(arguments: argparse.Namespace, **changes: Any) -> Engine:
    """Return the engine with the target and draft of the command line, and the draft's own policy."""
    return Engine.from_pretrained(
        arguments.target, getattr(arguments, "draft", None), **load_options(arguments) | changes
    )


def question(engine: Engine, text: str) -> list[int]:
    """Return the checked token ids of `text` as a user's turn."""
    target = engine.target
    return token_ids(
        text,
        engine.tokenizer,
        raw=False,
        vocab_size=target.vocab_size,
        max_context=target.max_context,
    )
