"""Run the row of each paper's claim: the claim, what it comes to on this machine, and whether that confirms it.

Everything that it needs is in the repository: the shipped head, networks and classifiers, and the prompts of
`specengine bench`. FOLDER keeps logged trees and papers.jsonl, and the same command goes on where it was stopped. What
cannot be run in this time is listed with the command that runs it and the committed file that has it.

    python -m bench.papers build/papers            all 24 prompts
    python -m bench.papers build/quick --quick     6 prompts and short answers: directions, in minutes
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import tree_construction
from bench.arguments import add_arguments
from bench.report import claim_table
from specengine import Engine, policies
from specengine.benchmark.choice import Comparison, sampling
from specengine.benchmark.measuring import Run
from specengine.benchmark.records import Log, Record, provenance
from specengine.benchmark.summaries import ALL, ratio, summaries
from specengine.benchmark.ways import parse
from specengine.benchmark.workloads import Workload, digest, read
from specengine.costs import find_costs
from specengine.errors import SpecEngineError
from specengine.train.classifier.options import CollectOptions
from specengine.train.classifier.trees import collect

RESULTS = Path(__file__).parent / "results"
CONFIRMED, REFUTED, UNDECIDED, NOT_RUN = "confirmed", "not confirmed", "undecided", "not run"

LIVE = ("eagle", "talon", "salf/optimal", "salf/paper")
THRESHOLDS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 0.9)
DYNATREE = {
    "fixed": "fixed,branching=2,2,2,2,2",
    "breadth": "dynatree/breadth,least=0",
    "depth": "dynatree/breadth-depth,least=0",
    "history": "dynatree,least=0",
}
BEAMS = [
    f"eagle,width=10,expansions=6,budget={budget}"
    for budget in (2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 60)
]
C2T = "c2t/paper"
SAME_BEAM = ("c2t/paper,max_depth=7", "eagle,width=10,expansions=6,budget=60")  # appendix F
OURS = RESULTS / "end-to-end-shipped-head.jsonl"  # costs of two cores
THEIRS = "qwen3-8b-h200"
FEWER = 0.8  # of the beam's nodes: C2T says about three quarters
SAMPLES = 1000
AS_LONG = 0.99  # of the beam's acceptance length
LEAST, MOST = 1.18, 1.44  # TALON's figure 15


class Scale(NamedTuple):
    """How much is run: prompts of each of the six sets, tokens of an answer, rounds, and seconds of a layer's case."""

    per_set: int
    length: int
    logged: int  # tokens of answers whose trees are logged for replays
    rounds: int
    seconds: float


QUICK, FULL = Scale(1, 32, 16, 2, 0.5), Scale(4, 64, 24, 2, 4.0)


class Found(NamedTuple):
    """Hold the result of a claim: our row in words, the verdict, and figures for the record."""

    ours: str
    verdict: str
    figures: dict[str, Any]


