"""Compare training losses: heads of one shape, trained for the same time with each loss.

`train` trains the heads one after the other, each for the same processor time (set OMP_NUM_THREADS=1 if other work runs
on the machine), or for the same number of steps. All losses unroll from the same share of the positions. The target's
trees are grown once, before the training, and kept beside the text (`--best 0`: in every step). After an interruption,
the same call resumes. `measure` writes speed-up over plain decoding and
acceptance length with each tree, accuracy and calibration after the n-th ranked token, with 95 % intervals over prompts
and texts (bootstrap percentiles), paired differences to the first loss, the share of tree nodes by rank, and the result
of `ahead`: agreement 1 to 5 tokens ahead on held-back text.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench import provenance, workloads
from bench.arguments import add_arguments
from research import bootstrap
from research.ranks import Observed, RankReport, observe, reports
from research.trees import KeptTrees, TreeFolder, folder_for, keep_trees
from specengine import Engine, checkpoints as models
from specengine.checkpoints.eagle import load_head
from specengine.files import atomic
from specengine.models.eagle import EagleHead, head_from
from specengine.ops.tree import TokenTree
from specengine.request.prompts import Prompt
from specengine.train.draft.options import Loss, TrainOptions, make_loss
from specengine.train.draft.teacher import Teacher
from specengine.train.draft.training import (
    LOG,
    MEASURE_EVERY,
    STATE,
    Epochs,
    Teaching,
    train_draft,
)
from specengine.train.draft.validation import agreement
from specengine.train.text.corpus import Corpus, Text

LOSSES = {
    "eagle": make_loss("eagle"),
    "eagle-paper": make_loss("eagle-paper"),
    "hass": make_loss("hass"),
    "hass-paper": make_loss("hass-paper"),
    "ttt": make_loss("ttt", steps=3),
    "talf": make_loss("talf"),
    "talf-k1": make_loss("talf", width=1),
    "talf-k2": make_loss("talf", width=2),
}
USUAL = ("eagle", "hass", "ttt", "talf")
TREES = {
    "beam": ("eagle", {"width": 10, "expansions": 6, "budget": 60}),
    "optimal": ("salf", {"threshold": 0.0}),
    "salf": ("salf", {"threshold": 0.6, "fill": False}),
}
OPTIONS = TrainOptions(
    head="eagle1",
    intermediate_size=512,
    batch_tokens=1024,
    lengths=(512,),
    validate_every=10**6,
    learning_rate=5e-4,
    temperatures=False,
)
TRIAL_STEPS = 2 * MEASURE_EVERY + 1
SAVE_EVERY = 50
RECORD = "training.json"
RANKED = ("accuracy", "calibration", "standard_calibration")
PLACES = 128  # of a held-back text, by rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["train", "measure", "ahead"])
    add_arguments(parser, "model", "dtype", "prompts", "per_set", "max_new_tokens", "out")
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of training text with held-back texts"
    )
    parser.add_argument("--heads", type=Path, required=True, help="folder for a head per loss")
    usual = Protocol()
    parser.add_argument(
        "--minutes",
        type=float,
        default=usual.minutes,
        help="processor time of the training with each loss; the growing of trees before it is not counted",
    )
    parser.add_argument(
        "--steps", type=int, default=usual.steps, help="steps of each, in the place of --minutes"
    )
    parser.add_argument(
        "--anchors",
        type=float,
        default=usual.anchors,
        help="share of the positions from which the steps after the first are unrolled",
    )
    parser.add_argument(
        "--start", default=usual.start, help="a trained head that all go on from; default: none"
    )
    parser.add_argument(
        "--best",
        type=int,
        default=usual.best,
        help="best tokens kept as the labels of a tree's node; 0: trees are grown in every step",
    )
    parser.add_argument(
        "--gib", type=float, default=usual.gib, help="room on the disk for the trees of a loss"
    )
    parser.add_argument(
        "--loss",
        action="append",
        choices=list(LOSSES),
        help=f"repeatable; default: {', '.join(USUAL)}",
    )
    args = parser.parse_args()
    protocol = Protocol(**{name: getattr(args, name) for name in Protocol._fields})
    model = AutoModelForCausalLM.from_pretrained(
        models.resolve(args.model), dtype=getattr(torch, args.dtype), trust_remote_code=False
    )
    names = args.loss or list(USUAL)
    if args.what == "train":
        target = args.model or models.embedded.NAME
        train(names, model, Corpus.open(args.data), args.heads, protocol, target)
    else:
        provenance.show(
            (measure if args.what == "measure" else ahead)(names, model, args), args.out
        )


class Protocol(NamedTuple):
    """What the trainings of all losses have in common. See the options of the command."""

    minutes: float = 10.0
    steps: int = 0
    anchors: float = 0.25
    start: str = "target"
    best: int = 64
    gib: float = 8.0

    @property
    def options(self) -> TrainOptions:
        given = (
            OPTIONS if self.start in ("target", "random") else replace(OPTIONS, intermediate_size=0)
        )
        return replace(given, start=self.start)


@dataclass(frozen=True)
class Training:
    """Trains heads by one protocol."""

    model: Any
    corpus: Corpus
    heads: Path
    protocol: Protocol
    target: str

    @property
    def seconds(self) -> float:
        return 0.0 if self.protocol.steps else 60 * self.protocol.minutes

    def loss(self, name: str) -> Loss:
        return replace(LOSSES[name], anchors=self.protocol.anchors)

    def teach(self, name: str) -> Teaching:
        """Return what makes the teacher: one with kept trees for a loss that has trees, or one that grows them."""
        folder = self.folder(name)
        return Teacher if folder is None else partial(KeptTrees, folder=folder)

    def folder(self, name: str) -> TreeFolder | None:
        loss, best = self.loss(name), self.protocol.best
        return folder_for(self.corpus, loss, best, self.target) if best and loss.width else None

    def grow(self, name: str) -> dict[str, Any]:
        """Grow the trees that the loss reads, if it has any. Return their GiB, and the seconds of the last call."""
        folder = self.folder(name)
        if folder is None:
            return {}
        record = folder.folder / RECORD
        batches, began = Epochs(self.corpus, self.protocol.options).batches, time.process_time()
        gib = keep_trees(Teacher(self.model, (0,)), folder, batches, self.protocol.gib)
        if not record.is_file():
            seconds = round(time.process_time() - began)
            _write(record, {"gib": round(gib, 3), "cpu_seconds": seconds})
        facts: dict[str, Any] = json.loads(record.read_text())
        return facts

    def run(self, name: str, out: Path, options: TrainOptions) -> int:
        """Train one head. Return the processor time in seconds."""
        options = replace(options, save_every=min(SAVE_EVERY, max(1, options.steps // 10)))
        train_draft(
            self.model,
            self.corpus,
            out,
            options,
            self.loss(name),
            name=self.target,
            teach=self.teach(name),
            progress=print,
        )
        (out / STATE).unlink(missing_ok=True)
        return round(cpu_seconds(_log(out)))


def train(
    names: Sequence[str], model: Any, corpus: Corpus, heads: Path, protocol: Protocol, target: str
) -> None:
    """Train each head for the protocol's steps, or as many as fit into its minutes by the pace of a trial."""
    heads.mkdir(parents=True, exist_ok=True)
    training, begun = Training(model, corpus, heads, protocol, target), heads / "protocol.json"
    if begun.is_file() and json.loads(begun.read_text()) != protocol._asdict():
        raise SystemExit(
            f"protocol: {heads} was begun with {begun.read_text().strip()}; take another folder"
        )
    _write(begun, protocol._asdict())
    trees = {name: training.grow(name) for name in names}
    for name, steps in _steps(names, training).items():
        done = heads / name / RECORD
        if not done.is_file():
            print(f"{name}: {steps} steps", flush=True)
            spent = training.run(name, heads / name, replace(protocol.options, steps=steps))
            settings = asdict(training.loss(name)) | protocol._asdict()
            record = {"steps": steps, "cpu_seconds": spent, "settings": settings}
            _write(done, record | {"trees": trees[name]})
        while (record := json.loads(done.read_text()))["cpu_seconds"] < training.seconds:
            _train_on(name, training, record)


