"""Folders of models with other files in them: what transformers makes of the folder, or a refusal."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from specengine import Engine
from specengine.errors import SpecEngineError
from tests.fuzz.living import check_greedy, dtypes_of
from tests.fuzz.outcomes import ANSWERED, Finding, Outcome, first_line, refused
from tests.toy import byte_tokenizer, tiny

Case = tuple[Any, Callable[[], Outcome]]
PROMPT, TOKENS = [7, 3, 9, 7, 3], 6
ADAPTED = ("q_proj", "v_proj", "down_proj")
DAMAGED = ("", "{", "null", "[]", '"x"', "\x00\x01\x02")
# keys of published generation configs that are no transformers' own, neutral, odd, or end an answer
GENERATION_KEYS: dict[str, tuple[Any, ...]] = {
    "chat_format": ("chatml",),
    "user_token_id": (195,),
    "trust_remote_code": (True,),
    "renormalize_logits": (True, False, None),
    "remove_invalid_values": (True,),
    "begin_suppress_tokens": ([], None),
    "suppress_tokens": ([], None),
    "output_scores": (True,),
    "return_dict_in_generate": (False,),
    "eos_token_id": ([*range(60, 200)], -1, None),
    "pad_token_id": (0, -1, None),
    "do_sample": (True, False),
    "temperature": (0.7, 1.0, None),
    "top_k": (-1, 0, 50, None),
    "top_p": (0.8, 1.0, None),
    "num_beams": (1,),
    "repetition_penalty": (1.0, 1.3, None),
    "no_repeat_ngram_size": (0, 2, None),
    "max_length": (20, 10**9),
    "transformers_version": ("4.31.0", None, 4),
    "_from_model_config": (True,),
    "x": (None, 1, {"y": []}),
}


def folders(place: Any, pick: random.Random) -> Case:
    """Make a folder in which one to three files are added, replaced or changed."""
    extras = [
        [pick.choice(sorted(EXTRAS)), pick.randrange(2**31)]
        for _ in range(pick.choice((1, 1, 2, 3)))
    ]
    options = {
        "backend": pick.choice((None, None, "native", "huggingface")),
        "dtype": pick.choice(("auto", "float32")),
    }
    given = {
        "family": pick.choice(("llama", "qwen3", "gpt_neox")),
        "extras": extras,
        "options": options,
    }
    if given["family"] == "gpt_neox" and options["backend"] == "native":
        options["backend"] = None
    return given, lambda: _asked(place, given)


def _asked(place: Any, given: dict[str, Any]) -> Outcome:
    with tempfile.TemporaryDirectory(dir=place.folder) as made:
        folder = Path(made) / given["family"]
        shutil.copytree(_sound(place.folder, given["family"]), folder)
        for name, seed in given["extras"]:
            with contextlib.suppress(ValueError):  # a config that another change has cut short
                EXTRAS[name](folder, random.Random(seed))
        try:
            options = {"offline": True, "progress": str, **given["options"]}
            engine = Engine.from_pretrained(str(folder), "ngram", "chain", **options)
            found = engine.generate(PROMPT, max_new_tokens=TOKENS, temperature=0.0).token_ids
        except SpecEngineError as error:
            return refused(error)
        model = _of_transformers(folder, given["options"]["dtype"])
        if found != (expected := _answer(model)):
            if dtypes_of(model) == {torch.float32}:
                raise Finding(f"another answer than transformers': {found}, not {expected}")
            check_greedy(model, PROMPT, found)
        return Outcome(ANSWERED)


def _of_transformers(folder: Path, dtype: str) -> PreTrainedModel:
    """The model that transformers loads from there; Finding where it loads none."""
    try:
        return AutoModelForCausalLM.from_pretrained(
            str(folder), local_files_only=True, dtype=dtype
        ).eval()
    except Exception as error:
        raise Finding(
            f"an answer, though transformers loads no model: {first_line(error)}"
        ) from error


def _answer(model: PreTrainedModel) -> list[int]:
    ids, options = (
        torch.tensor([PROMPT]),
        {"do_sample": False, "pad_token_id": 0, "max_new_tokens": TOKENS},
    )
    out: Any = model.generate(
        ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=False, **options
    )
    return out[0, len(PROMPT) :].tolist()


def _sound(folder: Path, family: str) -> Path:
    made = folder / f"sound-{family}"
    if not made.is_dir():
        tiny(family).save_pretrained(made)
        byte_tokenizer().save_pretrained(made)
    return made


# ---- what is added or changed


def _other_weights(folder: Path, pick: random.Random) -> dict[str, Tensor]:
    """Return other weights with the names and shapes of the folder's own."""
    draw = torch.Generator().manual_seed(pick.randrange(2**31))
    return {
        name: torch.randn(like.shape, generator=draw) * 0.4
        for name, like in _own_weights(folder).items()
    }


