"""Run several engines, each in its own process, on one machine or a cluster."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from specengine.errors import TRUTH, Checked, option, require, whole

COUNT = whole(1, accepted="1 or more")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(_allowed())


def performance_cores(devices: Path = Path("/sys/devices")) -> int:
    """Return the number of physical performance cores that this process may use.

    devices: where Linux describes the processors; elsewhere each of them counts. Those that share a core count once.
    Intel's hybrids list theirs in cpu_core; elsewhere a performance core has half of the largest capacity or more.
    """
    listed = _numbers(_line(devices / "cpu_core/cpus")) & _allowed()
    places = {number: devices / f"system/cpu/cpu{number}" for number in listed or _allowed()}
    capacities = {
        number: int(_line(place / "cpu_capacity") or 1) for number, place in places.items()
    }
    siblings = {
        _line(places[number] / "topology/thread_siblings_list") or str(number)
        for number, capacity in capacities.items()
        if 2 * capacity >= max(capacities.values())
    }
    return len(siblings)


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _line(file: Path) -> str:
    return file.read_text(encoding="ascii").strip() if file.is_file() else ""


def _numbers(text: str) -> set[int]:
    """Return the numbers of a list as Linux writes it: 0-3,8."""
    ranges = [span.split("-") for span in text.split(",") if span]
    return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}


def threads(text: str) -> int:
    """Return the number of threads that a text names; auto is one on each performance core."""
    count = performance_cores() if text == "auto" else int(text)
    COUNT.check("threads", count)
    return count


@dataclass(frozen=True)
class Scale(Checked):
    """InputError where a value is out of range.

    replicas      at least
    max_replicas  at most, as many as there is work for; None is `replicas`
    threads       of each; None: its share of the processors, were there as many as there may be. Without replicas:
                  of this process; None: torch's number
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
        dataclasses.replace(COUNT, kind=threads),
        metavar="N",
        help="threads of the forward on a CPU, or auto, one on each performance core (default: torch's number; of "
        "replicas, a share of the processors)",
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
