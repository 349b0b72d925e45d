"""Options of writing training text."""

from __future__ import annotations

from dataclasses import dataclass

from specengine.errors import require, require_minimum


@dataclass(frozen=True)
class SynthesisOptions:
    """Options of writing text.

    tokens        total number of tokens, the users' turns included, 1 or more
    rows          conversations per shard, written at the same time, 1 or more
    length        maximum number of tokens of a conversation, 16 or more
    seed          seed of the sampling, 0 or more; the same seed writes the same text on the same machine
    prompt_share  share of the conversations that begin with one of the prompts, if there are any, 0 to 1
    """

    tokens: int = 1_000_000
    rows: int = 128
    length: int = 512
    seed: int = 0
    prompt_share: float = 0.5

    def __post_init__(self) -> None:
        require_minimum(self, tokens=1, rows=1, length=16, seed=0)
        require("prompt_share", self.prompt_share, "0 to 1", 0 <= self.prompt_share <= 1)
