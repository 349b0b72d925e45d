"""LTD's training: logged trees against the engine, environments, rewards, the bandit, seeds, resuming."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.save_util import load_from_zip_file

from specengine import policies
from specengine.cycle import Seconds
from specengine.drafting import draft_tree
from specengine.engine import Engine
from specengine.errors import InputError, MissingExtraError
from specengine.policies import _ltd
from specengine.policies._ltd import GO_ON, STOP, Networks, Shape
from specengine.policies.ltd import Ltd, depth_observation, size_observation
from specengine.train import policies as training
from specengine.train.asked import AskedEngine, Finished, Question, decision_seconds
from specengine.train.candidates import CandidateOptions, CandidateTrees, log_candidates
from specengine.train.costs import Costs
from specengine.train.environments import LiveEnvironment, LoggedEnvironment, cycle_facts
from specengine.train.grounds import LiveGround, LoggedGround, live_cycles, speed_of
from specengine.train.outcomes import Outcomes, cycle_cost, path_ranks, reward, split
from specengine.train.policies import read_log, train_policy
from specengine.train.policy_curve import plot
from specengine.train.policy_options import RECIPES, PolicyOptions, find_recipe
from specengine.tree import TokenTree
from specengine.verification import walk
from tests.toy import CPU, LetterTokenizer, Tables, ToyDrafter, ToyTarget

pytestmark = pytest.mark.usefixtures("one_thread")

TARGET = Tables(12, 1, concentration=0.2)
SHAPE = Shape(width=3, expansions=4, sizes=(2, 5, 9))
COSTS = Costs("toy", {1: 30.0, 10: 40.0}, {1: 3.0, 3: 2.0})
PROMPTS = [[i, j, 3] for i in range(4) for j in range(2)]
LOGGING = CandidateOptions(length=40, width=3, expansions=4, verified=5)
OPTIONS = PolicyOptions(
    width=3, expansions=4, sizes=(2, 5, 9), fixed_depth=2, fixed_size=5, size_steps=128, depth_steps=128, rollout=64,
    minibatch=32, epochs=2, hidden_size=(8,), hidden_depth=(8,), hidden_critic=(8,), environments=8, validate_every=1,
    length=24,
)  # fmt: skip


def engine(**kind: Any) -> Engine:
    draft = ToyDrafter(Tables(12, 2, concentration=0.2, like=TARGET, share=0.7), **kind)
    return Engine(ToyTarget(TARGET), draft, policies.make("chain"), LetterTokenizer())


def greedy(context: list[int], tree: TokenTree) -> Callable[[int], int]:
    """The target's choice after each node of a tree whose root ends the context."""
    return lambda node: int(TARGET.logits([*context, *tree.path_tokens(node)]).argmax())


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> CandidateTrees:
    return log_candidates(engine(), PROMPTS, tmp_path_factory.mktemp("candidates"), LOGGING, name="toy")


@pytest.fixture(scope="module")
def logged(trees: CandidateTrees) -> Outcomes:
    return Outcomes.of(list(trees.answers()), SHAPE, COSTS)


@pytest.fixture
def ground(trees: CandidateTrees) -> LoggedGround:
    return LoggedGround(*split([trees], SHAPE, COSTS, 0.2), OPTIONS)


# ---------------------------------------------------------------------------------------------------- logged trees


def test_logged_outcomes_are_those_of_the_engine(trees: CandidateTrees, logged: Outcomes) -> None:
    """At each logged position, every depth and size: tokens, nodes and passes of the beam that would have run there."""
    prompts = [PROMPTS[int(file.stem)] for file in trees.shards()]
    number = 0
    for prompt, answer in zip(prompts, trees.answers(), strict=True):
        tokens = Engine(ToyTarget(TARGET), None, None).generate(prompt, max_new_tokens=60, temperature=0.0).token_ids
        for tree in answer:
            context = [*prompt, *tokens[: tree.context - len(prompt)]]
            for expansions in (0, 1, 4):
                for size in (1, 5, 30):
                    draft = engine().drafter
                    assert draft is not None
                    draft.begin(context[:-1])
                    beam = policies.make("eagle", width=3, expansions=expansions, budget=size + 1)
                    made = draft_tree(context[-1], draft, beam, Seconds(), CPU).tree
                    following = [
                        int(TARGET.logits([*context, *made.path_tokens(n)]).argmax()) for n in range(made.size)
                    ]
                    _, committed = walk(made, following.__getitem__, lambda token: False)
                    at, deep, many = (np.array([value]) for value in (number, expansions, size))
                    assert logged.committed(at, deep, many).tolist() == [len(committed)]
                    cost = COSTS.cycle(made.size, [1, *[3] * (made.passes - 1)])
                    assert logged.cost(deep, many).tolist() == [pytest.approx(cost)]
            number += 1
    assert number == len(logged) > 40


