"""Run the row of each paper's claim: the claim, what it comes to on this machine, and whether that confirms it.

Everything that it needs is in the repository: the shipped head, networks and classifiers, and the prompts of
`specengine bench`. FOLDER keeps logged trees and papers.jsonl, and the same command goes on where it was stopped. What
cannot be run in this time is listed with the command that runs it and the committed file that has it.

    python -m bench.papers build/papers                      all 24 prompts
    python -m bench.papers build/papers --rows depth-rules   one set of rows alone
    python -m bench.papers build/papers --untimed            only what other work on the machine cannot change
    python -m bench.papers build/quick --quick               6 prompts and short answers: directions, in minutes
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import paper_rows, tree_construction
from bench.arguments import add_arguments
from bench.paper_rows import BEAM
from bench.report import claim_table, set_tables
from bench.verdicts import (
    CONFIRMED,
    NOT_RUN,
    REFUTED,
    THEIRS,
    UNDECIDED,
    Answers,
    above_one,
    all_of,
    nodes_per_token,
    resampled,
    speed,
    tau,
    total,
    words,
)
from specengine import Engine, policies
from specengine.benchmark.records import Log, Record, provenance
from specengine.benchmark.ways import parse
from specengine.benchmark.workloads import Workload, digest, read
from specengine.costs import find_costs
from specengine.errors import SpecEngineError
from specengine.train.classifier.options import CollectOptions
from specengine.train.classifier.trees import Trees, collect

RESULTS = Path(__file__).parent / "results"
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
LAYERS = "tree-construction.jsonl"
C2T_OF_THE_BEAM = "c2t/paper,max_depth=7"  # as wide and as deep as BEAM: appendix F
OURS = RESULTS / "end-to-end-shipped-head.jsonl"  # costs of two cores
AN_A100 = "8b-a100-roofline"
FEWER = 0.8  # of the beam's nodes: C2T says about three quarters
AS_LONG = 0.99  # of the beam's acceptance length
LEAST, MOST = 1.18, 1.44  # TALON's figure 15


class Scale(NamedTuple):
    """How much is run: prompts of each of the six sets, tokens of an answer, rounds, and seconds of a layer's case."""

    per_set: int
    length: int
    logged: int  # tokens of answers whose trees are logged for replays
    candidates: int  # and of those whose candidates are logged for LTD
    rounds: int  # of live rows
    seconds: float


QUICK, FULL = Scale(1, 32, 16, 48, 2, 0.5), Scale(4, 64, 24, 96, 2, 4.0)


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
    untimed: bool = False
    assistant: str | None = None
    say: Callable[[str], None] = field(
        default=lambda line: print(line, file=sys.stderr, flush=True)
    )

    @property
    def done(self) -> dict[str, Record]:
        """The records of judged claims and of sets of rows by name."""
        names = {"claim": "name", "set": "set"}
        records = [record for record in self.log.records if record["record"] in names]
        return {record[names[record["record"]]]: record for record in records}

    @cached_property
    def alone(self) -> Engine:
        """The head alone, without copies."""
        return Engine.from_pretrained(lookup=False)

    def replays(self, ways: Sequence[str]) -> dict[str, Record]:
        """Return by way what it makes of the logged trees, at the costs of OURS, THEIRS and AN_A100."""
        known = {
            record["way"]: record for record in self.log.records if record["record"] == "replay"
        }
        missing = [way for way in ways if way not in known]
        began = time.perf_counter()
        for number, way in enumerate(missing):
            left = _time_left(number, len(missing), time.perf_counter() - began)
            self.say(f"replay {number + 1} of {len(missing)}{left}: {way}")
            known[way] = self.replay(self.trees, way)
            self.log.add(known[way])
        return {way: known[way] for way in ways}

    @cached_property
    def trees(self) -> Trees:
        """Return the trees of the head alone on all prompts; what is logged is not logged again."""
        options = CollectOptions(trees=0, length=self.scale.logged, logits=True)
        prompts = self.prompts(self.alone, self.items)
        return collect(self.alone, prompts, self.folder / "trees", options, progress=self.say)

    def replay(self, trees: Trees, way: str) -> Record:
        """Return what a way makes of logged trees, at the costs of OURS, THEIRS and AN_A100, also by answer.

        The speeds leave the policy's own time out, so that they are counts times costs, whatever else the machine does.
        """
        from research.replay import by_answer, replay_answers, summary

        costs = [replace(find_costs(name), measured=False) for name in (str(OURS), THEIRS, AN_A100)]
        name, given = parse(way)
        policy = policies.make(name, **given)
        with torch.inference_mode():
            answers = list(replay_answers(trees, policy))
            found: Record = summary(way, policy, list(chain(*answers)), costs)
        if self.untimed:
            del found["policy_ms"]
        return found | {"by_answer": by_answer(answers, costs)}

    def candidates(self) -> Path:
        """Log the candidates of the default draft at every position of the answers; return the folder."""
        from research.ltd.candidates import CandidateOptions, log_candidates

        engine, folder = Engine.from_pretrained(), self.folder / "candidates"
        options = CandidateOptions(self.scale.candidates, width=4, expansions=6)
        prompts = self.prompts(engine, self.items)
        log_candidates(engine, prompts, folder, options, progress=self.say)
        return folder

    def layers(self) -> list[Record]:
        """Return the cases of tree construction with 10 parents, torch on one thread; untimed: the committed ones."""
        if self.untimed:
            committed = [record for record in _committed(LAYERS) if record["record"] == "case"]
            return [case for case in committed if case["parents"] == tree_construction.WIDTH]
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
    def prompts(engine: Engine, items: Sequence[Workload]) -> list[list[int]]:
        return [engine.stream(item.text, max_new_tokens=1).prompt for item in items]


