"""Options shared by the commands of bench/ and research/."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from specengine.cli.parser import flag

OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"help": "default: the embedded model"},
    "draft": {"help": "default: the model's best"},
    "prompts": {
        "type": Path,
        "help": "folder of .jsonl prompt sets; default: a few built-in prompts",
    },
    "per_set": {"type": int, "default": 5, "help": "prompts of each set"},
    "max_new_tokens": {"type": int, "default": 128, "help": "tokens of an answer"},
    "rounds": {"type": int, "default": 3},
    "dtype": {"default": "bfloat16", "choices": ["float32", "bfloat16", "float16"]},
    "device": {"default": "cuda" if torch.cuda.is_available() else "cpu"},
    "out": {"type": Path, "metavar": "FILE", "help": "write a result file"},
}


def add_arguments(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """Add options of OPTIONS by name. Keywords set other defaults."""
    for name in [*names, *defaults]:
        default = {"default": defaults[name]} if name in defaults else {}
        parser.add_argument(flag(name), **OPTIONS[name] | default)
