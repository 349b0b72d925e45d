"""python -m research.pack_head HEAD OUT: store a draft head's matrices as blocks of a few bits each.

So a head for a model of some billion parameters stays a small package. `load_head` reads such folders.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file
from torch import Tensor

from specengine.checkpoints.eagle import load_head
from specengine.errors import InputError
from specengine.files import atomic

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
    given = parser.parse_args(argv)
    out = pack_head(given.head, given.out, matrices=given.matrices, vocabulary=given.vocabulary)
    print(f"{out}: {(out / 'model.safetensors').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
