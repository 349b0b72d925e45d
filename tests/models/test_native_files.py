"""Models from files under both backends: folders of safetensors, GGUF files, and what is wrong with damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine import Engine
from specengine.checkpoints import gguf
from specengine.errors import CheckpointError, InputError, UnsupportedModelError
from specengine.models.huggingface import HuggingFaceTarget
from specengine.models.native import NativeLM, NativeTarget
from tests.checkpoints.gguf_files import write_model
from tests.models.native_engines import FAMILIES, needs_extension, plainly
from tests.models.native_variants import PROMPT, write_gguf
from tests.toy import byte_tokenizer, tiny

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]
BACKENDS = (None, "native", "huggingface")


def loaded(path: Path, draft: Any = "none", **options: Any) -> Engine:
    return Engine.from_pretrained(str(path), draft, offline=True, **options)


def answer(engine: Engine, count: int = 16, **options: Any) -> list[int]:
    return engine.generate(PROMPT, max_new_tokens=count, **options).token_ids


# ---------------------------------------------------------------------------------------------------- folders


@pytest.mark.parametrize("shard", ["1GB", "10KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_answers_as_transformers_does(family: str, shard: str, tmp_path: Path) -> None:
    model = tiny(family, tie_word_embeddings=family == "qwen2")
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "10KB")
    engine = loaded(tmp_path)
    assert isinstance(engine.target, NativeTarget)
    assert answer(engine) == plainly(model, PROMPT, 16)


def test_transformers_model_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    tiny("qwen3").save_pretrained(tmp_path)
    engine = loaded(tmp_path, dtype="bfloat16")
    answer(engine)
    assert "model" not in vars(engine.target.lm)
    model = engine.target.model
    assert engine.target.model is model
    assert (model.dtype, type(model).__name__) == (torch.bfloat16, "Qwen3ForCausalLM")
    for name, weight in tiny("qwen3").named_parameters():
        assert torch.equal(model.get_parameter(name), weight.bfloat16())


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
def test_the_dtype_is_the_stored_one_also_where_the_config_says_none(
    stored: torch.dtype, tmp_path: Path
) -> None:
    tiny().to(stored).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for backend in BACKENDS:
        assert loaded(tmp_path, backend=backend).target.dtype is stored
    assert loaded(tmp_path, dtype="float32").target.dtype is torch.float32


def test_a_stored_head_beside_tied_embeddings(tmp_path: Path) -> None:
    """Some files hold the embeddings twice; where both differ, transformers does not tie them."""
    model = tiny(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for head, native in (
        (tensors["model.embed_tokens.weight"].clone(), True),
        (tiny(seed=9).lm_head.weight, False),
    ):
        save_file(
            tensors | {"lm_head.weight": head.detach()},
            tmp_path / "model.safetensors",
            {"format": "pt"},
        )
        engine = loaded(tmp_path)
        assert isinstance(engine.target, NativeTarget) == native
        assert answer(engine) == answer(loaded(tmp_path, backend="huggingface"))


def test_other_kinds_of_weights_go_through_transformers(tmp_path: Path) -> None:
    model = tiny()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    engine = loaded(tmp_path)
    assert isinstance(engine.target, HuggingFaceTarget)
    assert "has no safetensors file" in engine.target.backend
    assert answer(engine) == plainly(model, PROMPT, 16)


# ---------------------------------------------------------------------------------------------------- damaged folders


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _written(data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors").write_bytes(data) and None


def _without(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _narrow(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _config(changes: dict[str, Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut off": (_cut, "damaged, fetch"),
    "empty": (_written(b""), "damaged, fetch"),
    "zeros": (_written(bytes(500)), "damaged, fetch"),
    "text": (
        _written(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"),
        "damaged, fetch",
    ),
    "a missing tensor": (_without, r"up_proj\.weight"),
    "another shape": (_narrow, r"model\.norm\.weight"),
    "a wider config": (
        _config({"intermediate_size": 64}),
        r"another shape.*down_proj|tensors differ.*down_proj",
    ),
    "more layers": (_config({"num_hidden_layers": 3}), r"model\.layers\.2"),
    "odd heads": (_config({"head_dim": 7}), r"even|another shape.*k_proj"),
    "an epsilon of text": (_config({"rms_norm_eps": "small"}), "rms_norm_eps"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_folder_is_an_error_that_names_it(
    case: str, backend: str | None, tmp_path: Path
) -> None:
    tiny().save_pretrained(tmp_path)
    damage, message = DAMAGE[case]
    damage(tmp_path)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        loaded(tmp_path, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_damaged_set_of_shards_is_an_error(backend: str | None, tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path, max_shard_size="10KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="damaged, fetch"):
        loaded(tmp_path, backend=backend)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"are missing, fetch them: {shard.name}"):
        loaded(tmp_path, backend=backend)
    index = tmp_path / "model.safetensors.index.json"
    for text in (
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
    ):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=f"{index.name}: is damaged, fetch it again"):
            loaded(tmp_path, backend=backend)


# ---------------------------------------------------------------------------------------------------- GGUF


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", "llama", "q4_1")


def test_both_backends_answer_the_same_in_float32(file: Path) -> None:
    engines = {
        backend: loaded(file, dtype="float32", backend=backend)
        for backend in ("native", "huggingface")
    }
    assert isinstance(engines["native"].target, NativeTarget)
    assert isinstance(engines["huggingface"].target, HuggingFaceTarget)
    for options in ({}, {"temperature": 0.9, "seed": 6}):
        assert answer(engines["native"], **options) == answer(engines["huggingface"], **options)
    text = "hello w 12"
    texts = [engine.generate(text, max_new_tokens=8, raw=True).text for engine in engines.values()]
    assert texts[0] == texts[1]
    assert engines["native"].tokenizer.get_vocab() == engines["huggingface"].tokenizer.get_vocab()


def test_by_default_its_blocks_stay_packed(file: Path) -> None:
    engine = loaded(file)
    assert engine.target.backend.endswith("MB of weights as q4_1)")
    assert (engine.target.name, engine.target.dtype) == ("model.gguf", torch.bfloat16)
    assert "model" not in vars(engine.target.lm)
    drafted = Engine(engine.target, None, None)
    assert answer(drafted) == answer(engine)
    for dtype in ("float16", "bfloat16"):
        other = loaded(file, dtype=dtype, backend="huggingface")
        assert (other.target.backend, other.target.dtype) == (
            "huggingface (backend='huggingface' was asked for)",
            getattr(torch, dtype),
        )
    assert engine.target.model.dtype is torch.bfloat16
    assert isinstance(loaded(file, pack=False).target, HuggingFaceTarget)


@pytest.mark.parametrize("kind", ["nvfp4", "q1_0", "q2_0"])
def test_types_without_products_are_made_bfloat16(kind: str, tmp_path: Path) -> None:
    scaled = {"output.scale": np.array([0.3], np.float32)} if kind == "nvfp4" else {}
    path = write_gguf(tmp_path / "model.gguf", "llama", kind, more=scaled)
    engines = [loaded(path, dtype="float32", backend=name) for name in ("native", "huggingface")]
    assert answer(engines[0]) == answer(engines[1])
    engine = loaded(path)
    assert isinstance(engine.target, NativeTarget)
    assert engine.target.backend.endswith("MB of weights as bf16)")
    with gguf.read(path) as file:
        head = torch.from_numpy(file.numbers("output.weight")).bfloat16()
    assert torch.equal(engine.target.model.lm_head.weight, head)
    assert answer(Engine(engine.target, None, None)) == answer(engine)


def test_a_file_is_a_draft_too(file: Path) -> None:
    engine = loaded(file, str(file), policy="eagle", lookup=False)
    assert isinstance(engine.drafter.lm, NativeLM)
    result = engine.generate(PROMPT, max_new_tokens=12)
    assert result.token_ids == answer(loaded(file), 12)
    assert result.stats.num_accepted_draft_tokens >= 8


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"the header reaches to byte 4, and the file has 0: it is cut off or damaged"),
        (b"hello, I am a text\n" * 9, r"is not a GGUF file: it begins with b'hell'"),
        (b"GGUX" + bytes(96), r"is not a GGUF file: it begins with b'GGUX'"),
        (b"GGUF\x09" + bytes(96), r"has GGUF version 9: only 2 and 3 are read"),
    ],
    ids=["empty", "text", "magic", "version"],
)
def test_what_is_no_gguf_file_is_named(
    data: bytes, message: str, backend: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "model.GGUF"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        loaded(path, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.999])
def test_a_file_that_is_cut_off_is_named(
    share: float, backend: str | None, file: Path, tmp_path: Path
) -> None:
    whole, path = file.read_bytes(), tmp_path / "cut"  # known by its magic, whatever its name
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(CheckpointError, match="cut"):
        loaded(path, backend=backend)


def test_a_file_that_lacks_a_tensor_or_is_none(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", tensors={"blk.1.ffn_up.weight": None})
    for backend in BACKENDS:
        with pytest.raises(CheckpointError, match=r"missing: blk\.1\.ffn_up\.weight"):
            loaded(path, backend=backend)
        with pytest.raises(InputError, match=r"model: got .*other\.gguf', .*there is no such file"):
            loaded(tmp_path / "other.gguf", backend=backend)


def test_a_file_of_another_architecture_is_refused_by_its_name(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", metadata={"general.architecture": None})
    data = path.read_bytes().replace(b"llama", b"bloom")
    path.write_bytes(data)
    for backend in BACKENDS:
        with pytest.raises(
            UnsupportedModelError,
            match=r"has architecture 'bloom'; accepted in GGUF files: .*llama",
        ):
            loaded(path, backend=backend)


def test_a_folder_with_a_tokenizer_chats(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    engine = loaded(tmp_path, "ngram")
    result = engine.generate("Hello, hello", max_new_tokens=10)
    assert result.token_ids == plainly(tiny(), engine.stream("Hello, hello").prompt, 10)
    assert result.text == byte_tokenizer().decode(result.token_ids, skip_special_tokens=True)
