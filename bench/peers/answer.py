"""Answer prompts with another engine: run by that engine's own Python, which need not have specengine.

    PYTHON answer.py ENGINE/MODE --gguf FILE --folder FOLDER [--head FOLDER] [--draft FILE] --threads 2 --context 4096

Prints one line of JSON about the engine, then answers each line of standard input, {"ids": [...], "tokens": 64, "ends":
[...]}, with one line: {"ids": [...], "first": seconds or null}. Answers are greedy, of at most so many tokens, and end
with the first of `ends`. Nothing is kept from one request to the next.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

# prompt, most tokens, ends; one at a time where known
Tokens = Callable[[list[int], int, list[int]], Iterator[int]]
DRAFTED = 4  # tokens of a small model at a time


def cut(tokens: list[int], ends: list[int]) -> list[int]:
    """Return the tokens up to the first end, which is kept."""
    place = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: place + 1]


def llama_cpp(args: argparse.Namespace) -> tuple[Tokens, dict[str, Any]]:
    package: Any = importlib.import_module("llama_cpp")
    greedy = {"temp": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}

    def loaded(file: str, **more: Any) -> Any:
        return package.Llama(
            file,
            n_ctx=args.context + 2 * DRAFTED,  # drafts go past the answer's end
            n_threads=args.threads,
            n_threads_batch=args.threads,
            verbose=False,
            **more,
        )

    def drafted(ids: Any, **_: Any) -> Any:
        """Return the small model's next tokens; it keeps what it has read of the text."""
        tokens = small.generate(ids.tolist(), **greedy)
        return numpy.array([next(tokens) for _ in range(DRAFTED)], dtype=numpy.intc)

    more: dict[str, Any] = {}
    if args.mode == "prompt-lookup":
        speculative: Any = importlib.import_module("llama_cpp.llama_speculative")
        more["draft_model"] = speculative.LlamaPromptLookupDecoding(
            num_pred_tokens=2  # as documented for CPUs
        )
    elif args.mode == "draft":
        numpy: Any = importlib.import_module("numpy")
        small = loaded(args.draft)
        more["draft_model"] = drafted
    if more:
        more["logits_all"] = True  # which it sets itself, too late for long prompts
    llama = loaded(args.gguf, **more)

    def answer(ids: list[int], most: int, ends: list[int]) -> Iterator[int]:
        llama.reset()
        tokens = llama.generate(ids, **greedy)
        for count, token in enumerate(tokens, start=1):
            yield token
            if count == most or token in ends:
                return

    return answer, {"system": package.llama_print_system_info().decode().strip()}


def ik_llama_cpp(args: argparse.Namespace) -> tuple[Tokens, dict[str, Any]]:
    package: Any = importlib.import_module("ik_llama_cpp")
    llama = package.IkLlama(args.gguf, n_ctx=args.context, n_threads=args.threads, verbose=False)

    def answer(ids: list[int], most: int, ends: list[int]) -> Iterator[int]:
        found = llama.generate(ids, max_tokens=most, temperature=0.0)
        if len(found) < most and ends:
            found.append(ends[0])  # which it leaves out
        yield from cut(found, ends)

    return answer, {}


def openvino(args: argparse.Namespace) -> tuple[Tokens, dict[str, Any]]:
    numpy: Any = importlib.import_module("numpy")
    core: Any = importlib.import_module("openvino")
    genai: Any = importlib.import_module("openvino_genai")
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": args.threads, "PERFORMANCE_HINT": "LATENCY"}
    settings: dict[str, Any] = {}
    if args.mode == "prompt-lookup":
        options["prompt_lookup"] = True
        settings = {"num_assistant_tokens": 5, "max_ngram_size": 3}
    elif args.mode == "draft":
        options["draft_model"] = genai.draft_model(args.draft, "CPU", **options)
        settings = {"num_assistant_tokens": DRAFTED}
    pipeline = genai.LLMPipeline(args.gguf, "CPU", **options)

    def answer(ids: list[int], most: int, ends: list[int]) -> Iterator[int]:
        config = genai.GenerationConfig(
            max_new_tokens=most, do_sample=False, ignore_eos=not ends, **settings
        )
        if ends:
            config.stop_token_ids = set(ends)
            config.set_eos_token_id(ends[0])
        given = core.Tensor(numpy.array([ids], dtype=numpy.int64))
        mask = core.Tensor(numpy.ones((1, len(ids)), dtype=numpy.int64))
        found = [
            int(token)
            for token in pipeline.generate(genai.TokenizedInputs(given, mask), config).tokens[0]
        ]
        if len(found) < most and ends and found[-1:] != ends[:1]:
            found.append(ends[0])
        yield from cut(found, ends)

    return answer, {"options": {name: str(value) for name, value in options.items()}}


