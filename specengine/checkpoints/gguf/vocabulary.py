"""The tokens of a GGUF file, which of them end an answer, and its tokenizer: text becomes the tokens of llama.cpp.

Source: llama.cpp's src/llama-vocab.cpp, llama_vocab::impl::load. What it reads for other kinds of vocabularies alone
(precompiled_charsmap, remove_extra_whitespaces, normalizer, add_sep_token) changes nothing here either. Ends are the
file's own ids, and control tokens of well-known texts, for many files name one end alone. An id outside of the
vocabulary is none, as there. Two things differ. A byte-level file that names no end has none but those texts. A token
that the file types as plain text, or as the user's, is what the file says, whatever it looks like.
"""

import re
import sys
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from specengine.checkpoints.gguf.file import GGUFFile
from specengine.errors import (
    CheckpointError,
    require_intact,
    require_supported,
    restating,
)


class TokenKind(IntEnum):
    """Kinds of tokens, by their number in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Splits:
    """Rules that split text into words.

    expressions    each cuts the words that the one before left, the whole text first
    ignore_merges  a word that is a token is taken whole, whatever the merges say
    add_bos        a prompt begins with the first token where the file does not say
    """

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


# where the file names none
_SENTENCEPIECE_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
_IS_ID = re.compile(r"tokenizer\.ggml\.\w+_token_id")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = frozenset(
    {
        *(
            "</s>",
            "<eos>",
            "[EOS]",
            "<EOT>",
            "_<EOT>",
            "[EOT]",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|im_end|>",
            "<|end|>",
        ),
        *(
            "<|endoftext|>",
            "<|end_of_text|>",
            "<end_of_turn>",
            "<end_of_utterance>",
            "<turn|>",
            "<|tool_response>",
        ),
        *(
            "<|return|>",
            "<|call|>",
            "<|calls|>",
            "<|flush|>",
            "[e~[",
            "<\uff5cend\u2581of\u2581sentence\uff5c>",
        ),
    }
)
# Marks of files and repositories, which end an answer as well: the file's id, or the first of these texts.
_FILE_MARKS = {
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep_token_id": ("<|file_sep|>",),
}
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # of gpt-oss
# With all of one set there, `<|end|>` ends a part of an answer alone.
_WITH_PARTS = (
    {"<|return|>", "<|call|>"},
    {"<|return|>", "<|calls|>"},
    {"<|flush|>", "<|call|>"},
    {"<|flush|>", "<|calls|>"},
)


def special_id(file: GGUFFile, key: str, vocabulary: int) -> int | None:
    """Return the token id that the file gives for a role, as eos_token_id; None where there is none.

    An id outside of the vocabulary, of that many tokens, is as if the file gave none. CheckpointError for other values.
    """
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    require_intact(
        f"{file.path}: tokenizer.ggml.{key} must be a token id, not {str(value)[:80]}",
        value is None or type(value) is int,
    )
    if value is not None and 0 <= value < vocabulary:
        return value
    default = (
        _SENTENCEPIECE_IDS.get(key)
        if file.metadata.get("tokenizer.ggml.model") == "llama"
        else None
    )
    return default if default is not None and default < vocabulary else None


def end_ids(file: GGUFFile, vocabulary: int) -> int | list[int] | None:
    """Return the tokens that end an answer, the file's eos first, as a config has them. Raises as `special_id`.

    Ids outside of the vocabulary are noted on stderr.
    """
    texts = file.metadata.get("tokenizer.ggml.tokens")
    texts = (
        texts if isinstance(texts, list) and all(isinstance(text, str) for text in texts) else []
    )
    vocabulary = len(texts) or vocabulary
    eos, ends = special_id(file, "eos_token_id", vocabulary), Tokens(file, texts, vocabulary).ends
    ending = "" if ends else "; no token ends an answer: give eos_token_id= or max_new_tokens="
    for key, value in file.metadata.items():
        if _IS_ID.fullmatch(key) and type(value) is int and not 0 <= value < vocabulary:
            note = f"{file.path.name}: {key} = {value} is no token of {vocabulary}, and not read"
            print(note + ending * (key.removeprefix(_GGML) in _END_KEYS), file=sys.stderr)
    ordered = [*([eos] if eos in ends else []), *sorted(ends - {eos})]
    return None if not ordered else ordered[0] if len(ordered) == 1 else ordered


@dataclass(frozen=True)
class Tokens:
    """The texts of tokens in the order of their ids; vocabulary: rows of the model's embeddings."""

    file: GGUFFile
    texts: list[str]
    vocabulary: int

    @cached_property
    def ids(self) -> dict[str, int]:
        return {text: number for number, text in enumerate(self.texts)}

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(self._named_ends - self._parts - self._words)

    @cached_property
    def kinds(self) -> list[TokenKind]:
        """The kind of each token, as the file says; control for ends and marks of files that its ids name."""
        changed = (
            dict.fromkeys(self._named_ends, TokenKind.CONTROL)
            | dict.fromkeys(self._of(*_ALWAYS_SHOWN) | self._parts, TokenKind.USER_DEFINED)
            | dict.fromkeys(self._words, TokenKind.NORMAL)
        )
        return [
            changed.get(number, _KINDS.get(value, TokenKind.NORMAL))
            for number, value in enumerate(self._stated)
        ]

    @cached_property
    def _stated(self) -> list[Any]:
        stated = self.file.metadata.get("tokenizer.ggml.token_type")
        kinds = stated if isinstance(stated, list) else []
        return [*kinds, *[None] * (len(self.texts) - len(kinds))]

    @cached_property
    def _named_ends(self) -> set[int]:
        stated = {special_id(self.file, key, self.vocabulary) for key in _END_KEYS}
        ends = self._of(*_END_TEXTS) | {number for number in stated if number is not None}
        for key, texts in _FILE_MARKS.items():
            number = special_id(self.file, key, self.vocabulary)
            ends |= next(filter(None, map(self._of, texts)), set()) if number is None else {number}
        return ends

    @cached_property
    def _parts(self) -> set[int]:
        """Tokens that end a part of an answer alone."""
        there = {self.texts[number] for number in self._named_ends if number < len(self.texts)}
        return self._of("<|end|>") if any(texts <= there for texts in _WITH_PARTS) else set()

    @cached_property
    def _words(self) -> set[int]:
        """Tokens with the text of an end that are words: Gemma 4's `</s>`."""
        return self._of("</s>") if "<|tool_response>" in self.ids else set()

    def _of(self, *texts: str) -> set[int]:
        """Return the control tokens of these texts; where the file states no kinds, all tokens of them."""
        return {
            number
            for text in texts
            if (number := self.ids.get(text)) is not None
            and self._stated[number] in (None, TokenKind.CONTROL)
        }


