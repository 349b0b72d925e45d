"""Traces: what is written is what the engine did, it comes back the same, and it is shown without harm."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine import policies
from specengine.cli import main
from specengine.cycle import Cycle, Seconds
from specengine.drafting import draft_tree
from specengine.engine import Engine
from specengine.errors import InputError
from specengine.policies import TreePolicy
from specengine.trace import Trace, TracedCycle, TraceWriter, read_trace
from specengine.trace import page as page_module
from specengine.trace.page import page
from specengine.trace.records import ACCEPTED, PRUNED, REJECTED, ROOT
from specengine.trace.text import LEGEND, MARKS, cycle_lines, summary
from specengine.tree import TokenTree
from tests.toy import CPU, LetterTokenizer, Tables, ToyDrafter, ToyTarget, byte_tokenizer, policy_for, tiny

TARGET = Tables(8, 1, concentration=0.3)
DRAFT = Tables(8, 2, concentration=0.3, like=TARGET, share=0.7)
PROMPT = [1, 2, 3]
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!--",
    "\x1b[31m\x1b]0;title\x07",
    "\N{RIGHT-TO-LEFT OVERRIDE}evil",
    "\r\n\u2028{{data}}",
    "'\"`&amp;$\\",
    "\ud800",  # half a character, as a broken tokenizer might give
)


class HostileTokenizer(LetterTokenizer):
    def decode(self, tokens: Any, skip_special_tokens: bool = False) -> str:
        return "".join(HOSTILE[token] for token in tokens)


def toy_engine(policy: TreePolicy | None, tokenizer: Any = None, seed: int = 0, **draft: Any) -> Engine:
    target = ToyTarget(TARGET)
    drafter = None if policy is None else ToyDrafter(DRAFT, **draft)
    return Engine(target, drafter, policy, tokenizer or LetterTokenizer())


def write(file: Path, engine: Engine, *prompts: list[int], **options: Any) -> tuple[Trace, list[Cycle]]:
    """The trace of these generations as it is read, and the engine's own cycles."""
    cycles = []
    with TraceWriter(file, engine) as trace:
        for prompt in prompts or (PROMPT,):
            pieces = trace.follow(engine.stream(prompt, **{"max_new_tokens": 24, **options}))
            cycles += [piece.cycle for piece in pieces]
    return read_trace(file), cycles


@pytest.fixture
def written(tmp_path: Path) -> Trace:
    """Two queries of a beam that prunes."""
    engine = toy_engine(policies.make("eagle", width=3, expansions=2, budget=5))
    return write(tmp_path / "run.jsonl", engine, PROMPT, [4], temperature=1.0, seed=3)[0]


