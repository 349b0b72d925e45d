"""A loaded model that is changed beside its engine: the next answer is that of a new engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from specengine import Engine
from specengine.errors import EngineBusyError, InputError, UnsupportedModelError
from specengine.models import loaded
from specengine.models.eagle import head_from
from specengine.models.huggingface import CausalLM
from specengine.models.native import NativeLM, weights
from specengine.models.native.weights import Weight
from specengine.models.twins import Packed
from tests.backend import needs_packing
from tests.toy import byte_tokenizer, hooked, near_copy, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [*range(40, 56), *range(40, 50)]
BACKENDS = ("native", "huggingface")
Change = Callable[[Any], Any]
CHANGES: dict[str, Change] = {}


def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


@change
def one_number_through_data(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.weight.data[0, 0] += 20.0


@change
def signs_of_a_tensor(model: Any) -> None:
    model.lm_head.weight.data.mul_(-1)


@change
def two_rows_swapped(model: Any) -> None:
    weight = model.model.embed_tokens.weight.data
    weight[[40, 45]] = weight[[45, 40]].clone()


@change
def two_layers_swapped(model: Any) -> None:
    first, second = (layer.mlp.up_proj.weight.data for layer in model.model.layers)
    first[:], second[:] = second.clone(), first.clone()


@change
def a_numpy_view(model: Any) -> None:
    weight = model.model.layers[1].self_attn.v_proj.weight.detach()
    (weight.view(torch.int16) if weight.dtype is torch.bfloat16 else weight).numpy()[:] = 0


@change
def another_storage(model: Any) -> None:
    for weight in model.parameters():
        weight.data = weight.data.flip(0).contiguous()


@change
def another_parameter(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().roll(3, 0))


@change
def a_loaded_state(model: Any) -> None:
    model.load_state_dict(
        {name: value.neg() for name, value in model.state_dict().items()}, assign=True
    )


@change
def frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.3)


@change
def other_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.3


@change
def an_epsilon(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 3.0


@change
def a_scale(model: Any) -> None:
    model.model.layers[0].self_attn.scaling = 1.5


@change
def an_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU()


@change
def a_hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, given, out: -out)


@change
def a_module(model: Any) -> None:
    old = model.model.layers[0].mlp.down_proj
    torch.manual_seed(5)
    model.model.layers[0].mlp.down_proj = nn.Linear(
        old.in_features, old.out_features, bias=False, dtype=model.dtype
    )


@change
def an_adapter(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.o_proj = Adapter(attention.o_proj)


@change
def a_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda states: mlp.down_proj(mlp.up_proj(states))


@change
def more_tokens(model: Any) -> None:
    torch.manual_seed(2)
    model.resize_token_embeddings(400, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[300:].normal_(0, 1.0)


@change
def fewer_tokens(model: Any) -> None:
    model.resize_token_embeddings(60)


@change
def fewer_layers(model: Any) -> None:
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


@change
def a_cast(model: Any) -> None:
    model.to(torch.bfloat16 if model.dtype is torch.float32 else torch.float32)


class Adapter(nn.Module):
    """An update of low rank beside a layer, which can be switched."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.names = base, ["own"]
        with torch.no_grad():
            self.update = nn.Parameter(torch.ones_like(base.weight) * 0.5)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        own = self.base(states)
        return own + nn.functional.linear(states, self.update) if self.names else own


def answer(engine: Engine, **options: Any) -> list[int]:
    return engine.generate(PROMPT, max_new_tokens=20, **options).token_ids


def certain(dtype: torch.dtype) -> dict[str, Any]:
    """Return options under which answers do not hang on the clock.

    Through transformers, near-ties of bfloat16 may depend on the tree, whose size depends on measured costs.
    """
    return {"policy": "plain"} if dtype is torch.bfloat16 else {}


def fresh(model: PreTrainedModel, backend: str | None = None, **options: Any) -> Engine:
    return Engine.from_pretrained(model, backend=backend, **options)


