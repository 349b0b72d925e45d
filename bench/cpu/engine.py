"""Time rows in one engine: run by that engine's own Python, without this package's other modules.

    PYTHON bench/cpu/engine.py ENGINE FILE [--threads 2] [--context 200]

Reads the numbers of rows from standard input, one per line, and answers each with one line of JSON: the milliseconds of
a call that runs so many rows behind the context, and gives all their logits: the median of five calls that follow one.
The first line describes the engine.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Call = Callable[[], Any]
CALLS = 5  # timed, in a row as an answer's forwards are


class Reading:
    """Reads as many bytes as the weights have, on all threads: what a forward takes at least."""

    def __init__(self, file: str, threads: int, context: int) -> None:
        import torch

        torch.set_num_threads(threads)
        path = Path(file)
        files = path.glob("*.safetensors") if path.is_dir() else [path]
        size = sum(part.stat().st_size for part in files)
        self.weights = torch.ones(size // 8, dtype=torch.int64)
        self.about = {"engine": "reading", "version": torch.__version__}

    def prepare(self, rows: int) -> Call:
        return self.weights.sum


class SpecEngine:
    """The native forward over a tree that is a chain."""

    def __init__(self, file: str, threads: int, context: int) -> None:
        import torch

        from specengine import Engine

        torch.set_num_threads(threads)
        options: dict[str, Any] = json.loads(os.environ.get("ENGINE_OPTIONS", "{}"))
        engine = Engine.from_pretrained(file, None, policy="plain", **options)
        self.torch, self.target, self.context = torch, engine.target, context
        self.vocabulary = self.target.vocab_size
        self.target.prefill([token % self.vocabulary for token in range(1, context + 1)])
        version = importlib.metadata.version("specengine")
        self.about = {"engine": "specengine", "version": version, "backend": self.target.backend}

    def prepare(self, rows: int) -> Call:
        from bench.cpu.forwards import tree

        grown = tree(rows, self.vocabulary)

        def call() -> None:
            with self.target.running(), self.torch.inference_mode():
                self.target.verify(grown)

        return call


class LlamaCpp:
    """llama_decode of llama.cpp, or of ik_llama.cpp, whose binding has other names."""

    def __init__(
        self,
        file: str,
        threads: int,
        context: int,
        module: str = "llama_cpp",
        *,
        filled: bool = True,
    ) -> None:
        # the bindings are not installed where this file is checked
        name = "llama_cpp" if module == "llama_cpp" else f"{module}._ctypes_api"
        api: Any = importlib.import_module(name)
        if module == "llama_cpp":
            self.remove: Callable[[int], Any] = lambda first: api.llama_memory_seq_rm(
                api.llama_get_memory(self.state), 0, first, -1
            )
        else:
            removing = api._lib.llama_kv_cache_seq_rm
            removing.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]
            self.remove = lambda first: removing(self.state, 0, first, -1)
        self.api, self.context = api, context
        api.llama_backend_init()
        given = api.llama_model_default_params()
        given.n_gpu_layers = 0
        self.model = api.llama_model_load_from_file(file.encode(), given)
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context + 512, 512, 512
        params.n_threads = params.n_threads_batch = threads
        self.state: Any = api.llama_init_from_model(self.model, params)
        self.batch = api.llama_batch_init(512, 0, 1)
        if filled:
            self.run(0, context)
        self.about = {
            "engine": module,
            "version": importlib.metadata.version(module.replace("_", "-") + "-python"),
        }

    def run(self, first: int, count: int) -> None:
        batch = self.batch
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = (
                (first + i) % 1000 + 1,
                first + i,
                1,
                0,
            )
            batch.logits[i] = 1
        if code := self.api.llama_decode(self.state, batch):
            sys.exit(f"llama_decode: {code}")

    def prepare(self, rows: int) -> Call:
        self.remove(self.context)
        return lambda: self.run(self.context, rows)


class OpenVino:
    """OpenVINO's own reading of the file by OpenVINO GenAI, and one inference over rows."""

    def __init__(self, file: str, threads: int, context: int) -> None:
        import numpy

        openvino: Any = importlib.import_module("openvino")
        openvino_genai: Any = importlib.import_module("openvino_genai")
        self.numpy, self.context, self.length = numpy, context, context
        with tempfile.TemporaryDirectory() as folder:
            linked = Path(folder) / Path(file).name
            linked.symlink_to(Path(file).resolve())
            openvino_genai.LLMPipeline(str(linked), "CPU", enable_save_ov_model=True)
            core = openvino.Core()
            config = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
            self.request = core.compile_model(
                Path(folder) / "openvino_model.xml", "CPU", config
            ).create_infer_request()
        self.about = {"engine": "openvino", "version": importlib.metadata.version("openvino-genai")}

    def run(self, first: int, count: int) -> Any:
        positions = self.numpy.arange(first, first + count, dtype=self.numpy.int64)[None]
        inputs = {
            "input_ids": positions % 1000 + 1,
            "attention_mask": self.numpy.ones((1, first + count), dtype=self.numpy.int64),
            "position_ids": positions,
            "beam_idx": self.numpy.zeros(1, dtype=self.numpy.int32),
        }
        return next(iter(self.request.infer(inputs).values()))

    def prepare(self, rows: int) -> Call:
        self.request.reset_state()
        self.run(0, self.context)

        def call() -> None:
            if (given := self.run(self.context, rows).shape[1]) != rows:
                sys.exit(f"openvino gives logits of {given} rows, {rows} were run")

        return call


ENGINES: dict[str, Callable[[str, int, int], Any]] = {
    "reading": Reading,
    "specengine": SpecEngine,
    "llama_cpp": LlamaCpp,
    "ik_llama_cpp": lambda file, threads, context: LlamaCpp(file, threads, context, "ik_llama_cpp"),
    "openvino": OpenVino,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("file", help="a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=200, help="tokens before the rows")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print to standard output
    with contextlib.suppress(BrokenPipeError):
        engine = ENGINES[args.engine](args.file, args.threads, args.context)
        print(json.dumps(engine.about), file=answers, flush=True)
        for line in sys.stdin:
            engine.prepare(int(line))()  # a call that wakes threads and fills caches
            spent = []
            for _ in range(CALLS):
                call = engine.prepare(int(line))
                began = time.perf_counter()
                call()
                spent.append(1000 * (time.perf_counter() - began))
            print(json.dumps(statistics.median(spent)), file=answers, flush=True)


if __name__ == "__main__":
    main()