def test_ranks_by_hand() -> None:
    """Five candidates, two levels; the path is candidate 1, then candidate 4; ties go to the earlier one."""
    scores, depths = np.array([-1.0, -2.0, -1.5, -2.0, -2.5]), np.array([1, 1, 2, 2, 2])
    ranks = path_ranks(scores, depths, np.array([1, 4]), 1)
    assert ranks[0].tolist()[0] == 1
    assert ranks[0].tolist()[1] > 1000, "not there yet"
    assert ranks[1].tolist() == [2, 4]


def test_observations_of_logged_trees_are_those_of_serving(trees: CandidateTrees, logged: Outcomes) -> None:
    file = trees.shards()[0]
    prompt = PROMPTS[int(file.stem)]
    shown: list[Any] = []

    class Watching(Networks):
        def goes_on(self, observation: torch.Tensor, expansions: int) -> bool:
            shown.append(("depth", expansions, observation))
            return expansions < 3

        def choose_size(self, observation: torch.Tensor) -> int:
            shown.append(("size", 3, observation))
            return 1

    policy = Ltd.steered(SHAPE, Watching(SHAPE, {"depth": (4,), "size": (4,)}))
    live_cycles(engine(), policy, prompt, 3)
    for which, expansions, observation in shown[:4]:
        observe = depth_observation if which == "depth" else size_observation
        assert torch.equal(observation, observe(logged.laid[0], logged.contexts[0], expansions, SHAPE))


def test_logging_goes_on_where_it_stopped_and_refuses_other_options(tmp_path: Path, trees: CandidateTrees) -> None:
    log_candidates(engine(), PROMPTS[:2], tmp_path, LOGGING, name="toy")
    before = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.safetensors")}
    assert len(before) == 2
    more = log_candidates(engine(), PROMPTS[:4], tmp_path, LOGGING, name="toy")
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in before} == before
    for found, expected in zip(more.answers(), trees.answers(), strict=False):
        assert all(
            torch.equal(a.scores, b.scores) and a.context == b.context for a, b in zip(found, expected, strict=True)
        )
    with pytest.raises(InputError, match=r"width: the candidates in .* begun with 3, got 4"):
        log_candidates(engine(), PROMPTS, tmp_path, replace(LOGGING, width=4), name="toy")
    (tmp_path / "00000.safetensors").write_bytes(b"x")
    with pytest.raises(InputError, match="is damaged"):
        list(CandidateTrees.open(tmp_path).answers())
    with pytest.raises(InputError, match="prompts: number 2 has fewer than 2 tokens"):
        log_candidates(engine(), [[1, 2], [1]], tmp_path / "short", LOGGING)
    with pytest.raises(InputError, match="draft: there is none"):
        log_candidates(Engine(ToyTarget(TARGET), None, None), PROMPTS, tmp_path / "plain", LOGGING)


def test_sampled_answers_are_logged_by_their_seed(tmp_path: Path) -> None:
    sampled = replace(LOGGING, temperature=1.0, seed=5)
    first, again = (log_candidates(engine(), PROMPTS[:2], tmp_path / name, sampled) for name in "ab")
    paths = [[tree.path.tolist() for answer in found.answers() for tree in answer] for found in (first, again)]
    assert paths[0] == paths[1]
    other = log_candidates(engine(), PROMPTS[:2], tmp_path / "c", replace(sampled, seed=6))
    assert paths[0] != [tree.path.tolist() for answer in other.answers() for tree in answer]


