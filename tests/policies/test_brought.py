"""Policies and drafters from elsewhere: plug-ins of other packages, and classes in files of the user's."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from specengine import Engine, policies, registry
from specengine.benchmark.ways import Spec
from specengine.cli import main
from specengine.cli.parser import policy as accepted
from specengine.engine import loading
from specengine.errors import InputError
from specengine.options import LoadOptions
from tests.graphs.engines import PROMPT, model

PAGES = Path(__file__).parents[2] / "docs" / "develop"
TEXT = (PAGES / "policy.md").read_text() + (PAGES / "drafter.md").read_text()
COMB, EMBEDDING = (
    text
    for _, text in re.findall(r'```python title="(specengine/[^"]+)"\n(.*?)```', TEXT, re.DOTALL)
)
BIGRAM = """
from __future__ import annotations

from dataclasses import dataclass

from specengine.drafters.ngram import NGram


@dataclass
class Bigram(NGram):
    smoothing: float = 1.0
"""
ENTRIES = """
[specengine.policies]
comb-plugin = my_shapes:Comb
eagle = my_shapes:Comb
broken = my_missing:Comb
wrong = my_shapes:dataclass
[specengine.drafters]
bigram-plugin = my_drafts:Bigram
embedding = my_embedding:Embedding
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    for name, text in (("comb.py", COMB), ("embedding.py", EMBEDDING), ("bigram.py", BIGRAM)):
        (tmp_path / "folder" / name).write_text(text)
    return tmp_path / "folder"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package of another's that offers plug-ins."""
    site = tmp_path / "site"
    about = site / "my_shapes-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-shapes\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRIES)
    for name, text in (("my_shapes", COMB), ("my_embedding", EMBEDDING), ("my_drafts", BIGRAM)):
        (site / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(site)


def answer(draft: Any, policy: Any, **options: Any) -> tuple[list[int], set[int], str]:
    """The tokens, the sizes of the trees, and the name of the draft."""
    engine = Engine.from_pretrained(model(), draft, policy, **options)
    generation = engine.stream(PROMPT, max_new_tokens=16)
    sizes = {len(piece.cycle.tree.tokens) for piece in generation}
    assert generation.result is not None
    return generation.result.token_ids, sizes, engine.drafter.name if engine.drafter else ""


def test_classes_in_files_are_used_by_name(files: Path) -> None:
    plain = answer(None, "plain")[0]
    embedding, comb = f"{files / 'embedding.py'}:Embedding", f"{files / 'comb.py'}:Comb"
    tokens, sizes, name = answer(embedding, comb, policy_options={"teeth": "2"})
    assert (tokens, sizes, name) == (plain, {9}, "embedding")
    engine = Engine.from_pretrained(model(), "ngram", comb)
    assert (
        engine.generate(
            PROMPT, max_new_tokens=16, policy=comb, policy_options={"teeth": 1}
        ).token_ids
        == plain
    )
    assert policies.find(comb) is policies.find(comb), "the file is run once"
    assert policies.name_of(policies.make(comb)) == "policy Comb"


def test_plug_ins_are_used_by_name(installed: None) -> None:
    plain = answer(None, "plain")[0]
    tokens, sizes, name = answer("embedding", "comb-plugin", policy_options={"teeth": 2})
    assert (tokens, sizes, name) == (plain, {9}, "embedding")
    assert answer("bigram-plugin", None, draft_options={"smoothing": "0.5"})[0] == plain
    with pytest.raises(
        InputError, match=r"draft my_drafts: unknown option 'smothing', .*did you mean smoothing"
    ):
        loading.check_draft("bigram-plugin", LoadOptions(draft_options={"smothing": 1}))


def test_what_ships_comes_before_a_plug_in_of_its_name(installed: None) -> None:
    assert policies.find("eagle").__module__ == "specengine.policies.baselines.eagle"
    assert sorted(registry.plugins("specengine.policies")) == ["broken", "comb-plugin", "wrong"]
    assert sorted(registry.plugins("specengine.drafters")) == ["bigram-plugin", "embedding"]
    assert "comb-plugin" not in policies.names()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "comb-plug",
            r"unknown name 'comb-plug', known are .*, comb-plugin, wrong; did you mean comb-plugin\?",
        ),
        (
            "broken",
            r"plug-in broken of my-shapes \(my_missing:Comb\) cannot be loaded: ModuleNotFoundError: No module",
        ),
        (
            "wrong",
            r"plug-in wrong of my-shapes .*: it is <function dataclass.*, accepted a subclass of .*TreePolicy",
        ),
        ("comb-plugin/wide", r"policy comb-plugin: unknown preset 'wide'"),
    ],
)
def test_faults_of_plug_ins_are_told(installed: None, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        policies.make(name)


def test_faults_of_files_are_told(files: Path) -> None:
    (files / "half.py").write_text("def :")
    (files / "other.py").write_text("class Other: pass")
    for name, message in (
        ("none.py:Comb", "there is no file .*none.py"),
        ("comb.py:Comp", r"comb.py: got 'Comp', accepted Comb; did you mean Comb\?"),
        ("comb.py", r"unknown name '.*; for a class of that file write .*comb.py:CLASS"),
        ("other.py:Other", r"other.py has class Other, accepted a subclass"),
        ("half.py:Comb", "half.py cannot be loaded: SyntaxError: invalid syntax"),
        ("comb.py:Comb/wide", "unknown preset 'wide'"),
    ):
        with pytest.raises(InputError, match=f"^policy.*{message}"):
            policies.make(f"{files}/{name}")
    with pytest.raises(
        InputError, match=r"draft: .*comb.py:Comb: .*a subclass of specengine.drafters.Drafter"
    ):
        loading.check_draft(f"{files}/comb.py:Comb", LoadOptions())


def test_the_command_line_and_ways_take_both(
    files: Path, installed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    comb, bigram = f"{files / 'comb.py'}:Comb", f"{files / 'bigram.py'}:Bigram"
    assert accepted(comb) == comb
    assert accepted("comb-plugin/x") == "comb-plugin/x"
    for text, draft, policy, options in (
        (f"{comb},teeth=2", None, comb, {"teeth": "2"}),
        (f"ngram:{comb}", "ngram", comb, {}),
        (f"{bigram}:eagle", bigram, "eagle", {}),
        (f"{bigram}:{comb},teeth=2", bigram, comb, {"teeth": "2"}),
        ("bigram-plugin:comb-plugin", "bigram-plugin", "comb-plugin", {}),
    ):
        spec = Spec.of(text)
        assert (spec.draft, spec.policy, spec.options) == (draft, policy, options)
        spec.check(LoadOptions())
    with pytest.raises(SystemExit):
        main(["generate", "hi", "--policy", "comb-plug"])
    assert "did you mean comb-plugin?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["generate", "hi", "--policy", "./comb.py"])
    assert "for a class of that file write ./comb.py:CLASS" in capsys.readouterr().err


def test_inspect_lists_plug_ins_that_can_be_loaded(
    installed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--inspect", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["policies"]["comb-plugin"]["options"] == {"teeth": 3, "passes": 4}
    assert told["policies"]["broken"]["about"].startswith("policy: plug-in broken of my-shapes")
    assert "bigram-plugin" in told["drafters"]


def test_a_file_is_told_from_a_path_of_a_draft() -> None:
    for name in ("ngram", "a/b", "C:\\models\\head", "user/model", "file.py", "x.pyc:Comb"):
        assert not registry.is_file(name)
