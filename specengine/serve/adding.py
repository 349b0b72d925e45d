"""The counters of several replicas as those of one server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

Key = tuple[str, tuple[tuple[str, str], ...]]


class Added:
    """Sums over replicas; what one of them had counted stays when it has gone, what it was just doing does not."""

    def __init__(self) -> None:
        self._latest: dict[str, list[Metric]] = {}
        self._gone: set[str] = set()

    def take(self, figures: Iterable[tuple[str, str]]) -> None:
        """What every replica that is there says now: its name, and Prometheus' text."""
        now = {name: list(text_string_to_metric_families(text)) for name, text in figures}
        self._latest |= now
        self._gone = set(self._latest) - set(now)

    def collect(self) -> Iterator[Metric]:
        sums: dict[str, tuple[Metric, dict[Key, float]]] = {}
        for replica, families in self._latest.items():
            for family in families:
                if replica in self._gone and family.type == "gauge":
                    continue
                made = Metric(family.name, family.documentation, family.type)
                _, samples = sums.setdefault(family.name, (made, {}))
                for sample in family.samples:
                    key = sample.name, tuple(sorted(sample.labels.items()))
                    created = sample.name.endswith("_created")
                    known = samples.get(key, float("inf") if created else 0.0)
                    samples[key] = min(known, sample.value) if created else known + sample.value
        for metric, samples in sums.values():
            for (name, labels), value in samples.items():
                metric.add_sample(name, dict(labels), value)
            yield metric

    def text(self) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)
