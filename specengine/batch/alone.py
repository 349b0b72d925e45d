"""All lines answered in this process, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from specengine.batch.answering import Answered, answer
from specengine.batch.files import Record
from specengine.batch.prompts import Item
from specengine.replicas.recipe import Recipe, facts


def answered(recipe: Recipe, items: Iterable[Item], loaded: Callable[[Record], None]) -> Iterator[Answered]:
    """loaded: told what the engine is, before the first answer."""
    engine = recipe.load()
    loaded(facts(engine))
    for item in items:
        yield answer(engine, item)
