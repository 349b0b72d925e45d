"""Development prompts from a clone, and the names of inputs in commands of committed files."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from bench import prompts
from docs.build.results import RESULTS
from specengine.benchmark.workloads import read

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "reproduce.md"
# options whose values are files, folders or models
INPUTS = {
    *(
        "--prompts",
        "--text",
        "--data",
        "--head",
        "--heads",
        "--model",
        "--start",
        "--stage",
        "--grid",
        "--networks",
    ),
    *(
        "--candidates",
        "--costs",
        "--file",
        "--gguf",
        "--wheel",
        "--llama-server",
        "--guidellm",
        "--python",
        "--llama",
    ),
}
FIRST = {"run", "compare", "curves", "draft"}  # commands that read or write the folders named next


def clone(folder: Path, questions: int = 6) -> Path:
    """Return a clone of the same layout with other questions."""
    for source in prompts.FOLDERS.values():
        file = folder / "eagle" / "data" / source / "question.jsonl"
        file.parent.mkdir(parents=True)
        lines = [
            json.dumps(
                {
                    "question_id": n,
                    "category": source,
                    "turns": [f"{source} {n}"],
                    "reference": ["x"],
                }
            )
            for n in range(questions)
        ]
        file.write_text("\n".join(lines) + "\n")
    return folder


def test_every_other_question_is_taken(tmp_path: Path) -> None:
    prompts.write(clone(tmp_path / "EAGLE"), tmp_path / "out")
    items = read([tmp_path / "out"])
    assert {item.set for item in items} == set(prompts.FOLDERS)
    assert [item.text for item in items if item.set == "cnn_dm"] == [f"sum {n}" for n in (0, 2, 4)]
    assert json.loads((tmp_path / "out" / "qa.jsonl").read_text().splitlines()[0]).keys() == set(
        prompts.FIELDS
    )


def test_other_questions_are_told(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [str(clone(tmp_path / "EAGLE")), str(tmp_path / "out")]
    assert prompts.main(given) == 1
    assert f"not {prompts.DIGEST}; check out {prompts.COMMIT}" in capsys.readouterr().err
    monkeypatch.setattr(prompts, "DIGEST", prompts.write(tmp_path / "EAGLE", tmp_path / "out"))
    assert prompts.main(given) == 0
    (tmp_path / "EAGLE" / "eagle" / "data" / "qa" / "question.jsonl").write_text("{}\n")
    assert prompts.main(given) == 2
    assert prompts.main([str(tmp_path / "nothing"), str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()


def commands() -> dict[str, str]:
    found = {}
    for file in sorted(RESULTS.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            if record["record"] == "provenance":
                found[file.stem] = record["command"]
    return found


def inputs(command: str) -> set[str]:
    """Return what the command reads: values of INPUTS, folders after a subcommand; not files of bench/results."""
    try:
        words = shlex.split(re.sub(r"\(.*?\)", "", command).replace(";", " "))
    except ValueError:  # prose
        return set()
    found, option = set(), ""
    for before, word in zip(["", *words], words, strict=False):
        if word.startswith("-"):
            option = word
        elif option in INPUTS or (before in FIRST and option == "-m"):
            found.add(word)
    return {word for word in found if not word.startswith("bench/results/")}


def test_inputs_of_a_command() -> None:
    assert inputs("python -m bench.ltd compare dev4 --grid a/b --networks cpu --out x.jsonl") == {
        "dev4",
        "a/b",
        "cpu",
    }
    assert inputs(
        "python -m bench.replay run trees --policy salf --costs bench/results/a.jsonl"
    ) == {"trees"}


def test_the_page_explains_every_input_of_every_committed_file() -> None:
    named = set(re.findall(r"`([^`\n]+)`", PAGE.read_text()))
    found = {word: file for file, command in commands().items() for word in inputs(command)}
    assert len(found) > 30
    missing = {word: file for word, file in found.items() if word not in named}
    assert not missing


def test_the_page_names_the_digest_that_committed_files_hold() -> None:
    text = PAGE.read_text()
    assert prompts.DIGEST in text
    digests = {
        record["of_prompts"]
        for file in RESULTS.glob("*.jsonl")
        for line in file.read_text().splitlines()
        for record in [json.loads(line)]
        if "of_prompts" in record
    }
    assert digests
    assert not [digest for digest in digests if digest not in text]
