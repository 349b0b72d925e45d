"""Load test of the server with guidellm: the default model, streamed answers, a few clients at once.

    python -m bench.load --guidellm .venv-load/bin/guidellm --out FILE

Without --parallel the server answers one request at a time, so more clients only add waiting. No prompt occurs twice in
a run, so each number of clients gets other prompts. Runs with --clients in another order separate the two effects.
bench.servers compares servers.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from bench import provenance
from bench.arguments import add_arguments
from specengine.benchmark.workloads import read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--guidellm", required=True, help="path of the guidellm program")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--requests", type=int, default=8, help="for each number of clients")
    parser.add_argument("--parallel", type=int, default=1, help="answers of the server at once")
    add_arguments(parser, "out", max_new_tokens=64)
    parser.add_argument("--port", type=int, default=8093)
    args = parser.parse_args()
    texts = [item.text for item in read(None)]
    random.Random(0).shuffle(texts)
    if len(texts) < args.requests * len(args.clients):
        parser.error(f"--requests: {len(texts)} prompts ship, and none is to come twice")
    command = [
        sys.executable,
        "-m",
        "specengine",
        "serve",
        "--served-model-name",
        "default",
        "--port",
        str(args.port),
    ]
    command += ["--parallel", str(args.parallel)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            _wait(server, f"http://127.0.0.1:{args.port}/health")
            batches = [
                texts[turn * args.requests :][: args.requests] for turn in range(len(args.clients))
            ]
            asked = zip(args.clients, batches, strict=True)
            provenance.show(
                (row_of(_guidellm(args, clients, prompts)) for clients, prompts in asked), args.out
            )
        finally:
            server.kill()


def row_of(report: dict[str, Any]) -> dict[str, Any]:
    """Return the row for one number of clients, with percentiles, from guidellm's report."""
    benchmark = report["benchmarks"][0]
    metrics = benchmark["metrics"]

    def at(name: str, percentile: str, digits: int) -> float:
        return round(metrics[name]["successful"]["percentiles"][percentile], digits)

    totals = metrics["request_totals"]
    tokens = metrics["output_token_count"]["successful"]["total_sum"]
    return {
        "record": "load",
        "client": f"guidellm {report['metadata']['guidellm_version']}",
        "clients": benchmark["config"]["strategy"]["streams"],
        "answered": totals["successful"],
        "failed": totals["errored"],
        "tokens_per_second": round(tokens / benchmark["duration"], 1),
        "first_token_ms_p50": at("time_to_first_token_ms", "p50", 0),
        "first_token_ms_p95": at("time_to_first_token_ms", "p95", 0),
        "between_tokens_ms_p50": at("inter_token_latency_ms", "p50", 1),
        "between_tokens_ms_p95": at("inter_token_latency_ms", "p95", 1),
        "answer_s_p50": at("request_latency", "p50", 2),
        "answer_s_p95": at("request_latency", "p95", 2),
    }


def _guidellm(args: argparse.Namespace, clients: int, texts: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        prompts, report = Path(folder) / "prompts.jsonl", Path(folder) / "report.json"
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        backend = {
            "kind": "openai_http",
            "target": f"http://127.0.0.1:{args.port}",
            "model": "default",
        }
        options = {
            "backend": backend | {"max_tokens": args.max_new_tokens},
            "profile": {"kind": "concurrent", "streams": clients},
            "constraint": {"kind": "max_requests", "count": len(texts)},
            "data": {"kind": "json_file", "path": str(prompts)},
            "output": {"kind": "json", "path": str(report)},
        }
        words = [
            word for name, value in options.items() for word in (f"--{name}", json.dumps(value))
        ]
        done = subprocess.run(
            [args.guidellm, "run", *words, "--disable-console"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not report.exists():
            raise SystemExit(f"guidellm failed:\n{done.stderr[-2000:]}")
        return json.loads(report.read_text())


def _wait(server: subprocess.Popen[bytes], health: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            with urlopen(health, timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.2)
    raise SystemExit("the server did not become ready")


if __name__ == "__main__":
    main()
