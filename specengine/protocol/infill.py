"""Prompts whose answer stands between two texts, for models that were trained on such (fill in the middle)."""

from __future__ import annotations

from typing import Any, NamedTuple

from specengine.protocol.problems import RequestError
from specengine.protocol.requests import Infill


class FimTokens(NamedTuple):
    """Names of the tokens before the prefix, before the suffix, and before the answer.

    suffix_first: the suffix stands before the prefix
    """

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False


# Qwen2.5-Coder and CodeGemma; StarCoder, Granite and others; Code Llama; DeepSeek-Coder; Codestral; Seed-Coder
KNOWN = (
    FimTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    FimTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    FimTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    FimTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),
    FimTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    FimTokens("[PREFIX]", "[SUFFIX]", "", suffix_first=True),
    FimTokens("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
)
_ENDS = ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<file_sep>", "▁<EOT>", "<EOT>")
_FILES = ("<|file_sep|>", "<file_sep>")
_SNIPPET = "\n\n--- snippet ---\n\n"


def fim_tokens(tokenizer: Any) -> FimTokens:
    """Return the tokens of a model; RequestError where it has none that are known."""
    known = _vocabulary(tokenizer)
    for tokens in KNOWN:
        if all(name in known for name in tokens[:3] if name):
            return tokens
    message = "suffix: this model has no tokens for a text between two others (fill in the middle); leave it out"
    raise RequestError(400, message, "suffix", "unsupported_field")


def fim_prompt(around: Infill, tokenizer: Any) -> list[int]:
    """Return the ids of a prompt, in which special tokens stand only where they belong; RequestError."""
    tokens, known = fim_tokens(tokenizer), _vocabulary(tokenizer)

    def text(given: str) -> list[int]:
        ids = tokenizer(given, add_special_tokens=False, split_special_tokens=True)["input_ids"] if given else []
        return list(ids)

    def mark(name: str) -> list[int]:
        return [known[name]] if name else []

    separator = next((name for name in _FILES if name in known), None)
    ids: list[int] = []
    start = getattr(tokenizer, "bos_token_id", None)
    if start is not None and getattr(tokenizer, "add_bos_token", False):
        ids.append(start)
    for name, content in around.others:
        ids += text(_SNIPPET + content) if separator is None else [*mark(separator), *text(f"{name}\n{content}")]
    if around.others and separator is not None:
        ids += mark(separator)
    before = [*mark(tokens.prefix), *text(around.prefix)]
    behind = [*mark(tokens.suffix), *text(around.suffix)]
    return ids + (behind + before if tokens.suffix_first else before + behind) + mark(tokens.middle)


def fim_ends(tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer between two texts, besides the model's own."""
    known = _vocabulary(tokenizer)
    return [known[name] for name in _ENDS if name in known]


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    found: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    return found
