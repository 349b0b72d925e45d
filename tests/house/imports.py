"""The import graph of a package by its rooms, read from the source: its storeys, and its circles.

A room is a folder with its modules, nested folders being rooms of their own, or a module at the top. An arrow goes from
a room to another one that it imports anywhere: at the top of a module, inside a function, or by `import_module` of a
text that begins with the package's name. The package's own `__init__` is no room but the public face: a name imported
from it leads to the module that has it. Left out are imports under TYPE_CHECKING, which never run, names of modules
that are put together from parts or read from a table, and that Python first imports the packages above a module.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

Graph = dict[str, set[str]]


def modules(package: Path) -> dict[str, Path]:
    """Return the package's modules, by dotted name; a folder's own name is its `__init__`."""
    files = sorted(package.rglob("*.py"))
    return {_name(package, file): file for file in files}


def _name(package: Path, file: Path) -> str:
    parts = (package.name, *file.relative_to(package).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_graph(package: Path, *, typed: bool = False) -> Graph:
    """Return for each module but the public face those of the package that it imports.

    typed: whether imports under TYPE_CHECKING count too: what a reader follows to know a module's names.
    """
    known = modules(package)
    face = _Face(package, known)
    return {
        name: _imports(name, file, known, face, ast.walk if typed else _running) - {name}
        for name, file in known.items()
        if name != package.name
    }


def room_graph(package: Path) -> Graph:
    """Return for each room those that its modules import."""
    rooms = {
        name: room_of(name, file, package)
        for name, file in modules(package).items()
        if name != package.name
    }
    graph: Graph = {room: set() for room in rooms.values()}
    for module, imported in module_graph(package).items():
        graph[rooms[module]] |= {rooms[other] for other in imported} - {rooms[module]}
    return graph


def room_of(name: str, file: Path, package: Path) -> str:
    if file.parent == package:
        return name
    return ".".join((package.name, *file.parent.relative_to(package).parts))


class _Face:
    """The package's `__init__`: the modules behind its names, type hints included, as names may be looked up late."""

    def __init__(self, package: Path, known: dict[str, Path]) -> None:
        self.name, self._known = package.name, known
        nodes = list(ast.walk(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))))
        froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        self._behind = {
            alias.asname or alias.name: node.module or "" for node in froms for alias in node.names
        }
        self._functions = {
            node.name: {
                other.module or "" for other in ast.walk(node) if isinstance(other, ast.ImportFrom)
            }
            for node in nodes
            if isinstance(node, ast.FunctionDef)
        }

    def modules_of(self, name: str) -> set[str]:
        """Return the modules that asking the face for this name imports."""
        if (whole := f"{self.name}.{name}") in self._known:
            return {whole}
        if name in self._behind:
            return {self._behind[name]} & self._known.keys()
        return self._functions.get(name, set()) & self._known.keys()


def _imports(
    name: str,
    file: Path,
    known: dict[str, Path],
    face: _Face,
    nodes: Callable[[ast.AST], Iterator[ast.AST]],
) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    # where relative imports begin
    inside = name if file.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found |= {_nearest(alias.name, known) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = inside.split(".")[: len(inside.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                if base == face.name:
                    found |= face.modules_of(alias.name)
                else:
                    found.add(whole if whole in known else _nearest(base, known))
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == face.name
        ):
            found |= face.modules_of(node.attr)
        elif isinstance(node, ast.Call) and _called(node) == "import_module" and node.args:
            found |= set(_by_text(node.args[0], face.name, inside, known))
    return found - {"", face.name}


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk over all nodes but those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield other
                yield from _running(other)
            continue
        yield node
        yield from _running(node)


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _by_text(argument: ast.expr, top: str, inside: str, known: dict[str, Path]) -> Iterator[str]:
    """Yield the modules that a constant names, or that begin as an f-string does."""
    first = (
        argument.values[0] if isinstance(argument, ast.JoinedStr) and argument.values else argument
    )
    if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
        return
    text = inside + first.value if first.value.startswith(".") else first.value
    if not (text == top or text.startswith(f"{top}.")):
        return
    if first is argument:
        yield _nearest(text, known)
    else:
        yield from (name for name in known if name.startswith(text) and name != text.rstrip("."))


def _nearest(name: str, known: dict[str, Path]) -> str:
    """Return the module itself, or the closest one above it (of an attribute); empty of another package."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


# ---- shape


def circles(graph: Graph) -> list[list[str]]:
    """Return the groups of two nodes or more that import each other, directly or not, each sorted."""
    return sorted(sorted(group) for group in components(graph) if len(group) > 1)


def storeys(graph: Graph) -> list[str]:
    """Return the longest chain of nodes, from the top down; those of a circle count as one, named together."""
    groups = components(graph)
    of = {node: index for index, group in enumerate(groups) for node in group}
    longest: list[list[int]] = []
    for index, group in enumerate(groups):  # what a group imports comes before it
        below = {of[other] for node in group for other in graph[node]} - {index}
        longest.append(
            [index, *max((longest[other] for other in sorted(below)), key=len, default=[])]
        )
    return [" + ".join(sorted(groups[index])) for index in max(longest, key=len)]


def arrows(graph: Graph) -> int:
    return sum(len(others) for others in graph.values())


def measure(package: Path) -> dict[str, int]:
    """Return all figures by name."""
    rooms, parts = room_graph(package), module_graph(package)
    return {
        "storeys": len(storeys(rooms)),
        "arrows between rooms": arrows(rooms),
        "circles of rooms": len(circles(rooms)),
        "circles of modules": len(circles(parts)),
        "modules in circles": sum(map(len, circles(parts))),
        "circles of modules, types counted": len(circles(module_graph(package, typed=True))),
    }


def components(graph: Graph) -> list[set[str]]:
    """Return the strongly connected components, those below first (Tarjan 1972)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[set[str]] = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in number:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], number[other])
        if low[node] == number[node]:
            at = stack.index(node)
            groups.append(set(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return groups
