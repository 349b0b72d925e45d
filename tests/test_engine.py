"""The engine on tiny random models of eight families: equal to plain decoding, and everything around it."""

import copy
import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    StopStringCriteria,
    TextStreamer,
)
from transformers.generation import TopPLogitsWarper

import specengine
from specengine import Engine, policies
from specengine.cache import GRANULE, KVCache
from specengine.cycle import Cycle, Seconds, Stats
from specengine.drafters.ngram import NGram
from specengine.drafters.small_model import SmallModel, first_layers
from specengine.engine import GenerationResult, SpeculativeOutput
from specengine.errors import InputError
from specengine.sampling import PresenceFrequencyPenalty, TopP
from specengine.targets.huggingface import HuggingFaceTarget
from specengine.tree import TokenTree
from tests.toy import FAMILIES, VOCABULARY, RecordingStreamer, byte_tokenizer, policy_for, random_tree, tiny

POLICIES = [*(name for name in policies.names() if name != "plain"), "random"]
PROMPT = [*range(40, 56), *range(40, 50)]


pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def model_of(family: str = "llama") -> PreTrainedModel:
    return tiny(family)


@cache
def untouched(family: str = "llama") -> PreTrainedModel:
    """The same weights, never seen by an engine."""
    return tiny(family)


@cache
def near_copy(family: str = "llama") -> PreTrainedModel:
    """A draft that often agrees: the same model with noise on its weights."""
    model = copy.deepcopy(tiny(family))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter += 0.04 * parameter.std() * torch.randn_like(parameter)
    return model


def plainly(family: str, prompt: list[int], count: int, **options: Any) -> list[int]:
    """What transformers' own greedy generate answers."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "pad_token_id": 0, **options}
    out = untouched(family).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options)
    return out[0, len(prompt) :].tolist()


def engine_of(
    family: str = "llama", draft: str = "small_model", policy: str = "eagle", tokenizer: Any = None
) -> Engine:
    """A new engine over the shared model of that family; draft `none` decodes plainly."""
    target = HuggingFaceTarget(model_of(family))
    if draft == "none":
        return Engine(target, None, None, tokenizer)
    drafter = NGram(longest=3, shortest=1) if draft == "ngram" else SmallModel(near_copy(family))
    return Engine(target, drafter, policy_for(policy, 3), tokenizer)


# ---------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("draft", ["ngram", "small_model"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_generate(family: str, policy: str, draft: str) -> None:
    engine = engine_of(family, draft, policy)
    result = engine.generate(PROMPT, max_new_tokens=32)
    assert result.token_ids == plainly(family, PROMPT, 32)
    assert engine.target.cache.length == len(engine.target.tokens) == len(PROMPT) + 31
    if draft == "small_model":
        assert result.stats.num_accepted_draft_tokens >= 5


def test_the_model_stays_usable_by_itself() -> None:
    assert engine_of("qwen2").target.lm.attention == "tree"
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    for options in ({}, {"num_beams": 2}):
        given = [
            model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0, **options)
            for model in (model_of("qwen2"), untouched("qwen2"))
        ]
        assert torch.equal(*given)


class DependsOnThePath(LogitsProcessor):
    """A bias that changes with every token before: wrong as soon as a node is given another path than its own."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        weights = torch.arange(1, input_ids.shape[1] + 1)
        key = int((input_ids[0] * weights).sum())
        return scores + 3.0 * torch.sin(torch.arange(scores.shape[1]) * (key % 97 + 1.0))


