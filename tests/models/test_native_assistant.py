"""Gemma 4's assistants on the C++ forward: torch's numbers, the target's own answers, one pass for all texts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import PreTrainedModel

from specengine import Engine
from specengine.engine import Pool
from specengine.errors import UnsupportedModelError
from specengine.models.eagle import HeadRows
from specengine.models.kv_cache import Rows
from specengine.models.mtp import AssistantHead
from specengine.models.native import lm
from specengine.models.native.lm import NativeAssistant
from tests.checkpoints.test_gguf_families import write
from tests.models.native_engines import needs_extension, plainly
from tests.models.test_assistant import KINDS, WINDOW, assistant, in_file, prompt_of
from tests.toy import VOCABULARY, tiny

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]
LENGTHS = (0, 1, WINDOW, WINDOW + 1, WINDOW + 2, 60)  # of the committed tokens
SAMPLED = {"do_sample": True, "seed": 5, "temperature": 0.8}


def engine_of(target: Any, draft: Path, policy: Any = "eagle", **options: Any) -> Engine:
    options = {"backend": "native", "lookup": False} | options
    return Engine.from_pretrained(target, str(draft), policy, **options)


def both(target: PreTrainedModel, draft: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return an assistant on the C++ forward and on torch, over the same target."""
    heads = []
    for name in (None, "PackedModel"):
        if name is not None:
            monkeypatch.setattr(lm, name, refuse)
        heads.append(engine_of(target, draft).drafter.head)
    monkeypatch.undo()
    native, modules = heads
    assert type(native) is NativeAssistant
    assert type(modules) is AssistantHead
    modules.follow(native.followed)
    return native, modules


def refuse(*_: Any, **__: Any) -> None:
    raise UnsupportedModelError("native: no such layers")


def fill(head: Any, length: int) -> None:
    """Commit a text to the cache of a head's target; what stands after it is NaN."""
    target = head.followed
    target.reset()
    target.cache.reserve(length + 8)
    for slab in target.cache.slabs:
        slab.fill_(torch.nan)
    if length:
        target.prefill(prompt_of(length))


def rows_of(length: int, tokens: list[int]) -> Rows:
    count, filled = len(tokens), torch.tensor([length])
    words = torch.zeros(count, 1, dtype=torch.int64)
    live = torch.tensor([count], dtype=torch.int32)
    places = torch.full((count,), length)
    return Rows(torch.tensor(tokens), places, words, filled, filled.int(), live)


def inputs_of(seed: int, length: int, count: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return states, their sources and rows; two rows read one state."""
    chance = torch.Generator().manual_seed(seed)
    states = torch.randn(count + 2, 32, generator=chance).to(dtype)
    tokens = torch.randint(VOCABULARY, (count,), generator=chance).tolist()
    sources = (torch.arange(count) + 1).clamp(max=max(count - 1, 1))
    return states, sources, rows_of(length, tokens)


@torch.inference_mode()
def compared(native: Any, modules: Any) -> list[tuple[Tensor, Tensor]]:
    """Return results of both, of lengths around the window: of all rows, and of the last with features."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for length in LENGTHS:
        fill(native, length)
        slabs = [slab.clone() for slab in native.followed.cache.slabs]
        for count in (1, 5, 19):
            states, sources, rows = inputs_of(length, length, count, modules.dtype)
            arguments = [(states, sources, rows, None, None)]
            arguments.append((states[:1], sources - 1, rows, torch.tensor([count - 1]), states))
            for each in arguments:
                pairs += zip(native.forward(*each), modules.forward(*each), strict=True)
        for slab, before in zip(native.followed.cache.slabs, slabs, strict=True):
            assert torch.equal(slab.nan_to_num(7.0), before.nan_to_num(7.0))
    return pairs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["folder", "clusters", "file"])
