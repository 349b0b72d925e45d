"""Models whose tokens look ahead are no causal LMs, whatever their class is called."""

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from specengine import Engine
from specengine.errors import UnsupportedModelError
from specengine.models.huggingface import CausalLM
from specengine.models.refusals import refuse_looking_ahead
from tests.toy import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = list(range(40, 50))
CLASSES = {
    "bert": "BertLMHeadModel",
    "roberta": "RobertaForCausalLM",
    "electra": "ElectraForCausalLM",
}
CLASSES |= {"camembert": "CamembertForCausalLM", "megatron-bert": "MegatronBertForCausalLM"}


def bert_like(kind: str, *, is_decoder: bool, sure: bool = True) -> PreTrainedModel:
    """A model of a family of encoders with a head for the next token; not `sure`: its weights as they are made."""
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "embedding_size": 32,
    }
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64}
    config = transformers.AutoConfig.for_model(
        kind, **sizes, **ids, num_attention_heads=4, is_decoder=is_decoder
    )
    torch.manual_seed(0)
    model = getattr(transformers, CLASSES[kind])(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if sure and weight.ndim > 1:
                weight.normal_(0, 0.3)
    return model


def answer(model: PreTrainedModel) -> list[int]:
    ids = torch.tensor([PROMPT])
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 6}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[
        0, len(PROMPT) :
    ].tolist()


@torch.no_grad()
def looks_ahead(model: PreTrainedModel) -> bool:
    """Return whether logits follow from the token behind them."""
    first, second = (model(torch.tensor([[*PROMPT, last]])).logits[0, :-1] for last in (1, 2))
    return not torch.allclose(first, second, atol=1e-4)


@pytest.mark.parametrize("kind", CLASSES)
def test_an_encoder_is_refused_and_its_decoder_answers(kind: str) -> None:
    message = "changes the logits of those before it, so it is not a causal LM; its config says is_decoder=False"
    for sure in (True, False):
        with pytest.raises(UnsupportedModelError, match=message):
            Engine.from_pretrained(bert_like(kind, is_decoder=False, sure=sure))
    decoder = bert_like(kind, is_decoder=True)
    if kind == "megatron-bert" and looks_ahead(decoder):  # in transformers 5.17
        with pytest.raises(UnsupportedModelError, match=r"is not a causal LM$"):
            Engine.from_pretrained(decoder)
        return
    expected = answer(decoder)
    assert (
        Engine.from_pretrained(decoder)
        .generate(PROMPT, max_new_tokens=6, eos_token_id=[])
        .token_ids
        == expected
    )


def test_a_model_that_was_made_to_look_ahead_is_refused() -> None:
    model = tiny("gpt2")

    def smear(
        _module: torch.nn.Module, given: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        states = given[0]
        return (states + states.mean(dim=1, keepdim=True), *given[1:])

    model.transformer.h[1].register_forward_pre_hook(smear)
    with pytest.raises(UnsupportedModelError, match=r"is not a causal LM$"):
        CausalLM(model)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal_models_pass(family: str, dtype: torch.dtype) -> None:
    refuse_looking_ahead(tiny(family).to(dtype))


def test_a_model_without_numbers_is_left_to_other_checks() -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    refuse_looking_ahead(model)