class InPlace(LogitsProcessor):
    """Changes the scores it is given, as some processors do."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, input_ids[0, -1]] = -float("inf")
        return scores


GREEDY_OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 1},
    {"bad_words_ids": [*([token] for token in range(0, VOCABULARY, 5)), [1, 2], [1, 2, 3]]},
    {"min_new_tokens": 20, "eos_token_id": list(range(0, VOCABULARY, 2))},
    {"suppress_tokens": list(range(0, VOCABULARY, 3))},
    {"sequence_bias": [[[9], 8.0], [[9, 10], -20.0]]},
    {"logits_processor": [DependsOnThePath()]},
    {"logits_processor": [InPlace()], "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", GREEDY_OPTIONS, ids=lambda options: "-".join(options))
def test_greedy_with_processors_equals_transformers_generate(policy: str, options: dict[str, Any]) -> None:
    result = engine_of("gpt2", "small_model", policy).generate(PROMPT, max_new_tokens=24, **options)
    assert result.token_ids == plainly("gpt2", PROMPT, 24, **options) != plainly("gpt2", PROMPT, 24)
    assert result.stats.num_draft_tokens > 0


SAMPLING_OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_p": 0.9},
    {"do_sample": True, "top_k": 5, "min_p": 0.05},
    {"do_sample": True, "repetition_penalty": 1.2, "typical_p": 0.8},
    {"temperature": 0.9, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"temperature": 0.9, "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [6, 7]]},
    {"temperature": 0.8, "logits_processor": [DependsOnThePath(), InPlace()]},
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", SAMPLING_OPTIONS, ids=lambda options: "-".join(options))
def test_sampling_equals_plain_sampling_with_the_same_seed(policy: str, options: dict[str, Any]) -> None:
    family = "gpt2" if policy == "random" else "qwen3"
    speculative, plain = engine_of(family, "small_model", policy), engine_of(family, "none")
    answers = []
    for seed in (0, 12345678901234567890):
        expected = plain.generate(PROMPT, max_new_tokens=24, seed=seed, **options)
        result = speculative.generate(PROMPT, max_new_tokens=24, seed=seed, **options)
        assert result.token_ids == expected.token_ids
        assert result.seed == seed
        answers.append(result.token_ids)
    assert answers[0] != answers[1]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"typical_p": 0.5},
        {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 1, "bad_words_ids": [[token] for token in range(0, VOCABULARY, 3)]},
    ],
    ids=lambda options: "-".join(options),
)
def test_sampling_options_mean_what_they_mean_in_transformers(options: dict[str, Any]) -> None:
    """The same noise on the scores of transformers' own processors, in its own order, gives the same tokens."""
    engine = engine_of("llama", "small_model", "eagle")
    ids, ours, answers, pure = torch.tensor([PROMPT]), [], [], []
    for seed in range(3):
        theirs = engine.target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            custom_generate=engine.as_custom_generate(seed=seed),
            max_new_tokens=16,
            pad_token_id=0,
            **{"do_sample": True, "top_k": 0, **options},
        )
        answers += theirs[0, len(PROMPT) :].tolist()
        ours += engine.generate(PROMPT, max_new_tokens=16, seed=seed, **{"do_sample": True, **options}).token_ids
        pure += engine.generate(PROMPT, max_new_tokens=16, seed=seed, do_sample=True).token_ids
    assert ours == answers != pure


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    """The OpenAI definition: logit - frequency * count - presence * (count > 0), over what was generated."""
    penalty = PresenceFrequencyPenalty(presence=1.0, frequency=0.25, prompt_length=3)
    scores = torch.zeros(1, 6)
    penalised = penalty(torch.tensor([[5, 5, 1, 2, 2, 0, 2]]), scores)
    assert penalised.tolist() == [[-1.25, 0.0, -1.75, 0.0, 0.0, 0.0]]
    assert not scores.any()
    assert torch.equal(penalty(torch.tensor([[5, 5, 1]]), scores), scores)


def test_top_p_keeps_what_transformers_keeps() -> None:
    torch.manual_seed(0)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    for spread, top_p in itertools.product((0.1, 1.0, 4.0), (0.01, 0.3, 0.9, 0.999)):
        scores = spread * torch.randn(1, 3000)
        ours, theirs = TopP(top_p, first=16)(ids, scores), TopPLogitsWarper(top_p)(ids, scores)
        differing = (ours > -float("inf")) != (theirs > -float("inf"))
        assert int(differing.sum()) <= 1  # the last one in, where both sums round differently
        kept = (ours > -float("inf")) & ~differing
        assert torch.equal(ours[kept], scores[kept])


# ---------------------------------------------------------------------------------------------------- tree logits

EXTRA: dict[str, dict[str, Any]] = {
    "Gemma2": {"head_dim": 8, "num_key_value_heads": 2, "query_pre_attn_scalar": 8},
    "GPTJ": {"rotary_dim": 4},
    "StableLm": {"num_key_value_heads": 2},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 2,
        "n_routed_experts": 2,
    },
}


def dense_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


def check_tree_logits(target: HuggingFaceTarget, model: PreTrainedModel, tree: TokenTree) -> None:
    logits, _ = target.verify(tree)
    root = int(tree.tokens[0])
    for node in range(tree.size):
        tokens = [*target.tokens, root, *tree.path_tokens(node)]
        if len(tokens) <= target.max_context:
            assert (logits[node] - dense_logits(model, tokens)).abs().max() < 1e-4


def path_to(tree: TokenTree, node: int) -> list[int]:
    path = [node]
    while path[0] > 0:
        path.insert(0, int(tree.parents[path[0]]))
    return path


