"""Recurrent layers over tree rows: a causal convolution along each row's path, and states that come from parents'.

A program of the recurrence has a block of value columns of one head's state, and walks down the rows in order: each
goes on from its parent's state, which is still in registers where the parent is the row before, and is read from
scratch elsewhere. So a row goes through the same operations in a tree, in a chain and in a prompt; products are not
fused with sums, so that the states that are folded later have the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 32  # of a state, of one program of 128 keys or fewer
CHANNELS = 256  # of a convolution, of one program

# ---- meaning


def convolution_reference(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, sources: Tensor, *, silu: bool
) -> Tensor:
    """Compute `tree_convolution` in plain torch; float64 stays float64."""
    kind = torch.promote_types(inputs.dtype, torch.float32)
    out = torch.einsum("ntc,ct->nc", inputs.to(kind)[sources], weight.to(kind))
    out = (out if bias is None else out + bias.to(kind)).to(inputs.dtype)
    return (out.to(kind) * torch.sigmoid(out.to(kind))).to(inputs.dtype) if silu else out


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decays: Tensor,
    rates: Tensor,
    state: Tensor,
    parents: list[int],
    *,
    delta: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `tree_recurrence` by paths, in plain torch; returns outputs, updates and all states."""
    groups = value.shape[1] // key.shape[1]
    states, outs, updates = list[Tensor](), list[Tensor](), list[Tensor]()
    for row, parent in enumerate(parents):
        decayed = (state if parent < 0 else states[parent]) * decays[row, :, None, None]
        keys, queries = (rows[row].repeat_interleave(groups, 0) for rows in (key, query))
        known = torch.einsum("hkv,hk->hv", decayed, keys) if delta else 0.0
        updates.append((value[row] - known) * rates[row, :, None])
        states.append(decayed + keys[..., None] * updates[row][:, None])
        outs.append(torch.einsum("hkv,hk->hv", states[row], queries))
    return torch.stack(outs), torch.stack(updates), torch.stack(states)


# ---- kernels


