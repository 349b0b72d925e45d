"""Fields that constrain what an answer may look like."""

from __future__ import annotations

from typing import Any

from specengine.generation.sampling import Processor
from specengine.serve.problems import Problem
from specengine.serve.requests import Sampling


def processors(request: Sampling, tokenizer: Any) -> list[Processor]:
    """Logits processors that keep to `response_format` or `grammar`; Problem for what cannot be kept to."""
    if request.grammar is not None:
        raise Problem(400, "grammar: not supported by this server", "grammar", "unsupported_field")
    if request.response_format is not None and request.response_format != {"type": "text"}:
        raise Problem(400, 'response_format: accepted is {"type": "text"}', "response_format", "unsupported_field")
    return []
