"""The command: a model and its head in, the large ones and what they were made of out."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import research.inflate
from bench import provenance
from bench.arguments import add_arguments
from research.inflate import Inflated, inflate
from research.inflate.shape import Shape, parse_shape
from specengine import checkpoints as models
from specengine.checkpoints import eagle as checkpoints, embedded


def main(arguments: list[str] | None = None) -> None:
    summary = research.inflate.__doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m research.inflate", description=summary)
    parser.add_argument(
        "--shape",
        type=parse_shape,
        required=True,
        help="8b or sizes, see research/inflate/shape.py",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="the model; FOLDER/head: its head"
    )
    add_arguments(parser, "model", "dtype", "device")
    parser.add_argument(
        "--draft", type=Path, help="folder of its EAGLE head; default: the one that ships for it"
    )
    parser.add_argument("--extra-tokens", default="copies", choices=["copies", "silent"])
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    args = parser.parse_args(arguments)

    path = models.resolve(args.model)
    draft = args.draft or embedded.draft_head(path)
    head = None if draft is None else checkpoints.load_head(draft)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", trust_remote_code=False)
    config, state = (None, None) if head is None else (head.config, head.state)
    inflated = inflate(
        model,
        config,
        state,
        args.shape,
        getattr(torch, args.dtype),
        args.device,
        extra_tokens=args.extra_tokens,
        seed=args.seed,
    )
    _save(inflated, args.out, path, "official" if head is None else head.dialect.layout)
    _note(args.out / "provenance.json", args.shape, path, draft)
    count = sum(parameter.numel() for parameter in inflated.model.parameters())
    print(f"{args.out}: {count / 1e9:.3f} B parameters", file=sys.stderr)


def _save(inflated: Inflated, folder: Path, source: str, layout: str) -> None:
    inflated.model.save_pretrained(folder)
    if any((Path(source) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(folder)
    if inflated.head_config is not None and inflated.head_state is not None:
        checkpoints.save_head(
            inflated.head_config,
            inflated.head_state,
            folder / "head",
            layout,
            verifier=checkpoints.Verifier(Path(folder).name),
        )


def _note(path: Path, shape: Shape, model: str, draft: Path | None) -> None:
    made = {
        "model": Path(model).name,
        "draft": None if draft is None else Path(draft).name,
        "shape": asdict(shape),
    }
    path.write_text(
        json.dumps(provenance.provenance() | {"record": "inflated", **made}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
