"""Answer prompts with another engine: run by that engine's own Python, without this package's other modules.

    PYTHON bench/cpu/peer_answers.py ENGINE FILE [--threads 2] [--context 8192]

Reads one request per line from standard input, {"ids": [...], "tokens": 64, "way": "plain"}, and answers each with one
line: {"ids": [...], "seconds": 0.2}. Answers are greedy and of exactly so many tokens; the time includes the prompt,
and nothing is kept from one request to the next.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Answers = Callable[[list[int], int], list[int]]


def llama_cpp(file: str, threads: int, context: int) -> dict[str, Answers]:
    """Return plain greedy decoding by llama_decode, prompts in pieces of 512 tokens."""
    numpy: Any = importlib.import_module("numpy")
    beside: Any = importlib.import_module("engine")  # the file beside this one
    model = beside.LlamaCpp(file, threads, context, filled=False)
    api, batch = model.api, model.batch
    size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model.model))

    def decode(ids: list[int], first: int, *, rated: bool) -> None:
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = (
                token,
                first + i,
                1,
                0,
            )
            batch.logits[i] = rated and i == len(ids) - 1
        if code := api.llama_decode(model.state, batch):
            sys.exit(f"llama_decode: {code}")

    def answer(ids: list[int], tokens: int) -> list[int]:
        model.remove(0)
        for first in range(0, len(ids), 512):
            decode(ids[first : first + 512], first, rated=first + 512 >= len(ids))
        found: list[int] = []
        while True:
            logits = numpy.ctypeslib.as_array(api.llama_get_logits_ith(model.state, -1), (size,))
            found.append(int(logits.argmax()))
            if len(found) == tokens:
                return found
            decode(found[-1:], len(ids) + len(found) - 1, rated=True)

    return {"plain": answer}


def openvino(file: str, threads: int, context: int) -> dict[str, Answers]:
    """Return OpenVINO GenAI's plain decoding and its prompt lookup."""
    numpy: Any = importlib.import_module("numpy")
    core: Any = importlib.import_module("openvino")
    genai: Any = importlib.import_module("openvino_genai")
    options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}

    def way(pipeline: Any, **settings: Any) -> Answers:
        def answer(ids: list[int], tokens: int) -> list[int]:
            config = genai.GenerationConfig(
                max_new_tokens=tokens, ignore_eos=True, do_sample=False, **settings
            )
            given = core.Tensor(numpy.array([ids], dtype=numpy.int64))
            mask = core.Tensor(numpy.ones((1, len(ids)), dtype=numpy.int64))
            return list(pipeline.generate(genai.TokenizedInputs(given, mask), config).tokens[0])

        return answer

    return {
        "plain": way(genai.LLMPipeline(file, "CPU", **options)),
        "prompt lookup": way(
            genai.LLMPipeline(file, "CPU", prompt_lookup=True, **options),
            num_assistant_tokens=5,
            max_ngram_size=3,
        ),
    }


def transformers(file: str, threads: int, context: int) -> dict[str, Answers]:
    """Return greedy `generate` of transformers and its prompt lookup, on the file's weights made bfloat16."""
    torch: Any = importlib.import_module("torch")
    package: Any = importlib.import_module("transformers")
    torch.set_num_threads(threads)
    folder, name = os.path.split(os.path.abspath(file))
    unpacked = package.GgufConfig(dequantize=True)
    kind = package.AutoModelForCausalLM
    model = kind.from_pretrained(
        folder,
        gguf_file=name,
        dtype=torch.bfloat16,
        quantization_config=unpacked,
        trust_remote_code=False,
    ).eval()

    def way(**settings: Any) -> Answers:
        def answer(ids: list[int], tokens: int) -> list[int]:
            given = torch.tensor([ids], dtype=torch.int64)
            exact = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
            found = model.generate(
                given, attention_mask=torch.ones_like(given), **exact, **settings
            )
            return list(found[0, len(ids) :].tolist())

        return answer

    return {"generate": way(), "prompt lookup": way(prompt_lookup_num_tokens=10)}


ENGINES = {"llama_cpp": llama_cpp, "openvino": openvino, "transformers": transformers}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("file", help="a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=8192)
    args = parser.parse_args()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print to standard output
    with contextlib.suppress(BrokenPipeError):
        ways = ENGINES[args.engine](args.file, args.threads, args.context)
        print(json.dumps(list(ways)), file=output, flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            began = time.perf_counter()
            ids = ways[request["way"]](request["ids"], request["tokens"])
            print(
                json.dumps({"ids": ids, "seconds": time.perf_counter() - began}),
                file=output,
                flush=True,
            )


if __name__ == "__main__":
    main()