@dataclass
class Bench:
    """Hold what the claims share: prompts, engines on the default model, the file of the run."""

    folder: Path
    scale: Scale
    items: list[Workload]
    log: Log
    say: Callable[[str], None] = field(
        default=lambda line: print(line, file=sys.stderr, flush=True)
    )

    @cached_property
    def alone(self) -> Engine:
        """The head alone, without copies."""
        return Engine.from_pretrained(lookup=False)

    def live(self) -> list[Record]:
        """Return rows of plain decoding and LIVE, taking turns. What the file has is not answered again."""
        choice = Comparison(list(LIVE), load={"lookup": False}, options=sampling(0.0, 0))
        ways = choice.ways(self.alone, self.items, self.scale.length)
        run = Run(
            Comparison.plain(self.alone),
            ways,
            choice.options,
            length=self.scale.length,
            rounds=self.scale.rounds,
            say=self.say,
        )
        for record in run.records(self.items, list(self.log.records)):
            self.log.add(record)
        return [record for record in self.log.records if record["record"] in ("row", "not run")]

    def replays(self, ways: Sequence[str]) -> dict[str, Record]:
        """Return by way what it makes of the logged trees, at the costs of OURS and THEIRS."""
        from research.replay import by_answer, replay_answers, summary

        known = {
            record["way"]: record for record in self.log.records if record["record"] == "replay"
        }
        costs = [find_costs(str(OURS)), find_costs(THEIRS)]
        missing = [way for way in ways if way not in known]
        if missing:
            options = CollectOptions(trees=0, length=self.scale.logged, logits=True)
            trees = collect(
                self.alone,
                self._prompts(self.alone, self.items),
                self.folder / "trees",
                options,
                progress=self.say,
            )
        began = time.perf_counter()
        for number, way in enumerate(missing):
            left = _time_left(number, len(missing), time.perf_counter() - began)
            self.say(f"replay {number + 1} of {len(missing)}{left}: {way}")
            name, given = parse(way)
            policy = policies.make(name, **given)
            with torch.inference_mode():
                answers = list(replay_answers(trees, policy))
                known[way] = summary(way, policy, list(chain(*answers)), costs)
            known[way]["by_answer"] = by_answer(answers, costs)
            self.log.add(known[way])
        return {way: known[way] for way in ways}

    def candidates(self) -> list[Path]:
        """Log the candidates of the default draft on every other prompt, and on the rest; return both folders."""
        from research.ltd.candidates import CandidateOptions, log_candidates

        engine, folders = Engine.from_pretrained(), []
        options = CandidateOptions(self.scale.length, width=4, expansions=6)
        for number, name in enumerate(("searched", "compared")):
            folders.append(self.folder / f"candidates-{name}")
            log_candidates(
                engine,
                self._prompts(engine, self.items[number::2]),
                folders[-1],
                options,
                progress=self.say,
            )
        return folders

    def layers(self) -> list[Record]:
        """Return the cases of tree construction with 10 parents, torch on one thread."""
        done = [record for record in self.log.records if record["record"] == "case"]
        cases = [
            case for case in tree_construction.CASES if case.parents == tree_construction.WIDTH
        ]
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for case in cases[len(done) :]:
                self.log.add(
                    tree_construction.measure(case, torch.device("cpu"), 5, 100, self.scale.seconds)
                )
        finally:
            torch.set_num_threads(before)
        return [record for record in self.log.records if record["record"] == "case"]

    @staticmethod
    def _prompts(engine: Engine, items: Sequence[Workload]) -> list[list[int]]:
        return [engine.stream(item.text, max_new_tokens=1).prompt for item in items]


# ---------------------------------------------------------------------------------------------------- claims


def talon(bench: Bench) -> Found:
    rows = bench.live()
    apart, (beam, own) = _over(rows, "talon", "eagle"), _summed(rows, "eagle", "talon")
    text = f"{_interval(apart)} times the beam; passes {own['delta']:.2f} and {beam['delta']:.2f}, "
    text += f"tau {own['tau']:.2f} and {beam['tau']:.2f}"
    fewer = own["delta"] < beam["delta"]
    return Found(text, _faster(apart) if fewer else REFUTED, {"over_eagle": apart})


def talon_layers(bench: Bench) -> Found:
    forms: dict[str, list[Record]] = {}
    for case in bench.layers():
        forms.setdefault(case["given"], []).append(case["median_ms"])
    found = {
        form: {
            kind: [times[f"eagle ({kind})"] / times[f"talon ({kind})"] for times in own]
            for kind in ("torch", "ops")
        }
        for form, own in forms.items()
    }
    text = "; ".join(
        f"{form}: {_range(by['torch'])} in torch, {_range(by['ops'])} as ops"
        for form, by in found.items()
    )
    text += " (medians)"  # the paper's means would be those of whatever else the machine does
    return Found(
        text,
        construction_verdict([by["torch"] for by in found.values()]),
        {"eagle_over_talon": found},
    )


def salf(bench: Bench) -> Found:
    rows = bench.live()
    over = {way: _over(rows, "salf/paper", way) for way in ("eagle", "salf/optimal")}
    verdict = _all_of(map(_faster, over.values()))
    text = f"{_interval(over['eagle'])} times the beam, {_interval(over['salf/optimal'])} times optimal search"
    return Found(text, verdict, {"over": over})


def salf_threshold(bench: Bench) -> Found:
    found = bench.replays([f"salf,threshold={threshold:g},fill=false" for threshold in THRESHOLDS])
    records = list(found.values())
    speeds = [record["speedup"][THEIRS] for record in records]
    best = max(range(len(speeds)), key=speeds.__getitem__)
    medium = max(range(1, len(speeds) - 1), key=speeds.__getitem__)
    over = {
        f"{THRESHOLDS[end]:g}": resampled(
            [records[medium], records[end]], lambda drawn: _speed(drawn[0]) / _speed(drawn[1])
        )
        for end in (0, -1)
    }
    text = (
        f"{speeds[0]:.2f} at 0, best {speeds[best]:.2f} at {THRESHOLDS[best]:g}, "
        f"{speeds[-1]:.2f} at {THRESHOLDS[-1]:g}"
    )
    text += f"; {THRESHOLDS[medium]:g} over them {' and '.join(map(_interval, over.values()))}"
    return Found(
        f"{text} (replayed, {THEIRS})",
        _all_of(map(_faster, over.values())),
        {"speeds": dict(zip(map(str, THRESHOLDS), speeds, strict=True)), "over": over},
    )


