"""Keep the trees of a target on the disk, so that a head learns from them without growing them in every step (TALF)."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from specengine.errors import InputError, require
from specengine.files import atomic
from specengine.train.draft.options import Loss
from specengine.train.draft.teacher import Reading, TargetLayer, Teacher, _top
from specengine.train.draft.training import Batch
from specengine.train.text.corpus import Contents, Corpus, ShardFolder, Text

TOGETHER = 64  # trees of a text that grow at once: none sees another's nodes, but all are compared
ROWS = 256  # that the target's head reads at a time
POSITION_BYTES, NODE_BYTES, LABEL_BYTES = 4, 5, 6  # on the disk, about


class TreeFolder(ShardFolder):
    """The target's trees after the answers' tokens of each batch of a training; a shard for each batch.

    A shard has `roots`, int32 [batch, positions], positions of the trees' roots in order, padded behind the text's end;
    `tokens` and `parents`, int32 and uint8 [depths, batch, positions, width]; and `ids` and `logs`, int32 and float16
    [depths, batch, positions, width, best], the likeliest next tokens of each node, best first, and their
    log-probabilities.
    """

    FORMAT = 1
    MANIFEST = "trees.json"
    contents = Contents("trees", "the target's trees", "the trees in {} were", "grow the trees")

    def file(self, tokens: Tensor) -> Path:
        """Return the shard of a batch, int64 [batch, length]: a batch is known by its tokens."""
        digest = hashlib.sha256(tokens.cpu().numpy().tobytes()).hexdigest()[:16]
        return self.folder / f"{tokens.shape[0]}x{tokens.shape[1]}-{digest}.safetensors"


class KeptTrees(Teacher):
    """A target whose trees were grown before, and are read from a folder instead.

    A layer's `states` are the likeliest tokens and their log-probabilities, float32 [..., 2 * best], and `labels` reads
    them as well as states of the target. What is not among the likeliest has no part in a label.
    """

    def __init__(self, model: PreTrainedModel, feature_ids: tuple[int, ...], folder: TreeFolder):
        super().__init__(model, feature_ids)
        self.folder = folder
        self.best = min(folder.manifest["best"], self.head.weight.shape[0])
        odd = 2 * self.best != self.head.weight.shape[1]
        require("best", self.best, "a number other than half the hidden size", odd)

    def read_batch(
        self, tokens: Tensor, pieces: Sequence[Sequence[Text]], *, keep_cache: bool = False
    ) -> Reading:
        """Run whole sequences; the trees need no cache."""
        return self.read(tokens)

    def grow(
        self, reading: Reading, anchors: Tensor, *, width: int, depths: int
    ) -> list[TargetLayer]:
        """Return the trees that were kept; InputError if there are none after these positions, or others."""
        file, device = self.folder.file(reading.tokens), anchors.device
        manifest = self.folder.manifest
        asked, kept = (width, depths), (manifest["width"], manifest["depths"])
        require(
            "loss",
            f"{asked}",
            f"{kept}, the width and depths of {self.folder.folder}",
            asked == kept,
        )
        if not file.is_file():
            raise InputError(f"trees: {self.folder.folder} has none of this text; grow them first")
        shard = self.folder.load(file, dict)
        roots = shard["roots"].to(device).long()
        where = torch.searchsorted(roots, anchors).clamp(max=roots.shape[1] - 1)
        known = roots.gather(1, where) == anchors
        if not bool((known | (anchors == 1)).all()):  # 1 stands for none
            raise InputError(f"trees: {file} has none after some of these positions; delete it")
        rows = torch.arange(len(where), dtype=torch.int64, device=device)[:, None]
        tokens, parents, ids, logs = (
            shard[name].to(device)[:, rows, where] for name in ("tokens", "parents", "ids", "logs")
        )
        top = torch.cat([ids.float(), logs.float()], dim=-1)
        return list(map(TargetLayer, tokens.long(), parents.long(), top))

    def labels(self, states: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the labels of states of the target, or of the likeliest tokens of a node."""
        if states.shape[-1] != 2 * self.best:
            return super().labels(states, ids)
        size = self.head.weight.shape[0]
        best, probabilities = labels_of_likeliest(states, ids, size)
        return best, probabilities.to(self.model.dtype)


def labels_of_likeliest(top: Tensor, ids: Tensor | None, size: int) -> tuple[Tensor, Tensor]:
    """Return labels as Teacher.labels does, of the likeliest tokens alone.

    top: float32 [rows, 2 * best], token ids and their log-probabilities; ids: of the draft's vocabulary; None: 0 to
    `size`.
    """
    tokens, logs = top.chunk(2, dim=-1)
    vocabulary = torch.arange(size, dtype=torch.int64, device=top.device) if ids is None else ids
    columns = torch.searchsorted(vocabulary, tokens.long()).clamp(max=len(vocabulary) - 1)
    inside = vocabulary[columns] == tokens
    chances = logs.exp() * inside
    shares = chances / chances.sum(dim=-1, keepdim=True).clamp(min=1e-30)
    probabilities = torch.zeros(len(top), len(vocabulary), dtype=torch.float32, device=top.device)
    probabilities.scatter_add_(1, columns, shares)
    return torch.where(inside[:, 0], columns[:, 0], -1), probabilities


