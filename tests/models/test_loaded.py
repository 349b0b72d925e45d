"""Tests that changes of a loaded model are noticed: of every number, module and setting."""

from __future__ import annotations

import torch
from hypothesis import example, given, strategies as st
from torch import nn

from specengine.models import loaded
from specengine.models.loaded import Watch, checksums
from specengine.models.twins import evaluating, twin
from tests.examples import examples
from tests.toy import tiny

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.int64,
    torch.float64,
    torch.bool,
]


@examples(60)
@given(
    seed=st.integers(0, 2**31),
    count=st.integers(1, 200_000),
    dtype=st.sampled_from(DTYPES),
    edit=st.sampled_from(["one bit", "swap", "signs", "shift"]),
    compiled=st.booleans(),
)
@example(seed=756, count=756, dtype=torch.int64, edit="one bit", compiled=False)  # a high bit
def test_every_edit_changes_the_checksum(
    seed: int, count: int, dtype: torch.dtype, edit: str, compiled: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = torch.zeros((), dtype=dtype).element_size()
    data = torch.randint(
        0, 2 if dtype is torch.bool else 256, (count * size,), generator=generator
    ).to(torch.uint8)
    tensor = data.view(dtype)
    before, was = _checksum(tensor, compiled), data.clone()
    place = int(torch.randint(len(data), (), generator=generator))
    if edit == "one bit":
        data[place] ^= 1
    elif edit == "swap":
        other = int(torch.randint(len(data), (), generator=generator))
        data[[place, other]] = data[[other, place]].clone()
    elif edit == "signs" and dtype.is_floating_point:
        data[size - 1 :: size] ^= 128
    elif edit == "shift":
        data[:] = data.roll(size)
    assert (_checksum(tensor, compiled) == before) == torch.equal(data, was)


def _checksum(tensor: torch.Tensor, compiled: bool) -> object:
    return checksums([tensor])[0] if compiled else int(loaded._checksum(tensor))


def test_a_checksum_is_the_same_for_any_threads_and_strides() -> None:
    torch.manual_seed(0)
    tensor, before = torch.randn(700, 900), torch.get_num_threads()
    found = set()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            found.add(checksums([tensor])[0])
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
    assert checksums([tensor.t().contiguous().t()]) == [*found]
    assert checksums([torch.empty(0), nn.Parameter(torch.empty(3, 0))]) == checksums(
        [torch.empty(0), torch.empty(0)]
    )


def test_what_cannot_be_read_is_never_the_same() -> None:
    tensor = torch.eye(3).to_sparse()
    assert checksums([tensor]) != checksums([tensor])


def test_running_a_model_changes_nothing() -> None:
    for family, changes in (
        ("llama", {}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        ),
        ("gemma", {}),
        ("gpt_neox", {}),
    ):
        model = tiny(family, **changes)
        watch = Watch(model)
        before = watch.contents()
        for _ in range(2):
            model(torch.arange(1, 200)[None])
            model(torch.arange(1, 9)[None], output_hidden_states=True, output_attentions=True)
        assert watch.changed() == ""
        assert watch.contents() == before


def test_what_was_changed_is_named() -> None:
    model = tiny()
    watch = Watch(model)
    model.model.layers[1].self_attn.scaling = 3.0
    assert watch.changed() == "model.layers.1.self_attn.scaling"
    watch = Watch(model)
    model.model.layers[0].mlp = nn.Identity()
    assert watch.changed() == "module model.layers.0.mlp"
    watch = Watch(model)
    model.extra = nn.Identity()
    assert watch.changed() == "module extra"
    watch = Watch(model)
    del model.extra
    assert watch.changed() == "module extra"
    watch = Watch(model)
    model.config.rms_norm_eps = 0.5
    assert watch.changed() == "config"


def test_tied_weights_are_told_from_equal_ones() -> None:
    model = tiny(tie_word_embeddings=True)
    watch = Watch(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert watch.changed() == "lm_head._parameters"


def test_a_twin_shares_weights_and_nothing_else() -> None:
    model = tiny(attention_dropout=0.5)
    model.adapters = nn.ModuleDict()  # empty, and a module all the same
    model.train()
    made = evaluating(model)
    assert not any(part.training for part in made.modules())
    assert all(part.training for part in model.modules())
    assert [id(weight) for weight in made.parameters()] == [
        id(weight) for weight in model.parameters()
    ]
    made.set_attn_implementation("eager")
    assert model.config._attn_implementation != "eager"
    assert {id(part.config) for part in made.modules() if hasattr(part, "config")} == {
        id(made.config)
    }
    made.model.rotary_emb.inv_freq = torch.zeros(1)
    assert len(model.model.rotary_emb.inv_freq) > 1
    made.lm_head.register_forward_hook(lambda *_: None)
    assert not model.lm_head._forward_hooks


def test_a_twins_methods_are_its_own() -> None:
    model = tiny()
    mlp = model.model.layers[0].mlp
    mlp.forward = mlp.forward  # bound, as what wraps a forward leaves it
    made = twin(model)
    assert made.model.layers[0].mlp.forward.__self__ is made.model.layers[0].mlp


def test_a_module_at_two_places_stays_one() -> None:
    shared = nn.Linear(2, 2)
    made = twin(nn.Sequential(shared, shared))
    assert made[0] is made[1]
    assert made[0] is not shared
