"""Sources of draft distributions, one file each. The file's name is the drafter's name."""

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor

from specengine import ops, registry
from specengine.errors import DrafterError, InputError, kind_of, require_input, require_or
from specengine.models import SharedRows
from specengine.models.kv_cache import KVCache, Rows, causal_words, words_for
from specengine.ops import Free, Nodes, PassRows, Step as Step, TokenTree
from specengine.options import LoadOptions
from specengine.records import Cycle

Maker = Callable[[Any, Any], "Drafter"]  # of a target and its tokenizer, None where there is none


class About(NamedTuple):
    """Facts of a kind of drafter, for loading.

    policy, options  the default policy and its options
    lookup           whether lookup.py mixes copies in: by default on a CPU, never, or (None) on request
    takes_any_model  of all kinds it is asked last whether a draft is its own
    origin           source of its own proposals: draft, copied or recycled
    passes           whether a draft pass proposes more than `free` does; else a policy that may skip passes has none
    """

    policy: str = "auto"
    options: Mapping[str, Any] = MappingProxyType({})
    lookup: bool | None = None
    takes_any_model: bool = False
    origin: str = "draft"
    passes: bool = True


class Traits(NamedTuple):
    """Facts of a drafter, for the engine.

    features    the target's hidden states that it reads, numbered as in transformers
    successors  number of the target's likeliest tokens after each verified node that it reads
    copies      whether it has a use for `Hints.expected`
    sharpness   average factor already applied to the logits (1 / calibrated temperature)
    """

    features: tuple[int, ...] = ()
    successors: int = 0
    copies: bool = False
    sharpness: float = 1.0


class Hints(NamedTuple):
    """Knowledge of the caller about the answer to a prompt.

    expected     tokens that may follow the prompt; empty if there is no prediction
    temperature  at which the target draws, by noise that the drafter does not know; 0: it takes the likeliest tokens,
                 or the noise is known
    waits        whether a tree may be asked for late or never, so that a draft need not run the prompt before
    memory       of earlier texts, a TextMemory of csrc/spec/memory.hpp, or None
    multiple     rows by which to pad passes over a prompt, for libraries that plan each number of rows anew
    """

    expected: Sequence[int] = ()
    temperature: float = 0.0
    waits: bool = False
    memory: Any = None
    multiple: int = 1


NO_HINTS = Hints()


class Drafter(ABC):
    """Proposes continuations. It owns its state and learns from `accept` which tokens were committed."""

    name: str
    about: ClassVar[About] = About()
    device: torch.device = torch.device("cpu")  # of the trees that it drafts
    model_seconds: float = 0.0  # spent in model forwards since it was made

    @property
    def traits(self) -> Traits:
        return Traits()

    @property
    def notes(self) -> list[str]:
        """Return notes for the user on the last answer; they appear in the statistics. Synchronises with a device."""
        return []

    @classmethod
    def maker(cls, draft: Any, options: LoadOptions, checkpoints: Any) -> Maker | None:
        """Return a function that makes this draft for a target, or None if `draft` is of another kind.

        draft: a name, the path or id of a folder, or a loaded model; options are checked here, before any weights are
        read; checkpoints: modules of specengine.checkpoints by name. By default the draft goes by its file's name, and
        is a dataclass whose fields are its options.
        """
        if draft != cls.__module__.rpartition(".")[2]:
            return None
        drafter = registry.build(cls, options.draft_options, f"draft {draft}")
        return lambda target, tokenizer: drafter

    def cached(self, tokens: list[int]) -> int:
        """Return how many of the first `tokens` need no features from the target."""
        return len(tokens)

    @abstractmethod
    def begin(
        self, prompt: list[int], features: Tensor | None = None, hints: Hints = NO_HINTS
    ) -> None:
        """Take in a prompt. State of an earlier prompt is reused for the common prefix.

        features: of the prompt's last tokens, [rows, features * hidden size]; at least of those beyond `cached`.
        """

    def root(self, tree: TokenTree) -> Step:
        """Run the first draft pass of a cycle; return the distribution of the root's children."""
        return self.step(tree, tree.root_alone())

    @abstractmethod
    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        """Run a draft pass; return the distributions of the children of the frontier's nodes.

        The nodes may differ in depth. Each node's ancestors have been stepped before it.
        """

    def free(self, tree: TokenTree, nodes: Nodes, most: int, least: float) -> Free | None:
        """Return up to `most` continuations below these nodes that need no draft pass, or None.

        least: the path log-probability below which nothing is proposed. Synchronises with a device.
        """
        return None

    @abstractmethod
    def accept(self, cycle: Cycle) -> None:
        """Take in the tokens that a cycle committed."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything."""


