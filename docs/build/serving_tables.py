"""Tables of servers and devices: storms, hostile bodies, replicas, and what ran on a GPU."""

from __future__ import annotations

from collections.abc import Callable

from docs.build.results import records, table
from specengine.benchmark.records import NOTHING, Record, number
from specengine.benchmark.summaries import ALL


def servers(file: str, *clients: str) -> str:
    """Return the figures of bench.servers: each server by these numbers of clients."""
    names = ("first_token_ms", "between_tokens_ms", "longest_pause_ms")
    rows = [
        [
            r["way"],
            str(r["clients"]),
            number(r, "tokens_per_second", 0),
            *(f"{r[f'{name}_p50']:.0f}, {r[f'{name}_p95']:.0f}" for name in names),
        ]
        for r in records(file)
        if r["record"] == "server" and str(r["clients"]) in clients
    ]
    header = (
        "server",
        "clients",
        "tokens/s",
        "ms to the first token",
        "ms between tokens",
        "ms, longest pause",
    )
    return table(header, rows, file)


def lanes(file: str) -> str:
    """Return the speed over plain decoding one by one, by answers at once, from bench.cpu.lanes."""
    speeds = {
        (r["way"], r["lanes"]): r["over_plain_alone"]
        for r in records(file)
        if r["record"] == "lanes"
    }
    counts = list(dict.fromkeys(count for _, count in speeds))
    rows = [
        [way, *(f"{speeds[way, count]:.1f}" for count in counts)]
        for way in dict.fromkeys(way for way, _ in speeds)
    ]
    return table(("answers at once", *map(str, counts)), rows, file)


def device(file: str) -> str:
    """Return ways on a CUDA device, from bench.graphs: times behind the first token."""
    found = {r["way"]: r for r in records(file) if r["record"] == "summary" and r["set"] == ALL}
    body = []
    for way, r in found.items():
        if way == "plain":
            continue  # it is captured, too
        between = r["latency"]["between_tokens"][0] if "latency" in r else None
        plain = found["plain, graphs"]["latency"]["between_tokens"][0]
        parts = r.get("median_ms", {})
        body.append(
            [
                way,
                NOTHING if between is None else f"{between:.2f}",
                NOTHING if between is None else f"{plain / between:.2f}",
                number(r, "tau", 2),
                number(r, "delta", 1),
                " + ".join(f"{parts[name]:.1f}" for name in ("draft", "verify"))
                if parts
                else NOTHING,
                f"{r['prompts'] - r['diverging']} of {r['prompts']}",
            ]
        )
    counts = ("tau", "delta", "cycle, ms: draft + rest", "equal to plain")
    return table(("way", "ms between tokens", "over captured plain", *counts), body, file)


KERNEL_CASES = {
    "attention": "{nodes} nodes, {prefix} slots",
    "selection": "{rows} x {columns}",
    "compaction": "{kept} nodes, {layers} layers",
    "choice": "{nodes} x {columns}",
    "search": "budget {budget}, batch {batch}",
}


def device_kernels(file: str) -> str:
    """Return each kernel and the fastest other way, from bench.kernels; by a cold cache where measured."""
    found = [r for r in records(file) if "median" in r and "way" in r]
    cold = {r["record"] for r in found if r["cache"] == "cold"}
    cases: dict[tuple[str, str], dict[str, Record]] = {}
    for r in found:
        if r["cache"] == "cold" or r["record"] not in cold:
            case = KERNEL_CASES[r["record"]].format(**r)
            cases.setdefault((r["record"], case), {})[r["way"]] = r
    rows = []
    for (kernel, case), ways in cases.items():
        own = ways["specengine"]
        others = [r for way, r in ways.items() if not way.startswith("specengine")]
        best = min(others, key=lambda r: float(r["median"]))
        floor = max(own["bytes_us"], own["operations_us"])
        times = (f"{own['median']:.1f}", f"{best['median']:.1f} ({best['way']})", f"{floor:.1f}")
        rows.append([kernel, case, *times])
    return table(("kernel", "case", "us", "the fastest other, us", "floor, us"), rows, file)


