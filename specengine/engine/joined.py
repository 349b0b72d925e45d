"""Cycles of a pool's texts as CUDA graphs of all of them.

Their rows are one forward. What each text does by itself is a branch of the graph.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, partialmethod
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from specengine import ops
from specengine.cycle import Lane
from specengine.drafters import RowDraft
from specengine.engine.captured import CapturedDriver, Choice
from specengine.models.huggingface import PADDED_ROWS, ModuleLane, ModuleRows, padded_width
from specengine.models.kv_cache import Rows, counted
from specengine.ops import Nodes
from specengine.ops.cuda_graphs import CaptureError, Graphs, side_by_side
from specengine.ops.tree import TokenTree, sent

T = TypeVar("T")


class JoinedDriver(CapturedDriver):
    """Runs the cycles of a pool's texts as graphs of all of them, whose rows are one forward.

    texts: drivers with what is each text's own. One that is not under way goes along to no effect: its frontier is
    empty, and nothing of it is committed.
    """

    texts: Sequence[CapturedDriver] = ()

    def __init__(self, texts: Sequence[CapturedDriver]) -> None:
        first, count = texts[0], len(texts)
        super().__init__(first.target, first.drafter, first.policy)
        self.texts, self.branched = texts, False
        self._rows = cast(ModuleLane, first.target).joined
        drafters = [text.drafter for text in texts if text.drafter is not None]
        self._drafted = Located(drafters, self.tree.device)
        # by text: whether it is under way, and how many nodes there are to draft from, at first 1 where it may draft
        self._flags = torch.zeros(2, count, dtype=torch.int32, device=self.tree.device)
        # by text: whether it is under way, its root, and whether it may draft
        self._planted = torch.zeros(count, 3, dtype=torch.int64, device=self.tree.device)
        self.record = self.record.repeat(count)
        self._records = [
            torch.zeros_like(self.record, device="cpu", pin_memory=self.tree.device.type == "cuda")
        ]
        for number, text in enumerate(texts):
            text.joined = self
            text.under_way = self._flags[0, number : number + 1]
            text.frontier = text.frontier._replace(live=self._flags[1, number : number + 1])

    def run(self, lanes: Sequence[Lane]) -> list[Any]:
        """Run one cycle of each lane: in graphs of its own where it is alone, else by how they choose tokens."""
        if len(lanes) == 1:
            return cast(CapturedDriver, lanes[0].driver).run(lanes)
        results = dict[int, Any]()
        ways = [cast(CapturedDriver, lane.driver).sampler.request for lane in lanes]
        for choice in {*ways}:
            self._flags.zero_()
            group = [lane for lane, way in zip(lanes, ways, strict=True) if way == choice]
            results.update(zip(map(id, group), super().run(group), strict=True))
        return [results[id(lane)] for lane in lanes]

    def make_ready(self, choice: Choice, *, whole: bool = True) -> None:
        self.locate()
        super().make_ready(choice, whole=whole)

    def locate(self) -> None:
        """Make room after each text, and note where the caches lie."""
        for text in self.texts:
            text.reserve(len(text.target.tokens))
        self._rows.locate()
        self._drafted.locate()

    def reads(self) -> tuple[Tensor, ...]:
        texts = chain.from_iterable(text.reads() for text in self.texts)
        return self._rows.located.tables, self._drafted.tables, *texts

    def _of_each(self, function: Callable[..., T], *values: Sequence[Any]) -> list[T]:
        """Run a function of each text, and of its values, side by side: one text's has nothing to do with others'."""
        each = [
            partial(function, *arguments) for arguments in zip(self.texts, *values, strict=True)
        ]
        return side_by_side(self.tree.device, each)

    def _run_pass(self, rows: Sequence[Any]) -> None:
        """Run the rows of a draft pass of all texts in one forward; of drafts whose rows stand alone there are none."""
        if rows[0] is not None:
            rows[0].model.run_lanes(rows, self._drafted.by_layer())

    def plant_each(self, roots: Mapping[CapturedDriver, tuple[int, bool]]) -> None:
        numbers = [
            (1, *map(int, roots[text])) if text in roots else (0, 0, 0) for text in self.texts
        ]
        self._planted.copy_(sent(cast(Any, numbers), torch.int64, self.tree.device))
        self._run("plant")

    def run_plant(self) -> None:
        """Begin the trees of all texts in one launch of the host, by the numbers that it has sent."""

        def begin(text: CapturedDriver, numbers: Tensor) -> None:
            text.tree.restart()
            text.tree.tokens[:1].copy_(numbers[1:2])

        self._flags.copy_(self._planted[:, ::2].t())
        self._of_each(begin, self._planted.unbind())

    def run_first(self) -> None:
        drafts = self._flags[1].clone()
        self._of_each(CapturedDriver.run_first)
        self._flags[1].mul_(drafts)

    def run_root(self) -> None:
        def ask(text: CapturedDriver) -> tuple[Any, Tensor]:
            draft = cast(RowDraft, text.drafter)
            # tokens of a text without a pass, which go on waiting
            waiting = draft.taken.masked_fill(text.frontier.live > 0, 0)
            draft.taken.sub_(waiting)
            return draft.ask(text.tree, None), waiting

        def go_on(text: CapturedDriver, waiting: Tensor) -> None:
            text.run_root()
            cast(RowDraft, text.drafter).taken.add_(waiting)

        rows, waiting = zip(*self._of_each(ask), strict=True)
        self._run_pass(rows)
        self._of_each(go_on, waiting)

    def run_level(self) -> None:
        def ask(text: CapturedDriver) -> Any:
            return cast(RowDraft, text.drafter).ask(text.tree, text.frontier)

        self._run_pass(self._of_each(ask))
        self._of_each(CapturedDriver.run_level)

    def run_finish(self, rows: int = 0) -> None:
        def ask(text: CapturedDriver) -> tuple[Any, Nodes, TokenTree]:
            nodes, verified = text.select(rows)
            return cast(ModuleLane, text.target).ask(verified, greedy=False), nodes, verified

        batch, *selected = zip(*self._of_each(ask), strict=True)
        for each in batch:  # whatever a text that is not under way was last asked for
            each.features = () if self.drafter is None else self.drafter.traits.features
        self._rows.forward(batch)
        for text, outcome in zip(
            self.texts, self._of_each(CapturedDriver.commit, *selected), strict=True
        ):
            text.learn_there(outcome)
        self._of_each(lambda text: text.tree.restart())
        torch.cat([text.record for text in self.texts], out=self.record)

    run_plain = partialmethod(run_finish, 1)


class Located:
    """The caches of several targets or drafts, and the tables that say where they lie.

    addresses: of the slabs when the tables were made, with the capacities, as one may take another's place
    """

    def __init__(self, owners: Sequence[Any], device: torch.device) -> None:
        self._owners = owners
        self.addresses = list[tuple[int, int]]()
        self.tables = torch.zeros(0, dtype=torch.int64, device=device)

    @property
    def slabs(self) -> list[Tensor]:
        return [owner.cache.slab for owner in self._owners]

    def locate(self) -> list[tuple[int, int]]:
        """Make new tables where a slab was replaced; return the addresses."""
        slabs = self.slabs
        addresses = [(slab.data_ptr(), slab.shape[3]) for slab in slabs]
        if addresses != self.addresses:
            self.addresses, self.tables = addresses, ops.tables_of(slabs)
        return addresses

    def by_layer(self) -> list[ops.Slabs]:
        """Return the slabs of each layer, once they are located."""
        return ops.Slabs.by_layer(self.slabs, self.tables)


class CapturedLanes:
    """Runs the lanes of a pool in one graph, where those under way have a row or a tree each; others' rows without.

    A graph has rows of every lane, as many of each, so that it serves whichever are under way: one that is not has its
    rows in free slots, and a tree that is smaller is padded. Nobody reads these results. Trees are rounded up to a few
    widths, each of which is a graph.
    """

    def __init__(self, lanes: Sequence[ModuleLane]) -> None:
        self.weights_of, self._lanes = lanes[0].lm, lanes
        device = lanes[0].device
        self.graphs = Graphs(device)
        self._tokens, self._depths = torch.zeros(
            2, len(lanes), PADDED_ROWS, dtype=torch.int64, device=device
        ).unbind()
        self._words = ops.own_bits(PADDED_ROWS, device).repeat(len(lanes), 1, 1)
        self._live = torch.ones(len(lanes), 1, dtype=torch.int32, device=device)
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self.located = Located(lanes, device)
        self._failed = self.located.addresses  # with which a capture failed
        for lane in lanes:
            lane.joined = self

    def run_lanes(self, batch: Sequence[ModuleRows]) -> None:
        """Run rows of several texts, and fill their results."""
        lm, caches = self.weights_of, [lane.cache for lane in self._lanes]
        places = {id(cache): place for place, cache in enumerate(caches)}
        width = padded_width(max(len(rows.tokens) for rows in batch))
        fits = width <= PADDED_ROWS and all(isinstance(rows.tree, Rows) for rows in batch)
        if not fits or self.locate(width) == self._failed:
            lm.run_lanes(batch)
            return
        for rows in batch:
            self._take(places[id(rows.cache)], rows)
        features = max((rows.features for rows in batch), key=len)
        reads = [tensor for cache in caches for tensor in (cache.slab, cache.filled)]
        try:
            with counted(lm):
                logits, states = self.graphs.run(
                    f"lanes of {width} {features}",
                    [*reads, self.located.tables],
                    partial(self.run, features, width),
                )
        except CaptureError:
            self._failed = self.located.addresses
            lm.run_lanes(batch)
            return
        for rows in batch:
            first = width * places[id(rows.cache)]
            last = first + len(rows.tokens)
            rows.logits = logits[first:last]
            if states is not None:  # the next run overwrites them
                rows.states = states[first:last].clone()

    def locate(self, width: int = 1) -> list[tuple[int, int]]:
        """Make room for `width` rows of every lane; return where their slabs are, which `run` has to know."""
        for lane in self._lanes:
            lane.cache.reserve(len(lane.tokens) + width)
        return self.located.locate()

    def run(self, features: tuple[int, ...], width: int = 1) -> tuple[Tensor, Tensor | None]:
        """Return logits and features of `width` rows of every lane, from the end of its cache on."""
        filled = [lane.cache.filled for lane in self._lanes]
        ends = (torch.cat(filled) if len(filled) > 1 else filled[0]).long()
        positions = ends[:, None] if width == 1 else ends[:, None] + self._depths[:, :width]
        batch = []
        for place, lane in enumerate(self._lanes):
            rows = Rows(
                self._tokens[place, :width],
                positions[place],
                self._words[place, :width],
                ends[place : place + 1],
                lane.cache.filled,
                self._one if width == 1 else self._live[place],
            )
            rows.seen = rows.live
            batch.append(
                ModuleRows(
                    lane.lm, rows.tokens, rows.positions, lane.cache, rows, features, rated=True
                )
            )
        return self.forward(batch)

    def forward(self, batch: Sequence[ModuleRows]) -> tuple[Tensor, Tensor | None]:
        """Run as many rows of every lane, with attention as one operation."""
        return self.weights_of.run_lanes(batch, self.located.by_layer())

    def _take(self, place: int, rows: ModuleRows) -> None:
        """Copy a tree to where the graphs read that of its lane."""
        count, tree = len(rows.tokens), cast(Rows, rows.tree)
        self._tokens[place, :count].copy_(rows.tokens)
        if count > 1:
            self._depths[place, :count].copy_(rows.positions - tree.slot)
            self._words[place, :count].copy_(tree.words)
        self._live[place].fill_(count)