@pytest.mark.sliced(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", [None, "huggingface"])
@pytest.mark.parametrize("name", CHANGES)
def test_the_next_answer_is_a_new_engines(
    name: str, backend: str | None, dtype: torch.dtype
) -> None:
    model = tiny(initializer_range=0.2).to(dtype)
    engine = fresh(model, backend)
    ways: list[dict[str, Any]] = [{}, {"policy": "plain"}]
    if certain(dtype):
        ways = ways[1:]
    before = answer(engine, **ways[-1])
    CHANGES[name](model)
    wanted = answer(fresh(model, backend), **ways[-1])
    for way in ways:
        assert answer(engine, **way) == wanted
    if name not in ("fewer_tokens", "a_cast"):  # the others are strong enough to show
        assert wanted != before


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_session_forgets_what_the_old_weights_said(backend: str) -> None:
    tokenizer = byte_tokenizer()
    model = tiny(initializer_range=0.2, max_position_embeddings=512)
    session = fresh(model, backend, tokenizer=tokenizer).session()
    session.generate("one", max_new_tokens=8)
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(-2)
    anew = fresh(model, backend, tokenizer=tokenizer).session(list(session.messages))
    result, wanted = (given.generate("two", max_new_tokens=12) for given in (session, anew))
    assert result.token_ids == wanted.token_ids
    assert result.stats.num_cached_prompt_tokens == 0
    assert session.generate("three", max_new_tokens=8).stats.num_cached_prompt_tokens > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unchanged_model_keeps_its_caches_and_its_packed_weights(backend: str) -> None:
    model = tiny().to(torch.bfloat16)
    engine = fresh(model, backend)
    answer(engine)
    target, version = engine.target, engine.target.lm.version
    # used by others
    model.generate(torch.tensor([PROMPT]), max_new_tokens=2, do_sample=False, pad_token_id=0)
    model(torch.tensor([PROMPT]), output_hidden_states=True)
    model.train()
    answer(engine)
    engine.refresh()
    assert engine.target is target
    assert target.lm.version == version


# ----------------------------------------------------------------------------------------------- weights that fail


def a_dropped_weight(patch: pytest.MonkeyPatch) -> None:
    """Pack negated values in place of the first layer's: its states are not the modules' own."""
    real = weights.add_weight

    def wrong(weights: Any, weight: Weight, kinds: Any, following: Any = None) -> str:
        if weight.name.startswith("model.layers.0.mlp.") and weight.name.endswith(
            "down_proj.weight"
        ):
            weight = Weight.of(weight.name, -weight.rows(0, weight.shape[0]).float())
        return real(weights, weight, kinds, following)

    patch.setattr(weights, "add_weight", wrong)


def an_interrupt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NativeLM, "_check", raiser(KeyboardInterrupt))


def no_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(weights.PackedModel, "_shapes", raiser(MemoryError))


def no_memory_for_a_twin(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Packed, "copy_again", raiser(MemoryError))


def raiser(error: type[BaseException]) -> Callable[..., Any]:
    def fail(*_: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("family", "options", "fault", "error"),
    [
        ("llama", {}, a_dropped_weight, UnsupportedModelError),
        ("llama", {"quantize": "int8"}, a_dropped_weight, UnsupportedModelError),
        ("qwen3_5_text", {"quantize": "int8"}, a_dropped_weight, UnsupportedModelError),
        ("llama", {}, an_interrupt, KeyboardInterrupt),
        ("llama", {"quantize": "int8"}, no_memory, MemoryError),
        pytest.param(
            "llama",
            {"backend": "huggingface", "pack": True},
            no_memory_for_a_twin,
            MemoryError,
            marks=needs_packing,
        ),
    ],
)
def test_weights_that_failed_once_are_not_those_of_the_next_answer(
    family: str,
    options: dict[str, Any],
    fault: Callable[[pytest.MonkeyPatch], None],
    error: type[BaseException],
) -> None:
    model = tiny(family).to(torch.bfloat16)
    engine = Engine.from_pretrained(model, "none", **options)
    before = answer(engine)
    weights = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.model.norm.weight.mul_(-3)
        model.lm_head.weight.copy_(model.lm_head.weight.roll(5, 0))
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        for _ in range(2):
            with pytest.raises(error):
                answer(engine)
    wanted = answer(Engine.from_pretrained(copy.deepcopy(model), "none", **options))
    assert answer(engine) == wanted != before
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        model.load_state_dict({name: value.neg() for name, value in weights.items()})
        with pytest.raises(error):
            answer(engine)
    model.load_state_dict(weights)
    assert answer(engine) == before


