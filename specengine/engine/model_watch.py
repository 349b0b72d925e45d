"""Watching the models that an engine was handed over loaded: a changed model must not answer as the one it was."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from specengine.errors import UnsupportedModelError
from specengine.loading import Parts, Recipe
from specengine.models.kv_cache import LanguageModel


@dataclass
class ModelWatch:
    """The models of an engine's target and draft, and the recipe to make both anew; None where they were brought along.

    Models that were loaded here by name are watched too, but look for no changes of theirs.
    """

    models: tuple[LanguageModel, ...]
    recipe: Recipe | None = None

    def follow(self, tokenizer: Any) -> Parts | None:
        """Return new parts where more than numbers was changed, or None.

        tokenizer: of the engine, which new parts keep. UnsupportedModelError where the model has become one that cannot
        be run, or there is no recipe that makes the parts again.
        """
        try:
            for model in self.models:
                model.require_same()
        except UnsupportedModelError:
            if self.recipe is None or not self.recipe.again:
                raise
            options = replace(self.recipe.options, tokenizer=tokenizer)
            parts = replace(self.recipe, options=options).load()
            self.models = parts.models
            return parts
        return None

    def refresh(self) -> None:
        """Have the models take in changed numbers."""
        for model in self.models:
            model.refresh()