def device_layers(file: str) -> str:
    """Return the time of a decoder layer by way and rows, and its kernels at one row, from bench.layers."""
    found = [r for r in records(file) if r["record"] == "layers"]
    forwards = list(dict.fromkeys(r["forward"] for r in found))
    by_place = {(r["way"], r["forward"]): r for r in found}
    rows = [
        [
            way,
            *(f"{by_place[way, rows]['us of a layer']:.0f}" for rows in forwards),
            f"{by_place[way, forwards[0]]['kernels of a layer']:.0f}",
        ]
        for way in dict.fromkeys(r["way"] for r in found)
    ]
    return table(("layers, us", *forwards, "kernels of a layer, 1 row"), rows, file)


def device_tests(file: str) -> str:
    """Return a sentence on the last run of the tests on a device."""
    last = [r for r in records(file) if r["record"] == "tests"][-1]
    return (
        f"The last run of the device tests: {last['passed']} passed, {last['skipped']} skipped, {last['failed']} "
        f"failed\n({last['device']}, `{file}`)."
    )


def storm(*files_and_labels: str) -> str:
    """Return the sums over crowds of clients, from tests.serve.storm; a file precedes what it ran with."""
    outcomes = ("right", "error", "left", "refused", "lost")
    files, labels = files_and_labels[::2], files_and_labels[1::2]
    rows = []
    for file, label in zip(files, labels, strict=True):
        crowds: dict[bool, list[Record]] = {}
        for r in records(file):
            if r["record"] == "storm":
                crowds.setdefault(r["rude"], []).append(r)
        for is_rude, runs in crowds.items():
            crowd = "half misbehave" if is_rude else "all well-behaved"
            sums = (str(sum(r.get(outcome, 0) for r in runs)) for outcome in outcomes)
            rows.append([label, crowd, str(sum(r["clients"] for r in runs)), *sums])
    header = (
        "server",
        "crowd",
        "clients",
        "right answers",
        "expected errors",
        "disconnected",
        "asked to retry",
        "lost",
    )
    return table(header, rows, *files)


def hostile(file: str) -> str:
    """Return how long another user waits for others' large bodies, from tests.serve.hostile.

    Bodies that are answered have a row each; of those that are refused, the slowest stands for all.
    """
    bodies = [r for r in records(file) if r["record"] == "hostile"]
    refused = [r for r in bodies if r["status"] != 200]
    names = ("megabytes", "seconds", "longest")
    worst = [f"{max(r[name] for r in refused):.2f}" for name in names]
    answered = [
        [r["body"], *(number(r, name, 2) for name in names)] for r in bodies if r["status"] == 200
    ]
    return table(
        ("body", "MB", "its own answer, s", "the other user waits longer by, s"),
        [*answered, [f"{len(refused)} that are refused, at most", *worst]],
        file,
    )


def replicas(file: str) -> str:
    """Return the throughput of replicas that share the cores of a machine."""
    rows = [
        [
            str(record["replicas"]),
            str(record["threads"]),
            number(record, "tokens_per_second", 0),
            number(record, "per_replica", 0),
            number(record, "over_first", 2),
            number(record, "median_answer_s", 2),
        ]
        for record in records(file)
        if record["record"] == "row"
    ]
    header = (
        "replicas",
        "threads each",
        "tokens/s",
        "per replica",
        "over the first row",
        "seconds per answer",
    )
    return table(header, rows, file)


def split(file: str) -> str:
    """Return tokens per second of a model in one process and split over ranks."""
    rows = [
        [
            record["way"],
            number(record, "plain_tokens_per_second", 1),
            number(record, "auto_tokens_per_second", 1),
            str(record["same_as_plain"]),
        ]
        for record in records(file)
        if record["record"] == "row"
    ]
    return table(("", "tokens/s, plain", "`auto`", "answers equal to plain"), rows, file)


TABLES: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        *(servers, lanes, replicas, split, storm, hostile),
        *(device, device_kernels, device_layers, device_tests),
    )
}
