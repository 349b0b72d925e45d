"""Every causal LM of transformers, some with pictures, as a tiny model: its way stands in verdicts.json, and is met.

`python -m tests.sweep --write` draws the table up anew, `python -m tests.sweep NAME ...` shows single verdicts.
"""

from __future__ import annotations

import pytest
import transformers

from tests.sweep.serving import DRAFTED, EXACT, TABLE, read, summary, verdict_of
from tests.sweep.small import NAMES

pytestmark = pytest.mark.usefixtures("one_thread")
FAST = (
    "afmoe",
    "bloom",
    "cohere2",
    "deepseek_v3",
    "deepseek_v32",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "gpt_oss",
    "granitemoehybrid",
    "lfm2",
    "llama4_text",
    "mamba",
    "mimo_v2_flash",
    "mistral",
    "muse_glimmer",
    "qwen3",
    "qwen3_5_text",
    "xlnet",
)
VERDICTS = read()["verdicts"]
same_version = pytest.mark.skipif(
    transformers.__version__ != read()["transformers"],
    reason=f"{TABLE.name} is that of another transformers",
)


@same_version
@pytest.mark.parametrize("kind", FAST)
def test_a_family_is_served_as_the_table_says(kind: str) -> None:
    assert verdict_of(kind) == VERDICTS[kind]


@same_version
@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(NAMES.keys() - set(FAST)))
def test_every_other_family_is_too(kind: str) -> None:
    assert verdict_of(kind) == VERDICTS[kind]


@same_version
def test_the_table_has_every_family() -> None:
    assert VERDICTS.keys() == NAMES.keys()


def test_most_families_are_served_exactly_and_with_trees() -> None:
    others = set(VERDICTS.values()) - {*EXACT, *VERDICTS_OF_THE_OTHERS}
    assert all(verdict.startswith(NEEDS_MORE) for verdict in others)
    counts = summary(VERDICTS)
    assert sum(counts[verdict] for verdict in EXACT) >= 240
    assert sum(counts[verdict] for verdict in DRAFTED) >= 200


NEEDS_MORE = "not: its forward fails on a few tokens ("  # of text, as it needs pictures
VERDICTS_OF_THE_OTHERS = {
    "not: encoder-decoder models are not supported, only causal LMs",
    "not: has no single table of token embeddings",
    "not: a token changes the logits of those before it, so it is not a causal LM",
    "not made",
}
