"""Experts: numbers of transformers' modules, bits that hang on no other row, and the forms of files."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from specengine import Engine
from specengine.checkpoints.pretrained import open_native
from specengine.errors import CheckpointError, UnsupportedModelError
from specengine.models import families
from specengine.models.extension import instruction_sets
from specengine.models.families import Experts, Layer, Routing
from specengine.models.families.mixtral import FAMILY
from specengine.models.native import NativeLM, NativeTarget, RowBatch, from_model
from specengine.ops.tree import TokenTree
from tests.checkpoints import gguf_files
from tests.models.native_engines import (
    INSTRUCTION_SETS,
    forced,
    native_lm as lm_on,
    needs_extension,
    plainly,
)
from tests.models.native_variants import PROMPT, VARIANTS, native_logits, own_logits, tree_of
from tests.toy import VOCABULARY, random_tree, tiny

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]
SPARSE = (
    "ernie4_5_moe",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "granitemoehybrid",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
)
KINDS = ("q8_0", "q4_0", "q4_1", "q4_k", "q6_k")


@cache
def model_of(variant: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    family, changes = VARIANTS[variant]
    return tiny(family, **changes).to(dtype)


# ---------------------------------------------------------------------------------------------------- bits


@torch.inference_mode()
def alone(lm: NativeLM, tree: TokenTree) -> Tensor:
    """Return the logits of each node, decoded plainly after its path, one token at a time."""
    root, rows = int(tree.tokens[0]), []
    target = NativeTarget(lm)
    for node in range(len(tree)):
        path = [root, *tree.path_tokens(node)]
        target.prefill([*PROMPT, *path[:-1]])
        rows.append(target.verify(TokenTree.root(path[-1], 1))[0][0])
    return torch.stack(rows)


def assert_rows_are_alone(lm: NativeLM, sizes: tuple[int, ...] = (1, 2, 3, 17, 64)) -> None:
    for nodes in sizes:
        tree = random_tree(nodes, nodes, lm.vocab_size, root=3)
        assert torch.equal(native_logits(lm, PROMPT, tree), alone(lm, tree)), nodes


@pytest.mark.sliced
@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
@pytest.mark.parametrize("options", [{}, {"quantize": "int8", "numerics": "bfloat16"}])
@pytest.mark.parametrize(
    "variant",
    [
        "mixtral",
        "qwen3_moe sizes",
        "olmoe",
        "qwen2_moe",
        "glm4_moe",
        "ernie4_5_moe",
        "gpt_oss windows",
    ],
)
def test_a_row_alone_has_the_bits_that_it_has_in_a_tree(
    variant: str, options: dict[str, Any], instructions: str
) -> None:
    assert_rows_are_alone(lm_on(model_of(variant, torch.bfloat16), instructions, **options))


@pytest.mark.parametrize(
    "variant",
    ["mixtral", "qwen3_moe", "olmoe", "granitemoe", "glm4_moe", "ernie4_5_moe", "gpt_oss windows"],
)
def test_so_it_has_in_float32(variant: str) -> None:
    assert_rows_are_alone(from_model(model_of(variant)))


@pytest.mark.parametrize("threads", [2, 3])
def test_bits_hang_on_no_number_of_threads(threads: int) -> None:
    lm, tree = from_model(model_of("qwen3_moe")), random_tree(40, 40, VOCABULARY, root=3)
    wanted = native_logits(lm, PROMPT, tree)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(native_logits(lm, PROMPT, tree), wanted)
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------------------------------------- folders


def as_stored(model: PreTrainedModel, folder: Path, form: str) -> None:
    """As published, each expert alone; or as transformers holds them."""
    model.save_pretrained(folder)
    names = load_file(folder / "model.safetensors")
    assert any(".experts.0." in name or "input_linear" in name or "sinks" in name for name in names)
    if form == "stacks":
        save_file(
            {name: weight.detach().clone() for name, weight in model.state_dict().items()},
            folder / "model.safetensors",
        )


@pytest.mark.sliced(7)
@pytest.mark.parametrize("form", ["experts", "stacks"])
@pytest.mark.parametrize("name", SPARSE)
def test_folders_of_both_forms_answer_as_transformers_does(
    name: str, form: str, tmp_path: Path
) -> None:
    as_stored(tiny(name), tmp_path, form)
    engine = Engine.from_pretrained(str(tmp_path), "none", offline=True, backend="native")
    assert engine.generate(PROMPT, max_new_tokens=20).token_ids == plainly(tiny(name), PROMPT, 20)


def test_a_folder_without_an_expert_is_refused(tmp_path: Path) -> None:
    as_stored(tiny("qwen3_moe"), tmp_path, "experts")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        UnsupportedModelError, match=r"tensors differ from qwen3_moe's: .*mlp\.experts"
    ):
        Engine.from_pretrained(str(tmp_path), "none", offline=True, backend="native")


# ---------------------------------------------------------------------------------------------------- GGUF


Kinds = tuple[str, str, str]


def write_packed(
    path: Path, kinds: Kinds, experts: int = 5, chosen: int = 2, *, shared: Kinds | None = None
) -> Path:
    """Write Qwen3 with experts, whose gates, ups and downs are of these kinds.

    shared: Qwen2 with experts, and one that all rows use, of these kinds.
    """
    architecture = "qwen3moe" if shared is None else "qwen2moe"
    hidden, inner, heads, key_heads, head = 256, 512, 4, 2, 64
    gate, up, down = kinds
    words = gguf_files.byte_level_vocabulary()
    tensors: dict[str, Any] = {
        "token_embd.weight": (gate, (len(words["tokenizer.ggml.tokens"]), hidden)),
        "output.weight": (gate, (len(words["tokenizer.ggml.tokens"]), hidden)),
        "output_norm.weight": ("f32", (hidden,)),
    }
    for layer in range(gguf_files.LAYERS):
        prefix = f"blk.{layer}."
        # the dense ones
        tensors |= dict.fromkeys(f"{prefix}ffn_{name}.weight" for name in ("gate", "up", "down"))
        tensors |= {f"{prefix}{name}_norm.weight": ("f32", (hidden,)) for name in ("attn", "ffn")}
        if shared is None:
            tensors |= {f"{prefix}attn_{name}_norm.weight": ("f32", (head,)) for name in "qk"}
        else:
            shapes = (inner, hidden), (inner, hidden), (hidden, inner)
            tensors |= {
                f"{prefix}ffn_{name}_shexp.weight": (kind, shape)
                for name, kind, shape in zip(("gate", "up", "down"), shared, shapes, strict=True)
            }
            # as converters have squeezed it
            tensors[f"{prefix}ffn_gate_inp_shexp.weight"] = "f32", (hidden,)
        tensors |= {
            f"{prefix}attn_q.weight": (gate, (heads * head, hidden)),
            f"{prefix}attn_k.weight": (gate, (key_heads * head, hidden)),
            f"{prefix}attn_v.weight": (gate, (key_heads * head, hidden)),
            f"{prefix}attn_output.weight": (gate, (hidden, heads * head)),
            f"{prefix}ffn_gate_inp.weight": ("f32", (experts, hidden)),
            f"{prefix}ffn_gate_exps.weight": (gate, (experts, inner, hidden)),
            f"{prefix}ffn_up_exps.weight": (up, (experts, inner, hidden)),
            f"{prefix}ffn_down_exps.weight": (down, (experts, hidden, inner)),
        }
    sizes = {
        "embedding_length": hidden,
        "feed_forward_length": 2 * inner,
        "rope.dimension_count": head,
        "attention.key_length": head,
        "attention.value_length": head,
        "expert_count": experts,
        "expert_used_count": chosen,
        "expert_feed_forward_length": inner,
    }
    sizes |= {} if shared is None else {"expert_shared_feed_forward_length": inner}
    metadata = {f"{architecture}.{key}": value for key, value in sizes.items()}
    return gguf_files.write_model(
        path, architecture, kind=gate, vocabulary=words, metadata=metadata, tensors=tensors
    )


def packed(path: Path, instructions: str | None, numerics: str = "bfloat16") -> NativeLM:
    with forced(instructions):
        return NativeLM(open_native(str(path)).source, numerics=numerics)


@pytest.mark.sliced(1)
@pytest.mark.parametrize(
    "kinds", [*((kind,) * 3 for kind in KINDS), ("q4_k", "q4_k", "q6_k"), ("q4_0", "q4_1", "q8_0")]
)
def test_packed_experts_give_the_bits_of_the_converted_model(
    kinds: tuple[str, str, str], tmp_path: Path
) -> None:
    path = write_packed(tmp_path / "model.gguf", kinds)
    converted = open_native(str(path)).source.model()
    tree = tree_of(converted.config.vocab_size)
    for instructions in INSTRUCTION_SETS:
        lm = packed(path, instructions)
        assert set(kinds) <= set(lm.stored.split(", ")) or kinds[0] != kinds[1]
        found = native_logits(lm, PROMPT, tree)
        assert found.isfinite().all()
        assert torch.equal(found, native_logits(lm_on(converted, instructions), PROMPT, tree))
    assert_rows_are_alone(packed(path, None), (2, 17))


@pytest.mark.parametrize("kind", ["q4_k", "q8_0", "q5_k", "iq4_xs"])
def test_packed_experts_as_integers_have_the_same_bits_on_every_instruction_set(
    kind: str, tmp_path: Path
) -> None:
    path = write_packed(tmp_path / "model.gguf", (kind,) * 3)
    tree = random_tree(33, 33, 200, root=3)
    found = [packed(path, one, "integer") for one in instruction_sets("integer")]
    logits = [native_logits(lm, PROMPT, tree) for lm in found]
    assert logits[0].isfinite().all()
    assert kind in found[0].stored
    assert all(torch.equal(one, logits[0]) for one in logits)
    assert_rows_are_alone(found[0], (2, 17))


@pytest.mark.sliced(1)
@pytest.mark.parametrize(
    "kinds",
    [
        *(
            ("q4_k", "q4_0", "q8_0"),
            ("q4_0", "q6_k", "q4_0"),
            ("q8_0", "q4_k", "q6_k"),
            ("q6_k", "q8_0", "q4_k"),
        ),
        *(("q8_0", "bf16", "q4_0"), ("bf16", "q8_0", "q8_0")),  # of integers and of floats
    ],
)
def test_inputs_are_made_ready_for_both_kinds_of_an_expert(kinds: Kinds, tmp_path: Path) -> None:
    """Of an expert that all rows use: those of the others become numbers where gates and ups are of two kinds."""
    path = write_packed(tmp_path / "model.gguf", ("q8_0",) * 3, shared=kinds)
    tree = random_tree(33, 33, 200, root=3)
    wanted = own_logits(open_native(str(path), dtype=torch.float32).source.model(), PROMPT, tree)
    found = [
        native_logits(packed(path, one, "integer"), PROMPT, tree)
        for one in instruction_sets("integer")
    ]
    apart = (found[0] - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert apart.median() < 0.1, apart
    assert all(torch.equal(one, found[0]) for one in found)


def write_gpt_oss(path: Path, experts: int = 4) -> Path:
    """Write GPT-OSS as published: experts as MXFP4, all else as Q8_0."""
    hidden, inner, heads, key_heads, head = 64, 96, 4, 2, 16
    words = gguf_files.byte_level_vocabulary()
    tensors: dict[str, Any] = {
        "token_embd.weight": ("q8_0", (len(words["tokenizer.ggml.tokens"]), hidden)),
        "output.weight": ("q8_0", (len(words["tokenizer.ggml.tokens"]), hidden)),
        "output_norm.weight": ("f32", (hidden,)),
    }
    for layer in range(gguf_files.LAYERS):
        prefix = f"blk.{layer}."
        stacks = {
            "gate": (experts, inner, hidden),
            "up": (experts, inner, hidden),
            "down": (experts, hidden, inner),
        }
        matrices = {
            "q": (heads * head, hidden),
            "k": (key_heads * head, hidden),
            "v": (key_heads * head, hidden),
        }
        matrices["output"] = (hidden, heads * head)
        tensors |= {
            f"{prefix}ffn_norm.weight": None,
            f"{prefix}attn_sinks.weight": ("f32", (heads,)),
        }
        tensors |= {
            f"{prefix}{name}_norm.weight": ("f32", (hidden,)) for name in ("attn", "post_attention")
        }
        tensors |= {
            f"{prefix}attn_{name}.weight": ("q8_0", shape) for name, shape in matrices.items()
        }
        tensors |= {
            f"{prefix}attn_{name}.bias": ("f32", shape[:1]) for name, shape in matrices.items()
        }
        tensors |= {f"{prefix}ffn_gate_inp.weight": ("f32", (experts, hidden))}
        tensors |= {f"{prefix}ffn_gate_inp.bias": ("f32", (experts,))}
        for name, shape in stacks.items():
            tensors[f"{prefix}ffn_{name}.weight"] = None
            tensors[f"{prefix}ffn_{name}_exps.weight"] = ("mxfp4", shape)
            tensors[f"{prefix}ffn_{name}_exps.bias"] = ("f32", shape[:2])
    sizes = {
        "expert_count": experts,
        "expert_used_count": 2,
        "expert_feed_forward_length": inner,
        "attention.sliding_window": 16,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 16,
    }
    metadata = {f"gpt-oss.{key}": value for key, value in sizes.items()}
    return gguf_files.write_model(
        path, "gpt-oss", vocabulary=words, metadata=metadata, tensors=tensors
    )


def test_the_published_form_of_gpt_oss(tmp_path: Path) -> None:
    path = write_gpt_oss(tmp_path / "model.gguf")
    converted = open_native(str(path), dtype=torch.float32).source.model()
    assert converted.config.rope_parameters["truncate"] is False
    tree = random_tree(33, 33, 200, root=3)
    wanted = own_logits(converted, PROMPT, tree)
    exact = native_logits(from_model(converted), PROMPT, tree)
    assert (exact - wanted).abs().max() < 1e-4 * wanted.abs().max()
    found = [packed(path, one, "integer") for one in instruction_sets("integer")]
    assert set(found[0].stored.split(", ")) == {"q8_0", "mxfp4", "bf16"}
    logits = [native_logits(lm, PROMPT, tree) for lm in found]
    assert all(torch.equal(one, logits[0]) for one in logits)
    apart = ((logits[0] - wanted).norm(dim=1) / wanted.norm(dim=1)).median()
    assert apart < 0.1, apart
    assert_rows_are_alone(found[0], (2, 17))


def test_a_file_of_llama_with_experts_is_mixtral(tmp_path: Path) -> None:
    path = gguf_files.write_model(
        tmp_path / "model.gguf", metadata={"llama.expert_count": 4, "llama.expert_used_count": 2}
    )
    with pytest.raises(
        CheckpointError,
        match=r"does not fit a mixtral of its size; missing: blk\.0\.ffn_gate_inp\.weight",
    ):
        Engine.from_pretrained(str(path), "none", offline=True)


# ---------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    "routing",
    [
        Routing(1),
        Routing(3),
        Routing(2, "softmax"),
        Routing(2, "normalised sigmoid"),
        Routing(2, factor=1.1),
    ],
)
def test_other_routing_than_the_models_is_noticed(
    routing: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("mixtral").config
    layer = Layer(mlp=Experts(config.num_local_experts, config.intermediate_size, routing))
    known = families.known() | {"mixtral": dataclasses.replace(FAMILY, layer=layer)}
    monkeypatch.setattr(families, "known", lambda: known)
    for options in ({}, {"quantize": "int8"}):
        with pytest.raises(
            UnsupportedModelError, match="gives other hidden states than its own modules"
        ):
            from_model(tiny("mixtral", sliding_window=None), **options)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_of_equal_scores_the_first_experts_are_taken(family: str) -> None:
    model = tiny(family)
    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.weight.zero_()
                for (
                    stack
                ) in layer.mlp.experts.parameters():  # all alike: transformers may take any of them
                    stack.copy_(stack[:1].expand_as(stack).clone())
    lm, count = from_model(model), len(PROMPT)
    routing = torch.empty(
        lm.routes.layers, count, model.config.num_experts_per_tok, dtype=torch.int32
    )
    cache, tokens = lm.new_cache(count), torch.tensor(PROMPT)
    lm.run(RowBatch(lm, tokens, torch.arange(count), cache, (0, 0, None)), routing=routing)
    assert (routing == torch.arange(routing.shape[2])).all()


def test_the_control_experts_differ() -> None:
    """A router that is turned round gives other logits."""
    model, tree = tiny("mixtral"), random_tree(17, 17, VOCABULARY, root=3)
    before = native_logits(from_model(model), PROMPT, tree)
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.neg_()
    after = native_logits(from_model(model), PROMPT, tree)
    assert (before - after).abs().max() > 0.1
    assert (after - own_logits(model, PROMPT, tree)).abs().max() < 1e-4 * after.abs().max()


# ---------------------------------------------------------------------------------------------------- counts


@torch.inference_mode()
def counted(lm: NativeLM, tree: TokenTree) -> tuple[int, Tensor, Tensor]:
    """Return the experts of a tree's forward behind PROMPT: how many are distinct, what each row adds, the routing."""
    target, rows = NativeTarget(lm), len(tree)
    target.prefill(PROMPT)
    target.cache.reserve(len(PROMPT) + rows)
    added, (layers, each, _) = torch.full((rows,), -1, dtype=torch.int32), lm.routes
    routing = torch.full((layers, rows, each // layers), -1, dtype=torch.int32)
    where = len(PROMPT), len(PROMPT), tree.ancestors
    batch = RowBatch(lm, tree.tokens, tree.depths + len(PROMPT), target.cache, where)
    lm.run(batch, added=added, routing=routing)
    return lm.experts, added, routing


def new_by_row(routing: Tensor) -> list[int]:
    """Return what each row adds to those before it, from the numbers of its experts."""
    found = [0] * routing.shape[1]
    for layer in routing.tolist():
        seen = set[int]()
        for row, chosen in enumerate(layer):
            found[row] += len(set(chosen) - seen)
            seen |= set(chosen)
    return found


@pytest.mark.parametrize(
    "variant", ["mixtral", "qwen3_moe", "olmoe", "qwen2_moe", "glm4_moe", "gpt_oss"]
)
def test_a_forward_tells_which_experts_it_read(variant: str) -> None:
    lm = from_model(model_of(variant))
    for rows in (1, 2, 33):
        distinct, added, routing = counted(lm, random_tree(rows, rows, VOCABULARY, root=3))
        assert added.tolist() == new_by_row(routing)
        assert distinct == int(added.sum()) == sum(len(layer.unique()) for layer in routing)
        assert int(added[0]) == lm.routes.each
        assert 0 <= int(routing.min()) <= int(routing.max()) < lm.routes.all // lm.routes.layers
        assert torch.equal(routing, routing.sort(-1).values)


def test_the_routing_is_that_of_the_routers_of_transformers() -> None:
    model = model_of("mixtral")
    tree = random_tree(9, 9, VOCABULARY, root=3)
    _, _, routing = counted(from_model(model), tree)
    path = [int(tree.depths.argmax())]
    while path[0]:
        path.insert(0, int(tree.parents[path[0]]))
    ids = torch.tensor([PROMPT + tree.tokens[path].tolist()])
    with torch.inference_mode():
        logits = model(ids, output_router_logits=True).router_logits
    each = routing.shape[2]
    for layer, scores in enumerate(logits):
        wanted = scores[-len(path) :].topk(each).indices.sort(-1).values
        assert torch.equal(routing[layer, path].long(), wanted)


def test_cycles_have_the_count_and_dense_models_have_none() -> None:
    tree = random_tree(12, 12, VOCABULARY, root=3)
    for model in (model_of("olmoe"), tiny("llama")):
        target = NativeTarget(from_model(model))
        target.prefill(PROMPT)
        with torch.inference_mode():
            target.choose(tree)
        assert (target.experts is None) == (target.lm.routes.layers == 0)
        if target.experts is not None:
            assert target.experts.tolist() == counted(target.lm, tree)[1].tolist()
    engine = Engine.from_pretrained(
        model_of("olmoe"), "recycling", policy="fixed", backend="native"
    )
    for cycle in engine.answer([*PROMPT, *PROMPT], max_new_tokens=12):
        assert cycle.experts is not None
        assert len(cycle.experts) == len(cycle.tree)
        assert int(cycle.experts[0]) == engine.target.lm.routes.each
