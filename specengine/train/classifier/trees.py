"""Full candidate trees of a running engine, on disk, with the target's choices after each node.

Classifiers are trained on them, and `research.replay` evaluates policies on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from specengine.cycle import walk
from specengine.drafters.lookup import Lookup
from specengine.engine import Engine
from specengine.errors import require_input
from specengine.ops import Nodes
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree
from specengine.policies import TreePolicy
from specengine.request.sampling import History, Sampler
from specengine.train.classifier.options import CollectOptions
from specengine.train.text.corpus import Contents, Corpus, ShardFolder

if TYPE_CHECKING:
    from specengine.records import Cycle, Outcome

TOP_PROBS = 10  # probabilities per draft distribution
MIN_PROMPT = 2  # tokens: the last one is the first root, and an EAGLE head needs one before it

Progress = Callable[[str], None]


class LoggedTree(NamedTuple):
    """One verified tree of n nodes; the draft ran at e of them. Node 0 is the root.

    tokens, parents    int64 [n]; the root has parent -1
    log_probs          float32 [n], the draft's log-probability of the edge to the node, in nats; 0 at the root
    choices            int64 [n], the target's choice after the node; -1 without one
    target_log_probs   float32 [n], the target's log-probability of the node's token given its parent; 0 at the root
    accepted           bool [n], the nodes of the accepted path, the root included
    expanded           int64 [e], nodes that were drafted from, in the order of passes
    entropies          float32 [e], entropy of the draft's distribution at the node, in nats
    top_probs          float32 [e, 10], its largest probabilities, descending, padded with 0
    hidden             [e, hidden size] of the draft, or [e, 0]
    logits             [e, draft vocabulary] of the draft, or [e, 0]
    """

    tokens: Tensor
    parents: Tensor
    log_probs: Tensor
    choices: Tensor
    target_log_probs: Tensor
    accepted: Tensor
    expanded: Tensor
    entropies: Tensor
    top_probs: Tensor
    hidden: Tensor
    logits: Tensor

    @property
    def tree(self) -> TokenTree:
        """The tree, with depths and path probabilities computed by the serving code."""
        tree = TokenTree.root(int(self.tokens[0]), len(self.tokens))
        start = 1
        while start < len(self.tokens):  # batch by batch: parents come in earlier batches
            stop = start + int((self.parents[start:] < start).long().cumprod(0).sum())
            tree.add(self.parents[start:stop], self.tokens[start:stop], self.log_probs[start:stop])
            start = stop
        return tree


class Columns(NamedTuple):
    """The meaning of a draft's rows, as in a Step.

    token_ids   the target's ids of the columns; None if they are the columns themselves
    normalized  whether the rows are log-probabilities
    """

    token_ids: Tensor | None = None
    normalized: bool = False

    def same(self, other: Columns) -> bool:
        if self.token_ids is None or other.token_ids is None:
            return self == other
        return self.normalized == other.normalized and torch.equal(self.token_ids, other.token_ids)


class Shard(NamedTuple):
    """The trees of one answer, in order."""

    trees: list[LoggedTree]
    columns: Columns


PER_NODE = ("tokens", "parents", "log_probs", "choices", "target_log_probs", "accepted")
PER_ROW = ("expanded", "entropies", "top_probs", "hidden", "logits")


class Trees(ShardFolder):
    """Logged trees, one shard per prompt."""

    FORMAT = 1
    MANIFEST = "trees.json"
    contents = Contents("trees", "logged trees", "the trees in {} were", "collect the trees")

    def add(self, number: int, trees: Sequence[LoggedTree], columns: Columns) -> None:
        """Write a shard with at least one tree."""
        tensors = {
            name: torch.cat([getattr(tree, name) for tree in trees])
            for name in (*PER_NODE, *PER_ROW)
        }
        tensors |= {
            name: tensors[name].to(torch.int32)
            for name in ("tokens", "parents", "choices", "expanded")
        }
        counts = {
            "nodes": [len(tree.tokens) for tree in trees],
            "rows": [len(tree.expanded) for tree in trees],
        }
        tensors |= {
            name: torch.tensor(value, dtype=torch.int64, device="cpu")
            for name, value in counts.items()
        }
        tensors["normalized"] = torch.tensor(columns.normalized, dtype=torch.bool, device="cpu")
        if columns.token_ids is not None:
            tensors["token_ids"] = columns.token_ids.cpu()
        self.save(number, tensors)

    def read(self, file: Path) -> Shard:
        """Return a shard. Raise InputError if it is damaged."""
        return self.load(file, _shard)

    def __iter__(self) -> Iterator[LoggedTree]:
        """Yield all trees, shard by shard. Raise InputError for a damaged shard."""
        for file in self.shards():
            yield from self.read(file).trees


def _shard(tensors: dict[str, Tensor]) -> Shard:
    parts = []
    for names, sizes in (
        (PER_NODE, tensors["nodes"].tolist()),
        (PER_ROW, tensors["rows"].tolist()),
    ):
        columns = (tensors[name] for name in names)
        parts += [(one.long() if one.dtype is torch.int32 else one).split(sizes) for one in columns]
    trees = [LoggedTree(*tree) for tree in zip(*parts, strict=True)]
    return Shard(trees, Columns(tensors.get("token_ids"), bool(tensors["normalized"])))


def collect(
    engine: Engine,
    prompts: Sequence[list[int]],
    folder: Path,
    options: CollectOptions,
    *,
    name: str = "",
    progress: Progress = lambda line: None,
) -> Trees:
    """Answer the prompts greedily with full candidate trees until `options.trees` trees are logged.

    prompts: checked token ids, two or more each; name: recorded name of the target.

    The trees are those of the draft alone, without lookup. Each prompt is a shard, so an interrupted call resumes where
    it stopped. The last tree of an answer is skipped if the end of the answer cut its path. Raise InputError without a
    draft, or if the prompts give too few trees.
    """
    require_input("draft: got none, but the trees come from a draft", engine.drafter is not None)
    # a folder may grow
    settings = {key: value for key, value in asdict(options).items() if key != "trees"}
    drafter: Any = engine.drafter
    if isinstance(drafter, Lookup):  # its columns differ in every step
        drafter = drafter.inner
    trees = Trees.create(folder, {"target": name, "draft": drafter.name, **settings})
    watched = Recorder(options.policy, options)
    recording = Engine(engine.target, drafter, watched, engine.tokenizer)
    have, new, began = 0, 0, time.perf_counter()
    for number, prompt in enumerate(prompts):
        if 0 < options.trees <= have:
            return trees
        require_input(
            f"prompts: number {number + 1} has {len(prompt)} tokens, {MIN_PROMPT} or more are needed",
            len(prompt) >= MIN_PROMPT,
        )
        if not trees.shard(number).is_file():
            logged = list(_answer(recording, watched, prompt, options.length))
            if not logged:
                continue
            trees.add(number, logged, watched.columns)
            new += len(logged)
            have += len(logged)
            target_count = f" of {options.trees}" if options.trees else ""
            progress(
                f"{have}{target_count} trees, {new / (time.perf_counter() - began):.2f} per second"
            )
        else:
            have += len(trees.read(trees.shard(number)).trees)
    require_input(
        f"prompts: got {have} of {options.trees} trees; pass more prompts, or ask for fewer trees",
        have >= max(options.trees, 1),
    )
    return trees


def questions(corpus: Corpus) -> list[list[int]]:
    """Return the token ids before the first answer of each text: its first user turn, with the chat template."""
    prompts = [
        text.tokens[: int(text.answers.int().argmax())].tolist()
        for text in corpus
        if bool(text.answers.any())
    ]
    return [tokens for tokens in prompts if len(tokens) >= MIN_PROMPT]


def _answer(
    engine: Engine, watched: Recorder, prompt: list[int], length: int
) -> Iterator[LoggedTree]:
    sampler = WatchingSampler()
    for cycle in engine.answer(prompt, sampler, max_new_tokens=length, temperature=0.0):
        logged = watched.logged(cycle, sampler)
        if int(logged.accepted.sum()) == len(cycle.tokens):
            yield logged


class WatchingSampler(Sampler):
    """A greedy sampler that stores the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.takes_largest = False  # so that it gets the logits
        self.logits = torch.empty(0, dtype=torch.float32, device="cpu")

    def chooser_of_tree(
        self, logits: Tensor, history: History, depths: Tensor
    ) -> Callable[[int], int | None]:
        self.logits = logits
        return super().chooser_of_tree(logits, history, depths)

    def choices(self) -> list[int | None]:
        """Return the token chosen after each node of the last tree."""
        chosen = self.choose_rows(self.logits, ())
        return [token if token >= 0 else None for token in chosen]