def test_trees_that_are_too_small_are_refused(trees: CandidateTrees) -> None:
    answers = list(trees.answers())
    with pytest.raises(InputError, match=r"has 39 nodes, 48 are needed for width 3 and 5 expansions"):
        Outcomes.of(answers, replace(SHAPE, expansions=5), COSTS)
    assert len(Outcomes.of(answers, replace(SHAPE, expansions=2), COSTS)) == sum(map(len, answers))
    with pytest.raises(InputError, match="no logged tree"):
        Outcomes.of([[]], SHAPE, COSTS)
    with pytest.raises(InputError, match="two or more are needed"):
        split([trees], SHAPE, COSTS, 1.0)


# ---------------------------------------------------------------------------------------------------- rewards


def test_rewards() -> None:
    """Equation 4 as a multiple of plain decoding's throughput; the ablations of section 6.3."""
    assert reward("table", 3, 60.0, 30.0) == reward("wallclock", 3, 60.0, 30.0) == 1.5
    assert reward("accept", 3, 60.0, 30.0) == 3
    assert reward("time", 3, 60.0, 30.0) == -2


def test_the_reward_can_be_recomputed_from_the_log() -> None:
    for costs in (COSTS, None):
        live = environment("size", costs)
        live.reset(seed=1)
        for step in range(30):
            _, given, done, _, facts = live.step(step % 3)
            assert done
            if costs is None:
                expected = facts["tokens"] / (100 * facts["seconds"])
            else:
                spent = costs.cycle(facts["verified"], facts["widths"])
                expected = facts["tokens"] * costs.plain / spent
            assert given == pytest.approx(expected)
            assert given > 0
            live.reset()
        live.close()


def test_costs_of_a_cycle() -> None:
    found = cycle_cost(COSTS, SHAPE, 2, 9)
    assert found == pytest.approx(40 + 3 + 2 + 2)
    assert cycle_cost(COSTS, SHAPE, 0, 9) == pytest.approx(30 + 10 / 9 * 3 + 3), "three candidates are all there are"
    record = COSTS.record()
    assert (record["name"], record["verify"]["10"], record["draft"]["3"]) == ("toy", 40, 2)


# ---------------------------------------------------------------------------------------------------- environments


def environment(which: Any, costs: Costs | None, other: Any = None, **kind: Any) -> LiveEnvironment:
    def make(seed: int) -> AskedEngine:
        return AskedEngine(engine(**kind), PROMPTS, SHAPE, which, other, length=24, seed=seed)

    return LiveEnvironment(make, SHAPE, which, "table" if costs else "wallclock", costs)


def test_the_live_size_environment_is_the_serving_engine() -> None:
    """One decision per episode; what it verifies is what was asked for; depths are drawn from 1 to the most."""
    live = environment("size", COSTS)
    seen, _ = live.reset(seed=3)
    depths = set()
    for step in range(60):
        assert seen.shape == (SHAPE.inputs["size"],)
        expansions = round(float(seen[-1]) * 10)
        depths.add(expansions)
        _, _, done, truncated, facts = live.step(step % 3)
        assert (done, truncated) == (True, False)
        assert facts["verified"] == 1 + min(SHAPE.sizes[step % 3], SHAPE.grown(expansions))
        assert facts["widths"] == [1, *[3] * expansions]
        seen, _ = live.reset()
    live.close()
    assert depths == {1, 2, 3, 4}


def test_the_live_depth_environment_ends_at_stop_and_at_the_most() -> None:
    live = environment("depth", COSTS, 5)
    for actions, passes in (([STOP], 2), ([GO_ON, STOP], 3), ([GO_ON] * 3, 5)):
        live.reset(seed=2)
        for place, action in enumerate(actions):
            seen, given, done, _, facts = live.step(action)
            assert done == (place == len(actions) - 1)
            assert (given > 0) == done
            assert seen.shape == (SHAPE.inputs["depth"],)
        assert len(facts["widths"]) == passes
        assert facts["verified"] == 6
        live.close()


def test_live_environments_take_networks_for_the_other_decision() -> None:
    torch.manual_seed(0)
    networks = Networks(SHAPE, {"depth": (4,), "size": (4,)}).requires_grad_(False)
    for which in ("size", "depth"):
        live = environment(which, COSTS, networks)
        live.reset(seed=1)
        assert any(live.step(GO_ON)[2] or live.reset() is None for _ in range(8))
        live.close()


