"""Recurrent layers of transformers' models over tree rows: what they keep of a text, and their modules' forwards.

A state is that after the first `folded` tokens. What the rows of a tree do to it is stored, as keys are by slot: the
next forward first folds the rows that were committed meanwhile, then runs its own, each from its parent. So a rejected
branch costs nothing, and a row goes through the same operations in a tree, in a chain and in a prompt. Modules of
known classes run so, with their own projections and norms.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers import PreTrainedModel

from specengine import ops
from specengine.errors import require_supported
from specengine.models.kv_cache import MixerSizes, Rows
from specengine.models.twins import is_changed
from specengine.ops import Lineage, Steps


class RecurrentStates:
    """Keep what the recurrent layers have read of one sequence, as one of KVCache.states.

    states   float32 [layers, heads, key size, value size], after the first `folded` tokens, int32 [1]
    inputs   [layers, taps - 1 + rows, channels]: of the convolutions the last ones there, the oldest first, which are
             `tails`; then those of the last tree's rows
    steps    what these rows do to the states
    path     int64 [rows]: the rows whose tokens follow the folded ones, in their order
    lineage  of the rows of the forward under way
    """

    def __init__(self, sizes: MixerSizes, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes = sizes
        self.states = torch.zeros(
            (len(sizes.layers), sizes.heads, sizes.key_size, sizes.value_size),
            dtype=torch.float32,
            device=device,
        )
        self.tails = torch.zeros(
            (len(sizes.layers), sizes.taps - 1, sizes.channels), dtype=dtype, device=device
        )
        self.folded = torch.zeros(1, dtype=torch.int32, device=device)
        self._allocate(0)
        self.mark()

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """Return all tensors that a captured forward reads or writes."""
        return self.folded, self.states, self.inputs, *self.steps, self.path

    @property
    def bytes(self) -> int:
        """The bytes of memory that it takes."""
        return sum(tensor.nbytes for tensor in (*self.reads, *self._mark))

    def reach(self, length: int) -> int:
        """Return how many tokens `crop(length)` leaves; synchronises with a device."""
        marked = int(self._mark[0])
        return length if length >= int(self.folded) else marked if length >= marked else 0

    def crop(self, length: int) -> None:
        """Forget everything from token `reach(length)` on."""
        if length >= int(self.folded):
            return
        goes_back = self.reach(length) > 0
        for tensor, marked in zip(self._folded, self._mark, strict=True):
            tensor.copy_(marked if goes_back else marked.zero_())

    def mark(self) -> None:
        """Copy the states, so that `crop` can go back to them."""
        self._mark = [tensor.clone() for tensor in self._folded]

    @property
    def _folded(self) -> tuple[Tensor, ...]:
        return self.folded, self.states, self.tails

    def keep(self, length: Tensor, path: Tensor, count: Tensor) -> None:
        """Commit the first `count` rows of a path through the last tree, whose root is at `length`."""
        self.path[: len(path)].copy_(path)

    def settle(self, filled: Tensor, rows: int = 0) -> None:
        """Move the states on to the end of the committed tokens, int32 [1]; then make room for trees of `rows`."""
        count, before = filled - self.folded, self.sizes.taps - 1
        if self.sizes.heads:
            ops.advance_states(self.states, self.steps, self.path, count)
        places = torch.arange(self.inputs.shape[1], dtype=torch.int64, device=count.device)
        taken = torch.cat([places[:before], self.path + before])
        self.tails.copy_(self.inputs[:, taken[count + places[:before]]])
        self.path.copy_(places[: len(self.path)])
        self.folded.copy_(filled)
        if rows > len(self.path):
            self._allocate(rows)

    def begin(self, rows: Rows | None, count: int, filled: Tensor) -> None:
        """Make ready for the rows of a tree, or for the next `count` tokens of the text, which count as folded."""
        require_supported(
            "memory: a prompt was broken off; crop it",
            (rows is not None and not ops.is_free(filled)) or int(filled) >= int(self.folded),
        )
        self.settle(filled, 0 if rows is None else count)
        if rows is not None:
            self.lineage = ops.lineage_of(rows.words, self.sizes.taps)
            return
        places = torch.arange(self.sizes.taps - 1 + count, dtype=torch.int64, device=filled.device)
        self.lineage = Lineage(None, None, places.unfold(0, self.sizes.taps, 1).contiguous())
        self.folded += count

    def _allocate(self, rows: int) -> None:
        """Make room for trees of this number of rows; those of the last one are lost."""
        sizes, layers = self.sizes, len(self.sizes.layers)
        self.inputs = torch.cat([self.tails, self.tails.new_zeros(layers, rows, sizes.channels)], 1)
        self.tails = self.inputs[:, : sizes.taps - 1]
        self.steps = Steps(
            self.states.new_zeros(layers, rows, sizes.heads),
            self.states.new_zeros(layers, rows, sizes.key_heads, sizes.key_size),
            self.states.new_zeros(layers, rows, sizes.heads, sizes.value_size),
        )
        self.path = torch.arange(rows, dtype=torch.int64, device=self.states.device)

    # ---- as the modules run

    def convolve(self, layer: int, convolution: nn.Conv1d, inputs: Tensor, *, silu: bool) -> Tensor:
        """Return the convolution of a layer's rows, [n, channels]; their inputs are stored."""
        tail = self.tails[layer]
        rows = self.inputs[layer, : len(tail) + len(inputs)]
        if self.lineage.parents is None:
            rows = torch.cat([tail, inputs])
            tail.copy_(rows[len(inputs) :])
        else:
            rows[len(tail) :] = inputs
        return ops.tree_convolution(
            rows, convolution.weight[:, 0], convolution.bias, self.lineage.sources, silu
        )

    def recur(
        self,
        layer: int,
        heads: tuple[Tensor, Tensor, Tensor],
        scalars: tuple[Tensor, Tensor],
        *,
        delta: bool,
    ) -> Tensor:
        """Return what the states of a layer's rows give, float32 [n, heads, value size], by `ops.tree_recurrence`."""
        return ops.tree_recurrence(
            heads,
            scalars,
            self.states[layer],
            self.lineage,
            Steps(*(each[layer] for each in self.steps)),
            delta,
        )