@pytest.mark.parametrize("family", [*FAMILIES, *EXTRA])
@torch.inference_mode()
def test_tree_logits_equal_those_of_each_path_alone(family: str) -> None:
    """Over several cycles, each committing another path, and with a tree that reaches past the context's end."""
    model = tiny(family, **EXTRA.get(family, {}))
    target, reference = HuggingFaceTarget(model), tiny(family, **EXTRA.get(family, {}))
    target.prefill(PROMPT)
    for seed in range(3):
        tree = random_tree(seed, 20, VOCABULARY, root=7)
        check_tree_logits(target, reference, tree)
        target.commit(tree, path_to(tree, int(tree.depths.argmax()) if seed else 0))
    target.prefill([*target.tokens, *(i % VOCABULARY for i in range(target.max_context - len(target.tokens) - 4))])
    check_tree_logits(target, reference, random_tree(9, 20, VOCABULARY, root=8))
    assert target.lm.attention == ("dense mask" if family in EXTRA else "tree")


def test_attention_that_the_tree_kernel_does_not_know_runs_with_a_dense_mask() -> None:
    target = HuggingFaceTarget(tiny("Gemma2", **EXTRA["Gemma2"]))
    assert target.lm.attention == "dense mask"
    assert target.model.config._attn_implementation == "eager"
    engine = Engine(target, NGram(shortest=1), policy_for("eagle"))
    ids = torch.tensor([PROMPT])
    expected = tiny("Gemma2", **EXTRA["Gemma2"]).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
    )
    assert engine.generate(PROMPT, max_new_tokens=24).token_ids == expected[0, len(PROMPT) :].tolist()


def test_a_sliding_window_bounds_the_context() -> None:
    assert HuggingFaceTarget(model_of("mistral")).max_context == 128
    assert HuggingFaceTarget(tiny("mistral", sliding_window=None)).max_context == 256
    half = {"layer_types": ["full_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 32}
    assert HuggingFaceTarget(tiny("qwen2", **half)).max_context == 256


def test_longrope_bounds_the_context_where_its_frequencies_change() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    model = tiny("llama", rope_parameters=rope)
    target = HuggingFaceTarget(model)
    assert target.max_context == 64
    with torch.inference_mode():
        target.prefill([*PROMPT, *PROMPT, *range(8)])
        check_tree_logits(target, tiny("llama", rope_parameters=rope), random_tree(0, 40, VOCABULARY, root=7))


def test_long_prompts_are_run_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specengine.causal_lm.PREFILL_ROWS", 7)
    for family in ("llama", "gpt2"):
        engine = engine_of(family, "small_model", "fixed")
        assert engine.generate(PROMPT, max_new_tokens=16).token_ids == plainly(family, PROMPT, 16)


def test_generation_fills_the_context_and_stops() -> None:
    prompt = (PROMPT * 10)[:240]
    expected = plainly("llama", prompt, 16)
    for draft in ("none", "ngram", "small_model"):
        result = engine_of("llama", draft).generate(prompt, max_new_tokens=1000)
        assert (result.token_ids, result.finish_reason) == (expected, "length")


# ---------------------------------------------------------------------------------------------------- the cache


def random_cache(length: int, scratch: int) -> KVCache:
    cache = KVCache(2, 3, 4, length + scratch, dtype=torch.float32)
    cache.slab.normal_()
    cache.length = length
    return cache


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 300), st.sets(st.integers(1, 80), max_size=12))
def test_compact_equals_gather(length: int, rest: set[int]) -> None:
    path = [0, *sorted(rest)]
    cache = random_cache(length, 81)
    before = cache.slab.clone()
    cache.compact(path)
    assert cache.length == length + len(path)
    assert torch.equal(cache.slab[:, :, :, :length], before[:, :, :, :length])
    gathered = before[:, :, :, [length + node for node in path]]
    assert torch.equal(cache.slab[:, :, :, length : cache.length], gathered)


def test_reserve_keeps_what_is_committed() -> None:
    cache = random_cache(200, 10)
    before, slab = cache.slab.clone(), cache.slab
    cache.reserve(GRANULE)
    assert cache.slab is slab
    cache.reserve(GRANULE + 1)
    assert (cache.capacity, cache.length) == (2 * GRANULE, 200)
    assert torch.equal(cache.slab[:, :, :, :200], before[:, :, :, :200])
    cache.crop(150)
    assert cache.length == 150
    for length in (-1, 151):
        with pytest.raises(ValueError, match=f"length: got {length}, accepted 0 to 150"):
            cache.crop(length)


