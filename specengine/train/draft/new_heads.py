"""Heads to train: their shape and initial weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig, PreTrainedModel

from specengine.checkpoints.eagle import load_head
from specengine.errors import require
from specengine.models.configs import STEADY_ROPES, family_of
from specengine.models.dflash import DflashConfig
from specengine.models.eagle import (
    DEFAULT_THETA,
    Eagle3Head,
    EagleConfig,
    EagleHead,
    default_layer_ids,
    head_from,
)
from specengine.models.native import NativeLM
from specengine.train.draft.options import Loss, TrainOptions
from specengine.train.draft.teacher import HeadTeacher

RIDGE = 1e-4  # relative to the mean squared input
# of a head, chosen from the text
MIN_VOCABULARY, MAX_VOCABULARY, VOCABULARY_STEP = 8192, 32768, 1024
MAX_UNITS = 2048  # of the MLP, chosen by the target
COVERED = 0.99  # share of the answers' tokens that it has, if it may be so large


class Weights(NamedTuple):
    """What a head takes from its target.

    parameter   returns a decoder's parameter by its name in transformers' decoder; None if there is none
    vocabulary  returns the rows of the language-model head, [vocabulary, hidden size]
    """

    config: PretrainedConfig
    vocab_size: int
    device: torch.device
    parameter: Callable[[str], Tensor | None]
    vocabulary: Callable[[], Tensor]

    @classmethod
    def of(cls, model: PreTrainedModel | NativeLM) -> Weights:
        config = model.config.get_text_config(decoder=True)
        if isinstance(model, NativeLM):
            source, family = model.source, family_of(model.config)
            stored, embedding = source.shapes(), f"{family.embedding.transformers}.weight"
            prefix, head = (
                family.embedding.transformers.rpartition(".")[0],
                f"{family.head.transformers}.weight",
            )

            def parameter(name: str) -> Tensor | None:
                return source.tensor(f"{prefix}.{name}") if f"{prefix}.{name}" in stored else None

            vocabulary = functools.partial(source.tensor, head if head in stored else embedding)
            return cls(config, model.vocab_size, model.device, parameter, vocabulary)
        table, rows = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        states = dict(model.get_decoder().named_parameters())
        return cls(config, table.shape[0], table.device, states.get, lambda: rows)


def new_head(
    model: PreTrainedModel | NativeLM, options: TrainOptions, loss: Loss, counts: Tensor
) -> EagleHead:
    """Return a float32 head for `model` to train. counts: int64 [vocabulary], of each token in the answers."""
    weights = Weights.of(model)
    torch.manual_seed(options.seed)
    if options.start not in ("target", "random"):
        config, state, _ = load_head(options.start)
        config = replace(config, temperatures=())  # they were fitted to the old weights
        if options.intermediate_size > 0:
            config = replace(config, intermediate_size=options.intermediate_size)
            state = _resized(state, options.intermediate_size)
        config, state = _with_more_tokens(config, state, weights, options, counts)
        head = head_from(config, state, torch.float32, weights.device).train().requires_grad_(True)
        if config.own_embeddings:
            head.embed_tokens.requires_grad_(False)
        return head
    if options.draft_vocab_size < 0:
        options = replace(
            options, draft_vocab_size=_vocabulary_size(counts.sort(descending=True)[0])
        )
    usual = {"eagle": "eagle1", "hass": "eagle1", "dflash": "dflash"}.get(loss.name, "eagle3")
    kind = usual if options.head == "auto" else options.head
    require("layers", options.layers, f"0 for {kind}", kind == "dflash" or not options.layers)
    config = new_config(weights, 1 if kind == "eagle1" else 3, options)
    if kind == "dflash":
        config = _block_config(config, options, loss, counts)
    head = config.network().to(weights.device)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    if isinstance(head, Eagle3Head) and head.d2t is not None:
        _choose_vocabulary(head.d2t, counts)
    if options.start == "target" and config.version == 3:
        _start_from_target(head, weights)
    return head


def _resized(state: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """Return weights with MLPs of `size` units.

    If there are too many, those with the largest product of the norms of their weights are kept. New units contribute
    nothing at first.
    """
    state = dict(state)
    for gate in [name for name in state if name.endswith("gate_proj.weight")]:
        up, down = gate.replace("gate", "up"), gate.replace("gate", "down")
        norms = [state[gate].norm(dim=1), state[up].norm(dim=1), state[down].norm(dim=0)]
        weight = torch.stack(norms).float().prod(dim=0)
        chosen = weight.argsort(descending=True, stable=True)[:size].sort().values
        missing = size - len(chosen)
        for name in (gate, up):
            new = 0.02 * torch.randn(
                missing, state[name].shape[1], dtype=torch.float32, device="cpu"
            )
            state[name] = torch.cat([state[name][chosen], new.to(state[name])])
        state[down] = pad(state[down][:, chosen], (0, missing))
    return state


def _with_more_tokens(
    config: EagleConfig,
    state: dict[str, Tensor],
    weights: Weights,
    options: TrainOptions,
    counts: Tensor,
) -> tuple[EagleConfig, dict[str, Tensor]]:
    """Return the head with a vocabulary of `options.draft_vocab_size`, or one that covers the answers.

    It gets the most frequent missing tokens of the answers. Their rows are those of the target's head by the linear
    map that is the nearest to the head's own rows (least squares): as they stand, they would drown these.
    """
    if "d2t" not in state:
        return config, state
    old = state["d2t"].cpu() + torch.arange(len(state["d2t"]), dtype=torch.int64, device="cpu")
    preferred = counts.index_fill(0, old, counts.max() + 1).argsort(descending=True, stable=True)
    size = options.draft_vocab_size
    size = _vocabulary_size(counts[preferred]) if size < 0 else min(size, len(counts))
    new = preferred[len(old) : size]
    ids, order = torch.cat([old, new]).sort()
    name = next(name for name in state if name.endswith("lm_head.weight"))
    its = weights.vocabulary().cpu()[torch.cat([old, new])].float()
    alike = torch.linalg.lstsq(its[: len(old)], state[name].float(), driver="gelsy").solution
    weight = torch.cat([state[name], (its[len(old) :] @ alike).to(state[name])])
    places = torch.arange(len(ids), dtype=torch.int64, device="cpu")
    state = state | {name: weight[order], "d2t": (ids - places).to(state["d2t"])}
    return replace(config, draft_vocab_size=len(ids)), state


@torch.no_grad()
def start_from_text(head: EagleHead, teacher: HeadTeacher, batches: Sequence[Tensor]) -> None:
    """Initialise an EAGLE-1 head as the best linear prediction of the target's next hidden state.

    Its fusion becomes the least-squares solution over `batches` (int64 [sequences, length] each). Its layer adds
    nothing at first: there is no norm before its attention, so weights of a target's layer would get a wrong scale.
    """
    size, device = head.config.hidden_size, head.fc.weight.device
    products = torch.zeros(2 * size + 1, 3 * size + 1, dtype=torch.float64, device=device)
    for tokens in batches:
        features = teacher.read(tokens.to(device)).features.double()
        embedded = teacher.embed(head, tokens[:, 1:].to(device)).double()
        columns = [features[:, :-1], torch.ones_like(features[:, 1:, :1]), features[:, 1:]]
        rows = torch.cat([embedded, *columns], -1).flatten(0, 1)
        products += rows[:, : 2 * size + 1].T @ rows
    normal, targets = products.split([2 * size + 1, size], dim=1)
    normal.diagonal().add_(RIDGE * normal.diagonal().mean())
    solution = torch.linalg.solve(normal, targets).T.float()
    head.fc.weight.copy_(solution[:, :-1])
    head.fc.bias.copy_(solution[:, -1])
    for name, parameter in head.layers.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()


def new_config(weights: Weights, version: int, options: TrainOptions) -> EagleConfig:
    target, vocab_size = weights.config, weights.vocab_size
    heads = target.num_attention_heads
    rope = dict(getattr(target, "rope_parameters", None) or {})
    if rope.get("rope_type") not in STEADY_ROPES:
        rope = {"rope_type": "default", "rope_theta": DEFAULT_THETA}
    kv_heads = options.kv_heads or getattr(target, "num_key_value_heads", None) or heads
    require("kv_heads", kv_heads, f"divisors of the {heads} heads", heads % kv_heads == 0)
    units = options.intermediate_size
    whole = getattr(target, "intermediate_size", 4 * target.hidden_size)
    own_vocabulary = version == 3 and options.draft_vocab_size
    return EagleConfig(
        version=version,  # type: ignore[arg-type]
        hidden_size=target.hidden_size,
        intermediate_size=units if units > 0 else min(whole, MAX_UNITS if units else whole),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        target_hidden_size=target.hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=min(options.draft_vocab_size, vocab_size)
        if own_vocabulary
        else vocab_size,
        rms_norm_eps=getattr(target, "rms_norm_eps", 1e-6),
        rope=rope,
        max_position_embeddings=max(2048, *options.lengths),
        layer_ids=default_layer_ids(target.num_hidden_layers) if version == 3 else None,
        fc_bias=version == 1,
        qkv_bias=weights.parameter(f"layers.{target.num_hidden_layers - 1}.self_attn.q_proj.bias")
        is not None,
    )


def _block_config(
    config: EagleConfig, options: TrainOptions, loss: Loss, counts: Tensor
) -> DflashConfig:
    """Return the config of a DFlash head; the last token that no answer has stands for those to predict."""
    layers = options.layers or 2
    return DflashConfig(
        **{field.name: getattr(config, field.name) for field in fields(config)}
        | {
            "draft_vocab_size": config.vocab_size,
            "own_head": False,
            "qk_norm": True,
            "o_bias": config.qkv_bias,
            "num_layers": layers,
            "windows": (0,) * layers,
            "causal": (False,) * layers,
            "block_size": loss.steps + 1,
            "mask_token_id": int((counts == counts.min()).nonzero()[-1]),
        }
    )


def _vocabulary_size(counts: Tensor) -> int:
    """Return how many tokens make up COVERED of the answers, within the bounds; the first in `counts` are taken."""
    shares = counts.cumsum(0) / counts.sum().clamp(min=1)
    needed = int((shares < COVERED).sum()) + 1
    steps = -(-needed // VOCABULARY_STEP)
    return min(max(steps * VOCABULARY_STEP, MIN_VOCABULARY), MAX_VOCABULARY, len(counts))


def _choose_vocabulary(d2t: Tensor, counts: Tensor) -> None:
    """Set a map of the draft's vocabulary to the most frequent tokens, sorted by id."""
    best = counts.argsort(descending=True, stable=True)[: len(d2t)].sort().values
    places = torch.arange(len(d2t), device=d2t.device, dtype=torch.int64)
    d2t.copy_(best.to(d2t.device) - places)


