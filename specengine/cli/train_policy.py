"""specengine train policy: the two networks of the policy ltd."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from specengine.cli.arguments.train_policy import MEASURE
from specengine.cli.prompt_files import read_prompts
from specengine.cli.terminal import say
from specengine.cli.training_engine import load_engine, question
from specengine.costs import Costs, find_costs, measured
from specengine.engine import Engine
from specengine.errors import InputError
from specengine.registry import build
from specengine.train.classifier.trees import questions
from specengine.train.ltd.candidates import CandidateOptions, CandidateTrees, log_candidates
from specengine.train.ltd.curve import plot
from specengine.train.ltd.options import PolicyOptions, find_recipe
from specengine.train.ltd.outcomes import evenly, hold_back, split
from specengine.train.ltd.training import read_log, require_extra, train_policy
from specengine.train.text.corpus import Corpus

if TYPE_CHECKING:
    from specengine.train.ltd.grounds import Ground


def run(arguments: argparse.Namespace) -> int:
    options: PolicyOptions = build(
        PolicyOptions, asdict(find_recipe(arguments.recipe).options) | dict(arguments.option), "option"
    )
    live = arguments.live or options.reward == "wallclock"
    asked = arguments.data or arguments.prompts
    if bool(asked) == bool(arguments.candidates):
        raise InputError("data, prompts, candidates: accepted --data, --prompts or both, or --candidates alone")
    if arguments.candidates and (live or arguments.costs == MEASURE):
        raise InputError("candidates: they are for a cost table that is given by --costs, and not for live training")
    costs = None if arguments.costs == MEASURE else find_costs(arguments.costs)
    corpus = None if arguments.data is None else Corpus.open(arguments.data)
    turns = [] if arguments.prompts is None else [list(turns) for turns in read_prompts(arguments.prompts)]
    require_extra()
    ground: Ground
    if arguments.candidates:
        assert costs is not None, "checked above"
        ground = _logged([CandidateTrees.open(folder) for folder in arguments.candidates], options, costs)
    else:
        engine = load_engine(arguments)
        texts = [] if corpus is None else questions(corpus)
        prompts = [texts[place] for place in evenly(len(texts), options.prompts or len(texts))]
        prompts += [question(engine, turn[0]) for turn in turns]
        ground = _with_engine(engine, prompts, arguments.folder, options, costs, live)
    pair = train_policy(ground, arguments.folder, options, progress=say)
    plot(read_log(arguments.folder), arguments.folder / "curve.svg")
    print(pair)
    return 0


def _with_engine(
    engine: Engine, prompts: list[list[int]], folder: Path, options: PolicyOptions, costs: Costs | None, live: bool
) -> Ground:
    from specengine.train.ltd.grounds import LiveGround

    learnt, held = hold_back(prompts, options.held_back)
    if costs is None and options.reward != "wallclock":
        costs = measured.measure(engine.target, engine.drafter)
        say(f"costs: {costs.record()}")
    if live:
        table = None if options.reward == "wallclock" else costs
        return LiveGround(engine, learnt, held, table, options)
    logging = CandidateOptions(length=options.length, width=options.width, expansions=options.expansions)
    trees = log_candidates(engine, prompts, folder / "candidates", logging, name=_name(engine), progress=say)
    assert costs is not None, "only the wall clock needs none"
    return _logged([trees], options, costs)


def _logged(folders: list[CandidateTrees], options: PolicyOptions, costs: Costs) -> Ground:
    from specengine.train.ltd.grounds import LoggedGround

    return LoggedGround(*split(folders, options.shape, costs, options.held_back), options)


def _name(engine: Engine) -> str:
    """The target's name as it is recorded, without the folders of this machine."""
    name = engine.target.model.config._name_or_path  # type: ignore[attr-defined]
    return Path(name).name if Path(name).is_dir() else name
