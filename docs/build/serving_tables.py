"""Tables of servers and devices: load, storms, memory, replicas, and what ran on a GPU."""

from __future__ import annotations

from collections.abc import Callable

from docs.build.results import records, table
from specengine.benchmark.records import NOTHING, Record, number
from specengine.benchmark.summaries import ALL


def load(*files: str) -> str:
    """Return the figures of bench.load by number of clients: one per run, in the order of the files."""
    runs: dict[int, list[Record]] = {}
    for file in files:
        for r in records(file):
            if r["record"] == "load":
                runs.setdefault(r["clients"], []).append(r)

    def each(rows: list[Record], name: str, digits: int) -> str:
        return ", ".join(f"{r[name]:.{digits}f}" for r in rows)

    rows = [
        [
            str(clients),
            f"{sum(r['answered'] for r in own)} of {sum(r['answered'] + r['failed'] for r in own)}",
            each(own, "tokens_per_second", 0),
            each(own, "first_token_ms_p50", 0),
            each(own, "answer_s_p50", 2),
            each(own, "answer_s_p95", 2),
        ]
        for clients, own in sorted(runs.items())
    ]
    header = (
        "clients",
        "answered",
        "tokens/s",
        "ms to the first token, p50",
        "s per answer, p50",
        "s per answer, p95",
    )
    return table(header, rows, *files)


def servers(file: str) -> str:
    """Return the figures of bench.servers: each server by number of clients."""
    names = ("first_token_ms", "between_tokens_ms", "longest_pause_ms")
    rows = [
        [
            r["way"],
            str(r["clients"]),
            number(r, "tokens_per_second", 0),
            *(f"{r[f'{name}_p50']:.0f}, {r[f'{name}_p95']:.0f}" for name in names),
        ]
        for r in records(file)
        if r["record"] == "server"
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


def device(file: str) -> str:
    """Return ways on a CUDA device, from bench.graphs: times behind the first token."""
    found = {r["way"]: r for r in records(file) if r["record"] == "summary" and r["set"] == ALL}
    body = []
    for way, r in found.items():
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
    """Return a case of each kernel and what torch has beside it, from bench.kernels; by a cold cache where measured."""
    found = [r for r in records(file) if "median" in r and "way" in r]
    cold = {r["record"] for r in found if r["cache"] == "cold"}
    rows = [
        [
            r["record"],
            KERNEL_CASES[r["record"]].format(**r),
            r["way"],
            f"{r['median']:.1f}",
            f"{max(r['bytes_us'], r['operations_us']):.1f}",
        ]
        for r in found
        if r["cache"] == "cold" or r["record"] not in cold
    ]
    return table(("kernel", "case", "way", "us", "floor, us"), rows, file)


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
    """Return the runs of the tests on a device, and the failures by reason."""
    rows, found = list[list[str]](), records(file)
    for run in (r for r in found if r["record"] == "tests"):
        reasons = [
            r["reason"] for r in found if r["record"] == "failed test" and r["run"] == run["run"]
        ]
        said = "; ".join(f"{reasons.count(reason)}: {reason}" for reason in dict.fromkeys(reasons))
        rows.append([str(run["run"]), run["device"], str(run["passed"]), str(run["skipped"]), said])
    return table(("run", "card", "passed", "skipped", "failed"), rows, file)


def storm(file: str) -> str:
    """Return the outcomes of crowds of clients, from tests.serve.storm."""
    rows = [
        [
            "half misbehave" if r["rude"] else "all well-behaved",
            str(r["clients"]),
            *(str(r.get(outcome, 0)) for outcome in ("right", "error", "left", "refused", "lost")),
        ]
        for r in records(file)
        if r["record"] == "storm"
    ]
    header = (
        "crowd",
        "clients",
        "right answers",
        "expected errors",
        "disconnected",
        "asked to retry",
        "lost",
    )
    return table(header, rows, file)


def memory(file: str) -> str:
    """Return the memory of the server's process by number of requests, from tests.serve.storm."""
    rows = [
        [f"{r['requests']:,}", f"{r['resident_mb']:.1f}"]
        for r in records(file)
        if r["record"] == "memory"
    ]
    return table(("requests", "MB resident"), rows, file)


def hostile(file: str) -> str:
    """Return how long another user waits beside bodies that take long to read, from tests.serve.hostile."""
    rows = [
        [
            r["body"],
            number(r, "megabytes", 2),
            str(r["status"]),
            number(r, "seconds", 2),
            number(r, "longest", 2),
        ]
        for r in records(file)
        if r["record"] == "hostile"
    ]
    return table(
        ("body", "MB", "status", "its own answer, s", "the other user waits longer by, s"),
        rows,
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
        *(load, servers, replicas, split, storm, hostile, memory),
        *(device, device_kernels, device_layers, device_tests),
    )
}
