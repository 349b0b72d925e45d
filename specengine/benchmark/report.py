"""Tables of a run: all ways over all sets, and by set."""

from __future__ import annotations

from collections.abc import Sequence

from specengine.benchmark.summaries import ALL, VERDICTS, summaries
from specengine.benchmark.tables import NOTHING, Record, Table, number


def tables(records: Sequence[Record], set_: str = ALL) -> list[Table]:
    """Of the prompts that are through: every way on `set_`, every set, and what took no part."""
    found = summaries(records)
    made = [way_table(records, found, set_), set_table(found), not_run_table(records)]
    return [table for table in made if table.rows]


def source(name: str, records: Sequence[Record]) -> str:
    """Where the figures of the file `name` come from, in a line."""
    origin = next((record for record in records if record["record"] == "provenance"), None)
    if origin is None:
        return f"`{name}`"
    line = f"`{name}`: `{origin['command']}` at {origin['commit'] or origin['specengine']}, {origin['date']}, on "
    stops = sum(record["record"] == "resumed" for record in records)
    return f"{line}{origin['device']}" + (f"; stopped and resumed {stops} times" if stops else "")


def way_table(records: Sequence[Record], found: Sequence[Record], set_: str = ALL) -> Table:
    """A row per way. Quartiles are those of prompts; the last columns count prompts by their worst verdict."""
    header = ("way", "tokens/s", "speed: median (quartiles)", "mean", "rounds apart", "tau", "delta", *VERDICTS)
    rows = [
        [
            record["way"],
            number(record, "tokens_per_second", 1),
            spread(record),
            number(record, "speed_mean", 2),
            f"{100 * record['rounds_apart']:.1f} %" if "rounds_apart" in record else NOTHING,
            number(record, "tau", 2),
            number(record, "delta", 2),
            *(str(record["verdicts"][verdict]) if "verdicts" in record else NOTHING for verdict in VERDICTS),
        ]
        for record in found
        if record["set"] == set_
    ]
    return Table("ways", f"{'All sets' if set_ == ALL else set_}; {_run(records)}", header, rows)


def set_table(found: Sequence[Record]) -> Table:
    """Speed over plain decoding of every way by set; none where there is one set alone."""
    cells = {(record["way"], record["set"]): record for record in found}
    sets = [name for name in dict.fromkeys(set_ for _, set_ in cells) if name != ALL]
    prompts = {record["set"]: record["prompts"] for record in found}
    ways = list(dict.fromkeys(way for way, _ in cells)) if len(sets) > 1 else []
    rows = [[way, *(spread(cells[way, set_]) if (way, set_) in cells else NOTHING for set_ in sets)] for way in ways]
    header = ("way", *(f"{set_} [{prompts[set_]}]" for set_ in sets))
    return Table("sets", "By set [prompts]: speed over plain decoding, median (quartiles)", header, rows)


def not_run_table(records: Sequence[Record]) -> Table:
    """What took no part, and why."""
    rows = [
        [r["way"], "fault" if r["fault"] else "cannot run", r["reason"].replace("|", "/").replace("\n", " ")]
        for r in records
        if r["record"] == "not run"
    ]
    return Table("not-run", "Not run", ("way", "", "reason"), rows)


def spread(record: Record) -> str:
    """The median of a summary's speeds over plain decoding, and the quartiles around it."""
    if "speed_quartiles" not in record:
        return NOTHING
    low, middle, high = record["speed_quartiles"]
    return f"{middle:.2f} ({low:.2f} to {high:.2f})" if record["prompts"] > 1 else f"{middle:.2f}"


def _run(records: Sequence[Record]) -> str:
    settings = next((record for record in records if record["record"] == "settings"), {})
    model = next((record for record in records if record["record"] == "model"), {})
    rows = {(record["set"], record["id"]) for record in records if record["record"] == "row"}
    named = [f"{model['name']}, {model['dtype']}, {model['backend']}"] if model else []
    named.append(f"{len(rows)} of {settings.get('prompts', len(rows))} prompts")
    if settings:
        named.append(f"{settings['rounds']} round{'s' * (settings['rounds'] != 1)}")
        named.append(f"temperature {settings['temperature']:g}, {settings['max_new_tokens']} tokens")
    return "; ".join(named)
