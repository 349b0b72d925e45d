"""specengine train: text written by a model, and drafts and classifiers trained on it."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specengine.cli import arguments as shared
from specengine.cli import train_classifier, train_policy
from specengine.cli.prompt_files import FORMATS, read_prompts
from specengine.cli.terminal import say
from specengine.engine import Engine
from specengine.registry import build
from specengine.train.draft.losses import LOSSES, Loss, make_loss
from specengine.train.draft.training import train_draft
from specengine.train.options import TrainOptions
from specengine.train.recipes import RECIPES, find_recipe
from specengine.train.text.corpus import Corpus
from specengine.train.text.synthesis import SynthesisOptions, write_corpus

HELP = "train a draft for a model, on text that the model writes itself"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    data = commands.add_parser("data", help="let the target write training text", allow_abbrev=False)
    _add_text_arguments(data)
    data.set_defaults(run=run_data)
    draft = commands.add_parser("draft", help="train an EAGLE head", allow_abbrev=False)
    _add_draft_arguments(draft)
    draft.set_defaults(run=run_draft)
    classifier = commands.add_parser("classifier", help=train_classifier.HELP, allow_abbrev=False)
    train_classifier.add_arguments(classifier)
    classifier.set_defaults(run=train_classifier.run)
    policy = commands.add_parser("policy", help=train_policy.HELP, allow_abbrev=False)
    train_policy.add_arguments(policy)
    policy.set_defaults(run=train_policy.run)


def _add_common(parser: argparse.ArgumentParser) -> None:
    recipes = "; ".join(f"{name}: {recipe.about}" for name, recipe in RECIPES.items())
    parser.add_argument("--recipe", default="cpu-small", help=f"{recipes} (default: cpu-small)")
    parser.add_argument("--target", metavar="MODEL", help="a Hugging Face id or a local path (default: the embedded)")
    parser.add_argument("--dtype", default="auto", help="auto (as stored), bfloat16, float16 or float32")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument("--offline", action="store_true", help="never use a network")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code from the model's repository")


def _add_text_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="goes on where it stopped if there is text already")
    _add_common(parser)
    parser.add_argument(
        "-o", "--option", type=shared.key_value, action="append", default=[], metavar="KEY=VALUE",
        help=f"of {', '.join(asdict(SynthesisOptions()))}; repeatable",
    )  # fmt: skip
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=f"prompts of your own to mix in. {FORMATS}")
    parser.add_argument(
        "--part", type=_part, default=(0, 1), metavar="I/N", help="write the I-th of N parts, N such commands at a time"
    )


def _add_draft_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of the head; goes on if a training stopped there")
    _add_common(parser)
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="text to train on (default: the recipe's is written first)"
    )
    parser.add_argument("--loss", help=f"{', '.join(LOSSES)} (default: the recipe's)")
    for short, name, of in (("-o", "option", TrainOptions()), ("-l", "loss-option", LOSSES["ttt"])):
        known = [key for key in asdict(of) if key != "name"]
        parser.add_argument(
            short, f"--{name}", type=shared.key_value, action="append", default=[], metavar="KEY=VALUE",
            help=f"of {', '.join(known)}; repeatable",
        )  # fmt: skip


def _part(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected I/N with I from 1 to N")
    return int(index) - 1, int(count)


def run_data(arguments: argparse.Namespace) -> int:
    recipe = find_recipe(arguments.recipe)
    options: SynthesisOptions = build(SynthesisOptions, asdict(recipe.text) | dict(arguments.option), "option")
    prompts = list(read_prompts(arguments.prompts)) if arguments.prompts else []
    _write_text(_load(arguments), arguments.folder, options, prompts=prompts, part=arguments.part)
    print(arguments.folder)
    return 0


def run_draft(arguments: argparse.Namespace) -> int:
    recipe = find_recipe(arguments.recipe)
    options: TrainOptions = build(TrainOptions, asdict(recipe.training) | dict(arguments.option), "option")
    loss = recipe.loss if arguments.loss is None else make_loss(arguments.loss)
    loss = build(Loss, asdict(loss) | dict(arguments.loss_option), "loss_option")
    corpus = None if arguments.data is None else Corpus.open(arguments.data)
    engine = _load(arguments)
    if corpus is None:
        corpus = _write_text(engine, arguments.folder / "data", recipe.text)
    model = engine.target.model  # type: ignore[attr-defined]
    train_draft(model, corpus, arguments.folder, options, loss, name=_name(engine), progress=say)
    print(arguments.folder)
    return 0


def _write_text(engine: Engine, folder: Path, options: SynthesisOptions, **more: Any) -> Corpus:
    model = engine.target.model  # type: ignore[attr-defined]
    return write_corpus(model, engine.tokenizer, folder, options, name=_name(engine), progress=say, **more)


def _load(arguments: argparse.Namespace) -> Engine:
    names = ("dtype", "device", "offline", "trust_remote_code")
    given: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    return Engine.from_pretrained(arguments.target, None, "plain", pack=False, **given)


def _name(engine: Engine) -> str:
    """The target's name as it is recorded, without the folders of this machine."""
    name = engine.target.model.config._name_or_path  # type: ignore[attr-defined]
    return Path(name).name if Path(name).is_dir() else name
