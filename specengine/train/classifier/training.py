"""Train the classifiers of C2T, Disco and SpecDec++ on logged trees."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from specengine import ops
from specengine.errors import require, require_input
from specengine.policies import _classifier
from specengine.policies._classifier import KINDS, c2t_features, disco_features
from specengine.train.classifier.options import SETTINGS, ClassifierOptions
from specengine.train.classifier.trees import LoggedTree, Trees

DEPTH_BASE = 0  # depth of the root's children as a feature
NEAR = 0.01  # recalls this close to the best count as equal
BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)  # limits of the entropy buckets, in nats
# points of the recorded curve
KEEP_RATES = 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2

Progress = Callable[[str], None]


class LabelledRows(NamedTuple):
    """Training rows. inputs: [rows, ...], features of the network; labels: bool [rows]."""

    inputs: Tensor
    labels: Tensor


def rows_of(kind: str, logged: LoggedTree, entropy: bool = True) -> LabelledRows:
    """Return the training rows of one tree. entropy: false: C2T's rows have a 0 instead of it.

    c2t        each node but the root: whether it is on the accepted path
    disco      each level: whether it has an accepted node; features of the parent of the level's best node
    specdecpp  each node drafted from, except the root: whether the target chose its token after its parent
    """
    return {
        "c2t": lambda logged: _c2t_rows(logged, entropy),
        "disco": _disco_rows,
        "specdecpp": _specdecpp_rows,
    }[kind](logged)


def _c2t_rows(logged: LoggedTree, entropy: bool) -> LabelledRows:
    tree = logged.tree
    features = c2t_features(
        tree.path_log_probs[1:], parent_entropies(logged) * entropy, tree.depths[1:], DEPTH_BASE
    )
    return LabelledRows(features, logged.accepted[1:])


def _disco_rows(logged: LoggedTree) -> LabelledRows:
    tree, row_of = logged.tree, _row_of(logged)
    best = [
        tree.best(ops.Nodes.of(level), 1).alive()
        for depth in range(1, int(tree.depths.max()) + 1)
        if len(level := (tree.depths == depth).nonzero()[:, 0])
    ]
    nodes = torch.cat(best)
    rows = row_of[tree.parents[nodes]]
    features = disco_features(
        logged.top_probs[rows], logged.entropies[rows], tree.depths[nodes], DEPTH_BASE
    )
    return LabelledRows(features, tree.depths[nodes] <= int(tree.depths[logged.accepted].max()))


def _specdecpp_rows(logged: LoggedTree) -> LabelledRows:
    require_input(
        "trees: they have no hidden states of the draft; only EAGLE heads have them",
        logged.hidden.shape[1] > 0,
    )
    below = logged.expanded > 0
    nodes = logged.expanded[below]
    return LabelledRows(
        logged.hidden[below], logged.choices[logged.parents[nodes]] == logged.tokens[nodes]
    )


def parent_entropies(logged: LoggedTree) -> Tensor:
    """Return the entropy of the distribution that each node but the root was drawn from, float32 [n - 1]."""
    return logged.entropies[_row_of(logged)[logged.parents[1:]]]


def _row_of(logged: LoggedTree) -> Tensor:
    """Return the index of each node among the expanded ones, or -1; int64 [n]."""
    row_of = torch.full_like(logged.tokens, -1)
    row_of[logged.expanded] = torch.arange(len(logged.expanded), dtype=torch.int64, device="cpu")
    return row_of


def train_classifier(
    kind: str,
    trees: Trees,
    out: Path,
    options: ClassifierOptions | None = None,
    progress: Progress = lambda line: None,
) -> Path:
    """Train the classifier of policy `kind` on `trees`. Write the file `out`, which the policy reads, and return it.

    Whole trees are held back, so no tree is used for both training and measuring. Raise InputError for too few trees,
    if all nodes have the same label, or for another kind than C2T without the entropy.
    """
    options = options or SETTINGS[kind]
    require("entropy", options.entropy, f"True for {kind}", options.entropy or kind == "c2t")
    learnt, held_back = _split(list(trees), options)
    rows = _joined([rows_of(kind, tree, options.entropy) for tree in learnt])
    facts_of_kinds = {
        "units": options.units,
        "entropy": options.entropy,
        "hidden_size": rows.inputs.shape[1],
        "width": options.head_width,
        "blocks": options.blocks,
    }
    sizes = {name: facts_of_kinds[name] for name in KINDS[kind].sizes}
    torch.manual_seed(options.seed)
    net = KINDS[kind].make(sizes)
    measure = _measure_c2t if kind == "c2t" else _measure_stop
    held_rows = [rows_of(kind, tree, options.entropy) for tree in held_back]
    _require_both(rows, "training")
    _require_both(_joined(held_rows), "held-out")
    epochs = _fit(net, rows, options, lambda: measure(net, held_back, held_rows, options), progress)
    if kind == "c2t":
        net.load_state_dict(_recall_first(epochs))
    net.eval()
    figures = measure(net, held_back, held_rows, options)
    facts = {
        "depth_base": DEPTH_BASE,
        "top": trees.manifest["top"],
        **sizes,
        "beta": figures.pop("beta"),
        "negatives": options.negatives,
        "target": trees.manifest.get("target"),
        "draft": trees.manifest.get("draft"),
        "trees": {name: trees.manifest.get(name) for name in ("width", "expansions", "length")},
        "counts": {
            "learnt trees": len(learnt),
            "held-out trees": len(held_back),
            "learnt rows": len(rows.labels),
            "learnt positives": int(rows.labels.sum()),
        },
        "training": {
            name: value
            for name, value in asdict(options).items()
            if name not in ("width", "blocks")
        },
        "held_out": figures,
    }
    _classifier.save(
        out, kind, net, facts, torch.bfloat16 if kind == "specdecpp" else torch.float32
    )
    progress(json.dumps(figures["at_beta"]))
    return out


# ---------------------------------------------------------------------------------------------------- training


def _split(
    logged: list[LoggedTree], options: ClassifierOptions
) -> tuple[list[LoggedTree], list[LoggedTree]]:
    order = torch.randperm(
        len(logged),
        generator=torch.Generator().manual_seed(options.seed),
        dtype=torch.int64,
        device="cpu",
    ).tolist()
    held_back = max(1, round(options.held_back * len(logged)))
    require_input(f"trees: got {len(logged)}, 2 or more are needed", len(logged) > 1)
    return [logged[i] for i in order[held_back:]], [logged[i] for i in order[:held_back]]


def _fit(
    net: Any,
    rows: LabelledRows,
    options: ClassifierOptions,
    measure: Callable[[], dict[str, Any]],
    progress: Progress,
) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Train, and return the figures on held-out trees and the weights after every epoch."""
    optimizer = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[options.optimizer](
        net.parameters(), lr=options.learning_rate
    )
    generator = torch.Generator().manual_seed(options.seed)
    epochs = []
    for epoch in range(1, options.epochs + 1):
        for batch in _balanced(rows.labels, options, generator).split(options.batch):
            loss = binary_cross_entropy_with_logits(
                net.logits(rows.inputs[batch]), rows.labels[batch].float()
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        figures = measure()
        epochs.append(
            (figures, {name: tensor.clone() for name, tensor in net.state_dict().items()})
        )
        if epoch == options.epochs or epoch % max(1, options.epochs // 10) == 0:
            progress(
                f"epoch {epoch}: loss {float(loss.detach()):.3f}, at 0.5 {json.dumps(figures['at_half'])}"
            )
    return epochs


def _balanced(labels: Tensor, options: ClassifierOptions, generator: torch.Generator) -> Tensor:
    """Return row numbers in random order: all positives, and `negatives` times as many randomly drawn others."""
    positives, others = labels.nonzero()[:, 0], (~labels).nonzero()[:, 0]
    count = min(len(others), max(1, round(options.negatives * len(positives))))
    drawn = others[
        torch.randperm(len(others), generator=generator, dtype=torch.int64, device="cpu")[:count]
    ]
    rows = torch.cat([positives, drawn])
    return rows[torch.randperm(len(rows), generator=generator, dtype=torch.int64, device="cpu")]


def _recall_first(epochs: Sequence[tuple[dict[str, Any], dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Return the weights of the epoch that keeps the fewest nodes among those with nearly the best recall."""
    best = max(figures["at_half"]["recall"] for figures, _ in epochs)
    near = [entry for entry in epochs if entry[0]["at_half"]["recall"] >= best - NEAR]
    return min(near, key=lambda entry: entry[0]["at_half"]["keep_rate"])[1]


def _joined(parts: Sequence[LabelledRows]) -> LabelledRows:
    return LabelledRows(
        torch.cat([rows.inputs for rows in parts]), torch.cat([rows.labels for rows in parts])
    )


def _require_both(rows: LabelledRows, name: str) -> None:
    require_input(
        f"trees: all {name} nodes have the same label; collect more trees",
        bool(rows.labels.any()) and not bool(rows.labels.all()),
    )


# ---------------------------------------------------------------------------------------------------- measuring


def scores(predicted: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy, precision, recall, F1 and the share predicted positive. Both inputs are bool [m]."""
    hits = int((predicted & labels).sum())
    precision, recall = hits / max(1, int(predicted.sum())), hits / max(1, int(labels.sum()))
    return {
        "accuracy": round(float((predicted == labels).float().mean()), 4),
        "precision": round(precision, 4),
        "recall": round(recall, 4),
        "f1": round(2 * precision * recall / max(precision + recall, 1e-9), 4),
        "keep_rate": round(float(predicted.float().mean()), 5),
    }


def path_minimum(confidence: Tensor, logged: LoggedTree) -> Tensor:
    """Return the minimum confidence on the path to each node but the root, float32 [n - 1]. Pruning is inherited.

    confidence: float32 [n - 1].
    """
    tree = logged.tree
    minimum = torch.cat([torch.full((1,), math.inf, dtype=torch.float32, device="cpu"), confidence])
    for depth in range(2, int(tree.depths.max()) + 1):
        level = (tree.depths == depth).nonzero()[:, 0]
        minimum[level] = torch.minimum(minimum[level], minimum[tree.parents[level]])
    return minimum[1:]


@torch.no_grad()
def _measure_c2t(
    net: Any,
    held_back: Sequence[LoggedTree],
    rows: Sequence[LabelledRows],
    options: ClassifierOptions,
) -> dict[str, Any]:
    confidence = torch.cat(
        [
            path_minimum(net(own_rows.inputs), tree)
            for own_rows, tree in zip(rows, held_back, strict=True)
        ]
    )
    paths = torch.cat([own_rows.inputs[:, 0] for own_rows in rows])
    labels = torch.cat([own_rows.labels for own_rows in rows])
    ranks = torch.cat(
        [own_rows.inputs[:, 0].argsort(descending=True, stable=True).argsort() for own_rows in rows]
    )
    entropies = torch.cat([own_rows.inputs[:, 1] for own_rows in rows])
    beta = calibrated(confidence, labels, options)
    keeps = confidence >= beta
    bucket = torch.bucketize(
        entropies, torch.tensor(BUCKETS, dtype=torch.float32, device="cpu"), right=True
    )
    names = [f"[{a:g}, {b:g})" for a, b in zip((0.0, *BUCKETS), (*BUCKETS, math.inf), strict=True)]
    inside = [(name, bucket == number) for number, name in enumerate(names)]

    def point(rate: float) -> dict[str, float]:
        """Return the recall at the beta that keeps this share, and of two other ways to keep as many nodes.

        These are one bound on the path probability for all trees, and the same number per tree, as in EAGLE-2.
        """
        at = _threshold(confidence, rate)
        scored = scores(confidence >= at, labels)
        bounded = scores(paths >= _threshold(paths, scored["keep_rate"]), labels)
        ranked = scores(ranks < round(scored["keep_rate"] * len(labels) / len(held_back)), labels)
        others = {"recall_of_path_bound": bounded["recall"], "recall_of_top_n": ranked["recall"]}
        return {
            "beta": round(at, 5),
            "keep_rate": scored["keep_rate"],
            "recall": scored["recall"],
            **others,
        }

    return {
        "beta": beta,
        "at_half": scores(confidence >= 0.5, labels),
        "at_beta": scores(keeps, labels),
        "top_n": scores(ranks < round(float(keeps.sum()) / len(held_back)), labels),
        "nodes_per_tree": round(float(keeps.sum()) / len(held_back), 2),
        "acceptance_length": round(1 + float((keeps & labels).sum()) / len(held_back), 3),
        "by_entropy": {
            name: {
                "share": round(float(within.float().mean()), 4),
                **scores(keeps[within], labels[within]),
            }
            for name, within in inside
            if bool(within.any())
        },
        "curve": [point(rate) for rate in KEEP_RATES],
    }


def calibrated(confidence: Tensor, labels: Tensor, options: ClassifierOptions) -> float:
    """Return the largest beta that keeps a share `keep_rate` of all nodes, or `recall` of the accepted ones."""
    if options.recall is not None:
        return _threshold(confidence[labels], options.recall)
    return _threshold(confidence, options.keep_rate)


def _threshold(values: Tensor, share: float) -> float:
    """Return the largest value that at least `share` of the values, and at least one, reach."""
    count = min(len(values), max(1, math.ceil(share * len(values) - 1e-6)))
    return float(values.topk(count).values[-1])


@torch.no_grad()
def _measure_stop(
    net: Any,
    held_back: Sequence[LoggedTree],
    rows: Sequence[LabelledRows],
    options: ClassifierOptions,
) -> dict[str, Any]:
    joined = _joined(rows)
    probabilities = net(joined.inputs)
    figures = scores(probabilities >= 0.5, joined.labels)
    chance = binary_cross_entropy_with_logits(net.logits(joined.inputs), joined.labels.float())
    return {
        "beta": 0.5,
        "at_half": figures,
        "at_beta": figures,
        "positive_rate": round(float(joined.labels.float().mean()), 4),
        "loss": round(float(chance), 4),
    }