def c2t(bench: Bench) -> Found:
    found = bench.replays([C2T, *BEAMS])
    own = found[C2T]
    beam = nodes_at(own["tau"], [(found[way]["tau"], found[way]["gamma"]) for way in BEAMS])
    text = f"tau {own['tau']:.2f} with {own['gamma']:.1f} nodes"
    if beam is None:
        return Found(f"{text}; no beam of 2 to 60 nodes has that length (replayed)", UNDECIDED, {})
    share = resampled([own, *(found[way] for way in BEAMS)], _of_the_beams_nodes)
    within = FEWER / share[0], FEWER / share[2], FEWER / share[1]
    return Found(
        f"{text}, the beam needs {beam:.1f}: {_interval(share)} of its nodes (replayed)",
        _faster(within),
        {"of_the_beams_nodes": share},
    )


def c2t_same_beam(bench: Bench) -> Found:
    own, beam = bench.replays(SAME_BEAM).values()
    share = resampled(
        [own, beam], lambda drawn: _nodes_per_token(drawn[0]) / _nodes_per_token(drawn[1])
    )
    length = resampled([own, beam], lambda drawn: _tau(drawn[0]) / _tau(drawn[1]))
    text = f"tau {own['tau']:.2f} with {own['gamma']:.1f} nodes, the beam {beam['tau']:.2f} with {beam['gamma']:.1f}: "
    text += f"{_interval(share)} of its nodes per token, {_interval(length)} of its tau (replayed)"
    fewer = _faster([1 / value for value in (share[0], share[2], share[1])])
    as_long = _faster([value / AS_LONG for value in length])
    return Found(
        text, _all_of((fewer, as_long)), {"nodes_per_token": share, "of_the_beams_tau": length}
    )


def dynatree(bench: Bench) -> Found:
    found = bench.replays(list(DYNATREE.values()))
    own = {step: found[way]["speedup"][OURS.stem] for step, way in DYNATREE.items()}
    text = ", ".join(f"{step} {speed:.2f}" for step, speed in own.items())
    records = [found[way] for way in DYNATREE.values()]

    def over_fixed(drawn: Sequence[Answers]) -> float:
        return _speed(drawn[2], OURS.stem) / _speed(drawn[0], OURS.stem)

    def over_other_gains(drawn: Sequence[Answers]) -> float:
        fixed, breadth, depth, history = (_speed(answers, OURS.stem) for answers in drawn)
        return 1 + (depth - breadth) - max(breadth - fixed, history - depth)

    over, gain = resampled(records, over_fixed), resampled(records, over_other_gains)
    text += f"; dynamic depth {_interval(over)} times fixed, and brings "
    text += "{:+.2f} ({:+.2f} to {:+.2f}) more than the rest".format(*(each - 1 for each in gain))
    return Found(
        f"{text} (replayed, two cores)",
        _all_of(map(_faster, (over, gain))),
        {"speeds": own, "over_fixed": over, "one_plus_gain": gain},
    )


def ltd(bench: Bench) -> Found:
    from research.ltd.compare import compare

    searched, compared = bench.candidates()
    costs = str(RESULTS / "head-shapes.jsonl")
    args = Namespace(
        folder=[compared], grid=[searched], networks=["cpu"], default=(2, 11), costs=costs
    )
    by_way = {record["way"]: record for record in compare(args) if record["record"] == "replay"}
    own, grid = by_way["ltd: cpu"]["speed"], by_way["eagle, best on the training's trees"]["speed"]
    text = f"{own:.2f}, grid search {grid:.2f} on {len(bench.items[1::2])} prompts (replayed, two cores)"
    return Found(text, CONFIRMED if own > grid else REFUTED, {"over_grid": round(own / grid, 4)})


def ltd_rewards(bench: Bench) -> Found:
    by_way = {r["way"]: r for r in _committed("ltd-cpu.jsonl") if r["record"] == "replay"}
    speeds = {name: by_way[f"ltd: {name}"]["speed"] for name in ("cpu", "cpu-accept", "cpu-time")}
    text = "ltd-cpu.jsonl has throughput {:.2f}, acceptance length {:.2f}, time {:.2f}".format(
        *speeds.values()
    )
    return Found(text, NOT_RUN, {})


