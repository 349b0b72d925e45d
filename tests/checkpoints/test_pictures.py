"""Checkpoints of models that read pictures too: by their folder, for text."""

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, T5Config

from specengine import Engine
from specengine.errors import UnsupportedModelError
from specengine.models.configs import auto_class, empty_model
from tests.sweep.serving import generated, prompt_of
from tests.sweep.small import sizes_for
from tests.toy import policy_for

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", ["mistral3", "llava"])
def test_a_folder_answers_texts(kind: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[kind](**sizes_for(CONFIG_MAPPING[kind], {}))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path)
    engine = Engine.from_pretrained(tmp_path, "ngram", policy_for("eagle"), offline=True)
    prompt = prompt_of(40)
    assert engine.generate(prompt, max_new_tokens=24, eos_token_id=[]).token_ids == generated(model, prompt)


def test_a_model_that_goes_on_with_no_text_is_named_by_its_type() -> None:
    with pytest.raises(UnsupportedModelError, match="model type t5 is no language model of transformers that goes on"):
        auto_class(T5Config())
    with pytest.raises(UnsupportedModelError, match=r"^model \S*: model type t5"):
        empty_model(T5Config(), torch.float32)
