"""Weights of a folder in Hugging Face's layout, config.json with safetensors files."""

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, logging

from specengine.checkpoints.quantized import CodeFormat, QuantizedMatrix, joined
from specengine.checkpoints.safetensors_file import (
    Stack,
    StoredTensor,
    require_files,
    stacked,
    tensors_of,
)
from specengine.errors import CheckpointError, UnsupportedModelError, refuse_misfits, restating
from specengine.files import read_text
from specengine.models.configs import auto_class, family_of, layer_template
from specengine.models.mtp import parts_in
from specengine.models.native.weights import KIND_OF, Source, Weight, bar_options, upright

T = TypeVar("T")
Stored = StoredTensor | Stack | QuantizedMatrix
# prefixes of its tensors
_LANGUAGE = "model.language_model.", "language_model.model.", "model.text_model."
_MASKS = (".attn.bias", ".attention.bias", ".masked_bias", ".inv_freq")
_HEADS = ("lm_head.", "language_model.lm_head.")


def _of_language_model(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors of the language model in a model that reads pictures too, named as in one of its own.

    UnsupportedModelError where they have none of the known names.
    """
    prefix = next(
        (prefix for prefix in _LANGUAGE if f"{prefix}embed_tokens.weight" in tensors), None
    )
    if prefix is None:
        raise UnsupportedModelError(
            "native: it names the tensors of its language model in no known way"
        )
    prefixes = {prefix: "model.", **dict.fromkeys(_HEADS, "lm_head."), "mtp.": "mtp."}
    return {
        new + name.removeprefix(old): tensor
        for old, new in prefixes.items()
        for name, tensor in tensors.items()
        if name.startswith(old)
    }


class FolderSource(Source):
    """Read a folder with config.json and safetensors files.

    Takes the language model alone where a model reads pictures too: `config` is its own, `whole` the folder's.
    Raises UnsupportedModelError for weights that are held otherwise, CheckpointError for a damaged file.
    """

    def __init__(
        self,
        folder: Path,
        config: PretrainedConfig,
        dtype: torch.dtype,
        *,
        name: str,
        whole: PretrainedConfig | None = None,
        quantized: CodeFormat | None = None,
    ) -> None:
        """quantized: how matrices are; those that GGUF's blocks hold are packed in them, others are numbers."""
        self.folder, self.config, self.dtype, self.name = folder, config, dtype, name
        self._whole, self._quantized = whole or config, quantized
        layers = int(config.get_text_config(decoder=True).num_hidden_layers)
        tensors: dict[str, Stored] = {
            key: tensor for file in require_files(folder) for key, tensor in tensors_of(file)
        }
        if quantized is not None:
            tensors = joined(tensors, quantized)
        if self._whole is not config:
            tensors = _of_language_model(tensors)
        for stored, renamed in family_of(config).stored.items():
            tensors = {key.replace(stored, renamed): tensor for key, tensor in tensors.items()}
        drafts = parts_in(tensors, layers)  # heads that only a draft reads
        unread = tuple(f"{module.transformers}." for module in family_of(config).unread(config))
        tensors = {
            key: stored_tensor
            for key, stored_tensor in tensors.items()
            if key not in drafts and not key.startswith(unread)
        }
        self._tensors = stacked(tensors, family_of(config).renamed)
        if quantized is not None:
            expected, family = layer_template(config), family_of(config)
            # a tied head, and what old files hold of positions
            tolerated = f"{family.head.transformers}.weight", ".inv_freq"
            refuse_misfits(
                f"model {name!r}: its quantized weights do not fit its config.json",
                expected,
                {
                    key: shape
                    for key, shape in self.shapes().items()
                    if key in expected or not key.endswith(tolerated)
                },
                "unused",
            )

    @cached_property
    def blocks(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(self._kinds.values())

    @cached_property
    def _kinds(self) -> dict[str, str]:
        """The kind of GGUF's blocks of each matrix that is packed in them; those stand for bfloat16."""
        by_name = {
            name: {getattr(one, "kind", "") for one in getattr(stored, "matrices", (stored,))}
            for name, stored in self._tensors.items()
            if self.dtype is torch.bfloat16 and ".kv_b_proj." not in name
        }
        return {name: kind for name, (kind, *others) in by_name.items() if kind and not others}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self._tensors.items()}

    def weights(self, *, blocks: Collection[str] = ()) -> Iterator[Weight]:
        kinds = {name: kind for name, kind in self._kinds.items() if kind in blocks}
        for name, stored in self._tensors.items():
            flat, dtype = stored.flat(), self._dtype_of(name)
            kind = kinds.get(name, "")

            def rows(
                first: int,
                last: int,
                flat: Any = flat,
                dtype: torch.dtype = dtype,
                kind: str = kind,
            ) -> Tensor:
                return flat.read(first, last, kind) if kind else flat.read(first, last).to(dtype)

            yield upright(self.config, Weight(name, kind or KIND_OF[dtype], flat.shape, rows))

    def tensor(self, name: str) -> Tensor:
        stored = self._tensors[name]
        return stored.read(0, stored.shape[0]).to(self._dtype_of(name))

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if self.is_exact(name) else self.dtype

    def model(self, *, packed: bool = False) -> PreTrainedModel:
        if self._quantized is not None:
            return super().model(packed=packed)
        with quiet_loading_bars(), torch.device("cpu"):
            return auto_class(self._whole).from_pretrained(
                self.folder, config=self._whole, dtype=self.dtype, trust_remote_code=False
            )

    @cached_property
    def generation_config(self) -> GenerationConfig:
        return generation_config_of(self.folder)


def generation_config_of(folder: Path) -> GenerationConfig:
    """Return the defaults that transformers gives a folder's model.

    They are those of generation_config.json, or of config.json where that file is missing or no JSON. CheckpointError
    where its values make no such config.
    """
    file = folder / "generation_config.json"
    # over values of other types; transformers' loading fails by them as well
    with restating(
        Exception,
        lambda error: CheckpointError(
            f"{folder}: generation_config.json: its values are not a valid generation config; correct or remove it "
            f"({type(error).__name__}: {' '.join(str(error).split()):.300})"
        ),
    ):
        try:
            fields = json.loads(read_text(file))
        except (OSError, ValueError):
            return GenerationConfig.from_pretrained(
                folder, config_file_name="config.json", _from_model_config=True
            )
        return GenerationConfig.from_dict(fields)


@contextlib.contextmanager
def quiet_loading_bars() -> Iterator[None]:
    """Show transformers' bars over reading weights where ours are shown; those over downloads stay as they are."""
    before = logging.set_tqdm_hook(
        lambda make, values, options: make(*values, **options | bar_options())
    )
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def left_out(model: PreTrainedModel, unexpected: Iterable[str]) -> Iterator[str]:
    """Yield the unexpected tensors of a file whose module the model has, in some layer.

    The others (towers for pictures, heads for predicting several tokens, values) are no part of the language model, and
    neither are the causal masks of old files.
    """
    has = {_any_layer(name) for name, _ in model.named_modules()} - {""}
    # values, no layers
    has -= {name.rpartition(".")[0] for name in has if name.endswith(".layers") and "*" not in name}
    names = set(unexpected)
    for name in names - parts_in(
        names, int(getattr(model.config.get_text_config(), "num_hidden_layers", 0) or 0)
    ):
        module = _any_layer(name.rpartition(".")[0])
        has_module = module in has or f"{model.base_model_prefix}.{module}" in has
        if has_module and not name.endswith(_MASKS):
            yield name


def _any_layer(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", f".{name}")[1:]