_KINDS: dict[Any, TokenKind] = {kind.value: kind for kind in TokenKind}


_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_SPACE = "\u2581"
_GGML, _TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
_READ = frozenset(
    {
        *("model", "pre", "tokens", "token_type", "scores", "merges", "suppress_tokens"),
        *("add_bos_token", "add_eos_token", "add_space_prefix"),
        *(f"{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding")),
        *(f"fim_{name}_token_id" for name in ("pad", "rep", "sep")),
    }
)
_WITHOUT_EFFECT = frozenset(
    {
        *("token_type_count", "add_sep_token", "remove_extra_whitespaces", "precompiled_charsmap"),
        *("normalizer.lowercase", "normalizer.strip_accents"),
        *(
            f"{name}_token_id"
            for name in ("seperator", "separator", "mask", "cls", "prefix", "suffix", "middle")
        ),
        *(f"fim_{name}_token_id" for name in ("pre", "suf", "mid")),
    }
)


def tokenizer(file: GGUFFile) -> transformers.PreTrainedTokenizerFast:
    """Return the tokenizer of the file, chat templates included; metadata that it does not read is noted on stderr.

    Raises UnsupportedModelError for a vocabulary of another kind, CheckpointError for one that contradicts itself.
    """
    _require_vocabulary(file)
    tokens = _tokens(file)
    ids = {name: special_id(file, key, len(tokens.texts)) for name, key in _SPECIAL_TOKENS.items()}
    special = {
        name: None if number is None else tokens.texts[number] for name, number in ids.items()
    }
    splits = _splits(file) if file.metadata["tokenizer.ggml.model"] == "gpt2" else None
    options = _options(file, ids, splits)
    read_keys = {f"{_GGML}{name}" for name in _READ | _WITHOUT_EFFECT}
    others = [key for key in file.metadata if key.startswith(_GGML) and key not in read_keys]
    if others:
        _note(
            file,
            f"has {', '.join(key[:80] for key in others[:6])}, which is not read: its tokens may be others",
        )
    # whatever transformers and tokenizers meet in a vocabulary that contradicts itself
    with restating(
        Exception,
        lambda error: CheckpointError(
            f"{file.path}: no tokenizer can be built from its vocabulary: {error}"
        ),
    ):
        backend = (
            _sentencepiece(file, tokens, special["unk_token"])
            if splits is None
            else _byte_level(file, tokens, splits)
        )
        controls = {number for number in ids.values() if number is not None} | {
            number
            for number, kind in enumerate(tokens.kinds)
            if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN)
        }
        users = [  # whole words in any text
            number
            for number, kind in enumerate(tokens.kinds)
            if kind is TokenKind.USER_DEFINED and number not in controls
        ]
        backend.add_special_tokens(
            [AddedToken(tokens.texts[i], normalized=False, special=True) for i in sorted(controls)]
        )
        backend.add_tokens(
            [AddedToken(tokens.texts[i], normalized=False, special=False) for i in users]
        )
        return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **options, **special)