def _train_on(name: str, training: Training, record: dict[str, Any]) -> None:
    """Train further at a low learning rate if the steps took less time than the trial predicted."""
    head, seconds = training.heads / name, training.seconds
    steps = (
        math.ceil(
            1.02
            * (seconds - record["cpu_seconds"])
            * record["steps"]
            / max(1, record["cpu_seconds"])
        )
        + 1
    )
    print(f"{name}: {steps} steps more", flush=True)
    more = head / "more"
    options = replace(
        OPTIONS,
        steps=steps,
        start=str(head),
        intermediate_size=0,
        learning_rate=OPTIONS.learning_rate / 20,
    )  # of the same seed, as its batches are those that trees were grown for
    spent = training.run(name, more, options)
    for file in ("config.json", "model.safetensors"):
        (more / file).replace(head / file)
    record |= {"steps": record["steps"] + steps, "cpu_seconds": record["cpu_seconds"] + spent}
    _write(head / RECORD, record)
    shutil.rmtree(more)


def _write(file: Path, record: dict[str, Any]) -> None:
    with atomic(file) as part:
        part.write_text(json.dumps(record) + "\n")


def cpu_seconds(entries: Sequence[dict[str, Any]]) -> float:
    """Return the processor time of a training run by its log, without start-up. Each process counts from zero."""
    times = [entry["cpu_seconds"] for entry in entries if "loss" in entry]
    return sum(later - earlier if later > earlier else later for earlier, later in pairwise(times))