# ----------------------------------------------------------------------------------------- adapters and late changes


@pytest.mark.slow
def test_a_switched_adapter_is_heard_and_unheard() -> None:
    model = tiny(initializer_range=0.2).to(torch.bfloat16)
    # by the same backend, as the C++ forward rounds otherwise
    plain = answer(fresh(model, "huggingface"), **certain(torch.bfloat16))
    an_adapter(model)
    engine = fresh(model)
    adapted = answer(engine, **certain(torch.bfloat16))
    assert adapted != plain
    adapter = model.model.layers[1].self_attn.o_proj
    adapter.names.clear()  # in place, as an adapter's list of active names is
    assert answer(engine, **certain(torch.bfloat16)) == plain
    adapter.names.append("own")
    assert answer(engine, **certain(torch.bfloat16)) == adapted
    adapter.update.data.zero_()
    assert answer(engine, **certain(torch.bfloat16)) == plain


def test_a_native_engine_goes_on_through_transformers_once_it_has_to() -> None:
    model = tiny(initializer_range=0.2)
    engine = fresh(model)
    assert engine.target.backend.startswith("native")
    handle = hooked(model.model.layers[0].mlp, lambda states: -states)
    answer(engine)
    assert engine.target.backend.startswith(
        "huggingface (native: module model.layers.0.mlp has hooks"
    )
    handle.remove()
    assert answer(engine) == answer(fresh(model))


def test_a_backend_that_was_asked_for_is_not_left() -> None:
    model = tiny()
    engine = fresh(model, "native")
    before = answer(engine)
    scaling = model.model.layers[0].self_attn.scaling
    model.model.layers[0].self_attn.scaling = 2.0
    with pytest.raises(
        UnsupportedModelError, match=r"layers\.0\.self_attn\.scaling is 2\.0, the config makes it"
    ):
        answer(engine)
    model.model.layers[0].self_attn.scaling = scaling
    assert answer(engine) == before


def test_prompts_are_held_to_the_new_vocabulary() -> None:
    model = tiny()
    engine = fresh(model)
    with pytest.raises(InputError, match="300"):
        engine.generate([*PROMPT, 300], max_new_tokens=4)
    more_tokens(model)
    engine.generate([*PROMPT, 300], max_new_tokens=4)
    fewer_tokens(model)
    with pytest.raises(InputError, match="300"):
        engine.generate([*PROMPT, 300], max_new_tokens=4)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draft_model_is_followed_as_well(backend: str) -> None:
    model, draft = tiny(), near_copy()
    engine = fresh(model, backend, draft=draft)
    before = answer(engine)
    for weight in draft.parameters():
        weight.data.mul_(-0.5)
    assert answer(engine) == before
    draft.model.layers[0].self_attn.scaling = 0.0
    assert answer(engine) == before
    draft.to(torch.bfloat16)
    assert answer(engine) == before


def test_engines_of_one_model_all_notice() -> None:
    model = tiny(initializer_range=0.2)
    engines = [fresh(model, draft=draft) for draft in ("none", "recycling", "ngram")]
    for engine in engines:
        answer(engine)
    signs_of_a_tensor(model)
    wanted = answer(fresh(model))
    assert [answer(engine) for engine in engines] == [wanted] * 3
    fewer_layers(model)
    wanted = answer(fresh(model))
    assert [answer(engine) for engine in engines] == [wanted] * 3