def talf(bench: Bench) -> Found:
    cells = {
        r["loss"]: r
        for r in _committed("losses.jsonl")
        if r["record"] == "cell" and r["tree"] == "beam"
    }
    lengths = ", ".join(
        f"{loss} {cells[loss]['mean_acceptance_length']:.2f}" for loss in ("talf", "hass", "eagle")
    )
    text = f"losses.jsonl has tau {lengths} on the beam, under a protocol that costs TALF half its steps"
    return Found(text, NOT_RUN, {})


class Claim(NamedTuple):
    """A claim of a paper. by: what runs it where `run` does not, or as well from an installed wheel."""

    paper: str
    claim: str
    published: str
    run: Callable[[Bench], Found]
    by: str


_WHEEL = "specengine bench --no-lookup --way eagle --way "
CLAIMS = {
    "talon": Claim(
        "TALON",
        "faster than EAGLE's beam, with fewer passes",
        "1.05 to 1.16 times",
        talon,
        _WHEEL + "talon",
    ),
    "talon-layers": Claim(
        "TALON",
        "a layer is chosen faster (fig. 15)",
        f"{LEAST} to {MOST} times",
        talon_layers,
        "bench.tree_construction",
    ),
    "salf": Claim(
        "SALF",
        "faster than the beam and optimal search",
        "1.31 and 1.19 times",
        salf,
        _WHEEL + "salf/paper --way salf/optimal",
    ),
    "salf-threshold": Claim(
        "SALF",
        "best at a medium threshold",
        "2.32 at 0, 2.62 at 0.5, 2.37 at 0.9",
        salf_threshold,
        "research.replay",
    ),
    "c2t": Claim(
        "C2T", "fewer candidates at equal length", "about 25 % fewer", c2t, "research.replay"
    ),
    "c2t-same-beam": Claim(
        "C2T",
        "fewer nodes than a beam of the same width and depth, at no shorter length",
        "0.88 and 0.85 of the nodes (main table)",
        c2t_same_beam,
        "research.replay",
    ),
    "dynatree": Claim(
        "DynaTree",
        "dynamic depth brings most of the gain",
        "181 fixed, 177 breadth, 206 depth, 211 history",
        dynatree,
        "research.replay",
    ),
    "ltd": Claim(
        "LTD", "faster than grid search", "1.02 to 1.36 times", ltd, "research.ltd log, compare"
    ),
    "ltd-rewards": Claim(
        "LTD",
        "throughput is the best reward",
        "4.13x, acceptance 3.59x, time 3.45x",
        ltd_rewards,
        "research.ltd train -o reward=...: two pairs of networks, an hour",
    ),
    "talf": Claim(
        "TALF",
        "longer acceptance than HASS's and EAGLE's loss",
        "3.88, 3.62, 3.44",
        talf,
        "research.losses train, measure: four heads, 8 processor hours",
    ),
}


# ---------------------------------------------------------------------------------------------------- verdicts


def construction_verdict(forms: Sequence[Sequence[float]]) -> str:
    """Judge EAGLE's time over TALON's by form of the distributions: every case of every form must be faster."""
    faster = [min(ratios) > 1 for ratios in forms]
    return CONFIRMED if all(faster) else UNDECIDED if any(faster) else REFUTED


def nodes_at(tau: float, beams: Sequence[tuple[float, float]]) -> float | None:
    """Return the nodes with which the beam has this acceptance length, between two (tau, nodes) of it; None outside."""
    ordered = sorted(beams)
    for (low, few), (high, many) in pairwise(ordered):
        if low <= tau <= high:
            return few + (many - few) * (tau - low) / (high - low) if high > low else few
    return None


Answers = Sequence[Record]  # of one way: what each answer adds, as research.replay.by_answer


def resampled(
    records: Sequence[Record], measure: Callable[[Sequence[Answers]], float | None]
) -> list[float]:
    """Return a measure of replayed ways, and its 95 % interval over prompts, drawn with the same prompts for all.

    A draw for which there is no measure counts as infinite, so that the interval shows it.
    """
    answers = [record["by_answer"] for record in records]
    generator, prompts = random.Random(0), range(len(answers[0]))
    values = []
    for _ in range(SAMPLES):
        chosen = generator.choices(prompts, k=len(prompts))
        found = measure([[way[number] for number in chosen] for way in answers])
        values.append(math.inf if found is None else found)
    values.sort()
    whole = measure(answers)
    ends = values[int(0.025 * SAMPLES)], values[int(0.975 * SAMPLES)]
    return [round(value, 4) for value in (math.inf if whole is None else whole, *ends)]


def _speed(answers: Answers, costs: str = THEIRS) -> float:
    return _sum(answers, "committed") / _sum(answers, costs)


def _tau(answers: Answers) -> float:
    return _sum(answers, "committed") / _sum(answers, "cycles")