def folder_for(corpus: Corpus, loss: Loss, best: int, target: str) -> TreeFolder:
    """Return the folder beside the text's shards that keeps the trees of this loss, of this target.

    Raise InputError for a loss without a tree, or one that compares hidden states, which are not kept.
    """
    require("loss", loss.name, "one with a tree of 1 to 255 nodes a depth", 0 < loss.width < 256)
    require("steps", loss.steps, "2 or more, for a tree", loss.steps > 1)
    require(
        "regression",
        loss.regression,
        "0, as trees are kept without hidden states",
        not loss.regression,
    )
    require("best", best, "1 or more", best >= 1)
    settings = {"target": target, "width": loss.width, "depths": loss.steps - 1, "best": best}
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
    return TreeFolder.create(corpus.folder / "trees" / digest, settings)


def keep_trees(
    teacher: Teacher,
    folder: TreeFolder,
    batches: Sequence[Batch],
    gib: float,
    progress: Callable[[str], None] = print,
) -> float:
    """Grow the trees after all tokens of answers of these batches, those that are not kept yet. Return the GiB of all.

    Raise InputError if all take more than `gib`. What an interruption leaves is kept, and the same call goes on.
    """
    whole = sum(map(_bytes, [folder] * len(batches), batches)) / 2**30
    require(
        "gib",
        f"{gib:g}",
        f"{whole:.2f} or more for the trees of this text, or fewer `best`",
        whole <= gib,
    )
    missing = [batch for batch in batches if not folder.file(batch.tokens).is_file()]
    began = time.perf_counter()
    for number, batch in enumerate(missing, 1):
        tensors = _grown(teacher, folder.manifest, batch)
        with atomic(folder.file(batch.tokens)) as temporary:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
        if number % 20 == 0 or number == len(missing):
            left = (time.perf_counter() - began) / number * (len(missing) - number) / 60
            progress(
                f"trees of {number} of {len(missing)} batches, {whole:.2f} GiB in all: {left:.0f} min left"
            )
    return whole


def _bytes(folder: TreeFolder, batch: Batch) -> int:
    shape, most = folder.manifest, int(_rows(batch.answers).sum(dim=1).max())
    nodes = shape["depths"] * shape["width"]
    position = POSITION_BYTES + nodes * (NODE_BYTES + LABEL_BYTES * shape["best"])
    return len(batch.answers) * most * position


def _rows(answers: Tensor) -> Tensor:
    """Return which positions are roots of trees, bool [batch, length]: each before an answer's token but the first."""
    rows = torch.zeros_like(answers)
    rows[:, 1:-1] = answers[:, 2:]
    return rows


def _grown(teacher: Teacher, shape: Any, batch: Batch) -> dict[str, Tensor]:
    tokens, rows = batch.tokens.to(teacher.device), _rows(batch.answers).to(teacher.device)
    length = tokens.shape[1]
    places = torch.arange(length, dtype=torch.int64, device=tokens.device).expand(rows.shape)
    roots = places.masked_fill(~rows, length).sort(dim=1).values[:, : int(rows.sum(dim=1).max())]
    reading = teacher.read(tokens, keep_cache=True)
    parts = []
    for some in roots.clamp(max=length - 1).split(TOGETHER, dim=1):
        fresh = reading._replace(cache=copy.deepcopy(reading.cache))
        layers = teacher.grow(fresh, some, width=shape["width"], depths=shape["depths"])
        chances = [_likeliest(teacher, layer.states, shape["best"]) for layer in layers]
        stored = (
            (layer.tokens.int(), layer.parents.byte(), ids.int(), logs.half())
            for layer, (logs, ids) in zip(layers, chances, strict=True)
        )
        parts.append([torch.stack(values) for values in zip(*stored, strict=True)])
    whole = [torch.cat(some, dim=2).cpu() for some in zip(*parts, strict=True)]
    names = ("tokens", "parents", "ids", "logs")
    return {"roots": roots.int().cpu(), **dict(zip(names, whole, strict=True))}


@torch.no_grad()
def _likeliest(teacher: Teacher, states: Tensor, best: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and ids of the likeliest next tokens, [..., best]."""
    best = min(best, teacher.head.weight.shape[0])
    parts = [_top(teacher.head(rows).float(), best) for rows in states.flatten(0, -2).split(ROWS)]
    logs, ids = (
        torch.cat(some).view(*states.shape[:-1], best) for some in zip(*parts, strict=True)
    )
    return logs, ids