# ---------------------------------------------------------------------------------------------------- claims


def talon(bench: Bench) -> Found:
    own, beam = bench.replays(("talon", BEAM)).values()
    apart = _over(own, beam)
    text = f"{words(apart)} times the beam; passes {own['delta']:.2f} and {beam['delta']:.2f}, "
    text += f"tau {own['tau']:.2f} and {beam['tau']:.2f}; {own['missed_nodes_share']:.0%} of its nodes are not in the "
    text += f"log (replayed, {THEIRS})"
    fewer = own["delta"] < beam["delta"]
    return Found(text, above_one(apart) if fewer else REFUTED, {"over_eagle": apart})


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
    # the paper's means would be those of whatever else the machine does
    text += f" (medians, {LAYERS if bench.untimed else 'this machine'})"
    return Found(
        text,
        construction_verdict([by["torch"] for by in found.values()]),
        {"eagle_over_talon": found},
    )


def salf(bench: Bench) -> Found:
    own, beam, optimal = bench.replays(("salf/paper", BEAM, "salf/optimal")).values()
    over = {"eagle": _over(own, beam), "salf/optimal": _over(own, optimal)}
    text = f"{words(over['eagle'])} times the beam, {words(over['salf/optimal'])} times optimal search, "
    text += f"{optimal['missed_nodes_share']:.0%} of whose nodes are not in the log (replayed, {THEIRS})"
    return Found(text, all_of(map(above_one, over.values())), {"over": over})


def salf_threshold(bench: Bench) -> Found:
    found = bench.replays([f"salf,threshold={threshold:g},fill=false" for threshold in THRESHOLDS])
    records = list(found.values())
    speeds = [record["speedup"][THEIRS] for record in records]
    best = max(range(len(speeds)), key=speeds.__getitem__)
    medium = max(range(1, len(speeds) - 1), key=speeds.__getitem__)
    over = {f"{THRESHOLDS[end]:g}": _over(records[medium], records[end]) for end in (0, -1)}
    text = (
        f"{speeds[0]:.2f} at 0, best {speeds[best]:.2f} at {THRESHOLDS[best]:g}, "
        f"{speeds[-1]:.2f} at {THRESHOLDS[-1]:g}"
    )
    text += f"; {THRESHOLDS[medium]:g} over them {' and '.join(map(words, over.values()))}"
    return Found(
        f"{text} (replayed, {THEIRS})",
        all_of(map(above_one, over.values())),
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
        f"{text}, the beam needs {beam:.1f}: {words(share)} of its nodes (replayed)",
        above_one(within),
        {"of_the_beams_nodes": share},
    )


