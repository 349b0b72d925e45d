"""Draft heads on disk: folders of `config.json` and `model.safetensors` or `pytorch_model.bin`; whether they fit."""

import json
import math
import os
import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from specengine.checkpoints import gguf, layouts
from specengine.checkpoints.checks import why_absent, wrapped
from specengine.checkpoints.layouts import Layout, Verifier, listed, with_prefix
from specengine.errors import (
    CheckpointError,
    kind_of,
    require_intact,
    restating,
    shown,
    why_not_loaded,
)
from specengine.files import INDEX, WHOLE, atomic, read_object, write_whole
from specengine.models.dflash import DflashConfig
from specengine.models.eagle import (
    EagleConfig,
    EagleHead,
    default_layer_ids,
    embed_for,
    rope_frequencies,
    within,
)
from specengine.models.kv_cache import LanguageModel

__all__ = [
    "Checkpoint",
    "Convention",
    "HeadOptions",
    "HeadReading",
    "State",
    "Verifier",
    "head_folder",
    "is_head",
    "listed",
    "load_head",
    "one_step_agreement",
    "save_head",
    "writer",
]

MAX_WEIGHT = 1e30  # nearer to what float32 holds, sums of a few are not finite
State = dict[str, Tensor]  # names as of EagleHead.state_dict()
_DTYPES = {"f32": torch.float32, "f16": torch.float16, "i64": torch.int64}  # of kinds in GGUF files
_GGUF_NAMES = {
    "token_embd.": "embed_tokens.",
    "output.": "lm_head.",
    "output_norm.": "norm.",
    "enc.output_norm.": "input_norm.",
    "blk.0.attn_norm.": "layers.0.input_layernorm.",
    "blk.0.hidden_norm.": "layers.0.hidden_norm.",  # before llama.cpp read such heads
    "blk.0.attn_norm_2.": "layers.0.hidden_norm.",
    "blk.0.attn_q.": "layers.0.self_attn.q_proj.",
    "blk.0.attn_k.": "layers.0.self_attn.k_proj.",
    "blk.0.attn_v.": "layers.0.self_attn.v_proj.",
    "blk.0.attn_output.": "layers.0.self_attn.o_proj.",
    "blk.0.ffn_norm.": "layers.0.post_attention_layernorm.",
    "blk.0.ffn_gate.": "layers.0.mlp.gate_proj.",
    "blk.0.ffn_up.": "layers.0.mlp.up_proj.",
    "blk.0.ffn_down.": "layers.0.mlp.down_proj.",
}


@dataclass(frozen=True)
class HeadReading:
    """The dialect that a checkpoint was read in.

    layout    family of the layout, whose tensor names it has
    producer  the layout, whose meaning the fields have
    kind      of head: EAGLE-1, EAGLE-3, DFlash, DFlash2, DSpark or Domino
    notes     fields that were not stated and how they were taken, tensors that were left out; for people
    """

    layout: str
    producer: str
    kind: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}, {self.layout} layout, fields as {self.producer} means them"


class Checkpoint(NamedTuple):
    """A head as read: `models.eagle.head_from(config, state, ...)` makes it run."""

    config: EagleConfig
    state: State
    dialect: HeadReading


@dataclass(frozen=True)
class HeadOptions:
    """Options for a head whose config is ambiguous or wrong (see load_head)."""

    producer: str | None = None
    layer_ids: tuple[int, ...] | None = None