class CapturedDrafter(Drafter):
    """A drafter whose passes can be captured as CUDA graphs.

    `root`, `step` and `take` read no tensors on the host and update persistent tensors in place. The defaults suit a
    drafter that keeps no state.
    """

    def reserve(self, tokens: int, nodes: int, longest: int) -> None:
        """Make room for `tokens` committed tokens, trees of `nodes` nodes and `longest` tokens between two passes."""
        del tokens, nodes, longest

    @property
    def state(self) -> tuple[Tensor, ...]:
        """Return the tensors that stay from one cycle to the next, without those overwritten before they are read."""
        return ()

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """Return the tensors that a capture reads and that may be replaced by others."""
        return ()

    @property
    def weights(self) -> tuple[torch.nn.Module, ...]:
        """Return the modules that a capture reads."""
        return ()

    def take(self, tokens: Tensor, path: Nodes, features: Tensor | None) -> None:
        """Take in committed tokens inside a graph, as `accept` does on the host.

        tokens: int64 [width], of the path's nodes; path: accepted nodes of the verified tree, the root first, at most
        as many as `reserve` was told; features: the target's, by node.
        """

    def ended(self, tokens: list[int], drafted: int) -> None:
        """Take over from captured cycles, which committed these tokens; the first `drafted` of them were surely run."""


class Recycler(Drafter):
    """Keeps the target's own likeliest successors of each token. table: a SuccessorTable of `lookup`."""

    table: Any


class Wrapped(Drafter):
    """A drafter around another one, `inner`, whose steps it changes."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.name, self.device = inner, inner.name, inner.device
        self.about = inner.about  # type: ignore[misc]

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    @property
    def notes(self) -> list[str]:
        return self.inner.notes

    @property
    def model_seconds(self) -> float:  # type: ignore[override]
        return self.inner.model_seconds

    @classmethod
    def maker(cls, draft: Any, options: LoadOptions, checkpoints: Any) -> Maker | None:
        """Return None: it is made of another draft."""
        return None

    def cached(self, tokens: list[int]) -> int:
        return self.inner.cached(tokens)

    def begin(
        self, prompt: list[int], features: Tensor | None = None, hints: Hints = NO_HINTS
    ) -> None:
        self.inner.begin(prompt, features, hints)

    def root(self, tree: TokenTree) -> Step:
        return self.changed(self.inner.root(tree), tree, tree.root_alone())

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        return self.changed(self.inner.step(tree, frontier), tree, frontier)

    def changed(self, step: Step, tree: TokenTree, frontier: Nodes) -> Step:
        """Return a step to propose instead of the inner drafter's."""
        return step

    def free(self, tree: TokenTree, nodes: Nodes, most: int, least: float) -> Free | None:
        return self.inner.free(tree, nodes, most, least)

    def accept(self, cycle: Cycle) -> None:
        self.inner.accept(cycle)

    def reset(self) -> None:
        self.inner.reset()


def innermost(drafter: Drafter) -> Drafter:
    """Return what a draft wraps, itself where it wraps none."""
    while isinstance(drafter, Wrapped):
        drafter = drafter.inner
    return drafter


