"""Texts across requests: answers stay exact, owners apart, files whole or refused, and repeats take fewer passes."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from specengine import Engine, ops
from specengine.checkpoints.texts import Memory, OwnedTexts, corpus
from specengine.drafters.lookup import backend
from specengine.engine import Pool, TextGeneration
from specengine.engine.scheduler import Ticket
from specengine.errors import InputError
from tests.examples import examples
from tests.toy import byte_tokenizer, tiny

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        ops.backends()["mix_rows"].name != "cpp",
        reason="the extension specengine._ops is not built",
    ),
]
PROMPT = [*range(40, 56), *range(40, 50)]
GREEDY: dict[str, Any] = {"max_new_tokens": 48, "temperature": 0.0, "eos_token_id": []}
SAMPLED: dict[str, Any] = {"max_new_tokens": 48, "temperature": 0.9, "seed": 5, "eos_token_id": []}
HEADER = b"specengine memory 1\nabc\n"


def loaded(memory: str = "process", **options: Any) -> Engine:
    return Engine.from_pretrained(tiny(), "recycling", "eagle", memory=memory, **options)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_answers_are_those_of_plain_decoding_the_second_time_too(options: dict[str, Any]) -> None:
    expected = loaded().generate(PROMPT, policy="plain", **options).token_ids
    engine = loaded()
    first, again = (engine.generate(PROMPT, **options) for _ in range(2))
    assert first.token_ids == again.token_ids == expected
    other = engine.generate(PROMPT[3:], **options).token_ids
    assert other == loaded().generate(PROMPT[3:], policy="plain", **options).token_ids


def test_the_same_question_takes_fewer_passes() -> None:
    """`recycling` alone keeps the model's likeliest tokens from the first time, too: it forgets them here."""
    passes = {}
    for memory in ("process", "off"):
        engine = loaded(memory=memory)
        engine.generate(PROMPT, **SAMPLED)
        engine.drafter.inner.forget()  # type: ignore[union-attr]
        passes[memory] = engine.generate(PROMPT, **SAMPLED).stats.num_spec_steps
    assert 2 * passes["process"] < passes["off"]


def test_a_poisoned_memory_changes_no_answer() -> None:
    expected = loaded(memory="off").generate(PROMPT, **GREEDY).token_ids
    engine = loaded()
    chance = random.Random(0)
    for place in range(len(expected)):
        text = [*PROMPT, *expected[:place]]
        engine.memory.of().add(text, [chance.randrange(64) for _ in range(20)])  # type: ignore[union-attr]
    assert engine.generate(PROMPT, **GREEDY).token_ids == expected


def test_lanes_share_one_memory() -> None:
    engine = loaded(backend="native")
    pool = Pool(engine, 2)
    assert all(other.memory is engine.memory for other in pool.engines)
    answers = pool.generate([PROMPT, PROMPT[2:], PROMPT], **GREEDY)
    expected = loaded(backend="native", memory="off").generate(PROMPT, **GREEDY).token_ids
    assert answers[0].token_ids == answers[2].token_ids == expected
    texts = engine.memory.of().index.texts()  # type: ignore[union-attr]
    assert [*PROMPT, *expected] in texts


def test_owners_do_not_see_each_other() -> None:
    engine = loaded()
    memory = engine.memory
    assert memory is not None
    TextGeneration(engine, PROMPT, GREEDY, ticket=Ticket(owner="one")).run()
    assert len(memory.of("one").index.texts()) == 1
    assert memory.of("two").index.texts() == memory.of().index.texts() == []
    generation = TextGeneration(engine, PROMPT, GREEDY, ticket=Ticket(owner="two"))
    assert generation.answer.request.memory is memory.of("two")


def test_owners_share_the_bytes() -> None:
    memory = Memory(backend().TextMemory, 64, limit=1 << 20)
    for number in range(70):
        memory.of(str(number)).add(list(range(20)), list(range(number % 40)))
    owners = list(memory._owners)
    assert owners == [str(number) for number in range(6, 70)]
    assert sum(texts.index.bytes for texts in memory._owners.values()) <= 64 * 30_208


# ---- files


