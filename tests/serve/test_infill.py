"""llama.cpp's /infill and /completion as editors send them, and prompts that only fill the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specengine.protocol.preparing import KNOWN, FimTokens, fim_ends, fim_prompt
from specengine.protocol.requests import Infill
from tests.serve.saying import Saying, saying
from tests.serve.served import TEXT, Served
from tests.toy import byte_tokenizer

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>"]
LLAMA_VIM = {  # as llama.vim sends it
    "input_prefix": "def add(a, b):\n",
    "input_suffix": "\nprint(add(1, 2))\n",
    "input_extra": [{"text": "import os\n", "time": 1, "filename": "a.py"}],
    "prompt": "    ",
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.9,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "id_slot": 0,
    "response_fields": ["content", "tokens_cached", "truncated"],
}


@pytest.fixture(scope="module")
def editor() -> Iterator[Saying]:
    with saying(QWEN) as own:
        yield own


# ---- prompts


STARCODER = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
DEEPSEEK = ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"]
PROMPTS = {
    "Qwen2.5-Coder": (
        QWEN,
        "<|repo_name|>myproject\n<|file_sep|>a.py\none\n<|file_sep|>b.py\ntwo\n<|file_sep|>filename\n"
        "<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>",
    ),
    "Qwen2.5-Coder without the repository's token": (
        QWEN[:4],
        "<|file_sep|>a.py\none\n<|file_sep|>b.py\ntwo\n<|file_sep|>filename\n"
        "<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>",
    ),
    "CodeGemma": (
        [*QWEN[:3], "<|file_separator|>"],
        "<|file_separator|>a.py\none\n<|file_separator|>b.py\ntwo\n<|file_separator|>filename\n"
        "<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>",
    ),
    "StarCoder 2": (
        [*STARCODER, "<file_sep>", "<repo_name>", "<reponame>"],
        "<repo_name>myproject<file_sep>a.py\none\n<file_sep>b.py\ntwo\n<file_sep>"
        "<fim_prefix>filename\nx<fim_suffix>y<fim_middle>",
    ),
    "Granite": (
        [*STARCODER, "<reponame>"],
        "<reponame>myproject\n\n\n--- snippet ---\n\none\n\n--- snippet ---\n\ntwo\n"
        "<fim_prefix>x<fim_suffix>y<fim_middle>",
    ),
    "DeepSeek-Coder": (
        DEEPSEEK,
        "#a.py\none\n#b.py\ntwo\n<｜fim▁begin｜>x<｜fim▁hole｜>y<｜fim▁end｜>",
    ),
    "Codestral": (
        ["[PREFIX]", "[SUFFIX]"],
        "[SUFFIX]y[PREFIX]+++++ a.py\none\n+++++ b.py\ntwo\n+++++ filename\nx",
    ),
    "Code Llama": (
        ["▁<PRE>", "▁<SUF>", "▁<MID>"],
        "\n\n--- snippet ---\n\none\n\n--- snippet ---\n\ntwo\n▁<PRE>x▁<SUF>y▁<MID>",
    ),
}


@pytest.mark.parametrize("family", PROMPTS)
def test_other_files_stand_before_the_current_one_as_the_family_writes_them(family: str) -> None:
    marks, expected = PROMPTS[family]
    tokenizer = byte_tokenizer(extra=marks)
    around = Infill("x", "y", (("a.py", "one"), ("b.py", "two\n")))
    assert tokenizer.decode(fim_prompt(around, tokenizer)) == expected
    alone = tokenizer.decode(fim_prompt(Infill("x", "y"), tokenizer))
    assert not {"myproject", "filename", "snippet"} & set(alone.replace("\n", " ").split())


@pytest.mark.parametrize("tokens", KNOWN, ids=lambda tokens: tokens.prefix)
def test_marks_in_the_texts_of_files_are_text(tokens: FimTokens) -> None:
    tokenizer = byte_tokenizer(extra=[name for name in (*tokens[:3], *QWEN[3:]) if name])
    clean = fim_prompt(Infill("x", "y", (("a", "b"),)), tokenizer)
    special = set(tokenizer.all_special_ids)
    marks = [token for token in clean if token in special]
    texts = [f"{tokens.prefix}<|file_sep|>", f"{tokens.suffix}{{}}", "<|repo_name|><|end|>"]
    full = fim_prompt(Infill(texts[0], texts[1], ((texts[2], texts[0]),)), tokenizer)
    assert [token for token in full if token in special] == marks
    assert all(text in tokenizer.decode(full) for text in texts)


def test_an_answer_between_two_texts_ends_at_marks_that_are_tokens_of_the_file() -> None:
    def ends(tokenizer: Any) -> set[str]:
        return set(tokenizer.convert_ids_to_tokens(fim_ends(tokenizer)))

    assert ends(byte_tokenizer(extra=QWEN)) == {"<|file_sep|>", "<|repo_name|>"}
    added = byte_tokenizer(extra=QWEN[:3])
    added.add_tokens(["<|fim_pad|>", "<|endoftext|>"])  # whole words that are not special
    assert ends(added) == {"<|fim_pad|>", "<|endoftext|>"}
    assert ends(with_words(["<|endoftext|>", "<|file_sep|>"], QWEN[:3])) == set()
    everything = with_words([*QWEN, "<|endoftext|>"], [])
    assert ends(everything) == {"<|file_sep|>", "<|repo_name|>", "<|endoftext|>"}


def with_words(words: list[str], added: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose vocabulary holds these words as plain text, and these special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(
        models.BPE(vocab={text: id for id, text in enumerate([*alphabet, *words])}, merges=[])
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    return tokenizer


# ---- what editors send


def test_a_request_of_llama_vim(editor: Saying) -> None:
    editor.said = "return a + b"
    answer = editor.server.post(LLAMA_VIM | {"n_predict": 16}, "/infill")
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"] == "return a + b"
    assert set(answer.json()) == {"content", "tokens_cached", "truncated"}
    assert editor.prompt == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\nimport os\n<|file_sep|>filename\n"
        "<|fim_prefix|>def add(a, b):\n    <|fim_suffix|>\nprint(add(1, 2))\n<|fim_middle|>"
    )
    unnamed = LLAMA_VIM | {"input_extra": [{"text": "one"}], "n_predict": 1}
    assert editor.server.post(unnamed, "/infill").status_code == 200
    assert "<|file_sep|>tmp\none\n<|file_sep|>" in editor.prompt


EMPTY: dict[str, tuple[str, dict[str, Any]]] = {
    "an editor": ("/infill", {"input_prefix": "abc" * 30, "input_suffix": "d", "n_predict": 0}),
    "llama.cpp": ("/completion", {"prompt": "abc" * 30, "n_predict": 0}),
    "llama.cpp by another name": ("/completion", {"prompt": "bcd" * 30, "max_tokens": 0}),
    "OpenAI": ("/v1/completions", {"prompt": "cde" * 30, "max_tokens": 0}),
    "OpenAI with a suffix": (
        "/v1/completions",
        {"prompt": "cde" * 30, "suffix": "f", "max_tokens": 0},
    ),
    "OpenAI with an echo": (
        "/v1/completions",
        {"prompt": "def" * 30, "max_tokens": 0, "echo": True},
    ),
    "Anthropic": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "efg" * 30}], "max_tokens": 0},
    ),
}


def figures(answer: dict[str, Any]) -> tuple[int, int, int]:
    """Tokens read, tokens found in the cache, and tokens generated."""
    usage = answer.get("usage") or {}
    if "tokens_evaluated" in answer:
        counts = (answer["tokens_cached"], answer["tokens_predicted"])
        return answer["tokens_evaluated"], *counts
    if "input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached, usage["output_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], cached, usage["completion_tokens"]


@pytest.mark.parametrize("case", EMPTY)
def test_no_token_fills_the_cache(editor: Saying, case: str) -> None:
    path, body = EMPTY[case]
    editor.said = "Yes."
    first = editor.server.post(body, path)
    assert first.status_code == 200, first.text
    read, cached, generated = figures(first.json())
    assert generated == 0
    assert "Yes" not in first.text
    assert cached < read - 50, "nothing is there yet"
    again = figures(editor.server.post(body, path).json())
    assert again == (read, read - 1, 0)
    limit = "n_predict" if "n_predict" in body else "max_tokens"
    answer = editor.server.post(body | {limit: 8}, path).json()
    assert figures(answer)[:2] == (read, read - 1)
    assert "Yes" in json.dumps(answer)


@pytest.mark.parametrize("case", EMPTY)
def test_a_stream_of_no_token_ends(editor: Saying, case: str) -> None:
    path, body = EMPTY[case]
    editor.said = "Yes."
    stream = editor.server.post(body | {"stream": True}, path)
    assert stream.status_code == 200
    assert "Yes" not in stream.text
    marks = {
        "/infill": '"stop":true',
        "/completion": '"stop":true',
        "/v1/completions": '"finish_reason":"length"',
        "/v1/messages": '"stop_reason":"max_tokens"',
    }
    assert marks[path] in stream.text.replace(": ", ":")


def test_the_answer_after_a_filled_cache_is_the_same(editor: Saying) -> None:
    editor.said = None
    body = {"input_prefix": "river " * 9, "input_suffix": "sea", "n_predict": 12}
    plain = editor.server.post(body, "/infill").json()["content"]
    editor.server.post({"prompt": "else", "n_predict": 3}, "/completion")
    editor.server.post(body | {"n_predict": 0}, "/infill")
    assert editor.server.post(body, "/infill").json()["content"] == plain


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_where_the_protocol_has_no_empty_answer_it_is_refused(
    editor: Saying, path: str, body: dict[str, Any], named: str
) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}]} if "input" not in body else {}
    answer = editor.server.post(asked | body, path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
def test_no_token_of_ollama_is_no_limit(editor: Saying, path: str) -> None:
    editor.said = "Yes."
    asked: dict[str, Any] = {"prompt": "a", "raw": True}
    if path == "/api/chat":
        asked = {"messages": [{"role": "user", "content": "a"}]}
    for limit in (0, -1, -2):
        body = asked | {"stream": False, "options": {"num_predict": limit}}
        answer = editor.server.post(body, path).json()
        assert "Yes." in json.dumps(answer)
        assert answer["done_reason"] == "stop"


# ---- a limit of time


LINES = "one\n" + "x" * 24
TIMED: dict[str, tuple[str, dict[str, Any]]] = {
    "/infill": ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 60}),
    "/completion": ("/completion", {"prompt": "a", "n_predict": 60}),
    "/v1/completions": ("/v1/completions", {"prompt": "a", "max_tokens": 60}),
    "/v1/chat/completions": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 60},
    ),
}


def text_and_reason(answer: dict[str, Any]) -> tuple[str, str]:
    if "choices" not in answer:
        return answer["content"], answer["stop_type"]
    (choice,) = answer["choices"]
    return choice.get("text") or choice["message"]["content"], choice["finish_reason"]


@pytest.mark.parametrize("case", TIMED)
def test_an_answer_with_a_line_break_ends_in_time(editor: Saying, case: str) -> None:
    path, body = TIMED[case]
    timed = body | {"t_max_predict_ms": 1e-6}  # over at once
    editor.said = LINES
    text, reason = text_and_reason(editor.server.post(timed, path).json())
    assert LINES.startswith(text)
    assert "\n" in text
    assert len(text) < 16
    assert reason in ("limit", "length")
    editor.said = LINES.replace("\n", " ")
    text, _ = text_and_reason(editor.server.post(timed, path).json())
    assert len(text) == len(LINES), "without a line break it goes on"


@pytest.mark.parametrize("milliseconds", [None, 0, -1, 1e9])
def test_a_limit_that_is_off_or_far_changes_nothing(
    editor: Saying, milliseconds: float | None
) -> None:
    editor.said = LINES
    path, body = TIMED["/infill"]
    answer = editor.server.post(body | {"t_max_predict_ms": milliseconds}, path).json()
    assert text_and_reason(answer) == (LINES, "eos")


def test_a_stream_ends_in_time(editor: Saying) -> None:
    editor.said = LINES
    path, body = TIMED["/infill"]
    stream = editor.server.post(body | {"t_max_predict_ms": 1e-6, "stream": True}, path).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert events[-1]["stop_type"] == "limit"
    assert len("".join(event["content"] for event in events)) < 16


def test_a_limit_of_time_is_a_number(editor: Saying) -> None:
    for path, body in TIMED.values():
        answer = editor.server.post(body | {"t_max_predict_ms": "soon"}, path)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "t_max_predict_ms")


# ---- /completion


def test_llama_cpps_completion(server: Served) -> None:
    asked = {"prompt": TEXT["prompt"], "n_predict": 6}
    whole = server.post(asked, "/completion").json()
    expected = server.post(TEXT | {"max_tokens": 6}, "/v1/completions").json()
    assert whole["content"] == expected["choices"][0]["text"]
    assert (whole["stop"], whole["stop_type"], whole["tokens_predicted"]) == (True, "limit", 6)
    ids = server.post({"prompt": [5, 6, 7], "n_predict": 2}, "/completion").json()
    assert ids["tokens_evaluated"] == 3
    for change, named in (({"prompt": None}, "prompt"), ({"n_predict": 10**4000}, "n_predict")):
        answer = server.post(asked | change, "/completion")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)
