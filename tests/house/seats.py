"""Seats: the source files to touch to add one more of a kind, by following its page of docs/develop in a copy.

A page's code blocks with `title="PATH"` are its steps, in their order: a new file, or text that goes to the end of one
that exists. Files of the product are those under SOURCES; the others, its tests and documents, do not count. Then a
check runs in the copy and uses the new part: the page's file in tests/house/checks, or the one that stands here. So a
page that leaves out a file fails, and one that asks for more files is seen in the count. A kind whose page is
missing, or has no such blocks, has no seat: its row keeps the number that was counted by hand.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = Path("docs/develop")
SOURCES = ("specengine/", "csrc/", "kernels/", "setup.py", "pyproject.toml", "README.md")
COPIED = (
    "specengine",
    "csrc",
    "kernels",
    "docs/develop",
    "setup.py",
    "pyproject.toml",
    "README.md",
)
CHECKS = Path(__file__).with_name("checks")
BLOCK = re.compile(r"""^```[a-z+]+ title="([^"]+)"\n(.*?)^```""", re.DOTALL | re.MULTILINE)

_MODEL = """
import torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256)
model = transformers.LlamaForCausalLM(config).eval()
from specengine import Engine
prompt = [*range(20, 40), *range(20, 30)]
plain = Engine.from_pretrained(model, policy="plain").generate(prompt, max_new_tokens=12).token_ids
"""
_USED = """
name = {name!r}
engine = Engine.from_pretrained(model, {draft}, {policy})
result = engine.generate(prompt, max_new_tokens=12)
assert result.token_ids == plain and result.stats.num_draft_tokens, result
"""


class Seat(NamedTuple):
    """pages: names that its page may have; check: of the name of the first file that its page adds."""

    pages: tuple[str, ...]
    check: str | None = None


SEATS = {
    "policy": Seat(
        ("policy",), _MODEL + _USED.format(name="NAME", draft='"recycling"', policy="name")
    ),
    "drafter": Seat(
        ("drafter",), _MODEL + _USED.format(name="NAME", draft="name", policy='"fixed"')
    ),
    "op": Seat(("op",)),
    "model family": Seat(("family", "model-family")),
    "quantisation": Seat(("quantisation", "quantization")),
    "head layout": Seat(("layout", "head-layout")),
    "server field": Seat(("field", "server-field", "option")),
    "CLI option": Seat(("option", "cli-option")),
}


class NoSeatError(Exception):
    """Raised if no page explains how to add one of this kind."""


def steps(kind: str, root: Path = ROOT) -> tuple[list[tuple[str, str]], str]:
    """Return the steps of a kind's page, as paths and texts, and the check that uses the new part."""
    pages = [root / PAGES / f"{name}.md" for name in SEATS[kind].pages]
    page = next((page for page in pages if page.is_file()), None)
    if page is None:
        raise NoSeatError(f"docs/develop has no page {' or '.join(page.name for page in pages)}")
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    script = CHECKS / page.with_suffix(".py").name
    check = script.read_text(encoding="utf-8") if script.is_file() else SEATS[kind].check
    if check is None or not any(path.startswith(SOURCES) for path, _ in found):
        raise NoSeatError(
            f'{PAGES}/{page.name} has no blocks with a title="PATH" to follow, or none to check them by'
        )
    new = next(path for path, _ in found if path.startswith(SOURCES))
    return found, check.replace("'NAME'", repr(Path(new).stem))


def follow(kind: str, folder: Path) -> list[str]:
    """Add one of this kind in a copy of the tree, in this empty folder; use it, and return the source files touched.

    Raises NoSeatError, and RuntimeError with what the check printed where the new part does not work.
    """
    found, check = steps(kind)
    copy(folder)
    for path, text in found:
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        file.write_text(before + text, encoding="utf-8")
    run(check, folder)
    return sorted({path for path, _ in found if path.startswith(SOURCES)})


def copy(folder: Path) -> None:
    """Copy what a part is added to, compiled modules included."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, folder / name)


def run(check: str, folder: Path) -> None:
    """Run a check on the package in this folder."""
    guard = f"import sys; sys.path.insert(0, {str(folder)!r})\nimport specengine\n"
    guard += f"assert specengine.__file__.startswith({str(folder)!r}), specengine.__file__\n"
    done = subprocess.run(
        [sys.executable, "-c", guard + check],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,  # some compile, on machines that may have other work
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
