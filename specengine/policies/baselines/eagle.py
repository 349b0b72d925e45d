"""The EAGLE-2 / EAGLE-3 beam: grow a beam of fixed width, then keep the best nodes of all that were scored."""

from dataclasses import dataclass
from typing import Any, ClassVar

from specengine.policies import Beam


@dataclass
class Eagle(Beam):
    """Beam of `width` nodes, each with its `width` best children, grown `expansions` times below level 1.

    All scored nodes compete for the `budget` by path probability (the rerank of EAGLE-2); height is expansions + 1.

    width       children per node and nodes drafted from per level
    expansions  levels grown after the first (EAGLE's `depth`)
    budget      nodes verified, the root included (EAGLE's `total_tokens`)
    """

    expansions: int = 7
    budget: int = 60

    ends_early = False

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "talon-table1": {"expansions": 8},
        "ltd-table1": {"expansions": 8},
        "salf-table2": {},
        "c2t-data": {"expansions": 10, "budget": 1011},
        "qwen3-script": {"width": 4, "expansions": 8, "budget": 32},
        "cpu": {"width": 4, "expansions": 2, "budget": 12},
    }
