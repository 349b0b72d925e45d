"""Twins: second trees of modules over the same parameters, which run another way and leave the model as it is.

Packed twins keep bfloat16 linear layers in oneDNN's own weight layout, for CPUs. Torch re-orders a bfloat16 weight for
oneDNN at every call. Re-ordering it once leaves the arithmetic as it was (the results are bit-equal), about halves the
time of a few rows, and takes a second copy of these weights in memory.
"""

import copy
import functools
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from specengine import ops
from specengine.errors import require
from specengine.models import free_memory
from specengine.models.extension import is_plain
from specengine.ops import QuantizedWeight

M = TypeVar("M", bound=nn.Module)

MEMORY_SHARE = 0.5  # of the free memory that packed weights may take by default
RECORDING = "transformers.utils.output_capturing"  # hooks that stay once hidden states were asked for, and idle else
# A twin's own attributes; its parameters stay those of the model, even if one is replaced.
_OWN_TABLES = (
    "_buffers",
    "_non_persistent_buffers_set",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def twin(module: M, replace: Callable[[nn.Module], nn.Module | None] = lambda part: None) -> M:
    """Return a copy of the module tree that shares all parameters, with some modules replaced.

    Buffers are shared until one of them is replaced, hooks until one is added or removed.
    """
    copies: dict[int, nn.Module] = {}
    plain_copies: dict[int, nn.Module] = {}  # without the replacements

    def copied(original: nn.Module) -> nn.Module:
        if id(original) not in copies:
            replacement = replace(original)
            copies[id(original)] = module_copy = (
                _like(original) if replacement is None else replacement
            )
            if replacement is None:
                plain_copies[id(original)] = module_copy
                module_copy._modules = {  # an empty list of modules is false
                    name: None if child is None else copied(child)
                    for name, child in original._modules.items()
                }
        return copies[id(original)]

    twin = copied(module)
    for module_copy in plain_copies.values():
        _rebind(module_copy, plain_copies)
    return cast(M, twin)


def evaluating(model: PreTrainedModel) -> PreTrainedModel:
    """Return a twin in evaluation mode with configs of its own: an attention that is set for it is not the model's."""
    evaluated, configs = twin(model), dict[int, Any]()
    for submodule in evaluated.modules():
        submodule.training = False
        for name, value in list(vars(submodule).items()):
            if isinstance(value, PretrainedConfig):
                # the same copy wherever it is the same config
                submodule.__dict__[name] = copy.deepcopy(value, configs)
                submodule.__dict__[name].return_dict = True  # results are read by name
    return evaluated


def is_changed(module: nn.Module) -> bool:
    """Return whether a module does more than its class says. Hooks that record hidden states are idle otherwise."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return (
        any(getattr(hook, "__module__", None) != RECORDING for hook in hooks)
        or not vars(module).keys().isdisjoint(("forward", "_call_impl"))
        or hasattr(module, "parametrizations")
    )


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Choose a twin's attention, also in layers whose config is not the model's own: those of another model's."""
    model.set_attn_implementation(name)
    chosen = model.config.get_text_config(decoder=True)
    for module in model.modules():
        config = vars(module).get("config")
        if type(config) is type(chosen):
            config._attn_implementation_internal = name


def _like(module: nn.Module) -> nn.Module:
    # copy.copy refuses modules with parametrizations
    module_copy: nn.Module = object.__new__(type(module))
    module_copy.__dict__.update(module.__dict__)
    for table in _OWN_TABLES:
        if table in module_copy.__dict__:
            module_copy.__dict__[table] = copy.copy(module_copy.__dict__[table])
    module_copy.__dict__["_compiled_call_impl"] = None  # it would call the model itself
    return module_copy


def _rebind(module_copy: nn.Module, copies: dict[int, nn.Module]) -> None:
    """Have methods that stand on the module itself (a replaced forward, accelerate's) be those of the twin."""
    for name, value in list(vars(module_copy).items()):
        # compiled, it would run the model itself
        original = getattr(value, "_torchdynamo_orig_callable", value)
        if isinstance(original, MethodType) and id(original.__self__) in copies:
            module_copy.__dict__[name] = MethodType(
                original.__func__, copies[id(original.__self__)]
            )
        elif isinstance(original, functools.partial) and any(
            id(arguments) in copies for arguments in original.args
        ):
            arguments = [copies.get(id(argument), argument) for argument in original.args]
            module_copy.__dict__[name] = functools.partial(
                original.func, *arguments, **original.keywords
            )


# ---- quantised


class QuantizedLinear(nn.Module):
    """A linear layer whose weight stays codes and scales, as ops.packed_linear takes them."""

    def __init__(self, linear: nn.Linear, weight: QuantizedWeight) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        for name, tensor in weight._asdict().items():
            self.register_parameter(
                name, None if tensor is None else nn.Parameter(tensor, requires_grad=False)
            )

    def forward(self, rows: Tensor) -> Tensor:
        weight = QuantizedWeight(*(getattr(self, name) for name in QuantizedWeight._fields))
        return ops.packed_linear(rows.flatten(0, -2), weight, self.bias).view(*rows.shape[:-1], -1)


def linear_layers(model: nn.Module) -> list[str]:
    """Return the names of the plain linear layers of a model."""
    return [name for name, layer in model.named_modules() if type(layer) is nn.Linear]


def quantize(model: nn.Module, weights: Iterable[tuple[str, QuantizedWeight]]) -> None:
    """Replace the linear layers of these names by layers of these weights."""
    for name, weight in weights:
        model.set_submodule(
            name, QuantizedLinear(cast(nn.Linear, model.get_submodule(name)), weight)
        )


# kinds of GGUF's blocks, and their bytes; f8_e4m3, a float32 and 64 codes, is no file's
BLOCKS = {"q8_0": 34, "q4_0": 18, "q5_0": 22, "q4_k": 144, "q6_k": 210, "f8_e4m3": 68}


def quantized_blocks(kind: str, rows: Tensor) -> QuantizedWeight:
    """Return what the blocks of a GGUF file say, uint8 [outputs, bytes], on other places: no number changes.

    Source of the layouts: ggml/src/ggml-common.h.
    """
    blocks = rows.unflatten(1, (-1, BLOCKS[kind]))
    if kind == "f8_e4m3":
        scales = blocks[..., :4].contiguous().view(torch.float32).flatten(1)
        return QuantizedWeight(blocks[..., 4:].flatten(1).view(torch.float8_e4m3fn), scales)
    if kind.endswith("_0"):
        scales = blocks[..., :2].contiguous().view(torch.float16).flatten(1)
        codes = blocks[..., 2:]
        if kind == "q5_0":
            bits = torch.arange(8, dtype=torch.uint8, device="cpu")
            fifths = (codes[..., :4, None] >> bits & 1).flatten(2) << 4
            codes = torch.cat((codes[..., 4:] & 15, codes[..., 4:] >> 4), 2) + fifths - 16
        return QuantizedWeight(
            codes.flatten(1).view(torch.uint8 if kind == "q4_0" else torch.int8), scales
        )
    if kind == "q6_k":
        low, high = blocks[..., :128].unflatten(2, (2, 1, 64)), blocks[..., 128:192]
        shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8, device="cpu")
        upper = (high.unflatten(2, (2, 1, 32)) >> shifts & 3).flatten(3) << 4
        codes = (torch.cat((low & 15, low >> 4), 3).flatten(3) | upper).to(torch.int8) - 32
        scales = blocks[..., 192:208].flatten(1).view(torch.int8)
        units = blocks[..., 208:].contiguous().view(torch.float16)
        return QuantizedWeight(codes.flatten(1), scales, None, units)
    units = blocks[..., :4].contiguous().view(torch.float16)
    first, second, both = blocks[..., 4:16].unflatten(2, (3, 4)).unbind(2)
    scales = torch.cat((first & 63, both & 15 | first >> 6 << 4), 2).flatten(1)
    offsets = torch.cat((second & 63, both >> 4 | second >> 6 << 4), 2).flatten(1)
    pairs = blocks[..., 16:].unflatten(2, (4, 1, 2, 16))
    halves = torch.cat((pairs & 15, pairs >> 4), 3)  # of two groups of 32 codes
    codes = (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(1)
    return QuantizedWeight(codes, scales, offsets, units)


@torch.no_grad()
def quantized_rows(weight: Tensor) -> QuantizedWeight:
    """Round a weight to int8 with a scale for each output, as the native forward does."""
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True) / 127
    codes = (wide / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-127, 127)
    return QuantizedWeight(codes.to(torch.int8), scales)