# ---- modules


def _short_convolution(module: Any, states: RecurrentStates, layer: int, rows: Tensor) -> Tensor:
    """Run LFM2's: a gate times a convolution of inputs that another gate has multiplied."""
    first, gate, values = module.in_proj(rows).chunk(3, -1)
    return cast(
        Tensor,
        module.out_proj(gate * states.convolve(layer, module.conv, first * values, silu=False)),
    )


def _gated_delta(module: Any, states: RecurrentStates, layer: int, rows: Tensor) -> Tensor:
    """Run Qwen3-Next's and Qwen3.5's gated delta rule."""
    if hasattr(module, "in_proj_qkvz"):
        first, second = module.in_proj_qkvz(rows[None]), module.in_proj_ba(rows[None])
        *mixed, gate, b, a = module.fix_query_key_value_ordering(first, second)
        inputs, b, a = torch.cat([each.flatten(2) for each in mixed], -1)[0], b[0], a[0]
    else:
        inputs, gate, b, a = (
            getattr(module, f"in_proj_{name}")(rows) for name in ("qkv", "z", "b", "a")
        )
    sizes, count = states.sizes, len(rows)
    mixed = states.convolve(layer, module.conv1d, inputs, silu=True).split(
        [module.key_dim, module.key_dim, module.value_dim], -1
    )
    wide = (each.view(count, -1, sizes.key_size).float() for each in mixed[:2])
    query, key = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in wide)
    value = mixed[2].view(count, -1, sizes.value_size).float()
    rates = -module.A_log.float().exp() * softplus(a.float() + module.dt_bias)
    heads = query * sizes.key_size**-0.5, key, value
    outs = (
        states.recur(layer, heads, (rates.exp(), b.sigmoid().float()), delta=True)
        .to(rows.dtype)
        .flatten(0, 1)
    )
    return cast(
        Tensor, module.out_proj(module.norm(outs, gate.reshape(outs.shape)).view(count, -1))
    )


