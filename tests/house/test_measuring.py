"""Tests of the measurements of structure: each kind of import, event and member is counted; faults fail."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from specengine import ops
from tests.house import imports, journeys, members, reading, seats

HOUSE = {
    "__init__.py": "_NAMES = {'Engine': 'engine'}\nif TYPE_CHECKING:\n    from house.engine import Engine\n",
    "engine.py": "from house import parts\nimport house.ground as g\n",
    "ground.py": "import os\nif TYPE_CHECKING:\n    import house.engine\n",
    "parts/__init__.py": "from . import one\nfrom .two import x\n",
    "parts/one.py": "def late():\n    from house.ground import y\n",
    "parts/two.py": "from house.parts.deep.three import z\n",
    "parts/deep/__init__.py": "",
    "parts/deep/three.py": "from ...ground import y\n",
    "app.py": "from house import Engine\n",
}
ROOMS = {
    "house.app": {"house.engine"},
    "house.engine": {"house.parts", "house.ground"},
    "house.ground": set(),
    "house.parts": {"house.ground", "house.parts.deep"},
    "house.parts.deep": {"house.ground"},
}


def built(folder: Path, **changes: str) -> Path:
    """Write HOUSE, with text added to the modules of these names; return its folder."""
    for name, text in HOUSE.items():
        file = folder / "house" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + changes.get(Path(name).stem, ""))
    return folder / "house"


def test_arrows_of_all_kinds_are_seen(tmp_path: Path) -> None:
    house = built(tmp_path)
    assert imports.room_graph(house) == ROOMS
    assert imports.storeys(ROOMS) == [
        f"house.{name}" for name in ("app", "engine", "parts", "parts.deep", "ground")
    ]
    assert imports.measure(house) == {
        "storeys": 5,
        "arrows between rooms": 6,
        "circles of rooms": 0,
        "circles of modules": 0,
        "modules in circles": 0,
        "circles of modules, types counted": 1,
    }


def test_a_circle_of_the_type_checker_alone_counts_apart(tmp_path: Path) -> None:
    house = built(tmp_path)
    (circle,) = imports.circles(imports.module_graph(house, typed=True))
    assert {"house.engine", "house.ground"} < set(circle)
    assert imports.circles(imports.module_graph(house)) == []
    (house / "ground.py").write_text("import os\n")
    assert imports.measure(house)["circles of modules, types counted"] == 0


@pytest.mark.parametrize(
    "hidden",
    [
        "def late():\n    import house.parts.one\n",
        "class Late:\n    def late(self):\n        from house.parts import one\n",
        "importlib.import_module('house.parts.one')\n",
        "import_module(f'house.parts.{name}')\n",
        "importlib.import_module('.parts', __package__)\n",
        "import house\nhouse.Engine\n",
        "def late():\n    from house import Engine\n",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import house.parts\n",
    ],
)
def test_a_hidden_import_upwards_makes_a_circle(hidden: str, tmp_path: Path) -> None:
    measured = imports.measure(built(tmp_path, ground=hidden))
    assert measured["circles of rooms"] == 1
    assert measured["storeys"] < 5
    assert measured["modules in circles"] >= 2


def test_circles_are_separate_and_count_as_one_floor() -> None:
    graph = {"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"e"}, "e": {"c", "f"}, "f": set()}
    assert imports.circles(graph) == [["a", "b"], ["c", "d", "e"]]
    assert imports.storeys(graph) == ["a + b", "c + d + e", "f"]


def test_calls_are_counted_by_file() -> None:
    tensor = torch.tensor([[0.5, 0.25, 1.0]])
    ops.top_children(tensor, 2)
    journey, value = journeys.watched(lambda: ops.top_children(tensor, 2))
    assert value[1].tolist() == [[2, 0]]
    assert journey.calls >= journey.changes >= len(journey.files) >= 1
    twice, _ = journeys.watched(lambda: [ops.top_children(tensor, 2) for _ in range(2)])
    assert twice.calls == 2 * journey.calls
    assert twice.files == journey.files
    assert journey.native == twice.native / 2
    assert not journey.native or journeys.extensions()


def test_only_the_packages_own_c_functions_count() -> None:
    if not (extensions := journeys.extensions()):
        pytest.skip("no extension is built")
    import sys

    journey, _ = journeys.watched(lambda: [len([]), torch.zeros(1).sum(), sorted([2, 1])])
    assert (journey.native, journey.calls) == (0, 0)
    functions = [
        f for name in extensions for f in vars(sys.modules[name]).values() if type(f) is type(len)
    ]

    def call_all() -> None:
        for function in functions:
            with pytest.raises(TypeError):
                function(*[object()] * 30)

    assert journeys.watched(call_all)[0].native == len(functions) > 0


def test_members_are_those_of_the_class_itself() -> None:
    class Base:
        inherited = 1

    class Kind(Base, ABC):
        annotated: int
        both: ClassVar[int] = 2
        plain = 3
        _hidden = 4

        @property
        def asked(self) -> int:
            return 1

        @abstractmethod
        def done(self) -> None: ...

        @classmethod
        def made(cls) -> None: ...

    assert members.members(Kind) == ["annotated", "asked", "both", "done", "made", "plain"]


SECOND_READINGS = '''
class Large:
    def begin(self, found):
        self.a, self.b, self.c, self.d, self.e, self.f = range(6)
        self.g = self.h = self.i = self.j = self.k = self.l = 1


class Small:
    """Stands behind it."""

    def run(self):
        given, count = (1, 2), 3  # so many
        self.pair = 4, 5
        plain = 6, 7
        return call(*given, *self.pair, plain, count)


MOST_ROWS = 8
'''


def test_each_second_reading_is_counted(tmp_path: Path) -> None:
    tree = ast.parse(SECOND_READINGS)
    assert reading.large_classes(tree) == []
    assert reading.packed_tuples(tree) == 2
    assert reading.words(SECOND_READINGS) == {
        "found": 1,
        "behind": 1,
        "given": 1,
        "so many": 1,
        "MOST": 1,
    }
    assert reading.words("def f():\n    left, right = 1, 2\n") == {}
    assert reading.words("def f():\n    left = 1\n") == {"left": 1}
    larger = SECOND_READINGS.replace("self.l = 1", "self.l = self.m = 1")
    assert reading.large_classes(ast.parse(larger)) == ["Large"]
    house = built(tmp_path)
    (house / "cli").mkdir()
    (house / "cli" / "__init__.py").write_text(larger)
    (house / "serve.py").write_text("class Large: ...\n")
    measured = reading.measure(house)
    assert measured["statements, command line"] == reading.statements(tree)
    assert measured["class names used twice"] == 1
    assert measured["classes over 12 attributes"] == 1
    assert measured["tuples packed to be starred"] == 2
    assert measured["longest import list"] == 2
    assert measured["words that cost a second reading"] == 5


PAGE = """
```python title="specengine/policies/mine.py"
{text}
```

```python title="tests/policies/test_mine.py"
```
"""


def test_a_page_is_followed_step_by_step(tmp_path: Path) -> None:
    page = tmp_path / seats.PAGES / "policy.md"
    page.parent.mkdir(parents=True)
    page.write_text(PAGE.format(text="x = 1"))
    found, check = seats.steps("policy", tmp_path)
    assert [path for path, _ in found] == [
        "specengine/policies/mine.py",
        "tests/policies/test_mine.py",
    ]
    assert found[0][1] == "x = 1\n"
    assert "name = 'mine'" in check
    page.write_text("no blocks\n")
    with pytest.raises(seats.NoSeatError, match=r"policy\.md has no blocks"):
        seats.steps("policy", tmp_path)
    with pytest.raises(seats.NoSeatError, match=r"no page drafter\.md"):
        seats.steps("drafter", tmp_path)


@pytest.mark.slow
def test_a_part_that_does_not_work_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, check = seats.steps("policy")
    monkeypatch.setattr(
        seats, "steps", lambda kind: ([("specengine/policies/mine.py", "x = 1\n")], check)
    )
    with pytest.raises(RuntimeError, match="unknown name"):
        seats.follow("policy", tmp_path)
