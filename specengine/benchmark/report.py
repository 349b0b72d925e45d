"""Tables of a run, by way and by set, with differences and latencies; and a plot of speeds, prompt by prompt."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specengine.benchmark.records import NOTHING, Record, Table, number
from specengine.benchmark.summaries import ALL, VERDICTS, differences, quartiles, speeds, summaries
from specengine.errors import require_input
from specengine.trace.pictures import COLOURS, MARKERS, write_figure

Columns = Mapping[str, Callable[[Record], str]]  # by header, the cell of a summary


def tables(records: Sequence[Record], set_: str = ALL) -> list[Table]:
    """Return tables of the prompts that are done: every way on `set_`, their differences over all sets, every set, and
    the ways that did not run."""
    all_summaries = summaries(records)
    title = f"{'All sets' if set_ == ALL else set_}; {about(records)}"
    ways = {record["way"]: record for record in all_summaries if record["set"] == set_}
    drawn = [
        Table(
            "ways", title, ("way", *COLUMNS), rows_of(ways, zip(ways, ways, strict=True), COLUMNS)
        ),
        difference_table(records),
        latency_table(ways),
        set_table(
            all_summaries, "By set [prompts]: speed over plain decoding, median (quartiles)", spread
        ),
        not_run_table(records),
    ]
    return [table for table in drawn if table.rows]


def source(name: str, records: Sequence[Record]) -> str:
    """Return the origin of the figures of the file `name`, in a line."""
    origin = next((record for record in records if record["record"] == "provenance"), None)
    if origin is None:
        return f"`{name}`"
    line = f"`{name}`: `{origin['command']}` at {origin['commit'] or origin['specengine']}, {origin['date']}, on "
    stops = sum(record["record"] == "resumed" for record in records)
    return f"{line}{origin['device']}" + (f"; stopped and resumed {stops} times" if stops else "")


def rows_of(
    by_way: Mapping[str, Record], labels: Iterable[tuple[str, str]], columns: Columns
) -> list[list[str]]:
    """Return a row per (way, label) whose way has a summary in `by_way`, which is by way."""
    return [
        [label, *(cell(by_way[way]) for cell in columns.values())]
        for way, label in labels
        if way in by_way
    ]


def set_table(all_summaries: Sequence[Record], title: str, cell: Callable[[Record], str]) -> Table:
    """Return a row per way with the cell of each set's summary; no rows where there is one set alone."""
    cells = {(record["way"], record["set"]): record for record in all_summaries}
    sets = [name for name in dict.fromkeys(set_ for _, set_ in cells) if name != ALL]
    prompts = {record["set"]: record["prompts"] for record in all_summaries}
    ways = list(dict.fromkeys(way for way, _ in cells)) if len(sets) > 1 else []
    rows = [
        [way, *(cell(cells[way, set_]) if (way, set_) in cells else NOTHING for set_ in sets)]
        for way in ways
    ]
    return Table("sets", title, ("way", *(f"{set_} [{prompts[set_]}]" for set_ in sets)), rows)


def difference_table(records: Sequence[Record]) -> Table:
    """Return a table of the ways by speed; no rows without two ways, two prompts and times."""
    all_differences = differences(records)
    fastest = all_differences[0]["way"] if all_differences else ""
    rows = [
        [record["way"], *(_apart(record, name) for name in ("over_fastest", "over_next"))]
        for record in all_differences
    ]
    title = (
        "All sets, apart: tokens/s over a faster way's "
        "(95 % interval over prompts; with 1 in it, neither is faster)"
    )
    return Table("differences", title, ("way", f"over {fastest}", "over the row above"), rows)


def _apart(record: Record, name: str) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*record[name]) if name in record else NOTHING


def latency_table(ways: Mapping[str, Record]) -> Table:
    """Return a table of times as a client sees them, of the ways that tell when their first token was there."""
    names = {
        "first_token": "ms to the first token",
        "between_tokens": "ms between tokens",
        "answer": "ms per answer",
    }
    rows = [
        [
            way,
            *(_percentiles(record["latency"].get(name)) for name in names),
            number(record, "per_user", 1),
        ]
        for way, record in ways.items()
        if "latency" in record
    ]
    return Table(
        "latency", "Latency: p50, p90, p99", ("way", *names.values(), "tokens/s per user"), rows
    )


def _percentiles(values: Sequence[float] | None) -> str:
    return NOTHING if values is None else ", ".join(f"{value:.1f}" for value in values)


def not_run_table(records: Sequence[Record]) -> Table:
    """Return a table of the ways that did not run, with the reasons."""
    rows = [
        [
            r["way"],
            "fault" if r["fault"] else "cannot run",
            r["reason"].replace("|", "/").replace("\n", " "),
        ]
        for r in records
        if r["record"] == "not run"
    ]
    return Table("not-run", "Not run", ("way", "", "reason"), rows)


