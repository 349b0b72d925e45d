"""Tables of the pages about a trained head: shape, training, acceptance and calibration."""

from __future__ import annotations

from collections.abc import Callable

from docs.build.results import SETS, code, records, summaries, table
from specengine.benchmark.records import NOTHING, Record, number

RANKED = {
    "accuracy": "accuracy",
    "calibration": "calibration error, target's best",
    "standard_calibration": "calibration error, draft's best",
}


def shapes(file: str) -> str:
    """Return acceptance and predicted speed of heads by shape, under measured costs, from research.head_shapes."""
    costs = {
        r["name"]: r["draft_pass_ms_by_width"] for r in records(file) if r["record"] == "costs"
    }
    heads: dict[str, dict[str, Record]] = {}
    for record in records(file):
        if record["record"] == "head":
            heads.setdefault(record["shape"], {})[record["tree"]] = record
    trees = list(next(iter(heads.values())))
    rows = []
    for name, by_tree in heads.items():
        head = by_tree[trees[0]]
        row = [f"{head['units']:,}", f"{head['tokens']:,}", f"{head['parameters'] / 1e6:.1f}M"]
        row += [" / ".join(f"{costs[name][width]:.2f}" for width in ("1", "4"))]
        for tree in trees:
            row += [
                number(by_tree[tree], "acceptance_length", 2),
                number(by_tree[tree], "predicted_tokens_per_s", 1),
            ]
        rows.append(row)
    header = ["units of the MLP", "draft vocabulary", "parameters", "ms per pass, 1 / 4 nodes"]
    return table(
        [*header, *(f"{tree}: {of}" for tree in trees for of in ("tau", "tokens/s"))], rows, file
    )


def learning(file: str) -> str:
    """Return acceptance by training tokens, and a prediction for twice as many, from research.learning_curve."""
    rows = [
        [
            "start" if not record["stage"] else f"stage {record['stage']}, step {record['step']:,}",
            f"{record['tokens'] / 1e6:.2f}",
            NOTHING if record["hours"] is None else f"{record['hours']:.2f}",
            *_bounded(record, "acceptance_length", 2),
        ]
        for record in records(file)
        if record["record"] == "head"
    ]
    more = next(record for record in records(file) if record["record"] == "doubling")
    change, interval = _bounded(more, "more_acceptance_length", 2)
    rows.append(
        [
            "predicted: twice the tokens",
            f"{more['tokens'] / 1e6:.2f}",
            NOTHING,
            f"{change} more",
            interval,
        ]
    )
    return table(
        ("head", "million training tokens", "processor hours", "tau", "95 % interval over prompts"),
        rows,
        file,
    )


def ranks(file: str) -> str:
    """Return accuracy and calibration by rank at the end of each stage, from research.learning_curve."""
    ends = [record for record in records(file) if record["record"] == "head" and record["is_end"]]
    rows = [
        [
            f"after stage {record['stage']}" if record["stage"] else "start",
            called,
            *(f"{100 * rank[what]:.1f}" for rank in record["by_rank"]),
        ]
        for record in ends
        for what, called in RANKED.items()
    ]
    header = ("head", "in %", *(f"rank {rank['rank']}" for rank in ends[0]["by_rank"]))
    return table(header, rows, file)


def loss_acceptance(file: str) -> str:
    """Return training time and acceptance length of each loss's head on each tree, from research.losses."""
    heads = {record["loss"]: record for record in records(file) if record["record"] == "head"}
    cells = {(r["loss"], r["tree"]): r for r in records(file) if r["record"] == "cell"}
    trees = list(dict.fromkeys(tree for _, tree in cells))
    rows = [
        [
            code(loss),
            f"{head['steps']:,}",
            f"{head['cpu_seconds'] / 3600:.2f}",
            *(
                "{} ({})".format(*_bounded(cells[loss, tree], "mean_acceptance_length", 2))
                for tree in trees
            ),
        ]
        for loss, head in heads.items()
    ]
    return table(
        ("loss", "steps", "processor hours", *(f"tau, {tree}" for tree in trees)), rows, file
    )


