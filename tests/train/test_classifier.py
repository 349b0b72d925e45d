"""Trees of a running engine, on disk, and the classifiers learnt from them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from research.drafting import draft_tree
from specengine import ops, policies
from specengine.cli import main
from specengine.engine import Engine
from specengine.errors import InputError
from specengine.ops.select import Step
from specengine.policies import _classifier
from specengine.policies._classifier import TOP_PROBS
from specengine.policies.c2t import C2t
from specengine.records import Seconds
from specengine.train.classifier import trees as collecting
from specengine.train.classifier.options import SETTINGS, ClassifierOptions, CollectOptions
from specengine.train.classifier.training import (
    _balanced,
    calibrated,
    parent_entropies,
    path_minimum,
    rows_of,
    scores,
    train_classifier,
)
from specengine.train.classifier.trees import LoggedTree, Trees, collect, questions
from specengine.train.text.corpus import Corpus, Text
from tests.toy import CPU, LetterTokenizer, Tables, ToyDrafter, ToyTarget, byte_tokenizer, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

TARGET = Tables(20, 1, concentration=0.2)
COLLECT = CollectOptions(trees=120, length=24, width=4, expansions=3, logits=True)
PROMPTS = [[i, j, 3] for i in range(20) for j in range(3)]


def engine() -> Engine:
    draft = ToyDrafter(Tables(20, 2, concentration=0.2, like=TARGET, share=0.7))
    return Engine(ToyTarget(TARGET), draft, policies.make("chain"), LetterTokenizer())


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    return collect(engine(), PROMPTS, tmp_path_factory.mktemp("trees"), COLLECT, name="toy")


# ---------------------------------------------------------------------------------------------------- trees


def test_trees_are_what_the_engine_made(trees: Trees) -> None:
    """Against a plain answer: each accepted path goes on where the last one ended, by the target's own choices."""
    shard = trees.read(trees.shards()[0])
    prompt = PROMPTS[0]
    answer = (
        Engine(ToyTarget(TARGET), None, None)
        .generate(prompt, max_new_tokens=40, temperature=0.0)
        .token_ids
    )
    place, draft = 0, engine().drafter
    assert draft is not None
    for logged in shard.trees:
        tree = logged.tree
        context = [*prompt, *answer[:place]]
        assert int(logged.tokens[0]) == context[-1]
        path = logged.accepted.nonzero()[:, 0].tolist()
        committed = [*tree.path_tokens(path[-1]), int(logged.choices[path[-1]])]
        assert committed == answer[place : place + len(committed)]
        for node in range(len(tree)):
            given = [*context, *tree.path_tokens(node)]
            assert int(logged.choices[node]) == int(TARGET.logits(given).argmax())
            if node:
                expected = TARGET.logits(given[:-1])[given[-1]]
                assert float(logged.target_log_probs[node]) == pytest.approx(
                    float(expected), abs=1e-4
                )
        for row, node in enumerate(logged.expanded.tolist()):
            probabilities = draft.tables.probabilities([*context, *tree.path_tokens(node)])
            entropy = -sum(p * math.log(p) for p in probabilities)
            assert float(logged.entropies[row]) == pytest.approx(entropy, abs=1e-4)
            best = torch.from_numpy(probabilities).float().topk(TOP_PROBS).values
            assert torch.allclose(logged.top_probs[row], best, atol=1e-5)
            assert torch.allclose(
                logged.logits[row].exp(), torch.from_numpy(probabilities).float(), atol=1e-5
            )
        place += len(committed)
    assert place > 12


def test_a_logged_tree_has_the_serving_codes_depths_and_paths(trees: Trees) -> None:
    for logged in list(trees)[:10]:
        tree = logged.tree
        assert len(tree) == 1 + COLLECT.width + COLLECT.expansions * COLLECT.width**2
        assert int(tree.depths.max()) == COLLECT.expansions + 1
        for node in range(1, len(tree)):
            assert tree.depths[node] == tree.depths[tree.parents[node]] + 1
        assert torch.equal(tree.parents, logged.parents)
        assert set(logged.expanded.tolist()) >= set(tree.parents[1:].tolist())


def test_a_collection_goes_on_where_it_stopped(tmp_path: Path) -> None:
    told: list[str] = []
    some = replace(COLLECT, trees=9)
    collect(engine(), PROMPTS, tmp_path, some, progress=told.append)
    before = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.safetensors")}
    assert told[-1].split(" of ")[1].startswith("9 trees, ")
    found = collect(engine(), PROMPTS, tmp_path, replace(some, trees=30))
    assert len(list(found)) >= 30
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in before} == before
    with pytest.raises(InputError, match=r"width: the trees in .* were begun with 4, got 5"):
        collect(engine(), PROMPTS, tmp_path, replace(some, width=5))
    whole = collect(engine(), PROMPTS[:3], tmp_path / "all", replace(some, trees=0))
    assert len(whole.shards()) == 3