def poison(owner: Any, method: str, cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fill all scratch of `cache` with NaN before each call of `method` that starts a cycle; the slabs' addresses."""
    real, addresses = getattr(owner, method), []

    def poisoned(tree: TokenTree, *rest: Any) -> Any:
        if method == "verify" or tree.passes == 0:
            cache.slab[:, :, :, cache.length :] = float("nan")
        result = real(tree, *rest)
        addresses.append(cache.slab.data_ptr())
        return result

    monkeypatch.setattr(owner, method, poisoned)
    return addresses


@pytest.mark.parametrize("policy", POLICIES)
def test_scratch_is_never_read_before_it_is_written(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama", "small_model", policy)
    addresses = poison(engine.target, "verify", engine.target.cache, monkeypatch)
    poison(engine.drafter, "step", engine.drafter.cache, monkeypatch)
    result = engine.generate(PROMPT, max_new_tokens=40)
    assert result.token_ids == plainly("llama", PROMPT, 40)
    assert not engine.target.cache.slab[:, :, :, : engine.target.cache.length].isnan().any()
    assert len(addresses) == result.stats.num_spec_steps
    assert len(set(addresses)) == 1  # one slab, made before the first cycle


def test_the_cache_is_sized_once_for_prompt_answer_and_tree() -> None:
    engine = engine_of("llama", "small_model", "eagle")
    engine.generate(PROMPT, max_new_tokens=200)
    needed = len(PROMPT) + 200 + engine.policy.budget
    assert needed <= engine.target.cache.capacity <= needed + GRANULE


# ---------------------------------------------------------------------------------------------------- sessions, streams


@cache
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.mark.parametrize("draft", ["none", "ngram", "small_model"])
def test_a_session_reuses_its_caches_and_answers_as_a_fresh_engine_does(draft: str) -> None:
    session = engine_of("llama", draft, tokenizer=tokenizer()).session([{"role": "system", "content": "Be brief."}])
    for turn, text in enumerate(("Say it.", "Again, äöü €!", "And once more.")):
        fresh = engine_of("llama", draft, tokenizer=tokenizer())
        messages = [*session.messages, {"role": "user", "content": text}]
        expected = fresh.generate(messages, max_new_tokens=8)
        result = session.generate(text, max_new_tokens=8)
        assert result.token_ids == expected.token_ids
        assert session.messages == [*messages, {"role": "assistant", "content": result.text}]
        assert (result.stats.num_cached_prompt_tokens > 0) == (turn > 0)
        assert expected.stats.num_cached_prompt_tokens == 0
        assert result.stats.num_prompt_tokens == expected.stats.num_prompt_tokens


def test_a_turn_enters_the_session_only_when_its_stream_has_ended() -> None:
    session = engine_of(tokenizer=tokenizer()).session()
    stream = session.stream("Hello", max_new_tokens=8)
    next(stream)
    stream.close()
    assert session.messages == []
    expected = engine_of(tokenizer=tokenizer()).generate("Hello", max_new_tokens=8)
    stream = session.stream("Hello", max_new_tokens=8)
    assert [token for piece in stream for token in piece.cycle.tokens] == expected.token_ids
    assert stream.stats.num_cached_prompt_tokens == stream.stats.num_prompt_tokens - 1
    assert [message["role"] for message in session.messages] == ["user", "assistant"]
    with pytest.raises(InputError, match="text: it is empty"):
        session.generate("")


@pytest.mark.parametrize("policy", POLICIES)
def test_pieces_add_up_to_the_text(policy: str) -> None:
    """A random model writes random bytes, so characters break off and are completed across cycles all the time."""
    engine = engine_of("llama", "small_model", policy, tokenizer())
    for seed in range(6):
        stream = engine.stream("grüße, 世界", max_new_tokens=48, temperature=1.2, seed=seed)
        pieces = list(stream)
        assert stream.result is not None
        assert (
            "".join(piece.text for piece in pieces)
            == stream.result.text
            == tokenizer().decode(stream.result.token_ids, skip_special_tokens=True)
        )
        assert [token for piece in pieces for token in piece.cycle.tokens] == stream.result.token_ids
        assert len(pieces) == stream.result.stats.num_spec_steps
        with pytest.raises(StopIteration):
            next(stream)


def forced(text: str) -> LogitsProcessor:
    """Makes the model answer `text`, byte by byte."""
    wanted = tokenizer()(text)["input_ids"]

    class Forced(LogitsProcessor):
        start: int | None = None

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if self.start is None:
                self.start = input_ids.shape[1]
            forced = torch.full_like(scores, -float("inf"))
            forced[0, wanted[(input_ids.shape[1] - self.start) % len(wanted)]] = 0.0
            return forced

    return Forced()


def test_stop_strings_across_cycles_and_characters() -> None:
    text = "Ein Gruß aus Köln — bis bald, 世界!"
    engine = engine_of("llama", "ngram", "eagle", tokenizer())
    for stop in ("ß a", "bald, 世", ["zzz", "— b", "aus"], "E"):
        stream = engine.stream("hi", max_new_tokens=60, stop_strings=stop, logits_processor=[forced(text)])
        pieces = "".join(piece.text for piece in stream)
        ends = [text.index(s) + len(s) for s in ([stop] if isinstance(stop, str) else stop) if s in text]
        assert stream.result is not None
        assert pieces == stream.result.text == text[: min(ends)]
        assert stream.result.finish_reason == "stop"
        assert stream.result.token_ids == tokenizer()(text[: min(ends)])["input_ids"]


def test_the_same_text_twice_is_streamed_to_the_end_of_the_limit() -> None:
    text = "äöü"
    engine = engine_of("llama", "ngram", "chain", tokenizer())
    stream = engine.stream("hi", max_new_tokens=9, logits_processor=[forced(text)])
    assert "".join(piece.text for piece in stream) == "äöüä\N{REPLACEMENT CHARACTER}"  # 9 of 12 bytes


# ---------------------------------------------------------------------------------------------------- results, options


def test_prompts_may_be_text_messages_ids_or_tensors() -> None:
    engine = engine_of(tokenizer=tokenizer())
    messages = [{"role": "user", "content": "Hello"}]
    ids = tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    forms = ["Hello", messages, ids, tuple(ids), torch.tensor(ids), torch.tensor([ids], dtype=torch.int32)]
    answers = [engine.generate(form, max_new_tokens=6).token_ids for form in forms]
    assert answers == [answers[0]] * len(forms)
    raw = tokenizer()("Hello")["input_ids"]
    assert engine.generate("Hello", raw=True, max_new_tokens=6).stats.num_prompt_tokens == len(raw)
    engine.tokenizer = byte_tokenizer(template=None)
    assert engine.generate("Hello", max_new_tokens=6).stats.num_prompt_tokens == len(raw)


def test_return_dict_in_generate_says_what_comes_back() -> None:
    engine = engine_of(tokenizer=tokenizer())
    result = engine.generate("Hello", max_new_tokens=6)
    assert isinstance(result, GenerationResult)
    output = engine.generate("Hello", max_new_tokens=6, return_dict_in_generate=True)
    assert isinstance(output, SpeculativeOutput)
    assert output.sequences.shape == (1, result.stats.num_prompt_tokens + 6)
    assert (output.token_ids, output.text, output.finish_reason) == (result.token_ids, result.text, "length")
    assert output.stats.num_generated_tokens == 6
    sequences = engine.generate("Hello", max_new_tokens=6, return_dict_in_generate=False)
    assert torch.equal(sequences, output.sequences)
    assert sequences[0, -6:].tolist() == result.token_ids


def test_a_transformers_streamer_prints_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_of("llama", "none", tokenizer=tokenizer())
    streamer = TextStreamer(tokenizer(), skip_prompt=True, skip_special_tokens=True)
    engine.generate("Hello", max_new_tokens=20, streamer=streamer, logits_processor=[forced("one two three ")])
    assert capsys.readouterr().out == "one two three one tw\n"


def test_generation_config_is_honoured_and_options_go_before_it() -> None:
    engine = engine_of()
    config = GenerationConfig(max_new_tokens=9, repetition_penalty=1.3, eos_token_id=None)
    result = engine.generate(PROMPT, generation_config=config)
    assert result.token_ids == plainly("llama", PROMPT, 9, repetition_penalty=1.3)
    assert engine.generate(PROMPT, generation_config=config, max_new_tokens=4).token_ids == result.token_ids[:4]
    eos = result.token_ids[2]
    stopped = engine.generate(PROMPT, generation_config=GenerationConfig(eos_token_id=eos, repetition_penalty=1.3))
    assert (stopped.token_ids, stopped.finish_reason) == (result.token_ids[:3], "stop")
    endless = engine.generate(PROMPT, generation_config=GenerationConfig(eos_token_id=[eos, 259]), eos_token_id=[])
    assert len(endless.token_ids) == 256 - len(PROMPT)  # the context is full before the default of 256 new tokens


def test_the_models_own_generation_config_is_the_default() -> None:
    model = tiny("llama")
    first = plainly("llama", PROMPT, 3)[2]
    model.generation_config = GenerationConfig(eos_token_id=first, pad_token_id=0)
    engine = Engine.from_pretrained(model, "ngram")
    assert (
        engine.generate(PROMPT).token_ids == plainly("llama", PROMPT, 3)[: plainly("llama", PROMPT, 3).index(first) + 1]
    )
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.7, max_new_tokens=12)
    sampled = engine.generate(PROMPT, seed=4)
    assert (
        sampled.token_ids
        == engine_of("llama", "none").generate(PROMPT, temperature=0.7, seed=4, max_new_tokens=12).token_ids
    )
    assert engine.generate(PROMPT, do_sample=False).token_ids == plainly("llama", PROMPT, 12)
    assert engine.generate(PROMPT, temperature=0).seed is None


def test_a_temperature_in_a_config_that_does_not_sample_means_nothing() -> None:
    """As in transformers: only a temperature given to `generate` itself implies sampling."""
    engine = engine_of()
    config = GenerationConfig(temperature=0.5, max_new_tokens=8)
    assert engine.generate(PROMPT, generation_config=config).token_ids == plainly("llama", PROMPT, 8)


def test_max_length_counts_the_prompt_as_in_transformers() -> None:
    engine = engine_of()
    config = GenerationConfig(max_length=len(PROMPT) + 5)
    assert engine.generate(PROMPT, generation_config=config).token_ids == plainly("llama", PROMPT, 5)
    assert len(engine.generate(PROMPT, generation_config=config, max_new_tokens=7).token_ids) == 7
    with pytest.raises(InputError, match=r"generation_config\.max_length: got 5, accepted a whole number, 27 or more"):
        engine.generate(PROMPT, generation_config=GenerationConfig(max_length=5))


@pytest.mark.parametrize(
    "field",
    [
        {"num_beams": 2},
        {"num_return_sequences": 3, "do_sample": True},
        {"output_scores": True},
        {"output_logits": True},
        {"output_attentions": True, "return_dict_in_generate": True},
        {"output_hidden_states": True},
        {"guidance_scale": 2.0},
        {"forced_eos_token_id": 3},
        {"exponential_decay_length_penalty": (3, 1.1)},
        {"begin_suppress_tokens": [1]},
        {"epsilon_cutoff": 0.1},
        {"min_length": 40},
        {"renormalize_logits": True},
    ],
    ids=lambda field: next(iter(field)),
)
def test_unsupported_generation_config_names_itself(field: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=rf"generation_config\.{next(iter(field))}: .* not supported"):
        engine_of("llama", "none").generate(PROMPT, generation_config=GenerationConfig(**field))


def test_max_time_ends_with_the_criteria_reason() -> None:
    result = engine_of().generate(PROMPT, max_time=1e-9, max_new_tokens=50)
    assert (result.finish_reason, len(result.token_ids)) == ("criteria", 1)


def test_the_seed_comes_from_torchs_generator() -> None:
    engine = engine_of()
    answers = []
    for torch_seed in (3, 3, 4):
        torch.manual_seed(torch_seed)
        answers.append(engine.generate(PROMPT, max_new_tokens=16, temperature=1.0))
    assert answers[0].token_ids == answers[1].token_ids != answers[2].token_ids
    assert answers[0].seed == answers[1].seed != answers[2].seed
    repeated = engine.generate(PROMPT, max_new_tokens=16, temperature=1.0, seed=answers[2].seed)
    assert repeated.token_ids == answers[2].token_ids
    state = torch.get_rng_state()
    engine.generate(PROMPT, max_new_tokens=4)
    assert torch.equal(torch.get_rng_state(), state)  # greedy decoding draws nothing


# ---------------------------------------------------------------------------------------------------- custom_generate


@pytest.mark.parametrize("policy", POLICIES)
def test_custom_generate_equals_generate(policy: str) -> None:
    engine = engine_of("llama", "small_model", policy, tokenizer())
    ids = torch.tensor([PROMPT])
    common = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False, "max_new_tokens": 24}
    eos = plainly("llama", PROMPT, 12)[11]
    for options in ({}, {"repetition_penalty": 1.3}, {"eos_token_id": eos}, {"logits_processor": [DependsOnThePath()]}):
        custom = engine.as_custom_generate()
        ours = engine.target.model.generate(ids, custom_generate=custom, **common, **options)
        theirs = untouched("llama").generate(ids, **common, **options)
        assert torch.equal(ours, theirs)
        assert custom.stats.num_generated_tokens == ours.shape[1] - len(PROMPT)


