"""Draft heads whose matrices are stored as blocks of a few bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file

from research.pack_head import main, pack_head
from specengine.checkpoints.eagle import is_head, load_head, save_head
from specengine.errors import CheckpointError, InputError
from tests.toy import head_config, random_state

SIZES = {"hidden_size": 64, "target_hidden_size": 64, "head_dim": 32, "intermediate_size": 96}


@pytest.fixture
def head(tmp_path: Path) -> Path:
    config = head_config(num_heads=2, num_kv_heads=1, **SIZES)
    save_head(config, random_state(config), tmp_path / "whole")
    (tmp_path / "whole" / "target.json").write_text("{}")
    return tmp_path / "whole"


@pytest.mark.parametrize(("matrices", "vocabulary"), [("Q5_0", "Q4_0"), ("Q8_0", "Q8_0")])
def test_blocks_are_read_as_ggml_means_them(
    head: Path, tmp_path: Path, matrices: str, vocabulary: str
) -> None:
    out = tmp_path / "packed"
    main([str(head), str(out), "--matrices", matrices, "--vocabulary", vocabulary])
    assert is_head(out)
    whole, read = load_head(head), load_head(out)
    assert read.config == whole.config
    assert (out / "target.json").read_text() == "{}"
    assert read.state.keys() == whole.state.keys()
    for name, tensor in whole.state.items():
        if tensor.ndim == 2:
            kind = GGMLQuantizationType[vocabulary if name == "lm_head.weight" else matrices]
            blocks = quants.quantize(tensor.float().numpy(), kind)
            expected = torch.from_numpy(quants.dequantize(blocks, kind)).bfloat16()
            assert torch.equal(read.state[name], expected)
            assert not torch.equal(read.state[name], tensor)
        else:
            assert torch.equal(read.state[name], tensor)
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (head, out)]
    assert sizes[1] < 0.6 * sizes[0]


@pytest.mark.parametrize("damage", ["cut", "flat", "twice", "unknown"])
def test_damaged_blocks_are_named(head: Path, tmp_path: Path, damage: str) -> None:
    out = pack_head(head, tmp_path / "packed")
    tensors = load_file(out / "model.safetensors")
    blocks = tensors.pop("fc.weight.Q5_0")
    kind = "Q7_0" if damage == "unknown" else "Q5_0"
    tensors[f"fc.weight.{kind}"] = {"cut": blocks[:, 1:].clone(), "flat": blocks[0]}.get(
        damage, blocks
    )
    if damage == "twice":
        tensors["fc.weight"] = torch.zeros(64, 192)
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        load_head(out)


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    config = head_config()
    save_head(config, random_state(config), tmp_path / "whole")
    with pytest.raises(InputError, match="multiple of 32"):
        pack_head(tmp_path / "whole", tmp_path / "packed")
