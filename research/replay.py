"""Replay policies on logged trees, without running the models again.

`log` answers prompts greedily with all candidates of a wide beam verified, and writes these trees to a folder, with the
draft's whole distribution at each node that it ran at. `run` lets any policy grow its trees from those distributions
and walks them by the target's logged choices.

A replay is not a generation. Every policy is evaluated at the positions that the logging run visited, one cycle at
each, whatever path the policy itself would have taken. A policy with a history sees them in order. Outside the logged
trees nothing is known: the draft proposes nothing at such nodes, and a walk that reaches one ends there. Both are
counted, and make tau a lower bound.

    python -m research.replay log FOLDER --prompts FOLDER --per-set 2
    python -m research.replay run FOLDER --policy talon --policy c2t,beta=0.5 --costs FILE --costs qwen3-8b-h200
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench import provenance, workloads
from bench.arguments import add_arguments
from research.drafting import draft_tree
from specengine import Engine, checkpoints as models, policies
from specengine.benchmark.ways import parse
from specengine.costs import PUBLISHED, PassCosts, find_costs
from specengine.cycle import walk
from specengine.drafters import Drafter
from specengine.errors import InputError, SpecEngineError
from specengine.ops import Nodes
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree
from specengine.policies import TreePolicy
from specengine.records import Cycle, Outcome, Seconds
from specengine.train.classifier.options import CollectOptions
from specengine.train.classifier.trees import Columns, LoggedTree, Trees, collect

CPU = torch.device("cpu")


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        return args.run(args)
    except SpecEngineError as error:
        print(f"research.replay: error: {error}", file=sys.stderr)
        return 2


def log(args: argparse.Namespace) -> int:
    model = AutoModelForCausalLM.from_pretrained(
        models.resolve(args.model), dtype=getattr(torch, args.dtype), trust_remote_code=False
    )
    engine = Engine.from_pretrained(model, args.draft)
    prompts = [
        engine.stream(item.text, max_new_tokens=1).prompt
        for item in workloads.read(args.prompts, args.per_set)
    ]
    options = CollectOptions(
        trees=0,
        length=args.max_new_tokens,
        width=args.width,
        expansions=args.expansions,
        logits=True,
    )
    name = args.model or models.embedded.NAME
    collect(
        engine,
        prompts,
        args.folder,
        options,
        name=Path(name).name,
        progress=lambda line: print(line, flush=True),
    )
    return 0


@torch.inference_mode()
def run(args: argparse.Namespace) -> int:
    costs = [find_costs(name) for name in args.costs]
    made = {
        spec: policies.make(name, **options)
        for spec in args.policy
        for name, options in [parse(spec)]
    }
    trees = Trees.open(args.folder)
    if not trees.manifest.get("logits"):
        raise InputError(
            f"trees: those in {args.folder} were logged without the draft's rows; use research.replay log"
        )
    summaries = (
        summary(spec, policy, list(replay(trees, policy)), costs) for spec, policy in made.items()
    )
    provenance.show(chain([{"record": "log", **trees.manifest}], summaries), args.out)
    return 0


# ---------------------------------------------------------------------------------------------------- replaying


class Replayed(NamedTuple):
    """One cycle of a policy at a logged position.

    committed  tokens, the bonus token included (fewer if the walk left the log)
    expected   1 + the summed path probabilities, by the target, of the verified nodes that are in the log
    widths     nodes of each draft pass; verified, drafted: nodes, of which `drafted` leaves the root out
    missed_rows, missed_nodes   rows asked for and nodes verified that are not in the log
    cut        whether the walk reached such a node
    height     greatest depth of a verified node; widest: most nodes of one depth but the root
    """

    committed: int
    expected: float
    widths: list[int]
    verified: int
    drafted: int
    policy_seconds: float
    missed_rows: int
    missed_nodes: int
    cut: bool
    height: int
    widest: int


@dataclass
class ReplayDrafter(Drafter):
    """A drafter with the logged distributions. It proposes nothing at nodes outside the log."""

    logged: LoggedTree
    columns: Columns
    # of the tree's nodes in the log, -1: not there
    places: list[int] = field(default_factory=lambda: [0], init=False)
    widths: list[int] = field(default_factory=list, init=False)
    missed: int = field(default=0, init=False)

    name = "logged"

    def __post_init__(self) -> None:
        edges = zip(self.logged.parents.tolist(), self.logged.tokens.tolist(), strict=True)
        self._child = {edge: node for node, edge in enumerate(edges)}
        self._row = {node: row for row, node in enumerate(self.logged.expanded.tolist())}

    def locate(self, tree: TokenTree) -> list[int]:
        """Return the index of each node of `tree` in the log, or -1."""
        new = slice(len(self.places), len(tree))
        for parent, token in zip(
            tree.parents[new].tolist(), tree.tokens[new].tolist(), strict=True
        ):
            above = self.places[parent]
            self.places.append(self._child.get((above, token), -1) if above >= 0 else -1)
        return self.places

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        nodes = frontier.alive()
        places = self.locate(tree)
        rows = [self._row.get(places[node], -1) for node in nodes.tolist()]
        self.widths.append(len(rows))
        self.missed += rows.count(-1)
        logits, hidden = (
            self.logged.logits[rows],
            self.logged.hidden[rows] if self.logged.hidden.shape[1] else None,
        )
        if -1 not in rows:
            return Step(logits, *self.columns, hidden)
        log_probs = logits.float() if self.columns.normalized else logits.float().log_softmax(-1)
        log_probs[torch.tensor(rows) < 0] = float("-inf")
        return Step(log_probs, self.columns.token_ids, True, hidden)

    def begin(
        self, prompt: list[int], features: Tensor | None = None, hints: Any = None
    ) -> None: ...

    def accept(self, cycle: Cycle) -> None: ...

    def reset(self) -> None: ...


def replay(trees: Trees, policy: TreePolicy) -> Iterator[Replayed]:
    """Yield the policy's cycle at every logged position, answer by answer. Prompts count as empty."""
    return chain.from_iterable(replay_answers(trees, policy))


