"""Prompts, options and arguments that make no sense: the message that a user reads."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from specengine import Engine
from specengine.errors import InputError, UnsupportedModelError
from specengine.models.huggingface import HuggingFaceTarget
from specengine.request.options import GenerationOptions
from specengine.request.prompts import token_ids
from tests.hostile.engines import PROMPT, check_usable, engine_of, model, toy_engine
from tests.toy import VOCABULARY, Tables, ToyDrafter, ToyTarget, byte_tokenizer, policy_for

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt: it is empty, at least one token is needed"),
        ([], "prompt: it is empty, at least one token is needed"),
        (torch.empty(1, 0, dtype=torch.int64), "prompt: it is empty"),
        (
            [1, VOCABULARY],
            f"prompt: token id {VOCABULARY} is out of range, accepted 0 to {VOCABULARY - 1}",
        ),
        ([1, -1], "prompt: token id -1 is out of range"),
        ([1] * 256, r"prompt: it has 256 tokens, accepted at most 255: the context here is 256"),
        ([1] * 1000, r"prompt: it has 1000 tokens, accepted at most 255"),
        (
            [[1, 2], [3, 4]],
            "prompt: accepted a string, a list of chat messages .* or a list of token ids",
        ),
        ([1.0, 2.0], "prompt: accepted a string"),
        ([True, False], "prompt: accepted a string"),
        (True, "prompt: got bool, accepted a string"),
        (float("nan"), "prompt: got float, accepted a string"),
        ([1, True], "prompt: accepted a string.*; got True in a list"),
        ([float("nan")], "prompt: accepted a string.*; got nan in a list"),
        (["a", "b"], "prompt: accepted a string.*; for several prompts call generate_many"),
        (
            torch.ones(2, 3, dtype=torch.int64),
            "prompt: got a batch of 2, accepted one sequence; for several call generate_many",
        ),
        (
            torch.ones(1, 2, 3, dtype=torch.int64),
            r"prompt: got torch.int64 \(1, 2, 3\), accepted int64",
        ),
        (torch.ones(3), r"prompt: got torch.float32 \(3,\), accepted int64"),
        ([{"role": "user"}], r"prompt: a message: got \['role'\], accepted role and content"),
        (
            [{"role": "human", "content": "hi"}],
            "a message's role: got 'human', accepted system, developer, user, assistant, tool, or one that",
        ),
        (None, "prompt: got none, accepted one of prompt, input_ids, inputs, messages"),
        (5, "prompt: got int, accepted a string"),
        (b"hi", "prompt: got bytes, accepted a string"),
        ({"role": "user", "content": "hi"}, "prompt: got dict, accepted .* pass its input_ids"),
        ("caf\udce9", r"prompt: character 3 is not Unicode text \('\\udce9'\)"),
        ([{"role": "user", "content": "caf\udce9"}], "prompt: character 3 is not Unicode text"),
        (
            [{"role": "user", "content": None}],
            "prompt: a message's content: got NoneType, accepted a string",
        ),
        (
            [{"role": "user", "content": ["hi"]}],
            "prompt: a content part: got type 'str', accepted",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "prompt: a content part: got type 'image_url', accepted",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "prompt: a content part: got type 'text' without",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value)[:20],
)
def test_wrong_prompts(prompt: Any, message: str) -> None:
    engine = engine_of(tokenizer=byte_tokenizer())
    with pytest.raises(InputError, match=message):
        engine.generate(prompt)


def test_content_parts_of_text_are_a_message() -> None:
    engine = engine_of(tokenizer=byte_tokenizer())
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    whole, split = ([{"role": "user", "content": content}] for content in ("Hello", parts))
    assert (
        engine.generate(whole, max_new_tokens=4).token_ids
        == engine.generate(split, max_new_tokens=4).token_ids
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_strings": 3}, "stop_strings: got 3, accepted a string or a list of strings"),
        ({"eos_token_id": "x"}, "eos_token_id: got 'x', accepted a token id or a list of them"),
        (
            {"logits_processor": lambda ids, rows: rows},
            "logits_processor: got .*, accepted a list of callables",
        ),
        (
            {"stopping_criteria": lambda ids, rows: True},
            "stopping_criteria: got .*, accepted a list of callables",
        ),
        (
            {"generation_config": {"a": 1}},
            "generation_config: got dict, accepted a transformers.GenerationConfig",
        ),
        ({"streamer": 5}, "streamer: got 5, accepted one of transformers' streamers"),
        ({"sequence_bias": [1]}, r"sequence_bias: got \[1\], which transformers refuses"),
        ({"suppress_tokens": ["a"]}, r"suppress_tokens: got \['a'\], which transformers refuses"),
        ({"bad_words_ids": "x"}, "bad_words_ids: got 'x', which transformers refuses"),
        ({"temperature": 10**400}, "temperature: got 1000"),
        ({"repetition_penalty": 1e300}, r"repetition_penalty: got 1e\+300, accepted above 0"),
        ({"min_new_tokens": 9, "max_new_tokens": 4}, "min_new_tokens: got 9, accepted up to 4"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_options_of_other_types_are_named(options: dict[str, Any], message: str) -> None:
    engine = engine_of(tokenizer=byte_tokenizer())
    with pytest.raises(InputError, match=message):
        engine.generate(PROMPT, **options)
    check_usable(engine)


class Listening:
    """A streamer that fails when it is given the n-th piece."""

    def __init__(self, fails: int) -> None:
        self.left, self.ends = fails, 0

    def put(self, tokens: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError("the pipe is gone")

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("fails", [0, 1, 3])
def test_a_streamer_is_told_the_end_once_whatever_happens(fails: int) -> None:
    engine, streamer = engine_of(), Listening(fails)
    if fails:
        with pytest.raises(OSError, match="the pipe is gone"):
            engine.generate(PROMPT, max_new_tokens=8, streamer=streamer)
    else:
        engine.generate(PROMPT, max_new_tokens=8, streamer=streamer)
    assert streamer.ends == 1
    check_usable(engine)


def test_a_stream_left_early_tells_its_streamer_and_frees_the_engine() -> None:
    engine, streamer = engine_of(), Listening(0)
    with engine.stream(PROMPT, max_new_tokens=8, streamer=streamer) as stream:
        next(stream)
    assert streamer.ends == 1
    check_usable(engine)


def test_an_engine_says_what_it_is() -> None:
    assert repr(engine_of()).startswith("Engine(")
    assert "draft=None, policy=None" in repr(Engine(engine_of().target, None, None))


def test_text_needs_a_tokenizer_and_messages_a_template() -> None:
    engine = engine_of()
    for prompt, what in (
        ("Hello", "a string prompt"),
        ([{"role": "user", "content": "Hello"}], "chat messages"),
    ):
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: got 0, accepted a whole number, 1 or more"),
        ({"max_new_tokens": 2.5}, "max_new_tokens: got 2.5, accepted a whole number"),
        ({"temperature": -0.1}, r"temperature: got -0.1, accepted 0 \(greedy\) or more"),
        ({"temperature": float("nan")}, "temperature: got nan, accepted 0"),
        ({"temperature": float("inf")}, "temperature: got inf, accepted 0"),
        ({"temperature": "hot"}, "temperature: got 'hot', accepted a number, 0"),
        ({"temperature": True}, "temperature: got True, accepted a number, 0"),
        ({"temperature": [1]}, r"temperature: got \[1\], accepted a number, 0"),
        ({"do_sample": "False"}, "do_sample: got 'False', accepted True, None or False"),
        ({"return_dict_in_generate": 1}, "return_dict_in_generate: got 1, accepted True, None"),
        ({"raw": torch.tensor([1, 2])}, r"raw: got \[1, 2\], accepted True or False"),
        ({"top_p": 0}, "top_p: got 0, accepted above 0, at most 1"),
        ({"temperature": "1"}, r"temperature: got '1', accepted a number, 0 \(greedy\) or more"),
        ({"logprobs": 10**6}, r"logprobs: got 1000000, accepted 0 to \d+, the vocabulary"),
        ({"top_p": 1.01}, "top_p: got 1.01, accepted above 0, at most 1"),
        ({"top_k": -1}, "top_k: got -1, accepted a whole number, 0 or more"),
        ({"min_p": 1.5}, "min_p: got 1.5, accepted 0 to 1"),
        ({"typical_p": 0.0}, "typical_p: got 0.0, accepted above 0"),
        ({"repetition_penalty": 0}, "repetition_penalty: got 0, accepted above 0"),
        ({"presence_penalty": float("nan")}, "presence_penalty: got nan, accepted a finite number"),
        (
            {"frequency_penalty": float("-inf")},
            "frequency_penalty: got -inf, accepted a finite number",
        ),
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
    assert message.startswith(
        "unknown option 'temprature', known are max_new_tokens, do_sample, temperature, "
    )
    for name in ("seed", "stop_strings", "logits_processor", "generation_config", "raw"):
        assert name in message
    with pytest.raises(
        InputError, match="unknown option 'dtyp', known are dtype, device, tokenizer, draft_options"
    ):
        Engine.from_pretrained(model(), dtyp="float32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"dtype": "int8"},
            "dtype: got 'int8', accepted auto, bfloat16, float16, float32 or a torch.dtype",
        ),
        ({"dtype": {"a": 1}}, "dtype: got {'a': 1}, accepted auto, bfloat16"),
        ({"device": "tpu:x"}, "device: got 'tpu:x', accepted cpu, cuda, cuda:N, mps or xpu"),
        ({"device": 1.5}, "device: got 1.5, accepted cpu, cuda, cuda:N, mps or xpu"),
        ({"device": "meta"}, "device: got 'meta', accepted cpu, cuda, cuda:N, mps or xpu"),
        ({"device": "hpu"}, "device: got 'hpu', accepted cpu, cuda, cuda:N, mps or xpu"),
        ({"device": "xpu:1"}, "device: xpu was asked for, but torch sees no such device"),
        ({"model": 7}, "model: got int, accepted a name, a path or a loaded transformers model"),
        ({"policy": "talons"}, "policy: unknown name 'talons', known are .*chain, .*eagle.*fixed"),
        ({"policy": 3}, "policy: got 3, accepted .*eagle.* or a TreePolicy"),
        ({"policy": "plain", "draft": "ngram"}, "draft: policy 'plain' decodes without a draft"),
        (
            {"policy": "eagle", "policy_options": {"wide": 3}},
            "policy eagle: unknown option 'wide', known are width",
        ),
        ({"policy_options": {"width": 3}}, "policy_options: they need a policy given by name"),
        (
            {"draft": "none", "draft_options": {"longest": 3}},
            "draft_options: they need a draft given by name",
        ),
        ({"draft": 7}, "draft: got int, accepted a name, a path, a loaded model or a Drafter"),
        (
            {"model": "no/model", "draft": "ngram", "draft_options": {"long": 3}},
            "draft ngram: unknown option 'long'",
        ),
        (
            {"draft": "ngram", "draft_options": {"long": 3}},
            "draft ngram: unknown option 'long', known are longest",
        ),
        (
            {"draft": "ngram", "draft_options": {"longest": "x"}},
            r"draft ngram\.longest: got 'x', expected int",
        ),
        (
            {"policy_options": 1e300},
            "policy_options: got 1e\\+300, accepted a dict of options by name",
        ),
        (
            {"draft_options": [["a", 1]]},
            "draft_options: got .*, accepted a dict of options by name",
        ),
        ({"strict": "no"}, "strict: got 'no', accepted True or False"),
        ({"lookup": 0}, "lookup: got 0, accepted True, None or False"),
        (
            {"draft": "x" * 5000},
            r"draft: got 'x{59}\.\.\., accepted a name or a path .it is too long",
        ),
        ({"draft": "caf\ud800"}, r"draft: got 'caf\\ud800', accepted a name or a path"),
        (
            {"policy": "chain", "policy_options": {"length": 5_000_000}},
            "its trees could have 5000001 nodes, accepted up",
        ),
        (
            {"policy": "auto", "policy_options": {"rounds": 2_000_000}},
            "rounds: got 2000000, accepted 1 to 64",
        ),
        (
            {"policy": "eagle", "policy_options": {"width": math.inf}},
            r"policy eagle\.width: got inf, expected int",
        ),
        (
            {"policy": "eagle", "policy_options": {"width": 10**400}},
            r"policy eagle\.width: got 1000",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_wrong_arguments_of_from_pretrained(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Engine.from_pretrained(**{"model": model(), **arguments})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device() -> None:
    with pytest.raises(
        InputError, match="device: cuda was asked for, but torch sees no CUDA device"
    ):
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


def test_options_given_to_one_generation_do_not_reach_the_next() -> None:
    engine = engine_of()
    engine.generate(PROMPT, max_new_tokens=5, repetition_penalty=1.5, temperature=1.0, seed=1)
    check_usable(engine)
    config = GenerationConfig(repetition_penalty=1.5)
    before = config.to_dict()
    engine.generate(PROMPT, max_new_tokens=5, generation_config=config)
    assert config.to_dict() == before


def test_the_defaults_are_those_documented() -> None:
    options = GenerationOptions.of({}, None, 1, 10_000)
    assert (options.max_new_tokens, options.samples, options.seed) == (256, False, None)
    assert GenerationOptions.of({}, None, 100, 110).max_new_tokens == 10
    assert (
        GenerationOptions.of({"temperature": 0}, GenerationConfig(do_sample=True), 1, 99).samples
        is False
    )
    assert GenerationOptions.of({"top_p": 0.9}, None, 1, 99).samples is True
    assert (
        GenerationOptions.of({"do_sample": False}, GenerationConfig(top_p=0.9), 1, 99).samples
        is False
    )


@pytest.mark.parametrize("messages", [False, True])
def test_a_prompt_that_is_far_too_long_is_refused_by_its_beginning(messages: bool) -> None:
    class Counting:
        chat_template = "x"

        def __init__(self, letters: int) -> None:
            self.letters, self.read = letters, 0

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            self.read += len(text)
            return {"input_ids": [1] * (len(text) // self.letters)}

        def apply_chat_template(
            self, found: list[dict[str, str]], **_: Any
        ) -> dict[str, list[int]]:
            return self("".join(message["content"] for message in found))

    def ids(tokenizer: Counting, text: str) -> list[int]:
        prompt: Any = [{"role": "user", "content": text}] if messages else text
        return token_ids(prompt, tokenizer, raw=False, vocab_size=9, max_context=100)

    usual = Counting(letters=4)
    with pytest.raises(
        InputError,
        match=r"prompt: its first 800 of 10000\d\d characters have 200 tokens, accepted at",
    ):
        ids(usual, "a" * 1_000_000)
    assert usual.read == 800
    blanks = Counting(letters=16)  # whose beginning says nothing
    assert len(ids(blanks, " " * 1500)) == 93
    with pytest.raises(InputError, match="prompt: it has 125 tokens"):
        ids(blanks, " " * 2000)


def test_whole_numbers_are_numbers() -> None:
    engine = engine_of()
    whole, real = (
        engine.generate(PROMPT, max_new_tokens=8, repetition_penalty=given) for given in (2, 2.0)
    )
    assert whole.token_ids == real.token_ids


def test_options_nested_deep_are_refused_and_not_printed_whole() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    engine = engine_of()
    for options in (
        {"policy": "eagle", "policy_options": {"width": deep}},
        {"stop_strings": [deep]},
        {"prediction": deep},
    ):
        with pytest.raises(InputError, match=f"{next(reversed(options))}.*: got a?.*") as refused:
            engine.generate(PROMPT, **options)
        assert len(str(refused.value)) < 300
    check_usable(engine)