def test_an_error_in_the_engine_reaches_who_asks() -> None:
    class Failing(ToyTarget):
        def verify(self, tree: Any) -> Any:
            raise RuntimeError("out of memory")

    broken = Engine(Failing(TARGET), engine().drafter, policies.make("chain"))
    asked = AskedEngine(broken, PROMPTS, SHAPE, "size", None, length=8)
    assert isinstance(asked.next(), Question)
    with pytest.raises(RuntimeError, match="out of memory"):
        asked.next(0)
    asked.close()
    asked.close()


def test_the_wait_for_a_decision_does_not_count() -> None:
    import time

    asked = AskedEngine(engine(), PROMPTS, SHAPE, "size", None, length=24, decision_seconds=100.0)
    assert isinstance(asked.next(), Question)
    time.sleep(0.3)
    found = asked.next(0)
    assert isinstance(found, Finished)
    assert 100 < found.seconds < 100.25, "the network's own time in place of the wait"
    asked.close()
    assert 0 < decision_seconds(Networks(SHAPE, {"depth": (4,), "size": (4,)}), "depth", CPU) < 0.1


def test_logged_and_live_episodes_agree(trees: CandidateTrees, logged: Outcomes) -> None:
    """The same observation and action give the same reward, whichever environment they come from."""
    known = {}
    for expansions in range(1, SHAPE.expansions + 1):
        rows = size_observation(logged.laid, logged.contexts, expansions, SHAPE)
        known |= {row.numpy().tobytes(): (number, expansions) for number, row in enumerate(rows)}
    live, met = environment("size", COSTS), 0
    seen, _ = live.reset(seed=0)
    for step in range(400):
        place = known.get(np.ascontiguousarray(seen).tobytes())
        action = step % 3
        _, given, _, _, _ = live.step(action)
        if place is not None:
            at, expansions, size = (np.array([value]) for value in (*place, SHAPE.sizes[action]))
            expected = logged.committed(at, expansions, size) * COSTS.plain / logged.cost(expansions, size)
            assert given == pytest.approx(float(expected[0]), abs=1e-5) or given < expected, "cut short by the end"
            met += given == pytest.approx(float(expected[0]), abs=1e-5)
        seen, _ = live.reset()
    live.close()
    assert met > 30


def test_logged_environments_step_by_step(logged: Outcomes) -> None:
    many = LoggedEnvironment(logged, "depth", "table", 5, count=4, seed=1)
    seen = many.reset()
    assert seen.shape == (4, SHAPE.inputs["depth"])
    assert seen[:, -1] == pytest.approx(0.1), "the first expansion is forced"
    trees = many._trees.copy()
    seen, given, done, _ = many.step(np.array([STOP, GO_ON, GO_ON, STOP]))
    assert done.tolist() == [True, False, False, True]
    expected = logged.committed(trees, np.ones(4, dtype=int), 5) * 30 / cycle_cost(COSTS, SHAPE, 1, 5)
    assert given[[0, 3]] == pytest.approx(expected[[0, 3]])
    assert (given[[1, 2]] == 0).all()
    assert seen[:, -1] == pytest.approx([0.1, 0.2, 0.2, 0.1])
    many.step(np.full(4, GO_ON))
    _, given, done, infos = many.step(np.full(4, GO_ON))
    assert done.tolist() == [False, True, True, False], "closed at the most"
    assert infos[1]["reward"] == pytest.approx(float(given[1]))

    one = LoggedEnvironment(logged, "size", "accept", 3, count=6)
    seen = one.reset()
    assert seen[:, -1] == pytest.approx(0.3)
    trees = one._trees.copy()
    _, given, done, _ = one.step(np.full(6, 2))
    assert done.all()
    assert given.tolist() == logged.committed(trees, np.full(6, 3), 9).tolist()


def test_depths_that_are_not_asked_about_are_passed_over(logged: Outcomes) -> None:
    sparse = replace(logged, shape=replace(SHAPE, check_every=2))
    many = LoggedEnvironment(sparse, "depth", "table", 5, count=2)
    assert many.reset()[:, -1] == pytest.approx(0.2)
    _, _, done, _ = many.step(np.full(2, GO_ON))
    assert done.all(), "from two expansions to four without a question"