def spread(record: Record) -> str:
    """Return the median of a summary's speeds over plain decoding, and the quartiles around it."""
    if "speed_quartiles" not in record:
        return NOTHING
    low, middle, high = record["speed_quartiles"]
    return f"{middle:.2f} ({low:.2f} to {high:.2f})" if record["prompts"] > 1 else f"{middle:.2f}"


def share(record: Record, name: str) -> str:
    return f"{100 * record[name]:.1f} %" if name in record else NOTHING


def about(records: Sequence[Record]) -> str:
    """Return the model or the draft, the precision, and how much was asked, for a title."""
    settings = next((record for record in records if record["record"] == "settings"), {})
    model = next((record for record in records if record["record"] == "model"), {})
    rows = {(record["set"], record["id"]) for record in records if record["record"] == "row"}
    if model:
        named = [f"{model['name']}, {model['dtype']}, {model['backend']}"]
    else:
        named = [
            f"{settings[name]}, {settings['dtype']}"
            for name in ("draft", "model")
            if name in settings
        ][:1]
    named += ["strict"] if settings.get("strict") else []
    named.append(f"{len(rows)} of {settings.get('prompts', len(rows))} prompts")
    if "rounds" in settings:
        named.append(f"{settings['rounds']} round{'s' * (settings['rounds'] != 1)}")
    if "temperature" in settings:
        named.append(
            f"temperature {settings['temperature']:g}, {settings['max_new_tokens']} tokens"
        )
    return "; ".join(named)


def _verdicts(verdict: str) -> Callable[[Record], str]:
    return lambda record: str(record["verdicts"][verdict]) if "verdicts" in record else NOTHING


COLUMNS: Columns = {  # quartiles are those of prompts; the last ones count prompts by their worst verdict
    "tokens/s": lambda record: number(record, "tokens_per_second", 1),
    "speed: median (quartiles)": spread,
    "mean": lambda record: number(record, "speed_mean", 2),
    "rounds apart": lambda record: share(record, "rounds_apart"),
    "tau": lambda record: number(record, "tau", 2),
    "delta": lambda record: number(record, "delta", 2),
    **{verdict: _verdicts(verdict) for verdict in VERDICTS},
}


STYLE = {"font.size": 10}
SPREAD = 0.6  # of the places of sets within a way's band


def draw_speeds(records: Sequence[Record], file: Path) -> None:
    """Write an SVG file. InputError as of `write_figure`, and without a row to draw."""
    by_way = speeds_by_way(records)
    require_input(
        f"plot: the records have no speed over plain decoding to draw into {file.name}",
        bool(by_way),
    )
    write_figure(file, "plot", lambda figure: _fill(figure, by_way), STYLE, layout="constrained")


def speeds_by_way(records: Sequence[Record]) -> dict[str, dict[str, list[float]]]:
    """Return speeds over plain decoding by way and set, for ways that ran to the end, without plain decoding."""
    rows = [record for record in records if record["record"] == "row"]
    dropped = {record["way"] for record in records if record["record"] == "not run"}
    plain = {(row["set"], row["id"]): row for row in rows if row["way"] == "plain"}
    by_way: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        base = plain.get((row["set"], row["id"]))
        if row["way"] not in ("plain", *dropped) and base is not None and "seconds" in row:
            by_way.setdefault(row["way"], {}).setdefault(row["set"], []).extend(
                speeds([row], [base])
            )
    return by_way


def _fill(figure: Any, by_way: dict[str, dict[str, list[float]]]) -> None:
    sets = list(dict.fromkeys(set_ for by_set in by_way.values() for set_ in by_set))
    figure.set_size_inches(8.0, 1.6 + 0.55 * len(by_way))
    axes = figure.subplots()
    for place, by_set in enumerate(by_way.values()):
        low, middle, high = quartiles(
            [speed for speeds_of_set in by_set.values() for speed in speeds_of_set]
        )
        axes.barh(place, high - low, left=low, height=0.8, color="0.88", zorder=1)
        axes.plot(
            [middle, middle], [place - 0.4, place + 0.4], color="0.2", linewidth=1.6, zorder=2
        )
    for index, set_ in enumerate(sets):
        within = SPREAD * ((index + 0.5) / len(sets) - 0.5)
        points = [
            (speed, place + within)
            for place, speeds_of_set in enumerate(by_way.values())
            for speed in speeds_of_set.get(set_, [])
        ]
        look = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        axes.scatter(*zip(*points, strict=True), s=18, label=set_, zorder=3, **look)
    axes.axvline(1.0, color="k", linewidth=0.8)
    axes.set_yticks(range(len(by_way)), list(by_way))
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set(
        xlabel="tokens per second over plain decoding's; bars are quartiles, lines medians, points prompts"
    )
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=min(6, len(sets)), fontsize=9, frameon=False)
