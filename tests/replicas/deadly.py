"""An engine whose process ends over one prompt."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

from specengine import Engine
from specengine.batch import answering
from specengine.cli.given import EngineArguments

DEADLY = "this ends the process"


@dataclass(frozen=True)
class Deadly(EngineArguments):
    def load(self) -> Engine:
        engine = super().load()
        follow = answering.TextGeneration

        def deadly(engine: Engine, prompt: Any, *given: Any, **options: Any) -> Any:
            if prompt == DEADLY:
                os.kill(os.getpid(), signal.SIGKILL)
            return follow(engine, prompt, *given, **options)

        answering.TextGeneration = deadly  # type: ignore[misc, assignment]
        return engine