@dataclass
class Recorder(TreePolicy):
    """Runs `policy`, which must verify all nodes that it grows, and records the distributions that it reads."""

    policy: TreePolicy
    options: CollectOptions
    columns: Columns = field(default_factory=Columns, init=False, repr=False)
    _rows: list[tuple[Tensor, ...]] = field(default_factory=list, init=False, repr=False)

    @property
    def capacity(self) -> int:
        return self.policy.capacity

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        if int(tree.passes) == 1:
            self._rows = []
        columns = Columns(step.token_ids, step.normalized)
        require_input(
            "draft: its distributions cover other tokens at each step, so they cannot be logged",
            not (self._rows and self.options.logits) or columns.same(self.columns),
        )
        self.columns = columns
        self._rows.append((frontier.alive(), *distribution_facts(step, self.options)))
        return self.policy.grow(tree, frontier, step)

    def begin(
        self, tokens: int, sampled: bool = False, costs: Callable[[], Any] | None = None
    ) -> None:
        self.policy.begin(tokens, sampled, costs)

    def learn(self, outcome: Outcome) -> None:
        self.policy.learn(outcome)

    def logged(self, cycle: Cycle, sampler: WatchingSampler) -> LoggedTree:
        """Return the tree of the last cycle, with the target's whole path even if the answer ended within it."""
        tree, logits = cycle.tree, sampler.logits
        choices = sampler.choices()
        path, _ = walk(tree, choices.__getitem__, lambda token: False)
        accepted = torch.zeros(len(tree), dtype=torch.bool, device="cpu")
        accepted[path] = True
        rows = [torch.cat(parts).cpu() for parts in zip(*self._rows, strict=True)]
        return LoggedTree(
            tree.tokens.cpu(),
            tree.parents.cpu(),
            tree.log_probs.cpu(),
            torch.tensor(
                [-1 if choice is None else choice for choice in choices],
                dtype=torch.int64,
                device="cpu",
            ),
            edge_log_probs(logits, tree).cpu(),
            accepted,
            *rows,
        )


def distribution_facts(
    step: Step, options: CollectOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return entropies, top probabilities, hidden states and logits of a LoggedTree, by row of `step`."""
    log_probs, _ = step.best_children(TOP_PROBS)
    top_probs = torch.zeros(len(log_probs), TOP_PROBS, device=log_probs.device, dtype=torch.float32)
    top_probs[:, : log_probs.shape[1]] = log_probs.exp()
    nothing = step.logits.new_empty(len(log_probs), 0)
    hidden = step.hidden if options.hidden and step.hidden is not None else nothing
    return step.entropy(options.top), top_probs, hidden, step.logits if options.logits else nothing


def edge_log_probs(logits: Tensor, tree: TokenTree) -> Tensor:
    """Return the log-probability of each node's token in the row of its parent, float32 [n]; 0 at the root.

    logits: [n, vocabulary], one row per node.
    """
    parents, tokens = tree.parents[1:], tree.tokens[1:]
    inner, place = parents.unique(return_inverse=True)
    rows = logits[inner].float()
    log_probs = torch.zeros(len(tree), device=logits.device, dtype=torch.float32)
    log_probs[1:] = rows[place, tokens] - rows.logsumexp(-1)[place]
    return log_probs
