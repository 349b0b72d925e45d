"""`specengine bench`: a run on a tiny model, its file, its resumption, its tables, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specengine import checking
from specengine.benchmark import measuring
from specengine.benchmark.ways import EngineDecoder
from specengine.cli import main
from specengine.engine import loading

pytestmark = pytest.mark.usefixtures("one_thread")

WAYS = ("chain,length=3", "ngram:eagle,width=2,expansions=2,budget=6", "generate", "prompt-lookup")
Bench = Callable[..., int]


@pytest.fixture
def bench(folder: str, tmp_path: Path) -> Bench:
    """Runs the command on the tiny model, two sets of two conversations and the ways above."""
    (tmp_path / "prompts").mkdir()
    for name in ("one", "two"):
        entries = [
            {"question_id": n, "turns": [f"{name} and {name} {n}", "and then?"]} for n in (7, 8)
        ]
        (tmp_path / "prompts" / f"{name}.jsonl").write_text(
            "".join(json.dumps(entry) + "\n" for entry in entries)
        )

    def run(*given: str, ways: tuple[str, ...] = WAYS) -> int:
        command = [
            "bench",
            "--model",
            folder,
            "--prompts",
            str(tmp_path / "prompts"),
            "--max-new-tokens",
            "8",
        ]
        for way in ways:
            command += ["--way", way]
        return main([*command, "--rounds", "2", "--dtype", "float32", "--offline", *given])

    return run


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def of(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["record"] == kind]


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in ("record", "way", "set", "id", "round", "tokens"))


def test_every_way_answers_every_prompt_in_every_round(
    bench: Bench, tmp_path: Path, capsys: Any
) -> None:
    assert bench("--out", str(tmp_path / "out.jsonl")) == 0
    records = read(tmp_path / "out.jsonl")
    names = ["plain", *WAYS]
    assert [record["record"] for record in records[:3]] == ["provenance", "settings", "model"]
    assert records[0]["command"].startswith("specengine")
    assert [record["way"] for record in of(records, "way")] == names
    answers, rows = of(records, "answer"), of(records, "row")
    assert len(answers) == 2 * 2 * 2 * len(names)
    assert len(rows) == 2 * 2 * len(names)
    assert {(row["verdict"], row["diverges_at"]) for row in rows} == {("exact", None)}
    assert all(len(row["seconds"]) == 2 for row in rows)
    first = [answer["way"] for answer in answers[: 2 * len(names)]]
    assert first == [*names, *names[1:], "plain"]  # the rounds take turns
    out, err = capsys.readouterr()
    assert "By set [prompts]" in out
    assert "one [2]" in out
    assert re.search(
        r"^\S+: Speculation (pays|does not pay|changes little) on this CPU \(", out.splitlines()[-1]
    )
    assert err.count("tokens/s") == 4
    assert str(tmp_path) not in (tmp_path / "out.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 0.99])
def test_a_killed_run_goes_on_where_it_was(
    bench: Bench, tmp_path: Path, capsys: Any, share: float
) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert bench("--out", str(whole)) == 0
    text = whole.read_bytes()
    head = text.index(b"\n", text.index(b"\n") + 1) + 1
    cut.write_bytes(text[: head + int(share * (len(text) - head))])
    before = cut.read_bytes()
    kept = before[: before.rfind(b"\n") + 1]
    assert bench("--out", str(cut)) == 0
    assert cut.read_bytes().startswith(kept)
    records = [record for record in read(cut) if record["record"] != "resumed"]
    assert sorted(map(repr, map(key, records))) == sorted(
        repr(key(record)) for record in read(whole)
    )
    assert main(["bench", "report", str(cut)]) == 0
    assert "4 of 4 prompts" in capsys.readouterr().out


def test_a_run_that_fails_in_the_middle_goes_on(
    bench: Bench, tmp_path: Path, monkeypatch: Any
) -> None:
    out, count = tmp_path / "out.jsonl", 0
    real = EngineDecoder.__call__

    def killed(self: EngineDecoder, prompt: list[int], length: int) -> Any:
        nonlocal count
        count += 1
        if count == 17:
            raise KeyboardInterrupt
        return real(self, prompt, length)

    monkeypatch.setattr(EngineDecoder, "__call__", killed)
    assert bench("--out", str(out)) == 130
    there = of(read(out), "answer")
    assert there
    assert bench("--out", str(out)) == 0
    assert of(read(out), "answer")[: len(there)] == there
    assert len(of(read(out), "answer")) == 2 * 2 * 2 * 5


def test_a_finished_run_measures_nothing_anew(bench: Bench, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.jsonl"
    assert bench("--out", str(out)) == 0
    printed, before = capsys.readouterr().out, read(out)
    assert bench("--out", str(out)) == 0
    assert read(out) == [*before, {"record": "resumed"}]
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--max-new-tokens", "9"), "max_new_tokens: 8 there, 9 now"),
        (("--way", "eagle"), "ways"),
        (("--per-set", "1"), "of_prompts"),
        (("--seed", "1"), "seed: 0 there, 1 now"),
    ],
)
def test_a_file_of_other_arguments_is_refused(
    bench: Bench,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: Any,
    given: tuple[str, ...],
    message: str,
) -> None:
    out = tmp_path / "out.jsonl"
    assert bench("--out", str(out), ways=("plain",)) == 0
    before = out.read_bytes()
    monkeypatch.setattr(loading, "load_model", unloadable)
    assert bench("--out", str(out), *given, ways=("plain",)) == 2
    assert message in capsys.readouterr().err
    assert out.read_bytes() == before


def test_a_file_of_another_machine_is_refused(bench: Bench, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.jsonl"
    assert bench("--out", str(out), ways=("plain",)) == 0
    provenance, *rest = read(out)
    lines = [{**provenance, "device": "an abacus"}, *rest]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert bench("--out", str(out), ways=("plain",)) == 2
    assert "an abacus" in capsys.readouterr().err


def unloadable(*_: Any) -> Any:
    raise AssertionError("a model was loaded")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--way", "nonsense"), "unknown name 'nonsense'"),
        (("--way", "eagle,wdth=3"), "unknown option 'wdth'"),
        (("--way", "eagle/nonsense"), "unknown preset"),
        (("--way", "none:eagle"), "names no draft"),
        (("--way", "ngram:plain"), "plain takes neither"),
        (("--way", "assisted"), "assistant"),
        (("--assistant", "x/y"), "no way uses it"),
        (("--way", "assisted", "--assistant", "/no/such/model"), "does not exist"),
        (("--gguf", "x.gguf"), "no way uses it"),
        (("--draft", "none"), "draft"),
        (("--draft-option", "a=b"), "draft_options"),
        (("--rounds", "0"), "rounds: got 0, accepted 1 or more"),
        (("--max-new-tokens", "0"), "max_new_tokens"),
        (("--per-set", "-1"), "per_set"),
        (("--turns", "0"), "turns"),
        (("--temperature", "-1"), "temperature"),
        (("--temperature", "inf"), "temperature"),
        (("--seed", "-1"), "seed"),
        (("--prompts", "/no/such/file.jsonl"), "cannot be read"),
        (("--prompts", "/no/such/file.csv"), "accepted a .jsonl file"),
        (("--out", "/proc/nowhere/x.jsonl"), "out"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(
    bench: Bench, capsys: Any, monkeypatch: Any, given: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(loading, "load_model", unloadable)
    assert bench(*given) == 2
    err = capsys.readouterr().err
    assert err.startswith("specengine: error: ")
    assert message in err


def test_a_word_that_is_none_of_an_option_is_refused(bench: Bench, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench("--dtype", "int3")
    assert "--dtype" in capsys.readouterr().err


def test_a_file_of_something_else_is_refused_and_kept(
    bench: Bench, tmp_path: Path, capsys: Any
) -> None:
    other = tmp_path / "notes.txt"
    for text in ("my notes", "my notes\n", '{"record": "case"}\n'):
        other.write_text(text)
        assert bench("--out", str(other)) == 2
        assert main(["bench", "report", str(other)]) == 2
        assert other.read_text() == text
    assert "was not written by" in capsys.readouterr().err


def test_an_answer_that_is_not_plain_decodings_is_a_fault(
    bench: Bench, tmp_path: Path, monkeypatch: Any
) -> None:
    out, real = tmp_path / "out.jsonl", EngineDecoder.__call__

    def wrong(self: EngineDecoder, prompt: list[int], length: int) -> Any:
        answer = real(self, prompt, length)
        if self.engine.policy is None:
            return answer
        return answer._replace(tokens=[*answer.tokens[:-1], (answer.tokens[-1] + 1) % 200])

    monkeypatch.setattr(EngineDecoder, "__call__", wrong)
    assert bench("--out", str(out), ways=("chain", "generate")) == 1
    verdicts = {(row["way"], row["verdict"], row["diverges_at"]) for row in of(read(out), "row")}
    assert verdicts == {
        ("plain", "exact", None),
        ("chain", "mismatch", 7),
        ("generate", "exact", None),
    }
    assert (
        bench("--out", str(out), ways=("chain", "generate")) == 1
    )  # a fault of the run before counts


def test_a_near_tie_is_no_fault(bench: Bench, tmp_path: Path, monkeypatch: Any) -> None:
    out, real = tmp_path / "out.jsonl", EngineDecoder.__call__

    def other(self: EngineDecoder, prompt: list[int], length: int) -> Any:
        answer = real(self, prompt, length)
        return (
            answer
            if self.engine.policy is None
            else answer._replace(tokens=[*answer.tokens[:-1], 65])
        )

    monkeypatch.setattr(EngineDecoder, "__call__", other)
    monkeypatch.setattr(checking, "near_tie_logits", lambda target: 100.0)
    assert bench("--out", str(out), ways=("chain",)) == 0
    assert {row["verdict"] for row in of(read(out), "row") if row["way"] == "chain"} <= {
        "near-tie",
        "exact",
    }
    assert any(row["gap"] > 0 for row in of(read(out), "row") if row.get("gap"))


def test_a_way_that_cannot_run_leaves_the_others(bench: Bench, tmp_path: Path, capsys: Any) -> None:
    assert bench("--out", str(tmp_path / "out.jsonl"), ways=("specdecpp", "chain")) == 0
    (lost,) = of(read(tmp_path / "out.jsonl"), "not run")
    assert (lost["way"], lost["fault"]) == ("specdecpp", False)
    assert {row["way"] for row in of(read(tmp_path / "out.jsonl"), "row")} == {"plain", "chain"}
    assert "Not run" in capsys.readouterr().out


def test_drawn_answers_of_ours_are_those_of_plain_sampling(bench: Bench, tmp_path: Path) -> None:
    assert bench("--out", str(tmp_path / "out.jsonl"), "--temperature", "1", "--seed", "3") == 0
    rows = of(read(tmp_path / "out.jsonl"), "row")
    assert {row["way"] for row in rows if "verdict" not in row} == {"generate", "prompt-lookup"}
    assert {row["verdict"] for row in rows if "verdict" in row} == {"exact"}


def test_later_turns_stand_behind_plain_decodings_answers(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert bench("--out", str(out), "--turns", "2", ways=("chain",)) == 0
    rows = of(read(out), "row")
    assert [row["id"] for row in rows if row["way"] == "chain"][:4] == ["7", "7/2", "8", "8/2"]
    by_id = {row["id"]: row["prompt_tokens"] for row in rows if row["set"] == "one"}
    assert by_id["7/2"] > by_id["7"] + len("and then?")


def test_an_assistant_drafts_for_transformers(bench: Bench, tmp_path: Path, folder: str) -> None:
    assert (
        bench("--out", str(tmp_path / "out.jsonl"), "--assistant", folder, ways=("assisted",)) == 0
    )
    assert {row["way"] for row in of(read(tmp_path / "out.jsonl"), "row")} == {"plain", "assisted"}


def test_no_round_remembers_another(bench: Bench, tmp_path: Path) -> None:
    """A draft that recycles the answers of a round before would know this round's by heart."""
    assert bench("--out", str(tmp_path / "out.jsonl"), ways=("recycling:eagle",)) == 0
    answers = [
        answer
        for answer in of(read(tmp_path / "out.jsonl"), "answer")
        if answer["way"] == "recycling:eagle"
    ]
    rounds = [
        [answer["cycles"]["cycles"] for answer in answers if answer["round"] == round_]
        for round_ in (0, 1)
    ]
    assert rounds[0] == rounds[1]


def test_the_report_draws(bench: Bench, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out.jsonl"
    assert bench("--out", str(out), ways=("chain",)) == 0
    capsys.readouterr()
    assert (
        main(["bench", "report", str(out), "--set", "two", "--plot", str(tmp_path / "pictures")])
        == 0
    )
    printed, err = capsys.readouterr()
    assert "two; " in printed
    assert (tmp_path / "pictures" / "out.svg").read_text().startswith("<?xml")
    assert "drawn" in err
    assert main(["bench", "report", str(out), "--set", "nine"]) == 2
    assert "accepted in out.jsonl one, two" in capsys.readouterr().err


def test_the_warm_up_is_no_prompt_of_the_sets() -> None:
    from specengine.benchmark.workloads import read as read_prompts

    assert measuring.WARM_UP not in [item.text for item in read_prompts(None)]


def test_a_refused_run_claims_no_file(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert bench("--out", str(out), "--draft-option", "a=b", ways=("chain",)) == 2
    assert bench("--out", str(out), ways=("plain",)) == 0