def replay_answers(trees: Trees, policy: TreePolicy) -> Iterator[list[Replayed]]:
    """Yield the policy's cycles of each logged answer."""
    for file in trees.shards():
        shard = trees.read(file)
        policy.begin(0)
        yield [replay_cycle(logged, shard.columns, policy) for logged in shard.trees]


def replay_cycle(logged: LoggedTree, columns: Columns, policy: TreePolicy) -> Replayed:
    drafter, seconds = ReplayDrafter(logged, columns), Seconds()
    draft = draft_tree(int(logged.tokens[0]), drafter, policy, seconds, CPU)
    grown = drafter.locate(draft.grown)
    places = grown if draft.kept is None else [grown[node] for node in draft.kept.tolist()]
    choices = logged.choices.tolist()

    def choose(node: int) -> int | None:
        choice = choices[places[node]] if places[node] >= 0 else -1
        return None if choice < 0 else choice

    path, tokens = walk(draft.tree, choose, lambda token: False)
    cycle = Cycle(
        draft.tree, path, tokens, seconds, len(draft.grown) - 1, None, draft.grown, draft.kept
    )
    policy.learn(Outcome.of(cycle))
    known = torch.tensor([place for place in places if place >= 0])
    return Replayed(
        len(tokens),
        float(path_log_probs(logged)[known].exp().sum()),
        drafter.widths,
        len(draft.tree),
        len(draft.grown) - 1,
        seconds.policy,
        drafter.missed,
        places.count(-1),
        _ends_at_a_node(draft.tree, path, tokens),
        int(draft.tree.depths.max()),
        int(draft.tree.depths[1:].bincount().max()) if len(draft.tree) > 1 else 0,
    )


def path_log_probs(logged: LoggedTree) -> Tensor:
    """Return the target's log-probability of each node's path from the root, float64 [n]."""
    total = logged.target_log_probs.double()
    depths = logged.tree.depths
    for depth in range(1, int(depths.max()) + 1):
        level = (depths == depth).nonzero()[:, 0]
        total[level] += total[logged.parents[level]]
    return total


