"""The layout of the EAGLE repository: EAGLE-1, -2 and -3, HASS, and all who train by it. vLLM and SGLang read it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from specengine.checkpoints.layouts import LAYER_IDS, Layout, Verifier, listed
from specengine.errors import require_intact

if TYPE_CHECKING:
    from specengine.models.eagle import EagleConfig


class EagleLayout(Layout):
    """A flat config of Llama's fields. The layout of every config that no other layout recognises."""

    family = "official"

    @classmethod
    def prefixes(cls, raw: Mapping[str, Any], version: int) -> dict[str, str]:
        return {"midlayer.": "layers.0."} if version == 3 else {}

    def read_version(self) -> Literal[1, 3]:
        self.fields.texts("architectures")  # refuses nonsense
        return (
            3
            if "draft_vocab_size" in self.fields.raw
            or any(name.endswith("hidden_norm.weight") for name in self.names)
            else 1
        )

    def read(self) -> dict[str, Any]:
        common = self.read_layer(self.fields)
        biased = [name for name in "qkvo" if f"layers.0.self_attn.{name}_proj.bias" in self.names]
        if self.fields.flag("attention_bias") and not biased:
            # SpecForge copies the field from the target's config and makes none.
            self.notes.append(
                "attention_bias is set, but there are no biases: read as if it were not"
            )
        common |= {
            "qkv_bias": self.fields.flag("qkv_bias", default=bool(set(biased) - {"o"})),
            "o_bias": "o" in biased,
        }
        if self.version == 1:
            return common | {"fc_bias": self.fields.flag("bias", default=True)}
        norm_logits = self.read_norm_output() if "norm_output" in self.fields else True
        # SpecForge's eagle_config counts layers by their outputs, hidden states and others by their inputs
        inputs, outputs = self.fields.ids(), self.fields.nested("eagle_config").ids()
        counted = [i + 1 for i in outputs]
        require_intact(
            f"{LAYER_IDS}: is in the config ({listed(inputs)}) and in its eagle_config ({listed(outputs)}), "
            "which count layers differently; pass layer_ids",
            self.chosen_layer_ids is not None or not inputs or not outputs or inputs == counted,
        )
        return (
            common
            | self.read_fusion(inputs or counted, outputs or inputs)
            | {"norm_logits": norm_logits}
        )

    def read_norm_output(self) -> bool:
        """Read whether logits are read after the final norm, from a field that this layout does not have."""
        require_intact(
            "norm_output: SpecForge and speculators mean different things by it, and the config does not say which "
            "of them wrote it; pass producer='specforge', or producer='eagle' to ignore the field",
            self.chosen,
        )
        self.notes.append("norm_output is ignored: the EAGLE repository has no such field")
        return True

    @classmethod
    def written(cls, config: "EagleConfig", dtype: str, verifier: Verifier) -> dict[str, Any]:
        """Return the config.json as SpecForge writes it, which the EAGLE repository, SGLang and vLLM read."""
        cls.refuse(norm_recurrent=config.norm_recurrent, qk_norm=config.qk_norm)
        raw = cls.layer_config(config) | {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
        }
        if config.target_hidden_size != config.hidden_size:
            raw["target_hidden_size"] = config.target_hidden_size
        if config.version == 1:
            return raw | {
                "architectures": ["LlamaForCausalLM"],
                "bias": config.fc_bias,
                "qkv_bias": config.qkv_bias,
            }
        cls.refuse(fc_bias=config.fc_bias)
        raw |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": config.draft_vocab_size,
            "qkv_bias": config.qkv_bias,
            **cls.fusion_config(config),
        }
        if config.qkv_bias and config.o_bias:
            raw["attention_bias"] = True  # vLLM reads no other field of an EAGLE-3 head's biases
        if not config.norm_logits:
            # left out where it is true, which vLLM takes as what speculators means by it
            raw["norm_output"] = False
        if config.layer_ids is not None:
            raw[LAYER_IDS] = list(config.layer_ids)
            raw["eagle_config"] = {LAYER_IDS: [i - 1 for i in config.layer_ids]}
        return raw

    @classmethod
    def unread(cls, config: "EagleConfig") -> list[str]:
        """Return what readers ignore (see Layout), by the sources of vLLM 0.32 and SGLang 0.5.23."""
        if config.version == 1:
            return []
        lines = cls.unread_by_vllm(config) | {
            "SGLang ignores norm_before_residual": config.norm_before_residual,
            "SGLang drops the biases of queries, keys and values": config.qkv_bias,
        }
        return [line for line, there in lines.items() if there]
