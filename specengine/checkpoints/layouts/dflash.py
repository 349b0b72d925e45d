"""The layout of the DFlash repository, which vLLM and SGLang read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from specengine.checkpoints.layouts import MAX_DEPTHS, NEAR, Layout, Verifier, require_field
from specengine.errors import require_intact, shown

if TYPE_CHECKING:
    from specengine.models.dflash import DflashConfig

FULL = "full_attention"
KNOWN = {"block_size", "causal", "mask_token_id", "num_target_layers", "target_layer_ids"}


class DflashLayout(Layout):
    """A flat config of Qwen3's fields, and `dflash_config`. Layer ids count layers by their outputs."""

    family = "dflash"
    marks = ("dflash_config",)
    architectures = ("DFlashDraftModel",)

    def read_version(self) -> Literal[3]:
        return 3  # which reads the same hidden states

    def read(self) -> dict[str, Any]:
        fields, block = self.fields, self.fields.nested("dflash_config")
        stated = {name for name, value in block.raw.items() if value not in (None, False, "dflash")}
        unknown = sorted(stated - KNOWN)
        require_intact(
            f"dflash_config: unknown {', '.join(map(shown, unknown))}, known are {', '.join(sorted(KNOWN))}",
            not unknown,
        )
        common, ids = self.read_layer(fields), block.ids("target_layer_ids")
        require_intact("dflash_config.target_layer_ids: is missing", bool(ids))
        bias = fields.flag("attention_bias")
        size = (block if "block_size" in block else fields).size("block_size", most=MAX_DEPTHS)
        require_field("block_size", size, f"2 to {MAX_DEPTHS}", size > 1)
        layers = fields.size("num_hidden_layers", most=MAX_DEPTHS)
        types = fields.texts("layer_types") or [FULL] * layers
        require_field(
            "layer_types",
            types,
            f"{layers} of {FULL}, {NEAR}",
            len(types) == layers and {FULL, NEAR}.issuperset(types),
        )
        near = [kind == NEAR for kind in types]
        window = fields.size("sliding_window") if any(near) else 0
        holder, name = (fields, "is_causal") if "is_causal" in fields else (block, "causal")
        return common | {
            "own_embeddings": False,
            "own_head": False,
            "qk_norm": True,
            "qkv_bias": bias,
            "o_bias": bias,
            "layer_ids": self._layer_ids([i + 1 for i in ids], ids),
            "sliding_window": 0,
            "block_size": size,
            "mask_token_id": block.size("mask_token_id", most=common["vocab_size"] - 1),
            "num_layers": layers,
            "windows": tuple(window * is_near for is_near in near),
            "causal": tuple(holder.flag(name, default=is_near) for is_near in near),
        }

    @classmethod
    def written(cls, config: DflashConfig, dtype: str, verifier: Verifier) -> dict[str, Any]:  # type: ignore[override]
        windows = {window for window in config.windows if window}
        usual = config.causal == tuple(map(bool, config.windows))
        cls.refuse(
            qkv_bias=config.qkv_bias != config.o_bias,
            windows=len(windows) > 1,
            causal=len(set(config.causal)) > 1 and not usual,
        )
        return cls.layer_config(config) | {
            "architectures": list(cls.architectures),
            "model_type": "qwen3",
            "num_hidden_layers": config.num_layers,
            "attention_bias": config.qkv_bias,
            "layer_types": [NEAR if window else FULL for window in config.windows],
            "sliding_window": max(windows, default=None),
            "is_causal": None if usual else config.causal[0],
            "block_size": config.block_size,
            "dflash_config": {
                "mask_token_id": config.mask_token_id,
                "target_layer_ids": [i - 1 for i in config.layer_ids or ()],
            },
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
        }
