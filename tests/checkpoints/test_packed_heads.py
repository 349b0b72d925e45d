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
from specengine.train.text.corpus import Corpus, Text
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


def test_the_tokens_of_answers_are_kept(tmp_path: Path) -> None:
    config = head_config(num_heads=2, num_kv_heads=1, draft_vocab_size=40, **SIZES)
    save_head(
        config,
        random_state(config) | {"d2t": torch.full((40,), 5)},
        tmp_path / "whole",
    )
    corpus = Corpus.create(tmp_path / "text", {})
    tokens = torch.tensor([44, 44, 7, 9, 9, 20, 30, 30], dtype=torch.int32)
    corpus.add(0, [Text(tokens, torch.tensor([True] * 6 + [False] * 2))])
    out, folders = tmp_path / "packed", [str(tmp_path / "whole"), str(tmp_path / "packed")]
    with pytest.raises(InputError, match="keep: got 41, accepted 1 to 40"):
        main([*folders, "--keep", "41", "--data", str(tmp_path / "text")])
    main([*folders, "--keep", "4", "--data", str(tmp_path / "text"), "--vocabulary", "Q8_0"])
    whole, read = load_head(tmp_path / "whole"), load_head(out)
    assert read.config.draft_vocab_size == 4
    assert (read.state["d2t"] + torch.arange(4)).tolist() == [7, 9, 20, 44]
    rows = whole.state["lm_head.weight"][[2, 4, 15, 39]].float()
    assert (read.state["lm_head.weight"].float() - rows).abs().max() < 0.01 * rows.abs().max()


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
