"""Heads of DSpark and DFlash2: rows of each node against the sources' equations, answers equal to plain decoding."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specengine.checkpoints.eagle import is_head, load_head, save_head
from specengine.drafters import dflash
from specengine.drafters.dflash import Dflash
from specengine.engine import Engine, Pool
from specengine.errors import CheckpointError, InputError, UnsupportedModelError
from specengine.models.dflash import DflashConfig, DflashHead
from specengine.models.eagle import head_from
from specengine.models.huggingface import HuggingFaceTarget
from specengine.models.native import NativeDflashHead, NativeTarget, from_model
from specengine.ops import Nodes
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree
from specengine.train.draft.losses import check_fit
from specengine.train.draft.options import make_loss
from tests.drafters.test_dflash import GEMMA4, RAW, block_states, draft_for
from tests.heads import BLOCK, MASK, block_config, deep
from tests.toy import VOCABULARY, byte_tokenizer, policy_for, random_state, tiny_head

PROMPT = [*range(40, 52)]
pytestmark = pytest.mark.usefixtures("one_thread")
SPARK = {"anchored": True, "rank": 6}
SECOND = {"rank": 6, "candidates": 5, "taps": 2, "group_size": 8}
REDUCED = {"draft_vocab_size": 200, "own_head": True}
DOMINO = {"anchored": True, "rank": 6, "gru_size": 10, "uncorrected": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "DSpark": SPARK,
    "gated": SPARK | {"gated": True},
    "recurrent": SPARK | {"recurrent": True},
    "recurrent, 200 tokens": SPARK | {"recurrent": True} | REDUCED,
    "Domino": DOMINO,
    "Domino, masks predict": {"rank": 6, "gru_size": 5},
    "Gemma 4": SPARK | GEMMA4,
    "Gemma 4, independent": {"anchored": True} | GEMMA4 | {"shared_values": False},
    "masks predict": {"rank": 6},
    "anchored, independent": {"anchored": True},
    "two rows": SPARK | {"block_size": 2},
    "DFlash2": SECOND,
    "DFlash2, windows": SECOND | {"windows": (4, 4, 4), "taps": 3},
    "one tap, one candidate": SECOND | {"taps": 1, "candidates": 1},
    "200 tokens": SPARK | REDUCED,
    "200 tokens, gated, windows": {"rank": 6, "gated": True, "windows": (4, 0, 4)}
    | REDUCED
    | {"causal": (True, False, True)},
    "200 tokens, independent": REDUCED,
}
CORRECTED = [name for name, changes in VARIANTS.items() if "rank" in changes]


def gru(weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """Return the state of Domino's GRU after a sequence of embeddings, [rows, hidden size]."""
    of_inputs, of_states = (weights[f"logit_head.prefix_gru.weight_{n}h_l0"] for n in "ih")
    state = torch.zeros(of_states.shape[1])
    for row in inputs:
        reset, update, new = (of_inputs @ row).chunk(3)
        by_reset, by_update, by_new = (of_states @ state).chunk(3)
        mixed = (update + by_update).sigmoid()
        new = (new + (reset + by_reset).sigmoid() * by_new).tanh()
        state = (1 - mixed) * new + mixed * state
    return state


def recurrent(weights: dict[str, Tensor], states: Tensor, path: list[int]) -> Tensor:
    """Return the output of DSpark's recurrent head after a path, [rank]."""
    out = carried = torch.zeros(weights["markov_head.markov_w1.weight"].shape[1])
    for token, state in zip(path, states, strict=False):
        inputs = torch.cat([carried, weights["markov_head.markov_w1.weight"][token], state])
        joint = weights["markov_head.joint_proj.weight"] @ inputs
        gate, new, out = (joint + weights["markov_head.joint_proj.bias"]).chunk(3)
        carried = gate.sigmoid() * carried + (1 - gate.sigmoid()) * new.tanh()
    return out.tanh()


def reference(
    weights: dict[str, Tensor],
    config: DflashConfig,
    states: Tensor,
    path: list[int],
    embeddings: Tensor,
) -> Tensor:
    """Return the correction of logits after a path of tokens from the root, [vocabulary].

    states: of all positions; embeddings: the target's. Tokens that are not drafted have none.
    """
    state, token = states[len(path) - 1], path[-1]
    if not config.rank or len(path) <= config.uncorrected:
        return torch.zeros(config.vocab_size)
    if config.gru_size:
        inputs = torch.cat([state, gru(weights, embeddings[torch.tensor(path)])])
        inside = weights["logit_head.embed_proj.0.weight"] @ inputs
        return weights["logit_head.embed_proj.2.weight"] @ (inside * inside.sigmoid())
    if config.candidates:  # edge(p -> c) = <A[p] * H state, B[c]>
        left = weights["candidate_selector.predecessor_codebook"][token]
        middle = weights["candidate_selector.hidden_projection.weight"] @ state
        right = weights["candidate_selector.successor_codebook"]
        return torch.einsum("r,r,vr->v", left, middle, right)
    latent = weights["markov_head.markov_w1.weight"][token]
    if config.gated:
        inputs = torch.cat([state, latent])
        weight, bias = (weights[f"markov_head.gate_proj.{name}"] for name in ("weight", "bias"))
        latent = latent / (1 + (-(weight @ inputs + bias)).exp())
    if config.recurrent:
        latent = recurrent(weights, states, path)
    added = torch.zeros(config.vocab_size)
    added[drafted(weights)] = weights["markov_head.markov_w2.weight"] @ latent
    return added


