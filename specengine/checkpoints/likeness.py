"""Find the head that was made for a model or for what it was fine-tuned from, by rows of the embedding table.

A head's folder may hold `target.json`: the sizes of its target and some rows of the target's embeddings. A fine-tune
moves these rows by little, and appends others after them; the rows of a model that was trained apart have nothing in
common with them, whatever it is called. So neither names nor tokenizers are compared: equal rows are equal ids.
"""

import base64
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specengine.checkpoints import embedded
from specengine.files import cache_dir, read_object, write_whole

if TYPE_CHECKING:
    from torch import Tensor

    from specengine.models.kv_cache import LanguageModel

FILE = "target.json"
ROWS, COLUMNS = 32, 64  # of the embedding table, at even distances and from the left
NEAR = 0.9  # median cosine of the rows


class KnownHead(NamedTuple):
    """A head with a record of its target.

    name    what users call it as a draft
    target  the name of the model that it was made for
    """

    name: str
    folder: Path
    target: str


class Match(NamedTuple):
    """A head that fits a model; likeness: median cosine of the rows; appended: tokens that the model has beyond."""

    head: KnownHead
    likeness: float
    appended: int

    @property
    def note(self) -> str:
        """Return why it was chosen, and how to choose another, for the user."""
        more = f" and {self.appended} appended tokens" if self.appended else ""
        return (
            f"draft: {self.head.name} was chosen, as this model has the embeddings of {self.head.target} "
            f"({100 * self.likeness:.1f} % alike){more}; draft='recycling' or a path chooses another, and specengine "
            "bench compares them"
        )


def write(folder: Path, lm: "LanguageModel", name: str) -> None:
    """Write the record of a head's target next to it."""
    write_whole(folder / FILE, json.dumps(record(lm, name), indent=1) + "\n")


def record(lm: "LanguageModel", name: str) -> dict[str, Any]:
    """Return the sizes of a model and some rows of its embeddings, under this name."""
    count = min(ROWS, lm.vocab_size)
    # at even distances, without both ends
    ids = [(2 * place + 1) * lm.vocab_size // (2 * count) for place in range(count)]
    return {
        "model": name,
        "hidden_size": int(lm.config.hidden_size),
        "layers": int(lm.layers),
        "vocab_size": int(lm.vocab_size),
        "tokens": ids,
        "embeddings": base64.b64encode(_rows(lm, ids).numpy().tobytes()).decode(),
    }


def known() -> Iterator[KnownHead]:
    """Yield the heads with a record: those that ship, then those in `heads` of the cache folder."""
    folders = {name: embedded.shipped_head(name) for name in embedded.HEADS}
    with contextlib.suppress(OSError):  # a cache that cannot be read has none
        folders |= {str(folder): folder for folder in sorted((cache_dir() / "heads").glob("*"))}
    for name, folder in folders.items():
        with contextlib.suppress(OSError, ValueError, KeyError):  # one without a record
            if folder is not None:
                yield KnownHead(name, folder, str(read_object(folder / FILE)["model"]))


def find(lm: "LanguageModel") -> Match | None:
    """Return the known head whose target is most like a model, None where none is near."""
    matches = [match for head in known() if (match := _match(head, lm)) is not None]
    return max(matches, key=lambda match: match.likeness, default=None)


def _match(head: KnownHead, lm: "LanguageModel") -> Match | None:
    import torch  # here, as `specengine list` needs the names alone

    from specengine.models.eagle import MAX_APPENDED

    try:
        record = read_object(head.folder / FILE)
        sizes = tuple(int(record[name]) for name in ("hidden_size", "layers", "vocab_size"))
        ids, stored = (
            [int(token) for token in record["tokens"]],
            base64.b64decode(record["embeddings"]),
        )
        rows = torch.frombuffer(bytearray(stored), dtype=torch.int8).reshape(len(ids), -1)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None
    appended = lm.vocab_size - sizes[2]
    has = int(getattr(lm.config, "hidden_size", 0)), int(lm.layers)
    if (
        has != sizes[:2]
        or not 0 <= appended <= MAX_APPENDED
        or not ids
        or max(ids) >= sizes[2]
        or min(ids) < 0
    ):
        return None
    target_rows = _rows(lm, ids)
    if target_rows.shape != rows.shape:
        return None
    likeness = float(torch.cosine_similarity(target_rows.float(), rows.float(), dim=1).median())
    return Match(head, likeness, appended) if likeness >= NEAR else None


def _rows(lm: "LanguageModel", ids: list[int]) -> "Tensor":
    """Return the first columns of these tokens' embeddings, int8 [rows, columns], each row scaled to its largest."""
    import torch

    rows = (
        lm.embed(torch.tensor(ids, dtype=torch.int64, device=lm.device))
        .detach()[:, :COLUMNS]
        .float()
        .cpu()
    )
    rows = rows.nan_to_num(0.0, 0.0, 0.0)
    return (127 * rows / rows.abs().amax(1, keepdim=True).clamp(min=1e-30)).round().to(torch.int8)
