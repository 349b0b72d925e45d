"""Answers side by side over a model's own modules and fused layers: rows of several texts are one forward."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specengine import Engine, ops
from specengine.drafters import Drafter
from specengine.drafters.eagle import EagleDraft
from specengine.drafters.recycling import Recycling
from specengine.drafters.small_model import SmallModel
from specengine.engine import Pool, generation
from specengine.engine.joined import CapturedLanes
from specengine.errors import InputError, UnsupportedModelError
from specengine.models import fused, kv_cache
from specengine.models.huggingface import CausalLM, HuggingFaceTarget, ModuleLane
from specengine.models.kv_cache import LaneTarget, Rows
from specengine.ops import cuda_graphs
from specengine.ops.cuda_graphs import Graphs
from specengine.ops.tree import TokenTree
from tests import toy
from tests.engine.lanes import prompts
from tests.graphs import pretended
from tests.ops.backends import choose
from tests.toy import VOCABULARY, policy_for, random_tree, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = 3
MEMORY = 1 << 30  # bytes, of all caches
KEPT = {"max_new_tokens": 20, "eos_token_id": []}


@torch.inference_mode()
def texts(target: HuggingFaceTarget, seed: int) -> tuple[list[ModuleLane], list[TokenTree]]:
    """Return lanes with prompts of several lengths in their caches, and a tree for each."""
    chance = random.Random(seed)
    lanes, trees = [], []
    for number in range(5):
        lane = ModuleLane(target)
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.choice([1, 2, 9, 30, 70]))]
        lane.want((1, 2))
        lane.reserve(120, 40)
        lane.prefill(prompt)
        lane.cache.slab[:, :, :, lane.cache.length :] = float("nan")
        nodes = chance.choice([1, 1, 2, 5, 17])
        lanes.append(lane)
        trees.append(random_tree(100 * seed + number, nodes, VOCABULARY, root=prompt[-1]))
    return lanes, trees


@torch.inference_mode()
def together(lanes: list[ModuleLane], trees: list[TokenTree]) -> list[tuple[Tensor, Tensor]]:
    """Return the logits and features of each tree from one forward, with a piece of another text's prompt."""
    batch: list[Any] = [
        lane.ask(tree, greedy=False) for lane, tree in zip(lanes, trees, strict=True)
    ]
    piece = lanes[0].lm.rows_of([5, 6, 7], lanes[0].lm.new_cache(1))
    lanes[0].lm.run_lanes([batch[0], piece, *batch[1:]])
    assert piece.logits is None
    return [(rows.logits, rows.states) for rows in batch]