def loss_acceptance_beside(file: str) -> str:
    """Return differences of acceptance length to the first loss on the same prompts, from research.losses."""
    differences = [
        record for record in records(file) if record["record"] == "beside" and "tree" in record
    ]
    cells = {(r["loss"], r["tree"]): r for r in differences}
    trees = list(dict.fromkeys(tree for _, tree in cells))
    rows = [
        [
            code(loss),
            *(_signed(cells[loss, tree], "mean_acceptance_length", 1, 2) for tree in trees),
        ]
        for loss in dict.fromkeys(loss for loss, _ in cells)
    ]
    return table((f"tau minus `{differences[0]['first']}`", *trees), rows, file)


def loss_ahead(file: str) -> str:
    """Return agreement by distance along held-back text, and differences to the first loss, from research.losses."""
    heads = [record for record in records(file) if record["record"] == "ahead"]
    rows = []
    for record in heads:
        own = [f"{100 * share:.1f}" for share in record["hits"]]
        more = [
            "{:+.1f} ({:+.1f} to {:+.1f})".format(*(100 * each for each in (share, *interval)))
            for share, interval in zip(record["more"], record["more_interval"], strict=True)
        ]
        rows.append([code(record["loss"]), *own])
        if record is not heads[0]:
            rows.append([f"minus {code(heads[0]['loss'])}", *more])
    return table(
        ("agreement in %", *(f"{n} ahead" for n in range(1, len(heads[0]["hits"]) + 1))), rows, file
    )


def loss_ranks_beside(file: str) -> str:
    """Return differences to the first loss by rank, on the same texts, from research.losses."""
    differences = [
        record for record in records(file) if record["record"] == "beside" and "by_rank" in record
    ]
    rows = [
        [code(record["loss"]), called, *(_signed(rank, what, 100, 1) for rank in record["by_rank"])]
        for record in differences
        for what, called in RANKED.items()
    ]
    header = (f"minus `{differences[0]['first']}`", "in percentage points")
    return table(
        (*header, *(f"rank {rank['rank']}" for rank in differences[0]["by_rank"])), rows, file
    )


def _signed(record: Record, name: str, scale: float, digits: int) -> str:
    """Return a difference and its interval."""
    value, low, high = (
        f"{scale * each:+.{digits}f}" for each in (record[name], *record[f"{name}_interval"])
    )
    return f"{value} ({low} to {high})"


def served(file: str, head: str) -> str:
    """Return best children of accepted nodes by the rank of the node, in percent, from research.calibration."""
    by_way: dict[tuple[str, str], dict[int, Record]] = {}
    for record in records(file):
        if record["record"] == "served" and record["head"] == head:
            by_way.setdefault((record["head"], record["sampling"]), {})[record["behind"]] = record
    last = max(behind for by_rank in by_way.values() for behind in by_rank)
    rows = []
    for (_, sampling), by_rank in by_way.items():
        for label, first, second in (
            ("accuracy / stated", "accuracy", "stated"),
            ("error / chance", "error", "chance"),
        ):
            pairs = [
                (by_rank[n][first], by_rank[n][second]) if n in by_rank else None
                for n in range(last + 1)
            ]
            cells = [
                f"{100 * pair[0]:.1f} / {100 * pair[1]:.1f}" if pair else NOTHING for pair in pairs
            ]
            rows.append([sampling, label, *cells])
    header = (
        "sampling",
        "in %",
        "the root",
        *(f"rank {n}" for n in range(1, last)),
        f"{last} and above",
    )
    return table(header, rows, file)


def _bounded(record: Record, name: str, digits: int) -> tuple[str, str]:
    low, high = record[f"{name}_interval"]
    return number(record, name, digits), f"{low:.{digits}f} to {high:.{digits}f}"


def accepted(*files_and_labels: str) -> str:
    """Return the acceptance length by set; a file of one method, from bench.policies, precedes its label."""
    files, labels = files_and_labels[::2], files_and_labels[1::2]
    rows = []
    for file, label in zip(files, labels, strict=True):
        tau = {name: number(record, "tau", 2) for (_, name), record in summaries(file).items()}
        rows.append([label, *(tau[name] for name in SETS)])
    return table(("", *SETS.values()), rows, *files)


TABLES: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        *(shapes, learning, ranks, served),
        *(
            accepted,
            loss_ranks_beside,
            loss_acceptance,
            loss_acceptance_beside,
            loss_ahead,
        ),
    )
}