# ---------------------------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("name", ["chain", "eagle", "fixed", "random", "plain"])
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1000), temperature=st.sampled_from([0.0, 1.0]), normalized=st.booleans())
def test_a_trace_is_what_the_engine_did(
    name: str, seed: int, temperature: float, normalized: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    policy = None if name == "plain" else policy_for(name, seed)
    kind = {} if policy is None else {"normalized": normalized}
    file = tmp_path_factory.mktemp("trace") / "run.jsonl"
    trace, cycles = write(file, toy_engine(policy, **kind), temperature=temperature, seed=seed)
    (query,) = trace.queries
    assert len(query.cycles) == len(cycles)
    for traced, cycle in zip(query.cycles, cycles, strict=True):
        check_cycle(traced, cycle)
    assert sum(len(cycle.committed) for cycle in query.cycles) == 24
    assert "".join(cycle.text for cycle in query.cycles) == LetterTokenizer().decode(
        [token for cycle in cycles for token in cycle.tokens]
    )
    assert query.stats is not None
    assert query.tau == pytest.approx(query.stats["mean_acceptance_length"])
    assert query.delta == pytest.approx(query.stats["mean_draft_passes"])
    assert query.verified == pytest.approx(query.stats["num_spec_tokens"] + 1)
    assert (query.finish_reason, query.seed, query.prompt_tokens) == ("length", seed, PROMPT)


def check_cycle(traced: TracedCycle, cycle: Cycle) -> None:
    """The traced tree holds the verified one, and everything else that was drafted."""
    tree = cycle.tree
    assert [traced.tokens[node] for node in traced.kept] == tree.tokens.tolist()
    assert [traced.depths[node] for node in traced.kept] == tree.depths.tolist()
    assert len(traced.tokens) - 1 == cycle.drafted
    assert traced.committed == cycle.tokens
    assert traced.passes == tree.passes
    for name, log_probs in (("probabilities", tree.log_probs), ("path_probabilities", tree.path_log_probs)):
        kept = [getattr(traced, name)[node] for node in traced.kept]
        assert kept == pytest.approx(log_probs.exp().tolist(), rel=1e-4)
    assert [traced.tokens[node] for node in traced.accepted] == tree.tokens[cycle.path].tolist()
    counts = {state: traced.states.count(state) for state in (ROOT, ACCEPTED, REJECTED, PRUNED)}
    assert counts[ROOT] == 1
    assert counts[ACCEPTED] == cycle.accepted
    assert counts[REJECTED] == tree.size - 1 - cycle.accepted
    assert counts[PRUNED] == cycle.drafted + 1 - tree.size
    for nodes in traced.children:
        assert [traced.ranks[node] for node in nodes] == list(range(1, len(nodes) + 1))
        likely = [traced.probabilities[node] for node in nodes]
        assert likely == sorted(likely, reverse=True)


def test_a_beam_with_a_small_budget_shows_what_it_pruned(written: Trace) -> None:
    for query in written.queries:
        for cycle in query.cycles:
            assert (len(cycle.tokens) - 1, len(cycle.kept)) == (3 + 2 * 9, 5)
            assert cycle.states.count(PRUNED) == 21 - 4


def test_tracing_does_not_change_the_answer(tmp_path: Path) -> None:
    engine = toy_engine(policy_for("eagle"))
    expected = engine.generate(PROMPT, max_new_tokens=24)
    _, cycles = write(tmp_path / "run.jsonl", engine)
    assert [token for cycle in cycles for token in cycle.tokens] == expected.token_ids


def test_the_header_describes_the_engine(written: Trace) -> None:
    assert (written.model, written.draft) == ("ToyTarget", "toy")
    assert written.policy == "Eagle(width=3, expansions=2, budget=5)"
    assert {"specengine", "torch", "transformers", "python"} == set(written.versions)


def test_a_cycle_that_no_engine_made_is_its_kept_tree(tmp_path: Path) -> None:
    draft = draft_tree(0, _begun(ToyDrafter(DRAFT)), policy_for("fixed"), Seconds(), CPU)
    tree = draft.tree
    cycle = Cycle(tree, [0], [5], Seconds(), draft.drafted)
    with TraceWriter(tmp_path / "run.jsonl", toy_engine(None)) as trace:
        traced = trace._traced(cycle, "")
    assert traced.kept == list(range(tree.size))
    check_cycle(traced, cycle)


def _begun(drafter: ToyDrafter) -> ToyDrafter:
    drafter.begin(PROMPT)
    return drafter


def test_a_draft_gives_the_tree_it_was_taken_from() -> None:
    policy = policies.make("eagle", width=3, expansions=2, budget=5)
    draft = draft_tree(0, _begun(ToyDrafter(DRAFT)), policy, Seconds(), CPU)
    assert draft.kept is not None
    assert torch.equal(draft.grown.tokens[draft.kept], draft.tree.tokens)
    assert (draft.drafted, draft.tree.size) == (21, 5)
    plain = draft_tree(0, None, None, Seconds(), CPU)
    assert (plain.drafted, plain.grown, plain.kept) == (0, plain.tree, None)


def test_probabilities_that_are_no_numbers_count_as_zero(tmp_path: Path) -> None:
    tree = TokenTree.root(0, 5)
    log_probs = torch.tensor([float("nan"), float("-inf"), 1e-6, 0.0])
    tree.add(torch.zeros(4, dtype=torch.int64), torch.tensor([1, 2, 3, 4]), log_probs)
    with TraceWriter(tmp_path / "run.jsonl", toy_engine(None)) as trace:
        traced = trace._traced(Cycle(tree, [0], [5], Seconds()), "")
    assert traced.probabilities == traced.path_probabilities == [1.0, 0.0, 0.0, 1.0, 1.0]


def test_a_generation_that_is_broken_off_leaves_a_readable_query(tmp_path: Path) -> None:
    engine, file = toy_engine(policy_for("chain")), tmp_path / "run.jsonl"
    with TraceWriter(file, engine) as trace:
        pieces = trace.follow(engine.stream(PROMPT))
        next(pieces)
        assert len(read_trace(file).queries[0].cycles) == 1  # each record is there at once
        pieces.close()
        for _ in trace.follow(engine.stream(PROMPT, max_new_tokens=5)):
            pass
    broken, whole = read_trace(file).queries
    assert (len(broken.cycles), broken.finish_reason, whole.finish_reason) == (1, None, "length")
    assert broken.stats is not None
    assert broken.stats["num_spec_steps"] == 1


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"trace: .*missing.* cannot be written"):
        TraceWriter(tmp_path / "missing" / "run.jsonl", toy_engine(None))


