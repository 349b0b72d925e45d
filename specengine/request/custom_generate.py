"""transformers' `model.generate(custom_generate=...)`."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from specengine.errors import require, require_input
from specengine.records import SpeculativeOutput, Stats
from specengine.request.configs import PROCESSED, Configured
from specengine.request.options import IN_CONFIGS, GenerationOptions, Request
from specengine.request.sampling import Sampler, Stopper
from specengine.request.text import Decoder

# Transformers prepares these for any model; `_check` reads them where they can say something else.
_PREPARED = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_position",
}


class CustomGenerate:
    """Called by transformers with everything prepared; returns what `generate` should return.

    engine: a specengine.Engine, which makes this; `stats` holds the figures of the last call. InputError for what it
    cannot do. Of `assistant_model`, `synced_gpus` and `negative_prompt_ids` without guidance transformers tells such a
    function nothing; none of them would change the answer.
    """

    def __init__(self, engine: Any, streamer: Any = None, seed: int | None = None) -> None:
        self.engine, self.streamer = engine, streamer
        self.seed = GenerationOptions.check({"streamer": streamer, "seed": seed}).seed
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
        self.engine.follow()
        self._check(model, input_ids, config, model_inputs)
        prompt = input_ids[0].tolist()
        seed = None
        if config.do_sample:
            seed = (
                int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu"))
                if self.seed is None
                else self.seed
            )
        # transformers' criteria hold the end-of-sequence and length limits too; the length bounds the cache here
        room = min(
            config.max_length or self.engine.target.max_context, self.engine.target.max_context
        ) - len(prompt)
        stopper = Stopper(
            room, (), (), list(stopping_criteria or []), Decoder(self.engine.tokenizer)
        )
        self.stats = Stats()
        tokens: list[int] = []
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        try:
            for cycle in self.engine.cycles(
                Request(prompt, Sampler(logits_processor or (), seed), stopper, self.stats)
            ):
                tokens += cycle.tokens
                if self.streamer is not None:
                    self.streamer.put(torch.tensor(cycle.tokens, dtype=torch.int64, device="cpu"))
        finally:
            if self.streamer is not None:
                self.streamer.end()  # its reader waits for that, after a failure too
        sequences = torch.cat([input_ids, input_ids.new_tensor([tokens])], dim=1)
        output = SpeculativeOutput(
            sequences=sequences,
            token_ids=tokens,
            finish_reason=stopper.last_reason,
            stats=self.stats,
        )
        return output if config.return_dict_in_generate else sequences

    def _check(
        self, model: PreTrainedModel, input_ids: Tensor, config: Any, inputs: dict[str, Any]
    ) -> None:
        require_input(
            "model: custom_generate was called by another model than the engine's target",
            model is getattr(self.engine.target, "model", None),
        )
        # before the batch, which transformers makes of beams
        Configured(config).refuse_unsupported(IN_CONFIGS | PROCESSED)
        require_input(
            "inputs_embeds: not supported, pass input_ids; drafts are made of tokens",
            inputs.get("inputs_embeds") is None,
        )
        require(
            "input_ids",
            f"a batch of {input_ids.shape[0]}",
            "one sequence; for several call generate_many",
            input_ids.shape[0] == 1,
        )
        mask, positions, past = (
            inputs.get(name) for name in ("attention_mask", "position_ids", "past_key_values")
        )
        refusals = {
            "attention_mask: padded prompts are not supported, pass the prompt without padding": (
                mask is not None and not mask.all()
            ),
            "position_ids: accepted 0, 1, 2 and so on, the positions of a prompt without padding": (
                positions is not None
                and positions.flatten().tolist() != list(range(input_ids.shape[1]))
            ),
            "past_key_values: not supported, the engine has a cache of its own; sessions reuse it": (
                past is not None
                and (getattr(past, "_is_user_defined", False) or past.get_seq_length())
            ),
            **{
                f"{name}: not supported by speculative decoding here": value is not None
                for name, value in inputs.items()
                if name not in _PREPARED
            },
            "prompt_lookup_num_tokens: the engine drafts; load it with draft='ngram' for that": (
                config.prompt_lookup_num_tokens
            ),
        }
        for reason, applies in refusals.items():
            require_input(reason, not applies)
