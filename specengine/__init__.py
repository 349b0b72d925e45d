"""specengine: tree speculative decoding that makes a language model answer faster without changing its answer."""

from __future__ import annotations

from typing import Any

from specengine.drafters import Drafter
from specengine.engine import Engine, Session
from specengine.errors import SpecEngineError
from specengine.generation.outputs import GenerationResult, StreamPiece
from specengine.generation.prompts import Prompt
from specengine.modeling.load_options import LoadOptions
from specengine.policies import TreePolicy
from specengine.records import Cycle, Stats

__all__ = [
    "Cycle",
    "Drafter",
    "Engine",
    "GenerationResult",
    "Session",
    "SpecEngineError",
    "Stats",
    "StreamPiece",
    "TreePolicy",
    "generate",
]
__version__ = "0.1.0"


def generate(prompt: Prompt, model: Any = None, draft: Any = None, policy: Any = None, **options: Any) -> Any:
    """Answer one prompt: `Engine.from_pretrained(...).generate(...)` in one call.

    options are those of both. The models are loaded anew by each call; keep an Engine to answer several prompts.
    """
    loading = {name: options.pop(name) for name in LoadOptions.names() if name in options}
    return Engine.from_pretrained(model, draft, policy, **loading).generate(prompt, **options)