def reserve(drafter: Drafter | None, tokens: int, nodes: int, longest: int) -> None:
    """Make room in a drafter that needs it, see CapturedDrafter.reserve. Others make room as they go."""
    if drafter is not None and isinstance(inner := innermost(drafter), CapturedDrafter):
        inner.reserve(tokens, nodes, longest)


def another(drafter: Drafter) -> Drafter:
    """Return a draft of the same weights and options with a state of its own.

    A class whose options are not dataclass fields says by `__copy__` how that is made. InputError where it does not.
    """
    original: Any = drafter
    if hasattr(drafter, "__copy__"):
        return cast(Drafter, copy.copy(original))
    if is_dataclass(original):
        return cast(Drafter, replace(original))  # type: ignore[type-var]
    raise InputError(
        f"{name_of(drafter)}: a draft of this class serves one text at a time; give it a __copy__"
    )


def copy_prompt(drafter: Drafter, other: Drafter, count: int) -> None:
    """Take over what another draft, made by `another`, keeps of its first `count` tokens, if it keeps any."""
    drafter, other = innermost(drafter), innermost(other)
    if isinstance(drafter, RowDraft) and isinstance(other, RowDraft):
        drafter.copy_from(other, count)


def cache_of(drafter: Drafter | None) -> KVCache | None:
    """Return the cache of what a draft wraps, or of itself; None where it has none."""
    inner = None if drafter is None else innermost(drafter)
    return inner.cache if isinstance(inner, RowDraft) else None


def forget(drafter: Drafter | None) -> None:
    """Give back the memory of a draft's cache, if it has one, with the tokens that it holds."""
    if drafter is not None and (cache := cache_of(drafter)) is not None:
        innermost(drafter).reset()
        cache.release()


def names() -> list[str]:
    """Return the names of all drafters."""
    return registry.names(sys.modules[__name__])


def find(name: str) -> type[Drafter]:
    """Return the class of a drafter: one that ships, a plug-in's, or FILE.py:CLASS. InputError for an unknown name."""
    return registry.find(sys.modules[__name__], Drafter, name, "draft")  # type: ignore[type-abstract]


def maker(draft: Any, options: LoadOptions, checkpoints: Any) -> Maker:
    """Return a function that makes the draft for a target. Raises InputError if no drafter takes this draft.

    draft: a name, a plug-in's name, FILE.py:CLASS, a path, an id or a loaded model; checkpoints: as in Drafter.maker.
    """
    if isinstance(draft, str) and (registry.is_file(draft) or draft in registry.plugins(__name__)):
        return _brought(draft, options, checkpoints)
    kinds = {name: find(name) for name in names()}
    candidates = sorted(kinds, key=lambda name: (name != draft, kinds[name].about.takes_any_model))
    make = next(
        filter(None, (kinds[name].maker(draft, options, checkpoints) for name in candidates)), None
    )
    require_input(
        f"draft: got {type(draft).__name__}, accepted a name, a path, a loaded model or a Drafter",
        make is not None,
    )
    return cast(Maker, make)


def _brought(draft: str, options: LoadOptions, checkpoints: Any) -> Maker:
    """Return what makes the draft of a plug-in or of a user's file, asked for by that name, then by its module's."""
    cls = find(draft)
    name = registry.split_file(draft)[0].stem if registry.is_file(draft) else draft
    for label in dict.fromkeys((name, cls.__module__.rpartition(".")[2])):
        if (make := cls.maker(label, options, checkpoints)) is not None:
            return make
    raise InputError(f"draft: got {draft}, but the maker of {cls.__name__} makes no draft {name!r}")


DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of logits


def name_of(drafter: Drafter) -> str:
    """Return the name of a draft in messages: its own, else that of its class."""
    name = getattr(drafter, "name", None)
    return f"draft {name if isinstance(name, str) else type(drafter).__name__}"