def test_texts_are_on_disk_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    answer = loaded(memory=str(folder)).generate(PROMPT, **GREEDY).token_ids
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    later = loaded(memory=str(folder))
    assert later.memory is not None
    assert later.memory.of().index.texts() == [[*PROMPT, *answer]]
    later.memory.of("key").add(PROMPT, answer)
    assert len(list(folder.iterdir())) == 2
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_disk_is_the_folder_that_clean_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path))
    loaded(memory="disk").generate(PROMPT, **GREEDY)
    assert len(list((tmp_path / "memory").iterdir())) == 1


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, list[list[int]]]:
    file = tmp_path / "abc-all.memory"
    texts = [[number, *range(20, 40)] for number in range(8)]
    owned = OwnedTexts(backend().TextMemory(1 << 20), file, HEADER, 64)
    for text in texts:
        owned.add(text[:5], text[5:])
    return file, texts


def texts_in(file: Path) -> list[list[int]]:
    return OwnedTexts(backend().TextMemory(1 << 20), file, HEADER, 64).index.texts()


def test_what_is_cut_anywhere_is_whole_up_to_there(kept: tuple[Path, list[list[int]]]) -> None:
    file, texts = kept
    data = file.read_bytes()
    assert texts_in(file) == texts
    each = 8 + 4 * len(texts[0])
    for length in range(len(data)):
        file.write_bytes(data[:length])
        whole = max(0, length - len(HEADER)) // each
        assert texts_in(file) == texts[:whole], length
        assert file.read_bytes() == data[: len(HEADER) + whole * each]  # it is whole again
        owned = OwnedTexts(backend().TextMemory(1 << 20), file, HEADER, 64)
        owned.add([50, 51, 52], [53, 54, 55])
        assert texts_in(file) == [*texts[:whole], [50, 51, 52, 53, 54, 55]]


def test_a_changed_byte_gives_no_other_text(kept: tuple[Path, list[list[int]]]) -> None:
    file, texts = kept
    data = file.read_bytes()
    chance = random.Random(0)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << chance.randrange(8)
        file.write_bytes(bytes(changed))
        if place < len(HEADER):
            with pytest.raises(InputError, match=r"memory: .* name another folder"):
                texts_in(file)
            assert file.read_bytes() == bytes(changed)
        else:
            left = texts_in(file)
            assert left == texts[: len(left)]
            assert len(left) == (place - len(HEADER)) // (8 + 4 * len(texts[0]))


@examples(200)
@given(st.binary(max_size=200))
def test_any_bytes_are_texts_of_the_vocabulary_or_none(data: bytes) -> None:
    text, index = [1, 2, 3, 4, 5, 6], backend().TextMemory(1 << 20)
    assert index.read(index.records([text]), 64)
    assert index.read(data, 64) is (data == b"")
    assert index.texts() == [text]
    assert not index.read(index.records([[1, 2, 3, 4, 5, 64]]), 64)
    assert index.texts() == [text]


