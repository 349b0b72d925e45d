"""`specengine generate`: the answer alone on stdout, every option passed on."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from specengine import cycle
from specengine.cli import main
from specengine.cli.parser import flag
from specengine.engine import generation
from specengine.request import options as generation_options
from specengine.request.declared import declarations
from specengine.request.sampling import Sampler
from tests.cli.streams import PROMPT, Terminal, expected, pipe_in


def test_generate_prints_the_answer_alone(folder: str, capsys: Any) -> None:
    assert main(["generate", PROMPT, "--model", folder, "--max-new-tokens", "20"]) == 0
    out, err = capsys.readouterr()
    assert out == expected(folder) + "\n"
    assert "acceptance length" in err
    assert "recycling" in err


@pytest.mark.parametrize("given", [["-"], []])
def test_generate_reads_standard_input(
    folder: str, capsys: Any, monkeypatch: Any, given: list[str]
) -> None:
    pipe_in(monkeypatch, PROMPT + "\n")
    assert main(["generate", *given, "--model", folder, "--max-new-tokens", "20"]) == 0
    assert capsys.readouterr().out == expected(folder) + "\n"


def test_generate_without_a_prompt_says_so(folder: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["generate", "--model", folder]) == 2
    assert capsys.readouterr().err.startswith("specengine: error: prompt: none was given")


def test_generate_json(folder: str, capsys: Any) -> None:
    options = ["--temperature", "0.8", "--top-k", "40", "--seed", "7", "--max-new-tokens", "20"]
    assert main(["generate", PROMPT, "--model", folder, "--json", *options]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found.keys() == {"text", "token_ids", "finish_reason", "seed", "stats"}
    assert found["text"] == expected(folder, temperature=0.8, top_k=40, seed=7)
    assert (found["seed"], found["finish_reason"], len(found["token_ids"])) == (7, "length", 20)
    assert found["stats"]["num_generated_tokens"] == 20
    assert err == ""


@pytest.mark.parametrize("other", ["--stream", "--show-draft"])
def test_generate_json_goes_with_no_other_output(other: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["generate", PROMPT, "--json", other])
    assert stop.value.code == 2
    assert other in capsys.readouterr().err


def test_generate_streams_pieces(folder: str, capsys: Any, monkeypatch: Any) -> None:
    flushes: list[str] = []
    monkeypatch.setattr("specengine.cli.generate.write", flushes.append)
    assert main(["generate", PROMPT, "--model", folder, "--max-new-tokens", "20", "--stream"]) == 0
    assert len(flushes) > 2
    assert "".join(flushes) == expected(folder) + "\n"


def test_ctrl_c_in_a_stream_leaves_a_whole_line_and_the_figures(
    folder: str, capsys: Any, monkeypatch: Any
) -> None:
    real, cycles = cycle.walk, []

    def interrupted(*given: Any) -> Any:
        cycles.append(given)
        if len(cycles) == 3:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(cycle, "walk", interrupted)
    given = [
        "generate",
        PROMPT,
        "--model",
        folder,
        "--max-new-tokens",
        "20",
        "--policy",
        "plain",
        "--stream",
    ]
    assert main(given) == 130
    out, err = capsys.readouterr()
    whole = expected(folder)
    assert out.endswith("\n")
    assert whole.startswith(out[:-1])
    assert len(out) < len(whole)
    assert err.startswith("(stopped)\n")
    assert re.search(r"^tokens +2 in", err, re.MULTILINE)


def test_generate_passes_every_option(
    folder: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a busy machine would have a note of its own
    monkeypatch.setattr("specengine.costs.MAX_LOAD", 1.0)
    monkeypatch.setattr("specengine.costs.MAX_SPREAD", math.inf)
    options = {
        "max_new_tokens": 20,
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "no_repeat_ngram_size": 4,
        "seed": 3,
    }
    declared = declarations().values()
    assert list(options) == [
        each.name for each in declared if each.help and each.reader.kind in (int, float)
    ]  # type: ignore[union-attr]
    given = [text for name, value in options.items() for text in (flag(name), str(value))]
    assert main(["generate", PROMPT, "--model", folder, "--raw", *given]) == 0
    out, err = capsys.readouterr()
    assert out == expected(folder, raw=True, **options) + "\n"
    assert "note" not in err


def test_generate_stops_at_a_stop_string(folder: str, capsys: Any) -> None:
    text = expected(folder)
    stop = next(
        letter
        for letter in text[3:]
        if letter.isprintable() and letter != "\N{REPLACEMENT CHARACTER}"
    )
    assert (
        main(["generate", PROMPT, "--model", folder, "--stop", "not in there", "--stop", stop]) == 0
    )
    assert capsys.readouterr().out == expected(folder, stop_strings=[stop]) + "\n"


def test_generate_with_a_system_message(folder: str, capsys: Any) -> None:
    assert (
        main(
            [
                "generate",
                PROMPT,
                "--model",
                folder,
                "--system",
                "be brief",
                "--max-new-tokens",
                "20",
            ]
        )
        == 0
    )
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}]
    assert capsys.readouterr().out == expected(folder, messages) + "\n"  # type: ignore[arg-type]
    assert main(["generate", PROMPT, "--model", folder, "--system", "be brief", "--raw"]) == 2


def test_generate_takes_policy_and_draft_options(folder: str, capsys: Any) -> None:
    policy = ["--policy", "eagle", "-o", "width=2", "--policy-option", "budget=5"]
    draft = ["--draft", "ngram", "--draft-option", "longest=3"]
    assert (
        main(["generate", PROMPT, "--model", folder, "--max-new-tokens", "20", *policy, *draft])
        == 0
    )
    out, err = capsys.readouterr()
    assert out == expected(folder) + "\n"
    assert "Eagle(width=2, expansions=7, budget=5)" in err


def test_generate_takes_a_prediction(folder: str, capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "expected.txt"
    file.write_text(expected(folder), encoding="utf-8")
    given = [
        "generate",
        PROMPT,
        "--model",
        folder,
        "--max-new-tokens",
        "20",
        "--prediction",
        str(file),
    ]
    assert main(given) == 0
    assert capsys.readouterr().out == expected(folder) + "\n"
    assert main([*given, "--policy", "plain"]) == 2
    assert "prediction: plain decoding has no draft that copies" in capsys.readouterr().err
    file.write_bytes(b"\xff")
    for missing in (str(file), str(tmp_path / "nothing")):
        assert main([*given[:-1], missing]) == 2
        assert capsys.readouterr().err.startswith(
            f"specengine: error: prediction: {missing} cannot be read"
        )


def test_generate_takes_a_draft_model(folder: str, capsys: Any) -> None:
    assert (
        main(["generate", PROMPT, "--model", folder, "--draft", folder, "--max-new-tokens", "20"])
        == 0
    )
    out, err = capsys.readouterr()
    assert out == expected(folder) + "\n"
    assert "small_model" in err


@pytest.mark.parametrize(
    ("given", "idle"),
    [
        (["--seed", "1"], "--seed changes"),
        (["--temperature", "0", "--top-p", "0.5", "--seed", "1"], "--top-p, --seed change"),
    ],
)
def test_idle_options_are_noted(folder: str, capsys: Any, given: list[str], idle: str) -> None:
    assert main(["generate", PROMPT, "--model", folder, "--max-new-tokens", "2", *given]) == 0
    assert f"greedy, so {idle} nothing" in capsys.readouterr().err


def test_generate_drafts_with_a_head(folder: str, head: str, capsys: Any) -> None:
    answers = []
    for draft in (["--draft", head], ["--policy", "plain"]):
        assert main(["generate", "--model", folder, *draft, "--max-new-tokens", "12", PROMPT]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


@pytest.mark.model
def test_the_default_model_answers(default_model_path: Path, capsys: Any) -> None:
    question = "What is the capital of France? Answer in one word."
    assert main(["generate", question, "--max-new-tokens", "16", "--offline"]) == 0
    assert "Paris" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_text_of_special_tokens_is_text_where_that_is_asked_for(
    command: str, folder: str, capsys: Any, monkeypatch: Any
) -> None:
    asked: list[bool] = []

    def token_ids(*given: Any, allow_special_text: bool, **options: Any) -> list[int]:
        asked.append(allow_special_text)
        return [1, 2, 3]

    monkeypatch.setattr(generation, "token_ids", token_ids)
    for flags in ([], ["--no-allow-special-text"], ["--allow-special-text"]):
        pipe_in(monkeypatch, "hi<|end|>\n")
        assert main([command, "--model", folder, "--max-new-tokens", "2", *flags]) == 0
    assert asked == [True, False, True]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_drafts_know_the_noise_unless_told_not_to(
    command: str, folder: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    class Recorded(Sampler):
        def __init__(self, *given: Any, coupled: bool, **more: Any) -> None:
            asked.append(coupled)
            super().__init__(*given, coupled=coupled, **more)

    monkeypatch.setattr(generation_options, "Sampler", Recorded)
    answers = set()
    for flags in ([], ["--no-coupled"], ["--coupled"]):
        pipe_in(monkeypatch, "hi\n")
        sampled = ["--temperature", "1", "--seed", "3", "--max-new-tokens", "9"]
        assert main([command, "--model", folder, *sampled, *flags]) == 0
        answers.add(capsys.readouterr().out)
    assert asked == [True, False, True]
    assert len(answers) == 1


def test_generate_meets_a_schema_or_a_grammar(folder: str, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("llguidance")
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": [{"kind": "a"}, {"kind": "b"}]}')
    grammar.write_text('start: "yes" | "no"')
    assert main(["generate", PROMPT, "--model", folder, "--json-schema", str(schema)]) == 0
    assert json.loads(capsys.readouterr().out) in ({"kind": "a"}, {"kind": "b"})
    assert main(["generate", PROMPT, "--model", folder, "--grammar", str(grammar)]) == 0
    assert capsys.readouterr().out in ("yes\n", "no\n")
    schema.write_text('{"not": {}}')
    assert main(["generate", PROMPT, "--json-schema", str(schema)]) == 2
    assert capsys.readouterr().err.startswith("specengine: error: json_schema: it is not accepted")
    schema.write_bytes(b"\xff")
    for file in (schema, tmp_path / "absent"):
        assert main(["generate", PROMPT, "--json-schema", str(file)]) == 2
        assert f"json_schema: {file} cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["generate", PROMPT, "--json-schema", str(schema), "--grammar", str(grammar)])
    assert stop.value.code == 2
    assert "argument --grammar: not allowed with argument --json-schema" in capsys.readouterr().err
