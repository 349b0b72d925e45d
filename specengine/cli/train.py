"""specengine train data and draft: text written by a model, and EAGLE heads trained on it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specengine.cli.prompt_files import read_prompts
from specengine.cli.terminal import say
from specengine.engine import Engine
from specengine.errors import InputError
from specengine.files import atomic
from specengine.registry import build
from specengine.train.draft.options import Loss, make_loss
from specengine.train.draft.recipes import find_recipe
from specengine.train.draft.training import train_draft
from specengine.train.options import TrainOptions
from specengine.train.text.corpus import Corpus
from specengine.train.text.options import SynthesisOptions
from specengine.train.text.requests import requests
from specengine.train.text.synthesis import write_corpus


def run_data(arguments: argparse.Namespace) -> int:
    recipe = find_recipe(arguments.recipe)
    options: SynthesisOptions = build(SynthesisOptions, asdict(recipe.text) | dict(arguments.option), "option")
    prompts = list(read_prompts(arguments.prompts)) if arguments.prompts else []
    engine = _load(arguments, speculate=arguments.speculate)
    source = engine if arguments.speculate else engine.target.model  # type: ignore[attr-defined]
    _write_text(engine, source, arguments.folder, options, prompts=prompts, part=arguments.part)
    print(arguments.folder)
    return 0


def run_requests(arguments: argparse.Namespace) -> int:
    if arguments.file.suffix != ".jsonl":
        raise InputError(f"file: got {arguments.file}, accepted a .jsonl file")
    corpus = Corpus.open(arguments.data)
    tokenizer = _load(arguments).tokenizer
    passages = [tokenizer.decode(text.tokens[text.answers].tolist(), skip_special_tokens=True) for text in corpus]
    made = requests(arguments.count, passages, arguments.seed)
    with atomic(arguments.file) as part:
        part.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in made), encoding="utf-8")
    print(arguments.file)
    return 0


def run_draft(arguments: argparse.Namespace) -> int:
    recipe = find_recipe(arguments.recipe)
    options: TrainOptions = build(TrainOptions, asdict(recipe.training) | dict(arguments.option), "option")
    loss = recipe.loss if arguments.loss is None else make_loss(arguments.loss)
    loss = build(Loss, asdict(loss) | dict(arguments.loss_option), "loss_option")
    corpus = None if arguments.data is None else Corpus.open(arguments.data)
    engine = _load(arguments)
    model = engine.target.model  # type: ignore[attr-defined]
    if corpus is None:
        corpus = _write_text(engine, model, arguments.folder / "data", recipe.text)
    train_draft(model, corpus, arguments.folder, options, loss, name=_name(engine), progress=say)
    print(arguments.folder)
    return 0


def _write_text(engine: Engine, source: Any, folder: Path, options: SynthesisOptions, **more: Any) -> Corpus:
    return write_corpus(source, engine.tokenizer, folder, options, name=_name(engine), progress=say, **more)


def _load(arguments: argparse.Namespace, *, speculate: bool = False) -> Engine:
    """With a draft, on the forward that serves, or the target alone as transformers has it."""
    names = ("dtype", "device", "offline", "trust_remote_code")
    given: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    if not speculate:
        given |= {"policy": "plain", "pack": False}
    return Engine.from_pretrained(arguments.target, **given)


def _name(engine: Engine) -> str:
    """The target's name as it is recorded, without the folders of this machine."""
    name = engine.target.name
    return Path(name).name if Path(name).is_dir() else name
