"""The key-value cache: compaction, growth, and scratch that is never read before it is written."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from specengine.models.kv_cache import GRANULE, CacheLayout, KVCache
from specengine.models.native import NativeTarget
from specengine.ops.tree import TokenTree
from tests.engine.engines import PROMPT, engine_of, plainly
from tests.examples import examples
from tests.toy import POLICIES, nodes_of

pytestmark = pytest.mark.usefixtures("one_thread")


def random_cache(length: int, scratch: int) -> KVCache:
    cache = KVCache(CacheLayout(((2, 3, 4),), torch.float32), length + scratch)
    cache.slab.normal_()
    cache.length = length
    return cache


@examples(40)
@given(st.integers(0, 300), st.sets(st.integers(1, 80), max_size=12))
@example(7, {2})  # only the last one moves, by a slot
def test_compact_equals_gather(length: int, rest: set[int]) -> None:
    path = [0, *sorted(rest)]
    cache = random_cache(length, 81)
    before = cache.slab.clone()
    cache.commit(path)
    moved = random_cache(length, 81)
    moved.slab.copy_(before)
    moved.keep(
        nodes_of([*path, *[0] * 3])._replace(live=torch.tensor([len(path)], dtype=torch.int32))
    )
    assert torch.equal(moved.slab, cache.slab)
    assert moved.length == cache.length
    assert cache.length == length + len(path)
    assert torch.equal(cache.slab[:, :, :, :length], before[:, :, :, :length])
    gathered = before[:, :, :, [length + node for node in path]]
    assert torch.equal(cache.slab[:, :, :, length : cache.length], gathered)


def test_an_empty_cache_grows_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is given back first; without enough for more it has a little."""
    allocate, freed = KVCache._allocate, list[bool]()

    def noted(self: KVCache, capacity: int) -> None:
        if capacity > 1:
            freed.append(slab.expired())
        if capacity > 10 * GRANULE:
            raise MemoryError
        allocate(self, capacity)

    for length in (0, 3):
        cache = random_cache(length, 100)
        slab = StorageWeakRef(cache.slab.untyped_storage())
        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "_allocate", noted)
            cache.reserve(2 * GRANULE)
            assert freed.pop() == (length == 0)
            with pytest.raises(MemoryError):
                cache.reserve(100 * GRANULE)
        assert cache.capacity == (2 if length else 1) * GRANULE
        cache.commit([0])


def test_every_slab_keeps_the_path() -> None:
    cache = KVCache(CacheLayout(((2, 3, 4), (1, 2, 8), (1, 1, 16)), torch.float32), 40)
    for slab in cache.slabs:
        slab.normal_()
    cache.length = 10
    before = [slab.clone() for slab in cache.slabs]
    cache.commit([0, 2, 5])
    for slab, old in zip(cache.slabs, before, strict=True):
        assert torch.equal(slab[:, :, :, :13], old[:, :, :, [*range(10), 10, 12, 15]])
    cache.reserve(GRANULE + 1)
    for slab, old in zip(cache.slabs, before, strict=True):
        assert torch.equal(slab[:, :, :, :10], old[:, :, :, :10])


def test_reserve_keeps_what_is_committed() -> None:
    cache = random_cache(200, 10)
    before, slab = cache.slab.clone(), cache.slab
    cache.reserve(GRANULE)
    assert cache.slab is slab
    cache.reserve(GRANULE + 1)
    assert (cache.capacity, cache.length) == (2 * GRANULE, 200)
    assert torch.equal(cache.slab[:, :, :, :200], before[:, :, :, :200])
    cache.crop(150)
    assert cache.length == 150
    for length in (-1, 151):
        with pytest.raises(ValueError, match=f"length: got {length}, accepted 0 to 150"):
            cache.crop(length)


def poison(owner: Any, method: str, cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fill all scratch of `cache` with NaN before each call of `method` that starts a cycle; the slabs' addresses."""
    real, addresses = getattr(owner, method), []

    def poisoned(tree: TokenTree, *rest: Any) -> Any:
        cache.slab[:, :, :, cache.length :] = float("nan")
        result = real(tree, *rest)
        addresses.append(cache.slab.data_ptr())
        return result

    monkeypatch.setattr(owner, method, poisoned)
    return addresses


@pytest.mark.sliced(10)
@pytest.mark.parametrize("policy", POLICIES)
def test_scratch_is_never_read_before_it_is_written(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("llama", "small_model", policy)
    verifies = "choose" if isinstance(engine.target, NativeTarget) else "verify"
    addresses = poison(engine.target, verifies, engine.target.cache, monkeypatch)
    poison(engine.drafter, "root", engine.drafter.cache, monkeypatch)
    result = engine.generate(PROMPT, max_new_tokens=40)
    assert result.token_ids == plainly("llama", PROMPT, 40)
    assert not engine.target.cache.slab[:, :, :, : engine.target.cache.length].isnan().any()
    assert len(addresses) == result.stats.num_spec_steps
    assert len(set(addresses)) == 1  # one slab, made before the first cycle


def test_the_cache_is_sized_once_for_prompt_answer_and_tree() -> None:
    engine = engine_of("llama", "small_model", "eagle")
    engine.generate(PROMPT, max_new_tokens=200)
    needed = len(PROMPT) + 200 + engine.policy.budget
    assert needed <= engine.target.cache.capacity <= needed + GRANULE
