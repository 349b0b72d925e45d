"""Run several engines, each in its own process, on one machine or a cluster."""

import os
from dataclasses import dataclass

from specengine.errors import TRUTH, Checked, option, require, whole

COUNT = whole(1, accepted="1 or more")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Scale(Checked):
    """InputError where a value is out of range.

    replicas      at least
    max_replicas  at most, as many as there is work for; None is `replicas`
    threads       of each; None: its share of the processors, were there as many as there may be
    address       of a cluster of Ray's; None: one on this machine, for as long as the server runs
    gpu           each has a GPU of its own
    """

    replicas: int = option(
        COUNT,
        default=1,
        metavar="N",
        help="engines, each in a process of its own (needs the extra `ray`; default 1: this process)",
    )
    max_replicas: int | None = option(
        COUNT, metavar="N", help="as many as there is work for, up to N (default: --replicas)"
    )
    threads: int | None = option(
        COUNT,
        metavar="N",
        help="threads of each replica (default: its share of the processors)",
    )
    address: str | None = option(
        flag="ray-address",
        metavar="ADDRESS",
        help="Ray cluster to run on, auto for the one on this machine (default: none)",
    )
    gpu: bool = option(TRUTH, default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.max_replicas
        require(
            "max_replicas", most, f"{self.replicas} or more", most is None or most >= self.replicas
        )

    @property
    def most(self) -> int:
        return self.max_replicas or self.replicas
