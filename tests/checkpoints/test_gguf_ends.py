"""Tests of the tokens that end an answer: llama.cpp's rule over a file's ids and the texts of its tokens."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specengine import Engine
from specengine.checkpoints import gguf
from specengine.checkpoints.gguf.vocabulary import TokenKind, Tokens
from specengine.errors import CheckpointError
from tests.checkpoints import gguf_files as files
from tests.checkpoints.gguf_files import opened

FIRST = 256  # of the tokens behind the bytes


def vocabulary(*texts: str, kinds: int | None = 3, **ids: int | None) -> dict[str, Any]:
    """Bytes and these control tokens, or those of a kind; ids, counted from the first of these, by role."""
    stated = {} if kinds is None else dict.fromkeys(texts, kinds)
    return of_kinds(dict.fromkeys(texts, 3), **ids) | {
        "tokenizer.ggml.token_type": [*[1] * 257, *stated.values()] if stated else None
    }


def of_kinds(texts: dict[str, int], **ids: int | None) -> dict[str, Any]:
    """Bytes and these tokens, with the number of the kind of each."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*bytes_to_unicode().values(), "ab", *texts],
        "tokenizer.ggml.token_type": [*[1] * 257, *texts.values()],
        "tokenizer.ggml.merges": ["a b"],
        **{
            f"tokenizer.ggml.{role}_token_id": number + 257
            for role, number in ids.items()
            if number is not None
        },
    }


def ends_of(folder: Path, words: dict[str, Any]) -> list[str]:
    """Texts of the ends, the first of them the file's eos where it has one."""
    config = gguf.config(opened(folder, vocabulary=words))
    ids = config.eos_token_id
    return [
        words["tokenizer.ggml.tokens"][i]
        for i in ([] if ids is None else [ids] if isinstance(ids, int) else ids)
    ]


SENTENCE = "<\uff5cend\u2581of\u2581sentence\uff5c>"  # DeepSeek's
LLAMA3 = ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"]
FILES = ["<x>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
GEMMA4 = ["<eos>", "<|tool_response>", "<turn|>"]
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "eos alone": (vocabulary("<x>", "<y>", eos=0), ["<x>"]),
    "none": (vocabulary("<x>", "<y>"), []),
    "eot": (vocabulary("<x>", "<y>", eos=0, eot=1), ["<x>", "<y>"]),
    "eom": (vocabulary("<y>", "<x>", eos=1, eom=0), ["<x>", "<y>"]),
    "all the same": (vocabulary("<x>", eos=0, eot=0, eom=0), ["<x>"]),
    "Llama 3": (vocabulary(*LLAMA3, eos=0), LLAMA3),
    "ChatML": (
        vocabulary("<|endoftext|>", "<|im_start|>", "<|im_end|>", eos=2),
        ["<|im_end|>", "<|endoftext|>"],
    ),
    "Gemma": (vocabulary("<eos>", "<end_of_turn>", eos=0), ["<eos>", "<end_of_turn>"]),
    "Kimi": (vocabulary("[EOS]", "[EOT]", "[PAD]", eos=0), ["[EOS]", "[EOT]", "[PAD]"]),
    "DeepSeek": (vocabulary(SENTENCE, "<x>"), [SENTENCE]),
    "plain text that looks like an end": (vocabulary("<x>", "<|im_end|>", kinds=1, eos=0), ["<x>"]),
    "a user's token that looks like one": (
        vocabulary("<x>", "<end_of_turn>", kinds=4, eos=0),
        ["<x>"],
    ),
    "plain marks of files": (vocabulary(*FILES, kinds=1, eos=0), ["<x>"]),
    "plain text that the file names": (
        vocabulary("<|im_end|>", "<|endoftext|>", "<|file_sep|>", kinds=1, eot=0, fim_sep=2),
        ["<|im_end|>", "<|file_sep|>"],
    ),
    "kinds that the file does not state": (
        vocabulary("<x>", "</s>", "<|im_end|>", kinds=None, eos=0),
        ["<x>", "</s>", "<|im_end|>"],
    ),
    "Qwen2.5-Coder": (
        of_kinds({"</s>": 1, "<|endoftext|>": 3, "<|im_end|>": 3, "<tool_call>": 4}, eos=2),
        ["<|im_end|>", "<|endoftext|>"],
    ),
    "a text of each kind": (
        of_kinds({"<|endoftext|>": 1, "<end_of_turn>": 4, "<|im_end|>": 6, "<eos>": 3}),
        ["<eos>"],
    ),
    "files": (vocabulary(*FILES, eos=0), FILES),
    "files by id": (vocabulary("<x>", "<y>", "<|fim_pad|>", eos=0, fim_pad=1), ["<x>", "<y>"]),
    "marks of what is to be filled in are none": (
        vocabulary("<x>", "<|fim_prefix|>", eos=0, fim_mid=1),
        ["<x>"],
    ),
    "parts of an answer": (
        vocabulary("<|return|>", "<|call|>", "<|end|>", eos=0),
        ["<|return|>", "<|call|>"],
    ),
    "an end without parts": (vocabulary("<|return|>", "<|end|>", eos=0), ["<|return|>", "<|end|>"]),
    "parts by other names": (
        vocabulary("<|flush|>", "<|calls|>", "<|end|>"),
        ["<|flush|>", "<|calls|>"],
    ),
    "Gemma 4": (vocabulary("</s>", *GEMMA4, eos=1), GEMMA4),
}