def test_scores_are_those_of_the_changed_model() -> None:
    model = tiny(initializer_range=0.2)
    engine = fresh(model)
    before = [token.logprob for token in engine.score(PROMPT)]
    signs_of_a_tensor(model)
    after = [token.logprob for token in engine.score(PROMPT)]
    assert after == [token.logprob for token in fresh(model).score(PROMPT)] != before


def test_custom_generate_follows_too() -> None:
    model = tiny(initializer_range=0.2)
    engine = fresh(model)
    answer(engine)
    an_epsilon(model)
    ids = torch.tensor([PROMPT])
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    out = model.generate(ids, custom_generate=engine.as_custom_generate(), **options)
    assert out.tolist() == model.generate(ids, **options).tolist()


def test_an_answer_asked_for_before_the_change_is_refused() -> None:
    model = tiny()
    engine = fresh(model)
    stream = engine.stream(PROMPT, max_new_tokens=4)
    more_tokens(model)
    answer(engine)
    with pytest.raises(InputError, match="the model was changed after this answer was asked for"):
        next(stream)
    answer(engine)


def test_refresh_waits_for_no_stream() -> None:
    engine = fresh(tiny())
    with engine.stream(PROMPT, max_new_tokens=20) as stream:
        next(stream)
        with pytest.raises(EngineBusyError, match="refresh"):
            engine.refresh()
    engine.refresh()


def test_a_policy_that_took_the_own_ones_place_stays() -> None:
    model = tiny()
    engine = fresh(model)
    engine.policy = policy = type(engine.policy)(width=2)  # type: ignore[misc, call-arg]
    more_tokens(model)
    answer(engine)
    assert engine.policy == policy


def test_a_drafter_that_was_brought_along_is_not_made_anew() -> None:
    from tests.toy import head_config, random_state

    model = tiny()
    target = fresh(model, "huggingface", draft="none").target
    config = head_config(model=model, layer_ids=(0, 1, 1))
    from specengine.drafters.eagle import EagleDraft

    head = EagleDraft(
        head_from(config, random_state(config), torch.float32, torch.device("cpu")), target.lm
    )
    engine = Engine.from_pretrained(model, head, backend="huggingface")
    answer(engine)
    more_tokens(model)
    with pytest.raises(UnsupportedModelError, match="make a new engine"):
        answer(engine)


# ------------------------------------------------------------------------------------- before the engine is made


@pytest.mark.sliced(4)
@pytest.mark.parametrize("backend", [None, "huggingface"])
@pytest.mark.parametrize(
    "name", ["frequencies", "an_epsilon", "a_scale", "an_activation", "a_forward", "a_hook"]
)
def test_what_was_changed_before_is_the_model(name: str, backend: str | None) -> None:
    model, untouched = tiny(initializer_range=0.2), tiny(initializer_range=0.2)
    CHANGES[name](model)
    ids = torch.tensor([PROMPT])
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    wanted, other = (
        given.generate(ids, **options)[0, len(PROMPT) :].tolist() for given in (model, untouched)
    )
    assert answer(fresh(model, backend)) == wanted != other