def test_too_few_prompts_and_damaged_shards_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prompts: got \d+ of 120 trees"):
        collect(engine(), PROMPTS[:1], tmp_path, COLLECT)
    with pytest.raises(InputError, match="prompts: number 1 has 1 tokens, 2 or more"):
        collect(engine(), [[1]], tmp_path / "short", COLLECT)
    with pytest.raises(InputError, match="draft: got none"):
        collect(Engine(ToyTarget(TARGET), None, None), PROMPTS, tmp_path / "none", COLLECT)
    found = Trees.open(tmp_path)
    shard = found.shards()[0]
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(InputError, match=r"00000\.safetensors is damaged"):
        list(found)
    with pytest.raises(InputError, match="is not a folder of logged trees"):
        Trees.open(tmp_path / "nothing")
    (tmp_path / Trees.MANIFEST).write_text('{"format": 0}')
    with pytest.raises(InputError, match="has another format"):
        Trees.open(tmp_path)


def test_questions_are_what_stands_before_the_first_answer(tmp_path: Path) -> None:
    corpus = Corpus.create(tmp_path, {"target": "tiny"})
    tokens = torch.tensor([5, 6, 7, 8, 9], dtype=torch.int32)
    corpus.add(0, [Text(tokens, tokens > 7), Text(tokens, tokens > 5), Text(tokens, tokens > 99)])
    assert questions(corpus) == [[5, 6, 7]]


# ---------------------------------------------------------------------------------------------------- rows


