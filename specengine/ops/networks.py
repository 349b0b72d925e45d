"""Ops of networks: the small ones of some policies (C2T's and Disco's classifiers, Learning to Draft's pair), and of a
decoder layer between its products, in the arithmetic of transformers' modules."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, silu

from specengine.ops._meanings import doubled, refuse_unless, require
from specengine.ops._registry import kernels, native, op
from specengine.ops.choose import gather_rows
from specengine.ops.select import top_children, top_entropy
from specengine.ops.tree import is_free, tree_mask

ACTIVATIONS = ("relu", "tanh")
LOWEST = -1e4  # finite, so that an impossible candidate does not silence a network


@op
def mlp(features: Tensor, net: Sequence[Tensor]) -> Tensor:
    """Return the probability by a network of one hidden layer of ReLU units, without gradients on a CPU.

    features: float32 [..., inputs]; net: float32 weights and biases, [hidden, inputs], [hidden], [1, hidden], [1].
    Returns float32 [...].
    """
    if run := native.mlp[features.device]:
        return run(features, net)
    _require_network(net, features.shape[-1])
    refuse_unless(features.dtype is torch.float32, "features", "float32 [..., inputs]", features)
    # by their weights, as calling a module takes longer than the products
    return linear(linear(features, net[0], net[1]).relu(), net[2], net[3])[..., 0].sigmoid()


@op
def classify_paths(
    path_log_probs: Tensor, entropies: Tensor, depth: Tensor, net: Sequence[Tensor]
) -> Tensor:
    """Return `mlp` of C2T's three features: each candidate's path probability, its parent's entropy, its depth.

    path_log_probs: float32 [rows, children]; entropies: float32 [rows], in nats; depth: int32 [1], one for all. Returns
    float32 [rows, children].
    """
    if run := native.classify_paths[path_log_probs.device]:
        return run(path_log_probs, entropies, depth, net)
    _require_network(net, 3)
    require(
        "path_log_probs: float32 [rows, children]; entropies: float32 [rows]; depth: int32 [1]",
        path_log_probs,
        entropies,
        depth,
    )
    probs = path_log_probs.exp()
    return mlp(
        torch.stack(
            (probs, entropies[:, None].expand_as(probs), depth.float().expand_as(probs)), -1
        ),
        net,
    )


@op
def classify_row(
    logits: Tensor, top: int, depth: Tensor, net: Sequence[Tensor], normalized: bool = False
) -> Tensor:
    """Return `mlp` of Disco's features: a distribution's largest probabilities, its entropy in nats over its `top`
    likeliest columns, the depth.

    logits: float32, bfloat16 or float16 [1, V], read as in `top_children`; as many probabilities as the network has
    inputs, but two, filled up with 0; depth: int32 [1]. Returns float32 [1].
    """
    if run := native.classify_row[logits.device]:
        return run(logits, top, depth, net, normalized)
    inputs = net[0].shape[1]
    _require_network(net, inputs)
    require("logits: floating [1, V]; depth: int32 [1]", logits, depth)
    refuse_unless(
        logits.shape[1] >= 1 and top >= 1 and inputs >= 3,
        "top, columns, inputs",
        "1 or more, 1 or more, 3 or more",
        top,
        logits.shape[1],
        inputs,
    )
    probs = top_children(logits, inputs - 2, normalized)[0].exp()
    probs = pad(probs, (0, inputs - 2 - probs.shape[1]))
    entropy = top_entropy(logits, top, normalized)[:, None]
    return mlp(torch.cat([probs, entropy, depth.float()[:, None]], 1), net)


class Window(NamedTuple):
    """A network's view of a beam of `width`: the last level alone (`last`), or all; at most `room` candidates,
    then the context's length over units[0] and the expansions over units[1], `repeats` times each; over an infinite
    unit nothing is shown but 0.

    pad: in vacant places, 0 or less; lower scores count as a negative pad, as -1e4 where it is 0.
    """

    width: int
    last: bool
    room: int
    pad: float
    repeats: int
    units: tuple[float, float]


@op
def beam_observation(
    scores: Tensor,
    depths: Tensor,
    live: Tensor,
    expansions: Tensor,
    context: Tensor,
    window: Window,
) -> Tensor:
    """Return some of a beam's candidates by their places, then the two facts: float32 [room + 2 * repeats].

    scores: float32 [m], path log-probabilities of the first `live` nodes level by level; depths: int64 [m], 0 of the
    root, which is not shown. Level 1 has places 0 to width, each later one width**2 places; a level's nodes stand
    together at its beginning. expansions: int32 [1], complete; context: int64 [1], tokens. Source: Learning to Draft,
    equation 3.
    """
    if run := native.beam_observation[scores.device]:
        return run(scores, depths, live, expansions, context, window)
    require(
        "scores: float32 [m]; depths: int64 [m]; live: int32 [1]; expansions: int32 [1]; context: int64 [1]",
        scores,
        depths,
        live,
        expansions,
        context,
    )
    refuse_unless(window.pad <= 0, "pad", "0 or less", window.pad)
    width, device = window.width, scores.device
    first = (width + (expansions.long() - 1) * width**2) * (window.last & (expansions > 0))
    place = torch.arange(scores.shape[0], device=device, dtype=torch.int64)
    before = torch.searchsorted(
        depths.masked_fill(place >= live, torch.iinfo(torch.int64).max), depths.contiguous()
    )
    at = (depths > 1) * width + (depths - 2).clamp(min=0) * width**2 + place - before - first
    shown = (depths > 0) & (place < live) & (at >= 0) & (at < window.room)
    values = scores.clamp(min=window.pad if window.pad < 0 else LOWEST)
    laid = torch.full((window.room + 1,), window.pad, device=device, dtype=torch.float32)
    laid = laid.index_copy(0, at.masked_fill(~shown, window.room), values)[: window.room]
    facts = (
        doubled(fact) / unit for fact, unit in zip((context, expansions), window.units, strict=True)
    )
    return torch.cat([laid, *(fact.float().expand(window.repeats) for fact in facts)])


@op
def best_action(observation: Tensor, layers: Sequence[Tensor], activation: str) -> Tensor:
    """Return the index of the first of the largest outputs of a multi-layer perceptron, int64 [1].

    observation: float32 [inputs]; layers: weight [outputs, inputs] and bias [outputs] of each, contiguous float32;
    activation: relu or tanh, between layers.
    """
    if run := native.best_action[observation.device]:
        return run(observation, layers, activation)
    refuse_unless(activation in ACTIVATIONS, "activation", ", ".join(ACTIVATIONS), activation)
    require(f"observation: float32 [{layers[0].shape[1]}]", observation)
    values = observation
    for place in range(
        0, len(layers), 2
    ):  # without modules, whose calls take longer than these products
        if place:
            values = values.tanh() if activation == "tanh" else values.relu()
        values = linear(values, layers[place], layers[place + 1])
    return values.argmax(0, keepdim=True)


def _require_network(net: Sequence[Tensor], inputs: int) -> None:
    require(
        f"hidden weight: float32 [hidden, {inputs}]; hidden bias: float32 [hidden]; "
        "output weight: float32 [1, hidden]; output bias: float32 [1]",
        *net,
    )
    refuse_unless(all(part.is_contiguous() for part in net), "net", "contiguous tensors", *net)


# ---- layers of models, between their products


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm over the last dimension: computed in float32, rounded, and multiplied by its weight."""
    wide = states.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(states.dtype)


