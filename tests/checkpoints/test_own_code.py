"""No code of a folder runs unasked: nothing is read from standard input, and pickles are read as weights alone."""

import ast
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import Engine
from specengine.cli import main
from specengine.errors import SpecEngineError
from tests.toy import byte_tokenizer, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).resolve().parents[2]
OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": []}
TOKENIZER = """
from transformers import PreTrainedTokenizerFast
from tokenizers import Tokenizer, models
class Own(PreTrainedTokenizerFast):
    def __init__(self, **more):
        words = models.WordLevel({"a": 0, "b": 1}, unk_token="a")
        super().__init__(tokenizer_object=Tokenizer(words), **more)
"""
CONFIG = """
from transformers import LlamaConfig
class Own(LlamaConfig):
    model_type = "own"
"""


def changed(file: Path, **fields: Any) -> None:
    held = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(held | fields))


def of_tokenizer(folder: Path) -> str:
    changed(
        folder / "tokenizer_config.json",
        tokenizer_class="Own",
        auto_map={"AutoTokenizer": ["own.Own", None]},
    )
    return TOKENIZER


def of_tokenizer_as_a_list(folder: Path) -> str:
    changed(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map=["own.Own", None])
    return TOKENIZER


def of_config(folder: Path) -> str:
    changed(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.Own"})
    return CONFIG


def of_known_config(folder: Path) -> str:
    names = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    changed(folder / "config.json", auto_map=names)
    return CONFIG


def of_model(folder: Path) -> str:
    changed(folder / "config.json", model_type="bert", auto_map={"AutoModelForCausalLM": "own.Own"})
    return CONFIG


def of_processor(folder: Path) -> str:
    changed(
        folder / "processor_config.json",
        processor_class="Own",
        auto_map={"AutoProcessor": "own.Own"},
    )
    changed(folder / "preprocessor_config.json", auto_map={"AutoImageProcessor": "own.Own"})
    return CONFIG


def of_generation(folder: Path) -> str:
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text((folder / "own.py").read_text())
    return "def generate(*args, **options): ..."


def of_another_repository(folder: Path) -> str:
    changed(
        folder / "tokenizer_config.json",
        tokenizer_class="Own",
        auto_map={"AutoTokenizer": ["a/b--own.Own", None]},
    )
    return TOKENIZER


KINDS: tuple[Callable[[Path], str], ...] = (
    of_tokenizer, of_tokenizer_as_a_list, of_config, of_known_config, of_model, of_processor, of_generation,
    of_another_repository,
)  # fmt: skip


def folder_with(place: Path, kind: Callable[[Path], str]) -> Path:
    """Return the folder of a model with code that writes a file `ran` beside it."""
    tiny("llama").save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    mark = f"from pathlib import Path\nPath({str(place / 'ran')!r}).write_text('ran')\n"
    (place / "own.py").write_text(mark)
    if kind in (of_tokenizer, of_tokenizer_as_a_list, of_another_repository):
        (place / "tokenizer.json").unlink()
    body = kind(place)
    (place / "own.py").write_text(mark + body)
    return place


@pytest.fixture
def agreeing(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Standard input that would agree to all that transformers asks."""
    stdin = io.StringIO("y\nsecond\n")
    monkeypatch.setattr("sys.stdin", stdin)
    yield stdin
    assert stdin.tell() == 0, "standard input was read"


@pytest.mark.sliced(6)
@pytest.mark.parametrize("backend", [None, "huggingface"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_code_of_a_folder_does_not_run(
    kind: Callable[[Path], str],
    backend: str | None,
    tmp_path: Path,
    agreeing: io.StringIO,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = folder_with(tmp_path / "model", kind)
    if kind in (of_config, of_model):
        with pytest.raises(
            SpecEngineError, match="trust_remote_code" if kind is of_config else "do not fit"
        ):
            Engine.from_pretrained(str(folder), "ngram", backend=backend)
    else:
        engine = Engine.from_pretrained(str(folder), "ngram", backend=backend)
        assert engine.generate([5, 6, 7], **OPTIONS).token_ids
        assert (engine.tokenizer is None) == (
            kind in (of_tokenizer, of_tokenizer_as_a_list, of_another_repository)
        )
    out, err = capsys.readouterr()
    assert out == ""
    assert not (folder / "ran").exists()
    if kind in (of_tokenizer, of_tokenizer_as_a_list, of_another_repository):
        assert "no tokenizer for" in err
        assert "--trust-remote-code" in err


@pytest.mark.parametrize("given", ["tokenizer", "draft", "adapter"])
def test_code_of_what_is_given_beside_a_model_does_not_run(
    given: str, tmp_path: Path, agreeing: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path / "other", of_tokenizer if given == "tokenizer" else of_config)
    arguments: tuple[Any, ...] = (
        (tiny("llama"), "ngram") if given == "tokenizer" else (tiny("llama"), str(folder))
    )
    if given == "adapter":
        pytest.importorskip("peft")
        (tmp_path / "adapter").mkdir()
        adapter = {
            "peft_type": "LORA",
            "base_model_name_or_path": str(folder),
            "target_modules": ["q_proj"],
        }
        changed(tmp_path / "adapter" / "adapter_config.json", **adapter)
        arguments = (str(tmp_path / "adapter"), "ngram")
    options = {"tokenizer": str(folder)} if given == "tokenizer" else {}
    with pytest.raises(SpecEngineError, match="trust_remote_code=True"):
        Engine.from_pretrained(*arguments, **options)
    assert capsys.readouterr().out == ""
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("backend", [None, "huggingface"])
def test_trusted_code_of_a_tokenizer_runs_without_a_question(
    backend: str | None, tmp_path: Path, agreeing: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path / "model", of_tokenizer)
    engine = Engine.from_pretrained(str(folder), "ngram", backend=backend, trust_remote_code=True)
    assert engine.tokenizer("b")["input_ids"] == [1]
    assert (folder / "ran").exists()
    assert capsys.readouterr().out == ""


def test_the_command_line_names_its_option(
    tmp_path: Path, agreeing: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path / "model", of_tokenizer)
    assert main(["generate", "a b", "--model", str(folder), "--draft", "ngram"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "code of its own" in err
    assert "--trust-remote-code" in err
    assert not (folder / "ran").exists()


def test_a_module_that_an_adapter_names_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "of_an_adapter.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    tiny("llama").save_pretrained(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    adapter = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(tmp_path / "base"),
        "target_modules": ["q_proj"],
    }
    changed(
        tmp_path / "adapter" / "adapter_config.json",
        **adapter,
        megatron_config={},
        megatron_core="of_an_adapter",
    )
    with pytest.raises(SpecEngineError, match="of_an_adapter"):
        Engine.from_pretrained(str(tmp_path / "adapter"), "ngram")
    assert not (tmp_path / "ran").exists()


# ---- pickles


class Runs:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return open, (str(self.mark), "w")


@pytest.mark.parametrize("given", ["model", "head", "adapter"])
def test_code_in_a_pickle_does_not_run(given: str, tmp_path: Path) -> None:
    folder, mark = tmp_path / "folder", tmp_path / "ran"
    base = tiny("llama")
    base.save_pretrained(folder)
    pickled = {**base.state_dict(), "more": Runs(mark)}
    if given == "model":
        (folder / "model.safetensors").unlink()
        torch.save(pickled, folder / "pytorch_model.bin")
        with pytest.raises(SpecEngineError):
            Engine.from_pretrained(str(folder), "ngram")
    elif given == "head":
        head = tmp_path / "head"
        head.mkdir()
        changed(head / "config.json", architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=16)
        torch.save(pickled, head / "pytorch_model.bin")
        with pytest.raises(SpecEngineError):
            Engine.from_pretrained(base, str(head))
    else:
        pytest.importorskip("peft")
        changed(
            folder / "adapter_config.json",
            peft_type="LORA",
            base_model_name_or_path=str(folder),
            target_modules=["q_proj"],
        )
        torch.save(pickled, folder / "adapter_model.bin")
        with pytest.raises(SpecEngineError):
            Engine.from_pretrained(str(folder), "ngram")
    assert not mark.exists()


# ---- the rule in the code

# fields alone, and this package's own
READS_NO_CODE = "GenerationConfig", "PeftConfig", "Engine", "cls"


def breaches(code: str) -> list[str]:
    """Return the calls that may ask for consent on standard input, or unpickle more than weights."""
    listed = []
    for call in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)):
        text = ast.unparse(call.func)
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if text == "torch.load" and ast.unparse(given.get("weights_only", call)) != "True":
            listed.append(ast.unparse(call))
        if text in ("pickle.load", "pickle.loads", "pickle.Unpickler", "unpickle"):
            listed.append(ast.unparse(call))
        receiver, _, name = text.rpartition(".")
        if (
            name not in ("from_pretrained", "from_config")
            or receiver.rpartition(".")[2] in READS_NO_CODE
        ):
            continue
        trusted = given.get("trust_remote_code")
        if trusted is None or (
            isinstance(trusted, ast.Constant) and type(trusted.value) is not bool
        ):
            listed.append(ast.unparse(call))
    return listed


def test_every_call_says_whether_code_is_trusted() -> None:
    files = [
        file for part in ("specengine", "bench", "research") for file in (ROOT / part).rglob("*.py")
    ]
    assert len(files) > 200
    assert [
        (str(file), call) for file in files for call in breaches(file.read_text(encoding="utf-8"))
    ] == []


@pytest.mark.parametrize(
    "code",
    [
        "AutoTokenizer.from_pretrained(folder)",
        "transformers.AutoConfig.from_pretrained(folder, trust_remote_code=None)",
        "auto_class(config).from_config(config)",
        "LlamaForCausalLM.from_pretrained(folder, **common)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "pickle.load(file)",
    ],
)
def test_a_breach_of_the_rule_is_seen(code: str) -> None:
    assert breaches(code) == [code]
    assert (
        breaches(
            "AutoTokenizer.from_pretrained(a, trust_remote_code=b); torch.load(a, weights_only=True)"
        )
        == []
    )
