"""Write the development prompts, which commands in bench/results call `prompts`, from a clone of EAGLE's repository.

They are the first, third, fifth ... of the 80 questions of six sets. Others wrote them, so they are not in this
repository. The digest says whether they are the ones behind the committed files.

    git clone https://github.com/SafeAILab/EAGLE
    python -m bench.prompts EAGLE prompts
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from specengine.benchmark.workloads import digest, entry_of, read
from specengine.errors import SpecEngineError
from specengine.files import lines_of

CLONE, COMMIT = "https://github.com/SafeAILab/EAGLE", "cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b"
FOLDERS = {  # of eagle/data in the clone, by set
    "alpaca": "alpaca",
    "cnn_dm": "sum",
    "gsm8k": "gsm8k",
    "humaneval": "humaneval",
    "mt_bench": "mt_bench",
    "qa": "qa",
}
FIELDS = ("question_id", "category", "turns")
EVERY = 2
DIGEST = "34254c4d147c2a6a"  # of all 240


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clone", type=Path, help=f"of {CLONE}; these were read at {COMMIT[:12]}")
    parser.add_argument("folder", type=Path, help="to write, a .jsonl file for each set")
    args = parser.parse_args(argv)
    try:
        found = write(args.clone, args.folder)
    except SpecEngineError as error:
        print(f"bench.prompts: error: {error}", file=sys.stderr)
        return 2
    if found != DIGEST:
        print(
            f"bench.prompts: error: these are not the prompts of the committed files: {found}, not {DIGEST}; check out "
            f"{COMMIT} in {args.clone}",
            file=sys.stderr,
        )
        return 1
    print(f"{args.folder}: the development prompts, {found}")
    return 0


def write(clone: Path, folder: Path) -> str:
    """Write the sets into `folder` and return the digest of all their prompts. InputError for unreadable files."""
    texts = {}
    for name, source in FOLDERS.items():
        file = clone / "eagle" / "data" / source / "question.jsonl"
        lines = [line for line in lines_of(file) if line.strip()][::EVERY]
        entries = [
            entry_of(line, f"{file}, question {EVERY * number + 1}")
            for number, line in enumerate(lines)
        ]
        kept = [{key: entry[key] for key in FIELDS if key in entry} for entry in entries]
        texts[name] = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in kept)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return digest(read([folder]))


if __name__ == "__main__":
    sys.exit(main())