def is_head(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder, or a GGUF file, holds a draft head, not a whole model."""
    folder = Path(path)
    if folder.is_file():
        return gguf.head_architecture(folder) == gguf.EAGLE
    if not (folder / "config.json").is_file():
        return False
    if layouts.is_head(_read_config(folder)):
        return True
    with suppress(CheckpointError, SafetensorError, OSError):
        files = _weight_files(folder)
        names = (
            set(_read_tensors(folder))
            if files[0].suffix == ".bin"
            else {name for file in files for name in safe_open(file, framework="pt").keys()}  # noqa: SIM118
        )
        return "fc.weight" in names and any(
            name.startswith(("midlayer.", "layers.0.")) for name in names
        )
    return False


def head_folder(draft: str, *, offline: bool = False) -> Path | None:
    """Return the folder of the head with this path or Hub id, fetched if need be, or its file; None for no head."""
    if Path(draft).exists():
        return Path(draft) if is_head(draft) else None
    if why_absent(draft, offline=offline) is not None:
        return None
    try:
        config, _ = PretrainedConfig.get_config_dict(draft, local_files_only=offline)
        if not layouts.is_head(config):
            return None
        for name in ("config.json", WHOLE, INDEX, "pytorch_model.bin"):
            file = cached_file(
                draft,
                name,
                local_files_only=offline,
                _raise_exceptions_for_missing_entries=False,
            )
            if file is not None and name == INDEX:
                get_checkpoint_shard_files(draft, file, local_files_only=offline)
            if file is not None and name != "config.json":
                return Path(file).parent
    except (OSError, KeyError, ValueError):  # or a damaged index
        return None  # loading it as a model says why it cannot be had
    return None


def load_head(
    path: str | os.PathLike[str],
    *,
    producer: str | None = None,
    layer_ids: tuple[int, ...] | None = None,
) -> Checkpoint:
    """Read a head of any layout in checkpoints/layouts, or of EAGLE-3 in a GGUF file.

    producer   the layout whose meaning the config's fields have, where the config does not tell
    layer_ids  the target's hidden states to read, numbered as in transformers' `hidden_states`, instead of the config's

    Raises CheckpointError for files that are damaged, tensors that are unused, missing, mis-shaped, not finite or
    beyond any weight, an inconsistent map of the vocabulary, and fields that are ambiguous or nonsense. Tensors that
    published heads carry and the EAGLE repository does not read are left out, with a note. Pickles are read as weights
    only.
    """
    folder = Path(path)
    require_intact(
        f"producer: got {producer!r}, accepted {', '.join(layouts.names())}",
        producer is None or producer in layouts.names(),
    )
    place, names = (folder, _GGUF_NAMES) if folder.is_file() else (folder / "config.json", {})
    raw, tensors = _read_gguf(folder) if names else (_read_config(folder), _read_tensors(folder))
    with restating(CheckpointError, lambda error: CheckpointError(f"{place}: {error}")):
        layout_class = layouts.layout_of(raw)
        if producer is not None:  # which may only narrow it down
            family, layout_class = layout_class.family, layouts.named(producer)
            require_intact(
                f"producer: got {producer!r}, but the config has the {family} layout",
                layout_class.family == family,
            )
        layout = layout_class(
            raw,
            [with_prefix(name, names) for name in tensors],
            chosen=producer is not None,
            layer_ids=layer_ids,
        )
        config = (DflashConfig if layout.family == "dflash" else EagleConfig)(
            version=layout.version, **layout.read()
        )
        # each number in range, they may make no positions
        with restating(
            (ArithmeticError, ValueError),
            lambda error: CheckpointError(f"rope_parameters: {error}"),
        ):
            frequencies, scale = rope_frequencies(config)
        require_intact(
            f"rope_parameters: {shown(dict(config.rope))} give frequencies that are not finite",
            bool(frequencies.isfinite().all()) and math.isfinite(scale),
        )
    prefixes = names or layout.prefixes(raw, layout.version)
    state: State = {}
    for name, tensor in tensors.items():
        new = with_prefix(name, prefixes)
        require_intact(f"{folder}: two tensors have the name {new}", new not in state)
        state[new] = tensor
    if "fc.weight" not in state and (faults := wrapped(["fc.weight"], tensors)):
        raise CheckpointError(f"{folder}: {faults[0]}")
    state = layout.converted(state)
    notes = [
        *layout.notes,
        *_leave_out(config, state),
        *_take_vocabulary_map(folder, config, state),
    ]
    fits = (config.draft_vocab_size, config.hidden_size) == (
        config.vocab_size,
        config.target_hidden_size,
    )
    if config.own_head and config.version == 3 and fits and "lm_head.weight" not in state:
        config = replace(config, own_head=False)
        notes.append("lm_head.weight is missing: the target's head takes its place")
    _check(folder, config, state, {new: old for old, new in prefixes.items()})
    return Checkpoint(
        config, state, HeadReading(layout.family, layout.name(), config.kind, tuple(notes))
    )


def writer(layout: str) -> type[Layout]:
    """Return the layout that is written under this name; CheckpointError lists the names."""
    writers = {
        layout.family: layout
        for layout in map(layouts.named, layouts.names())
        if "written" in vars(layout)
    }
    require_intact(f"layout: got {layout!r}, accepted {', '.join(writers)}", layout in writers)
    return writers[layout]


def save_head(
    config: EagleConfig,
    state: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    layout: str = "",
    *,
    verifier: Verifier | None = None,
) -> None:
    """Write a head; reading it back gives the same config and the same bits.

    Each file is written next to its place and then moved there. layout: by default the one of heads of its kind;
    verifier: the model it was made for, whose name some layouts need. CheckpointError where that is missing or the
    layout has no word for a variant.
    """
    usual = "dflash" if isinstance(config, DflashConfig) else "official"
    chosen, folder = writer(layout or usual), Path(path)
    require_intact(
        f"layout: got {layout}, accepted {usual} for {config.kind} heads",
        (chosen.family == "dflash") == (usual == "dflash"),
    )
    fusion = state.get("fc.weight")  # which every whole head has
    dtype = "float32" if fusion is None else str(fusion.dtype).removeprefix("torch.")
    raw = chosen.written(config, dtype, verifier or Verifier())
    _check(folder, config, dict(state), {})
    back = {new: old for old, new in chosen.prefixes(raw, config.version).items()}
    tensors = {
        with_prefix(name, back): tensor.detach().cpu().contiguous()
        for name, tensor in state.items()
    }
    if "d2t" in tensors:
        ids = tensors["d2t"] + torch.arange(
            config.draft_vocab_size, dtype=torch.int64, device="cpu"
        )
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool, device="cpu").index_fill_(
            0, ids, True
        )
    folder.mkdir(parents=True, exist_ok=True)
    with atomic(folder / "model.safetensors") as file:
        save_file(tensors, file, metadata={"format": "pt"})
    write_whole(folder / "config.json", json.dumps(raw, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------------- files


def _read_config(folder: Path) -> dict[str, Any]:
    with restating(
        (OSError, ValueError), lambda error: CheckpointError(f"{folder / 'config.json'}: {error}")
    ):
        return read_object(folder / "config.json")


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files, or else the pickles."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    require_intact(f"{folder}: holds neither model.safetensors nor pytorch_model.bin", bool(files))
    return files


def _read_tensors(folder: Path) -> State:
    tensors: State = {}
    for file in _weight_files(folder):
        try:
            stored = (
                load_file(file)
                if file.suffix != ".bin"
                else torch.load(file, "cpu", weights_only=True)
            )
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
            raise CheckpointError(
                f"{file}: cannot be read as weights ({why_not_loaded(error)})"
            ) from error
        require_intact(
            f"{file}: must hold nothing but named tensors",
            isinstance(stored, dict)
            and all(isinstance(tensor, Tensor) for tensor in stored.values()),
        )
        twice = sorted(tensors.keys() & stored.keys())
        require_intact(f"{file}: {', '.join(twice)} are in another file as well", not twice)
        tensors |= stored
    return dict(_unpacked(folder, name, tensors) for name in tensors)


def _read_gguf(path: Path) -> tuple[dict[str, Any], State]:
    """Return the config and the tensors of a GGUF file; numbers in blocks become bfloat16."""
    with gguf.read(path) as file:
        raw, tensors = gguf.eagle_config(file), {}
        for name, stored in file.tensors.items():
            tensor = torch.from_numpy(file.numbers(name)).to(
                _DTYPES.get(stored.kind, torch.bfloat16)
            )
            turned = name.startswith(("blk.0.attn_q.", "blk.0.attn_k."))
            if turned and len(tensor) % raw["head_dim"] == 0:  # neighbours, not halves of a head
                tensor = (
                    tensor.unflatten(0, (-1, raw["head_dim"] // 2, 2)).transpose(1, 2).flatten(0, 2)
                )
            elif name == "d2t" and "blk.0.hidden_norm.weight" not in file.tensors:  # ids
                tensor = tensor - torch.arange(
                    tensor.numel(), dtype=torch.int64, device="cpu"
                ).view_as(tensor)
            tensors[name] = tensor
    tensors.pop(gguf.ROPE_FACTORS, None)  # which the config tells
    return raw, tensors


def _unpacked(folder: Path, name: str, tensors: State) -> tuple[str, Tensor]:
    """Return a tensor under its name; in bfloat16 where it is stored as blocks, uint8 NAME.KIND, of a kind of ggml."""
    tensor, (base, _, kind) = tensors[name], name.rpartition(".")
    if tensor.dtype != torch.uint8 or kind.lower() not in gguf.KINDS:
        return name, tensor
    block = gguf.KINDS[kind.lower()]
    require_intact(
        f"{folder}: {name} has shape {list(tensor.shape)}, accepted rows of whole blocks of {block.bytes} bytes, "
        f"and no {base} beside them",
        tensor.ndim == 2 and not tensor.shape[1] % block.bytes and base not in tensors,
    )
    shape = len(tensor), tensor.shape[1] // block.bytes * block.elements
    return base, torch.from_numpy(gguf.dequantize(kind.lower(), tensor.numpy(), shape)).bfloat16()


# ---------------------------------------------------------------------------------------------------- reading tensors


def _leave_out(config: EagleConfig, state: State) -> list[str]:
    """Remove the tensors of published heads that the EAGLE repository does not read. Returns notes."""
    reasons = {
        name: "computed from the config" for name in state if name.endswith("rotary_emb.inv_freq")
    }
    if config.version == 1:
        reasons["lm_head.weight"] = "EAGLE-1 reads the target's head"
    if not config.fc_bias:
        reasons["fc.bias"] = "this head's fusion has no bias"
    notes = [f"{name} is left out: {reason}" for name, reason in reasons.items() if name in state]
    for name in reasons:
        state.pop(name, None)
    return notes


def _take_vocabulary_map(folder: Path, config: EagleConfig, state: State) -> list[str]:
    """Check `d2t` and `t2d`; keep in the state those offsets that EagleHead has. Returns notes.

    Column d stands for target token d + d2t[d]. Whole vocabularies need no map. Marks and offsets that nobody has set
    are all zero: such marks say nothing, such offsets lead to the first tokens.
    """
    notes: list[str] = []
    d2t, t2d = state.pop("d2t", None), state.pop("t2d", None)
    draft, target = config.draft_vocab_size, config.vocab_size
    if config.version == 1:
        unused = [name for name, tensor in (("d2t", d2t), ("t2d", t2d)) if tensor is not None]
        require_intact(f"{folder}: unused tensors {', '.join(unused)}", not unused)
        return notes
    require_intact(
        f"{folder}: t2d: bool [{target}] is needed, got {kind_of(t2d)}",
        t2d is None or (t2d.shape == (target,) and t2d.dtype in (torch.bool, torch.uint8)),
    )
    if t2d is not None and not t2d.any():
        notes.append("t2d marks no token: ignored")
        t2d = None
    if d2t is None:
        require_intact(
            f"{folder}: d2t is missing, but {draft} of {target} tokens are drafted",
            draft >= target,
        )
        return notes
    require_intact(
        f"{folder}: d2t: int64 [{draft}] is needed, got {kind_of(d2t)}",
        d2t.shape == (draft,) and not d2t.is_floating_point() and d2t.dtype is not torch.bool,
    )
    ids = d2t.to(torch.int64) + torch.arange(draft, dtype=torch.int64, device="cpu")
    if ids[0] < 0 or ids[-1] >= target or not bool((ids[1:] > ids[:-1]).all()):
        hint = " (they look like ids, not offsets)" if bool((d2t[1:] > d2t[:-1]).all()) else ""
        raise CheckpointError(
            f"{folder}: d2t: offsets to ascending tokens below {target} are needed, got {ids.min()} to {ids.max()}"
            f"{hint}"
        )
    require_intact(
        f"{folder}: t2d and d2t disagree on which tokens are drafted",
        t2d is None or torch.equal(t2d.bool().nonzero().flatten(), ids),
    )
    if draft == target:
        return [*notes, "d2t is the identity"]
    if not d2t.any():
        notes.append(f"d2t is all zero: the first {draft} of {target} tokens are drafted")
    state["d2t"] = d2t.to(torch.int64)
    return notes


def _check(folder: Path, config: EagleConfig, state: State, back: Mapping[str, str]) -> None:
    """Raise CheckpointError listing all tensors that are unused, missing, mis-shaped, no floats or no weights."""
    with torch.device("meta"):
        expected = {
            name: tuple(tensor.shape) for name, tensor in config.network().state_dict().items()
        }
    wrong = {
        "unused": [f"{name} {list(state[name].shape)}" for name in state if name not in expected],
        "missing": [
            f"{name} {list(shape)}" for name, shape in expected.items() if name not in state
        ],
        "mis-shaped": [
            f"{name} {list(state[name].shape)} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in state and tuple(state[name].shape) != shape
        ],
    }
    weights = {name: tensor for name, tensor in state.items() if name in expected and name != "d2t"}
    wrong["not float32, bfloat16 or float16"] = [
        n
        for n, tensor in weights.items()
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16)
    ]
    if not any(wrong.values()):
        largest = {name: float(tensor.abs().max()) for name, tensor in weights.items()}
        wrong["not finite"] = [name for name, most in largest.items() if not math.isfinite(most)]
        wrong[f"beyond {MAX_WEIGHT:g}"] = [
            n for n, most in largest.items() if MAX_WEIGHT < most < math.inf
        ]
    problems = [
        f"{kind}: {', '.join(with_prefix(n, back) for n in names)}"
        for kind, names in wrong.items()
        if names
    ]
    require_intact(
        f"{folder}: its tensors are not those of a head of {config.kind} of width {config.hidden_size}; "
        f"{'; '.join(problems)}",
        not problems,
    )


# ---- a head's one-step agreement with the target, for each convention of counting the target's layers

# Producers number the same hidden states differently. A head that reads the wrong ones drafts without an error, only
# worse, so its agreement is measured.

CERTAIN = 2.0  # standard errors by which another convention must be better to be reported


@dataclass(frozen=True)
class Convention:
    """A way of counting layers. hits: bool [rows], whether the head's best token was the target's."""

    name: str
    layer_ids: tuple[int, ...]
    hits: Tensor

    @property
    def agreement(self) -> float:
        """Return the share of hits, 0 to 1."""
        return float(self.hits.float().mean())

    def surely_better_than(self, other: "Convention") -> bool:
        """Return whether the difference, row by row, is beyond chance."""
        differences = self.hits.float() - other.hits.float()
        error = float(differences.std()) / math.sqrt(len(differences))
        return float(differences.mean()) > CERTAIN * error


def conventions(config: EagleConfig, layers: int) -> dict[str, tuple[int, ...]]:
    """Return the hidden states that the head may have been made for, by name; the config's come first."""
    as_read, usual = config.feature_ids(layers), default_layer_ids(layers)
    if config.version == 1:
        return {"as read": as_read}
    candidates = {
        "as read": as_read,
        "as read, + 1": tuple(i + 1 for i in as_read),
        "as read, - 1": tuple(i - 1 for i in as_read),
        "EAGLE": usual,
        "EAGLE, + 1": tuple(i + 1 for i in usual),
        "EAGLE, - 1": tuple(i - 1 for i in usual),
    }
    names: dict[tuple[int, ...], str] = {}
    for name, ids in candidates.items():
        if len(ids) == config.num_features and all(0 <= i < layers for i in ids):
            names.setdefault(ids, name)
    return {name: ids for ids, name in names.items()}


@torch.inference_mode()
def one_step_agreement(
    head: EagleHead, target: LanguageModel, texts: list[list[int]]
) -> list[Convention]:
    """Return each convention's hits over all texts, in order of `conventions`.

    texts: token ids, at least 3 each; drafts are made for text that the target wrote.
    """
    by_name = conventions(head.config, target.layers)
    target.prepare_features(tuple({i for ids in by_name.values() for i in ids}))
    hits = [_hits(head, target, text, list(by_name.values())) for text in texts]
    return [
        Convention(name, ids, row)
        for (name, ids), row in zip(by_name.items(), torch.cat(hits, dim=1), strict=True)
    ]


def _hits(
    head: EagleHead, target: LanguageModel, text: list[int], candidates: list[tuple[int, ...]]
) -> Tensor:
    """Return whether the head's best token after each token but the first is the target's: bool [candidates, rows]."""
    read = tuple(sorted({i for ids in candidates for i in ids}))
    extend: Any = target.extend  # which gives what is asked for
    logits, features = extend(target.new_cache(len(text)), text, read, logits="all")
    state_of = dict(zip(read, features.chunk(len(read), dim=-1), strict=True))
    tokens = torch.tensor(text[1:], device=target.device, dtype=torch.int64)
    embeddings = embed_for(head, target, tokens)
    side_by_side = (torch.cat([state_of[i] for i in ids], dim=-1) for ids in candidates)
    return torch.stack(
        [_guesses(head, target, states, embeddings) for states in side_by_side]
    ) == logits[1:].argmax(-1)


def _guesses(
    head: EagleHead, target: LanguageModel, features: Tensor, embeddings: Tensor
) -> Tensor:
    """Return the head's best token after each token but the first, int64 [rows]; features: one row more."""
    hidden = head.fuse(features[:-1].to(head.dtype))
    positions = torch.arange(len(hidden), device=hidden.device, dtype=torch.int64)
    states = head(
        hidden[None], embeddings[None], positions[None], within(head.config.sliding_window)
    )[0]
    logits = head.logits(states)
    if logits is None:
        logits = target.head(head.readout(states))
    best, target_ids = logits.argmax(-1), head.target_ids()
    return best if target_ids is None else target_ids[best]