def drafted(weights: dict[str, Tensor]) -> Tensor:
    """Return the tokens that the columns of a head stand for: its offsets added to their numbers."""
    if "d2t" not in weights:
        return torch.arange(VOCABULARY)
    return torch.tensor([column + int(offset) for column, offset in enumerate(weights["d2t"])])


def path_of(tree: TokenTree, node: int) -> list[int]:
    """Return the tokens from the root to a node."""
    tokens = []
    while node >= 0:
        tokens.insert(0, int(tree.tokens[node]))
        node = int(tree.parents[node])
    return tokens


class Checking(Dflash):
    """Compares the row of each node with the recomputed one."""

    worst, checked = 0.0, 0
    expected: tuple[Tensor, Tensor] | None = None  # logits before corrections, and states, by depth

    def root(self, tree: TokenTree) -> Step:
        self.expected, config = None, self.head.config
        if len(self._tokens):
            tokens = [*self._tokens, int(tree.tokens[0])]
            states = block_states(self.weights_of(), config, self.target.model, tokens)
            states = states if config.anchored else states[1:]
            weights, model = self.weights_of(), self.target.model
            matrix = weights.get("lm_head.weight", model.get_output_embeddings().weight)
            logits = torch.full((len(states), VOCABULARY), -math.inf)
            cap = getattr(model.config, "final_logit_softcapping", None)
            product = states @ matrix.T
            logits[:, drafted(weights)] = torch.tanh(product / cap) * cap if cap else product
            self.expected = logits, states
        step = super().root(tree)
        if step.further is not None:
            self.compare(tree, torch.zeros(1, dtype=torch.int64), step)
            later = [self.row([0] * i) for i in range(2, len(step.further) + 2)]
            self.compare_rows(self.whole(replace(step, logits=step.further)), later)
        return step

    def weights_of(self) -> dict[str, Tensor]:
        return self.head.module.state_dict()

    def row(self, path: list[int]) -> Tensor:
        """The expected row after a path of tokens from the root."""
        assert self.expected is not None
        logits, states = self.expected
        config, depth = self.head.config, len(path) - 1
        if depth >= config.depths:
            return torch.full((VOCABULARY,), -math.inf)
        embeddings = self.target.model.get_input_embeddings().weight
        added = logits[depth] + reference(self.weights_of(), config, states, path, embeddings)
        most = config.candidates or dflash.MAX_CORRECTED
        if config.rank and most < config.draft_vocab_size:
            outside = torch.ones(VOCABULARY, dtype=torch.bool)
            outside[logits[depth].topk(most).indices] = False
            added = added.masked_fill(outside, -math.inf)
        return added.log_softmax(-1)

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        step = super().step(tree, frontier)
        if self.expected is not None:
            self.compare(tree, frontier.ids, step)
        return step

    def whole(self, step: Step) -> Tensor:
        whole = torch.full((len(step.logits), VOCABULARY), -math.inf)
        columns = torch.arange(VOCABULARY) if step.token_ids is None else step.token_ids
        whole[:, columns] = step.logits
        return whole

    def compare(self, tree: TokenTree, nodes: Tensor, step: Step) -> None:
        self.compare_rows(
            self.whole(step),
            [self.row(path_of(tree, node)) for node in nodes.tolist()],
        )

    def compare_rows(self, rows: Tensor, expected: list[Tensor]) -> None:
        for row, wanted in zip(rows, expected, strict=True):
            assert torch.equal(row == -math.inf, wanted == -math.inf)
            difference = (row - wanted)[wanted > -math.inf]
            self.worst = max(self.worst, float(difference.abs().max()) if len(difference) else 0.0)
            self.checked += 1


