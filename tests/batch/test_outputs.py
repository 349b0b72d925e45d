"""Outputs of `specengine batch`: files of others stay, half a line never counts, and streams are written as streams."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from specengine.batch import files as outputs
from specengine.batch.answering import Answered
from specengine.batch.files import Files, Lines, beside, opened
from specengine.batch.lines import Item
from specengine.errors import InputError
from tests.batch import files
from tests.batch.conftest import Example

resource = pytest.importorskip("resource")
pytestmark = pytest.mark.usefixtures("one_thread")
HEAD: tuple[dict[str, Any], dict[str, Any]] = ({"record": "provenance"}, {"record": "settings"})
ITEMS = [Item(place, f"id {place}", "x", {"seed": 0}) for place in range(4)]
KEPT = '{"settings": {"theme": "dark"}}'


def answered(place: int, length: int = 10, figures: int = 0) -> Answered:
    stats = [{"num_generated_tokens": 1, "noted": "n" * figures}]
    return Answered(place, {"id": ITEMS[place].id, "text": "t" * length}, stats)


# ---- whose files


def linked(prompts: Path, kind: str) -> Path:
    other = prompts.with_name("other.jsonl")
    if kind == "hard link":
        other.hardlink_to(prompts)
    elif kind == "symbolic link":
        other.symlink_to(prompts)
    elif kind == "spelling":
        return prompts.parent / ".." / prompts.parent.name / prompts.name
    return prompts if kind == "name" else other


@pytest.mark.parametrize("kind", ["name", "hard link", "symbolic link", "spelling"])
@pytest.mark.parametrize("text", ['"one prompt, no line break"', '"a"\n"b"\n'])
def test_the_prompts_are_never_the_output(
    kind: str, text: str, tmp_path: Path, capsys: Any
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(text)
    assert files.batch(prompts, linked(prompts, kind), tmp_path) == 2
    assert "is the file of prompts; name another file" in capsys.readouterr().err
    assert prompts.read_text() == text


def test_prompts_from_a_descriptor_are_not_the_output_either(tmp_path: Path, capsys: Any) -> None:
    prompts = files.write(tmp_path / "prompts.jsonl", ["a"])
    with prompts.open() as handle:
        assert files.batch(Path(f"/dev/fd/{handle.fileno()}"), prompts, tmp_path) == 2
    assert "is the file of prompts" in capsys.readouterr().err
    assert beside(prompts).exists() is False


@pytest.mark.parametrize(
    "text", [KEPT, KEPT + "\n", "a note", "\n", "\0\0", '{"id": 1, "text": "an answer?"}']
)
def test_a_file_of_others_is_refused_and_stays(text: str, tmp_path: Path, capsys: Any) -> None:
    prompts, out = files.write(tmp_path / "prompts.jsonl", ["a"]), tmp_path / "out.json"
    out.write_text(text)
    assert files.batch(prompts, out, tmp_path) == 2
    assert f"{out} exists without {beside(out)}; name another file" in capsys.readouterr().err
    assert out.read_text() == text
    assert sorted(tmp_path.iterdir()) == [out, prompts]


@pytest.mark.parametrize(
    "text", [KEPT, "a note\n", '{"record": "trace"}\n{"record": "settings"}\n', '{"record": "set']
)
def test_a_file_of_others_where_figures_belong_is_refused_and_stays(
    text: str, tmp_path: Path, capsys: Any
) -> None:
    prompts, out = files.write(tmp_path / "prompts.jsonl", ["a"]), tmp_path / "out.jsonl"
    beside(out).write_text(text)
    assert files.batch(prompts, out, tmp_path) == 2
    assert "was not written by `specengine batch`" in capsys.readouterr().err
    assert beside(out).read_text() == text
    assert not out.exists()


@pytest.mark.parametrize("lines", [0, 1, 3])
@pytest.mark.parametrize(
    "text", [KEPT, KEPT + "\n", "x", '{"id": "another"}\n', '{"id": "id 1\n', "\n"]
)
def test_other_text_after_a_runs_answers_is_refused_and_stays(
    text: str, lines: int, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    with Files(out, ITEMS, *HEAD) as first:
        first.loaded({})
        for place in range(lines):
            first.add(answered(place))
    with out.open("a") as handle:
        handle.write(text)
    before = out.read_bytes(), beside(out).read_bytes()
    with pytest.raises(InputError, match=rf"line {lines + 1} of .* is no answer of this run"):
        Files(out, ITEMS, *HEAD).__enter__()
    assert (out.read_bytes(), beside(out).read_bytes()) == before


@pytest.mark.parametrize("torn", [b"", b"{", b'{"id": "id 1", "te', b'{"id": \0\0\0', b"\0\0"])
def test_what_a_crash_leaves_is_cut_off(torn: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.touch()
    beside(out).write_bytes(b'{"record": "prov')
    with Files(out, ITEMS, *HEAD) as first:
        first.loaded({})
        first.add(answered(0))
    whole = out.read_bytes()
    out.write_bytes(whole + torn)
    with Files(out, ITEMS, *HEAD) as second:
        assert second.done == 1
        assert out.read_bytes() == whole


@pytest.mark.parametrize("kind", ["name", "hard link", "symbolic link", "spelling"])
def test_two_runs_do_not_write_one_file_by_two_names(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with Files(out, ITEMS, *HEAD):
        other = linked(out, kind)
        with pytest.raises(InputError, match="another process is writing"):
            Files(other, ITEMS, *HEAD).__enter__()
    assert not [file for file in tmp_path.iterdir() if file.suffix == ".lock"]


# ---- half a line


@contextmanager
def limit(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("length", "figures"), [(40_000, 0), (0, 40_000)])
def test_what_cannot_be_written_whole_leaves_whole_lines(
    length: int, figures: int, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    torn = out if length else beside(out)
    with Files(out, ITEMS, *HEAD) as first, limit(60_000):
        first.loaded({})
        first.add(answered(0, length, figures))
        with pytest.raises(
            InputError, match=rf"{torn} cannot be written .File too large.: the answer to 'id 1' is"
        ):
            first.add(answered(1, length, figures))
    assert out.read_bytes().count(b"\n") == 1
    assert all(file.read_bytes().endswith(b"\n") for file in (out, beside(out)))
    with Files(out, ITEMS, *HEAD) as second:
        for place in range(second.done, 4):
            second.add(answered(place, length, figures))
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == [
        item.id for item in ITEMS
    ]
    assert len(beside(out).read_text().splitlines()) == 3 + len(ITEMS)


class Partial:
    """A file whose writes take three bytes, and then end or are interrupted."""

    def __init__(self, file: Any, *, interrupted: bool) -> None:
        self.file = file
        self.interrupted = interrupted

    def write(self, data: memoryview) -> int:
        count = int(self.file.write(data[:3]))
        if self.interrupted:
            raise KeyboardInterrupt
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_line_is_written_whole_or_not_at_all(
    interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    with Files(out, ITEMS, *HEAD) as first, monkeypatch.context() as patch:
        first.add(answered(0))
        lines = first._opened[out]
        patch.setattr(lines, "handle", Partial(lines.handle, interrupted=interrupted))
        with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
            first.add(answered(1))
    count = 1 if interrupted else 2
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == [
        item.id for item in ITEMS[:count]
    ]


def test_a_disk_that_fails_at_the_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with (
        pytest.raises(InputError, match=r"cannot be written .Input/output error"),
        Files(tmp_path / "o", ITEMS, *HEAD),
    ):
        monkeypatch.setattr(os, "fsync", failing)


# ---- streams


def write_all(out: Path) -> None:
    with opened(out, ITEMS, *HEAD, []) as stream:
        assert stream.done == 0
        stream.loaded({})
        for place in range(4):
            stream.add(answered(place, 100_000))


def read_from(descriptor: int, received: list[bytes]) -> None:
    with os.fdopen(descriptor, "rb") as handle:
        received.append(handle.read())


@pytest.mark.parametrize("kind", ["pipe", "socket", "pipe that does not wait"])
def test_an_open_descriptor_gets_every_line(kind: str) -> None:
    if kind == "socket":
        near, far = (end.detach() for end in socket.socketpair())
    else:
        far, near = os.pipe()
        os.set_blocking(near, kind == "pipe")
    received: list[bytes] = []
    reader = threading.Thread(target=read_from, args=(far, received))
    reader.start()
    write_all(Path(f"/dev/fd/{near}"))
    os.close(near)
    reader.join(30)
    assert [json.loads(line)["id"] for line in received[0].splitlines()] == [
        item.id for item in ITEMS
    ]


def test_a_descriptor_of_a_file_is_appended_to(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(f"{KEPT}\n")
    with out.open("a") as handle:
        write_all(Path(f"/dev/fd/{handle.fileno()}"))
        size = handle.seek(0, os.SEEK_END)
        with pytest.raises(InputError, match="nothing continues a stream"), limit(size + 10):
            write_all(Path(f"/proc/self/fd/{handle.fileno()}"))
    assert out.stat().st_size == size, "half a line is cut off there too"
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    assert out.read_text().startswith(f"{KEPT}\n")


def test_a_named_pipe_is_written_once_it_has_a_reader(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Timer(0.2, lambda: received.append(pipe.read_bytes()))
    reader.start()
    write_all(pipe)
    reader.join(30)
    assert received[0].count(b"\n") == 4


def test_a_named_pipe_without_a_reader_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "READER_SECONDS", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="a pipe that nobody reads; start its reader first"):
        write_all(tmp_path / "pipe")


def test_a_reader_that_leaves_and_a_full_device_end_the_run() -> None:
    far, near = os.pipe()
    os.close(far)
    with pytest.raises(InputError, match=r"Broken pipe.: the answer to 'id 0' is missing .line 1."):
        write_all(Path(f"/dev/fd/{near}"))
    os.close(near)
    with pytest.raises(InputError, match=r"/dev/full cannot be written .No space left on device"):
        write_all(Path("/dev/full"))


def test_a_stream_has_the_bytes_of_a_file(example: Example, tmp_path: Path, capsys: Any) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    assert files.batch(example.prompts, pipe, example.model) == 1
    reader.join(30)
    assert received == [example.out.read_bytes()]
    assert "no figures are kept, and a run that is stopped begins anew" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [pipe]


def test_a_folder_is_no_output(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be written .Is a directory"):
        write_all(tmp_path)


def test_lines_of_a_device_need_no_cutting() -> None:
    with open(os.devnull, "wb", buffering=0) as handle:
        lines = Lines(handle)
        lines.append({"a": 1})
        lines.close()
