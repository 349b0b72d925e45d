"""Ray: a cluster on this machine for as long as it is needed, or one that runs already."""

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from specengine.errors import InputError, missing_extra, require_input
from specengine.replicas import Scale, cores

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 100 << 20  # prompts and answers are small
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    import ray as ray
    from ray._private import ray_constants
except ImportError as error:
    raise missing_extra("replicas", "ray", error) from error


@contextlib.contextmanager
def running(scale: Scale) -> Iterator[None]:
    """Join the cluster of `scale`, or start one on this machine that ends with this process.

    InputError where there is no such cluster, or where it is too small.
    """
    local_cluster: dict[str, Any] = {
        "num_cpus": max(cores(), scale.most * (scale.threads or 1)),
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "_node_ip_address": LOOPBACK,
    }
    try:
        with contextlib.nullcontext() if scale.address else _alone():
            ray.init(
                address=scale.address or "local",
                log_to_driver=False,
                logging_level=logging.ERROR,
                **({} if scale.address else local_cluster),
            )
    except (ConnectionError, ValueError, RuntimeError) as error:
        place = (
            f"no Ray cluster was found at {scale.address}"
            if scale.address
            else "Ray does not start"
        )
        raise InputError(f"ray_address: {place} ({' '.join(str(error).split()):.200})") from error
    try:
        _require_room(scale)
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Let a cluster that starts on this machine listen on the loopback address only, also for its figures.

    Ray takes that address for the one in the network, unless it knows that no other machine will join.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def is_alone() -> bool:
    """Return whether this process belongs to a cluster that listens on the loopback address."""
    return bool(ray.util.get_node_ip_address() == LOOPBACK)


def threads(scale: Scale) -> int:
    """Return the threads per replica: those of `scale`, else the processors over the most replicas."""
    return scale.threads or max(int(ray.cluster_resources().get("CPU", 1)) // scale.most, 1)


def needs(scale: Scale) -> dict[str, Any]:
    """Return a replica's needs of its machine, as Ray's options."""
    environment = {"OMP_NUM_THREADS": str(threads(scale))}
    return {
        "num_cpus": threads(scale), "num_gpus": int(scale.gpu), "runtime_env": {"env_vars": environment}
    }  # fmt: skip


def _require_room(scale: Scale) -> None:
    """Raise InputError where replicas would wait for ever for processors or GPUs that no machine has."""
    there = ray.cluster_resources()
    for name, each, field in (
        ("CPU", threads(scale), "threads"),
        ("GPU", int(scale.gpu), "device"),
    ):
        room = int(there.get(name, 0))
        require_input(
            f"replicas, {field}: {scale.replicas} replicas need {each * scale.replicas} {name}s, "
            f"accepted up to {room} in this cluster",
            each * scale.replicas <= room,
        )
