"""A model split over two processes: the same tokens as in one, and an error that names a rank that is gone."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import distributed

from specengine import Engine
from specengine.checkpoints.eagle import save_head
from specengine.cli import main
from specengine.errors import InputError, UnsupportedModelError
from specengine.models import tensor_parallel
from specengine.models.eagle import EagleConfig
from tests.heads import deep
from tests.models.parallel_answers import PROMPT, WAYS
from tests.toy import byte_tokenizer, near_copy, random_state, tiny

pytestmark = pytest.mark.skipif(
    not distributed.is_gloo_available(), reason="torch was built without gloo"
)

ROOT = Path(__file__).parents[2]
ALONE = {"OMP_NUM_THREADS": "1"}
PLAIN = {"dtype": "float32", "offline": True, "backend": "huggingface"}


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def torchrun(*arguments: str, count: int = 2) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    command = [*launcher, "--master-port", str(port()), "-m", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | ALONE,
        timeout=240,
        check=False,
    )


class Job(NamedTuple):
    """A model on two ranks, and the draft and the policies that it answers with."""

    model: Path
    draft: str
    policies: tuple[str, ...]
    tokens: int = 30

    def arguments(self) -> list[str]:
        return [str(port()), str(self.model), self.draft, str(self.tokens), *self.policies]


FAMILIES = ("llama", "qwen3", "mistral", "phi")


@pytest.mark.model
@pytest.mark.slow
def test_two_ranks_answer_as_one_process_does(default_model_path: Path, tmp_path: Path) -> None:
    """All models in one run, as a process takes longer to start than to answer."""
    jobs = [
        *(_family(name, tmp_path / name) for name in FAMILIES),
        _with_a_head(tmp_path / "head"),
        Job(default_model_path, "recycling", ("auto", "eagle", "talon"), tokens=16),
    ]
    arguments = [word for job in jobs for word in ("--", *job.arguments())]
    run = torchrun("tests.models.parallel_answers", *arguments[1:])
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    for job in jobs:
        backend, scores = lines.pop(0)["backend"], lines.pop(0)["scores"]
        assert "2 ranks" in backend
        answers = [lines.pop(0) for _ in range(len(job.policies) * len(WAYS))]
        assert [line["policy"] for line in answers[:: len(WAYS)]] == list(job.policies)
        engine = Engine.from_pretrained(str(job.model), "none", **PLAIN)
        one = [rated.logprob for rated in engine.score(PROMPT)]
        assert scores == pytest.approx(one, abs=1e-3), job
        wanted = [
            engine.generate(PROMPT, max_new_tokens=job.tokens, **way).token_ids for way in WAYS
        ]
        assert [line["tokens"] for line in answers] == [wanted[line["way"]] for line in answers], (
            job
        )
        if job.draft.endswith("draft"):  # a near copy: trees were accepted
            assert any(line["steps"] < len(line["tokens"]) for line in answers), job
    assert lines == []


def _family(name: str, folder: Path) -> Job:
    tiny(name).save_pretrained(folder / "target")
    near_copy(name).save_pretrained(folder / "draft")
    return Job(folder / "target", str(folder / "draft"), ("auto", "eagle", "talon"))


def _with_a_head(folder: Path) -> Job:
    """It reads embeddings and states. Its heads cannot be dealt out to two: attention stays whole."""
    target = deep(
        "llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=48, head_dim=16
    )
    target.save_pretrained(folder / "target")
    config = EagleConfig(
        version=3, hidden_size=48, intermediate_size=64, num_heads=3, num_kv_heads=3, head_dim=16,
        target_hidden_size=48, vocab_size=260, draft_vocab_size=260, layer_ids=(1, 3, 4),
    )  # fmt: skip
    save_head(config, random_state(config), folder / "head")
    return Job(folder / "target", str(folder / "head"), ("default", "talon"))


@pytest.mark.slow
def test_the_command_line_answers_once(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    asked = [
        "specengine",
        "generate",
        "Hello",
        "--model",
        str(tmp_path),
        "--offline",
        "--max-new-tokens",
        "8",
    ]
    run = torchrun(*asked, "--json", "--dtype", "float32")
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    one = Engine.from_pretrained(str(tmp_path), "none", **PLAIN).generate("Hello", max_new_tokens=8)
    assert found["token_ids"] == one.token_ids


@pytest.mark.parametrize("name", ["reset", tensor_parallel.END])
def test_the_end_waits_until_no_thread_holds_a_tensor(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was let go while Python ended took its lock in a destructor, and the process aborted."""
    held: list[Any] = []

    def broadcast(tensor: Any, **_: Any) -> None:
        held.append(tensor)

    def let_go() -> None:
        time.sleep(0.3)
        ended.append(time.perf_counter())
        held.clear()

    ended: list[float] = []
    monkeypatch.setattr(tensor_parallel.dist, "broadcast", broadcast)
    other = threading.Thread(target=let_go)
    other.start()
    command = tensor_parallel._broadcast((name, (1, [2])), tensor_parallel.Ranks(0, 2, None))
    waited = bool(ended)
    other.join()
    assert command == [name, [1, [2]]]
    assert waited == (name == tensor_parallel.END)


@pytest.mark.slow
@pytest.mark.parametrize("gone", [0, 1])
def test_a_killed_rank_ends_the_other_with_an_error_that_names_it(
    gone: int, tmp_path: Path
) -> None:
    tiny("llama", max_position_embeddings=1 << 16).save_pretrained(tmp_path)
    world = ALONE | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    meeting = str(port())
    ranks = []
    for rank in (0, 1):
        own = world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [
            sys.executable,
            "-m",
            "tests.models.parallel_answers",
            meeting,
            str(tmp_path),
            "recycling",
            "60000",
            "eagle",
        ]
        ranks.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=os.environ | own,
            )
        )
    try:
        assert ranks[0].stdout is not None
        assert "2 ranks" in ranks[0].stdout.readline()
        time.sleep(1.0)  # in the middle of an answer
        ranks[gone].send_signal(signal.SIGKILL)
        _, told = ranks[1 - gone].communicate(timeout=240)  # it would wait for a command for ever
        assert ranks[1 - gone].returncode not in (0, None)
        assert re.search(rf"rank {gone} of 2 is gone", told), told[-2000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_plan": "all"}, "tp_plan: got 'all', accepted auto or none"),
        ({"tp_plan": "auto"}, "tp_plan: this is the only process; start it by torchrun"),
        ({"tp_plan": "auto", "quantize": "int8"}, "tp_plan: got quantize too"),
        ({"tp_plan": "auto", "graphs": True}, "tp_plan: got graphs too"),
    ],
)
def test_what_cannot_be_split_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        Engine.from_pretrained(str(tmp_path), "none", **options)


def test_models_without_a_plan_or_with_an_odd_one_out_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        UnsupportedModelError, match="64 units of a layer's MLP cannot be divided among 3 ranks"
    ):
        tensor_parallel.splitting(tiny("llama", intermediate_size=64).config)
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel has no tensor-parallel plan"):
        tensor_parallel.splitting(tiny("gpt2").config)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_commands_that_load_more_than_one_engine_are_refused_by_every_rank(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specengine.cli.RANKS", 2)
    monkeypatch.setenv("RANK", rank)
    assert main(["check"]) == 2
    assert "torchrun: accepted with the commands generate, chat, serve" in capsys.readouterr().err
