"""KVCache, the keys and values of all layers in one slab; the rows of a forward, and what runs them over it."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from specengine import ops
from specengine.models import SharedRows, Target, common_prefix
from specengine.ops import WORD_BITS, Nodes, Paths, TokenTree

LONG_PROMPT, MARKED_BEFORE = 64, 8  # tokens of a prompt that is marked, and how far before its end
GRANULE = 256  # capacities are rounded up to a multiple of this many slots


Shapes = tuple[tuple[tuple[int, int], tuple[int, int]], ...]
Logits = Literal["none", "last", "all"]


class MixerSizes(NamedTuple):
    """Hold the sizes of a model's recurrent layers, all alike: a convolution, and states of heads where there are any.

    layers     their numbers among the model's layers
    channels   of the convolution
    taps       tokens that it reads, the row's own included
    key_heads  of keys and queries, with `key_size` channels each
    heads      of values and states, with `value_size` channels each
    """

    layers: tuple[int, ...]
    channels: int
    taps: int
    key_heads: int = 0
    heads: int = 0
    key_size: int = 0
    value_size: int = 0


class CacheLayout(NamedTuple):
    """What a cache keeps of a model's layers.

    slabs   layers, KV heads and head size of each slab; layers whose heads are other ones have a slab of their own
    shapes  of each layer's keys and values, (KV heads, head size), where they differ: the slab then has one head, which
            a layer's heads divide among themselves; empty where they are alike
    layers  the model's layers that keep keys and values, in order; empty: all
    mixers  the sizes of its recurrent layers, where the cache keeps their states
    """

    slabs: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype
    device: torch.device | str = "cpu"
    shapes: Shapes = ()
    layers: tuple[int, ...] = ()
    mixers: MixerSizes | None = None

    @classmethod
    def of(
        cls, layers: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> "CacheLayout":
        """Return the layout of these layers in one slab; layers: KV heads, and sizes of keys and of values."""
        heads, size, value_size = layers[0]
        if len(set(layers)) == 1 and size == value_size:
            return cls(((len(layers), heads, size),), dtype, device)
        shapes = tuple(((heads, size), (heads, value)) for heads, size, value in layers)
        width = max(heads * size for pair in shapes for heads, size in pair)
        return cls(((len(layers), 1, width),), dtype, device, shapes)


class KVCache:
    """Keep what the layers of a model have read of one sequence.

    slabs   keys and values of layers with attention, [layers, 2, KV heads, capacity, head size]; `slab` is the first
    states  those of layers without, as a decoder's `memory` makes them, one for all; empty where there are none
    places  int64 [capacity], positions by slot, of scratch, where a model's windows need them

    Slots below `length` hold the committed tokens in order. Slots from `length` on are scratch: a forward over
    tree nodes writes there and `keep` keeps the rows of the accepted path. `filled`, int32 [1], is the length where
    the cache is. A state cannot be taken back by a token. So a crop keeps what it can, which `reach` tells: of slots
    with states those up to the last forward's root or after it, those up to the last `mark`, or none.
    """

    def __init__(self, layout: CacheLayout, capacity: int, states: Sequence[Any] = ()) -> None:
        self.layout, self.states = layout, list(states)
        self._allocate(capacity)
        self.filled = torch.zeros(1, dtype=torch.int32, device=layout.device)

    def layer(
        self, number: int, first: int = 0, end: int | None = None, slab: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer of a slab, [1, KV heads, slots, head size] each, as views."""
        number = self.layout.layers.index(number) if self.layout.layers else number
        both = self.slabs[slab][number, :, None, :, first:end]
        # not unpacked: parts of an unpacked view may not be written to where autograd runs
        keys, values = both[0], both[1]
        if not self.layout.shapes:
            return keys, values
        key_shape, value_shape = self.layout.shapes[number]
        return of_shape(keys, key_shape), of_shape(values, value_shape)

    @property
    def length(self) -> int:
        """The number of committed slots; synchronises with a device."""
        return int(self.filled)

    @length.setter
    def length(self, slots: int) -> None:
        self.filled.fill_(slots)

    @property
    def capacity(self) -> int:
        return self.slab.shape[3]

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it takes."""
        return sum(slab.nbytes for slab in self.slabs) + sum(
            int(each.bytes) for each in self.states
        )

    @property
    def slot_bytes(self) -> int:
        """The bytes of a slot, of all layers."""
        return sum(slab.nbytes for slab in self.slabs) // self.capacity

    def bytes_of(self, slots: int) -> int:
        """Return the bytes of the cache with room for `slots` slots, or for those that it has if these are more."""
        return self.nbytes + max(0, rounded(slots) - self.capacity) * self.slot_bytes

    def copy_from(self, other: "KVCache", count: int) -> None:
        """Become what another cache of this kind is after its first `count` slots. Recurrent states are not copied."""
        self.reserve(count)
        for slab, there in zip(self.slabs, other.slabs, strict=True):
            slab[:, :, :, :count] = there[:, :, :, :count]
        self.length = count

    def release(self) -> None:
        """Forget all slots, and give back their memory."""
        self.crop(0)
        self._resize(1)

    def reach(self, length: int) -> int:
        """Return how many slots `crop(length)` leaves; it may keep fewer than asked for."""
        return min([length, *(int(each.reach(length)) for each in self.states)])

    def mark(self) -> None:
        """Make the committed slots ones that a later `crop` can go back to."""
        for each in self.states:
            each.mark()

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` slots; committed slots are kept, scratch is dropped."""
        if capacity > self.slab.shape[3]:  # not by the property: several calls per cycle
            self._resize(capacity)

    def _resize(self, capacity: int) -> None:
        """Have room for `capacity` slots, those that are committed or more."""
        length = self.length
        if not length:
            self._allocate(1)  # gives memory back that the larger one may need
        slabs = self.slabs
        self._allocate(capacity)
        for slab, before in zip(self.slabs, slabs, strict=True):
            slab[:, :, :, :length] = before[:, :, :, :length]

    def _allocate(self, capacity: int) -> None:
        self.slabs = tuple(
            torch.empty(
                (count, 2, heads, rounded(capacity), size),
                dtype=self.layout.dtype,
                device=self.layout.device,
            )
            for count, heads, size in self.layout.slabs
        )
        self.slab = self.slabs[0]
        self.places = torch.arange(self.capacity, dtype=torch.int64, device=self.slab.device)

    def crop(self, length: int) -> None:
        """Forget everything from slot `reach(length)` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length: got {length}, accepted 0 to {self.length}")
        end = self.reach(length)
        for each in self.states:
            each.crop(length)
        self.length = end

    def keep(self, path: Nodes) -> None:
        """Commit scratch rows in place: row `length + path[j]` becomes slot `length + j`.

        path: ascending offsets into the scratch, starting with 0.
        """
        for each in self.states:
            each.keep(self.filled, path.ids, path.live)
        for slab in self.slabs:
            ops.compact_kv(slab, path.ids, path.live, self.filled)
        self.filled += path.live

    def commit(self, path: Sequence[int]) -> None:
        """Keep the slots of a path that the host knows, as `keep` does."""
        if path[-1] >= len(path):
            device = self.slab.device
            ids = (
                torch.tensor(path, dtype=torch.int64, device=device)
                if device.type == "cpu"
                else ops.sent(path, torch.int64, device)
            )
            self.keep(Nodes.of(ids))
        else:  # all of them are in place
            self.filled += len(path)


def of_shape(rows: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return slots of a layer, [1, 1, slots, width], as those of its heads, [1, KV heads, slots, head size]."""
    heads, size = shape
    return rows[0, 0, :, : heads * size].unflatten(-1, shape).transpose(0, 1)[None]