def _ends_at_a_node(tree: TokenTree, path: list[int], tokens: list[int]) -> bool:
    """Return whether a child of the path's end carries the last token: its successors are unknown."""
    return not tokens or bool(((tree.parents == path[-1]) & (tree.tokens == tokens[-1])).any())


# ---------------------------------------------------------------------------------------------------- reporting


def speedup(costs: PassCosts, rows: Sequence[Replayed]) -> float:
    """Return the speed-up over plain decoding, which verifies one node per token."""
    return sum(row.committed for row in rows) * costs.plain / _spent(costs, rows)


def _spent(costs: PassCosts, rows: Sequence[Replayed]) -> float:
    own = sum(row.policy_seconds for row in rows) if costs.measured else 0.0
    return own + sum(costs.cycle(row.verified, row.widths) for row in rows)


def by_answer(
    answers: Sequence[Sequence[Replayed]], costs: Sequence[PassCosts]
) -> list[dict[str, float]]:
    """Return what each answer adds to tau, to the nodes and to the speed-ups: the sums of its cycles.

    Under the name of each cost model stands the time of its cycles, in tokens of plain decoding.
    """
    return [
        {
            "cycles": len(rows),
            "committed": sum(row.committed for row in rows),
            "verified": sum(row.verified for row in rows),
            **{cost.name: round(_spent(cost, rows) / cost.plain, 4) for cost in costs},
        }
        for rows in answers
    ]


def summary(
    spec: str, policy: TreePolicy, rows: Sequence[Replayed], costs: Sequence[PassCosts]
) -> dict[str, Any]:
    """Return tau, delta and gamma per cycle, missed nodes, and the speed-up that each cost model predicts."""

    def mean(values: Iterator[float]) -> float:
        return round(statistics.fmean(values), 4)

    return {
        "record": "replay",
        "way": spec,
        "policy": repr(policy),
        "cycles": len(rows),
        "tau": mean(row.committed for row in rows),
        "expected_tau": mean(row.expected for row in rows),
        "delta": mean(len(row.widths) for row in rows),
        "gamma": mean(row.verified for row in rows),
        "drafted": mean(row.drafted for row in rows),
        "height": mean(row.height for row in rows),
        "widest": mean(row.widest for row in rows),
        "policy_ms": round(1e3 * statistics.median(row.policy_seconds for row in rows), 3),
        "missed_rows_share": round(
            sum(r.missed_rows for r in rows) / max(1, sum(sum(r.widths) for r in rows)), 5
        ),
        "missed_nodes_share": round(
            sum(r.missed_nodes for r in rows) / sum(r.verified for r in rows), 5
        ),
        "walks_cut": sum(row.cut for row in rows),
        "speedup": {cost.name: round(speedup(cost, rows), 4) for cost in costs},
    }


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("log")
    one.add_argument("folder", type=Path, help="folder of the trees; resumes after an interruption")
    add_arguments(one, "model", "draft", "dtype", "prompts", "per_set", max_new_tokens=64)
    one.add_argument("--width", type=int, default=10)
    one.add_argument("--expansions", type=int, default=6)
    one.set_defaults(run=log)
    two = commands.add_parser("run", epilog="A way is NAME[/PRESET][,option=value...]")
    two.add_argument("folder", type=Path)
    two.add_argument("--policy", action="append", required=True, metavar="WAY", help="repeatable")
    known = "; ".join(f"{name}: {costs.source}" for name, costs in PUBLISHED.items()).replace(
        "%", "%%"
    )
    two.add_argument(
        "--costs",
        action="append",
        default=[],
        metavar="NAME",
        help=f"a file with a costs record, or {known}",
    )
    add_arguments(two, "out")
    two.set_defaults(run=run)
    return parser.parse_args(argv)


if __name__ == "__main__":
    began = time.perf_counter()
    status = main()
    print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
    sys.exit(status)