def require_step(drafter: Drafter, step: Any, rows: int, vocab_size: int) -> None:
    """Raise DrafterError where a drafter returned a wrong step over `rows` nodes."""

    def check(fault: str, holds: bool) -> None:
        require_or(DrafterError, f"{name_of(drafter)}: step returned {fault}", holds)

    check(f"{kind_of(step)}, accepted a Step", isinstance(step, Step))
    logits, ids = step.logits, step.token_ids
    check(
        f"logits of {kind_of(logits)}, accepted float32, bfloat16 or float16 [{rows}, vocabulary]",
        isinstance(logits, Tensor)
        and logits.dtype in DTYPES
        and logits.dim() == 2
        and logits.shape[0] == rows,
    )
    check("logits that are NaN", not bool(torch.isnan(logits).any()))
    finite = step.normalized is not False or not bool((logits == torch.inf).any())
    check("logits that are infinite", finite)
    columns = logits.shape[1]
    check(
        f"{columns} columns without token_ids, accepted up to {vocab_size}",
        ids is not None or columns <= vocab_size,
    )
    if ids is not None:
        check(
            f"token_ids of {kind_of(ids)}, accepted int64 [{columns}], a token for each column",
            isinstance(ids, Tensor) and ids.dtype == torch.int64 and ids.shape == (columns,),
        )
        least, most = (int(ids.min()), int(ids.max())) if columns else (0, 0)
        check(
            f"token_ids from {least} to {most}, accepted 0 to {vocab_size - 1}",
            0 <= least <= most < vocab_size,
        )


MAX_WAITING = 2048  # rows of a text that a draft puts off, as their features take memory
NOT_FINITE = "draft: its logits are NaN or infinite, so nothing of it is used; its weights or its dtype are at fault"