@pytest.mark.parametrize("case", CASES)
def test_the_ends_of_a_file(tmp_path: Path, case: str) -> None:
    words, expected = CASES[case]
    assert ends_of(tmp_path, words) == expected


def test_sentencepiece_files_without_ids_have_the_usual_ones(tmp_path: Path) -> None:
    words = files.sentencepiece_vocabulary()
    for role in ("bos", "eos", "unknown"):
        del words[f"tokenizer.ggml.{role}_token_id"]
    file = opened(tmp_path, vocabulary=words)
    config, tokenizer = gguf.config(file), gguf.tokenizer(file)
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == (
        "<s>",
        "</s>",
        "<unk>",
    )


ROLES = [
    "bos",
    "eos",
    "eot",
    "eom",
    "unknown",
    "padding",
    "fim_pad",
    "fim_rep",
    "fim_sep",
    "separator",
]


@pytest.mark.parametrize("wrong", [0xFFFFFFFF, 265, ("INT32", -1), ("UINT64", 1 << 40)])
@pytest.mark.parametrize("role", ROLES)
def test_an_id_outside_of_the_vocabulary_is_noted_and_none(
    tmp_path: Path, role: str, wrong: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    key = f"tokenizer.ggml.{role}_token_id"
    file, without = opened(tmp_path, metadata={key: wrong}), opened(tmp_path, metadata={key: None})
    config, expected = gguf.config(file), gguf.config(without)
    shown = wrong[1] if isinstance(wrong, tuple) else wrong
    assert (
        f"model.gguf: {key} = {shown} is no token of 265, and not read" in capsys.readouterr().err
    )
    assert config.to_dict() == expected.to_dict()
    assert (
        gguf.tokenizer(file)("hello 12").input_ids == gguf.tokenizer(without)("hello 12").input_ids
    )
    assert gguf.tokenizer(file).special_tokens_map == gguf.tokenizer(without).special_tokens_map


def test_a_file_left_without_an_end_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = ["<0>", *files.byte_level_vocabulary()["tokenizer.ggml.tokens"][1:]]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 0xFFFFFFFF}
    assert gguf.config(opened(tmp_path, metadata=changes)).eos_token_id is None
    assert "eos_token_id = 4294967295 is no token of 265" in (err := capsys.readouterr().err)
    assert "no token ends an answer: give eos_token_id= or max_new_tokens=" in err
    assert "no token ends" not in (gguf.config(opened(tmp_path)) and capsys.readouterr().err)