def state_of(config: DflashConfig) -> dict[str, Tensor]:
    """Random weights, with kernels so small that products of convolved rows do not add up to large logits."""
    return {
        name: tensor * 0.2 if "kernel_projection" in name else tensor
        for name, tensor in random_state(config).items()
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_row_of_each_node_is_what_the_sources_compute(variant: str) -> None:
    config, target = block_config(**VARIANTS[variant]), HuggingFaceTarget(deep())
    state = state_of(config)
    draft = Checking(head_from(config, state, torch.float32, torch.device("cpu")), target.lm)
    for policy in ("ddtree", "eagle"):
        Engine(target, draft, policy_for(policy)).generate(PROMPT, max_new_tokens=6)
    assert draft.checked > 20 or variant in ("one tap, one candidate", "two rows")
    assert draft.worst < 1e-4


@pytest.mark.parametrize("variant", ["DSpark", "gated"])
def test_of_large_vocabularies_the_likeliest_tokens_are_corrected(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dflash, "MAX_CORRECTED", 40)
    target = HuggingFaceTarget(deep())
    draft = draft_for(target, block_config(**VARIANTS[variant]), Checking)
    for options in ({}, {"temperature": 0.8, "seed": 1}):
        answer = Engine(target, draft, policy_for("ddtree")).generate(
            PROMPT, max_new_tokens=6, **options
        )
        plain = Engine(HuggingFaceTarget(deep()), None, None)
        assert answer.token_ids == plain.generate(PROMPT, max_new_tokens=6, **options).token_ids
    assert draft.checked > 20
    assert draft.worst < 1e-4
    assert draft._columns is not None
    assert 40 <= len(draft._columns) < VOCABULARY


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_native_pass_gives_the_same_rows(variant: str) -> None:
    config, target = block_config(**VARIANTS[variant]), NativeTarget(from_model(deep()))
    state = state_of(config)
    draft = Checking(NativeDflashHead(config, state, target.lm), target.lm)
    draft.weights_of = lambda: state  # type: ignore[method-assign]
    Engine(target, draft, policy_for("ddtree")).generate(PROMPT, max_new_tokens=6)
    assert draft.checked > 20 or variant in ("one tap, one candidate", "two rows")
    assert draft.worst < 1e-4


@pytest.mark.parametrize("native", [False, True])
def test_logits_are_capped_before_they_are_corrected(native: bool) -> None:
    model = deep("gemma4_text")
    target = NativeTarget(from_model(model)) if native else HuggingFaceTarget(model)
    config = block_config(**LAYERS_OF_GEMMA4)
    state = random_state(config)
    kind: Any = NativeDflashHead if native else lambda *given: draft_for(target, config).head
    draft = Checking(kind(config, state, target.lm), target.lm)
    draft.weights_of = lambda: state  # type: ignore[method-assign]
    answer = Engine(target, draft, policy_for("ddtree")).generate(PROMPT, max_new_tokens=6)
    plain = Engine(HuggingFaceTarget(deep("gemma4_text")), None, None)
    assert answer.token_ids == plain.generate(PROMPT, max_new_tokens=6).token_ids
    assert draft.checked > 20
    assert draft.worst < 1e-4


@torch.inference_mode()
@pytest.mark.parametrize("variant", ["recurrent", "Domino"])
def test_nodes_below_copied_ones_are_corrected_by_their_whole_path(variant: str) -> None:
    for order in ([[4, 1], [3, 2]], [[3], [4, 3, 2, 1]], [[1], [2], [3], [4]]):
        target = HuggingFaceTarget(deep())
        draft = draft_for(target, block_config(**VARIANTS[variant]), Checking)
        target.want(draft.traits.features)
        draft.begin(PROMPT, target.prefill(PROMPT))
        tree = TokenTree.root(7, 8)
        draft.root(tree)
        below = tree.root_alone().ids
        for token in (3, 9, 4, 9):
            below = tree.add(below, torch.tensor([token]), torch.zeros(1)).ids
        for nodes in order:
            draft.step(tree, Nodes.of(torch.tensor(nodes)))
        assert draft.checked == 1 + sum(map(len, order))
        assert draft.worst < 1e-5


@torch.inference_mode()
def rows_of(state: dict[str, Tensor], config: DflashConfig) -> Tensor:
    """Rows after the root and after two of its children, [3, vocabulary]."""
    target = HuggingFaceTarget(deep())
    head = tiny_head(config)
    head.load_state_dict(state)
    draft = Dflash(head, target.lm)
    target.want(draft.traits.features)
    draft.begin(PROMPT, target.prefill(PROMPT))
    tree = TokenTree.root(7, 8)
    steps = [draft.root(tree)]
    steps.append(
        draft.step(
            tree, tree.add(tree.root_alone().ids.expand(2), torch.tensor([3, 9]), torch.zeros(2))
        )
    )
    rows = torch.full((3, VOCABULARY), -40.0)
    columns = slice(None) if steps[0].token_ids is None else steps[0].token_ids
    rows[:, columns] = torch.cat([step.logits for step in steps]).clamp(min=-40.0)
    return rows


@pytest.mark.parametrize(
    "variant", ["gated", "DFlash2", "200 tokens", "recurrent", "Domino", "Gemma 4"]
)
def test_every_tensor_changes_what_is_drafted(variant: str) -> None:
    config = block_config(**VARIANTS[variant])
    state = random_state(config)
    rows = rows_of(state, config)
    assert not torch.equal(rows[1], rows[2])
    assert torch.equal(rows_of(state, config), rows)
    for name, tensor in state.items():
        changed = state | {name: tensor * 0 if name == "d2t" else tensor * 1.5 + 0.25}
        if name == "layers.2.layer_scalar":  # which the final norm takes away
            continue
        assert (rows_of(changed, config) - rows).abs().max() > 1e-3, name


# ---------------------------------------------------------------------------------------------------- answers


class Knowing(Dflash):
    """Proposes the answer that plain decoding gives, with one token in five wrong, so that paths end anywhere."""

    answer: list[int]

    def root(self, tree: TokenTree) -> Step:
        step = super().root(tree)
        if self._hidden is None:
            return step
        at = len(self._tokens) + 1
        for row, token in enumerate(self.answer[at : at + len(self._rows) - 1]):
            token = (token + ((at + row) % 5 == 0)) % VOCABULARY
            if self._ids is not None:
                token = int((self._ids == token).float().argmax())
            self._rows[row, token] = 30.0
        return replace(self.step(tree, tree.root_alone()), hidden=step.hidden)


@pytest.mark.parametrize(
    "variant", ["DSpark", "gated", "DFlash2", "200 tokens", "recurrent", "Domino", "Gemma 4"]
)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "drawn"])
def test_answers_equal_plain_decoding(variant: str, options: dict[str, Any]) -> None:
    expected = Engine(HuggingFaceTarget(deep()), None, None).generate(
        PROMPT, max_new_tokens=30, **options
    )
    for policy in ("ddtree", "caddtree", "chain", "auto", "eagle"):
        target = HuggingFaceTarget(deep())
        draft = draft_for(target, block_config(**VARIANTS[variant]), Knowing)
        draft.answer = [*PROMPT, *expected.token_ids]
        result = Engine(target, draft, policy_for(policy)).generate(
            PROMPT, max_new_tokens=30, **options
        )
        assert result.token_ids == expected.token_ids
        if policy != "auto" and variant in ("DSpark", "gated"):  # others may lack the answer
            assert result.stats.num_spec_steps < 30 / 1.5
        for prompt in ([5], [5, 6]):
            plain = Engine(HuggingFaceTarget(deep()), None, None)
            answer = Engine(target, draft, policy_for(policy)).generate(
                prompt, max_new_tokens=6, **options
            )
            assert answer.token_ids == plain.generate(prompt, max_new_tokens=6, **options).token_ids