def test_rounded_frequencies_are_those_of_a_model_that_was_cast() -> None:
    model = tiny(max_position_embeddings=4096, initializer_range=0.3).to(torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype is torch.bfloat16
    text = [5 + i * 7 % 80 for i in range(900)]
    with torch.inference_mode():
        wanted = model(torch.tensor([text])).logits[0, -1].float().log_softmax(-1)
    engine = fresh(model, draft="none")
    assert engine.target.backend.startswith("native")
    (found,) = engine.generate(text, max_new_tokens=1, logprobs=5).logprobs
    assert max(abs(value - float(wanted[token])) for token, value in found.top) < 0.3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_late_position_is_looked_at(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequencies that differ by a thousandth differ at late positions alone."""
    model = tiny(max_position_embeddings=4096)
    inv_freq = model.model.rotary_emb.inv_freq
    from specengine.models.native.loaded import ModelSource

    own = ModelSource.rope
    monkeypatch.setattr(ModelSource, "rope", lambda self, key: (own(self, key)[0] * 1.003, 1.0))
    if backend == "native":
        with pytest.raises(UnsupportedModelError, match="other hidden states than its own modules"):
            fresh(model, backend)
    else:
        fresh(model, backend)
    assert torch.equal(inv_freq, model.model.rotary_emb.inv_freq)


# -------------------------------------------------------------------------------------- the model stays as it is


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_the_model_stays_as_it_was(backend: str, own: str) -> None:
    model = tiny(attention_dropout=0.5)
    model.set_attn_implementation(own)
    model.model.layers[0].train()
    config, training = copy.deepcopy(model.config), [part.training for part in model.modules()]
    hooks = [len(part._forward_hooks) for part in model.modules()]
    answer(Engine.from_pretrained(model, backend=backend))
    assert model.config.to_dict() == config.to_dict()
    assert model.config._attn_implementation == own
    assert [part.training for part in model.modules()] == training
    assert [len(part._forward_hooks) for part in model.modules()] == hooks


def test_attention_maps_gradients_and_dropout_are_the_models_own() -> None:
    model = tiny(attention_dropout=0.5)
    model.set_attn_implementation("eager")
    ids = torch.tensor([PROMPT])
    before = model(ids, output_attentions=True).attentions
    engine = fresh(model, "huggingface")
    model.train()
    wanted = answer(engine)
    after = model.eval()(ids, output_attentions=True).attentions
    assert len(after) == len(before)
    assert torch.equal(after[0], before[0])
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)  # its dropout
    assert answer(engine) == wanted  # and none in an answer
    model(ids, labels=ids).loss.backward()
    assert model.lm_head.weight.grad is not None


def test_hidden_states_are_counted_once_before_and_after() -> None:
    """Asking for hidden states hangs hooks onto a model, of which a twin has its own."""
    from specengine.drafters.eagle import EagleDraft
    from tests.toy import head_config, random_state

    model = tiny()
    config = head_config(model=model, layer_ids=(0, 1, 1))
    lm = fresh(model, "huggingface", draft="none").target.lm
    head = EagleDraft(
        head_from(config, random_state(config), torch.float32, torch.device("cpu")), lm
    )
    answer(Engine.from_pretrained(model, head, backend="huggingface"))
    out = model(torch.tensor([PROMPT]), output_hidden_states=True)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    CausalLM(model).prepare_features((0, 1))


# ------------------------------------------------------------------------------------------- weights of other kinds


class Opaque(torch.Tensor):
    """A tensor without memory of its own, which computes as `held` does."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Opaque:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, device=held.device
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            return value.held if isinstance(value, Opaque) else value

        args, kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs or {}))
        if func is torch.ops.aten.detach.default:
            return Opaque(args[0])
        return func(*args, **kwargs)