def c2t_same_beam(bench: Bench) -> Found:
    own, beam = bench.replays((C2T_OF_THE_BEAM, BEAM)).values()
    share = resampled(
        [own, beam], lambda drawn: nodes_per_token(drawn[0]) / nodes_per_token(drawn[1])
    )
    length = resampled([own, beam], lambda drawn: tau(drawn[0]) / tau(drawn[1]))
    text = f"tau {own['tau']:.2f} with {own['gamma']:.1f} nodes, the beam {beam['tau']:.2f} with {beam['gamma']:.1f}: "
    text += f"{words(share)} of its nodes per token, {words(length)} of its tau (replayed)"
    fewer = above_one([1 / value for value in (share[0], share[2], share[1])])
    as_long = above_one([value / AS_LONG for value in length])
    return Found(
        text, all_of((fewer, as_long)), {"nodes_per_token": share, "of_the_beams_tau": length}
    )


def dynatree(bench: Bench) -> Found:
    found = bench.replays(list(DYNATREE.values()))
    own = {step: found[way]["speedup"][OURS.stem] for step, way in DYNATREE.items()}
    text = ", ".join(f"{step} {speed:.2f}" for step, speed in own.items())
    records = [found[way] for way in DYNATREE.values()]

    def over_fixed(drawn: Sequence[Answers]) -> float:
        return speed(drawn[2], OURS.stem) / speed(drawn[0], OURS.stem)

    def over_other_gains(drawn: Sequence[Answers]) -> float:
        fixed, breadth, depth, history = (speed(answers, OURS.stem) for answers in drawn)
        return 1 + (depth - breadth) - max(breadth - fixed, history - depth)

    over, gain = resampled(records, over_fixed), resampled(records, over_other_gains)
    text += f"; dynamic depth {words(over)} times fixed, and brings "
    text += "{:+.2f} ({:+.2f} to {:+.2f}) more than the rest".format(*(each - 1 for each in gain))
    return Found(
        f"{text} (replayed, two cores)",
        all_of(map(above_one, (over, gain))),
        {"speeds": own, "over_fixed": over, "one_plus_gain": gain},
    )


def ltd(bench: Bench) -> Found:
    from research.ltd.candidates import CandidateTrees
    from research.ltd.compare import best_on_others, decided, over
    from research.ltd.outcomes import Outcomes
    from specengine.policies import _ltd

    networks = _ltd.load("cpu").networks
    costs = find_costs(str(RESULTS / "head-shapes.jsonl"))
    answers = list(CandidateTrees.open(bench.candidates()).answers())
    trees = Outcomes.of(answers, networks.shape, costs)
    own = trees.by_answer(*decided(trees, networks, None, None))
    grid = trees.by_answer(*best_on_others(trees))
    apart = over(own, grid, costs.name)
    text = f"{speed(own, costs.name):.2f}, grid search {speed(grid, costs.name):.2f}: {words(apart)} times "
    text += f"on {len(own)} prompts (replayed, two cores)"
    return Found(text, above_one(apart), {"over_grid": apart})


def ltd_rewards(bench: Bench) -> Found:
    by_way = {r["way"]: r for r in _committed("ltd-cpu.jsonl") if r["record"] == "replay"}
    names = ("cpu", "cpu-accept", "cpu-time")
    speeds = {name: by_way[f"ltd, its size: {name}"]["speed"] for name in names}
    text = "ltd-cpu.jsonl has throughput {:.2f}, acceptance length {:.2f}, time {:.2f}, without intervals".format(
        *speeds.values()
    )
    return Found(text, NOT_RUN, {})


def talf(bench: Bench) -> Found:
    """Judge by the committed runs under the paper's protocol: trees built once, equal steps and equal time.

    No interval compares TALF's head with that of EAGLE's loss, so that half of the claim is undecided at best.
    """
    files = {
        "after equal steps": "losses-talf-steps.jsonl",
        "at equal time": "losses-talf-time.jsonl",
    }
    over_hass = {protocol: _beside(file, "talf") for protocol, file in files.items()}
    text = "tau beside HASS's, trees built once: " + "; ".join(
        f"{more:+.2f} ({low:+.2f} to {high:+.2f}) {protocol} ({files[protocol]})"
        for protocol, (more, low, high) in over_hass.items()
    )
    judged = [above_one([1 + each for each in beside]) for beside in over_hass.values()]
    return Found(text, all_of((*judged, UNDECIDED)), {"over_hass": over_hass})


