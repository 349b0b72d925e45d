"""Write one conversation at a time with an engine that drafts. Faster with few threads and long prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specengine.train.text.conversations import MIN_P, Format, Row, Writer
from specengine.train.text.corpus import Text
from specengine.train.text.options import SynthesisOptions

if TYPE_CHECKING:
    from specengine.engine import Engine

# Neutral values, whatever the model's own config has.
NEUTRAL = {"top_k": 0, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}


class Speculative(Writer):
    """Writes conversations as the engine answers its users, with its own draft and policy."""

    def __init__(self, engine: Engine, form: Format, options: SynthesisOptions) -> None:
        super().__init__(form, options, engine.tokenizer, engine.target.vocab_size)
        self.engine = engine
        unnamed = range(len(engine.tokenizer), engine.target.vocab_size)  # rows of the head without a token
        self._suppressed = [i for i in [*self.no_words, *unnamed] if i not in form.stops]

    def _texts(self, shard: int, prompts: list[list[list[int]]]) -> list[Text]:
        generator = torch.Generator().manual_seed(self.seed(shard))
        rows = [self.row(number, shard, prompts, generator) for number in range(self.options.rows)]
        for number, row in enumerate(rows):
            self._fill(row, self.seed(shard) * self.options.rows + number)
        return [row.text() for row in rows]

    def _fill(self, row: Row, seed: int) -> None:
        length = self.options.length
        while not row.done and len(row.tokens) < length:
            if row.forced:
                row.take()
                continue
            for token in self._drawn(row, seed):
                row.advance(token, length - len(row.tokens))

    def _drawn(self, row: Row, seed: int) -> list[int]:
        """Return tokens until the turn ends, the temperature changes, or the row is full."""
        options: dict[str, Any] = {
            "max_new_tokens": min(row.max_words, self.options.length - len(row.tokens)),
            "temperature": row.temperature_now,
            "eos_token_id": sorted(self.form.stops),
            **NEUTRAL,
        }
        if row.temperature_now:
            options |= {"seed": seed, "min_p": MIN_P}
        if row.asks:  # a user's turn has at least one word, and no markup in it
            options |= {"suppress_tokens": self._suppressed, "min_new_tokens": 1}
        return self.engine.generate(row.tokens, **options).token_ids