@torch.no_grad()
def _start_from_target(head: EagleHead, weights: Weights) -> None:
    """Copy weights of the target that have the same shape and meaning.

    The fusion starts as the last of the hidden states. The target's last layers become the head's; that of an EAGLE-3
    head reads the hidden state alone at first; of their MLPs those units that the head has room for, with the largest
    weights. The target's final norm and rows of its language-model head become the head's.
    """
    size = head.config.hidden_size
    ids = head.target_ids()
    vocabulary = head.vocabulary_head()
    if vocabulary is not None:
        vocabulary.weight.copy_(weights.vocabulary()[... if ids is None else ids])
    first = weights.config.num_hidden_layers - head.config.num_layers
    parameters = dict(head.layers.named_parameters())
    sources = {}
    for name in parameters:
        number, _, within_layer = name.partition(".")
        sources[name] = weights.parameter(f"layers.{first + int(number)}.{within_layer}")
    if isinstance(head, Eagle3Head):
        norm_name = f"layers.{first}.input_layernorm.weight"
        sources["0.hidden_norm.weight"] = weights.parameter(norm_name)
    present = {name: source for name, source in sources.items() if source is not None}
    for name, source in _resized(present, head.config.intermediate_size).items():
        parameter = parameters[name]
        if source.shape == parameter.shape:
            parameter.copy_(source)
        elif source.ndim == 2 and parameter.shape == (source.shape[0], 2 * source.shape[1]):
            parameter[:, source.shape[1] :] = source
    norm, final = getattr(head, "norm", None), weights.parameter("norm.weight")
    if norm is not None and final is not None and final.shape == norm.weight.shape:
        norm.weight.copy_(final)
    head.fc.weight[:, -size:] += torch.eye(size, device=head.fc.weight.device, dtype=torch.float32)
