"""A folder of a draft that learns from use: a bounded ring of texts as token ids, and the head learnt from them.

    use.json          whose texts these are: the target, the head that learning began with; and the head in use by name
    texts/*.json      {"tokens": [...], "prompt": count}, the oldest first by name
    heads/N/          the head in use, as any other
    rounds.jsonl      a line per round of learning

Every file appears whole or not at all, and `use.json` names a head only once it is whole.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import torch
from torch import Tensor

from specengine.checkpoints import eagle, likeness
from specengine.errors import InputError, require_input, require_intact, restating
from specengine.files import read_object, write_whole, writing
from specengine.models.eagle import EagleConfig
from specengine.models.kv_cache import LanguageModel

FILE, FORMAT = "use.json", 1
MAX_TEXTS, MAX_TOKENS = 512, 1 << 18  # of the ring; together some 2 MB
MAX_TEXT_TOKENS = 2048  # tokens of a text; of a longer one its end is kept
HELD_BACK = 5  # one text in this many is never trained on


class UsedText(NamedTuple):
    """Hold a prompt and its answer. name: of its file; tokens: of both; prompt: how many of them are the prompt's."""

    name: str
    tokens: list[int]
    prompt: int

    @property
    def held_back(self) -> bool:
        """Return whether it is for comparing heads alone: by its content, so that it is where it comes again, too."""
        return int(self.name[-8:], 16) % HELD_BACK == 0


class Learnt:
    """Keep the folder of one target and one head that learning begins with.

    base: the head as eagle.load_head returns it. InputError where the folder was begun with
    others, or is none of these.
    """

    def __init__(
        self, folder: str | os.PathLike[str], lm: LanguageModel, name: str, base: eagle.Checkpoint
    ) -> None:
        self.folder, self.base = (folder := Path(folder)), base
        self.made: tuple[int, Any] = 0, None  # the draft of a stamp
        begun: dict[str, Any] = {
            "format": FORMAT,
            "target": likeness.record(lm, Path(name).name),
            "base": digest(base.state),
        }
        with writing(folder, "learn"):
            if not (folder / FILE).exists():
                require_input(
                    f"learn: {folder} holds other files; name a new or an empty folder",
                    not (folder.is_dir() and any(folder.iterdir())),
                )
                # it will hold what this user wrote
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._write({**begun, "head": None})
            record = self.read()
        require_input(
            f"learn: {folder / FILE} has another format than {FORMAT}; name another folder",
            record.get("format") == FORMAT and "target" in record,
        )
        was, now = record["target"], begun["target"]
        require_input(
            f"learn: {folder} was begun for {was.get('model')!r}, got {now['model']!r}",
            {**was, "model": ""} == {**now, "model": ""},
        )
        require_input(
            f"learn: {folder} was begun with another head than {name}'s draft; name another folder",
            record.get("base") == begun["base"],
        )

    def read(self) -> dict[str, Any]:
        """Return the record. InputError where it is damaged."""
        with restating(
            ValueError,
            lambda error: InputError(
                f"learn: {self.folder / FILE} is damaged ({error}); name another folder"
            ),
        ):
            return read_object(self.folder / FILE)

    def _write(self, record: Mapping[str, Any]) -> None:
        write_whole(self.folder / FILE, json.dumps(record) + "\n")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from learning in this folder meanwhile. InputError where one does."""
        lock = filelock.FileLock(self.folder / "learning.lock")
        with restating(
            filelock.Timeout,
            lambda _: InputError(f"learn: another process is learning in {self.folder}"),
        ):
            lease = lock.acquire(timeout=0)
        with lease:
            yield

    # ---- texts

    def add(self, prompt: list[int], answer: list[int]) -> None:
        """Put a text into the ring, unless it is there, and drop the oldest beyond its bounds. Raises OSError."""
        tokens = [*prompt, *answer][-MAX_TEXT_TOKENS:]
        content = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
        texts = self.folder / "texts"
        if len(tokens) == len(answer) or not answer or any(texts.glob(f"*-{content}.json")):
            return
        write_whole(
            texts / f"{time.time_ns():020d}-{content}.json",
            json.dumps({"tokens": tokens, "prompt": len(tokens) - len(answer)}),
        )
        total = 0
        for number, text in enumerate(reversed(self.texts())):
            total += len(text.tokens)
            if number >= MAX_TEXTS or total > MAX_TOKENS:
                (texts / f"{text.name}.json").unlink(missing_ok=True)

    def texts(self) -> list[UsedText]:
        """Return the ring, the oldest first, without files that cannot be read."""
        texts = []
        for file in sorted((self.folder / "texts").glob("[0-9]*.json")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                read = read_object(file)
                texts.append(
                    UsedText(
                        file.stem, [int(token) for token in read["tokens"]], int(read["prompt"])
                    )
                )
        return texts

    # ---- rounds

    def note(self, record: Mapping[str, Any]) -> None:
        """Append the record of a round."""
        with (self.folder / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def rounds(self) -> list[dict[str, Any]]:
        """Return the records of all rounds, without a line that a kill has cut."""
        file, rounds = self.folder / "rounds.jsonl", []
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            with contextlib.suppress(ValueError):
                rounds.append(json.loads(line))
        return rounds

    # ---- the head

    @property
    def stamp(self) -> int:
        """Return a number that is another one once another head is in use."""
        return (self.folder / FILE).stat().st_mtime_ns

    def head(self) -> eagle.Checkpoint:
        """Return the head in use, at first the one that learning began with. CheckpointError where it is damaged."""
        record = self.read()
        if (name := record.get("head")) is None:
            return self.base
        head = eagle.load_head(self.folder / "heads" / str(name))
        shape, expected = (
            replace(config, temperatures=()) for config in (head.config, self.base.config)
        )
        require_intact(
            f"learn: {self.folder / 'heads' / str(name)} is not the head that was learnt; delete "
            f"{self.folder} to begin again",
            digest(head.state) == record.get("digest") and shape == expected,
        )
        return head

    def swap(self, config: EagleConfig, state: Mapping[str, Tensor], **notes: Any) -> None:
        """Put another head into use. notes: for the record."""
        record, heads = self.read(), self.folder / "heads"
        name = str(1 + int(record.get("head") or 0))
        eagle.save_head(config, state, heads / name)
        self._write(
            {**record, "head": name, "digest": digest(eagle.load_head(heads / name).state), **notes}
        )
        for old in heads.iterdir():
            if int(old.name) < int(name) - 1:  # an engine may be reading the last one
                shutil.rmtree(old)


def digest(state: Mapping[str, Tensor]) -> str:
    """Return a hash of a head's tensors, by their names."""
    sha = hashlib.sha256()
    for name in sorted(state):
        sha.update(name.encode())
        sha.update(state[name].detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return sha.hexdigest()[:32]