def test_custom_generate_with_stop_strings_streamer_dict_and_seed() -> None:
    engine = engine_of("llama", "small_model", "eagle", tokenizer())
    model, ids = engine.target.model, torch.tensor([PROMPT])
    common = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "max_new_tokens": 24}

    text = tokenizer().decode(plainly("llama", PROMPT, 24))
    # as a criterion: transformers hands stop_strings= no tokenizer where custom_generate is a function
    stop = {"stopping_criteria": [StopStringCriteria(tokenizer(), [text[8:10]])], "do_sample": False}
    streamer = RecordingStreamer()
    ours = model.generate(ids, custom_generate=engine.as_custom_generate(streamer), **common, **stop)
    assert torch.equal(ours, untouched("llama").generate(ids, **common, **stop))
    assert ours.shape[1] < len(PROMPT) + 24
    assert streamer.puts[0] == PROMPT
    assert [token for tokens in streamer.puts[1:] for token in tokens] == ours[0, len(PROMPT) :].tolist()
    assert streamer.ended == 1

    sampled = {"do_sample": True, "temperature": 0.9, "top_k": 0}
    once = model.generate(ids, custom_generate=engine.as_custom_generate(seed=5), **common, **sampled)
    again = engine.generate(PROMPT, max_new_tokens=24, temperature=0.9, seed=5)
    assert once[0, len(PROMPT) :].tolist() == again.token_ids
    torch.manual_seed(8)
    first = model.generate(ids, custom_generate=engine.as_custom_generate(), **common, **sampled)
    torch.manual_seed(8)
    assert torch.equal(first, model.generate(ids, custom_generate=engine.as_custom_generate(), **common, **sampled))

    output = model.generate(
        ids, custom_generate=engine.as_custom_generate(), return_dict_in_generate=True, do_sample=False, **common
    )
    assert isinstance(output, SpeculativeOutput)
    assert output.token_ids == plainly("llama", PROMPT, 24)
    assert output.stats.num_generated_tokens == 24