def _nodes_per_token(answers: Answers) -> float:
    return _sum(answers, "verified") / _sum(answers, "committed")


def _of_the_beams_nodes(drawn: Sequence[Answers]) -> float | None:
    (tau, nodes), *beams = (
        (_tau(way), _sum(way, "verified") / _sum(way, "cycles")) for way in drawn
    )
    beam = nodes_at(tau, beams)
    return None if beam is None else nodes / beam


def _sum(answers: Answers, name: str) -> float:
    return sum(float(answer[name]) for answer in answers)


def _all_of(verdicts: Iterable[str]) -> str:
    found = set(verdicts)
    return CONFIRMED if found == {CONFIRMED} else REFUTED if REFUTED in found else UNDECIDED


def _faster(apart: Sequence[float]) -> str:
    _, low, high = apart
    return CONFIRMED if low > 1 else REFUTED if high < 1 else UNDECIDED


def _over(rows: Sequence[Record], way: str, base: str) -> list[float]:
    """Return speed over the other way, and the 95 % interval over prompts."""
    by = {
        name: {(r["set"], r["id"]): r for r in rows if r["way"] == name and "seconds" in r}
        for name in (way, base)
    }
    shared = [key for key in by[way] if key in by[base]]
    return ratio([by[way][key] for key in shared], [by[base][key] for key in shared])


def _summed(rows: Sequence[Record], *ways: str) -> list[Record]:
    found = {record["way"]: record for record in summaries(rows) if record["set"] == ALL}
    return [found[way] for way in ways]


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _interval(apart: Sequence[float]) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*apart)


def _committed(file: str) -> list[Record]:
    return [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]


# ---------------------------------------------------------------------------------------------------- command line


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", type=Path, help="of logged trees and papers.jsonl; goes on after an interruption"
    )
    parser.add_argument(
        "--quick", action="store_true", help="6 prompts and short answers: directions, in minutes"
    )
    parser.add_argument(
        "--claim", action="append", choices=list(CLAIMS), help="repeatable; default: all"
    )
    add_arguments(parser, "prompts")
    args = parser.parse_args(argv)
    try:
        bench = _bench(args)
        if busy := tree_construction.crowded(torch.get_num_threads()):
            bench.say(f"bench.papers: warning: {busy}, and live speeds are those of a busy machine")
        records = list(_records(bench, args.claim or list(CLAIMS)))
    except SpecEngineError as error:
        print(f"bench.papers: error: {error}", file=sys.stderr)
        return 2
    print("\n" + claim_table(records).markdown())
    return 0


def _bench(args: argparse.Namespace) -> Bench:
    scale = QUICK if args.quick else FULL
    items = read([args.prompts] if args.prompts else None, scale.per_set)
    settings = {"record": "settings", "quick": args.quick, **scale._asdict()}
    settings |= {
        "prompts": len(items),
        "of_prompts": digest(items),
        "max_new_tokens": scale.length,
        "temperature": 0.0,
    }
    log = Log(
        args.folder / "papers.jsonl", provenance("python -m bench.papers", sys.argv[1:]), settings
    )
    return Bench(args.folder, scale, items, log)


def _records(bench: Bench, names: Sequence[str]) -> Iterator[Record]:
    """Yield a record per claim; what the file has is not run again. Its seconds are those of the call that ended it."""
    done = {record["name"]: record for record in bench.log.records if record["record"] == "claim"}
    missing, start = [name for name in names if name not in done], time.perf_counter()
    for name in names:
        if name not in done:
            claim, began = CLAIMS[name], time.perf_counter()
            number = missing.index(name)
            left = _time_left(number, len(missing), began - start)
            bench.say(f"row {number + 1} of {len(missing)}{left}: {claim.paper}, {claim.claim}")
            found = claim.run(bench)
            facts = {
                "paper": claim.paper,
                "claim": claim.claim,
                "published": claim.published,
                "by": claim.by,
            }
            done[name] = {"record": "claim", "name": name, **facts, **found._asdict()}
            done[name]["seconds"] = round(time.perf_counter() - began, 1)
            done[name]["load"] = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
            bench.log.add(done[name])
        print(_line(done[name]), flush=True)
        yield done[name]


def _time_left(done: int, of: int, seconds: float) -> str:
    """Return the time left in words, as long as the others took on average; nothing before the first is done."""
    return f", about {seconds / done * (of - done) / 60:.1f} min left" if done else ""


def _line(record: Record) -> str:
    verdict = f"{record['paper']}, {record['claim']}: {record['verdict']}"
    return f"{verdict}. Here {record['ours']}. {record['seconds']:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
