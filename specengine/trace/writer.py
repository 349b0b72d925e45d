"""Write a trace while an engine generates."""

import json
import math
import platform
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

import specengine
from specengine.files import writing
from specengine.request.text import Decoder
from specengine.trace.records import FORMAT, TracedCycle

if TYPE_CHECKING:
    from specengine.engine import Engine, TextGeneration
    from specengine.records import Cycle, StreamPiece

DIGITS = 6  # significant digits of a probability
FACTS = ("split", "captured")  # of Seconds, which are no times


class TraceWriter(AbstractContextManager["TraceWriter"]):
    """Writes the cycles of an engine to `file`, one record at a time. Replaces an existing file.

    Each record is written completely before the generation continues. So the trace of a killed run can be read.
    """

    def __init__(self, file: str | Path, engine: "Engine") -> None:
        self._texts = Texts(engine.tokenizer)
        self._name = file = Path(file)
        with writing(file, "trace"):
            self._file = file.open("w", encoding="ascii", newline="\n")
        config = getattr(getattr(engine.target, "model", None), "config", None)
        name = str(getattr(config, "_name_or_path", "") or type(engine.target).__name__)
        self._write(
            "trace",
            format=FORMAT,
            model=Path(name).name if Path(name).is_dir() else name,  # without the machine's folders
            draft=engine.drafter.name if engine.drafter is not None else "none",
            policy=repr(engine.policy) if engine.policy is not None else "plain",
            versions={
                "specengine": specengine.__version__,
                "torch": str(torch.__version__),
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
        )

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def follow(self, generation: "TextGeneration") -> "Generator[StreamPiece, None, None]":
        """Yield the pieces of `generation`, each written to the file first.

        Closing this iterator, or an error, ends the query in the file without a finish reason.
        """
        self._write(
            "query",
            prompt=self._texts.decode(generation.prompt),
            prompt_tokens=generation.prompt,
            seed=generation.options.seed,
        )
        generation.answer.origins.wanted = True
        try:
            for piece in generation:
                self._put(cycle_record(piece.cycle, piece.text, self._texts))
                yield piece
        finally:
            reason = generation.result.finish_reason if generation.result else None
            self._write("end", finish_reason=reason, stats=generation.stats.to_dict())

    def _write(self, record: str, **fields: Any) -> None:
        self._put({"record": record, **fields})

    def _put(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, allow_nan=False, separators=(",", ":"))
        with writing(self._name, "trace"):
            self._file.write(line + "\n")
            self._file.flush()


class Texts:
    """The text of each token by itself, special tokens included: they are nodes like any other."""

    def __init__(self, tokenizer: Any) -> None:
        self.decode = Decoder(tokenizer, special=True)
        self._text_of = cache(lambda token: self.decode([token]))

    def __call__(self, token: int) -> str:
        return self._text_of(token)


def cycle_record(cycle: "Cycle", text: str, text_of: Callable[[int], str]) -> dict[str, Any]:
    """Return the trace record of a cycle that added `text` to the answer. text_of: returns the text of a token."""
    return {"record": "cycle", **vars(traced(cycle, text, text_of))}


def traced(cycle: "Cycle", text: str, text_of: Callable[[int], str]) -> TracedCycle:
    """Return the traced cycle of a cycle that added `text` to the answer. text_of: returns the text of a token."""
    grown = cycle.tree if cycle.grown is None else cycle.grown
    kept_ids = list(range(len(grown))) if cycle.kept is None else cycle.kept.tolist()
    tokens = grown.tokens.tolist()
    return TracedCycle(
        tokens=tokens,
        texts=[text_of(token) for token in tokens],
        parents=grown.parents.tolist(),
        probabilities=_probabilities(grown.log_probs),
        path_probabilities=_probabilities(grown.path_log_probs),
        kept=kept_ids,
        accepted=[kept_ids[node] for node in cycle.agreed],
        committed=cycle.tokens,
        committed_texts=[text_of(token) for token in cycle.tokens],
        text=text,
        passes=int(grown.passes),
        seconds={
            step: round(seconds, 7)
            for step, seconds in asdict(cycle.seconds).items()
            if step not in FACTS
        },
        origins=cycle.origins,
    )


def _probabilities(log_probs: torch.Tensor) -> list[float]:
    """Return probabilities with DIGITS significant digits. NaN becomes zero, as in ops; none exceeds 1 by rounding."""
    finite = (-math.inf if math.isnan(value) else min(value, 0.0) for value in log_probs.tolist())
    return [float(f"{math.exp(value):.{DIGITS}g}") for value in finite]