def test_custom_generate_refuses_what_it_cannot_do() -> None:
    engine = engine_of("llama", "none")
    custom, model, ids = engine.as_custom_generate(), engine.target.model, torch.tensor([PROMPT])
    one = torch.ones_like(ids)
    common = {"custom_generate": custom, "pad_token_id": 0, "max_new_tokens": 4}
    with pytest.raises(InputError, match="got a batch of 2"):
        model.generate(ids.repeat(2, 1), attention_mask=one.repeat(2, 1), **common)
    padded = one.clone()
    padded[0, 0] = 0
    with pytest.raises(InputError, match="attention_mask: padded prompts"):
        model.generate(ids, attention_mask=padded, **common)
    with pytest.raises(InputError, match="output_scores: not supported"):
        model.generate(ids, attention_mask=one, output_scores=True, **common)
    with pytest.raises(InputError, match="another model than the engine's target"):
        untouched("llama").generate(ids, attention_mask=one, **common)
    with pytest.raises(InputError, match="only one sequence is supported"):
        custom(model, ids, generation_config=GenerationConfig(num_beams=2))


# ---------------------------------------------------------------------------------------------------- statistics


def cycle_of(depth: int, accepted: int, *, drafted: int, total: float, model: float) -> Cycle:
    """A chain of `depth` draft nodes, `accepted` of them accepted."""
    tree = TokenTree.root(0, depth + 1)
    for node in range(depth):
        tree.add(torch.tensor([node]), torch.tensor([node]), torch.zeros(1))
    tree.passes = depth
    seconds = Seconds(draft=0.1, policy=0.2, verify=0.3, walk=0.4, commit=0.5, total=total, model=model)
    return Cycle(tree, list(range(accepted + 1)), [1] * (accepted + 1), seconds, drafted)


