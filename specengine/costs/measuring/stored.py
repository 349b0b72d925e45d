"""Measured costs, stored in the cache folder by model, draft, device and versions."""

import functools
import hashlib
import importlib.metadata
import json
import os
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from specengine.costs import PassCosts, busy
from specengine.costs.laws import fault
from specengine.costs.measuring import (
    SECONDS,
    Driver,
    ProcessorTimes,
    count_experts,
    measure,
    processor_times,
    share_of_others,
)
from specengine.drafters import Drafter, innermost
from specengine.errors import CacheFolderError, InputError
from specengine.files import cache_dir, processor_name, write_whole
from specengine.models import Target
from specengine.models.extension import thread_count
from specengine.ops import VARIABLE, attached

MAX_SHARE = 0.01  # of the time, for measuring provisional costs again
MAX_SECONDS = 3600.0  # of a pass; a file that states more is damaged


@dataclass
class _Kept:
    """Costs as a file has them, when they were measured, in seconds since 1970, and the last processor times."""

    costs: PassCosts
    when: float
    times: ProcessorTimes | None = field(default_factory=processor_times)

    def may_improve(self) -> bool:
        """Return whether provisional costs may be measured again: the machine is quiet, and enough time has passed."""
        if self.costs.doubt is None or time.time() - self.when < SECONDS / MAX_SHARE:
            return False
        others = share_of_others(self.times)
        self.times = processor_times()
        return others is not None and busy(others) is None


_loaded: dict[str, _Kept] = {}  # by file, so that a process measures once even if it cannot write


def find(
    target: Target, drafter: Drafter | None, driver: Driver | None = None, *, fresh: bool = False
) -> PassCosts:
    """Return the costs of target and drafter on this machine, measured on first use and then read from the cache.

    driver: as in `identity`; fresh: measure again and store the result.

    Measuring clears the caches of both. A file that is damaged, of another pair, or whose costs break a law, is
    replaced. Costs of a busy machine are provisional: while no other text is answered they are measured again, once
    nobody else uses the processors, for a bounded share of the time. If no file can be written, `source` has the
    reason.
    """
    key = identity(target, drafter, driver)
    name = _place(key)
    stored_costs = None if fresh else _loaded.get(name) or _read(key)
    if stored_costs is None or (not getattr(target, "others", 0) and stored_costs.may_improve()):
        stored_costs = _Kept(
            measure(target, drafter, driver if target.device.type == "cuda" else None), time.time()
        )
        if reason := _write(key, stored_costs):
            stored_costs.costs = replace(
                stored_costs.costs, source=f"{stored_costs.costs.source}, not stored: {reason}"
            )
    _loaded[name] = stored_costs
    return stored_costs.costs


def path(key: dict[str, Any]) -> Path:
    """Return the file for a result of `identity`. CacheFolderError where there is no cache folder."""
    return cache_dir() / "costs" / f"{digest(key)}.json"


def _place(key: dict[str, Any]) -> str:
    try:
        return str(path(key))
    except CacheFolderError:
        return digest(key)


def is_stored(key: dict[str, Any]) -> bool:
    """Return whether there is a file for a result of `identity`."""
    try:
        return path(key).is_file()
    except OSError:
        return False


def _read(key: dict[str, Any]) -> _Kept | None:
    try:
        content = json.loads(path(key).read_text(encoding="utf-8"))
        costs = PassCosts.from_dict(content["costs"]) if content["key"] == key else None
        when = min(float(content["when"]), time.time())
    except (OSError, ValueError, KeyError, TypeError, InputError, RecursionError, OverflowError):
        return None
    return _Kept(costs, when) if costs is not None and _is_believable(costs) else None


