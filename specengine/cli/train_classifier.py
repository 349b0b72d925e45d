"""specengine train classifier: the small networks of the policies c2t, disco and specdecpp."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from pathlib import Path

from specengine.cli.prompt_files import read_prompts
from specengine.cli.terminal import say
from specengine.cli.training_engine import load_engine, question
from specengine.errors import InputError
from specengine.registry import build
from specengine.train.classifier.options import SETTINGS, ClassifierOptions, CollectOptions
from specengine.train.classifier.training import train_classifier
from specengine.train.classifier.trees import collect, questions
from specengine.train.text.corpus import Corpus


def run(arguments: argparse.Namespace) -> int:
    which, how = _options(arguments.kind, dict(arguments.option))
    corpus = None if arguments.data is None else Corpus.open(arguments.data)
    turns = [] if arguments.prompts is None else [list(turns) for turns in read_prompts(arguments.prompts)]
    engine = load_engine(arguments)
    prompts = [question(engine, conversation[0]) for conversation in turns] if corpus is None else questions(corpus)
    name = engine.target.model.config._name_or_path  # type: ignore[attr-defined]
    public = Path(name).name if Path(name).is_dir() else name  # without the folders of this machine
    trees = collect(engine, prompts, arguments.folder / "trees", which, name=public, progress=say)
    out = arguments.folder / f"{arguments.kind}.safetensors"
    print(train_classifier(arguments.kind, trees, out, how, progress=say))
    return 0


def _options(kind: str, given: dict[str, str]) -> tuple[CollectOptions, ClassifierOptions]:
    """Each option to whom it belongs; InputError for one that neither has."""
    collecting = {field.name for field in fields(CollectOptions)}
    known = collecting | {field.name for field in fields(ClassifierOptions)}
    for name in given:
        if name not in known:
            raise InputError(f"option: unknown option {name!r}, known are {', '.join(sorted(known))}")
    which = build(CollectOptions, {name: value for name, value in given.items() if name in collecting}, "option")
    own = {name: value for name, value in given.items() if name not in collecting}
    return which, build(ClassifierOptions, asdict(SETTINGS[kind]) | own, "option")