@torch.inference_mode()
def check(target: HuggingFaceTarget) -> None:
    for seed in range(4):
        lanes, trees = texts(target, seed)
        before = [lane.cache.slab.clone() for lane in lanes]
        alone = [lane.verify(tree) for lane, tree in zip(lanes, trees, strict=True)]
        slabs = [lane.cache.slab.clone() for lane in lanes]
        for lane, slab in zip(lanes, before, strict=True):
            lane.cache.slab.copy_(slab)
        for found, wanted, lane, slab in zip(
            together(lanes, trees), alone, lanes, slabs, strict=True
        ):
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(lane.cache.slab, slab, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("family", [*toy.FAMILIES, "gemma3_text", "qwen3_moe"])
def test_rows_of_several_texts_are_those_of_each_alone(family: str) -> None:
    check(HuggingFaceTarget(tiny(family, num_hidden_layers=LAYERS)))


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse layers on a CPU as well, where torch runs their ops."""
    monkeypatch.setattr(fused, "DEVICES", ("cpu",))
    monkeypatch.setattr(ops, "is_served", lambda *_: True)


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_fused_layers_run_rows_of_several_texts(family: str, merge: bool) -> None:
    window = {"sliding_window": 12} if family == "mistral" else {}
    target = HuggingFaceTarget(tiny(family, num_hidden_layers=LAYERS, **window), merge=merge)
    assert target.lm.modules.startswith("fused")
    check(target)


@torch.inference_mode()
def test_a_text_that_reads_anothers_cache_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    target = HuggingFaceTarget(tiny("llama", num_hidden_layers=LAYERS))
    lanes, trees = texts(target, 0)
    right = together(lanes, trees)
    lanes[0].cache.slab, lanes[0].cache.length = lanes[1].cache.slab, lanes[1].cache.length
    wrong = together(lanes, trees)
    assert not torch.allclose(right[0][0], wrong[0][0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(right[2], wrong[2])


def drafter_of(draft: str, target: HuggingFaceTarget) -> Drafter | None:
    if draft == "small_model":
        return SmallModel(toy.near_copy("llama", num_hidden_layers=LAYERS), VOCABULARY)
    if draft == "eagle3":
        config = toy.head_config(3, target.lm.model, layer_ids=(0, 1, 1))
        return EagleDraft(toy.tiny_head(config), target.lm)
    return Recycling() if draft == "recycling" else None


@pytest.mark.sliced(3)
@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "seed": 5, "temperature": 0.9}, {"logprobs": 2}], ids=str
)
@pytest.mark.parametrize(
    ("draft", "policy"),
    [
        ("plain", "eagle"),
        ("recycling", "talon"),
        ("recycling", "auto"),
        ("small_model", "eagle"),
        ("eagle3", "salf"),
        ("eagle3", "auto"),
    ],
)
def test_answers_are_those_given_alone(draft: str, policy: str, options: dict[str, Any]) -> None:
    target = HuggingFaceTarget(tiny("llama", num_hidden_layers=LAYERS))
    drafter = drafter_of(draft, target)
    engine = Engine(target, drafter, None if drafter is None else policy_for(policy))
    asked = [*prompts(6), [(7 * i + 3) % VOCABULARY for i in range(150)]]
    alone = [engine.generate(prompt, **KEPT, **options) for prompt in asked]
    pool = Pool(engine, 3)
    many = pool.generate(asked, **KEPT, **options)
    assert [result.token_ids for result in many] == [result.token_ids for result in alone]
    steps = sum(result.stats.num_spec_steps for result in many)
    assert pool.scheduler.forwards < 0.8 * steps


def test_texts_share_the_forwards_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    target, runs = HuggingFaceTarget(tiny("llama")), list[int]()
    pool = Pool(Engine(target, None, None), 4)
    run = nn.Embedding.forward

    def counted(self: Any, tokens: Tensor) -> Tensor:
        runs.append(tokens.numel())
        return run(self, tokens)

    monkeypatch.setattr(nn.Embedding, "forward", counted)
    pool.generate([[1, 2, 3]] * 4, max_new_tokens=40, eos_token_id=[])
    assert sum(runs) >= 4 * 40
    assert len(runs) <= 50  # 160 and more, one by one


def test_what_is_strict_keeps_its_bits_beside_others() -> None:
    model = tiny("qwen3", hidden_size=64, intermediate_size=128, head_dim=32, num_attention_heads=2)
    try:
        target = HuggingFaceTarget(model.bfloat16(), strict=True, captured=True)
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    engine = Engine(target, None, None)
    asked = [*prompts(4), [(7 * i + 3) % VOCABULARY for i in range(150)]]
    options = KEPT | {"logprobs": 1}
    alone = [engine.generate(prompt, **options) for prompt in asked]
    many = Pool(engine, 3).generate(asked, **options)
    assert [result.logprobs for result in many] == [result.logprobs for result in alone]


def test_a_model_that_is_changed_is_read_again() -> None:
    model = tiny("llama")
    engine = Engine(HuggingFaceTarget(model), None, None)
    pool = Pool(engine, 2)
    before = [result.token_ids for result in pool.generate(prompts(3), **KEPT)]
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
    after = [result.token_ids for result in pool.generate(prompts(3), **KEPT)]
    assert after == [engine.generate(prompt, **KEPT).token_ids for prompt in prompts(3)]
    assert after != before


@pytest.mark.parametrize(
    "family", ["gpt_oss", "gemma4_text", "lfm2"], ids=["dense mask", "shared keys", "states"]
)
def test_models_whose_rows_stand_alone_refuse(family: str) -> None:
    engine = Engine.from_pretrained(tiny(family), "ngram", backend="huggingface")
    with pytest.raises(InputError, match="parallel: got 2, accepted 1 on "):
        Pool(engine, 2)


# ---- on a device


@pytest.fixture
def by_meanings(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "reference")
    monkeypatch.setattr(ops, "is_served", lambda *_: True)


def small(family: str) -> Any:
    changes = {"sliding_window": 8} if family == "mistral" else {}
    return tiny(family, num_hidden_layers=LAYERS, **changes)


def on_the_device(draft: str = "plain", policy: str = "eagle", family: str = "llama") -> Engine:
    model = pretended.moved(small(family))
    target = HuggingFaceTarget(model, captured=True)
    assert target.lm.modules == "fused"
    drafter: Any = EagleDraft(head(), target.lm) if draft == "eagle3" else None
    return Engine(target, drafter, None if drafter is None else policy_for(policy, 3))


def head() -> Any:
    config = toy.head_config(3, tiny("llama", num_hidden_layers=LAYERS), layer_ids=(0, 1, 1))
    return pretended.moved(toy.tiny_head(config))


def alone(asked: list[list[int]], family: str = "llama", **options: Any) -> list[list[int]]:
    engine = Engine(HuggingFaceTarget(small(family)), None, None)
    return [engine.generate(prompt, **options).token_ids for prompt in asked]


def tokens(results: list[Any]) -> list[list[int]]:
    return [result.token_ids for result in results]


pretends = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pretends
@pytest.mark.usefixtures("by_meanings")
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}, {"logprobs": 1}], ids=str)
def test_eight_texts_on_a_device_are_one_graph(options: dict[str, Any]) -> None:
    """Whichever of them are under way, plain decoding replays one capture."""
    asked, options = prompts(11), {"max_new_tokens": 6, "eos_token_id": [], **options}
    expected = alone(asked, **options)
    with pretended.cuda():
        pool = Pool(on_the_device(), 8, MEMORY)
        assert tokens(pool.generate(asked, **options)) == expected
        first = pool.engines[0]
        graphs = first.drivers.own.captured.joined.graphs
        names = {"plant", "finish sampled" if "seed" in options else "finish greedy"}
        if "logprobs" in options:  # which the host reads
            graphs, names = first.target.joined.graphs, {"lanes of 1 ()"}
        assert graphs.captures == dict.fromkeys(names, 1)
        assert all(known.graph is not None for known in graphs._captured.values())
    assert pool.scheduler.forwards < 30


@pretends
@pytest.mark.usefixtures("by_meanings")
@pytest.mark.parametrize(("family", "at_once"), [("llama", True), ("mistral", False)])
def test_attention_of_all_texts_is_one_operation(
    family: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no layer slides, of texts that begin and end at different times, whose caches have several sizes."""
    monkeypatch.setattr(cuda_graphs, "MIN_SLOTS", 16)
    monkeypatch.setattr(kv_cache, "GRANULE", 8)
    attend, rows = ops.lanes_attention, list[int]()

    def counted(query: Tensor, *given: Any) -> Tensor:
        rows.append(query.shape[1])
        return attend(query, *given)

    monkeypatch.setattr(ops, "lanes_attention", counted)
    asked, options = [[1, 2, 3], [5] * 40, [7, 8] * 9], {"max_new_tokens": 9, "eos_token_id": []}
    expected = alone(asked, family, **options)
    with pretended.cuda():
        pool = Pool(on_the_device(family=family), 3, MEMORY)
        assert tokens(pool.generate(asked, **options)) == expected
        capacities = {engine.target.cache.capacity for engine in pool.engines}
    assert set(rows) == ({3} if at_once else set())
    assert len(capacities) > 1


@pretends
@pytest.mark.usefixtures("by_meanings")
@pytest.mark.parametrize(
    ("policy", "family", "options"),
    [
        ("eagle", "llama", {"logprobs": 1}),
        ("eagle", "mistral", {"temperature": 1.0, "seed": 5, "logprobs": 1}),
        ("auto", "llama", {"logprobs": 1}),
    ],
)
def test_trees_of_all_texts_on_a_device_are_one_graph(
    policy: str, family: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host walks. Padded to a few widths, whichever are under way; what padding wrote nobody reads."""
    asked, options = prompts(5), {"max_new_tokens": 8, "eos_token_id": [], **options}
    expected, eager = alone(asked, family, **options), list[int]()
    run = CausalLM.run_lanes

    def watched(self: CausalLM, batch: Any, *slabs: Any) -> Any:
        eager.append(sum(isinstance(rows.tree, Rows) for rows in batch))
        return run(self, batch, *slabs)

    monkeypatch.setattr(CausalLM, "run_lanes", watched)
    with pretended.cuda():
        pool = Pool(on_the_device("eagle3", policy, family), 3, MEMORY)
        for engine in pool.engines:
            engine.target.cache.slab.fill_(float("nan"))
        assert tokens(pool.generate(asked, **options)) == expected
        graphs = pool.engines[0].target.joined.graphs
        assert all(known.graph is not None for known in graphs._captured.values())
    widths = {int(str(name).split()[2]) for name in graphs.captures}
    assert widths <= {1, 8, 16, 32, 64}
    assert max(widths) > 1
    assert len(eager) - 3 * len(widths) < pool.scheduler.forwards, "others than those with prompts"


@pretends
@pytest.mark.usefixtures("by_meanings")
@pytest.mark.parametrize("family", ["llama", "mistral"])
@torch.inference_mode()
def test_rows_of_trees_in_a_graph_are_those_of_each_alone(family: str) -> None:
    """Of whichever texts have a tree, behind what other trees and padding left in the buffers and caches."""
    with pretended.cuda():
        target = HuggingFaceTarget(pretended.moved(small(family)), captured=True)
        lanes, _ = texts(target, 1)
        joined = CapturedLanes(lanes)
        for sizes in (
            {0: 17, 2: 1, 4: 9},
            {1: 2, 2: 8},
            {0: 3, 1: 20, 3: 32},
            {4: 1, 1: 1},
            {2: 6},
        ):
            trees = {
                place: random_tree(place + size, size, VOCABULARY).to(target.device)
                for place, size in sizes.items()
            }
            expected = {
                place: target.lm.forward(
                    kv_cache.Rows.of(tree, lanes[place].cache.filled),
                    lanes[place].cache,
                    (1, 2),
                )
                for place, tree in trees.items()
            }
            for lane in lanes:
                lane.cache.slab[:, :, :, -50:] = float("nan")
            batch: list[Any] = [
                lanes[place].ask(tree, greedy=False) for place, tree in trees.items()
            ]
            joined.run_lanes(batch)
            for rows, (logits, states) in zip(batch, expected.values(), strict=True):
                torch.testing.assert_close(rows.logits.cpu(), logits.cpu(), rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(rows.states.cpu(), states.cpu(), rtol=1e-4, atol=1e-4)
        assert all(known.graph is not None for known in joined.graphs._captured.values())
    assert joined.graphs.captures == {f"lanes of {width} (1, 2)": 1 for width in (32, 8, 1)}


@pretends
@pytest.mark.usefixtures("by_meanings")
@pytest.mark.parametrize("draft", ["plain", "eagle3"])
def test_a_text_alone_in_a_pool_runs_as_graphs(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, options = prompts(2), {"max_new_tokens": 8, "eos_token_id": []}
    expected = alone(asked, **options)
    with pretended.cuda():
        pool = Pool(on_the_device(draft), 3, MEMORY)
        for prompt, answer in zip(asked, expected, strict=True):
            assert tokens(pool.generate([prompt], **options)) == [answer]
        driver = pool.engines[0].drivers.own.captured
        assert driver.graphs.captures["finish greedy"] == 1
        assert not driver.joined.graphs.captures
        monkeypatch.setattr(CausalLM, "forward", None)
        answers = pool.generate(asked[:1], **options, logprobs=1)
        assert tokens(answers) == expected[:1]


@pretends
@pytest.mark.usefixtures("by_meanings")
def test_caches_that_grow_are_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MIN_ROOM", 4)
    monkeypatch.setattr(cuda_graphs, "MIN_SLOTS", 16)
    monkeypatch.setattr(kv_cache, "GRANULE", 8)
    asked, options = [[1, 2, 3], [5] * 7], {"max_new_tokens": 60, "eos_token_id": []}
    expected = alone(asked, **options)
    with pretended.cuda():
        pool = Pool(on_the_device(), 2, MEMORY)
        assert tokens(pool.generate(asked[:1], max_new_tokens=4)) == [expected[0][:4]]
        assert tokens(pool.generate(asked, **options)) == expected
        driver = pool.engines[0].drivers.own.captured
        assert (
            driver.graphs.captures["finish greedy"] + driver.joined.graphs.captures["finish greedy"]
            > 2
        )


@pretends
@pytest.mark.usefixtures("by_meanings")
def test_a_capture_that_fails_leaves_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, options = prompts(3), {"max_new_tokens": 6, "eos_token_id": []}
    expected, tried = alone(asked, **options), list[Any]()

    def refused(self: Graphs, name: Any, *_: Any) -> None:
        tried.append(name)
        raise cuda_graphs.GraphMemoryError("graphs: no memory")

    with pretended.cuda():
        pool = Pool(on_the_device(), 3, MEMORY)
        monkeypatch.setattr(Graphs, "_capture", refused)
        assert tokens(pool.generate(asked, **options)) == expected
        assert 1 <= len(tried) < 6  # once for each set of caches, not for each step


def test_graphs_without_a_device_run_uncaptured() -> None:
    asked, options = prompts(5), {"max_new_tokens": 9, "eos_token_id": []}
    target = HuggingFaceTarget(tiny("llama", num_hidden_layers=LAYERS), captured=True)
    pool = Pool(Engine(target, None, None), 3, MEMORY)
    assert tokens(pool.generate(asked, **options)) == alone(asked, **options)


def test_lanes_are_of_the_model_that_they_stand_beside() -> None:
    target = HuggingFaceTarget(tiny("llama"))
    lane = ModuleLane(target)
    assert isinstance(lane, LaneTarget)
    assert isinstance(lane.lm, CausalLM)
    assert lane.lm is target.lm
    assert lane.cache is not target.cache
    assert not lane.captured
    assert not ModuleLane(HuggingFaceTarget(tiny("llama"), captured=True)).captured  # off a device
