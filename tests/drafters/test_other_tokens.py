"""Small models with another tokenizer: the text is the target's in the draft's tokens, and answers stay exact."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from specengine import Engine, policies
from specengine.drafters.lookup import Lookup
from specengine.drafters.recycling import Recycling
from specengine.drafters.small_model import TAIL, Alignment, SmallModel, written_by
from specengine.errors import TokenizerMismatchError, UnsupportedModelError
from specengine.models.native import NativeTarget
from tests.models.native_engines import native_lm, needs_extension
from tests.toy import SPECIAL, VOCABULARY, byte_tokenizer, policy_for, tiny

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on\n\n",
    "def walk(tree, choose):\n    for node in tree:\n        yield choose(node)\n",
    "naïve Größe: 你好 你好, 3.14 \N{GRINNING FACE} the end.\n",
] * 4
TEXT = "the fox walks over a naïve tree:\n    你好 3.14 \N{GRINNING FACE}\n\nthe end of the dog"
SIZE = 400
# but SentencePiece's own blank, which its tokenizers read as one
LETTERS = st.characters(codec="utf-8", exclude_characters="\u2581")
TEXTS = st.text(LETTERS, max_size=40) | st.sampled_from(CORPUS)
SAMPLED = {"temperature": 0.9, "seed": 5}


def trained(special: Sequence[str], eos: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE with merges."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=list(special),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos)


def sentencepiece(special: Sequence[str], eos: str) -> PreTrainedTokenizerFast:
    """Pieces with a blank before the text, and bytes where no piece fits, as Llama 2 has."""
    pieces = ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(set("".join(CORPUS)) - set(" \n\N{GRINNING FACE}你"))
    vocabulary = {piece: id for id, piece in enumerate([*pieces, "\u2581", *letters])}
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("\u2581", "the"),
        ("d", "o"),
        ("do", "g"),
        ("\u2581", "\u2581"),
    ]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    core = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=eos,
        unk_token="<unk>",
        additional_special_tokens=[*special],
    )


def shuffled() -> PreTrainedTokenizerFast:
    """The tokens of `byte_tokenizer` under other ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    random.Random(3).shuffle(alphabet)
    core = Tokenizer(models.BPE(vocab={byte: id for id, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.add_special_tokens({"additional_special_tokens": list(reversed(SPECIAL))})
    return tokenizer


KINDS: dict[str, Any] = {
    "bytes": byte_tokenizer,
    "bytes under other ids": shuffled,
    "merges": lambda: trained(("<|stop|>", "<|user|>"), "<|stop|>"),
    "other merges": lambda: trained(("<s>", "<|user|>"), "<s>"),
    "sentencepiece": lambda: sentencepiece(("<s>", "</s>"), "</s>"),
}
tokenizer_of = cache(lambda kind: KINDS[kind]())


@cache
def alignment_of(target: str, draft: str) -> Alignment:
    theirs, ours = tokenizer_of(target), tokenizer_of(draft)
    written = written_by(theirs, len(theirs)), written_by(ours, len(ours))
    return Alignment(*written, ours, len(theirs))


def joined(written: dict[int, bytes], tokens: Sequence[int]) -> bytes:
    return b"".join(written[token] for token in tokens)


def plain_tokens(kind: str) -> list[int]:
    """All tokens but the special ones."""
    special = set(tokenizer_of(kind).all_special_ids)
    return [token for token in range(len(tokenizer_of(kind))) if token not in special]


@cache
def target_of(kind: str, family: str = "llama") -> PreTrainedModel:
    return tiny(family, vocab_size=len(tokenizer_of(kind)))


@cache
def translated_model(target: str, draft: str, family: str = "llama") -> PreTrainedModel:
    """The target with the draft's ids: right wherever the text has the same tokens in both."""
    model, alignment = copy.deepcopy(target_of(target, family)), alignment_of(target, draft)
    own = tiny(family, vocab_size=len(tokenizer_of(draft)))
    with torch.no_grad():
        for theirs, ours in (
            (model.get_input_embeddings(), own.get_input_embeddings()),
            (model.get_output_embeddings(), own.get_output_embeddings()),
        ):
            ours.weight[alignment.columns] = theirs.weight[alignment.token_ids]
    model.set_input_embeddings(own.get_input_embeddings())
    model.set_output_embeddings(own.get_output_embeddings())
    model.config.vocab_size = len(tokenizer_of(draft))
    return model


def drafter_of(target: str, draft: str, family: str = "llama") -> SmallModel:
    model = native_lm(translated_model(target, draft, family))
    return SmallModel(model, alignment=alignment_of(target, draft))


def engine_of(
    target: str, draft: str | None, policy: Any = "eagle", family: str = "llama"
) -> Engine:
    lm = native_lm(target_of(target, family))
    if draft is None:
        return Engine(NativeTarget(lm), None, None, tokenizer_of(target))
    chosen = policy_for(policy) if isinstance(policy, str) else policy
    return Engine(NativeTarget(lm), drafter_of(target, draft, family), chosen, tokenizer_of(target))


def prompts(kind: str, count: int) -> list[list[int]]:
    """Texts of all scripts, with special tokens, cut anywhere; and any tokens at all."""
    tokenizer, pick = tokenizer_of(kind), random.Random(kind)
    found = []
    for number in range(count):
        text = "".join(pick.choice(CORPUS) for _ in range(1 + number % 3))[number : 60 + 3 * number]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for _ in range(number % 4):
            ids.insert(pick.randrange(len(ids) + 1), pick.choice(tokenizer.all_special_ids or ids))
        found.append([*ids, *(pick.randrange(len(tokenizer)) for _ in range(number % 5 + 1))])
    return found


# ---------------------------------------------------------------------------------------------------- text


@given(st.sampled_from([*KINDS]), st.lists(TEXTS, max_size=6))
def test_tokens_write_the_bytes_that_they_are_made_of(kind: str, texts: list[str]) -> None:
    alignment, data = alignment_of(kind, kind), "".join(texts).encode()
    for part in (
        data,
        data[1:],
        data[:-1],
        data[1:-2],
    ):  # which may begin or end within a character
        assert joined(alignment.draft, alignment.encode(part)) == part


@given(st.data())
def test_a_text_in_other_tokens_writes_the_same_bytes(data: st.DataObject) -> None:
    target, draft = data.draw(st.sampled_from([*KINDS])), data.draw(st.sampled_from([*KINDS]))
    alignment = alignment_of(target, draft)
    text, written = alignment.start, b""
    plain = plain_tokens(target)
    for tokens in data.draw(st.lists(st.lists(st.sampled_from(plain), max_size=12), max_size=30)):
        before, text = text, alignment.extended(text, tokens)
        written += joined(alignment.target, tokens)
        assert joined(alignment.draft, text) == written
        firm = len(before) - TAIL
        assert firm < 0 or text[:firm] == before[:firm]
        assert alignment.extended(before, tokens, len(before))[: len(before)] == before


@pytest.mark.parametrize("draft", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_a_text_that_grows_has_the_tokens_of_the_whole_one(target: str, draft: str) -> None:
    alignment = alignment_of(target, draft)
    tokens = tokenizer_of(target)(TEXT, add_special_tokens=False)["input_ids"]
    text, whole = alignment.start, alignment.extended(alignment.start, tokens)
    for token in tokens:
        text = alignment.extended(text, [token])
    assert text == whole
    assert whole[-3:] == tokenizer_of(draft)(TEXT, add_special_tokens=False)["input_ids"][-3:]


def test_special_tokens_go_by_their_name_and_no_text_is_one() -> None:
    alignment, ids = alignment_of("merges", "other merges"), alignment_of("merges", "merges")
    stop, user, begin, own_user = 0, 1, 0, 1
    pairs = dict(zip(alignment.token_ids.tolist(), alignment.columns.tolist(), strict=True))
    assert pairs[user] == own_user
    assert stop not in pairs
    assert begin not in pairs.values()
    tokens = [*ids.encode(b"the dog"), user, *ids.encode(b"the"), stop, *ids.encode(b" fox")]
    text = alignment.extended(alignment.start, tokens)
    assert text.count(own_user) == 1
    assert begin not in text
    # one without a counterpart is read as its name
    assert text == [
        *alignment.encode(b"the dog"),
        own_user,
        *alignment.encode(b"the"),
        *alignment.encode(b"<|stop|>"),
        *alignment.encode(b" fox"),
    ]
    spelt = alignment.extended(alignment.start, ids.encode(b"a <|user|> <s> b"))
    assert not {begin, own_user} & set(spelt)
    assert joined(alignment.draft, spelt) == b"a <|user|> <s> b"


def test_tokenizers_whose_pieces_are_no_bytes_are_refused() -> None:
    core = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(
        TokenizerMismatchError, match="its pieces do not say which bytes they write"
    ):
        written_by(PreTrainedTokenizerFast(tokenizer_object=core), 2)


# ---------------------------------------------------------------------------------------------------- answers


@pytest.mark.sliced(1)
@pytest.mark.parametrize("branching", [(1, 1, 1, 1), (3, 2, 1)], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text", "lfm2", "falcon_h1"])
def test_the_same_tokens_under_other_ids_are_always_right(
    family: str, branching: tuple[int, ...]
) -> None:
    """Any bytes at all, most of which are no whole characters: a slip of the text would show in what is drafted."""
    policy = policies.make("fixed", branching=branching)
    engine = engine_of("bytes", "bytes under other ids", policy, family)
    for prompt in prompts("bytes", 6):
        plain = engine_of("bytes", None, family=family).generate(prompt, max_new_tokens=41)
        for _ in range(2):
            result = engine.generate(prompt, max_new_tokens=41)
            assert result.token_ids == plain.token_ids
            assert result.stats.num_spec_steps == -(-41 // (1 + len(branching)))


PAIRS = [
    ("bytes", "merges"),
    ("bytes", "sentencepiece"),
    ("merges", "bytes"),
    ("merges", "other merges"),
    ("other merges", "sentencepiece"),
    ("sentencepiece", "bytes"),
    ("sentencepiece", "merges"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_answers_to_48_prompts_are_those_of_plain_decoding(target: str, draft: str) -> None:
    plain = engine_of(target, None)
    engines = [engine_of(target, draft, policy) for policy in ("chain", "eagle", "auto")]
    for number, prompt in enumerate(prompts(target, 48)):
        for how in ({}, SAMPLED | {"seed": number}):
            expected = plain.generate(prompt, max_new_tokens=12, **how).token_ids
            result = engines[number % 3].generate(prompt, max_new_tokens=12, **how)
            assert result.token_ids == expected


@pytest.mark.parametrize("draft", ["merges", "sentencepiece"])
def test_lanes_answer_as_they_do_alone(draft: str) -> None:
    engine, plain = engine_of("bytes", draft), engine_of("bytes", None)
    shared = [*range(60, 120)]  # of which a cache is copied
    asked = [*prompts("bytes", 8), *([*shared, 7 + number, 9] for number in range(4))]
    for how in ({}, SAMPLED):
        alone = [plain.generate(prompt, max_new_tokens=10, **how).token_ids for prompt in asked]
        many = engine.generate_many(asked, parallel=3, max_new_tokens=10, **how)
        assert [result.token_ids for result in many] == alone


@pytest.mark.parametrize("policy", ["eagle", "auto"])
def test_copies_and_grammars_may_bring_tokens_that_are_not_shared(policy: str) -> None:
    plain = engine_of("merges", None)
    mixed = Lookup(drafter_of("merges", "sentencepiece"), Recycling())
    engine = Engine(plain.target, mixed, policy_for(policy), tokenizer_of("merges"))
    for how in ({}, SAMPLED, {"json_schema": {"type": "array", "items": {"type": "integer"}}}):
        for prompt in prompts("merges", 6):
            expected = plain.generate(prompt, max_new_tokens=16, **how).token_ids
            assert engine.generate(prompt, max_new_tokens=16, **how).token_ids == expected


# ---------------------------------------------------------------------------------------------------- loading


def test_a_folder_with_another_tokenizer_is_a_draft(tmp_path: Path) -> None:
    translated_model("bytes", "merges").save_pretrained(tmp_path)
    tokenizer_of("merges").save_pretrained(tmp_path)
    model, options = target_of("bytes"), {"tokenizer": tokenizer_of("bytes"), "offline": True}
    for backend in (None, "huggingface"):
        engine = Engine.from_pretrained(model, str(tmp_path), "eagle", backend=backend, **options)
        plain = Engine.from_pretrained(model, "none", backend=backend, **options)
        for how in ({}, SAMPLED):
            results = [each.generate(TEXT, max_new_tokens=20, **how) for each in (plain, engine)]
            assert results[0].token_ids == results[1].token_ids
        assert results[1].stats.num_draft_tokens > 0
    with pytest.raises(UnsupportedModelError, match="another one than the target's"):
        Engine.from_pretrained(model, str(tmp_path), graphs=True, **options)


def test_vocabularies_of_fewer_rows_than_tokens_propose_none_beyond(tmp_path: Path) -> None:
    tiny("llama", vocab_size=100).save_pretrained(tmp_path)
    tokenizer_of("merges").save_pretrained(tmp_path)
    options = {"tokenizer": tokenizer_of("bytes"), "offline": True}
    engine = Engine.from_pretrained(
        tiny("llama", vocab_size=VOCABULARY - 9), str(tmp_path), **options
    )
    assert len(engine.generate([5, 6, 7], max_new_tokens=12).token_ids) == 12
