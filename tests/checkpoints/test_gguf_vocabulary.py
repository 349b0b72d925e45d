"""The tokenizer of a GGUF file cuts text as llama.cpp does; vocabularies that contradict themselves are refused."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specengine.checkpoints import gguf
from specengine.checkpoints.gguf.vocabulary import SPLITS
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
def test_a_byte_level_tokenizer_is_that_of_transformers(tmp_path: Path, architecture: str) -> None:
    ours = gguf.tokenizer(opened(tmp_path, architecture))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    assert len(ours) == len(files.byte_level_vocabulary()["tokenizer.ggml.tokens"])
    for text in TEXTS:
        ids = ours(text).input_ids
        assert ids == theirs(text).input_ids
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(
            ids, skip_special_tokens=True
        )


# ---- ids below are llama.cpp's for these vocabularies


def ids_of(folder: Path, vocabulary: dict[str, Any], text: str, **metadata: Any) -> list[int]:
    named = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return gguf.tokenizer(opened(folder, vocabulary=vocabulary | named))(text).input_ids


def byte(value: str) -> list[int]:
    """Ids of the bytes of the SentencePiece vocabulary."""
    return [3 + number for number in value.encode()]


SPACE, H = 259, 260
HELLO, SPACED_HELLO = 271, 272
SENTENCES: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "a space before the text": ("hello", {}, [1, SPACED_HELLO]),
    "none before it": ("hello", {"add_space_prefix": False}, [1, HELLO]),
    "one of its own as well": (" hello", {}, [1, SPACE, SPACED_HELLO]),
    "one of its own alone": (" hello", {"add_space_prefix": False}, [1, SPACED_HELLO]),
    "after a special token": ("hello</s>hello", {}, [1, SPACED_HELLO, 2, SPACED_HELLO]),
    "not after a special token": (
        "hello</s>hello",
        {"add_space_prefix": False},
        [1, HELLO, 2, HELLO],
    ),
    "lines": ("\n\nh", {"add_space_prefix": False}, [1, *byte("\n\n"), H]),
    "bytes": ("é", {"add_space_prefix": False}, [1, *byte("é")]),
    "nothing": ("", {}, [1]),
    "no first token": ("hello", {"add_bos_token": False}, [SPACED_HELLO]),
    "a last token": ("hello", {"add_eos_token": True}, [1, SPACED_HELLO, 2]),
    "whatever merges say": ("hello", {"merges": ["h e"]}, [1, SPACED_HELLO]),
    "spaces stay": (
        "hello  hello",
        {"remove_extra_whitespaces": True},
        [1, SPACED_HELLO, SPACE, SPACED_HELLO],
    ),
    "no separator": ("hello", {"add_sep_token": True, "seperator_token_id": 0}, [1, SPACED_HELLO]),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_sentencepiece_text_as_in_llama_cpp(tmp_path: Path, case: str) -> None:
    text, metadata, expected = SENTENCES[case]
    assert ids_of(tmp_path, files.sentencepiece_vocabulary(), text, **metadata) == expected


@pytest.mark.parametrize(("score", "expected"), [(-9.0, [HELLO - 3, H + 2]), (9.0, [H, HELLO + 2])])
def test_of_pieces_that_overlap_the_better_score_is_merged_first(
    tmp_path: Path, score: float, expected: list[int]
) -> None:
    vocabulary = files.sentencepiece_vocabulary()
    for key, value in (("tokens", "el"), ("scores", score), ("token_type", 1)):
        vocabulary[f"tokenizer.ggml.{key}"] = [*vocabulary[f"tokenizer.ggml.{key}"], value]
    assert (
        ids_of(tmp_path, vocabulary, "hel", add_space_prefix=False, add_bos_token=False) == expected
    )


def test_sentencepiece_answers_keep_their_spaces(tmp_path: Path) -> None:
    plain = gguf.tokenizer(opened(tmp_path, vocabulary=files.sentencepiece_vocabulary()))
    assert plain.decode([SPACED_HELLO, SPACED_HELLO]) == "hello hello"
    vocabulary = files.sentencepiece_vocabulary() | {"tokenizer.ggml.add_space_prefix": False}
    bare = gguf.tokenizer(opened(tmp_path, vocabulary=vocabulary))
    assert bare.decode([SPACED_HELLO, HELLO, *byte("é")]) == " hellohelloé"


def test_control_tokens_are_not_made_of_letters(tmp_path: Path) -> None:
    vocabulary = files.sentencepiece_vocabulary()
    tokens = vocabulary["tokenizer.ggml.tokens"]
    vocabulary["tokenizer.ggml.tokens"] = [*tokens, "<", "/s>"]
    vocabulary["tokenizer.ggml.scores"] = [*vocabulary["tokenizer.ggml.scores"], -9.0, -9.0]
    vocabulary["tokenizer.ggml.token_type"] = [*vocabulary["tokenizer.ggml.token_type"], 1, 1]
    tokenizer = gguf.tokenizer(opened(tmp_path, vocabulary=vocabulary))
    assert 2 in tokenizer("</s>").input_ids
    assert 2 not in tokenizer("</s>", split_special_tokens=True).input_ids


# Merges alone count in Gemma 4's vocabulary, lines are apart, and the first token comes whatever the file says.
GEMMA4_TEXTS: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "no space before it": ("hello hello", {}, [1, HELLO, SPACED_HELLO]),
    "no space where the file does not say": (
        "hello hello",
        {"add_space_prefix": None},
        [1, HELLO, SPACED_HELLO],
    ),
    "two spaces": ("hello  hello", {}, [1, HELLO, SPACE, SPACED_HELLO]),
    "whatever scores say": ("hello", {"merges": ["e l", "h e", "l l"]}, [1, H, 273, 262, 263]),
    "lines": ("hello\n\nhello\n", {}, [1, HELLO, 275, HELLO, 274]),
    "bytes": ("é<", {}, [1, *byte("é<")]),
    "a first token in any case": ("hello", {"add_bos_token": False}, [1, HELLO]),
    "special tokens": ("hello</s>hello", {}, [1, HELLO, 2, HELLO]),
}


@pytest.mark.parametrize("case", GEMMA4_TEXTS)
def test_gemma_4_text_as_in_llama_cpp(tmp_path: Path, case: str) -> None:
    text, metadata, expected = GEMMA4_TEXTS[case]
    assert ids_of(tmp_path, gemma4_vocabulary(), text, **metadata) == expected


def test_gemma_4_answers_keep_their_spaces_and_lines(tmp_path: Path) -> None:
    tokenizer = gguf.tokenizer(opened(tmp_path, vocabulary=gemma4_vocabulary()))
    assert tokenizer.decode([SPACED_HELLO, HELLO, 275, *byte("é")]) == " hellohello\n\né"


def gemma4_vocabulary() -> dict[str, Any]:
    """The SentencePiece vocabulary with another piece and line ends, merges, and scores that contradict them."""
    vocabulary, more = files.sentencepiece_vocabulary(), ["el", "\n", "\n\n"]
    tokens = [*vocabulary["tokenizer.ggml.tokens"], *more]
    return vocabulary | {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(number) for number in range(len(tokens))],
        "tokenizer.ggml.token_type": [*vocabulary["tokenizer.ggml.token_type"], *[1] * len(more)],
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o", "▁ hello", "\n \n"],
        "tokenizer.ggml.add_space_prefix": False,
    }


def word_vocabulary() -> dict[str, Any]:
    """Bytes, and merges that show where text is cut."""
    merges = ["1 2", "12 3", "123 4", "' s", "t 's", "a b", "a bc", "b c", "Ġ a", "! !", "Ċ Ċ"]
    tokens = [
        *bytes_to_unicode().values(),
        *dict.fromkeys(merge.replace(" ", "") for merge in merges),
        "abc",
        "<|e|>",
    ]
    tokens = list(dict.fromkeys(tokens))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*[1] * (len(tokens) - 1), 3],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }


WORDS: dict[str, tuple[str, list[str]]] = {
    "gpt-2": ("1234 it's", ["1234", "Ġ", "i", "t", "'s"]),
    "smollm": ("1234 it's", ["1", "2", "3", "4", "Ġ", "i", "t", "'s"]),
    "starcoder": ("12", ["1", "2"]),
    "refact": ("12", ["1", "2"]),
    "command-r": ("12", ["1", "2"]),
    "qwen2": ("1234", ["1", "2", "3", "4"]),
    "falcon": ("1234", ["123", "4"]),
    "default": ("1234it's", ["123", "4", "i", "t", "'", "s"]),
    "dbrx": ("1234", ["123", "4"]),
    "deepseek-llm": ("it's 1234", ["i", "t", "'", "s", "Ġ", "1234"]),
    "deepseek-coder": ("1234", ["1", "2", "3", "4"]),
    "deepseek-v3": ("1234", ["123", "4"]),
    "viking": ("1234", ["1", "2", "3", "4"]),
    "poro-chat": ("1234", ["1234"]),
    "laguna": ("ab\n\nab", ["ab", "ĊĊ", "ab"]),
    "bailingmoe": ("ab\n\nab", ["ab", "ĊĊ", "ab"]),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_are_cut_as_in_llama_cpp(tmp_path: Path, name: str) -> None:
    text, expected = WORDS[name]
    ids = ids_of(tmp_path, word_vocabulary(), text, pre=name)
    assert [word_vocabulary()["tokenizer.ggml.tokens"][number] for number in ids] == expected


def test_a_file_of_llama_3_takes_whole_words_and_begins_with_its_first_token(
    tmp_path: Path,
) -> None:
    vocabulary = word_vocabulary()
    tokens, first = vocabulary["tokenizer.ggml.tokens"], vocabulary["tokenizer.ggml.bos_token_id"]
    assert ids_of(tmp_path, vocabulary, "abc") == [tokens.index("ab"), tokens.index("c")]
    assert ids_of(tmp_path, vocabulary, "abc", pre="llama-bpe") == [first, tokens.index("abc")]
    assert ids_of(tmp_path, vocabulary, "abc", pre="llama-bpe", add_bos_token=False) == [
        tokens.index("abc")
    ]
    assert ids_of(tmp_path, vocabulary, "abc", pre="tekken") == [first, tokens.index("abc")]


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_every_way_of_cutting_gives_the_text_back(tmp_path: Path, name: str) -> None:
    tokenizer = gguf.tokenizer(
        opened(tmp_path, vocabulary=word_vocabulary() | {"tokenizer.ggml.pre": name})
    )
    text = "It's 1234 x\r\n\n  été! 漢字かな हिन्दी (ab)_c\t🎉  "
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_an_unknown_way_of_cutting_is_refused_and_none_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"tokenizer.ggml.pre = 'mine' is unknown.* pass tokenizer="
    ):
        ids_of(tmp_path, word_vocabulary(), "1", pre="mine")
    assert not capsys.readouterr().err
    vocabulary = word_vocabulary()
    del vocabulary["tokenizer.ggml.pre"]
    assert len(ids_of(tmp_path, vocabulary, "1234")) == 2
    assert "model.gguf: the file has no tokenizer.ggml.pre" in capsys.readouterr().err


def test_keys_that_are_not_read_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"add_sep_token": False, "fim_pre_token_id": 3, "mask_token_id": 3}
    ids_of(tmp_path, word_vocabulary(), "1", **known)
    assert not capsys.readouterr().err
    ids_of(tmp_path, word_vocabulary(), "1", lowercase_all=True)
    assert "the file has tokenizer.ggml.lowercase_all, which is not read" in capsys.readouterr().err


def test_special_tokens_outside_of_the_byte_alphabet_keep_their_ids(tmp_path: Path) -> None:
    vocabulary, begin = word_vocabulary(), "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
    tokens = [*vocabulary["tokenizer.ggml.tokens"], begin, "  wide"]
    added = {"tokens": tokens, "token_type": [*vocabulary["tokenizer.ggml.token_type"], 3, 4]}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in added.items()}
    metadata["tokenizer.ggml.bos_token_id"] = len(tokens) - 2
    tokenizer = gguf.tokenizer(opened(tmp_path, vocabulary=vocabulary | metadata))
    assert len(tokenizer) == len(tokens)
    assert tokenizer.bos_token_id == len(tokens) - 2
    assert tokenizer(f"{begin}1  wide").input_ids == [
        len(tokens) - 2,
        tokens.index("1"),
        len(tokens) - 1,
    ]
    assert tokenizer.decode([len(tokens) - 1]) == "  wide"


def test_named_chat_templates(tmp_path: Path) -> None:
    templates = {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "with tools",
    }
    tokenizer = gguf.tokenizer(opened(tmp_path, metadata=templates))
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "plain"
    assert tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False) == "with tools"


def test_the_chat_template_and_the_special_tokens(models: dict[str, Path]) -> None:
    tokenizer = gguf.tokenizer(gguf.read(models["llama"]))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>hello<|end|>"
    assert (ids[0], ids[-1], len(ids)) == (tokenizer.bos_token_id, tokenizer.eos_token_id, 3)
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|end|>", None)


VOCABULARIES = {
    "tokenizer.ggml.model": ("bert", "a tokenizer of kind 'bert'; accepted: gpt2"),
    "tokenizer.ggml.tokens": ([1, 2], "tokens must be a list of str"),
    "tokenizer.ggml.merges": (["a b c"], "two pieces with one space between, not 'a b c'"),
    "tokenizer.ggml.token_type": ([1, 1], "must be as long as the 265 tokens"),
    "tokenizer.ggml.bos_token_id": ("one", "must be a token id, not one"),
    "tokenizer.ggml.pre": (7, "tokenizer.ggml.pre must be text, not 7"),
    "tokenizer.ggml.add_bos_token": ("yes", "add_bos_token must be true or false, not yes"),
    "tokenizer.ggml.add_eos_token": (1, "add_eos_token must be true or false, not 1"),
    "tokenizer.chat_template": (7, "chat_template must be text"),
    "tokenizer.chat_template.tool_use": (7, "chat_template.tool_use must be text"),
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
    tokens = files.byte_level_vocabulary()["tokenizer.ggml.tokens"]
    twice = opened(tmp_path, metadata={"tokenizer.ggml.tokens": [*tokens[:-1], "<|end|>"]})
    with pytest.raises(CheckpointError, match=r"tokens holds '<\|end\|>' twice"):
        gguf.tokenizer(twice)
    missing = {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}
    unset = opened(tmp_path, metadata=missing)
    with pytest.raises(
        CheckpointError, match=r"add_bos_token is true, and tokenizer\.ggml\.bos_token_id names no"
    ):
        gguf.tokenizer(unset)
