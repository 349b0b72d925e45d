"""An engine whose process ends over one prompt."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

from specengine import Engine
from specengine.cli.given import Recipe

DEADLY = "this ends the process"


@dataclass(frozen=True)
class Deadly(Recipe):
    def load(self) -> Engine:
        engine = super().load()
        generate = engine.generate

        def deadly(prompt: Any, **options: Any) -> Any:
            if prompt == DEADLY:
                os.kill(os.getpid(), signal.SIGKILL)
            return generate(prompt, **options)

        engine.generate = deadly  # type: ignore[method-assign]
        return engine
