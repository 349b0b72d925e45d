"""numerics="integer": who gets it, close to the float32 model, and the same bits in every tree and instruction set."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine import Engine
from specengine.checkpoints.gguf_source import GGUFSource
from specengine.checkpoints.pretrained import open_native
from specengine.drafters.eagle import EagleDraft
from specengine.drafters.small_model import SmallModel
from specengine.errors import BackendError, InputError, UnsupportedModelError
from specengine.models import extension
from specengine.models.extension import VARIABLE, instruction_set, kinds_of
from specengine.models.families import Shape
from specengine.models.native import (
    NativeHead,
    NativeLM,
    NativeTarget,
    lm as native_lm_module,
    weights,
)
from specengine.models.native.weights import Weight
from specengine.ops.tree import TokenTree
from tests.models.native_engines import forced, native_lm, needs_extension
from tests.models.native_variants import (
    PROMPT,
    half_of,
    model_of,
    native_logits,
    own_logits,
    tree_of,
    write_gguf,
)
from tests.toy import POLICIES, head_config, policy_for, random_state, tiny

SETS = extension.instruction_sets("integer")
pytestmark = [
    needs_extension,
    pytest.mark.skipif(not SETS, reason="this build has no integer products for this machine"),
    pytest.mark.usefixtures("one_thread"),
]
# Kinds of files, and i8 for quantize="int8"
KINDS = [kind for kind in kinds_of("integer") if kind not in ("f32", "bf16")] if SETS else []
PACKED = [kind for kind in KINDS if kind != "i8"]
SOME = [kind for kind in ("q4_1", "q4_k", "q6_k", "q8_0", "i8") if kind in KINDS]
HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "narrowed": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 12345678901234567890},
    "penalised": {
        "temperature": 1.1,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "seed": 0,
    },
}
PROMPTS = [[*range(start, start + 5 + start % 7)] * (1 + start % 3) for start in range(3, 243, 20)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("numerics")


@cache
def lm_of(
    folder: Path,
    kind: str,
    instructions: str,
    numerics: str = "integer",
    architecture: str = "llama",
) -> NativeLM:
    """A model of a file in blocks of that kind; i8: of the blocks q8_0 as int8."""
    stored = "q8_0" if kind == "i8" else kind
    path = folder / f"{architecture}-{stored}.gguf"
    if not path.exists():
        write_gguf(path, architecture, stored, tied=architecture == "qwen3")
    with forced(instructions):
        quantize = "int8" if kind == "i8" else None
        return NativeLM(open_native(str(path)).source, quantize=quantize, numerics=numerics)


# ---------------------------------------------------------------------------------------------------- which one


INTEL = {
    "bfloat16": ["amx", "avx512bf16", "avx512", "avx2", "portable"],
    "integer": ["avx512vnni", "avx512", "avxvnni", "avx2", "portable"],
}
OLD = {"bfloat16": ["avx2", "portable"], "integer": ["avx2", "portable"]}
ARM = {"bfloat16": ["neon"], "integer": ["neon"]}


def machine(patch: pytest.MonkeyPatch, sets: dict[str, list[str]], forced_set: str = "") -> None:
    patch.setattr(
        extension,
        "extension",
        lambda: SimpleNamespace(instruction_sets=lambda numerics: sets[numerics]),
    )
    patch.setenv(VARIABLE, forced_set)


@pytest.mark.parametrize(
    ("asked", "bfloat16", "float32", "integer"),
    [
        ("", "amx", "avx512", "avx512vnni"),
        ("amx", "amx", "avx512", "avx512vnni"),
        ("avx512bf16", "avx512bf16", "avx512", "avx512vnni"),
        ("avx512vnni", "avx512", "avx512", "avx512vnni"),
        ("avx512", "avx512", "avx512", "avx512"),
        ("avxvnni", "avx2", "avx2", "avxvnni"),
        ("avx2", "avx2", "avx2", "avx2"),
        ("portable", "portable", "portable", "portable"),
    ],
)
def test_the_variable_names_a_cpu_by_one_of_its_sets(
    asked: str, bfloat16: str, float32: str, integer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, INTEL, asked)
    assert [instruction_set(name) for name in ("bfloat16", "float32", "integer")] == [
        bfloat16,
        float32,
        integer,
    ]


def test_a_set_that_is_not_there_is_an_error_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, INTEL, "avx1024")
    for numerics in ("bfloat16", "integer"):
        with pytest.raises(
            BackendError,
            match=r"SPECENGINE_CPU: got 'avx1024', accepted on this CPU: amx, .*avxvnni$",
        ):
            instruction_set(numerics)
    machine(monkeypatch, OLD, "avx512vnni")
    with pytest.raises(
        BackendError, match=r"got 'avx512vnni', accepted on this CPU: avx2, portable$"
    ):
        instruction_set("integer")
    machine(monkeypatch, OLD | {"integer": []})
    with pytest.raises(BackendError, match="this build has no integer products"):
        instruction_set("integer")


@pytest.mark.parametrize(
    ("sets", "asked", "whole", "floats"),
    [
        (INTEL, "", "bfloat16", "bfloat16"),
        (INTEL, "amx", "bfloat16", "bfloat16"),
        (INTEL, "avx512bf16", "integer", "bfloat16"),
        (INTEL, "avx512vnni", "integer", "bfloat16"),
        (INTEL, "avx2", "integer", "bfloat16"),
        (INTEL, "portable", "bfloat16", "bfloat16"),
        ({"bfloat16": ["portable"], "integer": ["portable"]}, "", "bfloat16", "bfloat16"),
        (OLD, "", "integer", "bfloat16"),
        (ARM, "", "integer", "bfloat16"),
        (OLD | {"integer": []}, "", "bfloat16", "bfloat16"),
    ],
)
def test_by_default_the_instruction_set_decides(
    sets: dict[str, list[str]], asked: str, whole: str, floats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, sets, asked)
    assert extension.numerics_of("auto", torch.bfloat16, whole=True) == whole
    assert extension.numerics_of("auto", torch.bfloat16, whole=False) == floats
    assert extension.numerics_of("auto", torch.float32, whole=False) == "float32"


def test_what_is_asked_for_is_taken_or_refused_by_name(files: Path) -> None:
    for quantize, numerics, found in (
        (None, "auto", "bfloat16"),
        (None, "bfloat16", "bfloat16"),
        ("int8", "bfloat16", "bfloat16"),
        ("int8", "integer", "integer"),
    ):
        engine = Engine.from_pretrained(
            half_of("llama"), "none", quantize=quantize, numerics=numerics
        )
        assert engine.target.lm.numerics == found
        assert engine.target.backend.startswith(
            f"native ({engine.target.lm.instruction_set}, {found}, "
        )
    assert Engine.from_pretrained(model_of("llama"), "none").target.lm.numerics == "float32"
    half, single = half_of("llama"), model_of("llama")
    path = str(write_gguf(files / "asked.gguf", "llama", "q4_1"))
    asked = "numerics: the native forward was asked for, but "
    for model, options, message in (
        (
            half,
            {"numerics": "integer"},
            "numerics: got integer for weights in bfloat16, accepted with packed blocks",
        ),
        (
            single,
            {"numerics": "integer"},
            "numerics: got integer for weights in float32, accepted with packed blocks",
        ),
        (
            path,
            {"numerics": "integer", "dtype": "float32"},
            "numerics: got integer for weights in float32",
        ),
        (
            single,
            {"numerics": "bfloat16"},
            "numerics: got 'bfloat16' for a model in float32, accepted auto, float32",
        ),
        (
            half,
            {"numerics": "float32"},
            "numerics: got 'float32' for a model in bfloat16, accepted auto, bfloat16",
        ),
        (
            half,
            {"numerics": "int8"},
            "numerics: got 'int8', accepted auto, bfloat16, float32, integer",
        ),
        (half, {"numerics": None}, "numerics: got None, accepted auto, bfloat16, float32, integer"),
        (
            half,
            {"numerics": "integer", "backend": "huggingface"},
            asked + "backend='huggingface' was asked for",
        ),
        (
            half,
            {"numerics": "bfloat16", "graphs": True},
            asked + "graphs are made of the model's own modules",
        ),
        (None, {"numerics": "integer", "tp_plan": "auto"}, "tp_plan: got numerics too"),
    ):
        with pytest.raises(InputError, match=message):
            Engine.from_pretrained(model, "none", **options)


def test_a_file_is_packed_for_its_numerics_and_by_default_as_the_machine_multiplies(
    files: Path,
) -> None:
    path = str(write_gguf(files / "default.gguf", "llama", "q4_1"))
    for numerics in ("bfloat16", "integer"):
        engine = Engine.from_pretrained(path, "none", numerics=numerics)
        assert engine.target.backend.endswith("MB of weights as q4_1)")
        assert f", {numerics}, " in engine.target.backend
    default = Engine.from_pretrained(path, "none").target.lm
    assert default.numerics == ("bfloat16" if instruction_set("bfloat16") == "amx" else "integer")
    with pytest.raises(InputError, match="numerics: got integer for weights in bfloat16"):
        Engine.from_pretrained(
            str(write_gguf(files / "plain.gguf", "llama", "f16")), "none", numerics="integer"
        )


def test_a_draft_chooses_for_itself_and_loaded_models_are_shared_by_numerics(files: Path) -> None:
    model = half_of("llama")
    path = str(write_gguf(files / "draft.gguf", "llama", "q4_1"))
    engine = Engine.from_pretrained(
        path, model_with_vocabulary(path), numerics="integer", lookup=False
    )
    assert (engine.target.lm.numerics, engine.drafter.lm.numerics) == ("integer", "bfloat16")
    first = native_lm(model, quantize="int8", numerics="integer")
    assert native_lm(model, quantize="int8", numerics="integer") is first
    assert native_lm(model, quantize="int8", numerics="bfloat16") is not first


def model_with_vocabulary(path: str) -> Any:
    return tiny(vocab_size=open_native(path).source.config.vocab_size).to(torch.bfloat16)


# ---------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("kind", PACKED)
def test_embeddings_of_packed_blocks_are_the_files_numbers(kind: str, files: Path) -> None:
    """In float32 under integer numerics, rounded to bfloat16 otherwise, as the converted model has them."""
    lm, tokens = lm_of(files, kind, SETS[0]), torch.arange(0, 260, 7)
    source = lm.source
    assert isinstance(source, GGUFSource)
    exact = torch.from_numpy(source.file.numbers("token_embd.weight"))[tokens]
    assert torch.allclose(lm.embed(tokens), exact, rtol=1e-6, atol=1e-7)
    assert lm.stored == kind
    rounded = lm_of(files, kind, extension.instruction_sets()[0], "bfloat16")
    assert torch.equal(rounded.embed(tokens), exact.bfloat16().float())
    assert rounded.stored == (kind if kind in kinds_of("bfloat16") else "bf16")


@pytest.mark.sliced(6)
@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", KINDS)
def test_integers_are_close_to_float32(
    kind: str, architecture: str, instructions: str, files: Path
) -> None:
    lm = lm_of(files, kind, instructions, architecture=architecture)
    assert (lm.numerics, lm.instruction_set) == ("integer", instructions)
    ours, exact = (
        native_logits(lm, PROMPT, tree_of(lm.vocab_size)),
        exact_logits(files, kind, architecture),
    )
    error = float((ours - exact).abs().mean() / exact.std())
    assert 0 < error < 0.06


@cache
def exact_logits(folder: Path, kind: str, architecture: str) -> Tensor:
    stored = "q8_0" if kind == "i8" else kind
    source = open_native(str(folder / f"{architecture}-{stored}.gguf"), dtype=torch.float32).source
    return own_logits(source.model(), PROMPT, tree_of(source.config.vocab_size))


# ---------------------------------------------------------------------------------------------------- the check


def _other_rope(patch: pytest.MonkeyPatch, factor: float) -> None:
    real = GGUFSource.rope

    def other(self: GGUFSource, key: str = "") -> tuple[Tensor, float]:
        frequencies, scale = real(self, key)
        size = 2 * len(frequencies)
        return frequencies * factor ** (-torch.arange(0, size, 2) / size), scale

    patch.setattr(GGUFSource, "rope", other)


def _other_shape(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    real = native_lm_module.shape_of
    patch.setattr(
        native_lm_module, "shape_of", lambda config: Shape(**(vars(real(config)) | changes))
    )


def _swapped(patch: pytest.MonkeyPatch, name: str, size: int, kind: str = "") -> None:
    """Swap the first two heads of this matrix while it is packed, or only if its data is of this kind."""
    real = weights.add_weight

    def swapped(weights: Any, weight: Weight, kinds: Any, following: Any = None) -> str:
        if weight.name == name and weight.kind.startswith(kind):
            given, order = weight.order, torch.arange(weight.shape[0], dtype=torch.int32)
            order[: 2 * size] = order[: 2 * size].roll(size)
            weight = weight._replace(
                order=order if given is None else given[order.long()].contiguous()
            )
        return real(weights, weight, kinds, following)

    patch.setattr(weights, "add_weight", swapped)


def _without(patch: pytest.MonkeyPatch, name: str) -> None:
    """Ones for the factors of this norm."""
    real = weights.add_weight

    def without(weights: Any, weight: Weight, kinds: Any, following: Any = None) -> str:
        if weight.name == name:
            weight = Weight.of(name, torch.full(weight.shape, 1.0))
        return real(weights, weight, kinds, following)

    patch.setattr(weights, "add_weight", without)


LAYER = "model.layers.0."
WRONG: dict[str, Any] = {
    "twice the rotary base": lambda patch: _other_rope(patch, 2.0),
    "a tenth of the rotary base": lambda patch: _other_rope(patch, 0.1),
    "no positions": lambda patch: _other_rope(patch, 1e9),
    "epsilon of 1e-3": lambda patch: _other_shape(patch, eps=1e-3),
    "two heads swapped": lambda patch: _swapped(patch, LAYER + "self_attn.q_proj.weight", 64),
    "key heads swapped": lambda patch: _swapped(patch, LAYER + "self_attn.k_proj.weight", 64),
    "gates swapped": lambda patch: _swapped(patch, LAYER + "mlp.gate_proj.weight", 8),
    "a norm left out": lambda patch: _without(patch, LAYER + "input_layernorm.weight"),
}


@pytest.mark.parametrize("kind", ["q4_1", "i8"])
@pytest.mark.parametrize("case", WRONG)
def test_another_structure_is_refused(
    case: str, kind: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that moves hidden states by less than rounding activations to int8 does."""
    lm_of(files, kind, SETS[0])  # as it is it is taken
    WRONG[case](monkeypatch)
    quantize, stored = ("int8", "q8_0") if kind == "i8" else (None, kind)
    source = open_native(str(files / f"llama-{stored}.gguf")).source
    with pytest.raises(
        UnsupportedModelError, match="gives other hidden states than its own modules"
    ):
        NativeLM(source, quantize=quantize, numerics="integer")