@pytest.mark.parametrize("backend", [None, "huggingface"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_without_memory_are_never_read_from_an_address(
    dtype: torch.dtype, backend: str | None
) -> None:
    model = tiny(initializer_range=0.2).to(dtype)
    wanted = answer(fresh(model, "huggingface", pack=False), **certain(dtype))
    for layer in model.model.layers:
        layer.mlp.up_proj.weight = nn.Parameter(
            Opaque(layer.mlp.up_proj.weight.detach()), requires_grad=False
        )
    engine = fresh(model, backend)
    assert answer(engine, **certain(dtype)) == wanted
    assert "Opaque" in engine.target.backend or backend is not None
    session = [answer(engine, **certain(dtype)) for _ in range(2)]
    assert session == [wanted] * 2


@pytest.mark.parametrize("backend", [None, "huggingface"])
@pytest.mark.parametrize("kind", ["sparse", "mkldnn", "quantized", "meta", "strided", "negated"])
def test_weights_of_any_layout_are_run_or_refused_by_name(kind: str, backend: str | None) -> None:
    model = tiny(initializer_range=0.2)
    wanted = answer(fresh(model, "huggingface"))
    linear = model.model.layers[1].mlp.down_proj
    dense = linear.weight.detach()
    made = {
        "sparse": dense.to_sparse,
        "mkldnn": dense.to_mkldnn,
        "quantized": lambda: torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
        "meta": lambda: dense.to("meta"),
        "strided": lambda: dense.t().contiguous().t(),
        "negated": lambda: torch._neg_view(-dense),
    }[kind]()
    linear.weight = nn.Parameter(made, requires_grad=False)
    try:
        found = answer(fresh(model, backend))
    except UnsupportedModelError:
        assert kind not in ("strided", "negated")
    else:
        assert found == wanted


@pytest.mark.parametrize("backend", [None, "huggingface"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_made_for_inference_alone_answers(dtype: torch.dtype, backend: str | None) -> None:
    with torch.inference_mode():
        model = tiny(initializer_range=0.2).to(dtype)
    engine = fresh(model, backend)
    answer(engine)
    with torch.inference_mode():
        model.lm_head.weight.mul_(-1)
    assert answer(engine, **certain(dtype)) == answer(fresh(model, backend), **certain(dtype))


@pytest.mark.parametrize("size", [60, 400])
def test_a_resized_vocabulary_is_run_natively(size: int) -> None:
    model = tiny(initializer_range=0.2)
    engine = fresh(model)
    model.resize_token_embeddings(size, mean_resizing=False)
    ids = torch.tensor([PROMPT])
    wanted = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)[
        0, len(PROMPT) :
    ].tolist()
    for given in (engine, fresh(model)):
        assert answer(given) == wanted
        assert given.target.backend.startswith("native")


@pytest.mark.parametrize("kind", ["csr", "mkldnn"])
@pytest.mark.parametrize("backend", [None, "huggingface"])
def test_a_layout_that_changes_beside_an_engine_is_run_or_refused(
    kind: str, backend: str | None
) -> None:
    model, draft = tiny(initializer_range=0.2), near_copy()
    engine = fresh(model, backend, draft=draft)
    wanted = answer(engine)
    for given in (draft, model):
        linear = given.model.layers[1].mlp.down_proj
        dense = linear.weight.detach()
        other = dense.to_sparse_csr() if kind == "csr" else dense.to_mkldnn()
        linear.weight = nn.Parameter(other, requires_grad=False)
        try:
            assert answer(engine) == wanted
        except UnsupportedModelError:
            linear.weight = nn.Parameter(dense)
            assert answer(engine) == wanted


def test_an_engine_loaded_for_inference_alone_works_outside_of_it() -> None:
    with torch.inference_mode():
        engine = fresh(tiny())
        before = answer(engine)
    assert answer(engine) == before
    engine.reset()
    list(engine.score(PROMPT))
    engine.refresh()
    assert answer(engine) == before


@pytest.mark.parametrize("given", [True, False])
def test_weights_are_read_before_an_answer_where_others_may_change_them(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checksum of 16 GB takes a device a good part of the time to the first token."""
    tiny().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    read: list[int] = []
    monkeypatch.setattr(loaded, "checksums", lambda tensors: read.append(len(tensors)) or [])
    engine = Engine.from_pretrained(tiny() if given else tmp_path, backend="huggingface")
    assert bool(read) is given, "they are read at loading as well"
    read.clear()
    answer(engine)
    assert bool(read) is given


def test_a_small_draft_by_name_is_not_read_for_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    read: list[int] = []
    monkeypatch.setattr(loaded, "checksums", lambda tensors: read.append(len(tensors)) or [])
    engine = Engine.from_pretrained(tmp_path, draft=str(tmp_path), backend="huggingface")
    answer(engine)
    assert not read