def rounded(capacity: int) -> int:
    """Return the capacity of a cache that needs at least this many slots."""
    return -(-capacity // GRANULE) * GRANULE


@dataclass(eq=False)
class Rows:
    """Hold the rows of one forward over a cache. Counts are tensors: one capture serves every length and every tree.

    tokens, positions  int64 [n]
    words              int64 [n, w], bit j % 64 of word j // 64: the row sees slot prefix + j
    slot               int64 [1], the cache slot of the first row; the others take the slots after it
    prefix, live       int32 [1]: slots that every row sees; rows from `live` on are padding
    paths              None unless attention is strict
    places             int64 [slots or more], the positions of slots; None where no window is shorter than the text

    Keys and values of padding go to the slots after those of the other rows. Its results mean nothing.
    """

    tokens: Tensor
    positions: Tensor
    words: Tensor
    slot: Tensor
    prefix: Tensor
    live: Tensor
    paths: Paths | None = None
    places: Tensor | None = field(default=None, init=False, repr=False)
    # masks by window, see attention.py
    near: dict[int, Any] = field(default_factory=dict, init=False, repr=False)
    _mask: Any = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, tree: TokenTree, filled: Tensor) -> "Rows":
        """Return a tree's rows, which follow the `filled` slots of a cache, int32 [1] on the device of the rows."""
        tokens, depths, words, live = (
            array.to(filled.device)
            for array in (tree.tokens, tree.depths, tree.ancestors, tree.size)
        )
        rows = cls(tokens, depths + filled, words, filled.long(), filled, live)
        rows.seen = live
        return rows

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @cached_property
    def seen(self) -> Tensor:
        """Return int32 [1]: the number of slots after the prefix, those of the rows included."""
        return (self.slot - self.prefix + self.live).int()

    @property
    def end(self) -> int:
        """Return the slot after those of the rows; synchronises with a device."""
        return int(self.slot) + int(self.live)

    def mask(self) -> Tensor | None:
        """Return the slots that each row sees, bool [n, end]; None if one row sees all. Synchronises with a device."""
        end, prefix = self.end, int(self.prefix)
        if len(self) == 1 and end == prefix + 1:
            return None
        mask = torch.ones(len(self), end, dtype=torch.bool, device=self.tokens.device)
        mask[:, prefix:] = ops.tree_mask(self.words, end - prefix)
        return mask

    def packed_mask(self, groups: int, dtype: torch.dtype) -> Any:
        """Return the mask in the layout that is fastest for `ops.tree_attention`, made once per forward."""
        if self._mask is None and (mask := self.mask()) is not None:
            self._mask = ops.pack_mask(mask, groups, dtype, int(self.prefix))
        return self._mask

    def strict_piece(self, first: int, count: int, *, padded: bool = False) -> "Rows":
        """Return up to `count` rows from `first` on, or exactly `count` if `padded`, for strict attention in order."""
        piece = slice(first, first + count)
        arrays = self.tokens[piece], self.positions[piece], self.words[piece]
        if padded and (missing := count - len(arrays[0])):
            arrays = tuple(torch.cat([a, a.new_zeros(missing, *a.shape[1:])]) for a in arrays)  # type: ignore[assignment]
        live = (self.live - first).clamp(0, count)
        return Rows(*arrays, self.slot + first, self.prefix, live, ops.order_paths(arrays[2]))


