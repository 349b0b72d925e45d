"""transformers' `model.generate(custom_generate=...)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from specengine.errors import InputError
from specengine.generation.outputs import SpeculativeOutput, decoder
from specengine.generation.sampling import Sampler
from specengine.generation.stopping import Stopper
from specengine.records import Stats


class CustomGenerate:
    """Called by transformers with everything prepared; returns what `generate` should return.

    engine: a specengine.Engine, which makes this; `stats` holds the figures of the last call.
    """

    def __init__(self, engine: Any, streamer: Any = None, seed: int | None = None) -> None:
        self.engine, self.streamer, self.seed = engine, streamer, seed
        self.stats = Stats()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: GenerationConfig | None = None,
        **model_inputs: Any,
    ) -> Any:
        config = generation_config or model.generation_config
        self._check(model, input_ids, config, model_inputs)
        prompt = input_ids[0].tolist()
        seed = None
        if config.do_sample:
            seed = int(torch.randint(1 << 62, ())) if self.seed is None else self.seed
        # transformers' criteria hold the end-of-sequence and length limits too; the length bounds the cache here
        room = min(config.max_length or self.engine.target.max_context, self.engine.target.max_context) - len(prompt)
        stopper = Stopper(room, (), (), list(stopping_criteria or []), decoder(self.engine.tokenizer))
        self.stats = Stats()
        tokens: list[int] = []
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        try:
            for cycle in self.engine.cycles(prompt, Sampler(logits_processor or (), seed), stopper, self.stats):
                tokens += cycle.tokens
                if self.streamer is not None:
                    self.streamer.put(torch.tensor(cycle.tokens))
        finally:
            if self.streamer is not None:
                self.streamer.end()  # whoever reads it waits for that, after a failure too
        sequences = torch.cat([input_ids, input_ids.new_tensor([tokens])], dim=1)
        if not config.return_dict_in_generate:
            return sequences
        return SpeculativeOutput(
            sequences=sequences, token_ids=tokens, finish_reason=stopper.last_reason, stats=self.stats
        )

    def _check(self, model: PreTrainedModel, input_ids: Tensor, config: Any, inputs: dict[str, Any]) -> None:
        if model is not getattr(self.engine.target, "model", None):
            raise InputError("model: custom_generate was called by another model than the engine's target")
        if input_ids.shape[0] != 1:
            raise InputError(f"input_ids: got a batch of {input_ids.shape[0]}, this engine serves one sequence")
        mask = inputs.get("attention_mask")
        if mask is not None and not bool(mask.all()):
            raise InputError("attention_mask: padded prompts are not supported, pass the prompt without padding")
        for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
            if getattr(config, name, None):
                raise InputError(f"{name}: not supported by speculative decoding here")
        if (config.num_beams or 1) > 1 or (config.num_return_sequences or 1) > 1:
            raise InputError("num_beams, num_return_sequences: only one sequence is supported")