def test_rows_of_c2t_are_what_the_policy_computes(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The serving policy, which keeps everything here, classifies the same features at the same nodes."""
    logged = next(iter(trees))
    seen: list[torch.Tensor] = []
    policy = policies.make("c2t", beta=0.0, children=4, layer=4, max_depth=2)
    inner = ops.classify_paths

    def classified(
        paths: torch.Tensor, entropies: torch.Tensor, depth: int, net: Any
    ) -> torch.Tensor:
        columns = (
            paths.exp(),
            entropies[:, None].expand_as(paths),
            torch.full_like(paths, int(depth)),
        )
        seen.append(torch.stack(columns, -1))
        return inner(paths, entropies, depth, net)

    monkeypatch.setattr(ops, "classify_paths", classified)
    drafter = engine().drafter
    assert drafter is not None
    drafter.begin(PROMPTS[0][:-1])
    draft_tree(PROMPTS[0][-1], drafter, policy, Seconds(), CPU)
    rows = rows_of("c2t", logged)
    assert torch.allclose(rows.inputs[:4], seen[0].reshape(-1, 3), atol=1e-6)
    assert torch.allclose(rows.inputs[4:20], seen[1].reshape(-1, 3), atol=1e-6)
    assert torch.equal(rows.labels, logged.accepted[1:])
    assert torch.equal(rows.inputs[:, 1], parent_entropies(logged))


def test_rows_of_disco_are_the_levels(trees: Trees) -> None:
    for logged in list(trees)[:20]:
        rows, tree = rows_of("disco", logged), logged.tree
        reached = int(tree.depths[logged.accepted].max())
        assert rows.labels.tolist() == [
            level <= reached for level in range(1, COLLECT.expansions + 2)
        ]
        assert rows.inputs[:, -1].tolist() == list(range(COLLECT.expansions + 1))
        for level in range(1, COLLECT.expansions + 2):
            nodes = (tree.depths == level).nonzero()[:, 0]
            best = nodes[tree.path_log_probs[nodes].argmax()]
            row = logged.expanded.tolist().index(int(tree.parents[best]))
            assert torch.equal(rows.inputs[level - 1, :10], logged.top_probs[row])
            assert float(rows.inputs[level - 1, 0]) == pytest.approx(
                float(tree.log_probs[best].exp()), abs=1e-5
            )


def test_rows_of_specdecpp_are_the_nodes_drafted_from(trees: Trees) -> None:
    for logged in list(trees)[:20]:
        rows = rows_of("specdecpp", logged)
        assert len(rows.labels) == len(logged.expanded) - 1
        for row, node in enumerate(logged.expanded.tolist()[1:]):
            assert bool(rows.labels[row]) == (
                logged.choices[logged.parents[node]] == logged.tokens[node]
            )
            assert torch.equal(rows.inputs[row], logged.hidden[row + 1])
    without = logged._replace(hidden=logged.hidden[:, :0])
    with pytest.raises(InputError, match="they have no hidden states"):
        rows_of("specdecpp", without)


# ---------------------------------------------------------------------------------------------------- training


def test_negatives_are_drawn_per_positive() -> None:
    labels = torch.arange(100) < 7
    random = torch.Generator().manual_seed(0)
    first, second = (_balanced(labels, ClassifierOptions(negatives=4), random) for _ in range(2))
    assert labels[first].sum() == 7
    assert len(first.unique()) == len(first) == 35
    assert set(first.tolist()) != set(second.tolist())
    assert len(_balanced(labels, ClassifierOptions(negatives=1000), random)) == 100


def test_a_child_of_a_pruned_node_counts_as_pruned(trees: Trees) -> None:
    for seed, logged in enumerate(list(trees)[:10]):
        tree, confidence = (
            logged.tree,
            torch.rand(len(logged.tree) - 1, generator=torch.Generator().manual_seed(seed)),
        )
        least = path_minimum(confidence, logged)
        for node in range(1, len(tree)):
            way, above = [], node
            while above:
                way.append(float(confidence[above - 1]))
                above = int(tree.parents[above])
            assert float(least[node - 1]) == min(way)


def test_beta_keeps_what_was_asked_for() -> None:
    values = torch.tensor([0.9, 0.8, 0.8, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.0])
    labels = torch.tensor([True, False, True, False, False, True, False, False, False, True])
    assert calibrated(values, labels, ClassifierOptions(keep_rate=0.1)) == pytest.approx(0.9)
    assert calibrated(values, labels, ClassifierOptions(keep_rate=0.3)) == pytest.approx(0.8)
    assert calibrated(values, labels, ClassifierOptions(recall=0.75)) == pytest.approx(0.3)
    assert calibrated(values, labels, ClassifierOptions(recall=0.5)) == pytest.approx(0.8)


def test_scores() -> None:
    predicted, labels = (
        torch.tensor([True, True, False, False]),
        torch.tensor([True, False, True, False]),
    )
    assert scores(predicted, labels) == {
        "accuracy": 0.5, "precision": 0.5, "recall": 0.5, "f1": 0.5, "keep_rate": 0.5,
    }  # fmt: skip
    assert scores(torch.zeros(2, dtype=torch.bool), torch.tensor([True, False]))["precision"] == 0


@pytest.mark.sliced(1)
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_classifier_is_learnt_and_serves(kind: str, trees: Trees, tmp_path: Path) -> None:
    options = replace(
        SETTINGS[kind], epochs=8, batch=64, learning_rate=3e-3, held_back=0.25, keep_rate=0.1
    )
    told: list[str] = []
    file = train_classifier(kind, trees, tmp_path / "it.safetensors", options, told.append)
    assert told[-1].startswith('{"accuracy"')
    facts = _classifier.load(kind, str(file)).facts
    assert facts["target"] == "toy"
    assert facts["draft"] == "toy"
    assert facts["negatives"] == options.negatives
    assert facts["counts"]["learnt trees"] + facts["counts"]["held-out trees"] == len(list(trees))
    figures = facts["held_out"]["at_beta"]
    if kind == "c2t":
        assert figures["keep_rate"] == pytest.approx(0.1, abs=0.02)
        assert figures["recall"] > 3 * figures["keep_rate"], "better than chance by far"
        assert sum(
            part["share"] for part in facts["held_out"]["by_entropy"].values()
        ) == pytest.approx(1, abs=1e-3)
    else:
        rate = facts["held_out"]["positive_rate"]
        assert figures["accuracy"] > max(rate, 1 - rate) - 0.2
    assert (
        train_classifier(kind, trees, tmp_path / "again.safetensors", options).read_bytes()
        == file.read_bytes()
    )

    base = engine()
    policy = policies.make(kind, classifier=str(file))
    answer = Engine(base.target, base.drafter, policy).generate(
        [1, 2, 3], max_new_tokens=20, temperature=0.0
    )
    plain = Engine(ToyTarget(TARGET), None, None).generate(
        [1, 2, 3], max_new_tokens=20, temperature=0.0
    )
    assert answer.token_ids == plain.token_ids


@pytest.mark.parametrize("units", [2, 48])
@pytest.mark.parametrize("entropy", [True, False])
def test_units_and_entropy_are_the_files(
    units: int, entropy: bool, trees: Trees, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network without the entropy is shown 0 for it, in training and in serving, where none is computed."""
    options = replace(SETTINGS["c2t"], epochs=1, held_back=0.25, units=units, entropy=entropy)
    file = train_classifier("c2t", trees, tmp_path / "it.safetensors", options)
    policy = policies.make("c2t", classifier=str(file), beta=0.0, children=3, layer=3, max_depth=2)
    assert isinstance(policy, C2t)
    assert policy._learned.net.hidden.weight.shape == (units, 3)
    computed: list[int] = []
    inner = Step.entropy
    monkeypatch.setattr(Step, "entropy", lambda *args: (computed.append(1), inner(*args))[1])
    drafter = engine().drafter
    assert drafter is not None
    drafter.begin(PROMPTS[0][:-1])
    draft_tree(PROMPTS[0][-1], drafter, policy, Seconds(), CPU)
    assert bool(computed) == entropy
    rows = rows_of("c2t", next(iter(trees)), entropy)
    assert bool(rows.inputs[:, 1].any()) == entropy
    assert rows.inputs[:, [0, 2]].equal(rows_of("c2t", next(iter(trees))).inputs[:, [0, 2]])


def test_only_c2t_does_without_the_entropy(trees: Trees, tmp_path: Path) -> None:
    for kind in ("disco", "specdecpp"):
        with pytest.raises(InputError, match=f"entropy: got False, accepted True for {kind}"):
            train_classifier(
                kind, trees, tmp_path / "it.safetensors", replace(SETTINGS[kind], entropy=False)
            )


def test_trees_with_one_label_are_refused(trees: Trees, tmp_path: Path) -> None:
    rejected = [
        tree._replace(accepted=torch.arange(len(tree.tokens)) == 0) for tree in list(trees)[:4]
    ]
    found = Trees.create(tmp_path, {"top": 1000})
    found.add(0, rejected, collecting.Columns())
    with pytest.raises(InputError, match="all training nodes have the same label"):
        train_classifier("c2t", found, tmp_path / "it.safetensors")
    alone = Trees.create(tmp_path / "one", {"top": 1000})
    alone.add(0, rejected[:1], collecting.Columns())
    with pytest.raises(InputError, match="trees: got 1, 2 or more"):
        train_classifier("c2t", alone, tmp_path / "it.safetensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs: got 0, accepted 1 or more"),
        ({"negatives": 0}, "negatives: got 0, accepted above 0"),
        ({"held_back": 1.0}, "held_back: got 1.0, accepted above 0, below 1"),
        ({"recall": 1.5}, "recall: got 1.5"),
        ({"units": 0}, "units: got 0, accepted 1 or more"),
        ({"optimizer": "sgd"}, "optimizer: got 'sgd', accepted adam, adamw"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ClassifierOptions(**options)
    with pytest.raises(InputError, match="width: got 0, accepted 1 or more"):
        CollectOptions(width=0)


# ---------------------------------------------------------------------------------------------------- the command

SMALL = [
    f"-o{option}"
    for option in ("trees=6", "length=12", "width=2", "expansions=2", "epochs=2", "held_back=0.3")
]


def test_the_command_trains_from_a_model_alone(tmp_path: Path, capsys: Any) -> None:
    """The draft is the model itself, which accepts now and then also after the first token."""
    model, out, file = tmp_path / "model", tmp_path / "out", tmp_path / "prompts.txt"
    tiny("qwen3", max_position_embeddings=512).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    file.write_text("what is it\nand then\nwho knows\nabc\n")
    given = [
        "train",
        "classifier",
        str(out),
        "--kind",
        "c2t",
        "--target",
        str(model),
        "--draft",
        str(model),
        *SMALL,
    ]
    assert main([*given, "--prompts", str(file)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{out / 'c2t.safetensors'}\n"
    assert "6 trees, " in printed.err
    assert json.loads((out / "trees" / Trees.MANIFEST).read_text())["target"] == "model"
    assert main([*given, "--prompts", str(file)]) == 0, "the trees are there already"
    assert "per second" not in capsys.readouterr().err
    asked = [
        "generate",
        "abc",
        "--model",
        str(model),
        "--draft",
        str(model),
        "--max-new-tokens",
        "8",
    ]
    assert main([*asked, "--policy", "c2t", "-o", f"classifier={out / 'c2t.safetensors'}"]) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["-o", "tree=5"],
            "option: unknown option 'tree', known are batch, blocks, entropy, epochs, ",
        ),
        (["-o", "trees=many"], r"option.trees: got 'many'"),
        (["-o", "epochs=0"], "epochs: got 0"),
        ([], "data: nowhere is not a folder of training text"),
    ],
)
def test_mistakes_are_named_before_anything_is_loaded(
    given: list[str], message: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specengine.cli import train as command

    monkeypatch.setattr(command, "load_engine", lambda _: pytest.fail("a model was loaded"))
    assert main(["train", "classifier", "x", "--kind", "c2t", "--data", "nowhere", *given]) == 2
    assert message in capsys.readouterr().err


def test_a_logged_tree_knows_its_fields() -> None:
    assert LoggedTree._fields == (*collecting.PER_NODE, *collecting.PER_ROW)
