"""Names that are neither on the disk nor on the Hub are refused as what they are, and quickly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specengine.checkpoints import checks
from specengine.engine import Engine
from specengine.errors import InputError
from tests.toy import byte_tokenizer, tiny


class Hub:
    """Answers as it is told, and counts the questions."""

    def __init__(self, answer: bool | Exception) -> None:
        self.answer, self.asked = answer, 0

    def file_exists(self, name: str, file: str) -> bool:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub(ConnectionError("Name or service not known\nand more"))
    monkeypatch.setattr(checks, "file_exists", found.file_exists)
    monkeypatch.setattr(checks, "try_to_load_from_cache", lambda name, file: None)
    return found


@pytest.mark.parametrize(
    "name",
    ["./hd", "../hd", "~/hd", "/no/hd", "a/b/hd", "hd/", "hd.gguf", "hd.safetensors", "a\\hd"],
)
def test_what_looks_like_a_path_is_looked_up_on_the_disk_alone(name: str, away: Hub) -> None:
    assert checks.why_absent(name) == "there is no such file or folder"
    assert away.asked == 0


@pytest.mark.parametrize("name", ["hd", "owner/hd"])
def test_a_name_is_asked_for_once(name: str, away: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    why = checks.why_absent(name)
    assert why == "there is no such folder, and the Hub does not answer (Name or service not known)"
    assert away.asked == 1
    assert "cache does not hold it" in str(checks.why_absent(name, offline=True))
    assert away.asked == 1
    away.answer = False
    assert "no such model on the Hub" in str(checks.why_absent(name))
    away.answer = True
    assert checks.why_absent(name) is None
    monkeypatch.setattr(
        checks, "try_to_load_from_cache", lambda name, file: "/somewhere/config.json"
    )
    away.asked = 0
    assert checks.why_absent(name) is None
    assert away.asked == 0


def test_what_is_on_the_disk_is_there(tmp_path: Path, away: Hub) -> None:
    assert checks.why_absent(str(tmp_path)) is None
    assert away.asked == 0


@pytest.mark.parametrize("draft", ["hd", "owner/hd", "./hd", Path("nowhere/at/all")])
def test_a_draft_that_is_not_there_is_refused_as_a_draft_before_anything_is_loaded(
    draft: Any, away: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "specengine.engine.loading.load_model", lambda *_: pytest.fail("the target was loaded")
    )
    with pytest.raises(
        InputError, match=rf"^draft: got '{draft}', accepted .*there is no such"
    ) as refused:
        Engine.from_pretrained(None, draft)
    assert "model '" not in str(refused.value)


def test_a_draft_that_is_there_is_taken(tmp_path: Path, away: Hub) -> None:
    tiny(seed=1).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    engine = Engine.from_pretrained(str(tmp_path), tmp_path)
    assert "small_model" in str(engine.drafter and engine.drafter.name)
    assert away.asked == 0


@pytest.mark.parametrize("model", ["hd", "owner/hd", "./hd", "nowhere/hd.gguf"])
@pytest.mark.parametrize("backend", [None, "huggingface"])
def test_a_model_that_is_not_there_is_asked_for_once(
    model: str, backend: str | None, away: Hub
) -> None:
    with pytest.raises(
        InputError, match=rf"^model: got '{model}', accepted a path or a Hub id; there is no such"
    ):
        Engine.from_pretrained(model, "none", backend=backend)
    assert away.asked <= 1