def _mamba2(module: Any, states: RecurrentStates, layer: int, rows: Tensor) -> Tensor:
    """Run Mamba-2 as Bamba, Granite, Nemotron-H and Falcon-H1 have it; the last multiplies what is projected."""
    sizes, count, inner = states.sizes, len(rows), module.intermediate_size
    projected = module.in_proj(rows * getattr(module, "ssm_in_multiplier", 1.0))
    gate, inputs, rates = (
        (projected * getattr(module, "mup_vector", 1.0))
        .view(count, -1)
        .split([inner, sizes.channels, sizes.heads], -1)
    )
    shared = sizes.key_heads * sizes.key_size
    mixed = states.convolve(layer, module.conv1d, inputs, silu=True).split(
        [inner, shared, shared], -1
    )
    value = mixed[0].view(count, sizes.heads, sizes.value_size).float()
    key, query = (each.view(count, sizes.key_heads, sizes.key_size).float() for each in mixed[1:])
    rates = softplus(rates.float() + module.dt_bias.float())
    decays = (-module.A_log.float().exp() * rates).exp()
    outs = states.recur(layer, (query, key, value), (decays, rates), delta=False)
    outs = (outs + value * module.D[:, None]).view(1, count, -1)
    normed = (
        outs * silu(gate) if isinstance(module.norm, nn.Identity) else module.norm(outs, gate[None])
    )
    return cast(Tensor, module.out_proj(normed[0].to(rows.dtype)))


FORWARDS: dict[str, Callable[[Any, RecurrentStates, int, Tensor], Tensor]] = {
    "Lfm2ShortConv": _short_convolution,
    "Lfm2MoeShortConv": _short_convolution,
    "Lfm3ShortConv": _short_convolution,
    "Qwen3NextGatedDeltaNet": _gated_delta,
    "Qwen3_5GatedDeltaNet": _gated_delta,
    "Qwen3_5MoeGatedDeltaNet": _gated_delta,
    "BambaMixer": _mamba2,
    "FalconH1Mixer": _mamba2,
    "GraniteMoeHybridMambaLayer": _mamba2,
    "NemotronHMamba2Mixer": _mamba2,
}


HEADS: dict[
    Any, tuple[str, ...]
] = {  # fields of modules: key heads, heads, and the sizes of a key and of a value
    _gated_delta: ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"),
    _mamba2: ("n_groups", "num_heads", "ssm_state_size", "head_dim"),
}


def _mixers(model: nn.Module) -> list[Any]:
    """Return the recurrent modules of known classes, those left out that were changed."""
    return [
        module
        for module in model.modules()
        if type(module).__name__ in FORWARDS
        and type(module).__module__.startswith("transformers.models.")
        and not is_changed(module)
    ]


def sizes_of(model: nn.Module) -> MixerSizes | None:
    """Return the sizes of the model's recurrent layers, if they are known and alike."""
    sizes, mixers = set[MixerSizes](), _mixers(model)
    layers = tuple(module.layer_idx for module in mixers)
    for module in mixers:
        taken = module.conv1d if hasattr(module, "conv1d") else module.conv
        heads = (getattr(module, name) for name in HEADS.get(FORWARDS[type(module).__name__], ()))
        sizes.add(MixerSizes(layers, taken.in_channels, taken.kernel_size[0], *heads))
    return sizes.pop() if len(sizes) == 1 else None


def serve(twin: PreTrainedModel) -> PreTrainedModel:
    """Let a twin's recurrent modules run rows over RecurrentStates; over other caches they run as they did."""
    for module in _mixers(twin):
        module.__dict__["forward"] = MethodType(_forward, module)
    return twin


def _forward(module: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    cache = kwargs.get("past_key_values", kwargs.get("cache_params"))
    if (states := getattr(cache, "recurrent", None)) is None:
        return cast(Tensor, type(module).forward(module, hidden_states, **kwargs))
    return FORWARDS[type(module).__name__](
        module, states, states.sizes.layers.index(module.layer_idx), hidden_states[0]
    )[None]
