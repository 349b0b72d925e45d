"""How byte-level vocabularies cut text into words, by the name in `tokenizer.ggml.pre`.

Names, expressions and what a name implies are llama.cpp's (src/llama-vocab.cpp, llm_tokenizer_bpe and
llama_vocab::impl::load). Where llama.cpp writes letters by case as lookaheads, for want of categories (tekken,
gpt-4o), the expression of the model's own tokenizer stands here. Text between the matches of an expression is a word
as well, and each word is cut again by the next.
"""

from dataclasses import dataclass

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


DEFAULT = Splits((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_DIGITS = Splits((r"\p{N}", _GPT2))
_PLAIN = Splits((_GPT2,))
_LLAMA3_LIKE = Splits((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_LIKE = Splits((_QWEN2,))
_GPT4O_LIKE = Splits((_GPT4O,))
_BLOOM = Splits((_NO_STOPS,))
_V3 = Splits(
    (r"\p{N}{1,3}", rf"[{_HAN}{_KANA}]+", rf"{_DEEPSEEK3}[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
)
_BAILING = Splits(
    (
        rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORDS}|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_SPACES = "|".join(
    rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
)

_BY_NAMES: dict[str, Splits] = {
    "default": DEFAULT,
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _LLAMA3_LIKE,
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
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _V3,
    "spark2_5": Splits(
        (r"\p{N}{1,3}", rf"[{_HAN}{_KANA}]+", rf"{_DEEPSEEK3}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")
    ),
    "youtu": Splits((_YOUTU, _by_case(rf"(?:{_SUFFIXES})?", "")), ignore_merges=True),
    "falcon": Splits((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": _DIGITS,
    "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
    "modern-bert exaone4 mpt olmo jais trillion granite-docling": _PLAIN,
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": _QWEN2_LIKE,
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
    "bailingmoe bailingmoe2 llada-moe": _BAILING,
    "exaone-moe": Splits(
        (
            rf"(?:{_SUFFIXES})|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "poro-chat bloom gpt3-finnish": _BLOOM,
    "viking": Splits((_NO_STOPS, r"\p{N}")),
    "tekken": Splits((_by_case("", ""),), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _GPT4O_LIKE,
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
