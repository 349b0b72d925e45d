"""Print verdicts by name; with --write, those of all, into verdicts.json."""

from __future__ import annotations

import json
import sys

import torch
import transformers

from tests.sweep.serving import TABLE, summary, verdict_of
from tests.sweep.small import NAMES

if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    names = [name for name in sys.argv[1:] if name != "--write"]
    found = {}
    for name in names or sorted(NAMES):
        found[name] = verdict_of(name)
        print(f"{name}: {found[name]}", flush=True)
    print(dict(summary(found)))
    if "--write" in sys.argv and not names:
        table = {"transformers": transformers.__version__, "verdicts": found}
        TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