def _is_believable(costs: PassCosts) -> bool:
    """Return whether a machine can have measured this."""
    columns = (costs.verify, costs.draft, costs.verify_growth, costs.draft_growth)
    seconds = [
        costs.overhead,
        costs.expert,
        *(second for column in columns for second in column.values()),
    ]
    sizes = [
        costs.context,
        costs.all_experts,
        *(nodes for column in columns for nodes in column),
        *costs.experts,
    ]
    fits = (
        max(seconds) <= MAX_SECONDS
        and max(sizes) < 1 << 31
        and min(costs.verify.values()) > 0
        and costs.measured
    )
    return fits and not (fault(costs.verify) or fault(costs.draft))


def _write(key: dict[str, Any], stored_costs: _Kept) -> str | None:
    """Write the file. Return the reason if that fails."""
    try:
        file = path(key)
        content = {
            "key": key,
            "when": int(stored_costs.when),
            "costs": stored_costs.costs.to_dict(),
        }
        write_whole(file, json.dumps(content, indent=1) + "\n")
    except CacheFolderError as error:
        return str(error)
    except OSError as error:
        return f"{file.parent} cannot be written ({error.strerror or error})"
    return None


DRIVER_FACTS = Path("/proc/driver/nvidia/version")


def identity(
    target: Target, drafter: Drafter | None, driver: Driver | None = None
) -> dict[str, Any]:
    """Return what costs depend on, JSON-ready: model, draft, device, versions and how they run.

    driver: of the engine that runs them on a CUDA device, if it captures graphs; elsewhere it makes no difference.
    """
    lm: Any = getattr(target, "lm", None)
    config = getattr(lm, "config", None)
    sizes = {"vocabulary": target.vocab_size, "context": target.max_context}
    on_cuda = target.device.type == "cuda"
    return {
        "model": target.name or type(target).__name__,
        "parameters": getattr(lm, "parameters", None),
        "config": digest(sizes | ({} if config is None else config.to_dict())),
        "draft": None if drafter is None else drafter.name,
        "draft parameters": None
        if drafter is None
        else sum(
            parameter.numel()
            for module in getattr(drafter, "weights", ())
            for parameter in module.parameters()
        ),
        "draft head": _head(drafter),
        "device": torch.cuda.get_device_name(target.device) if on_cuda else processor_name(),
        "dtype": str(getattr(target, "dtype", None)).removeprefix("torch."),
        "backend": target.backend,
        "packed": getattr(lm, "packed", None),
        "strict": getattr(target, "strict_rows", 0) > 0,
        "captured": target.captured,
        "threads": thread_count() if target.device.type == "cpu" else None,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "specengine": _version(),
        **({"experts": "counted"} if count_experts(target) else {}),
        **({"trees": "chains"} if target.paths else {}),
        **(
            {  # who compiles kernels, which there are, and what captures hold
                "policy": None if drafter is None or driver is None else repr(driver.policy),
                "triton": _version("triton"),
                "ops": [os.environ.get(VARIABLE, ""), *attached("cuda")],
                "cuda": [torch.version.cuda or torch.version.hip, _driver_version()],
            }
            if on_cuda
            else {}
        ),
    }


def _driver_version() -> str:
    """Return the version of NVIDIA's driver, as far as the system tells it."""
    try:
        words = DRIVER_FACTS.read_text(encoding="utf-8", errors="replace").splitlines()[0].split()
    except (OSError, IndexError):
        words = []
    supports = getattr(torch._C, "_cuda_getDriverVersion", None)
    numbers = (word for word in words if word.replace(".", "").isdigit())
    return next(numbers, "") or str(supports() if supports is not None else "")


def digest(facts: dict[str, Any]) -> str:
    """Return 32 hexadecimal digits that identify JSON-ready facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _head(drafter: Drafter | None) -> str | None:
    """Return a digest of a head's sizes and stored weight type, inside any wrapping drafters."""
    head: Any = None if drafter is None else getattr(innermost(drafter), "head", None)
    if head is None:
        return None
    config = getattr(head, "config", None)
    sizes = {"hidden_size": head.hidden_size} if config is None else asdict(config)
    return digest(sizes | {"stored": getattr(head, "stored", None)})


@functools.cache
def _version(package: str = "specengine") -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