@op
def add_rms_norm(
    states: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of residual + states, and that sum; without a residual, of the states, and these.

    states, residual: [n, channels]; weight: [channels]; one floating dtype, to which the sum is rounded. No row depends
    on another.
    """
    require(
        "states: floating [n, channels]; residual: floating [n, channels]; weight: floating [channels]",
        *(states, residual, weight),
    )
    _require_one_dtype(states, weight, states if residual is None else residual)
    if run := kernels.add_rms_norm[states.device]:
        return run(states, residual, weight, eps)
    total = states if residual is None else residual + states
    return rms_norm(total, weight, eps), total


class QuantizedWeight(NamedTuple):
    """A matrix of codes, all tensors contiguous. A number is code * scale - offset, in float32.

    codes    int8 or float8_e4m3fn [outputs, inputs]; or uint8 [outputs, inputs / 2], two codes of four bits to a byte:
             byte i of each 16 has in its lower half the code of input i of 32, in its upper one that of i + 16
    scales   of groups of inputs, [outputs, groups]: floating, or int8 or uint8 in `units`
    offsets  the same of groups; None for 0, and 8 is then the zero of codes of four bits
    units    float16 [outputs, inputs / 256, 1 or 2], of scales and of offsets; None for 1
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    units: Tensor | None = None

    @property
    def inputs(self) -> int:
        return self.codes.shape[1] * (1 + (self.codes.dtype is torch.uint8))

    def numbers(self) -> Tensor:
        """Return the matrix, float32 [outputs, inputs]."""
        codes, scales = self.codes, self.scales.float()
        offsets = torch.zeros_like(scales) if self.offsets is None else self.offsets.float()
        if codes.dtype is torch.uint8:
            halves = codes.unflatten(1, (-1, 16))
            unsigned = torch.cat((halves & 15, halves >> 4), 2).flatten(1)
            codes = unsigned.to(torch.int8) - 8 * (self.offsets is None)
        if self.units is not None:
            units = self.units.float().repeat_interleave(scales.shape[1] // self.units.shape[1], 1)
            scales = scales * units[..., 0]
            offsets = offsets * units[..., -1]
        levels = codes.float().unflatten(1, (scales.shape[1], -1)) * scales[..., None]
        return (levels - offsets[..., None]).flatten(1)


@op
def packed_linear(states: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply rows by a quantised matrix, whose numbers are rounded to the dtype of the rows or left as they are.

    states: floating [n, inputs]; bias: floating [outputs]. Returns [n, outputs] in their dtype.
    """
    require(
        f"states: floating [n, {weight.inputs}]; bias: floating [{len(weight.codes)}]", states, bias
    )
    if run := kernels.packed_linear[states.device]:
        return run(states, weight, bias)
    return linear(states, weight.numbers().to(states.dtype), bias)


@op
def gather_norms(
    states: Tensor,
    sources: Tensor,
    table: Tensor,
    tokens: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Gather the inputs of a draft pass as `gather_rows`; return their RMS norms side by side, and the states.

    states: [rows, H]; table: [vocabulary, H]; sources, tokens: int64 [n]; weights: [H] of the norm of the embeddings,
    which come first, and of that of the states; one dtype. Returns [n, 2 * H] and [n, H].
    """
    refuse_unless(
        len({tensor.dtype for tensor in (states, table, *weights)}) == 1,
        "states, table, weights",
        "one dtype",
        states,
        table,
        *weights,
    )
    require("sources: int64 [n]; tokens: int64 [n]", sources, tokens)
    if run := kernels.gather_norms[states.device]:
        return run(states, sources, table, tokens, weights, eps)
    rows, embeddings = gather_rows(states, sources, table, tokens)
    return torch.cat(
        (rms_norm(embeddings, weights[0], eps), rms_norm(rows, weights[1], eps)), -1
    ), rows


@op
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, both floating [n, channels] of one dtype, in which each step is rounded."""
    require("gate: floating [n, channels]; up: floating [n, channels]", gate, up)
    _require_one_dtype(gate, up)
    if run := kernels.silu_mul[gate.device]:
        return run(gate, up)
    return silu(gate) * up


def _require_one_dtype(*tensors: Tensor) -> None:
    refuse_unless(len({tensor.dtype for tensor in tensors}) == 1, "tensors", "one dtype", *tensors)


# ---- recurrent layers of models


class Lineage(NamedTuple):
    """Hold what rows go on from in recurrent layers.

    parents   int64 [n], of a tree the row before each, an earlier one, or -1, the text before; None: rows are the next
              tokens of the text
    branches  bool [n], of a tree whether a row other than the next goes on from it
    sources   int64 [n, taps], what a convolution reads for each row, the oldest first and the row's own last: places
              among the text's last taps - 1 inputs and those of the rows after these
    """

    parents: Tensor | None
    branches: Tensor | None
    sources: Tensor


def lineage_of(words: Tensor, taps: int) -> Lineage:
    """Return the lineage of a tree's rows by their ancestor words, int64 [n, w], of which bit j names row j.

    No host read, so it can be captured.
    """
    rows, before = words.shape[0], taps - 1
    places = torch.arange(before + rows, device=words.device, dtype=torch.int64)
    number = places[:rows]
    parents = (tree_mask(words, rows).tril(-1) * (number + 1)).amax(1) - 1
    branches = ((parents[:, None] == number) & (number[:, None] > number + 1)).any(0)
    preceding = torch.cat([places[:before] - 1, parents + before])
    sources = [places[before:]]
    for _ in range(before):
        sources.append(preceding[sources[-1]])
    return Lineage(parents, branches, torch.stack(sources[::-1], 1))


class Steps(NamedTuple):
    """Hold what rows do to the states of layers, float32: a decay multiplies a state, and key times update is added.

    decays   [..., heads]
    keys     [..., key heads, key size]
    updates  [..., heads, value size]
    """

    decays: Tensor
    keys: Tensor
    updates: Tensor


@op
def tree_convolution(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, sources: Tensor, activate: bool
) -> Tensor:
    """Return a causal convolution of each channel, over each row, its ancestors and the text before; then SiLU.

    inputs: floating [taps - 1 + n, channels], the text's last ones, the oldest first, then those of the rows; weight:
    [channels, taps]; bias: [channels]; sources: int64 [n, taps], as in Lineage; activate: whether SiLU follows. Sums
    are float32, rounded before SiLU and after it. Returns [n, channels].
    """
    require(
        "inputs: floating [m, channels]; weight: floating [channels, taps]; "
        "bias: floating [channels]; sources: int64 [n, taps]",
        *(inputs, weight, bias, sources),
    )
    if run := kernels.tree_convolution[inputs.device]:
        return run(inputs, weight, bias, sources, activate)
    total = (inputs.float()[sources] * weight.float().t()).sum(1)
    rounded = (total if bias is None else total + bias.float()).to(inputs.dtype)
    return silu(rounded) if activate else rounded


@op
def tree_recurrence(
    heads: tuple[Tensor, Tensor, Tensor],
    scalars: tuple[Tensor, Tensor],
    state: Tensor,
    lineage: Lineage,
    steps: Steps,
    delta: bool,
) -> Tensor:
    """Return what the state of each row gives for its query; a row's state comes from its parent's, in float32.

    A state is S = decay * parent's + key * u, u = rate * value, or with `delta` rate * (value - what the decayed state
    of the parent gives for the key). Heads of values share those of keys, in order.

    heads: queries and keys, float32 [n, key heads, K], and values, float32 [n, heads, V]; scalars: decays and rates,
    float32 [n, heads]; state: float32 [heads, K, V], of the text before. What the rows of a tree do is written to the
    first rows of `steps`; rows of a text change `state` to that after them. A row has the same bits in a tree, in a
    chain and in a text. No host read, so it can be captured.
    Sources: Gated Delta Networks, equation 10; Mamba-2, equation 16.
    """
    (query, key, value), (decays, rates) = heads, scalars
    require(
        "query: float32 [n, shared, K]; key: float32 [n, shared, K]; value: float32 [n, heads, V]; "
        "decays: float32 [n, heads]; rates: float32 [n, heads]; state: float32 [heads, K, V]",
        *(query, key, value, decays, rates, state),
    )
    if run := kernels.tree_recurrence[query.device]:
        return run(heads, scalars, state, lineage, steps, delta)
    keys, queries = (
        rows.repeat_interleave(value.shape[1] // rows.shape[1], 1)[..., None]
        for rows in (key, query)
    )
    outs, updates, last, parents = list[Tensor](), list[Tensor](), state, lineage.parents
    states = state.new_empty(0 if parents is None else len(query), *state.shape)
    for row in range(len(query)):
        if parents is not None:
            parent = parents[row : row + 1]
            last = torch.where(parent < 0, state, states[parent.clamp(min=0)][0])
        decayed = last * decays[row, :, None, None]
        update = value[row] - (decayed * keys[row]).sum(1) if delta else value[row]
        updates.append(update * rates[row, :, None])
        last = decayed + keys[row] * updates[-1][:, None]
        outs.append((last * queries[row]).sum(1))
        states[row : row + 1] = last  # there is none of a text
    if parents is None:
        state.copy_(last)
    else:
        for stored, rows in zip(steps, (decays, key, torch.stack(updates)), strict=True):
            stored[: len(query)].copy_(rows)
    return torch.stack(outs)


@op
def advance_states(states: Tensor, steps: Steps, path: Tensor, count: Tensor) -> None:
    """Change the states of all layers to those after the accepted rows, with the bits that these had in their tree.

    states: float32 [layers, heads, K, V]; steps: of each layer, [layers, rows, ...]; path: int64 [rows], of which the
    first `count`, int32 [1], are accepted, ascending. No host read but on a CPU, so it can be captured.
    """
    require(
        "states: float32 [layers, heads, K, V]; path: int64 [rows]; count: int32 [1]",
        states,
        path,
        count,
    )
    if run := kernels.advance_states[states.device]:
        run(states, steps, path, count)
        return
    for place in range(int(count) if is_free(count) else len(path)):
        decays, keys, updates = (
            rows.index_select(1, path[place : place + 1])[:, 0] for rows in steps
        )
        wide = keys.repeat_interleave(states.shape[1] // keys.shape[1], 1)[..., None]
        after = states * decays[..., None, None] + wide * updates[:, :, None]
        states.copy_(torch.where(place < count, after, states))