def _own_weights(folder: Path) -> dict[str, Tensor]:
    """Return the folder's original weights, whatever other changes did to them."""
    return load_file(_sound(folder.parents[1], folder.name) / "model.safetensors")


def _write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.is_dir():
        file.write_text(content if isinstance(content, str) else json.dumps(content))


def _remove(file: Path) -> None:
    if file.is_file():
        file.unlink()


def _adapter(folder: Path, pick: random.Random) -> None:
    """Sound, without its weights, with damaged ones, or of another shape or kind."""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": pick.choice(("CAUSAL_LM", None)),
        "r": 2,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "target_modules": [pick.choice(ADAPTED)],
        "base_model_name_or_path": pick.choice((str(folder), "somebody/else", None)),
        "inference_mode": True,
        "bias": "none",
    }
    if pick.random() < 0.15:
        config["peft_type"] = pick.choice(("IA3", "PREFIX_TUNING", "x"))
    _write(folder / "adapter_config.json", pick.choice(DAMAGED) if pick.random() < 0.2 else config)
    if pick.random() < 0.2:
        return
    names = [
        name
        for name in _other_weights(folder, pick)
        if name.endswith(f"{config['target_modules'][0]}.weight")
    ]
    state, weights = {}, _own_weights(folder)
    for name in names:
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        outputs, inputs = weights[name].shape
        state[f"{stem}.lora_A.weight"] = torch.randn(2, inputs + (pick.random() < 0.1))
        state[f"{stem}.lora_B.weight"] = torch.randn(outputs, 2)
    if pick.random() < 0.8:
        save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(state, folder / "adapter_model.bin")


def _adapter_alone(folder: Path, pick: random.Random) -> None:
    _adapter(folder, pick)
    for name in ("config.json", "model.safetensors"):
        if pick.random() < 0.7:
            _remove(folder / name)


def _other_safetensors(folder: Path, pick: random.Random) -> None:
    names = ("model2.safetensors", "consolidated.safetensors", "adapter_model.safetensors", "model.fp32.safetensors",
             "model-00001-of-00001.safetensors", "model-00001-of-00002.safetensors", ".model.safetensors",
             "pytorch_model.safetensors", "original/model.safetensors", "Model.safetensors")  # fmt: skip
    file = folder / pick.choice(names)
    file.parent.mkdir(exist_ok=True)
    save_file(_other_weights(folder, pick), file, metadata={"format": "pt"})


def _index(folder: Path, pick: random.Random) -> None:
    """Beside the weights: of another file, of the same, damaged, or of files that are not there."""
    state = _other_weights(folder, pick)
    shard = pick.choice(
        ("model-00001-of-00001.safetensors", "model.safetensors", "other.safetensors")
    )
    content: Any = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(state, shard)}
    if pick.random() < 0.3:
        content = pick.choice((*DAMAGED, {}, {"weight_map": {}}, {"weight_map": {"x": "y"}}))
    elif shard != "model.safetensors" and pick.random() < 0.7:
        save_file(state, folder / shard, metadata={"format": "pt"})
    _write(
        folder / pick.choice(("model.safetensors.index.json", "pytorch_model.bin.index.json")),
        content,
    )
    if pick.random() < 0.3:
        _remove(folder / "model.safetensors")


def _pickled(folder: Path, pick: random.Random) -> None:
    """Other weights beside safetensors, or alone."""
    torch.save(_other_weights(folder, pick), folder / "pytorch_model.bin")
    if pick.random() < 0.5:
        _remove(folder / "model.safetensors")


def _quantization(folder: Path, pick: random.Random) -> None:
    settings: dict[str, Any] = {
        "quant_method": pick.choice(
            ("gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors", "x", None)
        ),
        "bits": 4,
        "load_in_4bit": True,
    }
    name = pick.choice(
        ("quantize_config.json", "quant_config.json", "hf_quant_config.json", "config.json")
    )
    if name == "config.json" and (folder / name).is_file() and (folder / name).stat().st_size > 500:
        settings = json.loads((folder / name).read_text()) | {
            "quantization_config": pick.choice((settings, {}, None))
        }
    _write(folder / name, settings)