class RowDraft(CapturedDrafter):
    """A draft whose pass runs rows over `cache`, and whose counts are tensors where that cache is.

    The cache holds one slot per committed token that was run, and after them the scratch: one slot per node drafted
    from, seen by its descendants and itself, forgotten with the tree. A cycle's first pass runs the `taken` tokens
    that were committed since the last one, the root last (`pending`), the next ones a level of the tree each. Cycles
    without a pass leave their tokens waiting. Before these a prompt may wait (`_late`), which `settle` runs.

    A subclass runs rows (`_run`) and prompts (`_extend`), takes in prompts (`begin`) and what it keeps of accepted
    nodes (`take`). A root pass reads the features of the tokens that wait, by their place, instead of states.
    """

    counts = True  # whether `step` counts its pass in the tree, on a device
    token_ids: Tensor | None = (
        None  # the target's ids of the logits' columns; None: they are the columns
    )
    shares = False  # whether its rows can be run with those of other texts, by what `_shared` makes
    _shared: Callable[[Rows, PassRows], SharedRows]
    _features: Any = None  # of the pending rows, where the draft reads any
    # Runs and commits tokens after those of the cache, with the features that waited for it.
    _extend: Callable[[list[int], list[Tensor]], None]
    _factors: Tensor | None = None  # of the logits, float32 [depths], as in ops.level_rows
    # of the next pass, with what runs them among other texts' rows
    _asked: tuple[Rows, PassRows, Any] | None = None

    def __init__(self, cache: KVCache) -> None:
        self.cache, self.device = cache, cache.slab.device
        self.taken, self._used = torch.zeros_like(cache.filled), torch.zeros_like(cache.filled)
        # a root, and what waits after it
        self._held = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._tokens: list[int] = []  # committed, the current root excluded
        self._late: list[int] = []  # of rows between those of the cache and the pending
        self._unread: list[Tensor] = []  # features of these rows, where the draft reads any
        # The best logit of the last root pass on a device, in place; after it all logits of the last one on the host.
        self._best = [torch.zeros(1, device=self.device, dtype=torch.float32)]
        # By node: which slots of the scratch it sees, where the root has none. Padding writes to the last row.
        self._seen = torch.zeros(1, 0, dtype=torch.int64, device=self.device)
        self.reserve(0, 1, 1)

    @abstractmethod
    def _run(
        self, rows: Rows, pass_rows: PassRows, shared: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits and recurrent states, if any, of all rows, or of the row `pass_rows.one` alone.

        shared: what ran the rows with those of other texts, if anything did.
        """

    @property
    def pending(self) -> Tensor:
        """Return int64 [most]: the tokens that the next pass runs; the root takes the place of the last one."""
        return self._held[1:]

    @property
    def notes(self) -> list[str]:
        return [] if bool(self._best[-1].amax().isfinite()) else [NOT_FINITE]

    @property
    def state(self) -> tuple[Tensor, ...]:
        """Return the tensors that stay from one cycle to the next, without the cache's slab."""
        return self.cache.filled, self.taken, self._held

    @property
    def reads(self) -> tuple[Tensor, ...]:
        return self.cache.slab, self._held, self._seen

    def reserve(self, tokens: int, nodes: int, longest: int) -> None:
        self.cache.reserve(tokens + nodes + longest)
        if longest > len(self.pending):
            self._held = torch.cat([self._held, self._held.new_zeros(longest - len(self.pending))])
            self._causal = causal_words(longest, self.device)
        if nodes >= len(self._seen):
            self._seen = torch.zeros(
                nodes + 1, words_for(nodes), dtype=torch.int64, device=self.device
            )

    def ask(self, tree: TokenTree, frontier: Nodes | None) -> SharedRows | None:
        """Return the rows of the next pass, to be run before it is asked for; None where it is run alone.

        frontier: the nodes to draft from; None of the pass from the root.
        """
        if not self.shares:
            return None
        if frontier is None:
            rows = self._root_rows(tree, free=ops.is_free(self.taken))
        else:
            ids = frontier.alive() if ops.is_free(frontier.live) else frontier.ids
            rows = self._level_rows(tree, Nodes(ids, frontier.live))
        self._asked = None if rows is None else (*rows, self._shared(*rows))
        return None if self._asked is None else self._asked[2]

    def _root_rows(self, tree: TokenTree, *, free: bool) -> tuple[Rows, PassRows] | None:
        """Return the rows of the pass from the root, None if there are none; free: whether counts can be read."""
        if tree.capacity >= len(self._seen):  # of a draft that no engine told what to expect
            self.reserve(self.cache.length, tree.capacity, len(self.pending))
        filled = self.cache.filled
        if self._late or (free and int(self.taken) > len(self._seen)):
            self.settle()
        count = int(self.taken) if free else len(self.pending)
        self._used.zero_()
        if (
            not count
        ):  # a prompt of one token: the target has not run yet, so there is nothing to draft from
            return None
        if (
            free and (end := int(filled) + count + tree.capacity) > self.cache.slab.shape[3]
        ):  # mostly there is room
            self.cache.reserve(end)
        pass_rows = ops.root_rows(
            tree.tokens, self._held, self.taken, filled, self._causal, count, self._factors
        )
        rows = Rows(*pass_rows[:4], filled, self.taken)
        rows.seen = self.taken
        return rows, pass_rows

    def _level_rows(self, tree: TokenTree, frontier: Nodes) -> tuple[Rows, PassRows]:
        """Return the rows of the pass from these nodes; on a device it counts itself among the tree's."""
        pass_rows = ops.level_rows(
            tree.arrays,
            tree.size,
            frontier,
            self.cache.filled,
            self._used,
            self._seen,
            self._factors,
            None if frontier.live.device.type == ops.tree.FREE else tree.passes,
        )
        rows = Rows(*pass_rows[:4], self.cache.filled, frontier.live)
        rows.seen = self._used
        return rows, pass_rows

    def root(self, tree: TokenTree) -> Step:
        free = self.device.type == ops.tree.FREE  # inlined, as every cycle asks
        arguments = self._asked or self._root_rows(tree, free=free)
        self._asked = None
        if arguments is None:
            self._best[1:] = []
            return Step(
                torch.full((1, 1), float("-inf"), device=tree.device, dtype=torch.float32),
                normalized=True,
            )
        filled = self.cache.filled
        logits, states = self._run(*arguments)
        if free:
            self._best[1:] = [logits]
        else:
            self._best[0].copy_(logits.amax())
        filled += self.taken
        self.taken.zero_()
        return Step(logits, self.token_ids, hidden=states)

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        arguments, self._asked = self._asked, None
        if arguments is None:
            arguments = *self._level_rows(tree, frontier), None
        logits, states = self._run(*arguments)
        return Step(logits, self.token_ids, hidden=states)

    def take(self, tokens: Tensor, path: Nodes, features: Tensor | None) -> None:
        buffer, taken = self._features, self.taken
        rows = None if features is None else features.index_select(0, path.ids)
        if ops.is_free(taken):
            first, end = int(taken), int(taken) + int(path.live)
            self._held[first:end] = tokens[: end - first]
            if buffer is not None and rows is not None:
                buffer[first:end] = rows[: end - first]
            taken.fill_(end)
            return
        places = taken + torch.arange(len(path.ids), device=self.device, dtype=torch.int64)
        # warm-ups of a capture accept one path several times
        places = places.clamp(max=len(self._held) - 2)
        self._held.index_copy_(0, places, tokens)  # the root, then those that the next pass runs
        if buffer is not None and rows is not None:
            buffer.index_copy_(0, places, rows.to(buffer.dtype))
        taken += path.live

    def _put_off(self, tokens: list[int], features: list[Tensor], hints: Hints) -> None:
        """Have rows of a prompt wait for `settle`, at once unless they may wait."""
        self._late, self._unread = tokens, features
        if not hints.waits:
            self.settle()

    def settle(self) -> None:
        """Run the prompt that waits, and the tokens after it where the next pass cannot take as many."""
        late, features, count = self._late, self._unread, int(self.taken)
        if count > len(self._seen):
            late = late + self._held[1:count].tolist()
            self.taken.fill_(1)
        self._late, self._unread = [], []
        self._extend(late, features)

    def accept(self, cycle: Cycle) -> None:
        waiting = int(self.taken) + len(cycle.path)
        if waiting > len(self._held) - 1:
            if len(self._late) + waiting > MAX_WAITING:
                self.settle()
            self.reserve(0, 0, 2 * waiting)
        tokens = [int(cycle.tree.tokens[0]), *cycle.tokens[: len(cycle.path) - 1]]
        self._tokens += tokens
        self.take(
            torch.tensor(tokens, device=self.device, dtype=torch.int64),
            Nodes.of(torch.tensor(cycle.path, device=self.device, dtype=torch.int64)),
            cycle.features,
        )

    def copy_from(self, other: Self, count: int) -> None:
        """Become what another draft of the same weights is after its first `count` tokens, or those of its prompt.

        A draft with recurrent states stays as it is: they are those of all tokens that the other one has run.
        """
        if self.cache.states:
            return
        ran = min(count, other.cache.length)
        self.cache.copy_from(other.cache, ran)
        self._late = other._late[: count - ran]
        self._unread = [rows[: count - ran] for rows in other._unread]
        self._tokens = other._tokens[: ran + len(self._late)]
        self.taken.zero_()

    def follow(self, tokens: list[int]) -> None:
        """Note the committed tokens, the root excluded, which graphs took in."""
        self._tokens = tokens

    def ended(self, tokens: list[int], drafted: int) -> None:
        # cycles without a pass have run none of them
        self.cache.length = min(self.cache.length, drafted, len(tokens))
        self._tokens = tokens[: self.cache.length]
        self.taken.zero_()

    def reset(self) -> None:
        self.cache.crop(0)
        self.taken.zero_()
        self._tokens = []
        self._late, self._unread = [], []
        self._asked = None
