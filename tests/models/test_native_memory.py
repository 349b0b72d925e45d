"""What a native model of a GGUF file holds in memory: each weight once, packed or where it stands in its file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine.checkpoints.gguf_source import GGUFSource
from specengine.checkpoints.pretrained import open_native
from specengine.errors import CheckpointError
from specengine.models.native import NativeLM, weights
from tests.checkpoints.gguf_files import write_model
from tests.models.native_engines import needs_extension
from tests.models.native_variants import PROMPT, native_logits, tree_of

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]
HIDDEN = 64
MB = 1 << 20


def written(folder: Path, *, kind: str = "q8_0", **options: Any) -> Path:
    return write_model(folder / f"{kind}.gguf", kind=kind, **options)


def loaded(path: Path, dtype: Any = "auto", **options: Any) -> NativeLM:
    return NativeLM(open_native(str(path), dtype=dtype).source, **options)


def packed(path: Path, **options: Any) -> NativeLM:
    """Return the model with all its tables in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "_LOOKED_UP", ())
        return loaded(path, **options)


def logits_of(lm: NativeLM) -> torch.Tensor:
    return native_logits(lm, PROMPT, tree_of(lm.vocab_size))


# ---- tables of which rows are looked up


@pytest.mark.parametrize("numerics", ["bfloat16", "integer"])
@pytest.mark.parametrize("kind", ["q4_0", "q5_0", "q8_0"])
def test_embeddings_without_use_in_the_head_stay_in_their_file(
    kind: str, numerics: str, tmp_path: Path
) -> None:
    path = written(tmp_path, kind=kind)
    lm, whole = loaded(path, numerics=numerics), packed(path, numerics=numerics)
    is_stored = lm.stored == kind
    assert (lm.weight_bytes < whole.weight_bytes) == is_stored
    rows = torch.arange(lm.vocab_size)
    assert torch.equal(lm.embed(rows), whole.embed(rows))
    assert torch.equal(logits_of(lm), logits_of(whole))


@pytest.mark.parametrize(
    ("options", "tied"),
    [({}, True), ({"quantize": "int8"}, False), ({"dtype": torch.float32}, False)],
    ids=["tied", "int8", "float32"],
)
def test_embeddings_that_are_multiplied_or_converted_are_packed(
    options: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    path = written(tmp_path, tied=tied)
    lm, whole = loaded(path, **options), packed(path, **options)
    assert lm.weight_bytes == whole.weight_bytes
    assert torch.equal(logits_of(lm), logits_of(whole))


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwritten(path: Path) -> None:
    data = path.read_bytes()
    with path.open("r+b") as stream:
        stream.write(data[::-1])
    os.utime(path, ns=(1, 1))


def continued(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"more")


@pytest.mark.parametrize("change", [cut_off, overwritten, continued])
def test_a_file_that_changes_in_use_raises(change: Any, tmp_path: Path) -> None:
    path = written(tmp_path)
    lm = loaded(path)
    before = logits_of(lm)
    assert torch.equal(logits_of(lm), before)
    change(path)
    for use in (lambda: logits_of(lm), lambda: lm.embed(torch.tensor([1]))):
        with pytest.raises(CheckpointError, match=rf"{path.name} was changed while its model"):
            use()


def test_a_file_that_is_replaced_or_removed_stays_in_use(tmp_path: Path) -> None:
    path = written(tmp_path)
    lm = loaded(path)
    before = logits_of(lm)
    other = written(tmp_path, kind="q4_0")
    os.replace(other, path)
    assert torch.equal(logits_of(lm), before)
    path.unlink()
    assert torch.equal(logits_of(lm), before)


def test_a_source_forgets_the_vocabulary_and_closes_nothing(tmp_path: Path) -> None:
    path = written(tmp_path)
    opened = open_native(str(path))
    source = opened.source
    assert isinstance(source, GGUFSource)
    assert source.file.metadata == {}
    assert opened.tokenizer()("hello")["input_ids"]
    assert source.tensor("model.norm.weight").shape == (HIDDEN,)


# ---- all of a process

LOADING = """
import json, sys
from pathlib import Path
from specengine import Engine

def size(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

first = Engine.from_pretrained(sys.argv[1], policy="plain")  # after which all is imported
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before, resident = size("RssAnon"), size("VmRSS")
engine = Engine.from_pretrained(sys.argv[2], policy="plain")
engine.generate([1, 2, 3], max_new_tokens=8, temperature=0.0)
held, peak = size("RssAnon") - before, size("VmHWM") - resident
print(json.dumps([engine.target.lm.weight_bytes, held, peak]))
"""


WORDS = 32_000
MATRICES = {
    "attn_q": (512, 512),
    "attn_k": (256, 512),
    "attn_v": (256, 512),
    "attn_output": (512, 512),
    "ffn_gate": (2048, 512),
    "ffn_up": (2048, 512),
    "ffn_down": (512, 2048),
}


def large_file(path: Path) -> Path:
    """Write a model of 70 MB, of eight layers."""
    sizes = {
        "block_count": 8,
        "embedding_length": 512,
        "feed_forward_length": 2048,
        "attention.head_count": 8,
        "attention.head_count_kv": 4,
        "rope.dimension_count": 64,
    }
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("q8_0", (WORDS, 512)),
        "output.weight": ("q8_0", (WORDS, 512)),
        "output_norm.weight": ("f32", (512,)),
    }
    for layer in range(8):
        tensors |= {f"blk.{layer}.{name}.weight": ("q8_0", size) for name, size in MATRICES.items()}
        tensors |= {f"blk.{layer}.{name}_norm.weight": ("f32", (512,)) for name in ("attn", "ffn")}
    metadata = {f"llama.{name}": value for name, value in sizes.items()}
    return write_model(path, metadata=metadata, tensors=tensors)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the memory of Linux")
def test_loading_holds_each_weight_once(tmp_path: Path) -> None:
    """A process grows by the packed weights, and while it loads by the numbers of a layer, in float32, that are tried.

    Held twice, the smallest of tables, heads, layers and float32 layers would pass the limits.
    """
    small = written(tmp_path)
    large = large_file(tmp_path / "large.gguf")
    layer = 4 * sum(rows * columns for rows, columns in MATRICES.values())
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(small), str(large)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    packed_bytes, held, peak = json.loads(done.stdout.splitlines()[-1])
    table = WORDS * 512 // 32 * 34
    assert packed_bytes < large.stat().st_size - 0.9 * table
    assert held < packed_bytes + 10 * MB, f"{held / MB:.1f} of {packed_bytes / MB:.1f} MB"
    assert peak < packed_bytes + 2.5 * layer + 10 * MB, f"{peak / MB:.1f} MB"
