"""DynaTree: children by confidence, depth by path probability, both adjusted to the history of acceptance."""

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from specengine import ops
from specengine.ops import Flag, Nodes, Step, TokenTree, is_down
from specengine.policies import PerDevice, TreePolicy, require_each, require_minimum

if TYPE_CHECKING:
    from specengine.records import Outcome

# where the history may move its settings; `low` stays as far below `high` as it stays above 0
DEPTH_FLOOR, HIGH_RANGE, DEEP_RANGE, LOW_FLOOR = 2, (0.5, 0.95), (0.3, 0.8), 0.05


@dataclass
class DynaTree(TreePolicy):
    """A sure draft gets one child, an unsure one three; improbable paths end early, probable ones go on for longer.

    A node has `branch_min` children if the draft's largest probability after it is `high` or more, `branch_max` if
    it is below `low`, else `branch_mid`. It is drafted from only while its path probability is `stop` or more, and
    beyond `base_depth` only while it is `deep` or more. Depths count as in the paper, where the first drafted token
    has depth 0.

    nodes          drafted nodes, at most (N_max)
    prune          leaf: no nodes below the path probability `least`; expand: they stay, as leaves; none
    root           known: the tree branches at the known last token; paper: it hangs from the draft's best guess of
                   the next token, which alone has depth 0
    history        move base_depth, high and `moves` by the mean acceptance of the last `window` cycles, once per
                   window, when it is more than `band` from `target`
    statistic      acceptance of a cycle: height, accepted tokens / tree height; drafted, accepted / drafted tokens,
                   which is the paper's
    step           by which the thresholds move; base_depth moves by 1
    law            banded: by these steps, as in the published code; proportional: by these steps times the distance
                   from `target`, as in the code's supplement, which has no band
    moves          the threshold that moves with `high`: deep, as in the published code, or low, as in the paper

    Source: DynaTree, section 3 and appendices A and D; what the text leaves open as in algorithms of its code.
    """

    base_depth: int = 5
    max_depth: int = 8
    branch_min: int = 1
    branch_mid: int = 2
    branch_max: int = 3
    high: float = 0.9
    low: float = 0.4
    stop: float = 0.1
    deep: float = 0.5
    least: float = 0.05
    nodes: int = 256
    root: Literal["known", "paper"] = "known"
    prune: Literal["leaf", "expand", "none"] = "leaf"
    history: bool = True
    window: int = 10
    target: float = 0.7
    band: float = 0.1
    step: float = 0.05
    law: Literal["banded", "proportional"] = "banded"
    statistic: Literal["height", "drafted"] = "height"
    moves: Literal["deep", "low"] = "deep"

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {  # which states no target: this is the share that it measured
            "root": "paper",
            "least": 0.03,
            "statistic": "drafted",
            "moves": "low",
            "target": 0.38,
        },
        "pg19": {"max_depth": 9},
        "breadth": {"history": False, "stop": 0.0, "deep": 0.0, "max_depth": 6},
        "breadth-depth": {"history": False},
        "cpu": {"base_depth": 2, "max_depth": 4, "nodes": 11, "stop": 0.2},
    }

    def __post_init__(self) -> None:
        branches = (self.branch_min, self.branch_mid, self.branch_max)
        require_minimum("dynatree", self, nodes=1, window=1)
        require_each(
            "dynatree",
            (
                "base_depth, max_depth",
                (self.base_depth, self.max_depth),
                "1 <= base < max",
                1 <= self.base_depth < self.max_depth,
            ),
            (
                "branch_min, _mid, _max",
                branches,
                "1 or more, ascending",
                branches[0] >= 1 and list(branches) == sorted(branches),
            ),
            (
                "low, high",
                (self.low, self.high),
                "0 < low < high < 1",
                0 < self.low < self.high < 1,
            ),
            (
                "stop, deep",
                (self.stop, self.deep),
                "0 <= stop < deep <= 1, or both 0",  # the ablation without dynamic depth
                0 <= self.stop < self.deep <= 1 or self.stop == self.deep == 0,
            ),
            ("least", self.least, "0 to below 1", 0 <= self.least < 1),
            *(
                (name, share, "0 to 1", 0 <= share <= 1)
                for name, share in (
                    ("target", self.target),
                    ("band", self.band),
                    ("step", self.step),
                )
            ),
        )
        self._base_depth, self._high = float(self.base_depth), self.high
        self._deep, self._low = self.deep, self.low
        self._rates = deque[float](maxlen=self.window)
        self._since = 0  # cycles after the last adjustment
        # float32 [] each: the whole base depth, the logarithms of high, deep and low
        self._moved = PerDevice(
            lambda device: torch.tensor(self._settings, device=device, dtype=torch.float32).unbind()
        )

    @property
    def capacity(self) -> int:
        return 1 + self.nodes

    @property
    def rows(self) -> int:
        # Paths of one length exclude each other, so their probabilities sum to one, or more by what rounding adds.
        probable = math.inf if not self.lowest else 1.001 / self.lowest
        return int(min(self.nodes, self.branch_max**self.max_depth, probable))

    @property
    def passes(self) -> int:
        return self.max_depth + 1

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        base_depth, high, deep, low = self._moved[tree.device]
        log_probs, tokens = step.best_children(self.branch_max)
        paths = tree.path_log_probs.index_select(0, frontier.ids)[:, None] + log_probs
        # by parent, best first: the order of the paper's queue
        nodes = tree.add_children(
            frontier,
            tokens,
            log_probs,
            self._chosen(log_probs, paths, high, low, ops.number(tree.passes) == 1),
            self.nodes,
            ops.held(self.capacity - ops.number(tree.size)),
        )
        depths, paths = (
            values.index_select(0, nodes.ids) for values in (tree.depths, tree.path_log_probs)
        )
        drafted = (
            (depths <= self.max_depth)
            & (paths >= _log(self.lowest))
            & ((depths <= base_depth) | (paths >= deep))
        )
        expanded = ops.select_best(drafted.float().log(), nodes.live, self.rows)  # 0 or -inf
        ids = nodes.ids.index_select(0, expanded.ids) if len(nodes.ids) else expanded.ids
        return Nodes(ids, expanded.live).where(ops.number(tree.size) < self.capacity)

    def learn(self, outcome: "Outcome") -> None:
        cycle: Any = outcome.cycle  # there, as it keeps no state on a device
        height = int(cycle.tree.depths.max())
        if not self.history or not height:
            return
        self._rates.append(
            cycle.accepted / (height if self.statistic == "height" else len(cycle.tree) - 1)
        )
        self._since += 1
        if self._since >= self.window:
            self._since = 0
            self._adjust(sum(self._rates) / len(self._rates) - self.target)

    @property
    def lowest(self) -> float:
        """Return the path probability below which no node is drafted from."""
        return max(self.stop, self.least) if self.prune == "expand" else self.stop

    def _chosen(
        self, log_probs: Tensor, paths: Tensor, high: Tensor, low: Tensor, first: Flag
    ) -> Tensor:
        """Return which of the best children become nodes, bool [rows, places], by log-probabilities of their edges and
        paths; high, low: logarithms of their present values, []; first: whether the root is their parent."""
        place = torch.arange(log_probs.shape[1], device=log_probs.device, dtype=torch.int64)
        sure, unsure = log_probs[:, :1] >= high, log_probs[:, :1] < low
        counts = torch.full_like(sure, self.branch_mid, dtype=torch.int64)
        counts = counts.masked_fill(sure, self.branch_min).masked_fill(unsure, self.branch_max)
        chosen = (place < counts) & (log_probs > -math.inf)
        if self.root == "paper":
            chosen &= (place < 1) | (~first if isinstance(first, Tensor) else not first)
        if self.prune == "leaf":
            probable = paths >= _log(self.least)
            chosen &= probable if is_down(first) else probable | ((place < 1) & first)
        return chosen

    def _adjust(self, excess: float) -> None:
        if abs(excess) <= self.band:
            return
        by = math.copysign(1, excess) if self.law == "banded" else excess
        self._base_depth = _clip(self._base_depth + by, DEPTH_FLOOR, self.max_depth - 1)
        self._high = _clip(self._high - by * self.step, *HIGH_RANGE)
        if self.moves == "deep":
            self._deep = _clip(self._deep - by * self.step, *DEEP_RANGE)
        else:
            self._low = _clip(self._low - by * self.step, LOW_FLOOR, self._high - LOW_FLOOR)
        for moved in self._moved.values():
            for setting, value in zip(moved, self._settings, strict=True):
                setting.fill_(value)

    @property
    def _settings(self) -> list[float]:
        return [
            float(round(self._base_depth)),
            math.log(self._high),
            _log(self._deep),
            math.log(self._low),
        ]


def _log(probability: float) -> float:
    return math.log(probability) if probability else -math.inf


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), max(high, low))
