"""Tokenizer metadata of any type and length: tokens of the vocabulary, or an error of ours."""

import random
from pathlib import Path
from typing import Any

import pytest

from specengine.checkpoints import gguf
from specengine.errors import SpecEngineError
from tests.checkpoints import gguf_files as files

ROLES = ("bos", "eos", "eot", "eom", "unknown", "padding", "fim_pad", "fim_rep", "fim_sep")
KEYS = (
    *(
        "model",
        "pre",
        "tokens",
        "token_type",
        "scores",
        "merges",
        "suppress_tokens",
        "precompiled_charsmap",
    ),
    *(
        "add_bos_token",
        "add_eos_token",
        "add_sep_token",
        "add_space_prefix",
        "remove_extra_whitespaces",
        "other",
    ),
    *(f"{role}_token_id" for role in ROLES),
)
VALUES: tuple[Any, ...] = (
    *(0, 1, 264, 265, 10**6, True, False, "", "x", "llama", "gpt2", "default", "smollm", 1.5),
    *(
        float("nan"),
        float("inf"),
        [1],
        ["a"],
        ["a b", "b c"],
        [""],
        ["", ""],
        [1.0, 2.0],
        [True],
        ["▁"] * 3,
    ),
)


def changed(value: Any, chance: random.Random) -> Any:
    """Another value in its place: any, none, or a list of its items with a fault."""
    if not isinstance(value, list) or chance.random() < 0.6:
        return chance.choice((*VALUES, None))
    items, place = list(value), chance.randrange(len(value))
    faults = {str: "", int: 9, float: -1e30}
    return chance.choice(
        (
            items[:-1],
            [*items, items[-1]],
            items[::-1],
            [*items[:place], faults[type(items[0])], *items[place + 1 :]],
        )
    )


@pytest.mark.parametrize("seed", range(40))
def test_any_metadata_gives_tokens_or_an_error_of_ours(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    words = chance.choice((files.byte_level_vocabulary, files.sentencepiece_vocabulary))()
    keys = [f"tokenizer.ggml.{key}" for key in chance.sample(KEYS, 2)]
    metadata = {key: changed(words.get(key), chance) for key in keys}
    try:
        file = gguf.read(
            files.write_model(tmp_path / "model.gguf", vocabulary=words, metadata=metadata)
        )
        size = gguf.config(file).vocab_size
        gguf.suppressed_ids(file, size)
        tokenizer = gguf.tokenizer(file)
    except SpecEngineError:
        return
    ids = tokenizer("hello <s> 12 é\n").input_ids
    assert all(0 <= number < size for number in ids)
    assert isinstance(tokenizer.decode(ids), str)