def test_a_sentencepiece_id_outside_is_the_usual_one(tmp_path: Path) -> None:
    """As in llama.cpp, which keeps the default of the kind of vocabulary."""
    words = files.sentencepiece_vocabulary() | {"tokenizer.ggml.eos_token_id": 99_999}
    assert gguf.config(opened(tmp_path, vocabulary=words)).eos_token_id == 2


@pytest.mark.parametrize("role", ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_an_end_that_is_no_number_is_refused(tmp_path: Path, role: str) -> None:
    for wrong in ("x", -1.0, True, [1]):
        file = opened(tmp_path, metadata={f"tokenizer.ggml.{role}_token_id": wrong})
        with pytest.raises(CheckpointError, match=rf"{role}_token_id must be a token id, not"):
            gguf.config(file)


def kinds_of(folder: Path, words: dict[str, Any]) -> dict[str, TokenKind]:
    texts = words["tokenizer.ggml.tokens"]
    tokens = Tokens(opened(folder, vocabulary=words), texts, len(texts))
    return dict(zip(texts, tokens.kinds, strict=True))


def test_an_end_of_a_part_is_shown(tmp_path: Path) -> None:
    words = vocabulary("<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>")
    kinds = kinds_of(tmp_path, words)
    assert {kinds[text] for text in ("<|im_end|>", "<|return|>", "<|call|>")} == {TokenKind.CONTROL}
    assert {kinds[text] for text in ("<|end|>", "<|channel|>")} == {TokenKind.USER_DEFINED}
    tokenizer = gguf.tokenizer(opened(tmp_path, vocabulary=words))
    ids = tokenizer("a<|im_end|><|end|>").input_ids
    texts = words["tokenizer.ggml.tokens"]
    assert [texts[number] for number in ids] == ["a", "<|im_end|>", "<|end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<|end|>"


PLAIN = ["</s>", "<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<|end|>", "<|channel|>"]


@pytest.mark.parametrize("text", PLAIN)
def test_plain_text_in_a_prompt_is_text_whatever_it_looks_like(tmp_path: Path, text: str) -> None:
    words = of_kinds({"<x>": 3, text: 1}, eos=0)
    assert kinds_of(tmp_path, words)[text] is TokenKind.NORMAL
    tokenizer = gguf.tokenizer(opened(tmp_path, vocabulary=words))
    for options in ({}, {"split_special_tokens": True}):
        ids = tokenizer(f"a{text}b<x>", **options).input_ids
        assert 258 not in ids
        assert tokenizer.decode(ids[: len(text) + 2]) == f"a{text}b"
    assert tokenizer.all_special_tokens == ["<x>"]
    assert tokenizer.decode([258], skip_special_tokens=True) == text


@pytest.mark.parametrize("text", PLAIN)
def test_a_user_s_token_is_one_token_that_is_shown(tmp_path: Path, text: str) -> None:
    words = of_kinds({"<x>": 3, text: 4}, eos=0)
    tokenizer = gguf.tokenizer(opened(tmp_path, vocabulary=words))
    ids = tokenizer(f"a{text}b").input_ids
    assert ids[1] == 258
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"a{text}b"


def test_plain_text_that_the_file_names_as_an_end_is_a_special_token(tmp_path: Path) -> None:
    """Else a chat template that writes it would not be read as it was trained."""
    words = of_kinds({"<x>": 3, "<|im_end|>": 1}, eos=0, eot=1)
    tokenizer = gguf.tokenizer(opened(tmp_path, vocabulary=words))
    assert tokenizer("<|im_end|>").input_ids == [258]
    assert tokenizer("<|im_end|>", split_special_tokens=True).input_ids != [258]


def chain_model(path: Path, words: dict[str, Any] | None = None, **metadata: Any) -> Path:
    """Says a b c and the first token behind the bytes, then d e f and the second, then g, whatever there is to say."""
    words = words or vocabulary("<x>", "<y>", "<z>")
    tokens = words["tokenizer.ggml.tokens"]
    said = [
        *(tokens.index(letter) for letter in "abc"),
        257,
        *(tokens.index(letter) for letter in "def"),
        258,
    ]
    said += [tokens.index("g")] * 2
    hidden = len(tokens) + len(tokens) % 2
    table = np.zeros((len(tokens), hidden), np.float32)
    table[np.arange(len(tokens)), np.arange(len(tokens))] = 1
    head = np.zeros((len(tokens), hidden), np.float32)
    for before, after in itertools.pairwise(said):
        head[after, before] = 1
    linear = {"attn_q": (hidden, hidden), "attn_k": (hidden, hidden), "attn_v": (hidden, hidden)}
    linear |= {
        "attn_output": (hidden, hidden),
        "ffn_gate": (8, hidden),
        "ffn_up": (8, hidden),
        "ffn_down": (hidden, 8),
    }
    tensors = {
        f"blk.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in linear.items()
    }
    norms = ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight")
    tensors |= {name: np.ones(hidden, np.float32) for name in norms}
    tensors |= {"token_embd.weight": table, "output.weight": head}
    unused = {name: None for name in files.weights("llama", len(tokens)) if name not in tensors}
    sizes = {
        "block_count": 1,
        "embedding_length": hidden,
        "feed_forward_length": 8,
        "attention.head_count": 2,
    }
    sizes |= {"attention.head_count_kv": 2, "rope.dimension_count": hidden // 2}
    return files.write_model(
        path,
        vocabulary=words,
        metadata={f"llama.{key}": value for key, value in sizes.items()} | metadata,
        tensors=tensors | unused,
    )


@pytest.mark.usefixtures("one_thread")
def test_an_answer_stops_at_each_end_and_at_none_that_is_ignored(tmp_path: Path) -> None:
    roles = {
        "tokenizer.ggml.eos_token_id": 259,
        "tokenizer.ggml.eot_token_id": 257,
        "tokenizer.ggml.eom_token_id": 258,
    }
    engine = Engine.from_pretrained(chain_model(tmp_path / "model.gguf", **roles))
    options = {"raw": True, "max_new_tokens": 9}
    answer = engine.generate("a", **options)
    assert (answer.text, answer.finish_reason) == ("bc", "stop")
    answer = engine.generate("a", **options, min_new_tokens=4)
    assert 257 not in answer.token_ids[:4]
    answer = engine.generate("a", **options, eos_token_id=[])
    assert (answer.text, answer.finish_reason) == ("bcdefgg", "length")
    assert engine.generate("d", **options).text == "ef"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("text", ["</s>", "<|endoftext|>", "<end_of_turn>"])
def test_an_answer_goes_on_after_plain_text_that_looks_like_an_end(
    tmp_path: Path, text: str
) -> None:
    words = of_kinds({text: 1, "<|im_end|>": 3, "<z>": 3}, eos=1)
    engine = Engine.from_pretrained(chain_model(tmp_path / "model.gguf", words))
    answer = engine.generate("a", raw=True, max_new_tokens=9)
    assert (answer.text, answer.finish_reason) == (f"bc{text}def", "stop")


@pytest.mark.usefixtures("one_thread")
def test_tokens_that_the_file_suppresses_are_not_said(tmp_path: Path) -> None:
    path = chain_model(tmp_path / "model.gguf", **{"tokenizer.ggml.suppress_tokens": [98, 99_999]})
    words = vocabulary()["tokenizer.ggml.tokens"]
    engine = Engine.from_pretrained(path)
    assert words.index("b") == engine.tokenizer("b").input_ids[0]
    forbidden = chain_model(
        tmp_path / "other.gguf", **{"tokenizer.ggml.suppress_tokens": [words.index("b"), 99_999]}
    )
    plain = engine.generate("a", raw=True, max_new_tokens=3).token_ids
    assert plain[0] == words.index("b")
    assert (
        Engine.from_pretrained(forbidden).generate("a", raw=True, max_new_tokens=3).token_ids[0]
        != plain[0]
    )
