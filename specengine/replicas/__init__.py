"""Run several engines, each in its own process, on one machine or a cluster."""

from __future__ import annotations

import os
from dataclasses import dataclass

from specengine.errors import require


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Scale:
    """InputError where a value is out of range.

    replicas      at least
    max_replicas  at most, as many as there is work for; None is `replicas`
    threads       of each; None: its share of the processors, were there as many as there may be
    address       of a cluster of Ray's; None: one on this machine, for as long as the server runs
    gpu           each has a GPU of its own
    """

    replicas: int = 1
    max_replicas: int | None = None
    threads: int | None = None
    address: str | None = None
    gpu: bool = False

    def __post_init__(self) -> None:
        require("replicas", self.replicas, "1 or more", self.replicas >= 1)
        require("threads", self.threads, "1 or more", self.threads is None or self.threads >= 1)
        most = self.max_replicas
        require(
            "max_replicas", most, f"{self.replicas} or more", most is None or most >= self.replicas
        )

    @property
    def most(self) -> int:
        return self.max_replicas or self.replicas
