"""What the search reads and writes on a device: counted chances, notes on nodes, prices and the rate of tokens."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from specengine import ops
from specengine.costs import CostTable
from specengine.ops import Counts, Notes, Prices, SearchState, Throughput
from specengine.ops.worth import LEVELS, MAX_CHANCE, MIN_CHANCE

# of Counts, between texts; how sure a draft's first tokens are is each text's own
SHARED = "hits", "tries", "table"
PRIOR = Path(__file__).parents[1] / "networks" / "chances.safetensors"
PRIOR_TRIES = 8.0  # tries that a prior counts for


class DeviceSearch:
    """State of the rule on a device.

    bound: what ops read and write of it; skipped: int32 [1], cycles since the last draft pass; trained: as in `enter`.
    """

    def __init__(
        self,
        capacity: int,
        widths: Tensor,
        tables: CostTable,
        overhead: float,
        experts: Sequence[float],
        device: torch.device,
    ) -> None:
        seconds = CostTable(*(table.to(device, copy=True) for table in tables))
        plain = seconds.verify[1:2]
        prices = Prices(torch.zeros_like(seconds.verify), torch.zeros_like(seconds.draft), widths)
        recent = torch.cat([torch.ones_like(plain), plain]) * PRIOR_TRIES
        self.skipped, verified, self.none = torch.zeros(
            3, 1, dtype=torch.int32, device=device
        ).unbind()
        drafting = torch.zeros(1, device=device, dtype=torch.float32)
        throughput = Throughput(
            *seconds,
            prices,
            recent,
            drafting,
            verified,
            torch.full_like(drafting, overhead),
            drafting.new_tensor(experts),
        )
        ops.update_throughput(throughput, self.none)
        self.bound = ops.bind_search(
            SearchState(_counts(device), _notes(capacity, device), throughput)
        )

    def enter(self, group: int, trained: bool) -> None:
        """Count by the chances of such answers and drafts.

        group: 0 of greedy answers, 1 of sampled ones; trained: whether a head or a model drafts, so that what is copied
        and recycled only comes on top. Their groups come before those of other drafts.
        """
        self.trained = trained
        self.bound.counts.group.fill_(group + 2 * (not trained))

    def price(self, tables: CostTable, overhead: float, experts: Sequence[float]) -> None:
        """Bring prices up to date. experts: what prices nodes by their relation, as Throughput has it."""
        throughput = self.bound.throughput
        # whose host has other things to do
        throughput.verify.copy_(tables.verify, non_blocking=True)
        throughput.draft.copy_(tables.draft, non_blocking=True)
        throughput.overhead.fill_(overhead)
        if experts or throughput.experts.numel():
            throughput = throughput._replace(experts=throughput.experts.new_tensor(experts))
            self.bound = ops.bind_search(
                SearchState(self.bound.counts, self.bound.notes, throughput)
            )
        ops.update_throughput(throughput, self.none)

    def share(self, other: "DeviceSearch") -> None:
        """Count by stated chance what is accepted, and tokens over seconds, together with another state."""
        counts = self.bound.counts._replace(
            **{name: getattr(other.bound.counts, name) for name in SHARED}
        )
        throughput = self.bound.throughput._replace(recent=other.bound.throughput.recent)
        self.bound = ops.bind_search(SearchState(counts, self.bound.notes, throughput))


@cache
def _prior() -> tuple[Tensor, Tensor]:
    """Return chances and a profile to begin with, as bench.chances counted them."""
    counted = load_file(PRIOR)
    return counted["table"].clamp(MIN_CHANCE, MAX_CHANCE), counted["profile"]


def _counts(device: torch.device) -> Counts:
    """Return the counts of a fresh engine: four groups, for greedy and sampled answers, by each kind of draft."""
    table, profile = _prior()
    tries, passes = (
        torch.full_like(table, PRIOR_TRIES),
        torch.full((LEVELS,), PRIOR_TRIES, dtype=torch.float32, device="cpu"),
    )
    group = torch.zeros(1, dtype=torch.int64, device="cpu")
    parts = tries * table, tries, table, passes[:, None] * profile, passes, profile, group
    return Counts(*(part.to(device, copy=True).contiguous() for part in parts))


def _notes(capacity: int, device: torch.device) -> Notes:
    cells, places = torch.zeros(2, capacity + 1, dtype=torch.int64, device=device).unbind()
    waiting, drafted = torch.zeros(2, capacity + 1, dtype=torch.bool, device=device).unbind()
    return Notes(
        torch.zeros(capacity + 1, device=device, dtype=torch.float32),
        cells,
        places,
        waiting,
        drafted,
    )