def _byte_level(file: GGUFFile, tokens: Tokens, splits: Splits) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(
        models.BPE(vocab=tokens.ids, merges=merges, ignore_merges=splits.ignore_merges)
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(
                pre_tokenizers.Split(Regex(expression), "isolated")
                for expression in splits.expressions
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GGUFFile, tokens: Tokens, unknown: str | None) -> Tokenizer:
    backend = Tokenizer(
        models.BPE(
            vocab=tokens.ids,
            merges=_merges(file, tokens),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    escaped = normalizers.Replace(" ", _SPACE)
    after = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _is_merged(file):
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    if _flag(
        file, "add_space_prefix", not _is_merged(file)
    ):  # before the text, and what follows a special token
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), escaped])
        after.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = escaped
    backend.decoder = decoders.Sequence(after)
    return backend


def _merges(file: GGUFFile, tokens: Tokens) -> list[tuple[str, str]]:
    """Return the merges that make tokens of two others, the best score first; the file's own where it has no scores."""
    scores = file.metadata.get("tokenizer.ggml.scores")
    if scores is None or _is_merged(file):
        return [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
    apart = (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.BYTE)  # never made of letters
    whole = {
        text for text, kind in zip(tokens.texts, tokens.kinds, strict=True) if kind not in apart
    }
    pairs = [
        (score, text[:cut], text[cut:])
        for text, score in zip(tokens.texts, scores, strict=True)
        if text in whole
        for cut in range(1, len(text))
        if text[:cut] in whole and text[cut:] in whole
    ]
    pairs.sort(key=lambda merge: (-merge[0], -len(merge[1])))
    return [(left, right) for _, left, right in pairs]


def _options(file: GGUFFile, ids: dict[str, int | None], splits: Splits | None) -> dict[str, Any]:
    first = _flag(file, "add_bos_token", True if splits is None else splits.add_bos) or _is_merged(
        file
    )
    last = _flag(file, "add_eos_token", False)
    for name, adds in (("bos", first), ("eos", last)):
        require_intact(
            f"{file.path}: add_{name}_token is true, and tokenizer.ggml.{name}_token_id names no token",
            not adds or ids[f"{name}_token"] is not None,
        )
    options = {"add_bos_token": first, "add_eos_token": last, "clean_up_tokenization_spaces": False}
    return options | ({"chat_template": template} if (template := _chat_template(file)) else {})


def _chat_template(file: GGUFFile) -> str | dict[str, str] | None:
    """Return the template, or with named ones as well (as tool_use) all by name."""
    templates = {
        key: value
        for key, value in file.metadata.items()
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")
    }
    wrong = next((key for key, value in templates.items() if not isinstance(value, str)), None)
    require_intact(f"{file.path}: {(wrong or '')[:80]} must be text", wrong is None)
    named = {
        key.removeprefix(_TEMPLATE).removeprefix(".") or "default": value
        for key, value in templates.items()
    }
    return templates.get(_TEMPLATE) if templates.keys() <= {_TEMPLATE} else named


def _splits(file: GGUFFile) -> Splits:
    name = file.metadata.get("tokenizer.ggml.pre")
    if name is None or name == "":
        _note(
            file,
            "has no tokenizer.ggml.pre, so text is split as by default; a newer conversion may answer better",
        )
        return DEFAULT
    require_intact(
        f"{file.path}: tokenizer.ggml.pre must be text, not {str(name)[:80]}", isinstance(name, str)
    )
    require_supported(
        f"{file.path}: tokenizer.ggml.pre = {name[:80]!r} is unknown, so text cannot be split; accepted: "
        f"{', '.join(SPLITS)}; pass tokenizer=, or prompts as token ids",
        name in SPLITS,
    )
    return SPLITS[name]


def _flag(file: GGUFFile, name: str, default: bool) -> bool:
    value = file.metadata.get(f"{_GGML}{name}", default)
    require_intact(
        f"{file.path}: {_GGML}{name} must be true or false, not {str(value)[:80]}",
        isinstance(value, bool),
    )
    return value


def _note(file: GGUFFile, text: str) -> None:
    print(f"tokenizer of {file.path.name}: the file {text}", file=sys.stderr)


def _is_merged(file: GGUFFile) -> bool:
    """Return whether its pieces are those of SentencePiece, and its merges count: Gemma 4's vocabulary."""
    return bool(file.metadata["tokenizer.ggml.model"] == "gemma4")


def _tokens(file: GGUFFile) -> Tokens:
    texts = [
        text or f"[EMPTY_{number}]"
        for number, text in enumerate(file.metadata["tokenizer.ggml.tokens"])
    ]
    tokens = Tokens(file, texts, len(texts))
    if len(tokens.ids) < len(texts):
        twice = next(text for number, text in enumerate(texts) if tokens.ids[text] != number)
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens holds {twice[:80]!r} twice")
    return tokens


def _require_vocabulary(file: GGUFFile) -> None:
    """Refuse a vocabulary of another sort, and lists of the wrong type or length."""
    model = file.metadata.get("tokenizer.ggml.model")
    shown = "no tokenizer" if model is None else f"a tokenizer of kind {str(model)[:80]!r}"
    require_supported(
        f"{file.path} has {shown}; accepted: gpt2 (byte-level BPE), llama (SPM), gemma4; pass tokenizer=, "
        "or prompts as token ids",
        model in ("gpt2", "llama", "gemma4"),
    )
    tokens = _listed(file, "tokens", str)
    for name, kind in {"token_type": int, "scores": float}.items():
        require_intact(
            f"{file.path}: tokenizer.ggml.{name} must be as long as the {len(tokens)} tokens",
            f"tokenizer.ggml.{name}" not in file.metadata
            or len(_listed(file, name, kind)) == len(tokens),
        )
    if model in ("gpt2", "gemma4") or (
        "tokenizer.ggml.scores" not in file.metadata and "tokenizer.ggml.merges" in file.metadata
    ):
        merges = _listed(file, "merges", str)
        wrong = next((merge for merge in merges if merge.count(" ") != 1), None)
        require_intact(
            f"{file.path}: a merge must be two pieces with one space between, not {(wrong or '')[:80]!r}",
            wrong is None,
        )
    else:
        _listed(file, "scores", float)


def _listed(file: GGUFFile, name: str, kind: type) -> list[Any]:
    value: Any = file.metadata.get(f"tokenizer.ggml.{name}")
    require_intact(
        f"{file.path}: tokenizer.ggml.{name} must be a list of {kind.__name__}, not empty",
        isinstance(value, list) and bool(value) and type(value[0]) is kind,
    )
    return value


# ---- how text is cut into words, by the name in `tokenizer.ggml.pre`

# Names, expressions and what a name implies are llama.cpp's (src/llama-vocab.cpp, llm_tokenizer_bpe and
# llama_vocab::impl::load). Where llama.cpp writes letters by case as lookaheads, for want of categories (tekken,
# gpt-4o), the expression of the model's own tokenizer stands here. Text between the matches of an expression is a word
# as well, and each word is cut again by the next.

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIXES = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"(?:{_SUFFIXES})|{_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}"
_QWEN2 = rf"(?:{_SUFFIXES})|{_WORDS}|\p{{N}}|{_OTHERS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OTHERS_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _by_case(suffix: str, digits: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return rf"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}|\p{{N}}{digits}|{_OTHERS_WITH_SLASH}"


