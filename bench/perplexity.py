"""Perplexity of a model on a text, for each way of running it on a CPU: int8 weights, packed blocks and others.

python -m bench.perplexity --text FILE [--tokens 16384] [--window 512] [--way "native int8"] [--gguf FILE ...]
    [--llama ENV/bin/python] [--out FILE]

The text's first `--tokens` tokens, without special tokens, are cut into windows that do not overlap; what is left over
is not used. Every window is one forward that starts fresh, its first token is not scored, each other one is given all
before it in the window. Perplexity is exp of the mean negative log-likelihood of all scored tokens. All ways read the
token ids of the model's own tokenizer and run as the engine loads them. The float32 way computes in float32 with the
numbers of the file: where these are bfloat16, as the default model's are, it has the other ways' weights. `--llama`
adds llama.cpp on the GGUF file, by a Python that has llama-cpp-python.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from bench import provenance
from bench.arguments import add_arguments
from bench.cpu.ways import KINDS, Given, Unavailable
from specengine.checkpoints import embedded
from specengine.errors import InputError, NumericalError

REFERENCE = "huggingface float32"  # what the nats of single tokens are compared with
LLAMA, LLAMA_SCRIPT = "llama.cpp", Path(__file__).with_name("cpu") / "llama_nats.py"
BASES = (REFERENCE, "huggingface", "native", "native gguf")  # what perplexities are divided by
# kind, dtype
WAYS = {REFERENCE: ("huggingface", "float32"), **{kind: (kind, "bfloat16") for kind in KINDS}}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.perplexity", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--text", type=Path, required=True, help="a UTF-8 file")
    parser.add_argument(
        "--tokens", type=int, default=16384, help="of the text, at most; default: 16384"
    )
    parser.add_argument(
        "--window", type=int, default=512, help="tokens that are run together; default: 512"
    )
    parser.add_argument(
        "--way", choices=WAYS, action="append", help="only this one; may be repeated"
    )
    add_arguments(parser, "model", "out")
    parser.add_argument(
        "--gguf",
        type=Path,
        nargs="+",
        default=[None],
        help="the same model as GGUF files; default: the embedded model's. All but the first run packed ways alone",
    )
    parser.add_argument(
        "--llama", metavar="PYTHON", help="also run llama.cpp, by a Python that has its binding"
    )
    args = parser.parse_args(arguments)
    given = Given(args.model, args.gguf[0])
    try:
        text, tokenizer = (
            _text(args),
            AutoTokenizer.from_pretrained(given.folder, trust_remote_code=False),
        )
        windows = cut(
            tokenizer(text, add_special_tokens=False)["input_ids"][: args.tokens], args.window
        )
    except InputError as error:
        parser.error(str(error))
    source = {"text": args.text.name, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    ways = [way for way in WAYS if not args.way or way in args.way] + [LLAMA] * bool(args.llama)
    packed = [way for way in ways if way == LLAMA or KINDS[WAYS[way][0]].packed_file]
    records = itertools.chain(
        measured(given, ways, windows, tokenizer, args.llama),
        *(
            measured(Given(args.model, file), packed, windows, tokenizer, args.llama)
            for file in args.gguf[1:]
        ),
    )
    provenance.show(
        (r | (source if r["record"] == "perplexity" else {}) for r in records), args.out
    )
    return 0


def measured(
    given: Given, ways: list[str], windows: Tensor, tokenizer: Any, llama: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a record per method, in the order of WAYS, with comparisons to the reference if that was run."""
    found: dict[str, Tensor] = {}
    for way in ways:
        try:
            found[way], backend = _nats_of(given, way, windows, tokenizer, llama)
        except Unavailable as error:
            yield {"record": "skipped", "way": way, "reason": str(error)}
            continue
        mean = found[way].mean().item()
        record = {
            "record": "perplexity",
            "way": way,
            **(
                {"file": given.gguf.name}
                if given.gguf and (way == LLAMA or KINDS[WAYS[way][0]].packed_file)
                else {}
            ),
            "window": windows.shape[1],
            "tokens": found[way].numel(),  # scored
            "perplexity": round(math.exp(mean), 4),
            "nats_per_token": round(mean, 6),
            "over": {
                base: round(math.exp(mean - found[base].mean().item()), 5)
                for base in BASES
                if base in found
            },
            "over_error": {
                base: _error(found[way] - found[base]) for base in BASES if base in found
            },
            "backend": backend,
        }
        if REFERENCE in found and way != REFERENCE:
            apart = (found[way] - found[REFERENCE]).abs()
            record["nats_from_float32"] = {
                "mean": round(apart.mean().item(), 6),
                "max": round(apart.max().item(), 6),
            }
        yield record


