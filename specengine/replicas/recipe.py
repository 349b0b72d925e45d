"""How an engine is made, as it is sent to the process that makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from specengine.costs import measured
from specengine.engine import Engine
from specengine.errors import UnsupportedModelError

# Of costs.measured.identity: what changes the time that an answer takes and none of its tokens.
_SPEED_ALONE = ("threads", "packed")


@dataclass(frozen=True)
class Recipe:
    """The arguments of Engine.from_pretrained.

    threads         of torch and the forward; None leaves them
    prefer_strict   load with `strict` where the model can, without where it cannot
    """

    model: str | None = None
    draft: str | None = None
    policy: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    threads: int | None = None
    prefer_strict: bool = False

    def load(self) -> Engine:
        """The engine, ready to answer: what its policy reads of costs is measured, if need be."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        engine = self._loaded()
        if engine.policy is not None and engine.policy.plan().reads_costs:
            measured.find(engine.target, engine.drafter)
        return engine

    def _loaded(self) -> Engine:
        options = dict(self.options)
        if self.prefer_strict and not options.get("strict"):
            try:
                return Engine.from_pretrained(self.model, self.draft, self.policy, **options | {"strict": True})
            except UnsupportedModelError as error:
                if not str(error).startswith("strict:"):
                    raise
        return Engine.from_pretrained(self.model, self.draft, self.policy, **options)


def facts(engine: Engine) -> dict[str, Any]:
    """What was loaded, as far as answers may depend on it: JSON-ready, the same for engines that answer alike."""
    found = measured.identity(engine.target, engine.drafter)
    return {name: value for name, value in found.items() if name not in _SPEED_ALONE}


def keeps_bits(engine: Engine) -> bool:
    """Whether a token's logits have the same bits in every tree, so that no near-tie can turn."""
    return engine.target.backend.startswith("native") or getattr(engine.target, "strict_rows", 0) > 0