def test_rows_packed_in_another_order_are_refused(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the blocks alone, which the check in float32 does not read."""
    lm_of(files, "q4_1", SETS[0])
    _swapped(monkeypatch, LAYER + "mlp.down_proj.weight", 128, kind="q4_1")
    with pytest.raises(UnsupportedModelError, match=r"at most 0\.1 is rounding"):
        NativeLM(open_native(str(files / "llama-q4_1.gguf")).source, numerics="integer")


# ---------------------------------------------------------------------------------------------------- exactness


def engine_of(
    folder: Path, kind: str, instructions: str, policy: str, draft: str = "small_model"
) -> Engine:
    lm = lm_of(folder, kind, instructions)
    target = NativeTarget(lm)
    if draft == "none":
        return Engine(target, None, None)
    often_right = lm_of(folder, "q4_0", instructions)  # of the same numbers, rounded otherwise
    return Engine(target, SmallModel(often_right, lm.vocab_size), policy_for(policy, 3))


@cache
def plain_answer(folder: Path, kind: str, how: str, count: int) -> list[int]:
    """Of the fastest set: the others must answer alike."""
    engine = engine_of(folder, kind, SETS[0], "", "none")
    return engine.generate(PROMPT, max_new_tokens=count, **HOW[how]).token_ids


@pytest.mark.sliced(6)
@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("policy", POLICIES)
def test_answers_equal_plain_decoding_on_any_set(
    policy: str, instructions: str, files: Path
) -> None:
    kind = SOME[(POLICIES.index(policy) + SETS.index(instructions)) % len(SOME)]
    engine = engine_of(files, kind, instructions, policy)
    for how in HOW:
        result = engine.generate(PROMPT, max_new_tokens=16, **HOW[how])
        assert result.token_ids == plain_answer(files, kind, how, 16), how
    assert result.stats.num_draft_tokens > 0


@pytest.mark.sliced(1)
@pytest.mark.parametrize("kind", SOME)
def test_whole_answers_are_the_same_on_every_instruction_set(kind: str, files: Path) -> None:
    for prompt in PROMPTS:
        for how in ("greedy", "sampled"):
            answers = [
                engine_of(files, kind, name, "", "none")
                .generate(prompt, max_new_tokens=24, **HOW[how])
                .token_ids
                for name in SETS
            ]
            assert all(answer == answers[0] for answer in answers), (prompt, how)


@pytest.mark.sliced(4)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_the_same_on_every_instruction_set(
    kind: str, architecture: str, files: Path
) -> None:
    made = [lm_of(files, kind, name, architecture=architecture) for name in SETS]
    tree = tree_of(made[0].vocab_size)
    first, *others = (native_logits(lm, PROMPT, tree) for lm in made)
    for name, other in zip(SETS[1:], others, strict=True):
        assert torch.equal(first, other), name


@pytest.mark.sliced
@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("kind", SOME)
def test_a_nodes_bits_are_those_of_plain_decoding(
    kind: str, instructions: str, files: Path
) -> None:
    target = NativeTarget(lm_of(files, kind, instructions))
    for size in (2, 3, 5, 8, 13, 16, 17, 31, 33, 64):
        tree = tree_of(target.vocab_size, seed=size, size=size)
        logits = native_logits(target.lm, PROMPT, tree)
        for node in {0, size // 2, size - 1}:
            assert torch.equal(logits[node], plainly(target, tree, node)), (size, node)


def plainly(target: NativeTarget, tree: TokenTree, node: int) -> Tensor:
    """Logits of a node by one row at a time."""
    target.reset()
    target.prefill(PROMPT)
    for token in [int(tree.tokens[0]), *tree.path_tokens(node)]:
        alone = TokenTree.root(token)
        logits, _ = target.verify(alone)
        target.commit(alone, [0])
    return logits[0]


# ---------------------------------------------------------------------------------------------------- heads


def test_a_head_beside_an_integer_target_is_multiplied_as_integers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rows' bits are the same on every set, and close to those of its float products."""
    model = tiny(
        "llama", num_hidden_layers=6, hidden_size=128, intermediate_size=256, head_dim=32
    ).to(torch.bfloat16)
    found = {}
    for numerics in ("bfloat16", "integer"):
        for name in extension.instruction_sets(numerics):
            lm = native_lm(model, name, quantize="int8", numerics=numerics)
            config = head_config(3, lm.model, intermediate_size=192)
            kinds = list[str]()  # what the matrices are kept as; none of vectors

            def add_weight(*given: Any, into: list[str] = kinds) -> str:
                into.append(weights.add_weight(*given))
                return into[-1]

            monkeypatch.setattr(native_lm_module, "add_weight", add_weight)
            head = NativeHead(config, random_state(config), lm)
            assert {*kinds} - {""} == {"i8"}
            found[numerics, name] = head_logits(head, lm)
    floats = found["bfloat16", extension.instruction_sets()[0]]
    for name in SETS:
        assert torch.equal(found["integer", name], found["integer", SETS[0]]), name
    error = float((found["integer", SETS[0]] - floats).abs().mean() / floats.std())
    assert 0 < error < 0.1


def head_logits(head: NativeHead, lm: NativeLM) -> Tensor:
    drafter, target = EagleDraft(head, lm), NativeTarget(lm)
    target.want(drafter.traits.features)
    target.reserve(64, 16)
    drafter.begin(list(PROMPT), target.prefill(list(PROMPT)))
    return drafter.root(TokenTree.root(7, 16)).logits.float()


# ---------------------------------------------------------------------------------------------------- default model

TEXTS = (
    "The capital of France is",
    "One, two, three, four, one, two, three,",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
    "Roses are red,",
    "Translate to German: good morning ->",
    '{"name": "Ada", "age": 36}\n{"name": "Bob", "age":',
    "Once upon a time there was a",
    "2, 4, 6, 8, 10,",
    "Water boils at",
    "- apples\n- pears\n- apples\n- pears\n-",
    "The quick brown fox jumps over the lazy dog. The quick brown",
    "A",
)


@pytest.mark.slow
@pytest.mark.model
def test_the_default_models_answers_are_the_same_on_every_set_and_those_of_plain_decoding() -> None:
    """With its head, from the packed file; policies that measure no costs."""
    found: dict[str, list[list[int]]] = {}
    for name in SETS:
        with forced(name):
            engine = Engine.from_pretrained(policy="chain", numerics="integer")
        assert f"({name}, integer, " in engine.target.backend
        texts = TEXTS[:3] if name == "portable" else TEXTS  # the slowest by far
        ways = (
            (engine, Engine(engine.target, None, None, engine.tokenizer))
            if name == SETS[0]
            else (engine,)
        )
        for number, way in enumerate(ways):
            found[f"{name} {number}"] = [
                way.generate(text, max_new_tokens=12, raw=True, **HOW[how]).token_ids
                for text in texts
                for how in ("greedy", "sampled")
            ]
    first = found[f"{SETS[0]} 0"]
    same = {name: answers == first[: len(answers)] for name, answers in found.items()}
    assert same == dict.fromkeys(found, True)
