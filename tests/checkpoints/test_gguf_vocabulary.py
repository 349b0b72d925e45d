"""The tokenizer of a GGUF file is transformers' own; vocabularies that contradict themselves are refused."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from specengine.checkpoints import gguf
from specengine.errors import CheckpointError, UnsupportedModelError
from tests.checkpoints import gguf_files as files
from tests.checkpoints.gguf_files import ARCHITECTURES, opened

TEXTS = (
    "",
    "hello world",
    "  hello\n\n hello 12 1234",
    "<|im_start|>hello<|end|>",
    "<think>é🎉</think>",
    "</s> wor<s>!",
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("vocabulary", [files.byte_level_vocabulary, files.sentencepiece_vocabulary])
def test_the_tokenizer_is_that_of_transformers(
    tmp_path: Path, architecture: str, vocabulary: Callable[[], dict[str, Any]]
) -> None:
    file = opened(tmp_path, architecture, vocabulary=vocabulary())
    ours = gguf.tokenizer(file)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    for text in TEXTS:
        ids = ours(text).input_ids
        assert ids == theirs(text).input_ids
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


def test_the_chat_template_and_the_special_tokens(models: dict[str, Path]) -> None:
    tokenizer = gguf.tokenizer(gguf.read(models["llama"]))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>hello<|end|>"
    assert (ids[0], ids[-1], len(ids)) == (tokenizer.bos_token_id, tokenizer.eos_token_id, 3)
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|end|>", None)


def test_an_older_transformers_reads_the_file_itself(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file = gguf.read(models["llama"])
    monkeypatch.setitem(sys.modules, "transformers.integrations.gguf", None)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda folder, gguf_file: (folder, gguf_file))
    assert gguf.tokenizer(file) == (file.path.parent, file.path.name)


VOCABULARIES = {
    "tokenizer.ggml.model": ("bert", "a tokenizer of kind 'bert', and accepted are gpt2"),
    "tokenizer.ggml.tokens": ([1, 2], "tokens must be a list of str"),
    "tokenizer.ggml.merges": (["a b c"], "two pieces with one space between, not 'a b c'"),
    "tokenizer.ggml.token_type": ([1, 1], "must be as long as the 265 tokens"),
    "tokenizer.ggml.bos_token_id": (265, "must be one of 265 token ids, not 265"),
    "tokenizer.chat_template": (7, "chat_template must be text"),
}


@pytest.mark.parametrize("key", VOCABULARIES)
def test_a_vocabulary_that_contradicts_itself_is_refused(tmp_path: Path, key: str) -> None:
    value, message = VOCABULARIES[key]
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        gguf.tokenizer(opened(tmp_path, metadata={key: value}))


def test_merges_of_unknown_pieces_and_a_missing_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer can be built"):
        gguf.tokenizer(opened(tmp_path, metadata={"tokenizer.ggml.merges": ["xyz q"]}))
    with pytest.raises(UnsupportedModelError, match="has no tokenizer"):
        gguf.tokenizer(opened(tmp_path, vocabulary={}))