def test_speed_by_networks_is_that_of_serving(trees: CandidateTrees) -> None:
    """Throughput over the logged positions of a whole answer, against the engine under the same networks."""
    torch.manual_seed(3)
    networks = Networks(SHAPE, {"depth": (8,), "size": (8,)}).requires_grad_(False)
    logged = Outcomes.of(list(trees.answers()), SHAPE, COSTS)
    seen = depth_observation(logged.laid, logged.contexts, 1, SHAPE)
    networks.depth[-1].bias[GO_ON] -= networks.depth(seen).diff(dim=-1).median()  # so that half of the trees go on
    depths = logged.depths_by(networks)
    sizes = logged.sizes_by(networks, depths)
    assert len(set(depths.tolist())) > 1
    assert set(sizes.tolist()) <= set(SHAPE.sizes)
    for number in range(0, len(logged), 7):
        laid, context = logged.laid[number], int(logged.contexts[number])
        done = SHAPE.least
        while SHAPE.asks(done) and networks.goes_on(depth_observation(laid, context, done, SHAPE), done):
            done += 1
        assert depths[number] == done
        assert sizes[number] == SHAPE.sizes[networks.choose_size(size_observation(laid, context, done, SHAPE))]
    found = speed_of(logged, networks)
    assert found.tau == pytest.approx(logged.committed(np.arange(len(logged)), depths, sizes).mean())
    fixed = speed_of(logged, networks, 2, 5)
    assert (fixed.delta, fixed.verified) == (3, 6)


# ---------------------------------------------------------------------------------------------------- training


def weights(file: Path) -> dict[str, torch.Tensor]:
    return dict(_ltd.load(str(file)).networks.state_dict())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def figures(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in read_log(folder)]