@pytest.mark.parametrize("policy", ["ddtree", "caddtree", "auto"])
@pytest.mark.parametrize(
    "variant",
    ["gated", "DFlash2", "DFlash2, windows", "200 tokens", "recurrent", "Domino", "Gemma 4"],
)
def test_answers_of_native_blocks_equal_plain_decoding_in_lanes(variant: str, policy: str) -> None:
    target, config = NativeTarget(from_model(deep())), block_config(**VARIANTS[variant])
    plain = Engine(HuggingFaceTarget(deep()), None, None)
    draft = Knowing(NativeDflashHead(config, state_of(config), target.lm), target.lm)
    prompts = [PROMPT, PROMPT[:3], [5]]
    for options in ({}, {"temperature": 0.9, "seed": 3}):
        expected = [plain.generate(one, max_new_tokens=16, **options).token_ids for one in prompts]
        draft.answer = [*PROMPT, *expected[0]]
        engine = Engine(target, draft, policy_for(policy))
        answers = Pool(engine, 2).generate(prompts, max_new_tokens=16, **options)
        assert [answer.token_ids for answer in answers] == expected
        assert engine.generate(PROMPT, max_new_tokens=16, **options).token_ids == expected[0]


# ---------------------------------------------------------------------------------------------------- on disk

FLAT: dict[str, Any] = {name: value for name, value in RAW.items() if name != "dflash_config"} | {
    "architectures": ["Qwen3DSparkModel"],
    "mask_token_id": MASK,
    "target_layer_ids": [1, 2, 4],
    "num_anchors": 512,
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
NEAR = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 9, "is_causal": False}


def nested(architecture: str, **fields: Any) -> dict[str, Any]:
    raw = copy.deepcopy(RAW) | {"architectures": [architecture]}
    raw["dflash_config"] |= fields
    return raw


