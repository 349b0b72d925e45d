"""The command line, through main(): every command, what goes where, and the exit status."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import specengine
from specengine import engine
from specengine.cli import arguments, chat, inspection, main, make_parser, terminal
from specengine.models.agreement import Convention
from specengine.models.checkpoints import save_head
from tests.test_checking import accept_blindly
from tests.toy import byte_tokenizer, head_config, random_state, tiny

PROMPT = "the cat and the dog and the cat"
ANSI = re.compile(r"\x1b\[\d+m")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random model with its tokenizer, as from_pretrained reads them; it repeats itself, so drafts are taken."""
    path = tmp_path_factory.mktemp("model")
    tiny(seed=1, initializer_range=0.1, max_position_embeddings=2048).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def pipe_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def expected(folder: str, prompt: str = PROMPT, **options: Any) -> str:
    made = specengine.Engine.from_pretrained(folder, policy="plain")
    return made.generate(prompt, **{"max_new_tokens": 20, **options}).text


# ---- generate


def test_generate_prints_the_answer_alone(folder: str, capsys: Any) -> None:
    assert main(["generate", PROMPT, "--model", folder, "--max-new-tokens", "20"]) == 0
    out, err = capsys.readouterr()
    assert out == expected(folder) + "\n"
    assert "acceptance length" in err
    assert "ngram" in err


@pytest.mark.parametrize("given", [["-"], []])
def test_generate_reads_standard_input(folder: str, capsys: Any, monkeypatch: Any, given: list[str]) -> None:
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


def test_generate_passes_every_option(folder: str, capsys: Any) -> None:
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
    assert list(options) == [name for name, _, _ in arguments.GENERATION_OPTIONS]
    given = [text for name, value in options.items() for text in (arguments.flag(name), str(value))]
    assert main(["generate", PROMPT, "--model", folder, "--raw", *given]) == 0
    out, err = capsys.readouterr()
    assert out == expected(folder, raw=True, **options) + "\n"
    assert "note" not in err


def test_generate_stops_at_a_stop_string(folder: str, capsys: Any) -> None:
    text = expected(folder)
    stop = next(letter for letter in text[3:] if letter.isprintable() and letter != "\N{REPLACEMENT CHARACTER}")
    assert main(["generate", PROMPT, "--model", folder, "--stop", "not in there", "--stop", stop]) == 0
    assert capsys.readouterr().out == expected(folder, stop_strings=[stop]) + "\n"


def test_generate_with_a_system_message(folder: str, capsys: Any) -> None:
    assert main(["generate", PROMPT, "--model", folder, "--system", "be brief", "--max-new-tokens", "20"]) == 0
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}]
    assert capsys.readouterr().out == expected(folder, messages) + "\n"  # type: ignore[arg-type]
    assert main(["generate", PROMPT, "--model", folder, "--system", "be brief", "--raw"]) == 2


def test_generate_takes_policy_and_draft_options(folder: str, capsys: Any) -> None:
    policy = ["--policy", "eagle", "-o", "width=2", "--policy-option", "budget=5"]
    draft = ["--draft", "ngram", "--draft-option", "longest=3"]
    assert main(["generate", PROMPT, "--model", folder, "--max-new-tokens", "20", *policy, *draft]) == 0
    out, err = capsys.readouterr()
    assert out == expected(folder) + "\n"
    assert "Eagle(width=2, expansions=7, budget=5)" in err


def test_generate_takes_a_draft_model(folder: str, capsys: Any) -> None:
    assert main(["generate", PROMPT, "--model", folder, "--draft", folder, "--max-new-tokens", "20"]) == 0
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


# ---- --show-draft


@pytest.mark.parametrize("stream", [[], ["--stream"]])
@pytest.mark.parametrize("stop", [[], ["--stop", "AA"]])
def test_show_draft_colours_add_up_to_the_answer(
    folder: str, capsys: Any, monkeypatch: Any, stream: list[str], stop: list[str]
) -> None:
    options = ["--model", folder, "--max-new-tokens", "120", *stop]
    assert main(["generate", PROMPT, *options]) == 0
    plainly = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["generate", PROMPT, *options, "--show-draft", *stream]) == 0
    out, err = capsys.readouterr()
    assert ANSI.sub("", out) == plainly
    assert terminal.OWN in out
    assert terminal.DRAFTED in out or stop
    assert terminal.DraftColours.LEGEND in err


