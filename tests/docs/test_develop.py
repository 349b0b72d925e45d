"""docs/develop: the policy and the drafter that it shows are files that work, eagerly and captured."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specengine import Engine, drafters, policies
from specengine.engine.captured import NOTE
from specengine.errors import InputError
from tests.graphs.engines import PROMPT, engine_of, frozen, model

PAGES = Path(__file__).parents[2] / "docs" / "develop"
TESTS = Path(__file__).parents[1]
TEXT = (PAGES / "policy.md").read_text() + (PAGES / "drafter.md").read_text()
FILES = dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', TEXT, re.DOTALL))
POLICY, DRAFTER = "specengine/policies/comb.py", "specengine/drafters/embedding.py"

pytestmark = pytest.mark.usefixtures("one_thread", "new_files")


def add(package: ModuleType, folder: Path, name: str, text: str, patch: pytest.MonkeyPatch) -> None:
    """Make this text the file `name` of the package, for as long as the patch holds."""
    own = folder / package.__name__ / name
    own.mkdir(parents=True)
    (own / f"{name}.py").write_text(text)
    patch.setattr(package, "__path__", [*package.__path__, str(own)])
    module = f"{package.__name__}.{name}"
    patch.setitem(sys.modules, module, None)  # so that it is forgotten in the end
    del sys.modules[module]


@pytest.fixture
def new_files(tmp_path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for package, file in ((policies, POLICY), (drafters, DRAFTER)):
            add(package, tmp_path, Path(file).stem, FILES[file], patch)
        yield


def answers(engine: Engine, **options: Any) -> tuple[list[int], list[list[int]], list[str]]:
    """Tokens, those of every cycle's tree, and what the engine notes."""
    generation = engine.stream(PROMPT, max_new_tokens=24, **options)
    trees = [piece.cycle.tree.tokens.tolist() for piece in generation]
    assert generation.result is not None
    return generation.result.token_ids, trees, generation.stats.notes


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "sampled"]
)
def test_they_draft_the_same_eagerly_and_captured(options: dict[str, Any]) -> None:
    plain = answers(
        Engine.from_pretrained(model(), policy="plain", backend="huggingface"), **options
    )
    eager = answers(
        Engine.from_pretrained(model(), "embedding", "comb", backend="huggingface"), **options
    )
    with frozen():
        graphs = answers(
            Engine.from_pretrained(model(), "embedding", "comb", graphs=True), **options
        )
    assert plain[0] == eager[0] == graphs[0]
    assert eager[1] == graphs[1]
    assert {len(tree) for tree in eager[1]} == {13}
    assert NOTE in graphs[2]
    assert NOTE not in eager[2]


@pytest.mark.parametrize("draft", ["small_model", "eagle3"])
def test_the_policy_runs_captured_with_every_draft(draft: str) -> None:
    policy = policies.make("comb", teeth=2, passes=3)
    eager = answers(engine_of(draft, policy, captured=False))
    with frozen():
        assert answers(engine_of(draft, policy, captured=True))[:2] == eager[:2]


def test_the_drafter_runs_with_other_policies_and_on_the_native_forward() -> None:
    for policy in (None, "salf/cpu", "fixed"):
        engine = Engine.from_pretrained(model(), "embedding", policy)
        assert engine.drafter is not None
        assert engine.drafter.name == "embedding"
        assert answers(engine)[0] == answers(Engine(engine.target, None, None))[0]


def test_a_drafter_that_is_not_captured_drafts_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = FILES[DRAFTER].replace("CapturedDrafter", "Drafter")
    assert text != FILES[DRAFTER]
    add(
        drafters,
        tmp_path,
        "eager_embedding",
        text.replace('"embedding"', '"eager_embedding"'),
        monkeypatch,
    )
    expected = answers(Engine.from_pretrained(model(), "embedding", "comb", graphs=True))
    engine = Engine.from_pretrained(model(), "eager_embedding", "comb", graphs=True)
    assert answers(engine)[:2] == expected[:2]
    assert NOTE not in answers(engine)[2]


def test_a_policy_without_rows_is_not_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = FILES[POLICY].replace("    rows = 1\n", "")
    add(policies, tmp_path, "uncaptured", text, monkeypatch)
    expected = answers(Engine.from_pretrained(model(), "embedding", "comb", graphs=True))
    found = answers(Engine.from_pretrained(model(), "embedding", "uncaptured", graphs=True))
    assert found[:2] == expected[:2]
    assert NOTE not in found[2]


@pytest.mark.parametrize(("file", "lines"), [(POLICY, 15), (DRAFTER, 25)])
def test_they_are_short(file: str, lines: int) -> None:
    assert len([line for line in FILES[file].splitlines() if line.strip()]) <= lines


def test_unknown_options_are_refused() -> None:
    with pytest.raises(
        InputError, match="policy comb: unknown option 'tooth', known are teeth, passes"
    ):
        Engine.from_pretrained(model(), "embedding", "comb", policy_options={"tooth": 3})
    assert {"comb", "embedding"} <= {*policies.names(), *drafters.names()}


def test_the_page_names_every_test_of_the_kernels() -> None:
    page = (PAGES / "kernels.md").read_text()
    files = {file.name for file in (TESTS / "kernels").glob("test_*.py")}
    assert len(files) > 10
    assert {file for file in files if f"`{file}`" not in page} == set()
    assert {name for name in re.findall(r"`(test_\w+\.py)`", page) if name not in files} == set()
    for path in re.findall(r"python -m pytest (\S+)", page):
        assert (TESTS.parent / path).exists(), path