SPECFORGE = nested(
    "DSparkDraftModel",
    projector_type="dspark",
    markov_rank=6,
    shift_label=True,
    attention_mode="gqa",
)
CONVOLVED = nested(
    "DFlash2DraftModel", conv_kernel_size=2, conv_group_size=8, selector_rank=6, selector_top_k=5
)
UNSTATED = "no sample_from_anchor: each row predicts the token after it"
OF_DOMINO = nested(
    "DFlashDraftModel",
    projector_type="domino",
    emb_dim=6,
    gru_hidden_dim=10,
    pure_draft_prefix_len=1,
    shift_label=True,
)
# The fields of a Gemma 4's text, of which DeepSpec's config is a copy, and its own.
OF_GEMMA4: dict[str, Any] = {
    name: value for name, value in FLAT.items() if not name.startswith(("rope_", "hidden_act"))
} | {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "enable_moe_block": False,
    "final_logit_softcapping": 20.0,
    "global_head_dim": 8,
    "head_dim": 6,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 0,
    "rope_parameters": {
        "full_attention": GEMMA4["rope"],
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "use_double_wide_mlp": False,
}
LAYERS_OF_GEMMA4 = SPARK | GEMMA4 | {"num_kv_heads": 1}


def speculators(algorithm: str, **fields: Any) -> dict[str, Any]:
    """The config of a head of 200 tokens, or of DFlash2 with all of them."""
    layer = {name: RAW[name] for name in RAW.keys() - {"architectures", "block_size"}}
    del layer["dflash_config"]
    nested_fields = {name: fields.pop(name) for name in ("layer_types",) if name in fields}
    whole = algorithm == "dflash2"
    return {
        "speculators_model_type": algorithm,
        "architectures": ["DFlashDraftModel"],
        "transformer_layer_config": layer | {"sliding_window": 9} | nested_fields,
        "draft_vocab_size": VOCABULARY if whole else 200,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [2, 3, 5],
        "target_hidden_size": None,
        "projector_type": "dflash",
        "shift_label": False,
        "sample_from_anchor": algorithm == "dspark",
        "speculators_config": {"algorithm": algorithm, "verifier": {"name_or_path": "some/model"}},
        **({"markov_rank": 6, "markov_head_type": "vanilla"} if algorithm == "dspark" else {}),
        **({k: v for k, v in CONVOLVED["dflash_config"].items() if "_" in k} if whole else {}),
        **fields,
    }


SLIDING = ["full_attention", "sliding_attention", "sliding_attention"]
WINDOWS: dict[str, Any] = {"windows": (0, 9, 9), "causal": (False, True, True)}


def written(folder: Path, raw: dict[str, Any], config: DflashConfig, **more: Tensor | None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = {
        name.removeprefix("logit_head."): tensor  # as Domino's are published
        for name, tensor in (random_state(config) | more).items()
    }
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        folder / "model.safetensors",
    )
    return folder


@pytest.mark.parametrize(
    ("raw", "changes", "kind"),
    [
        (FLAT, SPARK, "DSpark"),
        (FLAT | {"markov_head_type": "gated"}, SPARK | {"gated": True}, "DSpark"),
        (FLAT | {"markov_head_type": "rnn"}, SPARK | {"recurrent": True}, "DSpark"),
        (OF_GEMMA4, LAYERS_OF_GEMMA4, "DSpark"),
        (
            OF_GEMMA4 | {"attention_k_eq_v": False, "markov_rank": 0},
            {"anchored": True} | GEMMA4 | {"shared_values": False},
            "DFlash",
        ),
        (OF_DOMINO, DOMINO, "Domino"),
        (OF_DOMINO | {"architectures": ["DominoDraftModel"]}, DOMINO, "Domino"),
        (
            nested("DFlashDraftModel", projector_type="causal_v5", emb_dim=6, gru_hidden_dim=5),
            {"rank": 6, "gru_size": 5},
            "Domino",
        ),
        (FLAT | {"sample_from_anchor": False}, {"rank": 6}, "DSpark"),
        (FLAT | {"dspark_bonus_anchor": True}, {"rank": 6}, "DSpark"),
        (FLAT | {"markov_rank": 0}, {"anchored": True}, "DFlash"),
        (SPECFORGE, SPARK, "DSpark"),
        (nested("DSparkDraftModel", shift_label=False) | {"markov_rank": 6}, {"rank": 6}, "DSpark"),
        (nested("DFlashDraftModel", projector_type="dspark", markov_rank=6), SPARK, "DSpark"),
        (CONVOLVED, SECOND, "DFlash2"),
        (CONVOLVED | NEAR, SECOND | {"windows": (9, 9, 9)}, "DFlash2"),
    ],
)
def test_published_configs_are_read(
    tmp_path: Path, raw: dict[str, Any], changes: dict[str, Any], kind: str
) -> None:
    config = block_config(**changes)
    head = load_head(written(tmp_path, raw, config))
    assert is_head(tmp_path)
    assert head.config == config
    assert str(head.dialect) == f"{kind}, dflash layout, fields as dflash means them"
    stated = {"sample_from_anchor", "dspark_bonus_anchor", "shift_label"} & (
        raw.keys() | raw.get("dflash_config", {}).keys()
    )
    usual = not stated and "selector_rank" not in str(raw) and kind != "Domino"
    assert (UNSTATED in head.dialect.notes) == usual
    assert all(torch.equal(head.state[key], t) for key, t in random_state(config).items())


@pytest.mark.parametrize(
    ("raw", "changes"),
    [
        (speculators("dspark"), SPARK | REDUCED),
        (speculators("dspark", markov_head_type="gated"), SPARK | {"gated": True} | REDUCED),
        (speculators("dspark", sample_from_anchor=False), {"rank": 6} | REDUCED),
        (speculators("dspark", layer_types=SLIDING), SPARK | REDUCED | WINDOWS),
        (speculators("dspark", draft_vocab_size=VOCABULARY), SPARK),
        (speculators("dflash"), REDUCED),
        (speculators("dflash", sample_from_anchor=True), {"anchored": True} | REDUCED),
        (
            speculators("dflash", layer_types=SLIDING, sliding_window_non_causal=True),
            {"windows": (0, 9, 9)} | REDUCED,
        ),
        (speculators("dflash2", layer_types=SLIDING), SECOND | {"windows": (0, 9, 9)}),
        (
            speculators("dflash2", layer_types=SLIDING, sliding_window_non_causal=False),
            SECOND | WINDOWS,
        ),
    ],
)
def test_heads_of_speculators_are_read(
    tmp_path: Path, raw: dict[str, Any], changes: dict[str, Any]
) -> None:
    config = block_config(**changes)
    state = random_state(config)
    copies = {"embed_tokens.weight": torch.zeros(VOCABULARY, 32)}
    if config.own_head:
        marks = torch.zeros(VOCABULARY, dtype=torch.bool)
        marks[drafted(state)] = True
        copies["t2d"] = marks
    else:
        copies["lm_head.weight"] = torch.zeros(VOCABULARY, 32)
    head = load_head(written(tmp_path, raw, config, **copies))
    assert is_head(tmp_path)
    assert head.config == config
    assert head.state.keys() == state.keys()
    assert all(torch.equal(head.state[key], tensor) for key, tensor in state.items())
    assert any("embed_tokens.weight is left out" in note for note in head.dialect.notes)
    assert any("the head reads 2, 3, 5" in note for note in head.dialect.notes)


def test_heads_of_speculators_before_anchors_predict_by_masks(tmp_path: Path) -> None:
    raw = speculators("dspark", sample_from_anchor=None, shift_label=None)
    config = block_config(**REDUCED, rank=6)
    head = load_head(written(tmp_path, raw, config))
    assert head.config == config
    assert "no sample_from_anchor: masks predict their own" in head.dialect.notes


def test_tensors_that_serve_nothing_are_named(tmp_path: Path) -> None:
    config = block_config(**SPARK)
    more = {
        "confidence_head.proj.weight": torch.zeros(1, 38),
        "confidence_head.proj.bias": torch.zeros(1),
        "embed_tokens.weight": torch.zeros(VOCABULARY, 32),
        "lm_head.weight": torch.zeros(VOCABULARY, 32),
    }
    head = load_head(written(tmp_path, FLAT, config, **more))
    left_out = [note for note in head.dialect.notes if "is left out" in note]
    assert [note.partition(" ")[0] for note in left_out] == sorted(more)
    assert "policies read log-probabilities" in left_out[0]
    assert head.state.keys() == random_state(config).keys()
    with pytest.raises(CheckpointError, match=r"unused: lm_head\.weight"):
        load_head(
            written(tmp_path, SPECFORGE, config, **{"lm_head.weight": more["lm_head.weight"]})
        )


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (
            FLAT | {"markov_head_type": "fir"},
            "markov_head_type: got 'fir', accepted vanilla, gated, rnn",
        ),
        (
            FLAT | {"markov_head_type": "rnn", "sample_from_anchor": False},
            "sample_from_anchor: rnn needs rows",
        ),
        (OF_GEMMA4 | {"enable_moe_block": True}, "enable_moe_block: got True, accepted none"),
        (OF_GEMMA4 | {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input: got 8"),
        (OF_GEMMA4 | {"global_head_dim": None}, "global_head_dim: got None"),
        (OF_GEMMA4 | {"num_global_key_value_heads": None}, "num_global_key_value_heads: got None"),
        (OF_GEMMA4 | {"rope_parameters": {}}, "rope_parameters: full_attention is missing"),
        (
            OF_GEMMA4 | {"layer_types": ["sliding_attention"] * 3},
            "accepted 3 of full_attention",
        ),
        (nested("DFlashDraftModel", projector_type="domino", emb_dim=6), "gru_hidden_dim: got No"),
        (
            nested("DominoDraftModel", projector_type="domino", gru_hidden_dim=6),
            "emb_dim: got None",
        ),
        (
            nested("DominoDraftModel", emb_dim=6, gru_hidden_dim=10, pure_draft_prefix_len=-1),
            "pure_draft_prefix_len: got -1",
        ),
        (FLAT | {"markov_rank": -1}, "markov_rank: got -1, accepted a whole number"),
        (FLAT | {"target_layer_ids": None}, "target_layer_ids: is missing"),
        (FLAT | {"block_size": 1}, "block_size: got 1"),
        (nested("DSparkDraftModel", attention_mode="mla"), "unknown 'attention_mode', known are "),
        (
            nested("DFlash2DraftModel", conv_kernel_size=2, conv_group_size=8),
            "selector_rank: got None",
        ),
        (nested("DFlash2DraftModel", selector_rank=2, conv_group_size=5), "conv_group_size: got 5"),
        (nested("DFlash2DraftModel", input_embedding_scale=2.0), "unknown 'input_embedding_scale'"),
        (nested("DFlash2DraftModel", final_logit_softcapping=30.0), "unknown 'final_logit_soft"),
        (
            FLAT | {"speculators_model_type": "dspark"},
            "transformer_layer_config: is missing",
        ),
        (speculators("dflash", projector_type="domino"), "Domino heads of speculators are not"),
        (speculators("dflash", aux_hidden_state_layer_ids=[]), "target_layer_ids: is missing"),
        (speculators("dflash2", draft_vocab_size=200), "a DFlash2 head has the target's vocabul"),
        (speculators("dspark", draft_vocab_size=900), "draft_vocab_size: got 900, more than"),
        (
            speculators("dspark", transformer_layer_config={"model_type": "llama"}),
            "model_type: got 'llama', accepted qwen3",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    tmp_path: Path, raw: dict[str, Any], problem: str
) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: ") as refused:
        load_head(written(tmp_path, raw, block_config(**SPARK)))
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("raw", "changes", "change", "problem"),
    [
        (FLAT, SPARK, {"markov_head.markov_w2.weight": None}, "missing: markov_head.markov_w2"),
        (FLAT | {"markov_rank": 0}, SPARK, {}, "unused: markov_head.markov_w1.weight [260, 6]"),
        (
            FLAT,
            SPARK,
            {"markov_head.markov_w1.weight": torch.zeros(9, 6)},
            "mis-shaped: markov_head.markov_w1.weight [9, 6] instead of [260, 6]",
        ),
        (
            CONVOLVED,
            SECOND,
            {"candidate_selector.successor_codebook": None},
            "missing: candidate_selector.successor_codebook [260, 6]",
        ),
        (
            CONVOLVED,
            SECOND,
            {"layers.1.mlp_conv.base_kernel": torch.zeros(2, 3, 32)},
            "mis-shaped: layers.1.mlp_conv.base_kernel [2, 3, 32] instead of [2, 2, 32]",
        ),
        (
            OF_GEMMA4,
            LAYERS_OF_GEMMA4,
            {"layers.2.layer_scalar": None},
            "missing: layers.2.layer_scalar [1]",
        ),
        (
            OF_GEMMA4,
            LAYERS_OF_GEMMA4,
            {"layers.0.self_attn.v_proj.weight": torch.zeros(8, 32)},
            "unused: layers.0.self_attn.v_proj.weight [8, 32]",
        ),
        (
            OF_GEMMA4 | {"use_double_wide_mlp": True},
            LAYERS_OF_GEMMA4,
            {"layers.1.mlp.up_proj.weight": torch.zeros(80, 32)},
            "mis-shaped: layers.1.mlp.up_proj.weight [80, 32] instead of [40, 32]",
        ),
        (
            FLAT | {"markov_head_type": "rnn"},
            SPARK | {"recurrent": True},
            {"markov_head.joint_proj.bias": None},
            "missing: markov_head.joint_proj.bias [18]",
        ),
        (
            OF_DOMINO,
            DOMINO,
            {"logit_head.prefix_gru.weight_hh_l0": None},
            "missing: prefix_gru.weight_hh_l0 [30, 10]",
        ),
        (
            OF_DOMINO,
            DOMINO,
            {"logit_head.embed_proj.2.bias": torch.zeros(VOCABULARY)},
            "unused: embed_proj.2.bias [260]",
        ),
        (RAW, SECOND, {}, "unused: "),
        (
            speculators("dspark"),
            SPARK | REDUCED,
            {"lm_head.weight": None},
            "missing: lm_head.weight [200, 32]",
        ),
        (
            speculators("dspark"),
            SPARK | REDUCED,
            {"markov_head.markov_w2.weight": torch.zeros(VOCABULARY, 6)},
            "mis-shaped: markov_head.markov_w2.weight [260, 6] instead of [200, 6]",
        ),
        (
            speculators("dspark"),
            SPARK | REDUCED,
            {"extra.weight": torch.zeros(2)},
            "unused: extra.weight [2]",
        ),
        (FLAT, SPARK, {"d2t": torch.zeros(VOCABULARY, dtype=torch.int64)}, "d2t"),
    ],
)
def test_other_tensors_are_refused_by_name(
    tmp_path: Path,
    raw: dict[str, Any],
    changes: dict[str, Any],
    change: dict[str, Tensor | None],
    problem: str,
) -> None:
    folder = written(tmp_path, raw, block_config(**changes), **change)
    if change.keys() == {"d2t"}:  # of the whole vocabulary
        assert load_head(folder).config == block_config(**changes)
        return
    with pytest.raises(CheckpointError, match=r"of width 32; ") as refused:
        load_head(folder)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("raw", "dtype"),
    [
        (FLAT, "float32"),
        (CONVOLVED, "float32"),
        (CONVOLVED | NEAR, "bfloat16"),
        (speculators("dspark"), "float32"),
        (speculators("dspark"), "bfloat16"),
        (OF_DOMINO, "float32"),
        (OF_GEMMA4, "bfloat16"),
    ],
    ids=[
        "DSpark",
        "DFlash2",
        "windows in int8",
        "200 tokens",
        "200 tokens in int8",
        "Domino",
        "Gemma 4 in int8",
    ],
)
def test_a_folder_drafts_on_both_forwards_for_several_texts(
    tmp_path: Path, raw: Any, dtype: str
) -> None:
    changes = SPARK if raw is FLAT else DOMINO if raw is OF_DOMINO else SECOND
    changes = LAYERS_OF_GEMMA4 if raw is OF_GEMMA4 else changes
    if "speculators_config" in raw:
        changes = SPARK | REDUCED
    folder = written(tmp_path / "head", raw, block_config(**changes))
    name = str(tmp_path / "model")
    deep().save_pretrained(name)
    byte_tokenizer().save_pretrained(name)
    plain = Engine.from_pretrained(name, policy="plain", dtype=dtype)
    prompts = [PROMPT, [9] * 20, [5]]
    other = [{"backend": "huggingface"}] if dtype == "float32" else []
    for options in ({}, {"lookup": False}, *other):
        engine = Engine.from_pretrained(
            name, draft=str(folder), policy="ddtree", dtype=dtype, **options
        )
        kind = DflashHead if "backend" in options else NativeDflashHead
        inner: Any = engine.drafter
        while not isinstance(inner, Dflash):
            inner = inner.inner
        assert type(inner.head) is kind
        for sampling in ({}, {"temperature": 0.8, "seed": 4}):
            if kind is DflashHead:  # for one text at a time
                answers = [engine.generate(one, max_new_tokens=12, **sampling) for one in prompts]
            else:
                answers = Pool(engine, 2).generate(prompts, max_new_tokens=12, **sampling)
            for prompt, answer in zip(prompts, answers, strict=True):
                expected = plain.generate(prompt, max_new_tokens=12, **sampling)
                assert answer.token_ids == expected.token_ids
    with pytest.raises(UnsupportedModelError, match="head is run without graphs"):
        Engine.from_pretrained(deep(), draft=str(folder), graphs=True)


@pytest.mark.parametrize("changes", [SPARK, SECOND], ids=["DSpark", "DFlash2"])
def test_answers_under_a_grammar_equal_plain_decoding(changes: dict[str, Any]) -> None:
    target, options = HuggingFaceTarget(deep()), {"grammar": 'start: /[a-f]+/ " is it"', "seed": 2}
    draft, tokenizer = draft_for(target, block_config(**changes)), byte_tokenizer()
    plain = Engine(HuggingFaceTarget(deep()), None, None, tokenizer)
    for temperature in (0.0, 0.9):
        expected = plain.generate(PROMPT, max_new_tokens=16, temperature=temperature, **options)
        for policy in ("ddtree", "auto"):
            engine = Engine(target, draft, policy_for(policy), tokenizer)
            answer = engine.generate(PROMPT, max_new_tokens=16, temperature=temperature, **options)
            assert answer.token_ids == expected.token_ids


@pytest.mark.parametrize("changes", [SPARK, SECOND, SPARK | REDUCED, DOMINO])
def test_a_target_with_appended_tokens_is_drafted_for(tmp_path: Path, changes: Any) -> None:
    raw = speculators("dspark") if "own_head" in changes else CONVOLVED
    raw = FLAT if changes is SPARK else OF_DOMINO if changes is DOMINO else raw
    folder = written(tmp_path / "head", raw, block_config(**changes))
    grown = deep(vocab_size=VOCABULARY + 3)
    engine = Engine.from_pretrained(grown, draft=str(folder), policy="ddtree")
    plain = Engine.from_pretrained(grown, policy="plain")
    prompt = [*PROMPT, VOCABULARY + 1]
    answer = engine.generate(prompt, max_new_tokens=8)
    assert answer.token_ids == plain.generate(prompt, max_new_tokens=8).token_ids


def test_such_heads_are_not_written(tmp_path: Path) -> None:
    for changes in (SPARK, SECOND, {"anchored": True}, REDUCED, DOMINO, GEMMA4):
        config = block_config(**changes)
        with pytest.raises(CheckpointError, match="the dflash layout has no field for it"):
            save_head(config, random_state(config), tmp_path / "out")


@pytest.mark.parametrize("changes", [SPARK, SECOND, {"anchored": True}, DOMINO, GEMMA4])
def test_such_heads_are_not_trained(changes: dict[str, Any]) -> None:
    for loss in ("dflash", "ttt"):
        with pytest.raises(InputError, match="DSpark and DFlash2 heads are not trained"):
            check_fit(make_loss(loss, steps=2), tiny_head(block_config(**changes)))


@torch.inference_mode()
def test_temperatures_divide_corrected_logits() -> None:
    rows = []
    for temperatures in ((), (2.0, 0.5)):
        config = block_config(**SPARK, temperatures=temperatures)
        rows.append(rows_of(random_state(config), config))
    divided = rows[0] / torch.tensor([2.0, 0.5, 0.5])[:, None]
    torch.testing.assert_close(rows[1], divided.log_softmax(-1))


def test_damaged_files_name_their_tensor(tmp_path: Path) -> None:
    config = block_config(**SPARK)
    file = written(tmp_path, FLAT, config) / "model.safetensors"
    tensors = load_file(file)
    tensors["markov_head.markov_w2.weight"][3, 2] = math.nan
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"not finite: markov_head\.markov_w2\.weight"):
        load_head(tmp_path)
