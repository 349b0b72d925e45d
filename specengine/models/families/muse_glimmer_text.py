"""Muse-Glimmer, its text: normed embeddings, gated attention, and no positions in layers without windows."""

import functools
import math
from collections.abc import Callable
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from specengine.models.families import (
    GGUF,
    SLIDING,
    Attention,
    Factors,
    Family,
    Fields,
    Layer,
    Name,
)


def finish(fields: dict[str, Any], value: Callable[[str], Any]) -> dict[str, Any]:
    """Files state which layers have windows, or that all but every n-th have; the others turn nothing."""
    every = value("attention.sliding_window_pattern")
    for key in (
        "attention.sliding_window_pattern",
        "attention.sliding_window",
        "logit_scale",
        "final_logit_softcapping",
    ):
        number = value(key) or 0
        if isinstance(number, int | float) and not 0 < number < math.inf:
            raise ValueError(f"muse-glimmer.{key} must be there, above 0; it is {value(key)}")
    slides = (
        every
        if isinstance(every, list)
        else [layer % every < every - 1 for layer in range(fields["num_hidden_layers"])]
    )
    theta = value("rope.freq_base_swa") or fields["rope_parameters"]["rope_theta"]
    return {
        "layer_types": [SLIDING if window else "full_attention" for window in slides],
        "layer_rope_theta": [theta if window else 0 for window in slides],
        "rope_parameters": fields["rope_parameters"] | {"rope_theta": theta},
    }


@functools.cache
def causal_lm() -> Any:
    """Return the class of the text's causal LM, which transformers has with parts for pictures alone."""

    class MuseGlimmerForCausalLM(
        transformers.MuseGlimmerPreTrainedModel, transformers.GenerationMixin
    ):
        config_class = transformers.MuseGlimmerTextConfig
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = transformers.MuseGlimmerTextModel(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self,
            input_ids: Tensor | None = None,
            attention_mask: Any = None,
            position_ids: Tensor | None = None,
            past_key_values: Any = None,
            inputs_embeds: Tensor | None = None,
            logits_to_keep: int | Tensor = 0,
            **more: Any,
        ) -> CausalLMOutputWithPast:
            out = self.model(
                input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, **more
            )
            rows = (
                slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            )
            cap = self.config.final_logit_softcapping
            logits = self.lm_head(out.last_hidden_state[:, rows]) * self.config.output_multiplier
            return CausalLMOutputWithPast(
                logits=(logits / cap).tanh() * cap,
                past_key_values=out.past_key_values,
                hidden_states=out.hidden_states,
                attentions=out.attentions,
            )

    return MuseGlimmerForCausalLM


FAMILY = Family(
    layer=Layer(
        attention=Attention(
            gates=Name("self_attn.gate_proj", "attn_gate"),
            unweighted=("q_norm", "k_norm"),
            windows="by type",
            turns=lambda config, layer: bool(config.layer_rope_theta[layer]),
        ),
        attention_output_norm=Name("post_attention_layernorm", "post_attention_norm"),
        mlp_norm=Name("pre_feedforward_layernorm", "ffn_norm"),
        mlp_output_norm=Name("post_feedforward_layernorm", "post_ffw_norm"),
    ),
    fields=Fields(activation="hidden_activation", added_eps="post_norm_eps"),
    one_is_zero=True,
    plain_norms=(".model.norm", ".output_norm.weight"),
    normed=True,
    factors=lambda config: Factors(
        scores=config.qk_scale_factor * config.head_dim**-0.5,
        divisor=1 / config.output_multiplier,
        cap=config.final_logit_softcapping,
    ),
    gguf=GGUF(
        "muse-glimmer",
        keys={
            "attention.sliding_window": "sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
            "logit_scale": "output_multiplier",
        },
        constants={"attn_q_norm.weight": "qk_scale_factor", "attn_k_norm.weight": ""},
        pairs=("attn_q", "attn_k"),
        finish=finish,
    ),
    causal_lm=causal_lm,
)
