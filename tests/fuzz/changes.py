"""Changes that people make to a loaded model. Each takes a model and a random generator; the model still runs."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Change = Callable[[PreTrainedModel, random.Random], Any]
TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj", "query_key_value", "dense_4h_to_h")


def parameter(model: PreTrainedModel, pick: random.Random) -> tuple[str, nn.Parameter]:
    """Any of the model's, with its name."""
    named = sorted(model.named_parameters(), key=lambda found: found[0])
    return pick.choice(named)


def noise(like: Tensor, pick: random.Random) -> Tensor:
    """Return noise of the size of `like`, whose storage may be missing."""
    draw = torch.Generator().manual_seed(pick.randrange(2**31))
    return (torch.randn(like.shape, generator=draw) * 0.4).to(like.dtype)


def replace(model: PreTrainedModel, name: str, made: nn.Module) -> None:
    """Put `made` in the place of the module of this name, in the same mode."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, made.train(model.get_submodule(name).training))


def linear(model: PreTrainedModel, pick: random.Random) -> tuple[str, nn.Module]:
    """Any linear layer but the head."""
    found = [
        (name, module) for name, module in model.named_modules() if hasattr(module, "in_features")
    ]
    return pick.choice(
        [(name, module) for name, module in found if "head" not in name and "embed_out" not in name]
    )


def norm(model: PreTrainedModel, pick: random.Random) -> tuple[str, nn.Module]:
    found = [
        (name, module)
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
    ]
    return pick.choice(found)


def layers(model: PreTrainedModel) -> nn.ModuleList:
    return model.base_model.layers  # type: ignore[return-value]


def rotary(model: PreTrainedModel) -> nn.Module:
    return model.base_model.rotary_emb  # type: ignore[return-value]


# ---- writes into a parameter


@torch.no_grad()
def _copied(model: PreTrainedModel, pick: random.Random) -> None:
    weight = parameter(model, pick)[1]
    weight.copy_(noise(weight, pick))


def _written_through_data(model: PreTrainedModel, pick: random.Random) -> None:
    weight = parameter(model, pick)[1]
    weight.data.copy_(noise(weight, pick))


def _all_written_through_data(model: PreTrainedModel, pick: random.Random) -> None:
    for weight in model.parameters():
        weight.data.add_(noise(weight, pick))


def _one_number(model: PreTrainedModel, pick: random.Random) -> None:
    weight = parameter(model, pick)[1].data
    place = tuple(pick.randrange(size) for size in weight.shape)
    weight[place] = pick.choice((-8.0, 4.0, 30.0))


def _by_numpy(model: PreTrainedModel, pick: random.Random) -> None:
    """Signs of a row; bfloat16 as the integers that it is."""
    weight = parameter(model, pick)[1].detach()
    rows = weight.view(torch.int16) if weight.dtype is torch.bfloat16 else weight
    array = rows.numpy()
    row = pick.randrange(array.shape[0])
    array[row : row + 9] = (
        array[row : row + 9] ^ np.int16(-32768) if rows is not weight else -array[row : row + 9]
    )


def _by_dlpack(model: PreTrainedModel, pick: random.Random) -> None:
    torch.from_dlpack(parameter(model, pick)[1].detach()).mul_(-1)


def _data_replaced(model: PreTrainedModel, pick: random.Random) -> None:
    weight = parameter(model, pick)[1]
    weight.data = noise(weight, pick)


def _parameter_replaced(model: PreTrainedModel, pick: random.Random) -> None:
    name, weight = parameter(model, pick)
    module, _, last = name.rpartition(".")
    setattr(model.get_submodule(module), last, nn.Parameter(noise(weight, pick)))


def _swapped(model: PreTrainedModel, pick: random.Random) -> None:
    weight = parameter(model, pick)[1]
    others = [
        other for other in model.parameters() if other.shape == weight.shape and other is not weight
    ]
    if others:
        other = pick.choice(others)
        weight.data, other.data = other.data, weight.data


def _signs(model: PreTrainedModel, pick: random.Random) -> None:
    parameter(model, pick)[1].data.neg_()


def _zeros(model: PreTrainedModel, pick: random.Random) -> None:
    parameter(model, pick)[1].data.zero_()


def _loaded(model: PreTrainedModel, pick: random.Random) -> None:
    """Another state dict of the same shapes, copied or assigned."""
    state = {name: noise(weight, pick) for name, weight in model.named_parameters()}
    model.load_state_dict(state, strict=False, assign=pick.random() < 0.5)
    model.tie_weights()


def _trained(model: PreTrainedModel, pick: random.Random) -> None:
    """A step of a fused or plain optimiser."""
    optimizer = torch.optim.SGD(model.parameters(), 0.3, foreach=pick.random() < 0.5)
    tokens = torch.tensor([[pick.randrange(60) for _ in range(8)]])
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- what is no parameter


def _frequencies(model: PreTrainedModel, pick: random.Random) -> None:
    found: Any = rotary(model)
    how, factor = pick.randrange(4), pick.choice((0.25, 3.0))
    if how == 0:
        found.inv_freq.mul_(factor)
    elif how == 1:
        found.inv_freq.data.mul_(factor)
    elif how == 2:
        found.inv_freq = found.inv_freq * factor
    else:
        found.inv_freq = found.inv_freq.to(torch.bfloat16)


def _rope_scale(model: PreTrainedModel, pick: random.Random) -> None:
    rotary(model).attention_scaling = pick.choice((0.5, 1.7))  # type: ignore[assignment]


def _epsilon(model: PreTrainedModel, pick: random.Random) -> None:
    module: Any = norm(model, pick)[1]
    name = next(name for name in ("variance_epsilon", "eps") if hasattr(module, name))
    setattr(module, name, pick.choice((0.5, 5.0)))


def _attention_scale(model: PreTrainedModel, pick: random.Random) -> None:
    for layer in layers(model):
        for module in layer.children():
            if hasattr(module, "scaling"):
                module.scaling = module.scaling * pick.choice((0.2, 3.0))


def _activation(model: PreTrainedModel, pick: random.Random) -> None:
    layer: Any = pick.choice(list(layers(model)))
    name = "act_fn" if hasattr(layer.mlp, "act_fn") else "act"
    setattr(layer.mlp, name, pick.choice((nn.GELU(), nn.ReLU(), nn.Tanh())).train(layer.training))


def _config_edited(model: PreTrainedModel, pick: random.Random) -> None:
    """Numbers that a model has read when it was made, and some that it reads again."""
    changed: dict[str, Any] = {
        "rms_norm_eps": 0.5,
        "initializer_range": 1.0,
        "hidden_act": "gelu",
        "use_cache": False,
        "num_hidden_layers": 1,
        "rope_theta": 50.0,
        "_name_or_path": "another",
        "bos_token_id": 1,
    }
    name = pick.choice(sorted(changed))
    setattr(model.config, name, changed[name])


def _ends(model: PreTrainedModel, pick: random.Random) -> None:
    model.generation_config.eos_token_id = [pick.randrange(60) for _ in range(40)]


def _mode(model: PreTrainedModel, pick: random.Random) -> None:
    model.train(pick.random() < 0.5)


def _frozen(model: PreTrainedModel, pick: random.Random) -> None:
    model.requires_grad_(pick.random() < 0.5)


# ---- dtypes and shapes


def _cast(model: PreTrainedModel, pick: random.Random) -> None:
    pick.choice((model.half, model.double, model.float, model.bfloat16))()


def _cast_in_part(model: PreTrainedModel, pick: random.Random) -> None:
    """The rotary frequencies alone: other parts of another dtype do not run."""
    rotary(model).to(pick.choice((torch.bfloat16, torch.float16)))


def _resized(model: PreTrainedModel, pick: random.Random) -> None:
    now = model.get_input_embeddings().weight.shape[0]
    size = pick.choice((now + 1, now + 64, now + 3000, now - 3, max(64, now // 2), 64))
    model.resize_token_embeddings(size, mean_resizing=False)


# ---- modules


class Lora(nn.Module):
    """A linear layer with a low rank beside it, as adapters have it."""

    def __init__(self, base: Any, pick: random.Random) -> None:
        super().__init__()
        self.base, self.scaling, weight = base, 1.5, base.weight
        self.in_features, self.out_features = base.in_features, base.out_features
        self.lora_a = nn.Parameter(
            noise(torch.empty(2, self.in_features, dtype=weight.dtype), pick)
        )
        self.lora_b = nn.Parameter(
            noise(torch.empty(self.out_features, 2, dtype=weight.dtype), pick)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scaling * ((x @ self.lora_a.T) @ self.lora_b.T)


def _wrapped(model: PreTrainedModel, pick: random.Random) -> None:
    name, module = linear(model, pick)
    if getattr(module, "weight", None) is not None:
        replace(model, name, Lora(module, pick))


def _adapter_switched(model: PreTrainedModel, pick: random.Random) -> None:
    """Switch every adapter off or on, or make it stronger."""
    scale = pick.choice((0.0, 1.5, 4.0))
    for module in model.modules():
        if isinstance(module, Lora):
            module.scaling = scale
        elif hasattr(module, "enable_adapters"):  # peft's
            module.enable_adapters(scale > 0)


def _adapters_of_peft(model: PreTrainedModel, pick: random.Random) -> None:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        return _wrapped(model, pick)
    names = [
        name for name in TARGETS if any(found.endswith(name) for found, _ in model.named_modules())
    ]
    config = LoraConfig(r=2, target_modules=[pick.choice(names)], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(pick.randrange(2**31))
        inject_adapter_in_model(config, model, adapter_name=f"a{pick.randrange(10**6)}")
    return None


def _linear_replaced(model: PreTrainedModel, pick: random.Random) -> None:
    name, module = linear(model, pick)
    old: Any = module
    if isinstance(old, nn.Linear):
        made = nn.Linear(
            old.in_features, old.out_features, bias=pick.random() < 0.4, dtype=old.weight.dtype
        )
        for weight in made.parameters():
            weight.data.copy_(noise(weight, pick))
        replace(model, name, made)


def _norm_replaced(model: PreTrainedModel, pick: random.Random) -> None:
    name, module = norm(model, pick)
    replace(model, name, pick.choice((nn.Identity(), copy.deepcopy(module))))


def _head_replaced(model: PreTrainedModel, pick: random.Random) -> None:
    old: Any = model.get_output_embeddings()
    made = nn.Linear(old.weight.shape[1], old.weight.shape[0], bias=False, dtype=old.weight.dtype)
    made.weight.data.copy_(noise(made.weight, pick))
    model.set_output_embeddings(made.train(old.training))


def _tied(model: PreTrainedModel, pick: random.Random) -> None:
    head: Any = model.get_output_embeddings()
    embedded: Any = model.get_input_embeddings()
    head.weight = (
        embedded.weight
        if head.weight is not embedded.weight
        else nn.Parameter(noise(head.weight, pick))
    )


def _layers_exchanged(model: PreTrainedModel, pick: random.Random) -> None:
    """Their weights change places, or their feed-forward parts do."""
    found: Any = layers(model)
    if len(found) < 2:
        return
    found[0].mlp, found[1].mlp = found[1].mlp, found[0].mlp


def _layer_removed(model: PreTrainedModel, pick: random.Random) -> None:
    found = layers(model)
    if len(found) > 1:
        model.base_model.layers = found[:-1]
        model.config.num_hidden_layers = len(found) - 1


def _forward_replaced(model: PreTrainedModel, pick: random.Random) -> None:
    module: Any = pick.choice(list(layers(model))).mlp
    before = module.forward
    module.forward = lambda *given: before(*given) * 0.3


# ---- hooks


def _hooked(model: PreTrainedModel, pick: random.Random) -> None:
    module: Any = pick.choice(list(layers(model))).mlp
    if pick.random() < 0.5:
        handle = module.register_forward_hook(lambda _, __, out: out * -0.7)
    else:
        handle = module.register_forward_pre_hook(lambda _, given: (given[0] * 1.8, *given[1:]))
    HANDLES.setdefault(id(model), []).append(handle)


def _unhooked(model: PreTrainedModel, pick: random.Random) -> None:
    for handle in HANDLES.pop(id(model), []):
        handle.remove()


HANDLES: dict[int, list[Any]] = {}
CHANGES: dict[str, Change] = {
    change.__name__.strip("_"): change
    for change in (
        _copied, _written_through_data, _all_written_through_data, _one_number, _by_numpy, _by_dlpack, _data_replaced,
        _parameter_replaced, _swapped, _signs, _zeros, _loaded, _trained, _frequencies, _rope_scale, _epsilon,
        _attention_scale, _activation, _config_edited, _ends, _mode, _frozen, _cast, _cast_in_part, _resized, _wrapped,
        _adapter_switched, _adapters_of_peft, _linear_replaced, _norm_replaced, _head_replaced, _tied,
        _layers_exchanged, _layer_removed, _forward_replaced, _hooked, _unhooked,
    )
}  # fmt: skip
