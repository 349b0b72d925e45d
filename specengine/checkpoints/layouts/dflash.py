"""The layouts of blocks: DFlash's, DeepSpec's (DSpark), SpecForge's (DSpark, DFlash2, Domino), speculators', and
Muse-Glimmer's.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from specengine.checkpoints.layouts import (
    BLOCKS,
    MAX_DEPTHS,
    NEAR,
    HeadFields,
    Layout,
    Verifier,
    require_field,
)
from specengine.checkpoints.layouts.speculators import read_nested_layer
from specengine.errors import require_intact, shown

if TYPE_CHECKING:
    from specengine.models.dflash import DflashConfig

FULL = "full_attention"
KNOWN = {
    "block_size",
    "causal",
    "confidence_head_alpha",
    "confidence_head_with_markov",
    "conv_group_size",
    "conv_kernel_size",
    "emb_dim",
    "enable_confidence_head",
    "gru_hidden_dim",
    "markov_head_type",
    "markov_rank",
    "mask_token_id",
    "num_anchors",
    "num_target_layers",
    "pure_draft_prefix_len",
    "sample_from_anchor",
    "selector_rank",
    "selector_top_k",
    "shift_label",
    "target_layer_ids",
    "use_confidence_head",
}
DOMINO = "domino", "causal_v5"  # the latter in configs before the paper
USUAL = None, False, "dflash", "dspark", "gqa"  # values of other fields that change nothing
GEMMA4 = "Gemma4DSparkModel"
DEEPSPEC = "DSparkModel"  # in the names of DeepSpec's models
GLIMMER = "MuseGlimmerAssistantModel"
ANCHORS = "sample_from_anchor", "dspark_bonus_anchor", "shift_label"
MARKOV = "vanilla", "gated", "rnn"
UNUSED = {"confidence_head.": "policies read log-probabilities"}
COPIES = "embed_tokens.weight", "lm_head.weight"


class DflashLayout(Layout):
    """A flat config of Qwen3's fields, and `dflash_config`, whose fields DeepSpec has among the others.

    Layer ids count layers by their outputs. Speculators has Qwen3's fields in an object of their own, hidden states'
    ids as transformers counts, and columns for some of the target's tokens. Muse-Glimmer's windows look ahead, and do
    not count a row itself.
    """

    family = "dflash"
    marks = ("dflash_config",)
    architectures = (
        "DFlashDraftModel",
        "DFlash2DraftModel",
        "DSparkDraftModel",
        "DominoDraftModel",
        "Qwen3DSparkModel",
        GEMMA4,
        GLIMMER,
    )
    algorithms = BLOCKS

    @classmethod
    def prefixes(cls, raw: Mapping[str, Any], version: int) -> dict[str, str]:
        return (
            {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
            if GLIMMER in str(raw.get("architectures"))
            # Domino's, which stood below logit_head before
            else {f"{name}.": f"logit_head.{name}." for name in ("prefix_gru", "embed_proj")}
        )

    def read_version(self) -> Literal[3]:
        return 3  # which reads the same hidden states

    def read(self) -> dict[str, Any]:
        self.algorithm = self.fields.text("speculators_model_type", "")
        if self.algorithm:
            self.fields = HeadFields(
                {**self.fields.raw, **read_nested_layer(self.fields, "qwen3").raw}
            )
        architectures = str(self.fields.raw.get("architectures"))
        gemma4, glimmer = GEMMA4 in architectures, GLIMMER in architectures
        if gemma4:
            self.fields = self.read_gemma4()
        if glimmer and "vocab_size" not in self.fields:
            size = self.fields.size("mask_token_id") + 1
            self.fields = HeadFields({**self.fields.raw, "vocab_size": size})
            self.notes.append(
                "no vocab_size: it ends with the mask, or with the tokens that the target has after it"
            )
        fields, nested = self.fields, self.fields.nested("dflash_config").raw
        block = HeadFields(
            {**fields.raw, **{name: value for name, value in nested.items() if value is not None}}
        )
        unknown = sorted(
            {name for name, value in nested.items() if value not in USUAL + DOMINO} - KNOWN
        )
        require_intact(
            f"dflash_config: unknown {', '.join(map(shown, unknown))}, known are {', '.join(sorted(KNOWN))}",
            not unknown,
        )
        common, inputs = self.read_layer(fields), block.ids("aux_hidden_state_layer_ids")
        outputs = block.ids("target_layer_ids")  # counted by what layers put out
        ids = [i + 1 for i in outputs] or inputs
        require_intact("target_layer_ids: is missing", bool(ids))
        self.own_head = common["draft_vocab_size"] < common["vocab_size"]
        bias = fields.flag("attention_bias")
        size = block.size("block_size", most=MAX_DEPTHS)
        require_field("block_size", size, f"2 to {MAX_DEPTHS}", size > 1)
        layers = fields.size("num_hidden_layers", most=MAX_DEPTHS)
        types = fields.texts("layer_types") or [FULL] * layers
        accepted = [FULL] if gemma4 else [FULL, NEAR]
        require_field(
            "layer_types",
            types,
            f"{layers} of {', '.join(accepted)}",
            len(types) == layers and set(accepted).issuperset(types),
        )
        near = [kind == NEAR for kind in types]
        window = fields.size("sliding_window") + glimmer if any(near) else 0
        ahead = block.flag(
            "sliding_window_non_causal", default=glimmer or self.algorithm == "dflash2"
        )
        return (
            common
            | self.read_heads(block, common["hidden_size"])
            | {
                "own_embeddings": False,
                "own_head": self.own_head,
                "qk_norm": True,
                "qkv_bias": bias,
                "o_bias": bias,
                "layer_ids": self._layer_ids(ids, outputs or inputs),
                "sliding_window": 0,
                "block_size": size,
                "mask_token_id": block.size("mask_token_id", most=common["vocab_size"] - 1),
                "num_layers": layers,
                "windows": tuple(window * is_near for is_near in near),
                "causal": tuple(
                    block.flag(
                        "is_causal", default=block.flag("causal", default=is_near and not ahead)
                    )
                    for is_near in near
                ),
                "gemma4": gemma4,
                "shared_values": gemma4 and fields.flag("attention_k_eq_v"),
            }
        )

    def read_gemma4(self) -> HeadFields:
        """Return the fields of layers of Gemma 4, all of which attend as its full ones do, under Qwen3's names."""
        fields, full = self.fields, self.fields.nested("rope_parameters").nested(FULL)
        for name in ("enable_moe_block", "hidden_size_per_layer_input"):
            require_field(name, fields.raw.get(name), "none of Gemma 4's", not fields.raw.get(name))
        require_intact(f"rope_parameters: {FULL} is missing", bool(full.raw))
        heads = (
            "num_global_key_value_heads"
            if fields.flag("attention_k_eq_v")
            else "num_key_value_heads"
        )
        return HeadFields(
            {
                **fields.raw,
                "head_dim": fields.size("global_head_dim"),
                "num_key_value_heads": fields.size(heads),
                "hidden_act": fields.text("hidden_activation"),
                "rope_parameters": full.raw,
            }
        )

    def read_heads(self, block: HeadFields, hidden_size: int) -> dict[str, Any]:
        """Read what DSpark, DFlash2 and Domino have besides; nothing of a DFlash head."""
        if "conv_kernel_size" in block or "selector_rank" in block:
            require_intact(
                "draft_vocab_size: a DFlash2 head has the target's vocabulary", not self.own_head
            )
            group = block.size("conv_group_size")
            require_field(
                "conv_group_size",
                group,
                f"a divisor of hidden_size {hidden_size}",
                hidden_size % group == 0,
            )
            return {
                "rank": block.size("selector_rank"),
                "candidates": block.size("selector_top_k"),
                "taps": block.size("conv_kernel_size", most=MAX_DEPTHS),
                "group_size": group,
            }
        domino = block.raw.get("projector_type") in DOMINO or "gru_hidden_dim" in block
        if not domino and "markov_rank" not in block and "sample_from_anchor" not in block:
            return {}
        # speculators wrote no field before it had the choice, Domino's repository none for masks
        usual = not (self.algorithm or domino)
        if not any(name in block for name in ANCHORS):
            self.notes.append(
                "no sample_from_anchor: each row predicts the token after it"
                if usual
                else "no sample_from_anchor: masks predict their own"
            )
        anchored = block.flag(
            "sample_from_anchor",
            default=not block.flag(
                "dspark_bonus_anchor", default=not block.flag("shift_label", default=usual)
            ),
        )
        if domino:
            require_intact(
                "projector_type: Domino heads of speculators are not supported", not self.algorithm
            )
            return {
                "rank": block.size("emb_dim"),
                "gru_size": block.size("gru_hidden_dim"),
                "uncorrected": (block.raw.get("pure_draft_prefix_len") or 0)
                and block.size("pure_draft_prefix_len", most=MAX_DEPTHS),
                "anchored": anchored,
            }
        kind = block.text("markov_head_type", "vanilla")
        require_field("markov_head_type", kind, ", ".join(MARKOV), kind in MARKOV)
        require_intact(
            "sample_from_anchor: rnn needs rows that predict the token after them",
            anchored or kind != "rnn",
        )
        return {
            # 0: DeepSpec's DFlash
            "rank": (block.raw.get("markov_rank") or 0) and block.size("markov_rank"),
            "gated": kind == "gated",
            "recurrent": kind == "rnn",
            "anchored": anchored,
        }

    def converted(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        copied = self.algorithm or DEEPSPEC in str(self.fields.raw.get("architectures"))
        copies = COPIES[: 2 - self.own_head] if copied else ()
        reasons = UNUSED | dict.fromkeys(
            copies, "a copy of the target's, with which it was trained"
        )
        unused = {
            name: reason
            for name in sorted(state)
            for prefix, reason in reasons.items()
            if name.startswith(prefix)
        }
        self.notes += [f"{name} is left out: {reason}" for name, reason in unused.items()]
        return {name: tensor for name, tensor in state.items() if name not in unused}

    @classmethod
    def written(cls, config: "DflashConfig", dtype: str, verifier: Verifier) -> dict[str, Any]:  # type: ignore[override]
        windows = {window for window in config.windows if window}
        usual = config.causal == tuple(map(bool, config.windows))
        cls.refuse(
            rank=config.rank > 0,
            own_head=config.own_head,
            anchored=config.anchored,
            gemma4=config.gemma4,
            qkv_bias=config.qkv_bias != config.o_bias,
            windows=len(windows) > 1,
            causal=len(set(config.causal)) > 1 and not usual,
        )
        return cls.layer_config(config) | {
            "architectures": list(cls.architectures[:1]),
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