def test_a_training_from_end_to_end(tmp_path: Path, ground: LoggedGround) -> None:
    told: list[str] = []
    file = train_policy(ground, tmp_path, OPTIONS, progress=told.append)
    trained = _ltd.load(str(file))
    assert trained.networks.shape == SHAPE
    assert [pair["stage"] for pair in trained.facts["pairs"]] == [1, 2, 3, 4]
    best = max(trained.facts["pairs"], key=lambda pair: pair["speed"])
    assert trained.facts["kept"] == best["stage"]
    assert best["speed"] == pytest.approx(speed_of(ground.held, trained.networks).speed)
    assert trained.facts["ground"]["costs"]["name"] == "toy"
    stages = [(entry["stage"], entry["which"]) for entry in read_log(tmp_path)]
    assert list(dict.fromkeys(stages)) == [(0, "size"), (1, "depth"), (2, "size"), (3, "depth"), (4, "size")]
    assert len(told) == 5 * 3 + 4
    assert not list(tmp_path.rglob(".*")), "no partial file stays"
    assert plot(read_log(tmp_path), tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").read_text().startswith("<?xml")
    draft, policy = engine().drafter, policies.make("ltd", networks=str(file))
    answer = Engine(ToyTarget(TARGET), draft, policy).generate([1, 2], max_new_tokens=20).token_ids
    assert answer == Engine(ToyTarget(TARGET), None, None).generate([1, 2], max_new_tokens=20).token_ids


def test_the_same_seed_gives_the_same_networks(tmp_path: Path, ground: LoggedGround) -> None:
    files = [train_policy(ground, tmp_path / name, OPTIONS) for name in "ab"]
    assert same(*map(weights, files))
    assert figures(tmp_path / "a") == figures(tmp_path / "b")
    other = train_policy(replace(ground, options=replace(OPTIONS, seed=1)), tmp_path / "c", replace(OPTIONS, seed=1))
    assert not same(weights(files[0]), weights(other))


class Interrupted(Exception):
    pass


def test_an_interrupted_training_goes_on_to_the_same_networks(tmp_path: Path, ground: LoggedGround) -> None:
    whole = train_policy(ground, tmp_path / "whole", OPTIONS)
    for lines in (1, 4, 7):
        countdown = iter([False] * (lines - 1) + [True])

        def stop(line: str, countdown: Iterator[bool] = countdown) -> None:
            if next(countdown):
                raise Interrupted

        folder = tmp_path / str(lines)
        with pytest.raises(Interrupted):
            train_policy(ground, folder, OPTIONS, progress=stop)
        assert same(weights(train_policy(ground, folder, OPTIONS)), weights(whole))
        assert figures(folder)[-1] == figures(tmp_path / "whole")[-1]
    with pytest.raises(InputError, match=r"entropy: the training in .* was begun with 0.01, got 0.5"):
        train_policy(ground, tmp_path / "whole", replace(OPTIONS, entropy=0.5))


@pytest.mark.parametrize(("stage", "which"), [(0, "size"), (1, "depth")])
def test_a_discount_changes_nothing_for_a_bandit(tmp_path: Path, ground: LoggedGround, stage: int, which: str) -> None:
    """No gradient of the size network, whose episodes are one step, hangs on gamma; the depth network's do."""
    found = []
    for gamma in (0.0, 0.99):
        options = replace(OPTIONS, again=(), **{f"{which}_gamma": gamma})
        train_policy(replace(ground, options=options), tmp_path / str(gamma), options)
        latest = tmp_path / str(gamma) / f"stage-{stage}-{which}" / training.LATEST
        found.append(load_from_zip_file(latest, device="cpu", load_data=False)[1]["policy"])
    assert same(*found) == (which == "size")


@pytest.mark.parametrize("kind", ["table", "accept", "time"])
def test_each_reward_is_learnt(tmp_path: Path, trees: CandidateTrees, kind: Any) -> None:
    """Verification is dear here: time wants the least, accept the most, throughput what pays."""
    costs = Costs("dear", {1: 1.0, 10: 2.0}, {1: 0.0})
    often = {"size_steps": 3072, "rollout": 256, "minibatch": 64, "epochs": 8, "learning_rate": 3e-3, "again": ()}
    options = replace(OPTIONS, reward=kind, entropy=0.0, **often)
    ground = LoggedGround(*split([trees], SHAPE, costs, 0.2), options)
    networks = _ltd.load(str(train_policy(ground, tmp_path, options))).networks
    chosen = ground.learnt.sizes_by(networks, ground.learnt.all_trees(2))
    if kind == "time":
        assert (chosen == 2).mean() > 0.95
    elif kind == "accept":
        assert chosen.mean() > 6
    rewards = [entry["reward"] for entry in read_log(tmp_path) if entry["stage"] == 0 and "reward" in entry]
    assert np.mean(rewards[-3:]) > rewards[0]


@pytest.mark.parametrize("costs", [COSTS, None])
def test_live_training(tmp_path: Path, costs: Costs | None) -> None:
    """The same loop around the running engine; under a table the seed decides everything."""
    options = replace(OPTIONS, environments=1, again=("size",), reward="table" if costs else "wallclock")
    found = []
    for name in "ab" if costs else "a":
        live = LiveGround(engine(), PROMPTS[:-2], PROMPTS[-2:], costs, options)
        found.append(weights(train_policy(live, tmp_path / name, options)))
        assert live.facts()["prompts"] == len(PROMPTS) - 2
    assert same(found[0], found[-1])
    assert all(entry["validation"]["speed"] > 0 for entry in read_log(tmp_path / "a") if "validation" in entry)


@pytest.mark.parametrize(("depth", "size"), [(None, None), (1, 2), (4, 9)])
def test_speed_over_a_dense_log_is_the_engines_own(tmp_path: Path, depth: int | None, size: int | None) -> None:
    """Where every position is logged, the replay visits what serving visits: same cycles, same throughput."""
    torch.manual_seed(5)
    networks = Networks(SHAPE, {"depth": (8,), "size": (8,)}).requires_grad_(False)
    every = log_candidates(engine(), PROMPTS[:4], tmp_path, replace(LOGGING, verified=1, length=48), name="toy")
    logged = Outcomes.of(list(every.answers()), SHAPE, COSTS)
    assert logged.dense
    committed = cost = 0.0
    cycles = 0
    for number, prompt in enumerate(PROMPTS[:4]):
        context, last = len(prompt), float(logged.contexts[logged.answers == number].max())
        for cycle in live_cycles(engine(), Ltd.steered(SHAPE, networks, depth, size), prompt, 48):
            if context <= last:
                facts = cycle_facts(cycle)
                committed, cycles = committed + len(cycle.tokens), cycles + 1
                cost += COSTS.cycle(facts["verified"], facts["widths"])
            context += len(cycle.tokens)
    found = speed_of(logged, networks, depth, size)
    assert found.speed == pytest.approx(committed * COSTS.plain / cost)
    assert found.tau == pytest.approx(committed / cycles)


def test_a_dense_log_is_gone_through_in_order(tmp_path: Path) -> None:
    every = log_candidates(engine(), PROMPTS[:2], tmp_path, replace(LOGGING, verified=1), name="toy")
    logged = Outcomes.of(list(every.answers()), SHAPE, COSTS)
    one = LoggedEnvironment(logged, "size", "accept", 2, count=3)
    one.reset()
    for _ in range(8):
        before = one._trees.copy()
        _, given, _, _ = one.step(np.full(3, 1))
        following = logged.following(before, given.astype(int))
        inside = following >= 0
        assert (one._trees[inside] == following[inside]).all()
    assert logged.following(np.array([len(logged) - 1]), np.array([1])).tolist() == [-1]


def test_facts_of_a_cycle() -> None:
    policy = Ltd.steered(SHAPE, Networks(SHAPE, {"depth": (4,), "size": (4,)}).requires_grad_(False), 2, 5)
    cycle = live_cycles(engine(), policy, [1, 2], 8)[0]
    assert cycle_facts(cycle) == {"tokens": len(cycle.tokens), "verified": 6, "widths": [1, 3, 3]}


# ---------------------------------------------------------------------------------------------------- options


def test_recipes() -> None:
    """Appendix A.3, and the released scripts."""
    paper = find_recipe("paper").options
    assert paper.shape == Shape()
    assert (paper.size_steps, paper.depth_steps, paper.rollout, paper.minibatch, paper.epochs) == (
        10**5,
        10**6,
        2048,
        256,
        20,
    )
    assert (paper.learning_rate, paper.entropy, paper.size_gamma, paper.depth_gamma) == (1e-3, 0.01, 0.9, 0.999)
    assert paper.stages == ["size", "depth", "size", "depth", "size"]
    released = find_recipe("released").options
    assert (len(released.sizes), released.pad, released.activation) == (24, 0.0, "tanh")
    assert all(recipe.about for recipe in RECIPES.values())
    with pytest.raises(InputError, match="recipe: got 'tpu', accepted paper, released, short, cpu"):
        find_recipe("tpu")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rollout": 100}, "rollout: got 100, accepted a multiple of environments 8"),
        ({"minibatch": 30}, "minibatch: got 30, accepted a divisor of rollout"),
        ({"learning_rate": 0.0}, "learning_rate: got 0.0, accepted above 0"),
        ({"warmup": 1.5}, "warmup: got 1.5, accepted 0 to 1"),
        ({"again": ("both",)}, "again: got .* accepted size, depth"),
        ({"fixed_depth": 5}, "fixed_depth: got 5, accepted at most 4"),
        ({"hidden_size": (0,)}, "hidden_size"),
        ({"activation": "gelu"}, "activation: got gelu, accepted relu, tanh"),
        ({"sizes": (3, 3)}, "sizes"),
        ({"epochs": 0}, "epochs: got 0"),
    ],
)
def test_options_out_of_range(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(OPTIONS, **wrong)


def test_a_missing_extra_is_named(tmp_path: Path, ground: LoggedGround, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "stable_baselines3":
            raise ModuleNotFoundError("No module named 'stable_baselines3'", name="stable_baselines3")
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(
        MissingExtraError, match=r"stable_baselines3 is not installed.* pip install 'specengine\[train\]'"
    ):
        train_policy(ground, tmp_path, OPTIONS)
    assert not (tmp_path / training.MANIFEST).exists()


def test_a_log_is_json_lines(tmp_path: Path) -> None:
    assert read_log(tmp_path) == []
    (tmp_path / training.LOG).write_text(json.dumps({"stage": 0}) + "\n")
    assert read_log(tmp_path) == [{"stage": 0}]