# ---------------------------------------------------------------------------------------------------- what is read


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def rewritten(trace: Trace, change: Any) -> Path:
    """The file after `change` was let loose on its records."""
    lines = records(trace.file)
    change(lines)
    trace.file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return trace.file


@settings(deadline=None, max_examples=60)
@given(share=st.floats(0, 1))
def test_a_killed_run_can_be_read_up_to_its_last_line(share: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "killed.jsonl"
    if not file.exists():
        write(file, toy_engine(policy_for("chain")), PROMPT, [4])
    content = file.read_bytes()
    whole, part = read_trace(file), content[: int(share * len(content))]
    cut = file.with_name("cut.jsonl")
    cut.write_bytes(part)
    if b"}" not in part.rstrip(b"\n") or not part.startswith(content.split(b"\n")[0]):
        with pytest.raises(InputError, match="holds no record"):
            read_trace(cut)
        return
    trace = read_trace(cut)
    assert trace.truncated == (part.split(b"\n")[-1] not in {b"", content.split(b"\n")[part.count(b"\n")]})
    for query, original in zip(trace.queries, whole.queries, strict=False):
        assert query.cycles == original.cycles[: len(query.cycles)]
    complete = [record for record in content.splitlines()[: part.count(b"\n")] if b'"record":"cycle"' in record]
    assert sum(len(query.cycles) for query in trace.queries) >= len(complete)


def set_field(number: int, name: str, value: Any) -> Any:
    return lambda lines: lines[number].__setitem__(name, value)


BROKEN: list[tuple[Any, str]] = [
    (set_field(0, "record", "cycle"), "line 1: record: got cycle, but a trace begins with a record trace"),
    (set_field(0, "format", 2), "line 1: format: got 2, this specengine reads 1"),
    (set_field(0, "model", 7), "line 1: trace.model: got 7, expected a string"),
    (lambda lines: lines[0].pop("draft"), "line 1: trace.draft is missing"),
    (lambda lines: lines.insert(1, lines[0]), "line 2: record: a second record trace"),
    (set_field(1, "record", "nonsense"), "line 2: record: got 'nonsense', accepted trace, query, cycle, end"),
    (set_field(1, "record", ["cycle"]), "line 2: record: got ['cycle']"),
    (set_field(1, "seed", True), "line 2: query.seed: got True, expected an integer or null"),
    (set_field(1, "extra", 1), "line 2: query.extra is unknown"),
    (lambda lines: lines.pop(1), "line 2: record: got cycle outside a query"),
    (lambda lines: lines.append(lines[2]), "record: got cycle outside a query"),
    (set_field(2, "tokens", []), "line 3: cycle.tokens: got [], expected at least the root"),
    (set_field(2, "tokens", [1, -2]), "line 3: cycle.tokens: got [1, -2], expected a list of token ids"),
    (set_field(2, "texts", ["a"]), "line 3: cycle.texts: got ['a'], expected 22 entries"),
    (set_field(2, "parents", [-1, *range(1, 22)]), "line 3: cycle.parents"),
    (set_field(2, "parents", [0, *[0] * 21]), "line 3: cycle.parents"),
    (set_field(2, "probabilities", [2.0] * 22), "expected a list of numbers from 0 to 1"),
    (set_field(2, "probabilities", [float("nan")] * 22), "line 3 is no JSON (NaN is no number of JSON)"),
    (set_field(2, "kept", [1, 2]), "line 3: cycle.kept: got [1, 2], expected ascending nodes, the root first"),
    (set_field(2, "kept", [0, 21]), "line 3: cycle.kept"),
    (set_field(2, "kept", [0, 22]), "line 3: cycle.kept"),
    (set_field(2, "kept", [0, 2, 1]), "line 3: cycle.kept"),
    (set_field(2, "accepted", [0, 22]), "line 3: cycle.accepted: got [0, 22], expected a path of kept nodes"),
    (set_field(2, "accepted", []), "line 3: cycle.accepted"),
    (set_field(2, "committed", []), "line 3: cycle.committed: got [], expected the accepted tokens and one more"),
    (set_field(2, "passes", -1), "line 3: cycle.passes: got -1, expected 0 or more"),
    (set_field(2, "seconds", {"draft": -1}), "line 3: cycle.seconds"),
    (set_field(-1, "finish_reason", 3), "end.finish_reason: got 3"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_what_is_broken_is_named(written: Trace, change: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as raised:
        read_trace(rewritten(written, change))
    assert str(written.file) in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no record"),
        (b"half a li", "holds no record"),
        (b"\x00\xff\n", "line 1 is no JSON"),
        (b"[" * 100_000 + b"\n", "line 1 is no JSON"),
        (b"[]\n", "line 1: got [], expected an object"),
        (b'{"record":"trace","format":' + b"9" * 5000 + b"}\n", "line 1"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "run.jsonl"
    file.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(message)):
        read_trace(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path / "missing.jsonl")


# ---------------------------------------------------------------------------------------------------- in the terminal

TREE = TracedCycle(
    tokens=[7, 1, 2, 3, 4, 5, 6],
    texts=["root", " a", "b\n", "\x1b[31m", "d", "e", "f"],
    parents=[-1, 0, 0, 1, 1, 1, 2],
    probabilities=[1.0, 0.5, 0.25, 0.125, 0.5, 0.25, 0.001],
    path_probabilities=[1.0, 0.5, 0.25, 0.0625, 0.25, 0.125, 0.0002],
    kept=[0, 1, 2, 4],
    accepted=[0, 1],
    committed=[1, 9],
    committed_texts=[" a", "?"],
    text=" a?",
    passes=2,
    seconds={},
)


def test_a_tree_in_the_terminal() -> None:
    assert "\n".join(cycle_lines(TREE)).splitlines()[2:-1] == [
        "                   'root' 7",
        " 0.500    0.500  ✓ ├ ' a' 1",
        "                 + │ ├ '?' 9",
        " 0.500    0.250  × │ ├ 'd' 4",
        "                 · │ └ 2 pruned, the best 'e' 0.250",
        " 0.250    0.250  × └ 'b\\n' 2",
        " 0.001    2e-04  ·   └ 'f' 6",
    ]


def test_every_pruned_node_on_request() -> None:
    lines = list(cycle_lines(TREE, pruned=True))
    assert lines[-1] == LEGEND
    assert [line[17] for line in lines[2:-1]] == [" ", "✓", "+", "×", "·", "·", "×", "·"]
    assert " 0.125    0.062  · │ └ '\\x1b[31m' 3" in lines


def test_a_token_that_was_drafted_and_pruned_is_noted() -> None:
    missed = dataclasses.replace(TREE, committed=[1, 5], committed_texts=[" a", "e"])
    assert any(line.endswith("'e' 5, drafted but pruned") for line in cycle_lines(missed))


def test_a_long_chain_does_not_recurse() -> None:
    size = 3000
    chain = TracedCycle(
        tokens=[1] * size, texts=["x"] * size, parents=list(range(-1, size - 1)), probabilities=[1.0] * size,
        path_probabilities=[1.0] * size, kept=list(range(size)), accepted=[0], committed=[2], committed_texts=["y"],
        text="y", passes=size, seconds={},
    )  # fmt: skip
    assert len(list(cycle_lines(chain))) == size + 4


def test_the_summary_counts_through_all_files(written: Trace) -> None:
    lines = list(summary([written, written]))
    rows = [line.split() for line in lines if re.match(r" +\d", line)]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    query = written.queries[0]
    assert rows[0][1:7] == [
        str(len(query.cycles)), "24", f"{query.tau:.2f}", f"{query.delta:.2f}", "5.0", "21.0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "title"),
    [
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nName\na  river.<|im_end|>\n<|im_start|>assistant",
         "Name a river."),
        ("[INST] hello there [/INST]", "hello there"),
        ("once upon a time", "once upon a time"),
        ("word", "word"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_title_is_what_was_asked(written: Trace, prompt: str, title: str) -> None:
    trace = read_trace(rewritten(written, set_field(1, "prompt", prompt)))
    assert trace.queries[0].title == title


# ---------------------------------------------------------------------------------------------------- the page


def hostile(file: Path) -> Trace:
    engine = toy_engine(policies.make("eagle", width=3, expansions=2, budget=5), HostileTokenizer())
    return write(file, engine, list(range(8)), temperature=1.0, seed=1)[0]


def test_hostile_tokens_do_no_harm(tmp_path: Path, capsys: Any) -> None:
    trace = hostile(tmp_path / "run.jsonl")
    text = page([trace])
    assert text.count("<script") == text.count("</script>") == 2  # the data and page.js
    data = text.split('<script id="data" type="application/json">')[1].split("</script>")[0]
    assert not re.search("[<>&\u2028]", data)
    assert json.loads(data)["runs"][0]["texts"] == {str(token): text for token, text in enumerate(HOSTILE)}
    assert main(["trace", str(trace.file), "--pruned"]) == 0
    shown = capsys.readouterr().out
    assert not [letter for letter in shown if letter != "\n" and not letter.isprintable()]


def test_the_page_needs_nothing_else(written: Trace) -> None:
    text = page([written])
    assert not re.search(r"""(src|href)=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)|\bon\w+=|innerHTML""", text)
    assert "default-src 'none'" in text
    assert "{{" not in text.split('<script id="data"')[0]


def test_the_page_holds_the_tree(written: Trace) -> None:
    data = json.loads(page([written]).split('application/json">')[1].split("</script>")[0])
    assert len(data["queries"]) == 2
    for query, shown in zip(written.queries, data["queries"], strict=True):
        assert shown["end"] == "length"
        for cycle, small in zip(query.cycles, shown["cycles"], strict=True):
            assert [small[key] for key in "tpkac"] == [
                cycle.tokens, cycle.parents, cycle.kept, cycle.accepted, cycle.committed,
            ]  # fmt: skip
            assert small["e"] == pytest.approx(cycle.probabilities, rel=1e-3)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_of_the_page_is_a_script() -> None:
    script = Path(page_module.__file__).with_name("page.js")
    done = subprocess.run(["node", "--check", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_is_part_of_the_package() -> None:
    setup = (Path(__file__).parent.parent / "setup.py").read_text()
    assert "trace/page.*" in setup


# ---------------------------------------------------------------------------------------------------- pictures


def test_acceptance_is_counted_by_depth_and_rank(written: Trace) -> None:
    pytest.importorskip("matplotlib")
    from specengine.trace.pictures import acceptance_counts

    accepted, verified = acceptance_counts(written.queries)
    cycles = [cycle for query in written.queries for cycle in query.cycles]
    assert verified.sum() == sum(len(cycle.kept) - 1 for cycle in cycles)
    assert accepted.sum() == sum(len(cycle.accepted) - 1 for cycle in cycles)
    assert (accepted <= verified).all()
    assert accepted[0].sum() == sum(len(cycle.accepted) > 1 for cycle in cycles)
    small = acceptance_counts([type(written.queries[0])("", [], None, [TREE])])
    assert [grid.tolist() for grid in small] == [[[1, 0], [0, 0]], [[1, 1], [1, 0]]]


def test_pictures_of_several_policies(written: Trace, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    other, _ = write(tmp_path / "other.jsonl", toy_engine(policy_for("chain")))
    plain, _ = write(tmp_path / "plain.jsonl", toy_engine(None))
    files = [str(trace.file) for trace in (written, other, plain)]
    assert main(["trace", *files, "--pictures", str(tmp_path / "pictures")]) == 0
    drawn = capsys.readouterr().out.split()
    assert [Path(file).name for file in drawn] == [
        "acceptance-by-depth-and-rank.svg", "acceptance-length.svg", "draft-passes-against-length.svg",
    ]  # fmt: skip
    for file in drawn:
        text = Path(file).read_text()
        assert "<svg" in text
        assert "Chain(length=4)" in text  # matplotlib notes each text beside its glyphs


def test_pictures_of_a_run_without_a_draft(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plain, _ = write(tmp_path / "plain.jsonl", toy_engine(None))
    assert main(["trace", str(plain.file), "--pictures", str(tmp_path)]) == 0


def test_pictures_say_what_they_need(written: Trace, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["trace", str(written.file), "--pictures", str(tmp_path)]) == 2
    assert "pictures: matplotlib draws them" in capsys.readouterr().err


def test_pictures_need_a_cycle(written: Trace, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    file = rewritten(written, lambda lines: lines.__delitem__(slice(2, None)))
    assert main(["trace", str(file), "--pictures", str(tmp_path)]) == 2
    assert "there is no cycle" in capsys.readouterr().err
    assert main(["trace", str(file), "--html", str(tmp_path / "page.html")]) == 0
    assert main(["trace", str(file)]) == 0


# ---------------------------------------------------------------------------------------------------- the commands


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny(seed=1, initializer_range=0.1, max_position_embeddings=2048).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


SAID = "the cat and the dog and the cat"


@pytest.mark.parametrize("extra", [[], ["--json"], ["--stream"]])
def test_generate_with_a_trace_answers_the_same(folder: str, tmp_path: Path, capsys: Any, extra: list[str]) -> None:
    command = ["generate", SAID, "--model", folder, "--max-new-tokens", "20", *extra]
    assert main(command) == 0
    expected = capsys.readouterr().out
    file = tmp_path / "run.jsonl"
    assert main([*command, "--trace", str(file)]) == 0
    out = capsys.readouterr().out
    (query,) = read_trace(file).queries
    if extra == ["--json"]:
        expected, out = json.loads(expected)["text"], json.loads(out)["text"]
    assert out == expected
    assert "".join(cycle.text for cycle in query.cycles) == out.removesuffix("\n")
    assert (query.title, query.finish_reason) == (SAID, "length")
    assert SAID in query.prompt


def test_chat_writes_every_turn(folder: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello you\nagain please\n"))
    file = tmp_path / "run.jsonl"
    assert main(["chat", "--model", folder, "--max-new-tokens", "12", "--trace", str(file)]) == 0
    assert [query.title for query in read_trace(file).queries] == ["hello you", "again please"]
    assert main(["trace", str(file), "--query", "2"]) == 0
    assert "query 2 of 2, cycle 1 of" in capsys.readouterr().out


def test_trace_shows_the_summary_and_a_tree(written: Trace, capsys: Any) -> None:
    assert main(["trace", str(written.file)]) == 0
    out = capsys.readouterr().out
    assert all(line in out for line in summary([written]))
    assert "query 1 of 2, cycle 1 of" in out
    assert all(line in out for line in cycle_lines(written.queries[0].cycles[0]))
    assert main(["trace", str(written.file), "--query", "2", "--cycle", "3"]) == 0
    out = capsys.readouterr().out
    assert "tau" not in out
    assert all(line in out for line in cycle_lines(written.queries[1].cycles[2]))


def test_colours_stand_beside_the_marks(written: Trace, capsys: Any, monkeypatch: Any) -> None:
    assert main(["trace", str(written.file)]) == 0
    plain = capsys.readouterr().out
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["trace", str(written.file)]) == 0
    coloured = capsys.readouterr().out
    assert "\x1b[2m" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain


def test_an_output_without_those_letters_gets_others(written: Trace, monkeypatch: Any) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["trace", str(written.file)]) == 0
    assert b"v accepted   x verified" in out.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--query", "3"], "query: got 3, accepted 1 to 2"),
        (["--query", "0"], "query: got 0, accepted 1 to 2"),
        (["--cycle", "999"], "cycle: got 999, accepted 1 to"),
        (["--cycle", "0"], "cycle: got 0, accepted 1 to"),
        (["--cycle", "-1"], "cycle: got -1, accepted 1 to"),
        (["--html", "/proc/nowhere/page.html"], "html: /proc/nowhere/page.html cannot be written"),
        (["--pictures", "/proc/nowhere"], "pictures: /proc/nowhere"),
    ],
)
def test_options_out_of_range(written: Trace, capsys: Any, options: list[str], message: str) -> None:
    assert main(["trace", str(written.file), *options]) == 2
    assert message in capsys.readouterr().err


def test_html_from_several_files(written: Trace, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "new" / "page.html"
    assert main(["trace", str(written.file), str(written.file), "--html", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.read_text(encoding="utf-8") == page([written, written])


def test_marks_tell_states_apart_without_colour() -> None:
    assert len(set(MARKS.values())) == len(MARKS)
