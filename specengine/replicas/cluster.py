"""Ray: a cluster on this machine for as long as it is needed, or one that runs already."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from specengine.errors import InputError, MissingExtraError, require

OBJECT_STORE_BYTES = 100 << 20  # prompts and answers are small
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    import ray
except ImportError as error:
    raise MissingExtraError(f"replicas need {error.name}: pip install 'specengine[ray]'") from error


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def running(address: str | None, cpus: int | None = None) -> Iterator[None]:
    """Joined to the cluster at `address`, or to one of this machine alone that ends with this process.

    address: as ray.init takes it, `auto` for the one that runs here. InputError where there is none.
    """
    own: dict[str, Any] = {
        "num_cpus": cpus or cores(),
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
    }
    try:
        ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            **({} if address else own),
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        place = f"there is no Ray cluster at {address}" if address else "Ray does not start"
        raise InputError(f"ray_address: {place} ({' '.join(str(error).split()):.200})") from error
    try:
        yield
    finally:
        ray.shutdown()


def share(replicas: int, threads: int | None) -> int:
    """Threads of each replica: as asked, else all processors of the cluster divided among them."""
    require("replicas", replicas, "1 or more", replicas >= 1)
    require("threads", threads, "1 or more", threads is None or threads >= 1)
    return threads or max(int(ray.cluster_resources().get("CPU", 1)) // replicas, 1)


def needs(threads: int, *, gpu: bool) -> dict[str, Any]:
    """What a replica asks of the machine that it runs on, as Ray's options name it."""
    return {"num_cpus": threads, "num_gpus": 1 if gpu else 0, "runtime_env": {"env_vars": _environment(threads)}}


def _environment(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads)}