@triton.jit
def _convolve(
    inputs,
    weight,
    bias,
    sources,
    out,
    input_row,
    weight_row,
    weight_tap,
    channels,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    some = channel < channels
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in tl.static_range(TAPS):
        source = tl.load(sources + row * TAPS + place)
        taken = tl.load(inputs + source * input_row + channel, mask=some, other=0.0)
        tap = tl.load(weight + channel * weight_row + place * weight_tap, mask=some, other=0.0)
        total += taken.to(tl.float32) * tap.to(tl.float32)
    if BIAS:
        total += tl.load(bias + channel, mask=some, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    total = total.to(kind).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + row * channels + channel, total.to(kind), mask=some)


@triton.jit(do_not_specialize=["rows"])
def _recur(
    query,
    key,
    value,
    decays,
    rates,
    state,
    parents,
    branches,
    scratch,
    stored_decays,
    stored_keys,
    stored_updates,
    out,
    rows,
    heads,
    groups,
    keys,
    values,
    TREE: tl.constexpr,
    DELTA: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head, block = tl.program_id(0), tl.program_id(1)
    key_heads = heads // groups
    shared = head // groups
    channel = tl.arange(0, KEYS)[:, None]
    column = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    some_keys, some_columns = channel < keys, column < values
    some = some_keys & some_columns
    place = (head * keys + channel) * values + column
    size = heads * keys * values
    current = tl.load(state + place, mask=some, other=0.0)
    for row in range(rows):
        if TREE:
            parent = tl.load(parents + row)
            if parent != row - 1:
                if parent < 0:
                    current = tl.load(state + place, mask=some, other=0.0)
                else:
                    current = tl.load(scratch + parent * size + place, mask=some, other=0.0)
        at_key = (row * key_heads + shared) * keys + channel
        at_value = (row * heads + head) * values + column
        keyed = tl.load(key + at_key, mask=some_keys, other=0.0)
        query_row = tl.load(query + at_key, mask=some_keys, other=0.0)
        update = tl.load(value + at_value, mask=some_columns, other=0.0)
        decay = tl.load(decays + row * heads + head)
        current = current * decay
        if DELTA:
            update = update - tl.sum(current * keyed, 0, keep_dims=True)
        update = update * tl.load(rates + row * heads + head)
        current = current + keyed * update
        output = tl.sum(current * query_row, 0, keep_dims=True)
        tl.store(out + at_value, output, mask=some_columns)
        if TREE:
            tl.store(stored_updates + at_value, update, mask=some_columns)
            if block == 0:
                tl.store(stored_decays + row * heads + head, decay)
                if head % groups == 0:
                    tl.store(stored_keys + at_key, keyed, mask=some_keys)
            if tl.load(branches + row) != 0:
                tl.store(scratch + row * size + place, current, mask=some)
                tl.debug_barrier()  # rows that go on from it may be read by other threads
    if not TREE:
        tl.store(state + place, current, mask=some)


@triton.jit(do_not_specialize=["rows"])
def _advance(
    states,
    decays,
    steps_keys,
    updates,
    path,
    count,
    rows,
    heads,
    groups,
    keys,
    values,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    layer, head, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    key_heads = heads // groups
    channel = tl.arange(0, KEYS)[:, None]
    column = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    some_keys, some_columns = channel < keys, column < values
    some = some_keys & some_columns
    place = states + ((layer * heads + head) * keys + channel) * values + column
    accepted = tl.load(count)
    if accepted > 0:
        current = tl.load(place, mask=some, other=0.0)
        for step in range(accepted):
            row = layer * rows + tl.load(path + step)
            at_key = (row * key_heads + head // groups) * keys + channel
            keyed = tl.load(steps_keys + at_key, mask=some_keys, other=0.0)
            at_value = (row * heads + head) * values + column
            update = tl.load(updates + at_value, mask=some_columns, other=0.0)
            current = current * tl.load(decays + row * heads + head)
            current = current + keyed * update
        tl.store(place, current, mask=some)


# ---- launchers


def tree_convolution(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, sources: Tensor, *, silu: bool
) -> Tensor:
    """Convolve each channel over each row's sources, in float32; then SiLU if wanted.

    inputs: [m, C], rows of any stride; weight: [C, taps], any strides; bias: [C], contiguous. sources: int64 [n, taps],
    contiguous: rows of inputs. Rounded before SiLU and after it. Returns [n, C]. Capturable.
    """
    (rows, taps), channels = sources.shape, inputs.shape[1]
    if weight.shape != (channels, taps):
        raise ValueError(f"weight [{channels}, {taps}] is needed, got {list(weight.shape)}")
    if inputs.stride(1) != 1 or not sources.is_contiguous():
        raise ValueError("inputs, sources: the last dimension must be contiguous")
    out = torch.empty((rows, channels), dtype=inputs.dtype, device=inputs.device)
    _convolve[(rows, triton.cdiv(channels, CHANNELS))](
        inputs,
        weight,
        bias,
        sources,
        out,
        inputs.stride(0),
        *weight.stride(),
        channels,
        TAPS=taps,
        BIAS=bias is not None,
        SILU=silu,
        BLOCK=CHANNELS,
        num_warps=4,
    )
    return out


def _blocks(keys: int, values: int) -> tuple[int, int]:
    """Return the padded number of keys of a program, and its columns."""
    padded = triton.next_power_of_2(keys)
    return padded, min(triton.next_power_of_2(values), max(1, COLUMNS * 128 // max(128, padded)))


def tree_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decays: Tensor,
    rates: Tensor,
    state: Tensor,
    tree: tuple[Tensor, ...] | None,
    *,
    delta: bool,
) -> Tensor:
    """Run rows through the states of a layer: S = decay * parent's + key * update, and S's answer to the query.

    All float32 and contiguous. query, key: [n, Hk, K]; value: [n, H, V]; decays, rates: [n, H]; state: [H, K, V]. An
    update is rate * value, or with delta rate * (value - decayed state's answer to the key). tree: parents int64 [n]
    (earlier rows, or -1 for `state`), branches bool [n] (whether a row other than the next goes on from it), scratch
    [n or more, H, K, V], and decays [m, H], keys [m, Hk, K], updates [m, H, V], m >= n, that are written; without one
    rows are a chain, and `state` is changed to that after the last. Returns [n, H, V]. Capturable.
    """
    (rows, key_heads, keys), (heads, values) = key.shape, value.shape[1:]
    if query.shape != key.shape or heads % key_heads or state.shape != (heads, keys, values):
        raise ValueError(
            f"query, key [n, Hk, K], value [n, H, V], state [H, K, V], H a multiple of Hk, are needed, got "
            f"{list(query.shape)}, {list(key.shape)}, {list(value.shape)}, {list(state.shape)}"
        )
    tensors = query, key, value, decays, rates, state, *(() if tree is None else tree)
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("all tensors must be contiguous")
    parents, branches, scratch, *stored = (state,) * 6 if tree is None else tree
    out = torch.empty_like(value)
    padded, block = _blocks(keys, values)
    _recur[(heads, triton.cdiv(values, block))](
        query,
        key,
        value,
        decays,
        rates,
        state,
        parents,
        branches,
        scratch,
        *stored,
        out,
        rows,
        heads,
        heads // key_heads,
        keys,
        values,
        TREE=tree is not None,
        DELTA=delta,
        KEYS=padded,
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def advance_states(
    states: Tensor,
    decays: Tensor,
    keys: Tensor,
    updates: Tensor,
    path: Tensor,
    count: Tensor,
) -> None:
    """Move the states of all layers along an accepted path, in place, with the bits that its rows had in their tree.

    All contiguous. states: float32 [layers, H, K, V]; decays [layers, m, H], keys [layers, m, Hk, K], updates [layers,
    m, H, V]: as `tree_recurrence` wrote them; path: int64 [m]; count: int32 [1], rows of the path. Capturable.
    """
    layers, heads, size, values = states.shape
    if not all(tensor.is_contiguous() for tensor in (states, decays, keys, updates, path)):
        raise ValueError("all tensors must be contiguous")
    padded, block = _blocks(size, values)
    _advance[(layers, heads, triton.cdiv(values, block))](
        states,
        decays,
        keys,
        updates,
        path,
        count,
        decays.shape[1],
        heads,
        heads // keys.shape[2],
        size,
        values,
        KEYS=padded,
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=False,
    )
