"""Other engines as ways: their processes, what they say at the end, and how their answers are cut."""

from __future__ import annotations

import argparse
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.peers import answer as script
from specengine.benchmark import peers
from specengine.benchmark.choice import Comparison, sampling
from specengine.errors import BackendError, InputError

ECHO = """
import json, sys
print(json.dumps({"policy": "echo 1.0"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["ids"] == [13]:
        sys.exit("no luck")
    print(json.dumps({"ids": asked["ids"][: asked["tokens"]], "first": 0.001}), flush=True)
"""


def test_a_process_answers_and_its_last_words_are_told() -> None:
    peer = peers.Peer("peer:echo", [sys.executable, "-c", ECHO], [2])
    assert peer.facts == {"policy": "echo 1.0"}
    answer = peer([5, 6, 7], 2)
    assert (answer.tokens, answer.prompt_tokens, answer.first) == ([5, 6], 3, 0.001)
    assert 0 < answer.seconds < 10
    for _ in range(2):
        with pytest.raises(BackendError, match="way peer:echo: no luck"):
            peer([13], 2)
    with pytest.raises(BackendError, match="way peer:mute: its process ended without a word"):
        peers.Peer("peer:mute", [sys.executable, "-c", "pass"], [])


def test_the_file_is_named_the_model_or_the_embedded_ones(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    assert peers.gguf_file(None, None) is None
    assert peers.gguf_file(str(file), None) == peers.gguf_file("some/model", file) == file
    with pytest.raises(InputError, match="gguf: other engines need a GGUF file of some/model"):
        peers.gguf_file("some/model", None)
    with pytest.raises(InputError, match="is not a file"):
        peers.gguf_file(None, tmp_path / "y.gguf")


def test_names_are_checked_at_once_and_environments_at_the_start(tmp_path: Path) -> None:
    def choice(*names: str, temperature: float = 0.0) -> Comparison:
        return Comparison(list(names), peers=tmp_path, options=sampling(temperature, 0))

    for unknown in ("peer:openvino/eagle", "peer:", "peer:exllama"):
        with pytest.raises(InputError, match=r"way: got 'peer:.* accepted peer:llama\.cpp, "):
            choice(unknown)
    for unknown in ("peer:openvino/draft", "peer:vllm/draft=m.gguf"):
        with pytest.raises(InputError, match=r"accepted .*peer:llama\.cpp/draft=FILE"):
            choice(unknown)
    with pytest.raises(InputError, match=r"no\.gguf is not a file"):
        choice(f"peer:openvino/draft={tmp_path / 'no.gguf'}")
    for engine in ("llama.cpp", "vllm"):
        with pytest.raises(
            InputError, match=f"way: got '{engine}'; another engine is named peer:{engine}"
        ):
            choice("auto", engine)
    assert choice("peer:openvino").names == ["plain", "peer:openvino"]
    model = peers.Model(tmp_path / "m.gguf", None, None, tmp_path)
    with pytest.raises(
        BackendError, match=r"way peer:openvino: .* has no environment openvino; .*make peers"
    ):
        peers.way("peer:openvino", tmp_path, model, [], 100).start()
    python = peers.python_of("peer:vllm/ngram", tmp_path)
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    with pytest.raises(
        BackendError, match=r"way peer:vllm/ngram: .* has no answer\.py; .*make peers"
    ):
        peers.way("peer:vllm/ngram", tmp_path, model, [], 100).start()
    shutil.copy(script.__file__, tmp_path)
    with pytest.raises(InputError, match="it needs the model as a folder"):
        peers.way("peer:vllm/ngram", tmp_path, model, [], 100).start()
    whole = peers.Model(tmp_path / "m.gguf", tmp_path, None, tmp_path)
    with pytest.raises(InputError, match="no EAGLE head of this model is known"):
        peers.way("peer:vllm/eagle3", tmp_path, whole, [], 100).start()


def test_an_environment_without_its_package_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script runs in the peer's Python, here one that has no such package."""
    python = peers.python_of("peer:ik_llama.cpp", tmp_path)
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    shutil.copy(script.__file__, tmp_path)
    pytest.importorskip("torch")
    if "ik_llama_cpp" in sys.modules:  # pragma: no cover
        pytest.skip("it is there")
    model = peers.Model(tmp_path / "m.gguf", None, None, tmp_path)
    with pytest.raises(
        BackendError, match=r"way peer:ik_llama\.cpp: ModuleNotFoundError: .*ik_llama_cpp"
    ):
        peers.way("peer:ik_llama.cpp", tmp_path, model, [], 100).start()


def args(**more: Any) -> argparse.Namespace:
    given = {
        "mode": "",
        "gguf": "m.gguf",
        "draft": "small.gguf",
        "folder": "m",
        "head": "h",
        "cache": "c",
        "threads": 1,
        "context": 64,
    }
    return argparse.Namespace(**given | more)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Put a module of a name in the place of an engine's package."""

    def put(name: str, **members: Any) -> None:
        module = types.ModuleType(name)
        for member, value in members.items():
            setattr(module, member, value)
        monkeypatch.setitem(sys.modules, name, module)

    return put


def test_answers_end_with_the_first_end(package: Any) -> None:
    class Llama:
        def __init__(self, *_: Any, **options: Any) -> None:
            self.options = options

        def reset(self) -> None:
            pass

        def generate(self, ids: list[int], **_: Any) -> Iterator[int]:
            yield from (3, 4, 2, 9, 9, 9)

    package("llama_cpp", Llama=Llama, llama_print_system_info=lambda: b"AVX512 = 1 \n")
    answer, facts = script.llama_cpp(args())
    assert facts == {"system": "AVX512 = 1"}
    assert list(answer([1], 5, [2])) == [3, 4, 2]
    assert list(answer([1], 2, [2])) == [3, 4]

    made: list[Any] = []

    class Drafted(Llama):
        def __init__(self, file: str, **options: Any) -> None:
            made.append((file, options))

    package("llama_cpp", Llama=Drafted, llama_print_system_info=lambda: b"")
    script.llama_cpp(args(mode="draft"))
    assert [file for file, _ in made] == ["small.gguf", "m.gguf"]
    drafted = made[1][1]["draft_model"](np.array([1, 2]))
    assert drafted.tolist() == [3, 4, 2, 9], "the small model's next tokens"

    class IkLlama(Llama):
        def generate(self, ids: list[int], *, max_tokens: int, **_: Any) -> list[int]:  # type: ignore[override]
            return [3, 4][:max_tokens]

    package("ik_llama_cpp", IkLlama=IkLlama)
    answer, _ = script.ik_llama_cpp(args())
    assert list(answer([1], 5, [2])) == [3, 4, 2]
    assert list(answer([1], 2, [2])) == [3, 4]


def test_every_name_has_its_engine_and_its_requirements() -> None:
    folder = Path(__file__).parents[2] / "bench" / "peers"
    assert set(peers.MODES) == set(script.ENGINES) == {file.stem for file in folder.glob("*.txt")}
