"""Fused layers give what a target's modules give, on the host, a pretended device and a device, or are undone."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specengine import Engine, ops
from specengine.drafters.small_model import SmallModel
from specengine.models import fused
from specengine.models.eagle import TorchHead
from specengine.models.huggingface import CausalLM, HuggingFaceTarget
from specengine.models.kv_cache import Rows
from specengine.ops import _registry
from tests import toy
from tests.graphs import pretended, replays
from tests.graphs.engines import PROMPT
from tests.ops.backends import choose

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
KINDS = (torch.float32, torch.bfloat16)
LAYERS = 3


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse layers on a CPU as well, where torch runs their ops."""
    monkeypatch.setattr(fused, "DEVICES", ("cpu",))
    monkeypatch.setattr(ops, "is_served", lambda *_: True)


def tiny(family: str, kind: torch.dtype = torch.float32, **changes: Any) -> Any:
    return toy.tiny(family, num_hidden_layers=LAYERS, **changes).to(kind)


def by_modules(model: Any, monkeypatch: pytest.MonkeyPatch) -> CausalLM:
    with monkeypatch.context() as patch:
        patch.setattr(fused, "DEVICES", ())
        lm = CausalLM(model, pack=False)
    assert lm.modules == "the model's own"
    return lm


@torch.inference_mode()
def results(lm: CausalLM, prompt: list[int]) -> list[Tensor]:
    """Return logits and features of a prompt and of a tree behind it, and those of one row, and the cache."""
    cache, ids = lm.new_cache(len(prompt) + 20), tuple(range(LAYERS + 1))
    found = [*lm.extend(cache, prompt, ids, logits="all")]
    rows = Rows.of(toy.random_tree(3, 9, 100), cache.filled)
    one = torch.tensor([4], device=lm.device)
    found += [*lm.forward(rows, cache, ids), lm.forward(rows, cache, one=one)[0]]
    last, _ = lm.extend(cache, prompt[:3])
    return [*found, last, cache.slab[:, :, :, : len(prompt) + 3]]


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_are_those_of_the_modules(
    family: str, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family, kind)
    ours = CausalLM(model, pack=False)
    assert (ours.modules, ours.layers_note) == ("fused", "")
    for found, wanted in zip(
        results(ours, PROMPT), results(by_modules(model, monkeypatch), PROMPT), strict=True
    ):
        assert torch.equal(found, wanted)


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_windows_and_rotations(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a window shorter than the text, and with frequencies that are scaled."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    changes = {
        "sliding_window": 12,
        **({"layer_types": kinds, "use_sliding_window": True} if family == "qwen3" else {}),
    }
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = tiny(family, rope_parameters=rope, **changes)
    ours, theirs = CausalLM(model, pack=False), by_modules(model, monkeypatch)
    assert ours.modules == "fused"
    for found, wanted in zip(results(ours, PROMPT), results(theirs, PROMPT), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("family", FAMILIES)
def test_merged_products(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights become views of one tensor; the numbers are the same up to the order of sums."""
    wanted = results(by_modules(tiny(family), monkeypatch), PROMPT)
    model = tiny(family)
    kept = {name: weight.clone() for name, weight in model.state_dict().items()}
    ours = CausalLM(model, pack=False, merge=True)
    assert ours.modules == "fused, merged products"
    for one, other in zip(results(ours, PROMPT), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-4)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, kept[name]), name
    for layer in model.model.layers:
        for parts in (
            [layer.self_attn.q_proj, layer.self_attn.v_proj],
            [layer.mlp.gate_proj, layer.mlp.up_proj],
        ):
            assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1
    model.generate(torch.tensor([PROMPT]), max_new_tokens=2)
    ours.refresh()
    assert ours.version == 0  # the model itself has not changed


@pytest.mark.usefixtures("on_the_host")
def test_a_model_of_the_user_keeps_its_tensors() -> None:
    model = tiny("llama")
    before = {name: (id(weight), weight.data_ptr()) for name, weight in model.named_parameters()}
    engine = Engine.from_pretrained(model, "ngram", backend="huggingface")
    assert engine.target.lm.modules == "fused"
    assert {
        name: (id(weight), weight.data_ptr()) for name, weight in model.named_parameters()
    } == before


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("replaced", [False, True])
def test_changed_weights_are_taken_in(replaced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen2")
    target = HuggingFaceTarget(model, pack=False)
    engine = Engine(target, None, None)
    before = engine.generate(PROMPT, max_new_tokens=8).token_ids
    with torch.no_grad():
        for layer in model.model.layers:
            changed = layer.self_attn.k_proj.weight.flip(0) * 3
            if replaced:
                layer.self_attn.k_proj.weight = nn.Parameter(changed)
            else:
                layer.self_attn.k_proj.weight.copy_(changed)
    after = engine.generate(PROMPT, max_new_tokens=8).token_ids
    assert target.lm.modules == "fused"
    theirs = Engine(HuggingFaceTarget(tiny("qwen2"), pack=False), None, None)
    theirs.target.model.load_state_dict(model.state_dict())
    assert after == theirs.generate(PROMPT, max_new_tokens=8).token_ids
    torch.testing.assert_close(
        results(target.lm, PROMPT)[0],
        results(by_modules(model, monkeypatch), PROMPT)[0],
        rtol=1e-3,
        atol=2e-4,
    )
    assert before != after


# ---- undone


class _OtherNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * 1.25


def _own_class(model: Any) -> str:
    model.model.layers[1].input_layernorm.__class__ = _OtherNorm
    return "it has a _OtherNorm where a LlamaRMSNorm was expected"


def _own_forward(model: Any) -> str:
    norm = model.model.norm
    norm.forward = lambda states: LlamaRMSNorm.forward(norm, states) * 1.25
    return "a LlamaRMSNorm was changed"


def _hook(model: Any) -> str:
    model.model.layers[2].mlp.register_forward_hook(lambda module, given, found: found * 1.25)
    return "a LlamaMLP was changed"


def _activation(model: Any) -> str:
    model.model.layers[0].mlp.act_fn = nn.GELU()
    return "it has a GELU where a SiLUActivation was expected"


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("change", [_own_class, _own_forward, _hook, _activation])
def test_changed_modules_run_themselves(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    reason = change(model)
    target = HuggingFaceTarget(model, pack=False)
    assert target.lm.modules == "the model's own"
    assert target.notes == [f"layers: not fused, {reason}"]
    for found, wanted in zip(
        results(target.lm, PROMPT), results(by_modules(model, monkeypatch), PROMPT), strict=True
    ):
        assert torch.equal(found, wanted)


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_other_results_of_the_same_classes_are_seen(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transformers whose norm computes something else: its classes are the known ones."""
    forward = LlamaRMSNorm.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, states: forward(self, states) * 1.25)
    target = HuggingFaceTarget(tiny("llama", kind), pack=False)
    assert target.lm.modules == "the model's own"
    assert target.notes[0].startswith("layers: not fused, layer 0 differs from its modules by ")


@pytest.mark.usefixtures("on_the_host")
def test_keys_that_are_not_stored_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ops.rope_store

    def forgets(*given: Any) -> Tensor:
        return run(*given[:5], given[5].clone(), *given[6:])

    monkeypatch.setattr(ops, "rope_store", forgets)
    target = HuggingFaceTarget(tiny("llama"), pack=False)
    assert target.notes[0].startswith("layers: not fused, layer 0 differs from its modules by ")


@pytest.mark.usefixtures("on_the_host")
def test_an_op_that_raises_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Tensor:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(ops, "silu_mul", fails)
    target = HuggingFaceTarget(tiny("llama"), pack=False)
    assert target.notes == ["layers: not fused, RuntimeError: no kernel image"]
    assert Engine(target, None, None).generate(PROMPT, max_new_tokens=2).token_ids


def test_elsewhere_nothing_is_fused() -> None:
    assert CausalLM(tiny("llama"), pack=False).modules == "the model's own"


@pytest.mark.usefixtures("on_the_host")
def test_other_families_are_left_alone() -> None:
    target = HuggingFaceTarget(toy.tiny("gemma"), pack=False)
    assert (target.lm.modules, target.notes) == ("the model's own", [])


# ---- heads


HEADS: dict[str, tuple[Literal[1, 3], dict[str, Any]]] = {
    "EAGLE-1": (1, {"qkv_bias": True, "fc_bias": True}),
    "EAGLE-3": (3, {}),
    "other residual": (3, {"norm_before_residual": True, "norm_recurrent": True}),
    "other norms": (3, {"qk_norm": True, "norm_logits": False, "o_bias": True}),
    "other tables": (3, {"own_embeddings": True, "own_head": False, "draft_vocab_size": 300}),
    "window": (3, {"sliding_window": 4}),
}


@torch.inference_mode()
def rows_of_head(head: TorchHead) -> list[Tensor]:
    """Return logits and states of a root pass and of a tree's rows after a prompt, and the cache."""
    torch.manual_seed(0)
    features = torch.randn(14, head.feature_size).to(head.dtype)
    head.extend(features[:9], PROMPT[:9])
    head.cache.reserve(40)
    head.refresh()
    root, tree = (Rows.of(toy.random_tree(3, n, 100), head.cache.filled) for n in (5, 9))
    place = torch.arange(5)
    found = [*head.forward(features, place, root, torch.tensor([3]), features[9:])]
    states = torch.randn(7, head.hidden_size).to(head.dtype)
    found += head.forward(states, torch.tensor([6, 0, 0, 3, 2, 1, 5, 4, 4]), tree, None)
    return [*found, head.cache.slab[..., :18, :]]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_rows_of_heads(name: str, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the order of sums they are those of the modules, which stay as they are."""
    model, (version, changes) = tiny("llama", kind), HEADS[name]
    lm = CausalLM(model, pack=False)
    config = toy.head_config(version, model, **changes)
    theirs = TorchHead(toy.tiny_head(config).to(kind), lm, pack=False)
    monkeypatch.setattr(fused, "DEVICES", ("cpu",))
    monkeypatch.setattr(ops, "is_served", lambda *_: True)
    module = toy.tiny_head(config).to(kind)
    before = {part: weight.clone() for part, weight in module.state_dict().items()}
    ours, ran = TorchHead(module, lm, pack=False), list[str]()
    run = fused.FusedHead.run
    monkeypatch.setattr(
        fused.FusedHead, "run", lambda self, *given: (ran.append(name), run(self, *given))[1]
    )
    limit = 1e-5 if kind is torch.float32 else 2e-2
    for found, wanted in zip(rows_of_head(ours), rows_of_head(theirs), strict=True):
        assert found.dtype is wanted.dtype
        assert (found.float() - wanted.float()).norm() <= limit * wanted.float().norm()
    assert ran == [name] * 2
    for part, weight in module.state_dict().items():
        assert torch.equal(weight, before[part]), part


@pytest.mark.usefixtures("on_the_host")
def test_heads_that_were_changed_run_themselves() -> None:
    model = tiny("llama")
    lm = CausalLM(model, pack=False)
    head = toy.tiny_head(toy.head_config(3, model))
    head.norm.register_forward_hook(lambda module, given, found: found * 1.25)
    assert TorchHead(head, lm, pack=False)._fused is None
    other = toy.tiny_head(toy.head_config(3, model, hidden_act="gelu"))
    assert TorchHead(other, lm, pack=False)._fused is None
    assert TorchHead(toy.tiny_head(toy.head_config(3, model)), lm, pack=False)._fused is not None


# ---- engines


@pytest.mark.usefixtures("on_the_host")
def test_strict_bits_hold() -> None:
    model = tiny("llama", torch.bfloat16)
    target = HuggingFaceTarget(model, pack=False, captured=True, strict=True, merge=True)
    assert target.lm.modules == "fused, merged products"
    plain = Engine(target, None, None).generate(PROMPT, max_new_tokens=20).token_ids
    draft = SmallModel(toy.near_copy("llama", num_hidden_layers=LAYERS), target.vocab_size)
    assert (
        Engine(target, draft, toy.policy_for("eagle", 3))
        .generate(PROMPT, max_new_tokens=20)
        .token_ids
        == plain
    )


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the meanings of a layer's ops stand for kernels."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    kernels = {
        name: partial(ops.by_meaning, ops.OPS[name]) for name in (*fused.OPS, "cached_attention")
    }
    monkeypatch.setattr(
        _registry, "_loaded", lambda key: {"triton": kernels, "reference": ops.OPS}.get(key, {})
    )
    choose(monkeypatch, "triton")


@pytest.mark.slow
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("draft", replays.DRAFTS)
def test_replays_of_fused_layers_equal_the_eager_modules(
    draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = list[str]()
    fuse = CausalLM._fuse

    def noted(self: CausalLM) -> None:
        fuse(self)
        taken.append(self.modules)

    monkeypatch.setattr(CausalLM, "_fuse", noted)
    replays.check(draft, "eagle", backends="triton")
    assert set(taken) == {"fused"}


@torch.inference_mode()
def launches(family: str, kind: torch.dtype, layers: int, *, merge: bool) -> int:
    """Return those of a forward of tree rows; an op counts as one."""
    with pretended.cuda():
        # longer than the text
        model = toy.tiny(family, num_hidden_layers=layers, sliding_window=None).to(kind)
        lm = CausalLM(pretended.moved(model), merge=merge)  # type: ignore[arg-type]
        assert lm.modules == ("fused, merged products" if merge else "fused")
        cache = lm.new_cache(40)
        rows = Rows.of(toy.random_tree(3, 9, 100), cache.filled)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            lm.forward(rows, cache)
        return sum(graph.launches.values())  # type: ignore[attr-defined]


@pytest.mark.sliced(1)
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_launches_of_a_layer(family: str, kind: torch.dtype) -> None:
    """One of them is a copy that only the meaning of attention needs; biases go with their products."""
    for merge, most in ((True, 10), (False, 13)):
        few, more = (launches(family, kind, count, merge=merge) for count in (2, 3))
        assert more - few == most


# ---- on a device


def _wide(family: str, kind: torch.dtype, layers: int = LAYERS) -> Any:
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    return toy.tiny(family, num_hidden_layers=layers, head_dim=64, **sizes).to("cuda", kind)


@pytest.mark.gpu
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_device_layers_are_fused(
    family: str, kind: torch.dtype, merge: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to rounding the results are the modules', and both ways of decoding agree."""
    theirs = by_modules(_wide(family, kind), monkeypatch)
    wanted = results(theirs, PROMPT)
    target = HuggingFaceTarget(_wide(family, kind), captured=True, merge=merge)
    assert target.notes == []
    assert target.lm.modules == ("fused, merged products" if merge else "fused")
    limit = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}[kind]
    for found, means in zip(results(target.lm, PROMPT), wanted, strict=True):
        assert (found.float() - means.float()).norm() <= limit * means.float().norm()
    draft = SmallModel(_wide(family, kind), target.vocab_size)
    answers = [
        Engine(target, *parts).generate(PROMPT, max_new_tokens=24).token_ids
        for parts in ((None, None), (draft, toy.policy_for("eagle", 3)))
    ]
    assert kind is not torch.float32 or answers[0] == answers[1]


@pytest.mark.gpu
def test_on_a_device_a_layer_has_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by the profiler; a product may take two kernels, attention takes two."""
    counts = dict[tuple[bool, int], int]()
    for layers in (3, 7):
        for merge in (False, True):
            lm = CausalLM(_wide("llama", torch.bfloat16, layers), merge=merge)
            counts[merge, layers] = _kernels(lm)
        own = by_modules(_wide("llama", torch.bfloat16, layers), monkeypatch)
        counts[None, layers] = _kernels(own)  # type: ignore[index]
    a_layer = {merge: (counts[merge, 7] - counts[merge, 3]) / 4 for merge, _ in counts}
    print(
        f"kernels of a layer: modules {a_layer[None]}, fused {a_layer[False]}, merged {a_layer[True]}"
    )  # type: ignore[index]
    assert 0 < a_layer[True] <= 14
    assert 0 < a_layer[False] <= 18


@torch.inference_mode()
def _kernels(lm: CausalLM) -> int:
    cache = lm.new_cache(200)
    lm.extend(cache, PROMPT)
    rows = Rows.of(toy.random_tree(3, 64, 100), cache.filled)
    lm.forward(rows, cache)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        lm.forward(rows, cache)
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profile.events())
