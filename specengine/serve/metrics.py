"""Counters for Prometheus, under vLLM's names with a prefix of our own, and the sums of those of several replicas."""

from collections import Counter as Counts
from collections.abc import Iterable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from specengine.engine import Engine
from specengine.engine.parts import Pool, bytes_held, bytes_used
from specengine.protocol.completion import Completion

SHARE = "_perc"  # the end of the name of a figure that is 1 at most, as vLLM has it
USAGE = f"specengine_kv_cache_usage{SHARE}"
disable_created_metrics()  # a series for each, which nobody reads
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


_COUNTERS = {
    "spec_decode_num_drafts": "Trees verified",
    "spec_decode_num_draft_tokens": "Draft tokens verified",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted",
    "prompt_tokens": "Tokens of prompts",
    "prefix_cache_queries": "Tokens of prompts that were looked for in the caches",
    "prefix_cache_hits": "Tokens of prompts that the caches held",
    "generation_tokens": "Tokens generated",
}
_TIMES = {
    "time_to_first_token": "From the engine's start to the first token",
    "request_queue_time": "Spent waiting for the engine",
    "e2e_request_latency": "From the request to its last token",
}


class Metrics(Collector):
    """Metrics of one model; two servers in a process share none.

    answering: whose use of caches is reported too, and of a pool the rows of forward passes; None: nothing is loaded
    """

    def __init__(self) -> None:
        self.answering: Pool | Engine | None = None
        registry = self.registry = CollectorRegistry()
        registry.register(self)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"specengine_{name}", text, labels, registry=registry)

        self.running = Gauge(
            "specengine_num_requests_running", "Requests being answered", registry=registry
        )
        self.waiting = Gauge(
            "specengine_num_requests_waiting", "Requests in the queue", registry=registry
        )
        self.counters = {name: counter(name, text) for name, text in _COUNTERS.items()}
        self.times = {
            name: Histogram(f"specengine_{name}_seconds", text, buckets=_SECONDS, registry=registry)
            for name, text in _TIMES.items()
        }
        self.by_position = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted at this depth, 0 the first",
            ("position",),
        )
        self.finished = counter(
            "request_success", "Requests answered, by how they ended", ("finished_reason",)
        )
        self.failed = counter(
            "request_failure", "Requests refused or failed, by HTTP status", ("status",)
        )

    def count(self, answer: Completion, ended: str, waited: float, whole: float) -> None:
        """Count one generation; ended: stop, length or abort; waited, whole: seconds since the request came."""
        stats = answer.stats
        counts = {
            "spec_decode_num_drafts": stats.num_spec_steps - stats.num_plain_steps
            if stats.draft
            else 0,
            "spec_decode_num_draft_tokens": stats.num_draft_tokens,
            "spec_decode_num_accepted_tokens": stats.num_accepted_draft_tokens,
            "prompt_tokens": stats.num_prompt_tokens,
            "prefix_cache_queries": stats.num_prompt_tokens,
            "prefix_cache_hits": answer.cached_tokens,
            "generation_tokens": stats.num_generated_tokens,
        }
        for name, count in counts.items():
            self.counters[name].inc(count)
        for position in range(len(stats.acceptance_histogram) - 1):
            self.by_position.labels(position).inc(sum(stats.acceptance_histogram[position + 1 :]))
        self.finished.labels(ended).inc()
        if stats.ttft_s:
            self.times["time_to_first_token"].observe(stats.ttft_s)
        self.times["request_queue_time"].observe(waited)
        self.times["e2e_request_latency"].observe(whole)

    def text(self) -> bytes:
        """Return Prometheus' text format, version 0.0.4."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of forward passes and caches, read when they are asked for."""
        pool = self.answering
        if isinstance(pool, Engine):
            share = len(pool.target.tokens) / pool.target.max_context if pool.is_busy else 0.0
            yield GaugeMetricFamily(
                USAGE, "Part of the context that the prompt and answer under way fill", share
            )
        if not isinstance(pool, Pool):
            return
        used = sum(
            bytes_used(engine)
            for engine in pool.engines
            if engine.is_busy and engine not in pool.waiting
        )
        held = sum(map(bytes_held, pool.engines))
        yield GaugeMetricFamily(
            USAGE, "Part of the memory that prompts and answers under way fill", used / pool.memory
        )
        yield GaugeMetricFamily(
            "specengine_kv_cache_bytes", "Memory of all caches, kept prompts included", held
        )
        yield SummaryMetricFamily(
            "specengine_iteration_tokens",
            "Rows of each forward pass, of all requests",
            pool.scheduler.forwards,
            pool.scheduler.rows,
        )


Key = tuple[str, tuple[tuple[str, str], ...]]


class Added:
    """Sums over replicas, and means of shares.

    What a replica had counted stays when it has gone, what it was just doing does not.
    label: of the names of those that have one, which are told apart by it and not added
    """

    def __init__(self, label: str = "") -> None:
        self._label = label
        self._latest: dict[str, list[Metric]] = {}
        self._gone: set[str] = set()

    def take(self, figures: Iterable[tuple[str, str]]) -> None:
        """Take the current figures of every replica: its name, and Prometheus' text."""
        now = {name: list(text_string_to_metric_families(text)) for name, text in figures}
        self._latest |= now
        self._gone = set(self._latest) - set(now)

    def collect(self) -> Iterator[Metric]:
        sums: dict[str, tuple[Metric, dict[Key, float]]] = {}
        shares = Counts[str]()  # replicas that tell of each
        for replica, families in self._latest.items():
            for family in families:
                if replica in self._gone and family.type == "gauge":
                    continue
                _, samples = sums.setdefault(
                    family.name, (Metric(family.name, family.documentation, family.type), {})
                )
                shares[family.name] += 1
                for sample in family.samples:
                    whose = {self._label: replica} if self._label and replica else {}
                    key = sample.name, tuple(sorted((sample.labels | whose).items()))
                    samples[key] = samples.get(key, 0.0) + sample.value
        for metric, samples in sums.values():
            is_mean = metric.name.endswith(SHARE) and not self._label
            count = shares[metric.name] if is_mean else 1
            for (name, labels), value in samples.items():
                metric.add_sample(name, dict(labels), value / count)
            yield metric

    def text(self) -> bytes:
        return generate_latest(self)
