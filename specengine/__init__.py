"""Tree speculative decoding: generate faster with a causal language model without changing its output."""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers know it: importing typing takes as long as the rest
if TYPE_CHECKING:
    from typing import Any, overload

    from specengine.drafters import Drafter
    from specengine.engine import Engine, Session
    from specengine.errors import SpecEngineError
    from specengine.policies import TreePolicy
    from specengine.records import Cycle, GenerationResult, Stats, StreamPiece
    from specengine.request.prompts import Prompt

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

# Where the names above come from. They are imported when they are asked for: torch and transformers take seconds.
_MODULES = {
    "Cycle": "records",
    "Drafter": "drafters",
    "Engine": "engine",
    "GenerationResult": "records",
    "Session": "engine",
    "SpecEngineError": "errors",
    "Stats": "records",
    "StreamPiece": "records",
    "TreePolicy": "policies",
}


if TYPE_CHECKING:

    @overload
    def generate(
        prompt: Prompt | None = None,
        model: Any = None,
        draft: Any = None,
        policy: Any = None,
        *,
        return_dict_in_generate: bool,
        **options: Any,
    ) -> Any: ...

    @overload
    def generate(
        prompt: Prompt | None = None,
        model: Any = None,
        draft: Any = None,
        policy: Any = None,
        **options: Any,
    ) -> GenerationResult: ...


def generate(
    prompt: Prompt | None = None,
    model: Any = None,
    draft: Any = None,
    policy: Any = None,
    **options: Any,
) -> Any:
    """Answer one prompt: `Engine.from_pretrained(...).generate(...)` in one call.

    options are those of both. The models are loaded anew by each call; keep an Engine to answer several prompts.
    """
    from specengine.engine import Engine
    from specengine.options import LoadOptions

    loading = {name: options.pop(name) for name in LoadOptions.names() if name in options}
    return Engine.from_pretrained(model, draft, policy, **loading).generate(prompt, **options)


def __getattr__(name: str) -> Any:
    import importlib.util

    if name in _MODULES:
        return getattr(importlib.import_module(f"specengine.{_MODULES[name]}"), name)
    if not name.startswith("_") and importlib.util.find_spec(f"specengine.{name}") is not None:
        # specengine.policies.names(), after the import alone
        return importlib.import_module(f"specengine.{name}")
    raise AttributeError(f"module 'specengine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