def _steps(names: Sequence[str], training: Training) -> dict[str, int]:
    """Return the steps of each loss. All paces are measured first, close together, and stored with the heads."""
    if training.protocol.steps:
        return dict.fromkeys(names, training.protocol.steps)
    heads, seconds = training.heads, training.seconds
    kept = heads / "steps.json"
    if kept.is_file():
        steps = json.loads(kept.read_text())
        if set(names) <= steps.keys():
            return {name: steps[name] for name in names}
        raise SystemExit(
            f"loss: {kept} was begun for {', '.join(steps)}; go on with these, or take another folder"
        )
    steps = {}
    for name in names:
        with tempfile.TemporaryDirectory() as trial:
            options = replace(OPTIONS, steps=TRIAL_STEPS, start="random")
            loss, teach = training.loss(name), training.teach(name)
            train_draft(training.model, training.corpus, Path(trial), options, loss, teach=teach)
            times = [entry["cpu_seconds"] for entry in _log(Path(trial)) if "loss" in entry]
        pace = min(later - earlier for earlier, later in pairwise(times)) / MEASURE_EVERY
        steps[name] = max(1, round(seconds / pace))
    _write(kept, steps)
    return steps


def _log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


def measure(names: Sequence[str], model: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    held_back = Epochs(Corpus.open(args.data), OPTIONS).held_back
    prompts = workloads.read(args.prompts, args.per_set)
    plain = Engine.from_pretrained(model, policy="plain")
    engines: dict[tuple[str, str], Engine] = {}
    rows: list[dict[str, Any]] = []
    observed: dict[str, list[Observed]] = {}
    for name in names:
        folder = args.heads / name
        head, teacher = taught(folder, model)
        training = json.loads((folder / RECORD).read_text())
        observed[name] = observations(head, teacher, held_back)
        rows.append(
            {"record": "head", "loss": name, **training, "by_rank": by_rank(observed[name])}
        )
        for tree, (policy, options) in TREES.items():
            engines[name, tree] = Engine.from_pretrained(
                model, str(folder), policy, policy_options=options, lookup=False
            )
    cells = {key: _Cell() for key in engines}
    for item in prompts:
        prompt = plain.stream(item.text, max_new_tokens=1).prompt
        base = timed(plain, prompt, args.max_new_tokens, None)
        for key, engine in engines.items():
            cells[key].add(base, timed(engine, prompt, args.max_new_tokens, cells[key].ranks))
    rows += [
        {"record": "cell", "loss": key[0], "tree": key[1], **cell.summary()}
        for key, cell in cells.items()
    ]
    first, *others = names
    for name in others:
        beside = {"record": "beside", "loss": name, "first": first}
        rows.append(beside | {"by_rank": ranks_beside(observed[name], observed[first])})
        for tree in TREES:
            rows.append(beside | {"tree": tree, **cells[name, tree].beside(cells[first, tree])})
    return rows + ahead(names, model, args)


def ahead(names: Sequence[str], model: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the share of held-back answer tokens for which each head's best token j + 1 ahead is the target's.

    Also return the difference to the first head."""
    held_back = Epochs(Corpus.open(args.data), OPTIONS).held_back
    found = {}
    for name in names:
        head, teacher = taught(args.heads / name, model)
        found[name] = [
            [float(text.answers.sum()), *agreement(head, teacher, [text], autocast=False)[0]]
            for text in held_back
        ]
    return [
        {"record": "ahead", "loss": name, **shares_ahead(found[name], found[names[0]])}
        for name in names
    ]


def taught(folder: Path, model: Any) -> tuple[EagleHead, Teacher]:
    """Return the head in `folder` and its teacher, `model`."""
    config, state, _ = load_head(folder)
    teacher = Teacher(model, config.feature_ids(model.config.num_hidden_layers))
    return head_from(config, state, model.dtype, model.device), teacher


def shares_ahead(
    found: Sequence[Sequence[float]], first: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Return the shares of all tokens, and their differences from the first's, with bootstrap intervals over the texts.

    found, first: per text the number of tokens, then shares of them.
    """
    pairs = list(zip(found, first, strict=True))

    def both(sample: Sequence[Any]) -> tuple[Any, Any]:
        drawn = np.array(sample)  # [texts, 2, 1 + distances]
        weights, shares = drawn[:, 0, 0], drawn[:, :, 1:]
        own, other = (weights[:, None, None] * shares).sum(0) / weights.sum()
        return own, own - other

    own, more = both(pairs)
    drawn = [both(sample) for sample in bootstrap.samples(pairs)]

    def intervals(which: int) -> list[Any]:
        return [bootstrap.interval([each[which][at] for each in drawn]) for at in range(len(own))]

    facts = {"texts": len(pairs), "tokens": int(sum(text[0] for text in found))}
    shares = {"hits": own.tolist(), "hits_interval": intervals(0)}
    return facts | shares | {"more": more.tolist(), "more_interval": intervals(1)}


def observations(head: EagleHead, teacher: Teacher, texts: Sequence[Text]) -> list[Observed]:
    """Return the observations for `by_rank` of each text with answers, in order."""
    return [observe(head, teacher, text, PLACES) for text in texts if text.answers[2:].any()]


def by_rank(found: Sequence[Observed]) -> list[dict[str, Any]]:
    """Return accuracy and calibration by rank, with intervals over the texts."""
    rows = [report.to_dict() for report in reports(found)]
    drawn = [reports(sample) for sample in bootstrap.samples(found)]
    for number, row in enumerate(rows):
        for field in RANKED:
            row[f"{field}_interval"] = bootstrap.interval(
                [getattr(sample[number], field) for sample in drawn]
            )
    return rows


def ranks_beside(found: Sequence[Observed], first: Sequence[Observed]) -> list[dict[str, Any]]:
    """Return differences of `by_rank` between a head and the first on the same texts, with paired intervals."""
    pairs = list(zip(found, first, strict=True))

    def both(sample: Sequence[Any]) -> list[tuple[RankReport, RankReport]]:
        own, other = zip(*sample, strict=True)
        return list(zip(reports(own), reports(other), strict=True))

    drawn = [both(sample) for sample in bootstrap.samples(pairs)]
    rows = []
    for number, (own, other) in enumerate(both(pairs)):
        row: dict[str, Any] = {"rank": own.rank, "rows": own.rows}
        for field in RANKED:
            row[field] = getattr(own, field) - getattr(other, field)
            differences = [
                getattr(sample[number][0], field) - getattr(sample[number][1], field)
                for sample in drawn
            ]
            row[f"{field}_interval"] = bootstrap.interval(differences)
        rows.append(row)
    return rows


class _Cell:
    """One loss with one tree, over all prompts."""

    def __init__(self) -> None:
        self.counts: list[tuple[int, int]] = []  # tokens and cycles of each prompt
        self.speedups: list[float] = []
        self.ranks: Counter[int] = Counter()

    def add(self, plain: tuple[float, int, int], timed: tuple[float, int, int]) -> None:
        seconds, tokens, cycles = timed
        self.counts.append((tokens, cycles))
        self.speedups.append((tokens / seconds) / (plain[1] / plain[0]))

    def summary(self) -> dict[str, Any]:
        nodes = self.ranks.total()
        return {
            "prompts": len(self.speedups),
            "speedup_over_plain": round(statistics.mean(self.speedups), 3),
            "mean_acceptance_length": round(acceptance_length(self.counts), 3),
            "mean_acceptance_length_interval": bootstrap.interval(
                [acceptance_length(sample) for sample in bootstrap.samples(self.counts)]
            ),
            "share_of_nodes_by_rank": {
                rank: round(self.ranks[rank] / nodes, 4) for rank in sorted(self.ranks)
            },
        }

    def beside(self, first: _Cell) -> dict[str, Any]:
        """Return the difference of acceptance length to the first on the same prompts, with a paired interval."""
        pairs = list(zip(self.counts, first.counts, strict=True))

        def more(sample: Sequence[Any]) -> float:
            own, other = zip(*sample, strict=True)
            return acceptance_length(own) - acceptance_length(other)

        drawn = [more(sample) for sample in bootstrap.samples(pairs)]
        return {
            "mean_acceptance_length": round(more(pairs), 3),
            "mean_acceptance_length_interval": bootstrap.interval(drawn),
        }


def acceptance_length(counts: Sequence[tuple[int, int]]) -> float:
    """Return the acceptance length from tokens and cycles of each prompt."""
    tokens, cycles = map(sum, zip(*counts, strict=True))
    return tokens / cycles


def timed(
    engine: Engine, prompt: Prompt, length: int, ranks: Counter[int] | None
) -> tuple[float, int, int]:
    """Return seconds, new tokens and cycles of one greedy answer. Count the ranks of drafted nodes into `ranks`."""
    began = time.perf_counter()
    turn = engine.stream(prompt, max_new_tokens=length, temperature=0.0)
    pieces = list(turn)
    seconds = time.perf_counter() - began
    if ranks is not None:
        for piece in pieces:
            ranks.update(sibling_ranks(piece.cycle.tree))
    return seconds, turn.stats.num_generated_tokens, turn.stats.num_spec_steps


def sibling_ranks(tree: TokenTree) -> list[int]:
    """Return each drafted node's rank among its parent's proposals, from 1.

    The tree keeps siblings in order, and never keeps a node without those that rank before it.
    """
    seen: Counter[int] = Counter()
    ranks = []
    for parent in tree.parents[1:].tolist():
        seen[parent] += 1
        ranks.append(seen[parent])
    return ranks


if __name__ == "__main__":
    main()
