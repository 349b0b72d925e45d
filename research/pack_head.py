"""python -m research.pack_head HEAD OUT: store a draft head's matrices as blocks of a few bits each.

So a head for a model of some billion parameters stays a small package. `load_head` reads such folders. With `--keep`
its vocabulary keeps that many tokens, those that the answers of a text have most often.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file
from torch import Tensor

from specengine.checkpoints.eagle import load_head
from specengine.errors import InputError
from specengine.files import atomic
from specengine.train.text.corpus import Corpus

KINDS = ("Q8_0", "Q5_0", "Q4_0")
VOCABULARY = "lm_head.weight"
BESIDE = ("config.json", "target.json", "README.md")  # copied as they are


def packed(tensor: Tensor, kind: str) -> Tensor:
    """Return a matrix as blocks of a kind of ggml, uint8 [rows, bytes]; InputError where rows are no whole blocks."""
    if tensor.ndim != 2 or tensor.shape[1] % 32:
        raise InputError(
            f"head: a matrix of shape {list(tensor.shape)}, accepted rows of a multiple of 32 numbers"
        )
    blocks = quants.quantize(tensor.float().numpy(), GGMLQuantizationType[kind])
    return torch.from_numpy(np.ascontiguousarray(blocks))


def keep_tokens(head: Path, out: Path, corpus: Corpus, count: int) -> Path:
    """Write the head in folder `head` into `out` with the `count` drafted tokens that answers have most often.

    Return `out`; InputError where the head drafts fewer.
    """
    state = load_file(head / "model.safetensors")
    ids = state["d2t"] + torch.arange(len(state["d2t"]))
    if not 0 < count <= len(ids):
        raise InputError(f"keep: got {count}, accepted 1 to {len(ids)}, the tokens that it drafts")
    frequencies = Counter(token for text in corpus for token in text.tokens[text.answers].tolist())
    occurrences = torch.tensor([frequencies[token] for token in ids.tolist()])
    most_frequent = occurrences.argsort(descending=True, stable=True)[:count]
    kept = most_frequent.sort().values  # in the order of their ids
    state[VOCABULARY] = state[VOCABULARY][kept].contiguous()
    state["d2t"] = ids[kept] - torch.arange(count)
    state["t2d"] = torch.zeros_like(state["t2d"]).index_fill_(0, ids[kept], 1)
    config = json.loads((head / "config.json").read_text()) | {"draft_vocab_size": count}
    out.mkdir(parents=True, exist_ok=True)
    with atomic(out / "model.safetensors") as file:
        save_file(state, file, metadata={"format": "pt"})
    for name in BESIDE:
        if (head / name).is_file():
            shutil.copyfile(head / name, out / name)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return out


def pack_head(head: Path, out: Path, *, matrices: str = "Q5_0", vocabulary: str = "Q4_0") -> Path:
    """Write the head in folder `head` into `out`: matrices of its layer as one kind, rows of its vocabulary as another.

    Norms and biases stay as they are. Return `out`; CheckpointError where `head` is none.
    """
    load_head(head)
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in load_file(head / "model.safetensors").items():
        if tensor.ndim == 2:
            kind = vocabulary if name == VOCABULARY else matrices
            tensors[f"{name}.{kind}"] = packed(tensor, kind)
        else:
            tensors[name] = tensor
    with atomic(out / "model.safetensors") as file:
        save_file(tensors, file, metadata={"format": "pt"})
    for name in BESIDE:
        if (head / name).is_file():
            shutil.copyfile(head / name, out / name)
    load_head(out)
    return out


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("head", type=Path, metavar="HEAD")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--matrices", choices=KINDS, default="Q5_0")
    parser.add_argument("--vocabulary", choices=KINDS, default="Q4_0")
    parser.add_argument("--keep", type=int, metavar="N", help="tokens of the vocabulary")
    parser.add_argument("--data", type=Path, metavar="TEXT", help="whose answers choose them")
    given = parser.parse_args(argv)
    if (given.keep is None) != (given.data is None):
        parser.error("--keep and --data are needed together")
    with tempfile.TemporaryDirectory() as folder:
        head = given.head
        if given.keep is not None:
            head = keep_tokens(head, Path(folder), Corpus.open(given.data), given.keep)
        out = pack_head(head, given.out, matrices=given.matrices, vocabulary=given.vocabulary)
    print(f"{out}: {(out / 'model.safetensors').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