@pytest.mark.parametrize(
    "data", [b"PK\x03\x04 another program's", HEADER.replace(b" 1\n", b" 2\n"), b"\0" * 4096]
)
def test_a_foreign_file_is_refused_and_stays(data: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    loaded(memory=str(folder)).generate(PROMPT, **GREEDY)
    (file,) = folder.iterdir()
    file.write_bytes(data)
    with pytest.raises(InputError, match=r"memory: .* name another folder"):
        loaded(memory=str(folder))
    assert file.read_bytes() == data


def test_a_tokenizer_has_a_file_of_its_own(tmp_path: Path) -> None:
    loaded(memory=str(tmp_path)).generate(PROMPT, **GREEDY)
    loaded(memory=str(tmp_path), tokenizer=byte_tokenizer()).generate(PROMPT, **GREEDY)
    assert len(list(tmp_path.iterdir())) == 2


KILLED = """
import sys
from pathlib import Path
from specengine.checkpoints.texts import OwnedTexts
from specengine.drafters.lookup import backend
owned = OwnedTexts(backend().TextMemory(40_000), Path(sys.argv[1]), b"specengine memory 1\\nabc\\n", 1 << 20)
print("ready", flush=True)
number = 0
while True:
    number += 1
    owned.add([number] * 3, [number] * (5 + number % 40))
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_whole_texts(tmp_path: Path) -> None:
    file, chance = tmp_path / "abc-all.memory", random.Random(0)
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(file)],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(chance.random() / 2)
        process.kill()
        process.wait()
        process.stdout.close()
        texts = OwnedTexts(backend().TextMemory(1 << 20), file, HEADER, 1 << 20).index.texts()
        assert texts
        assert all(text == [text[0]] * (8 + text[0] % 40) for text in texts)


def test_a_file_stays_within_its_share(tmp_path: Path) -> None:
    file = tmp_path / "abc-all.memory"
    owned = OwnedTexts(backend().TextMemory(40_000), file, HEADER, 1 << 20)
    for number in range(2000):
        owned.add([number], [number] * 30)
        assert file.stat().st_size < 31_000
    file.unlink()  # as `clean` does
    owned.add([1], [7] * 30)
    assert texts_in(file) == [] or file.exists()


def test_a_text_that_cannot_be_kept_is_a_note(tmp_path: Path) -> None:
    engine = loaded(memory=str(tmp_path / "kept"))
    engine.generate(PROMPT, **GREEDY)
    (file,) = (tmp_path / "kept").iterdir()
    file.unlink()
    file.mkdir()
    result = engine.generate(PROMPT[1:], **GREEDY)
    assert len(result.token_ids) == GREEDY["max_new_tokens"]
    assert any(note.startswith("memory: this text was not kept") for note in result.stats.notes)


# ---- what is asked for


def test_texts_are_kept_in_the_process_where_a_draft_copies() -> None:
    assert loaded(memory="off").memory is None
    engine = Engine.from_pretrained(tiny(), "recycling", "eagle")
    assert engine.memory is not None
    engine.generate(PROMPT, **GREEDY)
    assert len(engine.memory.of().index.texts()) == 1
    assert Engine.from_pretrained(tiny(), "recycling", "eagle", lookup=False).memory is None


def test_a_changed_model_begins_with_no_texts() -> None:
    model = tiny()
    engine = Engine.from_pretrained(model, "recycling", "eagle")
    engine.generate(PROMPT, **GREEDY)
    model.resize_token_embeddings(60)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    engine.generate(PROMPT, **GREEDY)
    texts = engine.memory.of().index.texts()  # type: ignore[union-attr]
    assert len(texts) == 1
    assert max(texts[0]) < 60


@pytest.mark.parametrize(
    "options", [{"memory": "disk"}, {"memory": "process"}, {"memory_from": "somewhere.jsonl"}]
)
def test_a_draft_that_copies_nothing_has_none(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"memory: got .* copies nothing"):
        Engine.from_pretrained(tiny(), "recycling", "eagle", lookup=False, **options)
    with pytest.raises(InputError, match="memory_from: got"):
        loaded(memory="off", memory_from="somewhere.jsonl")


def test_a_corpus_begins_the_memory(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('"plain"\n{"prompt": "a", "n": 3, "answer": "b"}\n\n')
    chat = '{"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}'
    (tmp_path / "chats.jsonl").write_text(chat)
    assert list(corpus(tmp_path / "texts.jsonl")) == ["plain", "a\nb"]
    assert list(corpus(tmp_path / "chats.jsonl")) == ["c\nd"]
    (tmp_path / "wrong.jsonl").write_text('"fine"\n{')
    with pytest.raises(InputError, match=r"memory_from: .*wrong.jsonl, line 2 is not JSON"):
        list(corpus(tmp_path / "wrong.jsonl"))
    with pytest.raises(InputError, match="cannot be read"):
        list(corpus(tmp_path / "missing.jsonl"))
    folder = tmp_path / "repository"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "config").write_text("hidden")
    (folder / "a.py").write_text("import this\n")
    (folder / "b.bin").write_bytes(b"\0\1\2")
    (folder / "c.png").write_bytes(b"\x89PNG\xff")
    assert list(corpus(folder)) == ["import this\n"]
    engine = loaded(tokenizer=byte_tokenizer(), memory_from=str(folder))
    assert engine.memory is not None
    assert len(engine.memory.of().index.texts()) == 1


# ---- many requests


@pytest.mark.slow
def test_ten_thousand_requests_hold_no_more_than_the_bound() -> None:
    engine, chance, limit = loaded(), random.Random(1), 1 << 20
    engine.memory = Memory(backend().TextMemory, 64, limit=limit)
    index = engine.memory.of().index
    resident = []
    for number in range(10_000):
        prompt = [chance.randrange(64) for _ in range(48)]
        engine.generate(prompt, max_new_tokens=2, temperature=0.0, eos_token_id=[])
        assert index.bytes <= limit
        if number % 1000 == 999:
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]))
    assert 100 < len(index.texts()) < 9_000
    pages = (4 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert max(resident[2:]) <= resident[1] + pages
