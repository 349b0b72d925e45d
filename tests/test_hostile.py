"""What goes wrong in the world: each case with the message that a user reads, and the engine usable afterwards."""

import gc
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from specengine import Engine, policies
from specengine.causal_lm import ATTENTION, CausalLM
from specengine.drafters.ngram import NGram
from specengine.drafters.small_model import SmallModel
from specengine.errors import (
    EngineBusyError,
    InputError,
    NumericalError,
    ProcessorError,
    TokenizerMismatchError,
    UnsupportedModelError,
)
from specengine.options import GenerationOptions
from specengine.targets.huggingface import HuggingFaceTarget
from tests.toy import (
    VOCABULARY,
    LetterTokenizer,
    Tables,
    ToyDrafter,
    ToyTarget,
    byte_tokenizer,
    hooked,
    policy_for,
    tiny,
)

PROMPT = [*range(40, 56)]
POLICIES = [*(name for name in policies.names() if name != "plain"), "random"]


pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def model() -> PreTrainedModel:
    return tiny("llama")


@cache
def near_copy() -> PreTrainedModel:
    copy = tiny("llama")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in copy.parameters():
            if parameter.ndim > 1:
                parameter += 0.04 * parameter.std() * torch.randn_like(parameter)
    return copy


def engine_of(policy: str = "eagle", tokenizer: Any = None) -> Engine:
    return Engine(HuggingFaceTarget(model()), SmallModel(near_copy()), policy_for(policy), tokenizer)


def plainly(count: int = 20, **options: Any) -> list[int]:
    return Engine(HuggingFaceTarget(model()), None, None).generate(PROMPT, max_new_tokens=count, **options).token_ids


def toy_engine() -> Engine:
    tables = Tables(6, 1)
    return Engine(ToyTarget(tables), ToyDrafter(tables), policy_for("eagle"), LetterTokenizer())


def stream_into(seen: list[int], engine: Engine, **options: Any) -> None:
    """Stream 40 tokens and note each as it comes, so that what came before an error is known."""
    for piece in engine.stream(PROMPT, max_new_tokens=40, **options):
        seen += piece.cycle.tokens


def check_usable(engine: Engine) -> None:
    assert engine.generate(PROMPT, max_new_tokens=20).token_ids == plainly(20)


# ---------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt: it is empty, at least one token is needed"),
        ([], "prompt: it is empty, at least one token is needed"),
        (torch.empty(1, 0, dtype=torch.int64), "prompt: it is empty"),
        ([1, VOCABULARY], f"prompt: token id {VOCABULARY} is out of range, accepted 0 to {VOCABULARY - 1}"),
        ([1, -1], "prompt: token id -1 is out of range"),
        ([1] * 256, r"prompt: it has 256 tokens, accepted at most 255: the model's context is 256"),
        ([1] * 1000, r"prompt: it has 1000 tokens, accepted at most 255"),
        ([[1, 2], [3, 4]], "prompt: accepted are a string, a list of chat messages .* or a list of token ids"),
        ([1.0, 2.0], "prompt: accepted are a string"),
        ([True, False], "prompt: accepted are a string"),
        (["a", "b"], "prompt: accepted are a string"),
        (torch.ones(2, 3, dtype=torch.int64), "prompt: got a batch of 2, this engine serves one sequence"),
        (torch.ones(1, 2, 3, dtype=torch.int64), r"prompt: got torch.int64 \(1, 2, 3\), accepted int64"),
        (torch.ones(3), r"prompt: got torch.float32 \(3,\), accepted int64"),
        ([{"role": "user"}], r"prompt: each message needs role and content, got \['role'\]"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value)[:20],
)
def test_wrong_prompts(prompt: Any, message: str) -> None:
    engine = engine_of(tokenizer=byte_tokenizer())
    with pytest.raises(InputError, match=message):
        engine.generate(prompt)


def test_text_needs_a_tokenizer_and_messages_a_template() -> None:
    engine = engine_of()
    for prompt, what in (("Hello", "a string prompt"), ([{"role": "user", "content": "Hello"}], "chat messages")):
        with pytest.raises(InputError, match=f"prompt: {what} needs a tokenizer, pass tokenizer="):
            engine.generate(prompt)
    with pytest.raises(InputError, match="stop_strings: they need a tokenizer"):
        engine.generate(PROMPT, stop_strings="x")
    engine.tokenizer = byte_tokenizer(template=None)
    with pytest.raises(InputError, match="this tokenizer has no chat template"):
        engine.generate([{"role": "user", "content": "Hello"}])