def vllm(args: argparse.Namespace) -> tuple[Tokens, dict[str, Any]]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    package: Any = importlib.import_module("vllm")
    speculative: dict[str, Any] | None = None
    if args.mode == "ngram":
        speculative = {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    elif args.mode == "eagle3":
        speculative = {"method": "eagle3", "model": args.head, "num_speculative_tokens": 3}
    llm = package.LLM(
        args.folder, dtype="bfloat16", max_model_len=args.context, max_num_seqs=1, speculative_config=speculative,
        enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip

    def answer(ids: list[int], most: int, ends: list[int]) -> Iterator[int]:
        options = package.SamplingParams(
            temperature=0.0, max_tokens=most, stop_token_ids=ends, ignore_eos=True
        )
        (found,) = llm.generate([{"prompt_token_ids": ids}], options, use_tqdm=False)
        yield from cut(list(found.outputs[0].token_ids), ends)

    if args.head:
        # a name, no path of this machine
        speculative = {**(speculative or {}), "model": os.path.basename(args.head)}
    return answer, {"speculative": speculative}


def onnxruntime(args: argparse.Namespace) -> tuple[Tokens, dict[str, Any]]:
    package: Any = importlib.import_module("onnxruntime_genai")
    folder = os.path.join(args.cache, f"onnx-int4-{os.path.basename(args.folder)}")
    if not os.path.exists(folder):
        command = [
            sys.executable,
            "-m",
            "onnxruntime_genai.models.builder",
            "-p",
            "int4",
            "-e",
            "cpu",
        ]
        subprocess.run(
            [*command, "-i", args.folder, "-o", f"{folder}.part", "-c", args.cache], check=True
        )
        os.rename(f"{folder}.part", folder)
    model = package.Model(folder)

    def answer(ids: list[int], most: int, ends: list[int]) -> Iterator[int]:
        parameters = package.GeneratorParams(model)
        parameters.set_search_options(max_length=len(ids) + most, do_sample=False)
        generator = package.Generator(model, parameters)
        generator.append_tokens(ids)
        for _ in range(most):
            generator.generate_next_token()
            token = int(generator.get_next_tokens()[0])
            yield token
            if token in ends or generator.is_done():
                return

    return answer, {"precision": "int4"}


ENGINES: dict[str, tuple[str, Callable[[argparse.Namespace], tuple[Tokens, dict[str, Any]]]]] = {
    "llama.cpp": ("llama-cpp-python", llama_cpp),
    "ik_llama.cpp": ("ik-llama-cpp-python", ik_llama_cpp),
    "openvino": ("openvino-genai", openvino),
    "vllm": ("vllm-cpu", vllm),
    "onnxruntime": ("onnxruntime-genai", onnxruntime),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="ENGINE or ENGINE/MODE")
    for option in ("--gguf", "--folder", "--head", "--draft", "--cache"):
        parser.add_argument(option)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=4096)
    args = parser.parse_args()
    engine, _, args.mode = args.name.partition("/")
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print to standard output
    package, make = ENGINES[engine]
    answer, facts = make(args)
    version = importlib.metadata.version(package)
    print(
        json.dumps({"policy": f"{package} {version}, {args.threads} threads", **facts}),
        file=output,
        flush=True,
    )
    for line in sys.stdin:
        request = json.loads(line)
        began, first, ids = time.perf_counter(), None, list[int]()
        for token in answer(request["ids"], request["tokens"], request["ends"]):
            first = first or time.perf_counter() - began
            ids.append(token)
        seconds = time.perf_counter() - began
        streamed = first is not None and (len(ids) < 2 or first < 0.999 * seconds)
        print(
            json.dumps({"ids": ids, "first": first if streamed else None}), file=output, flush=True
        )


if __name__ == "__main__":
    main()