def test_stats_add_up() -> None:
    stats = Stats(num_generated_tokens=8, ttft_s=0.5, elapsed_s=4.0)
    for depth, accepted, model in ((4, 3, 0.5), (4, 0, 0.9), (2, 2, 0.8)):
        stats.add(cycle_of(depth, accepted, drafted=9, total=1.0, model=model))
    assert (stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (3, 10, 5)
    assert stats.acceptance_histogram == [1, 0, 1, 1]
    assert stats.reached_histogram == [0, 0, 1, 0, 2]
    assert stats.acceptance_rate_per_position == [2 / 3, 2 / 3, 1 / 2, 0.0]
    assert stats.mean_acceptance_length == 8 / 3
    assert stats.mean_accepted_draft_tokens == 5 / 3
    assert stats.draft_acceptance_rate == 0.5
    assert (stats.mean_draft_passes, stats.num_spec_tokens) == (10 / 3, 10 / 3)
    assert (stats.tokens_per_second, stats.tpot_s) == (2.0, 0.5)
    assert stats.median_host_share == pytest.approx(0.2)
    assert stats.time_host_s == pytest.approx(0.8)
    parts = (stats.time_draft_s, stats.time_policy_s, stats.time_verify_s, stats.time_walk_s, stats.time_commit_s)
    assert parts == pytest.approx((0.3, 0.6, 0.9, 1.2, 1.5))
    as_dict = stats.to_dict()
    assert as_dict["mean_acceptance_length"] == 8 / 3
    assert "host_shares" not in as_dict
    stats.notes.append("a note")
    assert "acceptance length  2.67 over 3 verifications" in stats.report()
    assert stats.report().endswith("note               a note")


def test_stats_of_nothing_are_zero() -> None:
    stats = Stats()
    derived = [value for name, value in stats.to_dict().items() if isinstance(value, int | float)]
    assert set(derived) == {0}
    assert stats.acceptance_rate_per_position == []
    assert "0 verifications" in stats.report()


@pytest.mark.parametrize("draft", ["none", "ngram", "small_model"])
def test_stats_of_a_generation_are_consistent(draft: str) -> None:
    engine = engine_of("llama", draft)
    stream = engine.stream(PROMPT, max_new_tokens=30)
    cycles = [piece.cycle for piece in stream]
    stats = stream.stats
    assert stats.num_generated_tokens == 30 == stats.num_emitted_in_steps == sum(len(cycle.tokens) for cycle in cycles)
    assert stats.num_spec_steps == len(cycles) == sum(stats.acceptance_histogram) == sum(stats.reached_histogram)
    assert stats.num_accepted_draft_tokens == sum(cycle.accepted for cycle in cycles)
    assert stats.num_draft_tokens == sum(cycle.tree.size - 1 for cycle in cycles)
    for cycle in cycles:
        seconds = cycle.seconds
        parts = seconds.draft + seconds.policy + seconds.verify + seconds.walk + seconds.commit
        assert 0 < parts <= seconds.total * 1.01 + 1e-5
        assert 0 < seconds.model < seconds.total
    assert 0 < stats.median_host_share < 1
    assert 0 < stats.ttft_s <= stats.elapsed_s
    assert stats.draft == ("" if draft == "none" else engine.drafter.name)
    assert stats.policy == ("" if draft == "none" else repr(engine.policy))


# ---------------------------------------------------------------------------------------------------- loading


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer on disk."""
    folder = tmp_path_factory.mktemp("tiny")
    untouched("llama").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_models_load_from_paths_by_name_and_in_one_call(saved: Path) -> None:
    options = {"max_new_tokens": 12, "raw": True}
    prompt = "abcabcabc"
    expected = plainly("llama", tokenizer()(prompt)["input_ids"], 12)
    for draft, policy in ((None, None), ("ngram", "chain"), (str(saved), None), ("none", None), (None, "plain")):
        engine = Engine.from_pretrained(str(saved), draft, policy, offline=True, dtype="float32", device="cpu")
        assert engine.generate(prompt, **options).token_ids == expected
    answer = specengine.generate(prompt, str(saved), "ngram", "fixed", offline=True, dtype=torch.float32, **options)
    assert answer.token_ids == expected
    assert answer.stats.policy.startswith("Fixed(")


def test_loaded_models_options_and_instances(saved: Path) -> None:
    engine = Engine.from_pretrained(
        model_of(),
        "ngram",
        "eagle",
        draft_options={"longest": "4", "shortest": 1},
        policy_options={"width": 2, "budget": "6"},
        tokenizer=tokenizer(),
    )
    assert engine.drafter == NGram(longest=4, shortest=1)
    assert engine.policy == policies.make("eagle", width=2, budget=6)
    assert engine.generate("abcabc", raw=True, max_new_tokens=9).text
    policy, drafter = policy_for("chain"), NGram()
    engine = Engine.from_pretrained(model_of(), drafter, policy)
    assert (engine.drafter, engine.policy, engine.tokenizer) == (drafter, policy, None)
    engine = Engine.from_pretrained(model_of(), near_copy())
    assert engine.drafter.name.startswith("small_model")
    assert engine.generate(PROMPT, max_new_tokens=12).token_ids == plainly("llama", PROMPT, 12)
    half = Engine.from_pretrained(str(saved), "none", dtype="bfloat16", offline=True)
    assert half.target.cache.slab.dtype == torch.bfloat16
    assert len(half.generate(PROMPT, max_new_tokens=5).token_ids) == 5


def test_a_model_without_a_tokenizer_answers_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    untouched("llama").save_pretrained(tmp_path)
    engine = Engine.from_pretrained(str(tmp_path), "ngram", offline=True)
    assert engine.tokenizer is None
    assert f"no tokenizer for {tmp_path}" in capsys.readouterr().err
    result = engine.generate(PROMPT, max_new_tokens=8)
    assert (result.token_ids, result.text) == (plainly("llama", PROMPT, 8), "")


def test_a_draft_of_the_targets_first_layers() -> None:
    for family in ("llama", "gpt2"):
        model = model_of(family)
        engine = Engine.from_pretrained(model, first_layers(model, 1), "fixed")
        assert engine.generate(PROMPT, max_new_tokens=20).token_ids == plainly(family, PROMPT, 20)


# ---------------------------------------------------------------------------------------------------- the real model


@pytest.mark.model
@pytest.mark.parametrize("policy", ["chain", "eagle", "fixed"])
def test_the_default_model_answers_as_transformers_does(policy: str, default_model_path: Path) -> None:
    model, token = _default_model(default_model_path)
    engine = Engine.from_pretrained(model, "ngram", policy, tokenizer=token)
    for prompt in ("Count from one to twelve in words.", "Repeat three times: the quick brown fox jumps."):
        assert engine.generate(prompt, max_new_tokens=32).token_ids == _its_own_answer(default_model_path, prompt)


@cache
def _default_model(path: Path) -> tuple[PreTrainedModel, Any]:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), AutoTokenizer.from_pretrained(path)


@cache
def _its_own_answer(path: Path, prompt: str) -> list[int]:
    model, token = _default_model(path)
    messages = [{"role": "user", "content": prompt}]
    ids = token.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return model.generate(**ids, max_new_tokens=32, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()
