"""Ministral 3: the blocks of Llama, with queries that grow with the position beyond what YaRN began from."""

import math
from collections.abc import Callable
from typing import Any

from specengine.models.families import GGUF, Attention, Family, Layer, QueryFactors, scaled_context

MIN_REACH = 1 << 20  # positions that have factors of their own, for contexts beyond the config's
KEYS = ("llama_4_scaling_beta", "original_max_position_embeddings")
GROWTH, LEFT_OUT = "attention.temperature_scale", "rope.scaling.yarn_log_multiplier"


def query_factors(config: Any) -> QueryFactors | None:
    """Return the factors on queries, one more for each multiple of the original context."""
    beta, every = (config.rope_parameters.get(key) for key in KEYS)
    if not (beta and every):
        return None
    count = -(-max(scaled_context(config, config.max_position_embeddings), MIN_REACH) // every)
    return QueryFactors(every, tuple(1.0 + beta * math.log(1 + number) for number in range(count)))


def finish(fields: dict[str, Any], value: Callable[[str], Any]) -> dict[str, Any]:
    """Files have keys of their own for the growth of queries, and for the factor that YaRN leaves out."""
    rope = fields["rope_parameters"] | {KEYS[0]: value(GROWTH) or 0.0}
    more = (
        {"mscale": 1.0, "mscale_all_dim": value(LEFT_OUT) or 0.0}
        if rope["rope_type"] == "yarn"
        else {KEYS[1]: fields["max_position_embeddings"]}
    )
    return {"rope_parameters": rope | more}


FAMILY = Family(
    layer=Layer(attention=Attention(windows="all", query_factors=query_factors)),
    gguf=GGUF("mistral3", pairs=("attn_q", "attn_k"), read=(GROWTH, LEFT_OUT), finish=finish),
)