def test_a_prompt_of_one_token_and_one_that_leaves_room_for_one() -> None:
    engine, plain = engine_of(), Engine(HuggingFaceTarget(model()), None, None)
    for prompt in ([7], [7] * 255):
        expected = plain.generate(prompt, max_new_tokens=9)
        result = engine.generate(prompt, max_new_tokens=9)
        assert result.token_ids == expected.token_ids
        assert len(result.token_ids) == min(9, 256 - len(prompt))


# ---------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: got 0, accepted a whole number, 1 or more"),
        ({"max_new_tokens": 2.5}, "max_new_tokens: got 2.5, accepted a whole number"),
        ({"temperature": -0.1}, r"temperature: got -0.1, accepted 0 \(greedy\) or more"),
        ({"temperature": float("nan")}, "temperature: got nan, accepted 0"),
        ({"temperature": float("inf")}, "temperature: got inf, accepted 0"),
        ({"temperature": "hot"}, "temperature: got 'hot', accepted 0"),
        ({"temperature": True}, "temperature: got True, accepted 0"),
        ({"top_p": 0}, "top_p: got 0, accepted above 0, at most 1"),
        ({"top_p": 1.01}, "top_p: got 1.01, accepted above 0, at most 1"),
        ({"top_k": -1}, "top_k: got -1, accepted a whole number, 0 or more"),
        ({"min_p": 1.5}, "min_p: got 1.5, accepted 0 to 1"),
        ({"typical_p": 0.0}, "typical_p: got 0.0, accepted above 0"),
        ({"repetition_penalty": 0}, "repetition_penalty: got 0, accepted above 0"),
        ({"presence_penalty": float("nan")}, "presence_penalty: got nan, accepted a finite number"),
        ({"frequency_penalty": float("-inf")}, "frequency_penalty: got -inf, accepted a finite number"),
        ({"max_time": 0}, "max_time: got 0, accepted above 0"),
        ({"no_repeat_ngram_size": -2}, "no_repeat_ngram_size: got -2, accepted a whole number"),
        ({"min_new_tokens": -1}, "min_new_tokens: got -1, accepted a whole number"),
        ({"seed": -1}, "seed: got -1, accepted a whole number, 0 to 18446744073709551615"),
        ({"seed": 1 << 64}, "seed: got 18446744073709551616, accepted"),
        ({"eos_token_id": [3, -1]}, "eos_token_id: got -1, accepted a whole number"),
        ({"stop_strings": ["a", ""]}, "stop_strings: got '', accepted non-empty strings"),
        ({"stop_strings": [3]}, "stop_strings: got 3, accepted non-empty strings"),
        ({"logits_processor": ["softmax"]}, "logits_processor: got 'softmax', accepted callables"),
        ({"stopping_criteria": [1]}, "stopping_criteria: got 1, accepted callables"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        toy_engine().generate([0, 1], **options)


def test_unknown_options_list_the_known_ones() -> None:
    with pytest.raises(InputError) as refused:
        toy_engine().generate([0, 1], temprature=1.0)
    message = str(refused.value)
    assert message.startswith("unknown option 'temprature', known are max_new_tokens, do_sample, temperature, ")
    for name in ("seed", "stop_strings", "logits_processor", "generation_config", "raw"):
        assert name in message
    with pytest.raises(InputError, match="unknown option 'dtyp', known are dtype, device, tokenizer, draft_options"):
        Engine.from_pretrained(model(), dtyp="float32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, "dtype: got 'int8', accepted auto, bfloat16, float16, float32 or a torch.dtype"),
        ({"device": "tpu:x"}, "device: got 'tpu:x', accepted cpu, cuda or cuda:N"),
        ({"device": 1.5}, "device: got 1.5, accepted cpu, cuda or cuda:N"),
        ({"model": 7}, "model: got int, accepted a name, a path or a loaded transformers model"),
        ({"policy": "talons"}, "policy: unknown name 'talons', known are .*chain, .*eagle.*fixed"),
        ({"policy": 3}, "policy: got 3, accepted .*eagle.* or a TreePolicy"),
        ({"policy": "plain", "draft": "ngram"}, "draft: policy 'plain' decodes without a draft"),
        ({"policy": "eagle", "policy_options": {"wide": 3}}, "policy eagle: unknown option 'wide', known are width"),
        ({"policy_options": {"width": 3}}, "policy_options: they need a policy given by name"),
        ({"draft": "none", "draft_options": {"longest": 3}}, "draft_options: they need a draft given by name"),
        ({"draft": "ngram", "draft_options": {"long": 3}}, "draft ngram: unknown option 'long', known are longest"),
        ({"draft": "ngram", "draft_options": {"longest": "x"}}, r"draft ngram\.longest: got 'x', expected int"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_wrong_arguments_of_from_pretrained(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Engine.from_pretrained(**{"model": model(), **arguments})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device() -> None:
    with pytest.raises(InputError, match="device: cuda was asked for, but torch sees no CUDA device"):
        Engine.from_pretrained(model(), device="cuda")


def test_a_loaded_model_keeps_its_dtype_and_device() -> None:
    for options in ({"dtype": "bfloat16"}, {"device": "cpu"}):
        with pytest.raises(InputError, match="dtype, device: the model is loaded already"):
            Engine.from_pretrained(model(), **options)


def test_a_missing_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=f"model '{tmp_path}'"):
        Engine.from_pretrained(str(tmp_path), offline=True)


def test_a_draft_without_a_policy_is_half_an_engine() -> None:
    target = ToyTarget(Tables(6))
    with pytest.raises(InputError, match="policy, draft: give both, or neither for plain decoding"):
        Engine(target, ToyDrafter(Tables(6)), None)
    with pytest.raises(InputError, match="policy, draft: give both"):
        Engine(target, None, policy_for("chain"))


# ---------------------------------------------------------------------------------------------------- vocabularies


def test_mismatched_tokenizers(tmp_path: Path) -> None:
    tiny("llama", vocab_size=VOCABULARY + 1).save_pretrained(tmp_path)
    byte_tokenizer(extra=("<|tool|>",)).save_pretrained(tmp_path)
    with pytest.raises(TokenizerMismatchError, match=r"differs from the target's in 1 of 260 tokens \('<|tool|>'"):
        Engine.from_pretrained(model(), str(tmp_path), tokenizer=byte_tokenizer(), offline=True)


def test_padded_vocabularies_are_accepted(tmp_path: Path) -> None:
    tiny("llama", seed=1, vocab_size=VOCABULARY + 60).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    engine = Engine.from_pretrained(model(), str(tmp_path), tokenizer=byte_tokenizer(), offline=True)
    check_usable(engine)


def test_two_vocabularies_without_tokenizers_to_compare() -> None:
    with pytest.raises(InputError, match="draft: its vocabulary has 300 entries, the target's 260"):
        Engine.from_pretrained(model(), tiny("llama", vocab_size=300))


# ---------------------------------------------------------------------------------------------------- models


def refused(config: Any, make: Callable[[Any], PreTrainedModel], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        CausalLM(make(config))


def test_models_that_cannot_roll_back() -> None:
    common = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2}
    message = "cannot roll back rejected draft tokens"
    mamba = transformers.MambaConfig(**common, state_size=4, expand=1, time_step_rank=4)
    refused(mamba, transformers.MambaForCausalLM, message)
    gemma = transformers.RecurrentGemmaConfig(**common, lru_width=32, num_attention_heads=4, intermediate_size=32)
    refused(gemma, transformers.RecurrentGemmaForCausalLM, message)
    hybrid = transformers.Qwen3NextConfig(
        **common,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=2,
        layer_types=["linear_attention", "full_attention"],
    )
    refused(hybrid, transformers.Qwen3NextForCausalLM, f"{message} .linear_attention.*only models whose whole state")


def test_models_of_other_kinds() -> None:
    t5 = transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    refused(t5, transformers.T5ForConditionalGeneration, "encoder-decoder models are not supported, only causal LMs")
    refused(None, lambda _: model().base_model, "has no language-model head, pass a ...ForCausalLM model")
    bloom = transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=1, n_head=4)
    refused(bloom, transformers.BloomForCausalLM, "nodes of a tree cannot be placed by depth")
    mpt = transformers.MptConfig(vocab_size=99, d_model=32, n_layers=1, n_heads=4)
    refused(mpt, transformers.MptForCausalLM, "only models whose forward reads position_ids are supported")
    falcon = transformers.FalconConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True
    )
    refused(falcon, transformers.FalconForCausalLM, "its positions follow from the order of the cache")
    neo = transformers.GPTNeoConfig(
        vocab_size=99, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    )
    refused(neo, transformers.GPTNeoForCausalLM, "its attention masks by cache slot")
    bert = transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32
    )
    refused(bert, transformers.BertForMaskedLM, "has no language-model head")