_GPT4O = _by_case(rf"(?:{_SUFFIXES})?", "{1,3}")
_HAN, _KANA = r"\x{4E00}-\x{9FA5}", r"\x{3040}-\x{309F}\x{30A0}-\x{30FF}"
_CJK = rf"[{_HAN}\x{{0800}}-\x{{4E00}}\x{{AC00}}-\x{{D7FF}}]+"
_SIGN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK3 = rf"{_SIGN}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
_CASED = r"(?:(?![\x{1D400}-\x{1D7FF}])[\p{Lu}\p{Ll}\p{Lt}])"  # no mathematical letters
_NO_STOPS = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{0964}\x{06D4}\x{060C})]+"
_YOUTU = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+"
    r"|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}"
    rf"\x{{FE30}}-\x{{FE4F}}]+|[\x{{3105}}-\x{{312F}}]+|[{_HAN}{_KANA}]+"
)


DEFAULT = Splits((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_SPACES = "|".join(
    rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
)

_BY_NAMES: dict[str, Splits] = {
    "default": DEFAULT,
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Splits(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": Splits((_LLAMA3,)),
    "glm4 glm5": Splits((_LLAMA3,), ignore_merges=True),
    "minicpm5": Splits(
        (r"\p{N}{1,3}", rf"(?:{_SUFFIXES})|{_WORDS}|\p{{N}}+|{_OTHERS}"),
        ignore_merges=True,
    ),
    "jais-2": Splits(
        (
            rf"(?:{_SUFFIXES})|{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}|\s{{1}}",
        )
    ),
    "deepseek-llm": Splits(
        (
            r"[\r\n]",
            rf"\s?{_CASED}+",
            r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Splits((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Splits(
        (r"\p{N}{1,3}", rf"[{_HAN}{_KANA}]+", rf"{_DEEPSEEK3}[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    ),
    "spark2_5": Splits(
        (r"\p{N}{1,3}", rf"[{_HAN}{_KANA}]+", rf"{_DEEPSEEK3}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")
    ),
    "youtu": Splits((_YOUTU, _by_case(rf"(?:{_SUFFIXES})?", "")), ignore_merges=True),
    "falcon": Splits((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": Splits(
        (r"\p{N}", _GPT2)
    ),
    "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
    "modern-bert exaone4 mpt olmo jais trillion granite-docling": Splits((_GPT2,)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": Splits(
        (_QWEN2,)
    ),
    "qwen35": Splits(
        (
            rf"(?:{_SUFFIXES})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    "ufakzeka": Splits((rf"{_WORDS}|\p{{N}}|{_OTHERS}",)),
    "laguna": Splits((r"[^\n]+|[\n]+", _QWEN2)),
    "seed-coder": Splits(
        (
            rf"(?:{_SUFFIXES})|{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    "bailingmoe bailingmoe2 llada-moe": Splits(
        (
            rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORDS}|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "exaone-moe": Splits(
        (
            rf"(?:{_SUFFIXES})|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "poro-chat bloom gpt3-finnish": Splits((_NO_STOPS,)),
    "viking": Splits((_NO_STOPS, r"\p{N}")),
    "tekken": Splits((_by_case("", ""),), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Splits((_GPT4O,)),
    "granite-embed-multi-97m": Splits((_GPT4O,), ignore_merges=True),
    "superbpe": Splits((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "chameleon": Splits(
        (
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
}
SPLITS = {name: splits for names, splits in _BY_NAMES.items() for name in names.split()}
