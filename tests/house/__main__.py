"""python -m tests.house [--write]: print the figures of the house beside their budgets; --write holds lower ones."""

from __future__ import annotations

import argparse
import json

from tests.house import figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="hold figures that have fallen; none rises"
    )
    options = parser.parse_args()
    measured, content = figures.measure(), json.loads(figures.TABLE.read_text(encoding="utf-8"))
    table = content["figures"]
    print(f"{'':40}{'119dda4':>9}{content['start']:>9}{'held':>9}{'now':>9}{'budget':>9}")
    for name in [*table, *(name for name in measured if name not in table)]:
        row = table.get(name, {})
        values = (
            row.get("survey"),
            row.get("start"),
            row.get("held"),
            measured.get(name),
            row.get("budget"),
        )
        print(f"{name:40}" + "".join(f"{'-' if value is None else value:>9}" for value in values))
    for line in figures.higher(measured, table):
        print(f"higher: {line}")
    if options.write:
        content["figures"] = figures.lowered(measured, table)
        figures.TABLE.write_text(figures.text(content), encoding="utf-8")


if __name__ == "__main__":
    main()
