"""`tokenizer=`: an object, or the path of one, looked at before any weights are read."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers

from specengine import Engine
from specengine.errors import InputError
from tests.checkpoints.gguf_files import write_model
from tests.toy import byte_tokenizer, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer alone."""
    made = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(made)
    return made


def test_a_path_is_loaded(folder: Path, tmp_path: Path) -> None:
    model = tiny("llama")
    expected = (
        Engine.from_pretrained(model, tokenizer=byte_tokenizer()).generate("abc", **OPTIONS).text
    )
    assert (
        Engine.from_pretrained(model, tokenizer=str(folder)).generate("abc", **OPTIONS).text
        == expected
    )
    assert (
        Engine.from_pretrained(model, "ngram", tokenizer=folder).generate("abc", **OPTIONS).text
        == expected
    )
    model.save_pretrained(tmp_path)  # without one of its own
    assert (
        Engine.from_pretrained(tmp_path, tokenizer=folder).generate("abc", **OPTIONS).text
        == expected
    )


def test_the_tokenizer_of_a_gguf_file(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf")
    engine = Engine.from_pretrained(tiny("llama", vocab_size=265), tokenizer=path)
    assert (
        engine.tokenizer("hello").input_ids
        == Engine.from_pretrained(path).tokenizer("hello").input_ids
    )


@pytest.mark.parametrize(
    "given", [5, [1], {"a": 1}, object(), len, tokenizers.Tokenizer(tokenizers.models.BPE()), b"x"]
)
def test_what_is_no_tokenizer_is_refused_at_load(given: Any) -> None:
    with pytest.raises(
        InputError, match=r"tokenizer: got .*, accepted a tokenizer of transformers, or a path"
    ):
        Engine.from_pretrained(tiny("llama"), tokenizer=given)


def test_a_place_without_a_tokenizer_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for given in (
        tmp_path,
        tmp_path / "none",
        "./none",
        "no/such/tokenizer",
        tmp_path / "model.gguf",
    ):
        with pytest.raises(
            InputError, match=r"tokenizer: got .*, accepted a tokenizer of transformers"
        ):
            Engine.from_pretrained("/nowhere/model", tokenizer=given, offline=True)
