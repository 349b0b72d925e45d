"""Compute likelihoods with llama.cpp: run by the Python that has its binding, without this package's other modules.

    PYTHON bench/cpu/llama_nats.py FILE [--threads 2] < windows.json

Reads windows of token ids, [[...], ...], and writes a line of JSON: the binding's version and the negative
log-likelihood of each token but the first of its window, given those before it in the window.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.metadata
import json
import os
import sys
from typing import Any


def nats(file: str, windows: list[list[int]], threads: int) -> list[list[float]]:
    """Return negative log-likelihoods, [windows][tokens - 1], each window from an empty cache."""
    numpy: Any = importlib.import_module("numpy")
    api: Any = importlib.import_module("llama_cpp")
    longest = max(map(len, windows))
    api.llama_backend_init()
    model = api.llama_model_load_from_file(file.encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = longest
    params.n_threads = params.n_threads_batch = threads
    state = api.llama_init_from_model(model, params)
    size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    batch = api.llama_batch_init(longest, 0, 1)
    found = []
    for window in windows:
        api.llama_memory_clear(api.llama_get_memory(state), True)
        batch.n_tokens = len(window) - 1
        for i, token in enumerate(window[:-1]):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, i, 1, 0
            batch.logits[i] = 1
        if code := api.llama_decode(state, batch):
            sys.exit(f"llama_decode: {code}")
        given = ctypes.cast(api.llama_get_logits(state), ctypes.POINTER(ctypes.c_float))
        logits = numpy.ctypeslib.as_array(given, (len(window) - 1, size)).astype(numpy.float64)
        logits -= logits.max(axis=1, keepdims=True)
        sums = numpy.log(numpy.exp(logits).sum(axis=1))
        found.append((sums - logits[numpy.arange(len(window) - 1), window[1:]]).tolist())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", help="a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp prints to standard output
    version = importlib.metadata.version("llama-cpp-python")
    print(
        json.dumps(
            {"version": version, "nats": nats(args.file, json.load(sys.stdin), args.threads)}
        ),
        file=answer,
    )


if __name__ == "__main__":
    main()