def test_models_whose_keys_and_values_do_not_fit_one_slab() -> None:
    latent = transformers.DeepseekV3Config(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=8,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        n_routed_experts=2,
    )
    refused(latent, transformers.DeepseekV3ForCausalLM, r"keys have \d+ channels and values \d+; they must agree")
    mixed = tiny("llama", num_key_value_heads=4)
    attention = mixed.model.layers[1].self_attn
    attention.k_proj, attention.v_proj = torch.nn.Linear(32, 16, bias=False), torch.nn.Linear(32, 16, bias=False)
    attention.num_key_value_groups = 2
    refused(None, lambda _: mixed, "its layers keep keys and values of different shapes or on different devices")


class IgnoresTheMask(transformers.LlamaForCausalLM):
    """Sees every token before a node, whatever mask it is given."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **rest: Any) -> Any:  # type: ignore[override]
        for name in ("tree", "attention_mask"):
            rest.pop(name, None)
        return super().forward(input_ids, position_ids=position_ids, **rest)


class IgnoresPositions(transformers.LlamaForCausalLM):
    """Places every token by its slot, whatever position it is given."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **rest: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids, **rest)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (IgnoresTheMask, "does not honour a tree mask .a node's logits change with its sibling"),
        (IgnoresPositions, "does not honour a tree mask .a node's logits differ from those of its path alone"),
    ],
)
def test_a_model_that_does_not_honour_the_tree(kind: type[PreTrainedModel], message: str) -> None:
    torch.manual_seed(0)
    bad = kind(model().config).eval()
    bad.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedModelError, match=message):
        Engine.from_pretrained(bad, "ngram")
    assert bad.config._attn_implementation == "sdpa"  # left as it was
    with pytest.raises(UnsupportedModelError, match=message):
        Engine.from_pretrained(model(), bad)