class Letters:
    """Two bytes make an é; any other token is itself."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(tokens).decode(errors="replace")


def test_draft_colours_by_token() -> None:
    e_acute = list("é".encode())
    view = terminal.DraftColours(type("Holder", (), {"tokenizer": Letters()}))  # type: ignore[arg-type]
    pieces = [
        ("ab", [97, 98], 1),  # a drafted, b the target's own
        ("", e_acute[:1], 0),  # half a character is held back
        ("éc", [e_acute[1], 99], 2),
        ("d", [100, 101, 102], 3),  # cut after d
    ]
    drafted, own, reset = terminal.DRAFTED, terminal.OWN, terminal.RESET
    painted = [view.paint(_piece(*piece)) for piece in pieces]
    assert painted == [
        f"{drafted}a{reset}{own}b{reset}",
        "",
        f"{drafted}é{reset}{drafted}c{reset}",
        f"{drafted}d{reset}",
    ]


def _piece(text: str, tokens: list[int], accepted: int) -> Any:
    cycle = type("OneCycle", (), {"tokens": tokens, "accepted": accepted})
    return engine.StreamPiece(text, cycle)  # type: ignore[arg-type]


def test_draft_colours_show_what_the_end_leaves_over() -> None:
    view = terminal.DraftColours(type("Holder", (), {"tokenizer": Letters()}))  # type: ignore[arg-type]
    broken = "\N{REPLACEMENT CHARACTER}"
    assert ANSI.sub("", view.paint(_piece("a" + broken, [97, 0xC3], 0))) == "a" + broken


@pytest.mark.parametrize(
    ("variable", "value", "tty", "reason"),
    [("NO_COLOR", "1", True, "NO_COLOR"), ("TERM", "dumb", True, "dumb"), ("TERM", "xterm", False, "no terminal")],
)
def test_show_draft_says_why_there_are_no_colours(
    folder: str, capsys: Any, monkeypatch: Any, variable: str, value: str, tty: bool, reason: str
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: tty)
    assert main(["generate", PROMPT, "--model", folder, "--max-new-tokens", "20", "--show-draft"]) == 0
    out, err = capsys.readouterr()
    assert out == expected(folder) + "\n"
    assert "--show-draft prints without colours" in err
    assert reason in err


# ---- chat


def turns(folder: str, *texts: str, **options: Any) -> list[str]:
    session = specengine.Engine.from_pretrained(folder, policy="plain").session()
    return [session.generate(text, **{"max_new_tokens": 12, **options}).text for text in texts]


CHAT = ["chat", "--max-new-tokens", "12", "--model"]


def test_chat_reads_a_turn_per_line(folder: str, capsys: Any, monkeypatch: Any) -> None:
    pipe_in(monkeypatch, "hello\n\nagain\n/reset\nhello\n/nonsense\n/quit\nnever read\n")
    assert main([*CHAT, folder]) == 0
    out, err = capsys.readouterr()
    first, second = turns(folder, "hello", "again")
    assert out == f"{first}\n{second}\n{first}\n"
    assert "starts over" in err
    assert "unknown command /nonsense" in err


def test_chat_passes_errors_on_when_piped(folder: str, capsys: Any, monkeypatch: Any) -> None:
    pipe_in(monkeypatch, "x" * 3000 + "\n")
    assert main([*CHAT, folder]) == 2
    assert "specengine: error: prompt" in capsys.readouterr().err


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: str | BaseException) -> None:
    """A terminal where these lines are typed; exceptions are keys such as Ctrl-C and Ctrl-D."""
    waiting: Iterator[str | BaseException] = iter([*lines, EOFError()])

    def typed(prompt: str = "") -> str:
        line = next(waiting)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", typed)


def test_chat_in_a_terminal(folder: str, capsys: Any, monkeypatch: Any) -> None:
    type_in(monkeypatch, "hello", KeyboardInterrupt(), "x" * 3000, "again")
    assert main([*CHAT, folder]) == 0
    out, err = capsys.readouterr()
    first, second = turns(folder, "hello", "again")
    assert out == f"{first}\n{second}\n\n"
    assert "Ctrl-C stops" in err
    assert "specengine: error: prompt" in err  # and the conversation went on


@pytest.mark.parametrize(("module", "name"), [(engine, "walk"), (chat, "write")], ids=["in the engine", "in output"])
def test_ctrl_c_stops_the_answer_and_the_session_goes_on(
    folder: str, capsys: Any, monkeypatch: Any, module: Any, name: str
) -> None:
    real, calls = getattr(module, name), []

    def interrupted_once(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(module, name, interrupted_once)
    type_in(monkeypatch, "hello", "/reset", "hello")
    assert main([*CHAT, folder, "--policy", "plain"]) == 0
    out, err = capsys.readouterr()
    (whole,) = turns(folder, "hello")
    part, _, rest = out.partition("\n")
    assert whole.startswith(part)
    assert len(part) < len(whole)
    assert rest == f"{whole}\n\n"
    assert "(stopped)" in err


def test_a_stopped_answer_stays_in_the_conversation(folder: str, monkeypatch: Any, capsys: Any) -> None:
    made = specengine.Engine.from_pretrained(folder)
    session = made.session()
    real, calls = chat.write, []

    def write(text: str) -> None:
        calls.append(text)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(text)

    monkeypatch.setattr(chat, "write", write)
    parsed = make_parser().parse_args(["chat", "--max-new-tokens", "12"])
    chat._answer(session, "hello", parsed)
    assert [message["role"] for message in session.messages] == ["user", "assistant"]
    assert session.messages[1]["content"] == "".join(calls[:2])
    chat._answer(session, "again", parsed)
    assert len(session.messages) == 4


# ---- inspect


def test_inspect_lists_what_there_is(capsys: Any) -> None:
    assert main(["inspect"]) == 0
    out = capsys.readouterr().out
    for word in (
        "transformers",
        "reference",
        "eagle",
        "width=10 expansions=7 budget=60",
        "ngram",
        "3,2,1,1,1",
        "cache",
    ):
        assert word in out


def test_inspect_json_describes_a_model(folder: str, capsys: Any) -> None:
    assert main(["inspect", "--json", "--model", folder]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["specengine"] == specengine.__version__
    assert found["backends"]["cpu"]["tree_mask"]["name"] in found["backends"]["cpu"]["tree_mask"]["available"]
    assert found["policies"]["eagle"]["options"] == {"width": 10, "expansions": 7, "budget": 60}
    assert found["drafters"]["ngram"]["default policy"]["name"] == "eagle"
    model = found["model"]
    assert (model["type"], model["layers"], model["vocabulary"], model["context"]) == ("llama", 2, 260, 2048)
    assert (model["attention"], model["packed weights"], model["chat template"]) == ("tree", False, True)
    assert main(["inspect", "--model", folder]) == 0
    assert re.search(r"chat template +yes\n", capsys.readouterr().out)


@pytest.mark.parametrize(("make", "state"), [(False, "not there yet"), (True, "damaged")])
def test_inspect_says_whether_the_embedded_model_is_there(
    capsys: Any, monkeypatch: Any, tmp_path: Path, make: bool, state: str
) -> None:
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path))
    if make:
        (tmp_path / "models" / specengine.models.embedded.NAME).mkdir(parents=True)
    assert main(["inspect", "--json"]) == 0
    cache = json.loads(capsys.readouterr().out)["cache"]
    assert cache["folder"] == str(tmp_path)
    assert cache[specengine.models.embedded.NAME].startswith(state)


@pytest.fixture
def head(tmp_path: Path) -> str:
    config = head_config(layer_ids=(0, 1, 1))
    save_head(config, random_state(config), tmp_path / "head")
    return str(tmp_path / "head")


def test_inspect_describes_a_head(folder: str, head: str, capsys: Any) -> None:
    assert main(["inspect", "--json", "--model", folder, "--draft", head]) == 0
    draft = json.loads(capsys.readouterr().out)["draft"]
    assert draft["dialect"] == "EAGLE-3, official layout, fields as specforge means them"
    assert "fc.weight float32 [32, 96]" in draft["tensors"]
    assert "head_dim=8" in draft["config"]
    assert re.fullmatch(r"0\.\d{3} with hidden states 0, 1, 1", draft["agreement"]["as read"])
    assert main(["inspect", "--model", folder, "--draft", head]) == 0
    assert re.search(r"agreement, as read +0\.\d{3} with hidden states 0, 1, 1\n", capsys.readouterr().out)


def test_inspect_warns_of_layers_that_are_counted_otherwise(
    folder: str, head: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits = torch.arange(100) % 2 == 0
    measured = [Convention("as read", (0, 1, 1), hits), Convention("as read, + 1", (1, 2, 2), torch.ones_like(hits))]
    monkeypatch.setattr(inspection, "one_step_agreement", lambda *_: measured)
    assert main(["inspect", "--model", folder, "--draft", head]) == 0
    assert capsys.readouterr().err == (
        "specengine: warning: the draft agrees with the target more often (1.000 instead of 0.500) when it reads "
        "hidden states 1, 2, 2 instead of 0, 1, 1; pass --draft-option layer_ids=1,2,2\n"
    )


def test_inspect_shows_a_head_of_another_model_without_measuring_it(folder: str, head: str, capsys: Any) -> None:
    assert main(["inspect", "--model", folder, "--draft", head, "--draft-option", "layer_ids=2,16,29"]) == 0
    out, err = capsys.readouterr()
    assert "fc.weight" in out
    assert "agreement" not in out
    assert "hidden states 2, 16, 29; a target of 2 layers has 0 to 1 before its final norm; its agreement" in err


def test_inspect_refuses_what_is_no_head(folder: str, capsys: Any) -> None:
    assert main(["inspect", "--model", folder, "--draft", folder]) == 2
    assert "is no folder or Hub id of an EAGLE head" in capsys.readouterr().err


def test_generate_drafts_with_a_head(folder: str, head: str, capsys: Any) -> None:
    answers = []
    for draft in (["--draft", head], ["--policy", "plain"]):
        assert main(["generate", "--model", folder, *draft, "--max-new-tokens", "12", PROMPT]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


# ---- check


CHECK = ["check", "--max-new-tokens", "20", "--model"]


def test_check_is_exact_for_every_policy(folder: str, capsys: Any) -> None:
    policies = ["--policy", "eagle", "--policy", "chain", "--policy", "fixed", "--policy", "plain"]
    assert main([*CHECK, folder, *policies, PROMPT, "another one"]) == 0
    out, err = capsys.readouterr()
    assert out == "8 exact, 0 near-tie, 0 mismatch\n"
    assert err.count("exact") == 8


def test_check_without_a_draft(folder: str, capsys: Any) -> None:
    assert main([*CHECK, folder, PROMPT, "--draft", "none", "--policy", "plain"]) == 0
    assert capsys.readouterr().out.startswith("1 exact")
    assert main([*CHECK, folder, PROMPT, "--draft", "none", "--policy", "eagle"]) == 2
    assert "draft 'none' leaves nothing for a policy to shape" in capsys.readouterr().err
    assert main([*CHECK, folder, PROMPT, "--policy", "eagle", "--policy", "nonsense"]) == 2
    assert "unknown name 'nonsense'" in capsys.readouterr().err


def test_check_has_prompts_of_its_own(folder: str, capsys: Any) -> None:
    assert main([*CHECK, folder, "--limit", "2"]) == 0
    assert capsys.readouterr().out == "2 exact, 0 near-tie, 0 mismatch\n"


@pytest.mark.parametrize("extra", [["--temperature", "0.9", "--seed", "4"], ["--temperature", "1.2"]])
def test_check_sampled(folder: str, capsys: Any, extra: list[str]) -> None:
    assert main([*CHECK, folder, PROMPT, *extra]) == 0
    assert capsys.readouterr().out.startswith("1 exact")


def test_check_against_huggingface(folder: str, capsys: Any) -> None:
    assert main([*CHECK, folder, PROMPT, "--against", "huggingface"]) == 0
    assert capsys.readouterr().out.startswith("1 exact")
    assert main([*CHECK, folder, PROMPT, "--against", "huggingface", "--temperature", "1"]) == 2


def test_check_reports_a_mismatch(folder: str, capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(engine, "walk", accept_blindly)
    out_file = tmp_path / "report.json"
    assert main([*CHECK, folder, PROMPT, "--json", "--out", str(out_file)]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found == json.loads(out_file.read_text())
    assert (found["mismatch"], found["comparisons"][0]["verdict"]) == (1, "mismatch")
    assert found["comparisons"][0]["gap"] > 1e-3
    assert "mismatch" in err
    assert main([*CHECK, folder, PROMPT, "--tolerance", "60"]) == 0
    assert capsys.readouterr().out == "0 exact, 1 near-tie, 0 mismatch\n"


def test_check_reads_jsonl_with_turns(folder: str, capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = ['"a string"', '{"prompt": "an object"}', "", '{"turns": ["one", "two"]}', '"too many"']
    file.write_text("\n".join(lines))
    assert main([*CHECK, folder, "--prompts", str(file), "--limit", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["prompt"] for row in found["comparisons"]] == ["a string", "an object", "one", "two"]
    assert found["exact"] == 4


def test_check_reads_text(folder: str, capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one prompt\n\nanother\n")
    assert main([*CHECK, folder, "--prompts", str(file), "--raw"]) == 0
    assert capsys.readouterr().out.startswith("2 exact")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "x", "a .txt or a .jsonl"),
        ("a.jsonl", "{", "a.jsonl, line 1 is no JSON"),
        ("a.jsonl", '{"text": 1}', "line 1 is neither"),
        ("a.txt", "\n", "holds none"),
        ("missing/a.txt", None, "cannot be read"),
    ],
)
def test_check_refuses_bad_files(capsys: Any, tmp_path: Path, name: str, content: str | None, message: str) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    assert main(["check", "--prompts", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_check_refuses_what_it_cannot_do(folder: str, capsys: Any, tmp_path: Path) -> None:
    for given, message in (
        ([PROMPT, "--prompts", "x.txt"], "not both"),
        (["--limit", "0"], "limit"),
        ([PROMPT, "--policy", "eagle", "--policy", "chain", "-o", "width=2"], "one --policy"),
        ([PROMPT, "--out", str(tmp_path / "missing" / "out.json")], "cannot be written"),
    ):
        assert main([*CHECK, folder, *given]) == 2
        assert message in capsys.readouterr().err


# ---- demo


def test_demo_compares_three_ways(folder: str, capsys: Any) -> None:
    assert main(["demo", "--model", folder, "--max-new-tokens", "24", "--rounds", "1"]) == 0
    out, err = capsys.readouterr()
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert lines["transformers generate"].endswith("yes")
    assert lines["speculative decoding"].endswith("yes")
    assert lines["plain decoding"].endswith("-")
    assert "round 1 of 1" in err


def test_demo_explains_a_difference(folder: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine, "walk", accept_blindly)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    given = ["--prompt", PROMPT, "--max-new-tokens", "24", "--rounds", "1"]
    assert main(["demo", "--model", folder, *given]) == 0
    out = capsys.readouterr().out
    assert re.search(r"speculative decoding .* no\n", out)
    assert "speculative against plain decoding: mismatch at token" in out


def test_demo_ends_in_time(folder: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("specengine.cli.demo.ENOUGH_SECONDS", 0.0)
    assert main(["demo", "--model", folder, "--max-new-tokens", "8", "--prompt", PROMPT]) == 0
    out, err = capsys.readouterr()
    assert "median of 1 interleaved" in out
    assert "1 of 3 rounds have to do" in err


def test_demo_needs_a_round(capsys: Any) -> None:
    assert main(["demo", "--rounds", "0"]) == 2


# ---- errors


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--policy", "nonsense"], "unknown name 'nonsense'"),
        (["--policy", "eagle", "-o", "wdth=3"], "unknown option 'wdth', known are width, expansions, budget"),
        (["--policy", "eagle", "-o", "width=wide"], "expected int"),
        (["-o", "width=3"], "policy given by name"),
        (["--dtype", "int3"], "dtype"),
        (["--device", "abacus"], "device"),
        (["--temperature", "-1"], "temperature"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
    ],
)
def test_errors_are_one_line(folder: str, capsys: Any, given: list[str], message: str) -> None:
    assert main(["generate", PROMPT, "--model", folder, *given]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("specengine: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_missing_model_is_one_line(capsys: Any) -> None:
    assert main(["generate", PROMPT, "--model", "/no/such/folder", "--offline"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("given", [["-o", "width"], ["--max-new", "3"], ["--top-k", "many"]])
def test_malformed_arguments(capsys: Any, given: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["generate", PROMPT, *given])
    assert stop.value.code == 2


def test_ctrl_c_exits_with_130(folder: str, monkeypatch: Any) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "walk", interrupted)
    assert main(["generate", PROMPT, "--model", folder]) == 130


def test_a_reader_that_has_gone_is_no_traceback(folder: str, monkeypatch: Any, tmp_path: Path) -> None:
    class Gone(io.StringIO):
        def fileno(self) -> int:
            return file.fileno()

        def write(self, text: str) -> int:
            raise BrokenPipeError

    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", Gone())
        assert main(["generate", PROMPT, "--model", folder, "--max-new-tokens", "2"]) == 1


def test_version(capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"specengine {specengine.__version__}\n"


# ---- the embedded model


@pytest.mark.model
def test_the_default_model_answers(default_model_path: Path, capsys: Any) -> None:
    question = "What is the capital of France? Answer in one word."
    assert main(["generate", question, "--max-new-tokens", "16", "--offline"]) == 0
    assert "Paris" in capsys.readouterr().out
