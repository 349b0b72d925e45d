"""Tests that blocks in README.md and docs run: Python as it stands, commands through the command line's own parser."""

from __future__ import annotations

import argparse
import importlib.util
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specengine import Engine
from specengine.checkpoints.eagle import save_head
from specengine.cli import main
from specengine.cli.commands import COMMANDS, make_parser
from tests.docs.blocks import (
    DEFAULT_MODEL,
    MARKS,
    NOT_RUN,
    PARSED,
    ROOT,
    RUN,
    Block,
    blocks,
    commands,
)
from tests.house import seats
from tests.toy import byte_tokenizer, head_config, random_state, tiny

BLOCKS = blocks()
STAND_INS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "MODEL")
MOST_TOKENS = 24
# commands that are not ours, on the pages of heads elsewhere, of scaling, and of the server's clients
OTHERS = ("vllm", "sglang", "torchrun", "curl", "docker", "aider", "export")


def of(mark: str, language: str) -> list[Block]:
    return [block for block in BLOCKS if block.mark == mark and block.language == language]


def by_page(found: list[Block]) -> list[list[Block]]:
    return [
        [block for block in found if block.page == page]
        for page in dict.fromkeys(block.page for block in found)
    ]


def page_of(own: list[Block]) -> str:
    return own[0].page.name


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model under every name that the pages give, a head for it, and a text."""
    path = tmp_path_factory.mktemp("pages")
    for name in STAND_INS:
        tiny(seed=1, initializer_range=0.1, max_position_embeddings=2048).save_pretrained(
            path / name
        )
        byte_tokenizer().save_pretrained(path / name)
    config = head_config(layer_ids=(0, 1, 1))
    save_head(config, random_state(config), path / "HEAD")
    (path / "notes.txt").write_text("the cat and the dog and the cat")
    return path


@pytest.fixture
def stand_ins(folder: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[None]:
    """Models of these names, that one as the default, and short answers."""
    load, checked = Engine.from_pretrained.__func__, Engine.stream  # type: ignore[attr-defined]

    def from_pretrained(
        cls: type[Engine], model: Any = None, *given: Any, **options: Any
    ) -> Engine:
        return load(cls, "MODEL" if model is None else model, *given, **options)

    def shortened(self: Engine, prompt: Any, **options: Any) -> Any:
        most = min(options.get("max_new_tokens") or MOST_TOKENS, MOST_TOKENS)
        return checked(self, prompt, **options | {"max_new_tokens": most})

    monkeypatch.chdir(folder)
    monkeypatch.setattr(Engine, "from_pretrained", classmethod(from_pretrained))
    monkeypatch.setattr(Engine, "stream", shortened)
    monkeypatch.setattr(
        Engine, "generate", lambda self, prompt, **options: shortened(self, prompt, **options).run()
    )
    return


def test_every_block_says_what_it_is() -> None:
    """A file that a page shows is run by tests/house, which follows the page; output stands behind what gives it."""
    files = [block for block in BLOCKS if ' title="' in block.language]
    followed = {f"{name}.md" for seat in seats.SEATS.values() for name in seat.pages}
    assert (
        {"policy.md", "drafter.md", "option.md"} <= {block.page.name for block in files} <= followed
    )
    for block in BLOCKS:
        assert block.mark in MARKS, (
            f"{block}: unknown mark {block.mark!r}, known are {', '.join(MARKS)}"
        )
        assert block in files or block.language in {"python", "sh", "text"}, (
            f"{block}: ```{block.language}"
        )
    assert len(of(RUN, "python")) > 5
    assert len(of(RUN, "sh")) > 5
    assert all(block.output for block in BLOCKS if block.mark == DEFAULT_MODEL)


@pytest.mark.parametrize("own", by_page(of(RUN, "python")), ids=page_of)
def test_python_runs(own: list[Block], stand_ins: None) -> None:
    names: dict[str, Any] = {}
    for block in own:
        exec(compile(block.text, str(block.page), "exec"), names)


@pytest.mark.parametrize("own", by_page(of(RUN, "sh")), ids=page_of)
def test_commands_run(own: list[Block], stand_ins: None, monkeypatch: Any, capsys: Any) -> None:
    for block in own:
        for line in commands(block):
            piped, _, command = line.rpartition(" | ")
            program, *words = shlex.split(command)
            assert program == "specengine", f"{block}: {line}"
            if piped:
                monkeypatch.setattr(
                    sys, "stdin", io.StringIO(Path(piped.removeprefix("cat ")).read_text())
                )
            assert main(words) in (0, 1 if words[0] == "check" else 0), (
                f"{line}: {capsys.readouterr().err}"
            )


class _Parsed(Exception):
    pass


@pytest.mark.parametrize("block", of(PARSED, "sh"), ids=str)
def test_commands_have_these_options(block: Block, monkeypatch: Any) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_alone(self: argparse.ArgumentParser, *given: Any, **options: Any) -> Any:
        parse(self, *given, **options)
        raise _Parsed

    for line in commands(block):
        program, *words = shlex.split(line)
        if program == "specengine":
            make_parser().parse_args(words)
        else:
            assert [program, words[0]] == ["python", "-m"], line
            is_package = (ROOT / words[1].replace(".", "/")).is_dir()
            module = importlib.import_module(f"{words[1]}.__main__" if is_package else words[1])
            monkeypatch.setattr(sys, "argv", words[1:])
            monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
            with pytest.raises(_Parsed):
                module.main()
            monkeypatch.undo()


def test_commands_that_are_not_run_exist() -> None:
    root = Path(__file__).parents[2]
    makefiles = ("Makefile", "tests/targets.mk", "bench/targets.mk")
    targets = "\n".join((root / name).read_text() for name in makefiles)
    lines = [line for block in of(NOT_RUN, "sh") for line in commands(block)]
    assert {shlex.split(line)[0] for line in lines} == {
        "pip",
        "make",
        "python",
        "specengine",
        *OTHERS,
    }
    for line in lines:
        if line.startswith("make"):
            for target in line.split()[1:]:
                assert re.search(rf"^{target}:", targets, re.MULTILINE), line
        if line.startswith("python"):
            assert importlib.util.find_spec(shlex.split(line)[2]), line
        if line.startswith("specengine"):
            assert shlex.split(line)[1] in COMMANDS, line


@pytest.mark.model
@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.mark == DEFAULT_MODEL], ids=str
)
def test_what_it_prints(block: Block, default_model_path: Path, capsys: Any) -> None:
    """Lengths follow from costs that are measured, and so may differ in their figures."""
    if block.language == "sh":
        for line in commands(block):
            assert main(shlex.split(line)[1:]) == 0
    else:
        exec(compile(block.text, str(block.page), "exec"), {})
    number = re.compile(r"\d+\.\d+")
    assert number.sub("#", capsys.readouterr().out) == number.sub("#", block.output or "")