# ---------------------------------------------------------------------------------------------------- processors


class Returns(LogitsProcessor):
    """Gives what `make` makes of the scores, from the third new token on."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        self.make = make

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        return self.make(scores) if input_ids.shape[1] > len(PROMPT) + 2 else scores


def _raises(scores: Tensor) -> Tensor:
    raise KeyError("the table")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_raises, "logits processor Returns raised KeyError: 'the table'"),
        (lambda scores: scores * float("nan"), "logits processor Returns returned NaN or infinity at position 19"),
        (lambda scores: scores + float("inf"), "logits processor Returns returned NaN or infinity at position 19"),
        (lambda scores: scores - float("inf"), "logits processor Returns left no token at position 19"),
        (lambda scores: scores[:, :5], r"logits processor Returns returned shape \(1, 5\), not shape \(1, 260\)"),
        (lambda scores: scores[0], r"logits processor Returns returned shape \(260,\), not shape \(1, 260\)"),
    ],
)
@pytest.mark.parametrize("seed", [None, 3])
def test_failing_processors_are_named(make: Callable[[Tensor], Any], message: str, seed: int | None) -> None:
    engine = engine_of()
    options = {} if seed is None else {"seed": seed, "do_sample": True}
    with pytest.raises(ProcessorError, match=message):
        engine.generate(PROMPT, logits_processor=[Returns(make)], max_new_tokens=20, **options)
    assert engine.target.tokens == []
    check_usable(engine)


def test_a_processor_that_returns_no_tensor_is_named() -> None:
    engine = engine_of()
    with pytest.raises(ProcessorError, match="logits processor Returns returned NoneType"):
        engine.generate(PROMPT, logits_processor=[Returns(lambda scores: None)], max_new_tokens=20)
    check_usable(engine)


def test_a_failing_stopping_criterion_leaves_the_engine_usable() -> None:
    engine = engine_of()

    def fails(input_ids: Tensor, scores: Any) -> bool:
        raise RuntimeError("no more patience")

    with pytest.raises(RuntimeError, match="no more patience"):
        engine.generate(PROMPT, stopping_criteria=[fails])
    check_usable(engine)


# ---------------------------------------------------------------------------------------------------- NaN


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", [None, 5])
def test_nan_on_tree_nodes_never_changes_the_answer(policy: str, seed: int | None) -> None:
    """Rows below the root are NaN, so no node may be entered; the root's row is that of plain decoding."""
    options = {} if seed is None else {"seed": seed, "do_sample": True}
    expected, engine = plainly(16, **options), engine_of(policy)

    def spoil(logits: Tensor) -> Tensor:
        logits = logits.clone()
        logits[:, 1:] = float("nan")
        return logits

    with hooked(engine.target.model.lm_head, spoil):
        result = engine.generate(PROMPT, max_new_tokens=16, **options)
    assert result.token_ids == expected
    assert result.stats.num_draft_tokens > 0 == result.stats.num_accepted_draft_tokens
    check_usable(engine)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 5}, {"repetition_penalty": 1.2}], ids=str)
