"""Gemma, the first: GELU, norms of 1 + w, embeddings times the root of their size."""

from specengine.models.families import GGUF, Factors, Family

FAMILY = Family(
    gguf=GGUF("gemma"),
    one_is_zero=True,
    factors=lambda config: Factors(embedding=config.hidden_size**0.5, in_module=True),
    neutral={"use_bidirectional_attention": False},
)