def test_a_pass_gives_what_torch_gives(
    form: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    target, place = tiny(kind, **heads), tmp_path / "folder"
    draft = assistant(place, monkeypatch, kind=kind, ordered=form == "clusters")
    if form == "file":
        place = in_file(draft, tmp_path / "assistant.gguf")
    native, modules = both(target, place, monkeypatch)
    for computed, expected in compared(native, modules):
        assert computed.dtype == expected.dtype
        assert torch.isfinite(computed).all()
        torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ordered", [False, True])
def test_matrices_of_an_assistant_of_a_bfloat16_target_are_int8(
    ordered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assistant(tmp_path, monkeypatch, ordered=ordered)
    native, modules = both(tiny("gemma4_text").bfloat16(), tmp_path, monkeypatch)
    assert native.weights_of.stored == "i8"
    assert modules.dtype is native.dtype is torch.bfloat16
    distances = [
        float((computed.float() - expected.float()).norm() / expected.float().norm())
        for computed, expected in compared(native, modules)
    ]
    assert 0.0 < sorted(distances)[len(distances) // 2] < 0.1


def test_an_assistant_of_a_model_in_int8_is_in_int8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny("gemma4_text")
    assistant(tmp_path, monkeypatch)
    engine = engine_of(target, tmp_path, quantize="int8")
    assert type(engine.drafter.head) is NativeAssistant
    assert engine.drafter.head.weights_of.stored == "i8"
    plain = Engine.from_pretrained(target, "none", backend="native", quantize="int8")
    answers = [
        each.generate(prompt_of(30), max_new_tokens=16, eos_token_id=[]) for each in (plain, engine)
    ]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[1].stats.num_draft_tokens


def test_layers_of_the_same_heads_read_the_layers_of_their_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target then keeps all layers in one slab."""
    heads: dict[str, Any] = {"global_head_dim": 8, "num_global_key_value_heads": None}
    heads["attention_k_eq_v"] = False
    target = tiny("gemma4_text", **heads)
    assistant(tmp_path, monkeypatch, **heads)
    native, modules = both(target, tmp_path, monkeypatch)
    assert len(native.followed.cache.slabs) == 1
    for computed, expected in compared(native, modules):
        torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sliced(2)
@pytest.mark.parametrize("policy", ["talon", "opt_tree", "dynatree", "chain", "eagle"])
@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_answers_are_those_of_plain_decoding(
    options: dict[str, Any], policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny("gemma4_text")
    assistant(tmp_path, monkeypatch)
    engine = engine_of(target, tmp_path, policy)
    assert type(engine.drafter.head) is NativeAssistant
    plain = Engine.from_pretrained(target, "none", backend="native")
    for prompt in (prompt_of(1), prompt_of(30), prompt_of(45)):
        answers = [
            each.generate(prompt, max_new_tokens=16, eos_token_id=[], **options)
            for each in (plain, engine)
        ]
        assert answers[0].token_ids == answers[1].token_ids
        assert answers[1].stats.num_draft_tokens


@torch.inference_mode()
def test_rows_of_several_texts_are_those_of_each_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes of several lengths, one without a token, with and without features."""
    assistant(tmp_path, monkeypatch)
    pool = Pool(engine_of(tiny("gemma4_text"), tmp_path), 4)
    lanes, alone = [], []
    for number, engine in enumerate(pool.engines):
        head, length = engine.drafter.head, (0, 1, 40, 60)[number]
        fill(head, length)
        states, sources, rows = inputs_of(number, length, 3 * number + 1, torch.float32)
        features = states if number % 2 else None
        lanes.append(
            HeadRows(head, rows, states, sources, features, 1 if number == 1 else len(rows))
        )
        one = torch.tensor([len(rows) - 1]) if number == 1 else None
        alone.append(head.forward(states, sources, rows, one, features))
    assert len({id(lane.model.weights_of) for lane in lanes}) == 1
    lanes[2].model.run_lanes(lanes)
    for lane, (logits, states) in zip(lanes, alone, strict=True):
        torch.testing.assert_close(lane.logits, logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lane.out, states, rtol=1e-5, atol=1e-5)
    wrong = copy.copy(lanes[3].model)
    wrong.follow(lanes[2].model.followed)  # another text's committed tokens
    other = wrong.forward(lanes[3].states, lanes[3].sources, lanes[3].rows, None, lanes[3].features)
    assert (other[0] - alone[3][0]).abs().max() > 1e-3


@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_draft_passes_of_all_texts_are_run_together(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assistant(tmp_path, monkeypatch)
    engine = engine_of(tiny("gemma4_text"), tmp_path)
    prompts = [prompt_of(length) for length in (1, 2, 9, 30, 33, 50)]
    options = {"max_new_tokens": 16, "eos_token_id": [], **options}
    alone = [engine.generate(prompt, **options) for prompt in prompts]
    pool, passes, run = Pool(engine, 3), list[int](), NativeAssistant.run_lanes

    def counted(head: NativeAssistant, lanes: Any) -> None:
        passes.append(len(lanes))
        run(head, lanes)

    monkeypatch.setattr(NativeAssistant, "run_lanes", counted)
    many = pool.generate(prompts, **options)
    assert [result.token_ids for result in many] == [result.token_ids for result in alone]
    drafted = sum(result.stats.num_draft_passes for result in many)
    assert sum(passes) == drafted - 1  # the first one of a prompt of one token has no row
    assert 0 < len(passes) < 0.6 * drafted
    assert max(passes) == 3


@pytest.mark.parametrize("options", [{}, SAMPLED])
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("float32", None), ("bfloat16", None), ("bfloat16", GGMLQuantizationType.Q8_0)],
)
def test_a_file_drafts_for_a_file(
    dtype: str,
    kind: GGMLQuantizationType | None,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of packed blocks products are of integers, in the assistant too."""
    draft = assistant(tmp_path / "folder", monkeypatch)
    place = in_file(draft, tmp_path / "assistant.gguf")
    model, target = write(tmp_path, "gemma4", model=tiny("gemma4_text"), kind=kind)
    engine = engine_of(str(target), place, offline=True, dtype=dtype)
    assert type(engine.drafter.head) is NativeAssistant
    assert (engine.target.lm.numerics == "integer") == (kind is not None)
    plain = Engine.from_pretrained(str(target), "none", offline=True, dtype=dtype, backend="native")
    for prompt in (prompt_of(30), prompt_of(45)):
        answers = [
            each.generate(prompt, max_new_tokens=16, eos_token_id=[], **options)
            for each in (plain, engine)
        ]
        assert answers[0].token_ids == answers[1].token_ids
        assert answers[1].stats.num_draft_tokens
        if dtype == "float32" and not options:
            assert answers[1].token_ids == plainly(model, prompt, 16)


def test_an_assistant_whose_layers_are_not_native_drafts_on_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny("gemma4_text")
    assistant(tmp_path, monkeypatch, hidden_activation="gelu")
    engine = engine_of(target, tmp_path)
    assert type(engine.drafter.head) is AssistantHead
    answer = engine.generate(prompt_of(30), max_new_tokens=8, eos_token_id=[])
    assert answer.token_ids == plainly(target, prompt_of(30), 8)
    assert answer.stats.num_draft_tokens
