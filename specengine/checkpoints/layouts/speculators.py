"""The layout of speculators, which vLLM reads: the decoder layer's config is an object of its own."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from specengine.checkpoints.layouts import (
    BLOCKS,
    LAYER_IDS,
    HeadFields,
    Layout,
    Verifier,
    require_field,
)
from specengine.errors import require_intact, shown

if TYPE_CHECKING:
    from specengine.models.eagle import EagleConfig

MAX_TOKENS = 64  # of a chain
VERSIONS: dict[str, Literal[1, 3]] = {"eagle": 1, "eagle3": 3}


def read_nested_layer(fields: HeadFields, *accepted: str) -> HeadFields:
    """Return the fields of the decoder layer, an object of one of the accepted model types."""
    require_intact("transformer_layer_config: is missing", "transformer_layer_config" in fields)
    layer = fields.nested("transformer_layer_config")
    kind = layer.raw.get("model_type")
    require_intact(
        f"transformer_layer_config.model_type: got {shown(kind)}, accepted {' or '.join(accepted)}",
        kind in accepted,
    )
    return layer


class Speculators(Layout):
    """EAGLE-1 and EAGLE-3 with a layer of Llama or of Qwen3. A written config names the target."""

    family = "speculators"
    marks = ("speculators_model_type",)
    names_target = True

    @classmethod
    def prefixes(cls, raw: Mapping[str, Any], version: int) -> dict[str, str]:
        return {"transformer.": "layers.0.", "fusion_fc.": "fc."} if version == 1 else {}

    def read_version(self) -> Literal[1, 3]:
        kind = self.fields.raw["speculators_model_type"]
        require_intact(
            f"speculators_model_type: got {shown(kind)}, known are {', '.join((*VERSIONS, *BLOCKS))}",
            isinstance(kind, str) and kind in VERSIONS,
        )
        return VERSIONS[kind]

    def read(self) -> dict[str, Any]:
        layer = read_nested_layer(self.fields, "llama", "qwen3")
        require_intact(
            "transformer_layer_config.layer_types: drafts of several layers are not supported",
            "sliding_attention" not in layer.texts("layer_types")[1:],
        )
        bias = layer.flag("attention_bias")
        common = self.read_layer(layer) | {
            "qkv_bias": bias,
            "o_bias": bias,
            "qk_norm": layer.raw["model_type"] == "qwen3",
        }
        if self.version == 1:
            require_intact(
                "layernorms: this variant of EAGLE-1 is not supported",
                not self.fields.flag("layernorms"),
            )
            return common | {"fc_bias": self.fields.flag("fusion_bias")}
        ids = self.fields.ids()
        return (
            common
            | self.read_fusion(ids, ids)
            | {"norm_recurrent": self.fields.flag("norm_output")}
        )

    @classmethod
    def written(cls, config: "EagleConfig", dtype: str, verifier: Verifier) -> dict[str, Any]:
        """Return the config to write (see Layout). Its readers load shared tensors by the target's name."""
        require_field(
            "target",
            verifier.name,
            "the name of the model that the head was made for",
            bool(verifier.name),
        )
        require_field(
            "tokens",
            verifier.tokens,
            f"a whole number, 1 to {MAX_TOKENS}",
            type(verifier.tokens) is int and 1 <= verifier.tokens <= MAX_TOKENS,
        )
        cls.refuse(norm_logits_false=not config.norm_logits)
        require_intact(
            "qkv_bias, o_bias: the speculators layout has one field for both; set both or none",
            config.qkv_bias == config.o_bias,
        )
        layer = cls.layer_config(config) | {
            "attention_bias": config.qkv_bias,
            "num_hidden_layers": 1,
            "model_type": "qwen3" if config.qk_norm else "llama",
        }
        algorithm = next(name for name, version in VERSIONS.items() if version == config.version)
        raw: dict[str, Any] = {
            "speculators_model_type": algorithm,
            "transformer_layer_config": layer,
            "dtype": dtype,
            "speculators_config": {
                "algorithm": algorithm,
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": verifier.tokens}
                ],
                "verifier": {
                    "architectures": list(verifier.architectures),
                    "name_or_path": verifier.name,
                },
            },
        }
        if config.version == 1:
            return raw | {
                "architectures": ["EagleSpeculator"],
                "fusion_bias": config.fc_bias,
                "layernorms": False,
            }
        cls.refuse(fc_bias=config.fc_bias)
        # vLLM counts the layer ids of the official layout alone
        layer["num_aux_hidden_states"] = config.num_features
        return raw | {
            "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden_size
            if config.target_hidden_size != config.hidden_size
            else None,
            "norm_output": config.norm_recurrent,
            LAYER_IDS: None if config.layer_ids is None else list(config.layer_ids),
            **cls.fusion_config(config),
        }

    @classmethod
    def unread(cls, config: "EagleConfig") -> list[str]:
        """Return what readers ignore (see Layout), by the sources of vLLM 0.32 and speculators 0.9."""
        if config.version == 1:
            return ["vLLM and speculators have no reader of EAGLE-1 in this layout any more"]
        ids = config.layer_ids or ()
        lines = cls.unread_by_vllm(config) | {
            "speculators loads no head whose hidden size is not the target's": (
                config.target_hidden_size != config.hidden_size
            ),
            "speculators loads no head that reads a hidden state twice": len(set(ids)) < len(ids),
        }
        return [line for line, there in lines.items() if there]
