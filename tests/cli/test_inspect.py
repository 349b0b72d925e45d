"""`specengine doctor --inspect`: what is installed, a model, a head and how it is read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import specengine
from specengine.checkpoints.eagle import Convention
from specengine.cli import inspection, main


def test_inspect_lists_what_there_is(capsys: Any) -> None:
    assert main(["doctor", "--inspect"]) == 0
    out = capsys.readouterr().out
    for word in (
        "transformers",
        "reference",
        "eagle",
        "width=10 expansions=7 budget=60",
        "ngram",
        "3,2,1,1,1",
        "cache",
    ):
        assert word in out


def test_inspect_counts_ops_and_lists_them_when_asked(capsys: Any) -> None:
    assert main(["doctor", "--inspect"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.index("policies") - lines.index("backends") <= 8, (
        "policies are not buried beneath the ops"
    )
    assert re.search(r" for \d+ ops.* \(--ops lists them\)", lines[lines.index("backends") + 1])
    assert main(["doctor", "--inspect", "--ops"]) == 0
    assert re.search(
        r"cpu tree_mask +name: \w+; reason: .+; available: .*reference\n", capsys.readouterr().out
    )


def test_inspect_json_describes_a_model(folder: str, capsys: Any) -> None:
    assert main(["doctor", "--inspect", "--json", "--model", folder]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["specengine"] == specengine.__version__
    assert (
        found["backends"]["cpu"]["tree_mask"]["name"]
        in found["backends"]["cpu"]["tree_mask"]["available"]
    )
    assert found["policies"]["eagle"]["options"] == {"width": 10, "expansions": 7, "budget": 60}
    assert found["drafters"]["ngram"]["default policy"]["name"] == "auto"
    model = found["model"]
    assert (model["type"], model["layers"], model["vocabulary"], model["context"]) == (
        "llama",
        2,
        260,
        2048,
    )
    assert 1 <= model["answers at once"] <= 8
    assert (model["attention"], model["packed copy"], model["chat template"]) == (
        "native",
        False,
        True,
    )
    assert re.fullmatch(r"native \(\w+, float32, \d+ MB of weights as f32\)", model["backend"])
    assert model["numerics"] == "float32"
    assert main(["doctor", "--inspect", "--model", folder]) == 0
    assert re.search(r"chat template +yes\n", capsys.readouterr().out)


def test_inspect_says_why_it_is_not_the_native_forward(folder: str, capsys: Any) -> None:
    assert (
        main(["doctor", "--inspect", "--json", "--model", folder, "--backend", "huggingface"]) == 0
    )
    model = json.loads(capsys.readouterr().out)["model"]
    assert (model["attention"], model["backend"]) == (
        "tree",
        "huggingface (backend='huggingface' was asked for)",
    )
    assert model["numerics"] == model["dtype"]


@pytest.mark.parametrize(("make", "state"), [(False, "not there yet"), (True, "damaged")])
def test_inspect_says_whether_the_embedded_model_is_there(
    capsys: Any, monkeypatch: Any, tmp_path: Path, make: bool, state: str
) -> None:
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path))
    if make:
        name = f"{specengine.checkpoints.embedded.NAME}-gguf"
        (tmp_path / "models" / name).mkdir(parents=True)
    assert main(["doctor", "--inspect", "--json"]) == 0
    cache = json.loads(capsys.readouterr().out)["cache"]
    assert cache["folder"] == str(tmp_path)
    assert cache[specengine.checkpoints.embedded.NAME].startswith(state)


def test_inspect_describes_a_head(folder: str, head: str, capsys: Any) -> None:
    assert main(["doctor", "--inspect", "--json", "--model", folder, "--draft", head]) == 0
    draft = json.loads(capsys.readouterr().out)["draft"]
    assert draft["dialect"] == "EAGLE-3, official layout, fields as specforge means them"
    assert "fc.weight float32 [32, 96]" in draft["tensors"]
    assert "head_dim=8" in draft["config"]
    assert re.fullmatch(r"0\.\d{3} with hidden states 0, 1, 1", draft["agreement"]["as read"])
    assert main(["doctor", "--inspect", "--model", folder, "--draft", head]) == 0
    assert re.search(
        r"agreement +as read: 0\.\d{3} with hidden states 0, 1, 1(;|\n)", capsys.readouterr().out
    )


def test_inspect_warns_of_layers_that_are_counted_otherwise(
    folder: str, head: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits = torch.arange(100) % 2 == 0
    measured = [
        Convention("as read", (0, 1, 1), hits),
        Convention("as read, + 1", (1, 2, 2), torch.ones_like(hits)),
    ]
    monkeypatch.setattr(inspection, "one_step_agreement", lambda *_: measured)
    assert main(["doctor", "--inspect", "--model", folder, "--draft", head]) == 0
    assert capsys.readouterr().err == (
        "specengine: warning: the draft agrees with the target more often (1.000 instead of 0.500) when it reads "
        "hidden states 1, 2, 2 instead of 0, 1, 1; pass --draft-option layer_ids=1,2,2\n"
    )


def test_inspect_shows_a_head_of_another_model_without_measuring_it(
    folder: str, head: str, capsys: Any
) -> None:
    assert (
        main(
            [
                "doctor",
                "--inspect",
                "--model",
                folder,
                "--draft",
                head,
                "--draft-option",
                "layer_ids=2,16,29",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert "fc.weight" in out
    assert "agreement" not in out
    assert (
        "hidden states 2, 16, 29; a target of 2 layers has 0 to 1 before its final norm; its agreement"
        in err
    )


def test_inspect_refuses_what_is_no_head(folder: str, capsys: Any) -> None:
    assert main(["doctor", "--inspect", "--model", folder, "--draft", folder]) == 2
    assert "accepted a folder or Hub id of an EAGLE head" in capsys.readouterr().err
