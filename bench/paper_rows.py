"""Sets of rows that ablate the papers' rules: what `python -m bench.papers FOLDER --rows NAME` runs.

A row is a way in a set. Replayed rows say what a way makes of the logged trees at three cost tables, live ones what it
answers. Each figure has a 95 % interval over prompts, and so has each way's speed over that of the set's first way on
the same prompts, whence the verdict: faster, slower, or undecided.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from bench.verdicts import Answers, resampled, speed, tau, total
from specengine import Engine
from specengine.benchmark.choice import Comparison, sampling
from specengine.benchmark.measuring import Run
from specengine.benchmark.records import Log, Record
from specengine.benchmark.ways import ASSISTED, GENERATE, LOOKUP
from specengine.policies import _classifier
from specengine.train.classifier.training import parent_entropies, path_minimum
from specengine.train.classifier.trees import LoggedTree

if TYPE_CHECKING:
    from bench.papers import Bench

BEAM = "eagle,width=10,expansions=6,budget=60"
FASTER, SLOWER, UNDECIDED, NOT_RUN = "faster", "slower", "undecided", "not run"
PARALLEL = (1, 2, 4, 8)
BUCKETS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)  # limits of entropies, in nats
RANKS = 10

SWEEPS: dict[str, tuple[str, ...]] = {  # the first way of each is what the others are held against
    "eagle-budgets": tuple(
        f"eagle,width=10,expansions=6,budget={budget}" for budget in (60, 32, 40, 48, 72, 80, 96)
    ),
    "talon-settings": (
        "talon",
        *(f"talon,mu={mu}" for mu in ("0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1")),
        *(f"talon,robust_layers={layers}" for layers in (0, 2, 3, 4)),
    ),
    "depth-rules": (
        BEAM,
        *("ddd", "svip", "disco", "specdecpp", "gammatune", "dyjoint", "dymax"),
        *("c2t/paper", "salf/paper", "talon", "dynatree", "ltd/a100"),
    ),
    "dynatree-sweep": (
        "dynatree",
        *(f"dynatree,base_depth={depth}" for depth in (2, 3, 4, 6, 7)),
        *(f"dynatree,branch_max={most}" for most in (2, 4, 5)),
        *(f"dynatree,stop={stop}" for stop in ("0.02", "0.05", "0.2", "0.3")),
        *(f"dynatree,deep={deep}" for deep in ("0.3", "0.7")),
    ),
    "overhead": (BEAM, "talon", "salf/paper", "salf/optimal", "c2t/paper", "dynatree"),
    "chains": (
        "chain,length=4",
        *(f"chain,length={length}" for length in (1, 2, 6)),
        *("c2t/chain", "svip/chain", "disco/chain", "specdecpp/chain", "gammatune/chain"),
    ),
    "pareto": (
        BEAM,
        *(f"eagle,width=10,expansions=6,budget={budget}" for budget in (4, 8, 12, 16, 24, 32, 96)),
        *(f"salf,threshold=0,budget={budget}" for budget in (4, 8, 12, 16, 24, 32, 60, 96)),
        *(f"talon,budget={budget}" for budget in (12, 16, 24, 32, 60, 96)),
        *(f"salf,threshold={limit},fill=false" for limit in ("0.2", "0.4", "0.6", "0.8")),
        *(f"c2t,beta={beta},min_level1=0" for beta in ("0.2", "0.35", "0.5", "0.65", "0.85")),
        *(f"dynatree,least={least}" for least in ("0.01", "0.03", "0.05", "0.1", "0.2")),
    ),
}


class RowSet(NamedTuple):
    """A set of rows.

    shows  what it shows
    run    yields its rows, which have at least these columns
    timed  whether other work on the machine changes it
    """

    shows: str
    run: Callable[[Bench], Iterator[Record]]
    columns: Sequence[str]
    timed: bool = False


REPLAYED = [
    *("way", "cycles", "tau", "delta", "gamma", "height", "widest", "missed_nodes_share"),
    *("speed", "over_first", "verdict"),
]
LIVE = ("way", "prompts", "tokens_per_second", "tau", "over_first", "verdict")


def replayed(name: str) -> Callable[[Bench], Iterator[Record]]:
    """Return what yields the rows of a sweep."""

    def rows(bench: Bench) -> Iterator[Record]:
        records = bench.replays(SWEEPS[name])
        first = next(iter(records.values()))
        for way, record in records.items():
            yield {"way": way, **_figures(record, first)}

    return rows


def _figures(record: Record, first: Record) -> Record:
    facts = {column: record[column] for column in (*REPLAYED, "policy_ms") if column in record}
    facts["tau"] = resampled([record], lambda drawn: tau(drawn[0]))
    costs = list(record["speedup"])
    facts["speed"] = {cost: resampled([record], _speed_at(cost)) for cost in costs}
    facts["over_first"] = {cost: resampled([record, first], _over_at(cost)) for cost in costs}
    facts["verdict"] = {cost: compared(over) for cost, over in facts["over_first"].items()}
    return facts


def _speed_at(costs: str) -> Callable[[Sequence[Answers]], float]:
    return lambda drawn: speed(drawn[0], costs)


def _over_at(costs: str) -> Callable[[Sequence[Answers]], float]:
    return lambda drawn: speed(drawn[0], costs) / speed(drawn[1], costs)


def compared(over: Sequence[float]) -> str:
    """Return what a ratio of speeds and its interval say."""
    _, low, high = over
    return FASTER if low > 1 else SLOWER if high < 1 else UNDECIDED


def by_length(bench: Bench) -> Iterator[Record]:
    """Yield DynaTree's rows, with the acceptance length of the prompts below and from the median length on."""
    prompts = bench.prompts(bench.alone, bench.items)
    lengths = [len(p) for n, p in enumerate(prompts) if bench.trees.shard(n).is_file()]
    middle = sorted(lengths)[len(lengths) // 2]
    records = bench.replays(SWEEPS["dynatree-sweep"])
    for row in replayed("dynatree-sweep")(bench):
        answers = list(zip(records[row["way"]]["by_answer"], lengths, strict=True))
        short = [answer for answer, tokens in answers if tokens < middle]
        long = [answer for answer, tokens in answers if tokens >= middle]
        yield row | {"tau_short": _tau(short), "tau_long": _tau(long)}


def _tau(answers: Answers) -> list[float] | None:
    return resampled([{"by_answer": answers}], lambda drawn: tau(drawn[0])) if answers else None


# ---------------------------------------------------------------------------------------------------- live


def _live(bench: Bench, name: str, ways: Sequence[str], temperature: float) -> Iterator[Record]:
    """Yield rows of ways that take turns; what the set's own file has is not answered again."""
    choice = Comparison(list(ways), load={"lookup": False}, options=sampling(temperature, 0))
    settings = bench.log.records[1] | {"temperature": temperature, "rows": name, "ways": list(ways)}
    log = Log(bench.folder / f"{name}.jsonl", bench.log.records[0], settings)
    run = Run(
        Comparison.plain(bench.alone),
        choice.ways(bench.alone, bench.items, bench.scale.length),
        choice.options,
        length=bench.scale.length,
        rounds=bench.scale.rounds,
        compares=temperature == 0,
        say=bench.say,
    )
    for record in run.records(bench.items, list(log.records)):
        log.add(record)
    rows: dict[str, list[Record]] = {}
    for record in log.records:
        if record["record"] == "row" and "seconds" in record:
            rows.setdefault(record["way"], []).append(record)
    yield from _live_rows(rows)


def _live_rows(rows: dict[str, list[Record]]) -> Iterator[Record]:
    sums = {
        way: [
            {
                "committed": r["new_tokens"],
                "emitted": r.get("emitted", 0),
                "cycles": r.get("cycles", 0),
                "seconds": sorted(r["seconds"])[len(r["seconds"]) // 2],
            }
            for r in own
        ]
        for way, own in rows.items()
    }
    first = next(iter(sums.values()))
    for way, own in sums.items():
        pair = [{"by_answer": own}, {"by_answer": first}]
        over = resampled(pair, lambda drawn: _rate(drawn[0]) / _rate(drawn[1]))
        yield {
            "way": way,
            "prompts": len(own),
            "tokens_per_second": resampled(pair[:1], lambda drawn: _rate(drawn[0])),
            "tau": round(total(own, "emitted") / total(own, "cycles"), 4)
            if total(own, "cycles")
            else None,
            "over_first": over,
            "verdict": compared(over),
        }


def _rate(answers: Answers) -> float:
    return total(answers, "committed") / total(answers, "seconds")


def talon_sampled(bench: Bench) -> Iterator[Record]:
    return _live(bench, "talon-t1", ("talon", BEAM), 1.0)


def assisted(bench: Bench) -> Iterator[Record]:
    """Yield transformers' own decodings beside the beam; the assisted one where bench has an assistant."""
    ways = [GENERATE, LOOKUP, BEAM, "talon", *([ASSISTED] if bench.assistant else [])]
    yield from _live(bench, "assisted", ways, 0.0)
    if not bench.assistant:
        yield {
            "way": ASSISTED,
            **dict.fromkeys(("prompts", "tokens_per_second", "tau", "over_first")),
            "verdict": f"{NOT_RUN}: it needs --assistant, a smaller model of the same tokenizer",
        }


LANES = ("way", "parallel", "tokens_per_second", "tau", "over_first")


def c2t_lanes(bench: Bench) -> Iterator[Record]:
    """Yield the rates of several answers at once: plain decoding, the beam and C2T, each with its own tree per text."""
    prompts = bench.prompts(bench.alone, bench.items)
    for parallel in PARALLEL:
        rates: dict[str, float] = {}
        for way in ("plain", "eagle/cpu", "c2t/cpu"):
            engine = Engine.from_pretrained(lookup=False, policy=way)
            options = {"max_new_tokens": bench.scale.length, "temperature": 0.0}
            engine.generate_many(prompts[:1], parallel, **options)
            began = time.perf_counter()
            results = engine.generate_many(prompts, parallel, **options)
            seconds = time.perf_counter() - began
            tokens = sum(len(result.token_ids) for result in results)
            cycles = sum(result.stats.num_spec_steps for result in results)
            rates[way] = tokens / seconds
            yield {
                "way": way,
                "parallel": parallel,
                "tokens_per_second": round(rates[way], 2),
                "tau": round(tokens / cycles, 4) if cycles and way != "plain" else None,
                "over_first": round(rates[way] / rates["plain"], 4),
            }


# ---------------------------------------------------------------------------------------------------- of logged trees

ACCEPTANCE = ("depth", "rank", "nodes", "taken", "share")


def acceptance(bench: Bench) -> Iterator[Record]:
    """Yield by depth and rank among siblings how often the target takes a child of a node on its path."""
    nodes, taken = torch.zeros(20, RANKS + 1), torch.zeros(20, RANKS + 1)
    for logged in bench.trees:
        ranks = _sibling_ranks(logged)
        on_path = logged.accepted[logged.parents[1:]]
        where = (logged.tree.depths[1:][on_path], ranks[on_path])
        nodes.index_put_(where, torch.ones(len(ranks[on_path])), accumulate=True)
        taken.index_put_(where, logged.accepted[1:][on_path].float(), accumulate=True)
    for depth, rank in (nodes > 0).nonzero().tolist():
        count, hits = int(nodes[depth, rank]), int(taken[depth, rank])
        share = round(hits / count, 4)
        yield {"depth": depth, "rank": rank, "nodes": count, "taken": hits, "share": share}


def _sibling_ranks(logged: LoggedTree) -> torch.Tensor:
    """Return the rank of each node but the root among its siblings, from 1; int64 [n - 1]."""
    order = (-logged.log_probs[1:]).argsort(stable=True)
    ranks, seen = torch.zeros(len(order), dtype=torch.int64), dict[int, int]()
    for node, parent in zip(order.tolist(), logged.parents[1:][order].tolist(), strict=True):
        seen[parent] = seen.get(parent, 0) + 1
        ranks[node] = min(seen[parent], RANKS)
    return ranks


BIAS = ("entropy_from", "entropy_to", "nodes", "taken", "path_probability", "c2t")


def c2t_bias(bench: Bench) -> Iterator[Record]:
    """Yield how often a node is on the target's path, by the entropy of its parent's distribution.

    Each row compares that share with the draft's path probability and with the confidence of the shipped classifier,
    inherited along the path. Counts the ten likeliest nodes of each depth, from which C2T chooses.
    """
    learned = _classifier.load("c2t", "auto")
    sums = torch.zeros(len(BUCKETS) + 1, 4, dtype=torch.float64)
    for logged in bench.trees:
        tree, entropies = logged.tree, parent_entropies(logged)
        paths, depths = tree.path_log_probs[1:], tree.depths[1:]
        features = _classifier.c2t_features(paths, entropies, depths, learned.facts["depth_base"])
        with torch.inference_mode():
            sure = path_minimum(learned.net(features), logged)
        best = torch.cat(
            [
                (level := (depths == depth).nonzero()[:, 0])[
                    paths[level].topk(min(RANKS, len(level))).indices
                ]
                for depth in range(1, int(depths.max()) + 1)
            ]
        )
        bucket = torch.bucketize(entropies[best], torch.tensor(BUCKETS))
        facts = (
            torch.ones(len(best)),
            logged.accepted[1:][best],
            paths[best].exp(),
            sure[best],
        )
        sums.index_add_(0, bucket, torch.stack([fact.double() for fact in facts], dim=1))
    limits = zip((0.0, *BUCKETS), (*BUCKETS, None), strict=True)
    for (low, high), (nodes, taken, path, sure) in zip(limits, sums.tolist(), strict=True):
        if nodes:
            shares = {"taken": taken, "path_probability": path, "c2t": sure}
            yield {
                "entropy_from": low,
                "entropy_to": high,
                "nodes": int(nodes),
                **{name: round(value / nodes, 5) for name, value in shares.items()},
            }


SETS: dict[str, RowSet] = {
    "eagle-budgets": RowSet(
        "EAGLE's beam with 32 to 96 nodes", replayed("eagle-budgets"), REPLAYED
    ),
    "talon-settings": RowSet("TALON's mu and k", replayed("talon-settings"), REPLAYED),
    "talon-t1": RowSet(
        "TALON and the beam at temperature 1, live", talon_sampled, LIVE, timed=True
    ),
    "depth-rules": RowSet(
        "LTD's main table: every rule of depth, and C2T, under the same costs",
        replayed("depth-rules"),
        REPLAYED,
    ),
    "dynatree-sweep": RowSet(
        "DynaTree's depth, branching and thresholds, and by length of the prompt",
        by_length,
        [*REPLAYED, "tau_short", "tau_long"],
    ),
    "overhead": RowSet(
        "what SALF and C2T take for a cycle's tree beside TALON and the beam",
        replayed("overhead"),
        [*REPLAYED, "policy_ms"],
        timed=True,
    ),
    "chains": RowSet("chains, and rules that end them", replayed("chains"), REPLAYED),
    "pareto": RowSet(
        "acceptance length and speed by verified nodes, with the best trees of the draft's probabilities",
        replayed("pareto"),
        REPLAYED,
    ),
    "c2t-lanes": RowSet("C2T with several answers at once, live", c2t_lanes, LANES, timed=True),
    "assisted": RowSet(
        "transformers' own decodings, assisted too, live", assisted, LIVE, timed=True
    ),
    "acceptance": RowSet("what the target takes, by depth and rank", acceptance, ACCEPTANCE),
    "c2t-bias": RowSet(
        "the draft's path probability and C2T's confidence against what is taken, by entropy",
        c2t_bias,
        BIAS,
    ),
}


def run(bench: Bench, name: str) -> None:
    """Add the record of a set to the file."""
    chosen, rows, began = SETS[name], [], time.perf_counter()
    for number, row in enumerate(chosen.run(bench), 1):
        bench.say(f"{name}: row {number}")
        rows.append({column: row[column] for column in chosen.columns})
    seconds = round(time.perf_counter() - began, 1)
    bench.log.add(
        {"record": "set", "set": name, "shows": chosen.shows, "seconds": seconds, "rows": rows}
    )