# ---- packed


_LINEAR = nn.Linear.forward  # which others may replace for all layers


class PackedLinear(nn.Module):
    """nn.Linear with a bfloat16 weight in oneDNN's layout; the same results, bit for bit."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        with torch.no_grad():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, rows: Tensor) -> Tensor:
        return cast(
            Tensor,
            torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], ""),
        )


class Packed:
    """A model's packed twin."""

    def __init__(self, model: nn.Module) -> None:
        self._original = model
        self._state: Any = None
        self._layers: dict[int, PackedLinear] = {}
        self._twin = model

    def model(self, state: Any = None) -> nn.Module:
        """Return the twin, packed again if a weight has changed.

        state: a value that changes with the weights; by default their addresses and versions, which writes through
        `.data` leave as they are.
        """
        if state is None:
            state = [
                (
                    linear.weight.data_ptr(),
                    0 if linear.weight.is_inference() else linear.weight._version,
                )
                for linear in packable(self._original)
            ]
        if state != self._state:
            self._layers = {}
            self.copy_again()
            self._state = state
        return self._twin

    def copy_again(self) -> None:
        """Take in what was changed on the modules themselves (hooks, say); packed weights are kept."""
        self._twin = twin(self._original, lambda module: _packed(module, self._layers))


def worth_packing(model: nn.Module, pack: bool | None = None) -> bool:
    """Return whether to pack: as `pack` says, by default where that is faster and a copy fits well into memory.

    Raises InputError where it is asked for and oneDNN cannot multiply such weights on this processor.
    """
    size = sum(linear.weight.nbytes for linear in packable(model))
    able = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    require(
        "pack",
        pack,
        "False or none: oneDNN has no bfloat16 on this processor",
        able or not (pack and size),
    )
    return able and 0 < size <= MEMORY_SHARE * free_memory() if pack is None else pack


def packable(model: nn.Module) -> list[nn.Linear]:
    """Return the linear layers that can be packed: plain ones, in bfloat16, on the CPU."""
    return [cast(nn.Linear, module) for module in model.modules() if _is_packable(module)]


def _packed(module: nn.Module, done: dict[int, PackedLinear]) -> PackedLinear | None:
    if not _is_packable(module):
        return None
    if id(module) not in done:
        done[id(module)] = PackedLinear(cast(nn.Linear, module))
    return done[id(module)]


def _is_packable(module: nn.Module) -> bool:
    # exactly nn.Linear: a subclass may compute something else; hooks expect to be called with the layer itself
    if (
        type(module) is not nn.Linear
        or module._forward_hooks
        or module._forward_pre_hooks
        or is_changed(module)
    ):
        return False
    # quantised, a layer may have no weight
    weight, bias = vars(module)["_parameters"].get("weight"), module.bias
    return (
        is_plain(weight)
        and weight.dtype is torch.bfloat16
        and (bias is None or is_plain(bias))
        and nn.Linear.forward is _LINEAR
    )