def test_tokens_whose_logits_are_not_finite_are_never_chosen(value: float, options: dict[str, Any]) -> None:
    favourites = plainly(16, **options)

    def spoil(logits: Tensor) -> Tensor:
        logits = logits.clone()
        logits[..., favourites] = value
        return logits

    with hooked(model().lm_head, spoil):
        expected = plainly(16, **options)
        assert engine_of().generate(PROMPT, max_new_tokens=16, **options).token_ids == expected
    assert not set(expected) & set(favourites)


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 5}, {"repetition_penalty": 1.2}], ids=str)
def test_nan_on_the_root_is_an_error_with_a_position(options: dict[str, Any]) -> None:
    engine = engine_of()
    calls = 0

    def spoil(logits: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return logits * float("nan") if calls > 4 else logits

    seen: list[int] = []
    with hooked(engine.target.model.lm_head, spoil), pytest.raises(NumericalError, match="at position") as raised:
        stream_into(seen, engine, **options)
    assert f"position {len(PROMPT) + len(seen)} " in str(raised.value)
    assert seen == plainly(40, **options)[: len(seen)] != []
    check_usable(engine)


# ---------------------------------------------------------------------------------------------------- interrupts


def interrupting(after: int) -> Callable[[Tensor], Tensor]:
    calls = 0

    def interrupt(output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == after:
            raise KeyboardInterrupt
        return output

    return interrupt


@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.parametrize("part", ["target", "draft"])
def test_ctrl_c_inside_a_forward(part: str, after: int) -> None:
    engine = engine_of()
    module = (engine.target.model if part == "target" else engine.drafter.lm.model).model.layers[1].mlp
    seen: list[int] = []
    with hooked(module, interrupting(after)), pytest.raises(KeyboardInterrupt):
        stream_into(seen, engine)
    assert seen == plainly(40)[: len(seen)]
    assert (engine.target.tokens, engine.target.cache.length, engine.drafter.cache.length) == ([], 0, 0)
    check_usable(engine)


def test_ctrl_c_in_the_consumer() -> None:
    engine = engine_of()

    def consume() -> None:
        for _ in engine.stream(PROMPT, max_new_tokens=40):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    check_usable(engine)


class Fails:
    """A streamer or a tokenizer in whose code Ctrl-C arrives."""

    chat_template = None

    def put(self, value: Tensor) -> None:
        if value.numel() < len(PROMPT):
            raise KeyboardInterrupt

    def end(self) -> None: ...

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["streamer", "tokenizer"])
def test_ctrl_c_around_the_loop_frees_the_engine_though_the_traceback_lives(where: str) -> None:
    """As at a prompt, where sys.last_traceback keeps the frames of what was interrupted."""
    engine = engine_of(tokenizer=Fails() if where == "tokenizer" else None)
    options = {"streamer": Fails()} if where == "streamer" else {}
    with pytest.raises(KeyboardInterrupt) as interrupted:
        engine.generate(PROMPT, max_new_tokens=40, **options)
    engine.tokenizer = None
    check_usable(engine)
    assert interrupted.traceback


def test_breaking_out_of_a_stream_frees_the_engine_at_once() -> None:
    engine = engine_of(tokenizer=byte_tokenizer())
    gc.disable()  # what is freed by reference counting needs no collector
    try:
        for _ in engine.stream(PROMPT, max_new_tokens=40):
            break
        check_usable(engine)
        for _ in engine.session().stream("Hello", max_new_tokens=40):
            break
        check_usable(engine)
    finally:
        gc.enable()
    stream = engine.stream(PROMPT, max_new_tokens=40)
    next(stream)
    with pytest.raises(EngineBusyError):
        engine.generate(PROMPT)
    stream.close()
    check_usable(engine)
    assert list(stream) == []


def test_a_stream_that_was_never_started_holds_nothing() -> None:
    engine = engine_of()
    waiting = engine.stream(PROMPT, max_new_tokens=20)
    check_usable(engine)
    assert [token for piece in waiting for token in piece.cycle.tokens] == plainly(20)


# ---------------------------------------------------------------------------------------------------- threads


def test_two_threads_sharing_an_engine() -> None:
    engine = engine_of()
    inside, leave = threading.Event(), threading.Event()
    answers: list[Any] = []

    def waits(ids: Tensor, scores: Any) -> bool:
        inside.set()
        leave.wait(20)
        return False

    def first() -> None:
        answers.append(engine.generate(PROMPT, max_new_tokens=20, stopping_criteria=[waits]))

    thread = threading.Thread(target=first)
    thread.start()
    try:
        assert inside.wait(20)
        with pytest.raises(EngineBusyError, match=r"generating for another caller.*they can share the loaded model"):
            engine.generate(PROMPT)
    finally:
        leave.set()
        thread.join(20)
    assert answers[0].token_ids == plainly(20)
    check_usable(engine)


def test_two_engines_sharing_a_model_in_two_threads() -> None:
    prompts = [PROMPT, PROMPT[::-1]]
    plain = Engine(HuggingFaceTarget(model()), None, None)
    expected = [plain.generate(prompt, max_new_tokens=60).token_ids for prompt in prompts]
    engines = [engine_of("eagle"), engine_of("chain")]
    answers: list[list[list[int]]] = [[], []]
    barrier = threading.Barrier(2)

    def work(index: int) -> None:
        for _ in range(4):
            barrier.wait(20)
            answers[index].append(engines[index].generate(prompts[index], max_new_tokens=60).token_ids)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [[expected[0]] * 4, [expected[1]] * 4]


# ---------------------------------------------------------------------------------------------------- odds and ends


def test_a_second_engine_takes_over_a_model_as_the_first_left_it() -> None:
    assert engine_of().target.model.config._attn_implementation == ATTENTION
    check_usable(engine_of("chain"))
    check_usable(engine_of("fixed"))


def test_options_given_to_one_generation_do_not_reach_the_next() -> None:
    engine = engine_of()
    engine.generate(PROMPT, max_new_tokens=5, repetition_penalty=1.5, temperature=1.0, seed=1)
    check_usable(engine)
    config = GenerationConfig(repetition_penalty=1.5)
    before = config.to_dict()
    engine.generate(PROMPT, max_new_tokens=5, generation_config=config)
    assert config.to_dict() == before


def test_half_precision_runs_and_says_its_dtype() -> None:
    half = tiny("llama").to(torch.bfloat16)
    engine = Engine(HuggingFaceTarget(half), NGram(shortest=1), policy_for("eagle"))
    assert engine.target.cache.slab.dtype == torch.bfloat16
    assert len(engine.generate(PROMPT, max_new_tokens=30, temperature=0.8, seed=1).token_ids) == 30


def test_the_defaults_are_those_documented() -> None:
    options = GenerationOptions.of({}, None, 1, 10_000)
    assert (options.max_new_tokens, options.samples, options.seed) == (256, False, None)
    assert GenerationOptions.of({}, None, 100, 110).max_new_tokens == 10
    assert GenerationOptions.of({"temperature": 0}, GenerationConfig(do_sample=True), 1, 99).samples is False
    assert GenerationOptions.of({"top_p": 0.9}, None, 1, 99).samples is True
    assert GenerationOptions.of({"top_p": 0.9, "do_sample": False}, None, 1, 99).samples is False