def words_for(slots: int) -> int:
    """Return the number of words that hold a bit for each slot."""
    return -(-slots // WORD_BITS)


def causal_words(rows: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the words of consecutive tokens, each of which sees those before it and itself.

    int64 [rows, ceil(rows / 64)].
    """
    return ops.own_bits(rows, torch.device(device)).cumsum(0)  # of distinct bits: a union


class LanguageModel(Protocol):
    """A loaded model that runs rows of a tree and prompts over its caches: CausalLM, NativeLM.

    config       of the text model, as transformers has it
    max_context  tokens that a text can have
    version      of its weights: another one where these were changed
    seconds      spent in forwards, ever
    """

    config: PretrainedConfig
    max_context: int
    version: int
    seconds: float

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of its embeddings."""

    @property
    def model(self) -> PreTrainedModel:
        """Return the model as transformers runs it; a native one is read on first use."""

    @property
    def device(self) -> torch.device:
        """Return where its caches are."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of its weights, or the one that they stand for."""

    @property
    def layers(self) -> int:
        """Return the number of decoder layers; `layers` + 1 hidden states can be asked for."""

    def widen(self, context: int) -> None:
        """Accept texts of up to `context` tokens, whatever the config says."""

    def require_same(self) -> None:
        """Raise UnsupportedModelError where a loaded model has changed in more than it can take in."""

    def refresh(self) -> None:
        """Take in weights that were changed; UnsupportedModelError as `require_same`."""

    def new_cache(self, capacity: int) -> KVCache:
        """Return an empty cache with room for `capacity` tokens."""

    def prepare_features(self, ids: tuple[int, ...]) -> None:
        """Make ready for `features=ids`; UnsupportedModelError where there are no such hidden states."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Return token embeddings, [rows, hidden size], without a scale that the model may have."""

    def head(self, states: Tensor) -> Tensor:
        """Return the model's logits, [rows, vocabulary], of states after the final norm."""

    def extend(
        self,
        cache: KVCache,
        tokens: list[int],
        features: tuple[int, ...] = (),
        *,
        logits: Logits = "last",
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run and commit `tokens`; return the logits of the last one or of all, and the features of all."""

    def forward(
        self,
        rows: Rows,
        cache: KVCache,
        features: tuple[int, ...] = (),
        *,
        one: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run tree rows; return the logits of all or of row `one`, int64 [1], and the features of all."""


@contextmanager
def counted(lm: Any) -> Iterator[None]:
    """Add the seconds that pass within the context to those of a model's forwards."""
    began = time.perf_counter()
    yield
    lm.seconds += time.perf_counter() - began


class CachedTarget(Target):
    """A target over a language model with the KV cache of one sequence. A subclass runs trees by its `_run`."""

    _run: Callable[..., Any]

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        self.cache: KVCache = lm.new_cache(1)
        self.tokens = []
        self.max_context, self.vocab_size = lm.max_context, lm.vocab_size
        self._version = lm.version
        self._features: tuple[int, ...] = ()

    @property
    def model(self) -> PreTrainedModel:
        """The model as transformers runs it. A native one is read when it is first asked for."""
        return self.lm.model

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.lm.dtype

    @property
    def model_seconds(self) -> float:  # type: ignore[override]
        return self.lm.seconds

    def reserve(self, tokens: int, scratch: int) -> None:
        self.cache.reserve(tokens + scratch)

    def want(self, features: tuple[int, ...] = (), successors: int = 0) -> None:
        if features and features != self._features:
            self.lm.prepare_features(features)
        self._features = features
        super().want(successors=successors)

    def cached(self, tokens: list[int]) -> int:
        """Refresh a model that was changed, and drop its cache, before the cache is looked at."""
        self.lm.refresh()
        if self.lm.version != self._version:
            self.reset()
            self._version = self.lm.version
        return self.cache.reach(super().cached(tokens))

    def prefill(self, tokens: list[int], keep: int | None = None) -> Tensor | None:
        self.cache.crop(self.cached(tokens) if keep is None else keep)
        self.tokens = tokens[: self.cache.length]
        features = self._extend(tokens[self.cache.length :])
        self.tokens = list(tokens)
        return features

    def _after_mark(self, tokens: int) -> int:
        """Return how many of a prompt's last `tokens` are run after its mark: the next turn may begin otherwise."""
        return MARKED_BEFORE if self.cache.states and tokens >= LONG_PROMPT else 0

    def _extend(self, tokens: list[int]) -> Tensor | None:
        """Run the rest of a prompt, and mark it; return its features."""
        end = len(tokens) - self._after_mark(len(tokens))
        _, states = self.lm.extend(self.cache, tokens[:end], self._features, logits="none")
        self.cache.mark()
        _, last = self.lm.extend(self.cache, tokens[end:], self._features, logits="none")
        return states if states is None or last is None else torch.cat([states, last])

    def rate(self, tokens: list[int]) -> Tensor:
        if not self.tokens:
            self.cached([])
        logits, _ = self.lm.extend(self.cache, tokens, logits="all")
        assert logits is not None
        self.tokens = [*self.tokens, *tokens]
        return logits

    def verify(self, tree: TokenTree) -> tuple[Tensor, Tensor | None]:
        rows = self._run(tree, greedy=False)
        return rows.logits, rows.states

    def commit(self, tree: TokenTree, path: list[int]) -> None:
        self.cache.commit(path)
        self.tokens.extend(map(tree.tokens.tolist().__getitem__, path))

    def reset(self) -> None:
        self.cache.crop(0)
        self.tokens = []


class LaneTarget(CachedTarget):
    """One of several targets over a model, whose rows are run with those of the others by its `run_lanes`.

    A subclass adds it to a target whose `verify` and `choose` run what `_rows` returns by `_run`.

    others  texts that are answered at present, this one left out
    """

    others = 0
    _rows: Callable[..., Any]
    _asked: Any = None  # rows of the next tree, where they were run with those of others

    def __init__(self, target: CachedTarget) -> None:
        """target: the one that it joins. It counts no experts, as rows of all texts are counted at once."""
        cache, uncounted = target.lm.new_cache(1), {"counts": False, "experts": None}
        # strict rows are run alone, and off a device nothing is captured
        on_device = target.captured and target.device.type == "cuda"
        captured = on_device and not cast(Any, target).strict_rows
        vars(self).update(vars(target), cache=cache, tokens=[], captured=captured, **uncounted)

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()  # the thread that steps all texts is in the context of one of them

    def ask(self, tree: TokenTree, *, greedy: bool) -> SharedRows | None:
        """Return the rows of a tree, to be run before `choose` is called with it, or `verify` if not `greedy`."""
        self._asked = self._rows(tree, greedy=greedy)
        return cast(SharedRows, self._asked)

    def _run(self, tree: TokenTree, *, greedy: bool) -> Any:
        rows, self._asked = self._asked, None
        return rows or super()._run(tree, greedy=greedy)

    def reset(self) -> None:
        super().reset()
        self._asked = None

    def take_in(
        self, tokens: list[int], keep: int, size: Callable[[int], int]
    ) -> Generator[Any, None, Tensor | None]:
        """Run a prompt as `prefill` does, in pieces: yield the rows of each, which are run before it goes on.

        size: returns the tokens of a piece by the tokens before it. Closed between two pieces, it keeps what was run.
        """
        self.cache.crop(keep)
        self.tokens = tokens[: self.cache.length]
        mark = len(tokens) - self._after_mark(len(tokens) - self.cache.length)
        states: list[Tensor] = []
        for end in dict.fromkeys((mark, len(tokens))):
            while (start := self.cache.length) < end:
                rows = cast(Any, self.lm).rows_of(
                    tokens[start : min(end, start + size(start))], self.cache, self._features
                )
                yield rows
                self.cache.length = start + len(rows.tokens)
                self.tokens = tokens[: self.cache.length]
                states += [] if rows.states is None else [rows.states]
            if end == mark:
                self.cache.mark()
        return torch.cat(states) if states else None

    def shares(self, other: "LaneTarget", tokens: list[int]) -> int:
        """Return how many of the first `tokens` another cache holds that can be copied."""
        return (
            0
            if self.cache.states or other._version != self.lm.version
            else common_prefix(other.tokens, tokens)
        )

    def copy_from(self, other: "LaneTarget", count: int) -> None:
        """Become what another one is after its first `count` tokens. Both have the same weights."""
        self.cache.copy_from(other.cache, count)
        self.tokens, self._version = other.tokens[:count], other._version


# by the class of a target that can stand beside others of its model, where the latter's `joins` says so
LANES: dict[type, type[LaneTarget]] = {}


def in_own_dtype(
    running: AbstractContextManager[None], device: str
) -> AbstractContextManager[None]:
    """Return `running`, around which autocast is switched off on this kind of device where a caller has switched it on.

    An answer is that of the model's own dtype, whatever it is asked in.
    """
    return _without_autocast(running, device) if torch.is_autocast_enabled(device) else running


@contextmanager
def _without_autocast(running: AbstractContextManager[None], device: str) -> Iterator[None]:
    with torch.autocast(device, enabled=False), running:
        yield