def _beside(file: str, loss: str) -> list[float]:
    """Return how much longer a loss's acceptance on the beam is than the first one's, and its interval."""
    return next(
        [r["mean_acceptance_length"], *r["mean_acceptance_length_interval"]]
        for r in _committed(file)
        if r["record"] == "beside" and r["loss"] == loss and r.get("tree") == "beam"
    )


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
        "211; in its code 181 fixed, 177 breadth, 206 depth",
        dynatree,
        "research.replay",
    ),
    "ltd": Claim(
        "LTD", "faster than grid search", "1.02 to 1.36 times", ltd, "research.ltd log, compare"
    ),
    "ltd-rewards": Claim(
        "LTD",
        "throughput is the best reward of the size network",
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


def _of_the_beams_nodes(drawn: Sequence[Answers]) -> float | None:
    (length, nodes), *beams = (
        (tau(way), total(way, "verified") / total(way, "cycles")) for way in drawn
    )
    beam = nodes_at(length, beams)
    return None if beam is None else nodes / beam


def _over(own: Record, other: Record) -> list[float]:
    """Return a way's speed over the other's at THEIRS, and the 95 % interval over prompts."""
    return resampled([own, other], lambda drawn: speed(drawn[0]) / speed(drawn[1]))


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


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
        "--claim",
        action="append",
        choices=list(CLAIMS),
        help="repeatable; default: all, where no rows are named",
    )
    parser.add_argument(
        "--rows",
        action="append",
        choices=list(paper_rows.SETS),
        help="a set of rows, repeatable; default: all, where no claim is named",
    )
    parser.add_argument(
        "--assistant", help="a smaller model with the same tokenizer, for the rows `assisted`"
    )
    parser.add_argument(
        "--untimed",
        action="store_true",
        help="time nothing: right beside other work",
    )
    add_arguments(parser, "prompts")
    args = parser.parse_args(argv)
    try:
        bench = _bench(args)
        busy = tree_construction.crowded(torch.get_num_threads())
        if busy and not args.untimed:
            bench.say(f"bench.papers: warning: {busy}, and live speeds are those of a busy machine")
        steps = _steps(bench, args)
        missing = [name for name in steps if name not in bench.done]
        began = time.perf_counter()
        for number, name in enumerate(missing):
            left = _time_left(number, len(missing), time.perf_counter() - began)
            bench.say(f"{number + 1} of {len(missing)}{left}: {name}")
            steps[name](bench)
    except SpecEngineError as error:
        print(f"bench.papers: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench.papers: interrupted; the same command goes on", file=sys.stderr)
        return 130
    records = [record for name, record in bench.done.items() if name in steps]
    for table in (claim_table(records), *set_tables(records)):
        print(f"\n{table.markdown()}")
    return 0


def _steps(bench: Bench, args: argparse.Namespace) -> dict[str, Callable[[Bench], None]]:
    """Return what judges each claim and runs each set of rows that the arguments name, or all."""
    whole = not (args.claim or args.rows)
    claims = args.claim or (CLAIMS if whole else ())
    sets = args.rows or (paper_rows.SETS if whole else ())
    steps: dict[str, Callable[[Bench], None]] = {n: partial(_judge, name=n) for n in claims}
    for name in sets:
        if not (args.untimed and paper_rows.SETS[name].timed):
            steps[name] = partial(paper_rows.run, name=name)
    return steps


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
    return Bench(args.folder, scale, items, log, args.untimed, args.assistant)


def _judge(bench: Bench, name: str) -> None:
    """Add the record of a claim to the file. Its seconds are those of the call that ended it."""
    claim, began = CLAIMS[name], time.perf_counter()
    result = claim.run(bench)
    facts = {"paper": claim.paper, "claim": claim.claim, "published": claim.published}
    record = {"record": "claim", "name": name, **facts, "by": claim.by, **result._asdict()}
    record["seconds"] = round(time.perf_counter() - began, 1)
    record["load"] = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    bench.log.add(record)
    bench.say(f"{claim.paper}, {claim.claim}: {result.verdict}. Here {result.ours}")


def _time_left(done: int, of: int, seconds: float) -> str:
    """Return the time left in words, as long as the others took on average; nothing before the first is done."""
    return f", about {seconds / done * (of - done) / 60:.1f} min left" if done else ""


if __name__ == "__main__":
    sys.exit(main())