def _error(apart: Tensor) -> float:
    """Return the standard error of a mean difference in nats, which is that of the quotient of two perplexities."""
    return round(apart.flatten().std().item() / math.sqrt(apart.numel()), 5)


def _nats_of(
    given: Given, way: str, windows: Tensor, tokenizer: Any, llama: str | None
) -> tuple[Tensor, str]:
    if way != LLAMA:
        target = _target(given, way, windows, tokenizer)
        return nats(target, windows), target.backend
    command = [
        str(llama),
        str(LLAMA_SCRIPT),
        str(given.gguf or embedded.gguf()),
        "--threads",
        str(os.cpu_count() or 1),
    ]
    try:
        done = subprocess.run(
            command, input=json.dumps(windows.tolist()), capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise Unavailable(f"{LLAMA}: {said[-1]}") from error
    answer = json.loads(done.stdout)
    return torch.tensor(
        answer["nats"], dtype=torch.float64
    ), f"{LLAMA} (llama-cpp-python {answer['version']})"


def cut(ids: list[int], window: int) -> Tensor:
    """Cut token ids into windows, int64 [windows, window]."""
    if len(ids) < window:
        raise InputError(
            f"--text: got {len(ids)} tokens, accepted: a text of at least {window} (--window)"
        )
    count = len(ids) // window
    return torch.tensor(ids[: count * window]).view(count, window)


@torch.inference_mode()
def nats(target: Any, windows: Tensor) -> Tensor:
    """Return negative log-likelihoods, float64 [windows, window - 1]. Raise NumericalError for NaN or infinity."""
    rows = windows.shape[1] - 1
    cache = target.lm.new_cache(rows)
    found = torch.empty(windows.shape[0], rows, dtype=torch.float64)
    with target.running():
        for i, window in enumerate(windows):
            cache.crop(0)
            logits, _ = target.lm.extend(cache, window[:-1].tolist(), logits="all")
            found[i] = cross_entropy(logits.float(), window[1:], reduction="none")
            if not found[i].isfinite().all():
                raise NumericalError(
                    f"window {i}: {target.backend} in {target.dtype} gives a likelihood of NaN or 0"
                )
    return found


def _text(args: argparse.Namespace) -> str:
    if args.window < 2:
        raise InputError(f"--window: got {args.window}, accepted: 2 or more")
    if args.tokens < args.window:
        raise InputError(f"--tokens: got {args.tokens}, accepted: {args.window} (--window) or more")
    try:
        return args.text.read_bytes().decode()  # newlines as they are
    except (OSError, UnicodeError) as error:
        raise InputError(f"--text: {error}, accepted: a UTF-8 file") from error


def _target(given: Given, way: str, windows: Tensor, tokenizer: Any) -> Any:
    kind, dtype = WAYS[way]
    target = replace(given, dtype=dtype).only(kind, tokenizer).target
    if windows.shape[1] > target.max_context or windows.max() >= target.vocab_size:
        raise Unavailable(
            f"it holds {target.max_context} tokens and knows {target.vocab_size}; the windows have {windows.shape[1]}, "
            f"the largest token is {windows.max()}"
        )
    return target


if __name__ == "__main__":
    sys.exit(main())
