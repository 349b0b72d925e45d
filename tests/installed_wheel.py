"""Use an installed specengine as its users do: without its sources, a compiler or a network.

Wheels are tested with it, see [tool.cibuildwheel] in pyproject.toml; `make wheels` runs it, too. It ends with an error
at the first thing that does not work. Needs the extra `serve`.

    python -P tests/installed_wheel.py
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

import specengine
from specengine import Engine
from specengine.models.extension import instruction_sets
from specengine.models.native import NativeTarget

PROMPT = "a tree of drafts"
COMMAND = [sys.executable, "-P", "-m", "specengine"]


def main() -> None:
    assert Path(__file__).parents[1] / "specengine" not in Path(specengine.__file__).parents, (
        "it is the checkout that was imported"
    )
    names = {name: ", ".join(instruction_sets(name)) for name in ("bfloat16", "integer")}
    assert all(names.values()), "the C++ forward is missing"
    print(f"specengine {specengine.__version__}, native forward: {names}")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        check_answers(folder)
        check_commands(folder)
        check_server(folder)
    print("an installed specengine works")


def write_model(folder: Path) -> None:
    """Write a random Llama, and a tokenizer of bytes with a chat template."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [], BpeTrainer(initial_alphabet=ByteLevel.alphabet(), special_tokens=["<end>"])
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    fast.save_pretrained(folder)
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=len(fast), eos_token_id=fast.eos_token_id, **sizes, **heads
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def check_answers(model: str) -> None:
    """Drafted answers are those of plain decoding, on the C++ forward."""
    engine = Engine.from_pretrained(model)
    assert isinstance(engine.target, NativeTarget), f"it runs on {type(engine.target).__name__}"
    plain = engine.generate(PROMPT, max_new_tokens=48, policy="plain")
    for policy in ("auto", "salf", "eagle", "c2t"):
        answer = engine.generate(PROMPT, max_new_tokens=48, policy=policy)
        assert answer.token_ids == plain.token_ids, policy
        print(f"{policy}: {answer.stats.mean_acceptance_length:.2f} tokens per forward pass")


def check_commands(model: str) -> None:
    told = json.loads(run("doctor", "--inspect", "--json"))
    assert told["versions"]["specengine"] == specengine.__version__
    assert {"auto", "salf"} <= set(told["policies"])
    assert run("generate", PROMPT, "--model", model, "--max-new-tokens", "8")


def run(*arguments: str) -> str:
    done = subprocess.run(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, encoding="utf-8", check=True, timeout=300
    )
    return done.stdout


def check_server(model: str) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    server = subprocess.Popen([*COMMAND, "serve", model, "--port", str(port)], env=dict(os.environ))
    try:
        wait_for(server, f"http://127.0.0.1:{port}/health")
        body = {"model": "any", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        url = f"http://127.0.0.1:{port}/v1/completions"
        request = urllib.request.Request(
            url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer = json.load(reply)
        assert answer["usage"]["completion_tokens"] == 8, answer
    finally:
        server.terminate()
        server.wait(30)


def wait_for(server: subprocess.Popen[bytes], url: str) -> None:
    """Return when the server answers; AssertionError if it ends, or does not for two minutes."""
    for _ in range(240):
        assert server.poll() is None, "the server has ended"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError("the server does not answer")


if __name__ == "__main__":
    main()
