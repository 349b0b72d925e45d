"""specengine train classifier: the small networks of the policies c2t, disco and specdecpp."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from pathlib import Path

from specengine.cli import arguments as shared
from specengine.cli.prompt_files import FORMATS, read_prompts
from specengine.cli.terminal import say
from specengine.cli.training_engine import load_engine, question
from specengine.errors import InputError
from specengine.registry import build
from specengine.train.classifier.training import SETTINGS, ClassifierOptions, train_classifier
from specengine.train.classifier.trees import CollectOptions, collect, questions
from specengine.train.text.corpus import Corpus

HELP = "train the classifier of a policy, on trees that the draft grows and the target verifies"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="of the trees and the classifier; goes on if a collection stopped"
    )
    parser.add_argument("--kind", choices=SETTINGS, required=True, help="the policy that it is for")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--data", type=Path, metavar="FOLDER", help="text of `train data`: its first users' turns")
    prompts.add_argument("--prompts", type=Path, metavar="FILE", help=f"prompts of your own. {FORMATS}")
    parser.add_argument("--target", metavar="MODEL", help="a Hugging Face id or a local path (default: the embedded)")
    parser.add_argument("--draft", help="as for generate (default: the target's)")
    parser.add_argument("--dtype", default="auto", help="auto (as stored), bfloat16, float16 or float32")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument("--offline", action="store_true", help="never use a network")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code from the model's repository")
    known = ", ".join(field.name for of in (CollectOptions, ClassifierOptions) for field in fields(of))
    parser.add_argument(
        "-o", "--option", type=shared.key_value, action="append", default=[], metavar="KEY=VALUE",
        help=f"of {known}; repeatable",
    )  # fmt: skip


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
