import contextlib
import io
import json
import tempfile
from pathlib import Path

import torch
import transformers
from starlette.testclient import TestClient
from tokenizers import Tokenizer, models, pre_tokenizers

from specengine import Engine
from specengine.cli import main
from specengine.protocol.settings import Settings
from specengine.serve.app import create_app
from specengine.serve.models import ServedModel, Models

folder = Path(tempfile.mkdtemp())
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
transformers.LlamaForCausalLM(config).save_pretrained(folder)
words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(97)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)

prompt, draws = "w20 w21 w22 w23 w20 w21", {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}
engine = Engine.from_pretrained(str(folder), "recycling", "fixed")
likeliest = engine.generate(prompt, max_new_tokens=12).text
assert engine.generate(prompt, **draws).text != likeliest
assert engine.generate(prompt, **draws, epsilon_cutoff=0.5).text == likeliest

printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    main(
        [
            "generate",
            prompt,
            "--model",
            str(folder),
            "--max-new-tokens",
            "12",
            "--seed",
            "3",
            "--epsilon-cutoff",
            "0.5",
        ]
    )
assert printed.getvalue().strip() == likeliest.strip()

body = {"prompt": prompt, "max_tokens": 12, "temperature": 1.0, "seed": 3}
models = Models([ServedModel("toy", lambda: engine)], Settings("toy", allowed_hosts=("*",)))
with TestClient(create_app(models)) as client:
    while models.first.state == "loading":
        pass
    for cutoff, same in ((0.5, True), (0, False)):
        reply = client.post("/v1/completions", json=body | {"epsilon_cutoff": cutoff}).json()
        assert (reply["choices"][0]["text"].strip() == likeliest.strip()) is same, reply
    assert (
        "epsilon_cutoff: " in client.post("/v1/completions", json=body | {"epsilon_cutoff": 2}).text
    )

lines, answers = folder / "prompts.jsonl", folder / "answers.jsonl"
lines.write_text(json.dumps({"prompt": prompt, "options": draws | {"epsilon_cutoff": 0.5}}) + "\n")
assert main(["batch", str(lines), "--out", str(answers), "--model", str(folder)]) == 0
assert json.loads(answers.read_text())["text"].strip() == likeliest.strip()