def _generation_config(folder: Path, pick: random.Random) -> None:
    names = pick.sample(sorted(GENERATION_KEYS), pick.choice((1, 2, 4)))
    content: Any = {name: pick.choice(GENERATION_KEYS[name]) for name in names}
    _write(
        folder / "generation_config.json", pick.choice(DAMAGED) if pick.random() < 0.1 else content
    )


def _template(folder: Path, pick: random.Random) -> None:
    texts = (
        "",
        "{{ messages[0].content }}",
        "{% if",
        "{{ raise_exception('no') }}",
        "\ufeffx",
        "{{ 1/0 }}",
    )
    names = (
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "chat_template.json",
    )
    _write(folder / pick.choice(names), pick.choice(texts))


def _small_file(folder: Path, pick: random.Random) -> None:
    """Hidden, empty, or of what else a download leaves."""
    names = (".gitattributes", ".config.json", ".cache/huggingface/x.lock", "README.md", "model.gguf", "x.gguf",
             "empty.safetensors", "tf_model.h5", "flax_model.msgpack", "onnx/model.onnx", "model.safetensors.lock",
             "training_args.bin", "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json", "modeling.py",
             "preprocessor_config.json", "config.json.bak", "1_Pooling/config.json", "custom_generate/generate.py",
             "params.json", "consolidated.00.pth", "special_tokens_map.json")  # fmt: skip
    _write(folder / pick.choice(names), pick.choice(("", "{}", "x")))


def _emptied(folder: Path, pick: random.Random) -> None:
    """Make one of the folder's files empty, truncated, a folder, or missing."""
    file = folder / pick.choice(
        ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json")
    )
    content, how = file.read_bytes() if file.is_file() else b"", pick.randrange(4)
    _remove(file)
    if how == 0:
        file.mkdir(exist_ok=True)
    elif how < 3 and not file.is_dir():
        file.write_bytes(content[: how * len(content) // 3])


def _config(folder: Path, pick: random.Random) -> None:
    changed: dict[str, Any] = {
        "tie_word_embeddings": True,
        "dtype": pick.choice(("float16", "bfloat16", "float64", "int8")),
        "torch_dtype": "bfloat16",
        "eos_token_id": pick.choice(([*range(60, 200)], 7)),
        "num_hidden_layers": pick.choice((1, 3)),
        "vocab_size": pick.choice((100, 300)),
        "architectures": pick.choice(
            (["LlamaModel"], ["LlamaForSequenceClassification"], [], None)
        ),
        "use_cache": False,
        "is_decoder": False,
        "attention_bias": True,
        "pretraining_tp": 2,
    }
    name, file = pick.choice(sorted(changed)), folder / "config.json"
    if file.is_file() and file.stat().st_size > 500:  # and neither gone nor cut short
        _write(file, json.loads(file.read_text()) | {name: changed[name]})


def _stored_otherwise(folder: Path, pick: random.Random) -> None:
    """The same tensors: some in another dtype, under other names, some gone, or others beside them."""
    file = folder / "model.safetensors"
    state = _own_weights(folder)
    name, how = pick.choice(sorted(state)), pick.randrange(6)
    if how == 0:
        state[name] = state[name].to(pick.choice((torch.float64, torch.float16, torch.int8)))
    elif how == 1:
        state["x." + name] = state.pop(name)
    elif how == 2:
        state = {
            f"{pick.choice(('module.', '_orig_mod.', 'base_model.model.'))}{key}": state[key]
            for key in state
        }
    elif how == 3:
        del state[name]
    elif how == 4:
        state |= {
            "x": torch.zeros(1),
            name.replace("weight", "bias"): torch.ones(state[name].shape[0]),
        }
    else:
        state = {key.removeprefix("model."): tensor for key, tensor in state.items()}
    if not file.is_dir():
        save_file(state, file, metadata={"format": "pt"} if pick.random() < 0.7 else None)


EXTRAS: dict[str, Callable[[Path, random.Random], None]] = {
    extra.__name__.strip("_"): extra
    for extra in (
        _adapter, _adapter_alone, _other_safetensors, _index, _pickled, _quantization, _generation_config, _template,
        _small_file, _emptied, _config, _stored_otherwise,
    )
}  # fmt: skip
