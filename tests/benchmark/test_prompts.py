"""Prompt sets: Spec-Bench's format, the simple one, those that ship, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specengine.benchmark.workloads import Workload, digest, read
from specengine.cli.given import read_prompts
from specengine.errors import InputError

SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
    {"question_id": 91, "category": "roleplay", "turns": ["Be a tree."]},
    {"question_id": 82, "category": "writing", "turns": ["More."]},
]


def write(file: Path, entries: list[object]) -> Path:
    file.write_text(
        "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries), encoding="utf-8"
    )
    return file


def test_six_sets_of_four_ship() -> None:
    items = read(None)
    names = ["chat", "code", "extraction", "summary", "sums", "translation"]
    assert [item.set for item in items] == [name for name in names for _ in range(4)]
    assert len({item.id for item in items}) == len({item.text for item in items}) == 24
    assert [item.set for item in read(None, 1)] == names


def test_a_file_is_a_set_or_holds_several(tmp_path: Path) -> None:
    file = write(tmp_path / "question.jsonl", SPEC_BENCH)
    assert [(item.set, item.id) for item in read([file], 2)] == [
        ("question", "81"),
        ("question", "91"),
    ]
    assert read([file], 1, set_by="category") == [
        Workload("writing", "81", ("Write.", "Again.")),
        Workload("roleplay", "91", ("Be a tree.",)),
    ]


def test_lines_of_speed_bench(tmp_path: Path) -> None:
    line = {
        "category": "low_entropy",
        "sub_category": "code",
        "turns": ["Sort."],
        "source": "a",
        "src_id": "7",
    }
    lines = [
        {"question_id": "x1", "difficulty": "easy", "multiturn": False, **line},
        {
            "question_id": "x2",
            "difficulty": "hard",
            **line,
            "turns": ["Sort.", "Faster."],
            "multiturn": True,
        },
        {
            "question_id": "x3",
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi."}],
        },
    ]
    file = write(tmp_path / "throughput_1k.jsonl", lines)
    assert [item.set for item in read([file], set_by="difficulty")] == [
        "easy",
        "hard",
        "throughput_1k",
    ]
    assert [item.set for item in read([file], set_by="sub_category")] == [
        "code",
        "code",
        "throughput_1k",
    ]
    assert [item.turns for item in read([file])] == [("Sort.",), ("Sort.", "Faster."), ("Hi.",)]
    masked = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    with pytest.raises(InputError, match=r"line 2 has a note in the place of a prompt"):
        read([write(tmp_path / "masked.jsonl", [lines[0], {**lines[1], "turns": [masked]}])])


def test_a_folder_is_its_files_and_lines_may_be_simple(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", ["one line\u2028that goes on", {"prompt": "two"}])
    write(tmp_path / "a.jsonl", [{"turns": ["three"]}])
    assert read([tmp_path]) == [
        Workload("a", "0", ("three",)),
        Workload("b", "0", ("one line\u2028that goes on",)),
        Workload("b", "1", ("two",)),
    ]
    assert [turns[0] for turns in read_prompts(tmp_path / "b.jsonl")] == [
        "one line\u2028that goes on",
        "two",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ("{", "line 1 is not JSON"),
        ('"x"\n{"turns": []}', "line 2 is neither"),
        ('{"turns": [1]}', "line 1 is neither"),
        (
            '{"question_id": 1, "turns": ["x"]}\n{"question_id": 1, "turns": ["y"]}',
            "question_id 1 twice",
        ),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(InputError, match=message):
        read([tmp_path / "x.jsonl"])


def test_a_folder_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no \.jsonl file"):
        read([tmp_path])


def test_prompts_are_told_apart() -> None:
    one, other = Workload("a", "1", ("x", "y")), Workload("a", "1", ("x",))
    assert digest([one]) == digest([Workload("a", "1", ("x", "y"))])
    assert digest([one]) != digest([other])
    assert digest([one, other]) != digest([other, one])
