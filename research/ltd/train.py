"""Train the depth and size networks of the policy ltd."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.costs_record import costs_record
from research.ltd.candidates import CandidateOptions, CandidateTrees, log_candidates
from research.ltd.curve import plot
from research.ltd.options import RECIPES, PolicyOptions, find_recipe
from research.ltd.outcomes import evenly, hold_back, split
from research.ltd.training import read_log, require_extra, train_policy
from specengine.cli.given import read_prompts
from specengine.cli.parser import PROMPT_FORMATS, add_options, add_target
from specengine.cli.train import load_engine, question
from specengine.cli.train_arguments import changes, listing
from specengine.costs import PUBLISHED, PassCosts, find_costs, measuring
from specengine.engine import Engine
from specengine.errors import InputError
from specengine.registry import build
from specengine.train.classifier.trees import questions
from specengine.train.text.corpus import Corpus

if TYPE_CHECKING:
    from research.ltd.grounds import Ground

DEFAULT_RECIPE = "short"
MEASURE = "measure"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="of the networks; goes on if a training stopped there",
    )
    recipes = "; ".join(f"{name}: {recipe.about}" for name, recipe in RECIPES.items())
    parser.add_argument(
        "--recipe", default=DEFAULT_RECIPE, help=f"{recipes} (default: {DEFAULT_RECIPE})"
    )
    costs = "; ".join(f"{name}: {found.source}" for name, found in PUBLISHED.items()).replace(
        "%", "%%"
    )
    parser.add_argument(
        "--costs", default=MEASURE, metavar="TABLE",
        help=f"what cycles cost: {MEASURE} (the default: on this machine), a file with a costs record, or {costs}",
    )  # fmt: skip
    parser.add_argument(
        "--live", action="store_true",
        help="learn while the engine runs, also under a cost table; otherwise from logged trees, which is much faster. "
        "The reward wallclock is always live",
    )  # fmt: skip
    source = parser.add_argument_group(
        "questions", "of --data, --prompts or both; or the trees logged of some earlier"
    )
    source.add_argument(
        "--data", type=Path, metavar="FOLDER", help="text of `train data`: its first users' turns"
    )
    source.add_argument(
        "--prompts", type=Path, metavar="FILE", help=f"prompts of your own. {PROMPT_FORMATS}"
    )
    source.add_argument(
        "--candidates",
        type=Path,
        action="append",
        metavar="FOLDER",
        help="trees logged earlier; repeatable, no model",
    )
    add_target(parser)
    parser.add_argument("--draft", help="as for generate (default: the target's)")
    parser.add_argument(
        "--lookup",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="log trees of a draft that copies from the text before, or does not (default: as for generate)",
    )
    add_options(parser, "-o", "option")
    usual = asdict(RECIPES[DEFAULT_RECIPE].options)
    others = {
        name: {key: value for key, value in asdict(recipe.options).items() if value != usual[key]}
        for name, recipe in RECIPES.items()
        if name != DEFAULT_RECIPE
    }
    listed = listing(f"options of -o, as recipe {DEFAULT_RECIPE} sets them", PolicyOptions, usual)
    parser.epilog = f"{listed}\n\n{changes('other recipes', others)}"
    # which keeps the lines of the listing
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Write the networks, the log and its curve to the folder, and print the networks' place; no records."""
    options: PolicyOptions = build(
        PolicyOptions,
        asdict(find_recipe(arguments.recipe).options) | dict(arguments.option),
        "option",
    )
    live = arguments.live or options.reward == "wallclock"
    asked = arguments.data or arguments.prompts
    if bool(asked) == bool(arguments.candidates):
        raise InputError(
            "data, prompts, candidates: accepted --data, --prompts or both, or --candidates alone"
        )
    if arguments.candidates and (live or arguments.costs == MEASURE):
        raise InputError(
            "candidates: they are for a cost table that is given by --costs, and not for live training"
        )
    costs = None if arguments.costs == MEASURE else find_costs(arguments.costs)
    corpus = None if arguments.data is None else Corpus.open(arguments.data)
    turns = (
        []
        if arguments.prompts is None
        else [list(turns) for turns in read_prompts(arguments.prompts)]
    )
    require_extra()
    ground: Ground
    if arguments.candidates:
        assert costs is not None, "checked above"
        ground = _logged(
            [CandidateTrees.open(folder) for folder in arguments.candidates], options, costs
        )
    else:
        engine = load_engine(arguments)
        texts = [] if corpus is None else questions(corpus)
        prompts = [texts[place] for place in evenly(len(texts), options.prompts or len(texts))]
        prompts += [question(engine, turn[0]) for turn in turns]
        ground = _with_engine(engine, prompts, arguments.folder, options, costs, live)
    pair = train_policy(ground, arguments.folder, options, progress=say)
    plot(read_log(arguments.folder), arguments.folder / "curve.svg")
    print(pair)
    return []


def _with_engine(
    engine: Engine,
    prompts: list[list[int]],
    folder: Path,
    options: PolicyOptions,
    costs: PassCosts | None,
    live: bool,
) -> Ground:
    from research.ltd.grounds import LiveGround

    learnt, held = hold_back(prompts, options.held_back)
    if costs is None and options.reward != "wallclock":
        costs = measuring.measure(engine.target, engine.drafter)
        say(f"costs: {costs_record(costs)}")
    if live:
        table = None if options.reward == "wallclock" else costs
        return LiveGround(engine, learnt, held, table, options)
    logging = CandidateOptions(
        length=options.length, width=options.width, expansions=options.expansions
    )
    trees = log_candidates(
        engine, prompts, folder / "candidates", logging, name=_name(engine), progress=say
    )
    assert costs is not None, "only the wall clock needs none"
    return _logged([trees], options, costs)


def _logged(folders: list[CandidateTrees], options: PolicyOptions, costs: PassCosts) -> Ground:
    from research.ltd.grounds import LoggedGround

    return LoggedGround(*split(folders, options.shape, costs, options.held_back), options)


def _name(engine: Engine) -> str:
    """Return the target's name as it is recorded, without the folders of this machine."""
    name = engine.target.model.config._name_or_path  # type: ignore[attr-defined]
    return Path(name).name if Path(name).is_dir() else name


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
