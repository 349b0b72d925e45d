"""Figures of what costs a second reading: packed tuples, large classes, names for two things, long imports, words.

All are read from the source with `ast`, the words of comments and docstrings with `tokenize`. Rooms follow the folders
of the package, so that each has a figure of its own.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.house import imports

MAX_ATTRIBUTES = 12
ROOMS = {  # folders by room; what stands in none is the engine's core
    "server and protocols": ("serve", "protocol", "batch", "replicas"),
    "training": ("train",),
    "benchmark": ("benchmark",),
    "command line": ("cli",),
}
CORE = "engine core"
RESULTS = re.compile(  # local names that say that there is a result, not what it is
    r"found|given|made|kept|own|known|wanted|asked|said|told|held|seen|part|left"
)
CONSTANTS = re.compile(
    r"(^|_)(MOST|LEAST|FEWEST|LONGEST|ENOUGH|AHEAD|AGAIN|SOON|LOOK|QUIET|HOPE|DOUBT|SURE|REST)(_|$)"
)
PHRASES = re.compile(r"\b(behind|beside|so many|whoever)\b|, its own included", re.IGNORECASE)


def statements(tree: ast.AST) -> int:
    """Return how many statements a syntax tree has; one that holds others counts as well as these."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree))


def room_of(package: Path, file: Path) -> str:
    """Return the room of a file by its top folder."""
    top = file.relative_to(package).parts[0]
    return next((room for room, folders in ROOMS.items() if top in folders), CORE)


def large_classes(tree: ast.AST) -> list[str]:
    """Return the classes whose methods assign more than MAX_ATTRIBUTES attributes of `self`."""
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and len(_attributes(node)) > MAX_ATTRIBUTES
    ]


def _attributes(node: ast.ClassDef) -> set[str]:
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    }


def public_classes(tree: ast.Module) -> list[str]:
    """Return the public classes at the top of a module."""
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def packed_tuples(tree: ast.AST) -> int:
    """Return how many tuples get a name, or an attribute, under which the file passes them starred."""
    starred = {ast.unparse(node.value) for node in ast.walk(tree) if isinstance(node, ast.Starred)}
    return sum(ast.unparse(target) in starred for target in _named_tuples(tree))


def _named_tuples(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the targets to which assignments give displayed tuples."""
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(node.value, ast.Tuple):
                packs = isinstance(target, ast.Tuple)
                pairs = (
                    zip(target.elts, node.value.elts, strict=False)
                    if packs
                    else [(target, node.value)]
                )
                yield from (name for name, value in pairs if isinstance(value, ast.Tuple))


def _of_function(function: ast.AST) -> Iterator[ast.AST]:
    """Walk over the nodes of a function but not of those inside it."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _of_function(node)


def words(text: str) -> Counter[str]:
    """Return how often a file uses each word of the list: as a name that it gives, or in comments and docstrings."""
    counts: Counter[str] = Counter()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            counts.update(filter(RESULTS.fullmatch, _local_names(node)))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            counts.update(match[2] for match in CONSTANTS.finditer(node.id))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (
            token.type == tokenize.STRING and token.string.startswith(('"""', 'r"""'))
        ):
            counts.update(match.lower() for match in _phrases(token.string))
    return counts


def _phrases(text: str) -> list[str]:
    return [match.group() for match in PHRASES.finditer(text)]


def _local_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    assigned = (
        node
        for node in _of_function(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    names = {*(argument.arg for argument in parameters), *(node.id for node in assigned)}
    return names - {"left"} if "right" in names else names


def measure(package: Path) -> dict[str, int]:
    """Return all figures by name."""
    files = imports.modules(package)
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files.values()}
    rooms = dict.fromkeys((CORE, *ROOMS), 0)
    for file, tree in trees.items():
        rooms[room_of(package, file)] += statements(tree)
    names = Counter(name for tree in trees.values() for name in public_classes(tree))
    graph = imports.module_graph(package)
    return {f"statements, {room}": count for room, count in rooms.items()} | {
        f"classes over {MAX_ATTRIBUTES} attributes": sum(
            len(large_classes(tree)) for tree in trees.values()
        ),
        "class names used twice": sum(count > 1 for count in names.values()),
        "tuples packed to be starred": sum(map(packed_tuples, trees.values())),
        "longest import list": max(map(len, graph.values())),
        "words that cost a second reading": sum(
            sum(words(file.read_text(encoding="utf-8")).values()) for file in files.values()
        ),
    }
