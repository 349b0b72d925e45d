"""Who asks, and what each was served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable

from specengine.engine import Client

MOST = 4096  # clients that are remembered


class Clients:
    """Clients by name. Whoever was served least goes first, as in VTC (Sheng et al. 2024, arXiv 2401.00588).

    Served are tokens that were read, those of caches left out, and tokens that were written. A client that asks anew
    counts as served no less than the least served one that asked beside others last: nobody saves up a claim.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Client] = OrderedDict()
        self._least = 0  # served to whoever was served least, of those that asked

    def of(self, name: Hashable, asking: Collection[Client]) -> Client:
        """Return the client of this name; asking: those whose answers wait or are under way."""
        client = self._known.setdefault(name, Client())
        self._known.move_to_end(name)
        if asking:
            self._least = max(self._least, min(other.served for other in asking))
        if client not in asking:
            client.served = max(client.served, self._least)
        if len(self._known) > MOST:
            self._known.popitem(last=False)
        return client
