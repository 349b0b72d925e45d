"""Learning from use: what is kept, what survives an interruption, and that only a better head is put into use."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine.checkpoints import learnt as folders
from specengine.checkpoints.eagle import Checkpoint, load_head, save_head
from specengine.checkpoints.learnt import Learnt, digest
from specengine.cli import learn as command, main
from specengine.engine import Engine, Pool
from specengine.errors import CheckpointError, InputError
from specengine.models.eagle import head_from
from specengine.train.draft.losses import loss_of
from specengine.train.draft.options import make_loss
from specengine.train.draft.teacher import Teacher
from specengine.train.draft.use import HeadComparison, Learner, ServingTeacher, UseOptions
from specengine.train.draft.validation import CHAIN_TOKENS, chain_lengths
from specengine.train.text.corpus import Text
from tests.toy import CPU, VOCABULARY, byte_tokenizer, head_config, random_state, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 6
LOSS = make_loss("ttt", steps=2)
OPTIONS = UseOptions(steps=60, step_tokens=400, general=0.1, learning_rate=1e-2)
BACKENDS = ("native", "huggingface")


class Made:
    """Folders of a model and of a head, of their use, and text beside it."""

    def __init__(self, root: Path) -> None:
        self.model, self.head = root / "model", root / "head"
        model = tiny(num_hidden_layers=LAYERS, max_position_embeddings=2048)
        with (
            torch.no_grad()
        ):  # the last token says most of the next one: there is something to learn
            for name, weight in model.named_parameters():
                weight.mul_(0.03 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1)
        model.save_pretrained(self.model)
        byte_tokenizer().save_pretrained(self.model)
        config = head_config(model=model)
        save_head(config, random_state(config), self.head)
        self.use, engine = root / "use", self.engine(root / "use")
        for prompt in prompts(48):
            engine.generate(prompt, max_new_tokens=32, temperature=0.0)
        engine.ring = None
        answers = [
            engine.generate(each, max_new_tokens=32, temperature=0.0).token_ids
            for each in prompts(10, 1)
        ]
        self.general = [
            Text(torch.tensor(each, dtype=torch.int32), torch.ones(32, dtype=torch.bool))
            for each in answers
        ]

    def engine(self, folder: Path | None, **options: Any) -> Engine:
        given = {
            "draft": str(self.head),
            "policy": "chain",
            "lookup": False,
            "learn": folder,
            **options,
        }
        return Engine.from_pretrained(str(self.model), **given)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("made"))


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (count, 4), generator=random).tolist()


def used(made: Made, folder: Path, **options: Any) -> Engine:
    """An engine that was used."""
    shutil.copytree(made.use, folder)
    return made.engine(folder, **options)


def learner(engine: Engine, made: Made) -> Learner:
    return Learner(engine, OPTIONS, loss=LOSS, general=made.general)


def taught(one: Learner) -> bool:
    """Whether one of some rounds gave a better head."""
    return any(one.round(1e-2).swapped for _ in range(4))


def ruined(found: Checkpoint) -> Checkpoint:
    """A head with the same sizes and other weights."""
    return found._replace(state={**random_state(found.config, 9), "d2t": found.state["d2t"]})


# ---------------------------------------------------------------------------------------------------- what is kept


def test_nothing_is_kept_unasked(made: Made, tmp_path: Path) -> None:
    engine = made.engine(None)
    engine.generate([1, 2, 3], max_new_tokens=4)
    assert engine.ring is None
    assert not list(tmp_path.iterdir())


def test_answers_are_kept_with_their_prompts_once(made: Made, tmp_path: Path) -> None:
    engine = made.engine(tmp_path / "use")
    answers = [engine.generate([1, 2, 3], max_new_tokens=6, temperature=0.0) for _ in range(2)]
    (text,) = engine.ring.texts()
    assert (text.tokens, text.prompt) == ([1, 2, 3, *answers[0].token_ids], 3)
    assert (tmp_path / "use").stat().st_mode & 0o077 == 0


def test_a_disk_that_is_full_ends_no_answer(made: Made, tmp_path: Path) -> None:
    engine = made.engine(tmp_path / "use")
    shutil.rmtree(tmp_path / "use" / "texts", ignore_errors=True)
    (tmp_path / "use" / "texts").write_text("in the way")
    stats = engine.generate([1, 2, 3], max_new_tokens=4).stats
    assert any("was not kept" in note for note in stats.notes)


def test_the_ring_is_bounded(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MAX_TEXTS", 6)
    monkeypatch.setattr(folders, "MAX_TOKENS", 40)
    monkeypatch.setattr(folders, "MAX_TEXT_TOKENS", 8)
    ring = made.engine(tmp_path / "use").ring
    for number in range(12):
        ring.add([number, 1], [2, 3])
    assert [text.tokens[0] for text in ring.texts()] == [6, 7, 8, 9, 10, 11], "the newest"
    for number in range(12):
        ring.add([number] * 20, [2, 3])
    texts = ring.texts()
    assert [len(text.tokens) for text in texts] == [8] * 5, "of long ones their end"
    assert {text.prompt for text in texts} == {6}


@pytest.mark.slow
def test_held_back_texts_are_never_trained_on(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = used(made, tmp_path / "use")
    ring = engine.ring.texts()
    held = {tuple(text.tokens) for text in ring if text.held_back}
    assert 4 <= len(held) < len(ring) / 2
    one = learner(engine, made)
    read, compares = [], []
    train, score = one.trained, one._score

    def trained(*given: Any) -> Checkpoint:
        reading = one.teacher.read
        monkeypatch.setattr(
            one.teacher,
            "read",
            lambda tokens, **o: (read.append(tokens[0].tolist()), reading(tokens, **o))[1],
        )
        found = train(*given)
        monkeypatch.setattr(one.teacher, "read", reading)
        return found

    monkeypatch.setattr(one, "trained", trained)
    monkeypatch.setattr(
        one,
        "_score",
        lambda found, text: (compares.append(tuple(text.tokens.tolist())), score(found, text))[1],
    )
    one.round(1e-3)
    assert read
    assert not held & {tuple(tokens) for tokens in read}
    assert held <= set(compares), "they are what is compared on"


# ---------------------------------------------------------------------------------------------------- training


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_better_head_is_put_into_use_and_answers_stay(
    made: Made, tmp_path: Path, backend: str
) -> None:
    engine = used(made, tmp_path / "use", backend=backend)
    asked = [*prompts(48)[:6], *prompts(3, 5)]
    before = [engine.generate(prompt, max_new_tokens=16, temperature=0.0) for prompt in asked]
    sampled = engine.generate(asked[0], max_new_tokens=16, temperature=1.0, seed=3)
    teaching = learner(made.engine(tmp_path / "use", backend=backend), made)
    assert taught(teaching)
    after = [engine.generate(prompt, max_new_tokens=16, temperature=0.0) for prompt in asked]
    assert [each.token_ids for each in after] == [each.token_ids for each in before]
    assert (
        engine.generate(asked[0], max_new_tokens=16, temperature=1.0, seed=3).token_ids
        == sampled.token_ids
    )
    cycles = [sum(each.stats.num_spec_steps for each in answers) for answers in (before, after)]
    assert cycles[1] < cycles[0], "the engine took the head between two answers"
    assert (
        made.engine(tmp_path / "use", backend=backend).drafter.learnt.stamp == engine.drafter._stamp
    )


@pytest.mark.slow
def test_a_worse_head_is_not(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = used(made, tmp_path / "use")
    one = learner(engine, made)
    assert taught(one)
    kept = one.learnt.head()
    monkeypatch.setattr(one, "trained", lambda found, *_: ruined(found))
    rounds = one.learn(0.5)
    assert rounds
    assert not any(each.swapped for each in rounds)
    assert digest(one.learnt.head().state) == digest(kept.state)


def test_a_head_that_loses_on_other_text_is_not(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = learner(used(made, tmp_path / "use"), made)
    compared = one.compared

    def losing(current: Checkpoint, candidate: Checkpoint, texts: Any) -> HeadComparison:
        return (
            HeadComparison(1.5, -0.2, 0.1)
            if texts[0][0].startswith("general")
            else compared(current, candidate, texts)
        )

    monkeypatch.setattr(one, "compared", losing)
    done = one.round(3e-2)
    assert done.own.gain > 2 * done.own.error, "it is better on the user's own"
    assert not done.swapped
    assert one.learnt.read()["head"] is None


def test_learning_ends_where_nothing_is_better(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = learner(used(made, tmp_path / "use"), made)
    monkeypatch.setattr(one, "trained", lambda found, *_: ruined(found))
    assert len(one.learn(600.0)) == 5, "each half as fast as the one before"


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_teacher_is_the_target_as_it_serves(made: Made, backend: str) -> None:
    engine = made.engine(None, backend=backend)
    config, state, _ = load_head(made.head)
    head = head_from(config, state, torch.float32, CPU)
    serving = ServingTeacher(engine.target, config.feature_ids(LAYERS))
    plain = Teacher(engine.target.model, config.feature_ids(LAYERS))
    tokens, answers = torch.tensor([[5, 6, 7, 8, 9, 10]]), torch.ones(1, 6, dtype=torch.bool)
    for own, other in zip(serving.read(tokens)[1:3], plain.read(tokens)[1:3], strict=True):
        torch.testing.assert_close(own, other, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(serving.embed(head, tokens), plain.embed(head, tokens))
    losses = [
        loss_of(LOSS, head, each, each.read(tokens), answers).loss for each in (serving, plain)
    ]
    torch.testing.assert_close(*losses, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_chains_are_as_long_as_a_chain_policys(made: Made, tmp_path: Path) -> None:
    """At every place of an answer, against drafting from there, by a head that knows a little."""
    one = learner(used(made, tmp_path / "use"), made)
    assert taught(one)
    engine = made.engine(tmp_path / "use", policy_options={"length": CHAIN_TOKENS})
    prompt = prompts(1)[0]
    answer = engine.generate(prompt, max_new_tokens=20, temperature=0.0).token_ids
    whole = [*prompt, *answer]
    config, state, _ = one.learnt.head()
    text = Text(torch.tensor(whole, dtype=torch.int32), torch.arange(len(whole)) >= len(prompt))
    total, count = chain_lengths(
        head_from(config, state, torch.float32, CPU), one.teacher, text
    ).tolist()
    wanted = []
    for place in range(len(prompt), len(whole)):  # of the token that a chain begins with
        cycles = engine.answer(whole[:place], max_new_tokens=10, temperature=0.0)
        wanted.append(min(len(next(cycles).tokens), 1 + len(whole) - place))
        cycles.close()
    assert (total, count) == (sum(wanted), len(answer))
    assert total > count, "some were accepted"


# ---------------------------------------------------------------------------------------------------- files


def test_whatever_write_is_the_last_the_folder_loads(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill leaves the files as they are before or after one of the renames; each such folder is opened anew."""
    engine = made.engine(tmp_path / "use")
    ring = engine.ring
    base = ring.base
    seen: list[Path] = []

    def noted() -> None:
        seen.append(tmp_path / f"killed-{len(seen)}")
        shutil.copytree(tmp_path / "use", seen[-1])

    replace, unlink = os.replace, Path.unlink

    def replaced(*given: Any) -> None:
        noted()
        replace(*given)
        noted()

    def unlinked(self: Path, **given: Any) -> None:
        unlink(self, **given)
        if self.suffix in (".json", ".safetensors"):
            noted()

    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(Path, "unlink", unlinked)
    known = [digest(base.state)]
    for seed in range(4):
        ring.add([seed, 1], [2, 3])
        state = {**random_state(base.config, seed), "d2t": base.state["d2t"]}
        known.append(digest(state))
        ring.swap(base.config, state)
    monkeypatch.undo()
    assert len(seen) > 30
    lm = engine.target.lm
    found = []
    for folder in seen:
        one = Learnt(folder, lm, str(made.model), base)
        found.append(known.index(digest(one.head().state)))
        assert all(len(text.tokens) == 4 for text in one.texts())
        one.swap(base.config, base.state)  # and learning goes on
        assert digest(one.head().state) == known[0]
    assert found == sorted(found)
    assert found[-1] == 4


@pytest.mark.slow
def test_other_folders_are_refused(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "use"
    engine = made.engine(folder)
    lm, base = engine.target.lm, engine.ring.base
    other = made.engine(None).target.lm
    with pytest.raises(InputError, match="was begun with another head"):
        Learnt(folder, lm, "m", ruined(base))
    record = engine.ring.read()
    record["target"]["embeddings"] = record["target"]["embeddings"][::-1]
    engine.ring._write(record)
    with pytest.raises(InputError, match="was begun for 'model', got 'other'"):
        Learnt(folder, other, "other", base)
    (folder / folders.FILE).write_text("{")
    with pytest.raises(InputError, match="is damaged"):
        Learnt(folder, lm, "m", base)
    (folder / folders.FILE).write_text("{}")
    with pytest.raises(InputError, match="another format"):
        Learnt(folder, lm, "m", base)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="holds other files"):
        Learnt(tmp_path / "full", lm, "m", base)
    with pytest.raises(InputError, match="cannot be written"):
        Learnt(tmp_path / "full" / "mine.txt" / "deeper", lm, "m", base)


def test_a_changed_head_is_refused(made: Made, tmp_path: Path) -> None:
    ring = made.engine(tmp_path / "use").ring
    ring.swap(ring.base.config, ring.base.state)
    save_head(ring.base.config, ruined(ring.base).state, tmp_path / "use" / "heads" / "1")
    with pytest.raises(CheckpointError, match="not the head that was learnt"):
        made.engine(tmp_path / "use")


def test_drafts_that_do_not_learn_are_refused(made: Made, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="learn: draft 'ngram' does not learn"):
        made.engine(tmp_path / "use", draft="ngram", policy=None, lookup=None)
    with pytest.raises(InputError, match="learn: got 3"):
        made.engine(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="not loaded with `learn`"):
        Learner(made.engine(None))


def test_one_process_learns_at_a_time(made: Made, tmp_path: Path) -> None:
    one, other = (learner(made.engine(tmp_path / "use"), made) for _ in range(2))
    with one.learnt.alone(), pytest.raises(InputError, match="another process is learning"):
        other.learn(1.0)
    with pytest.raises(InputError, match="too few"):
        other.learn(1.0)


# ---------------------------------------------------------------------------------------------------- in service


@pytest.mark.slow
def test_texts_at_once_take_a_new_head_between_answers(made: Made, tmp_path: Path) -> None:
    engine = used(made, tmp_path / "use")
    ring, asked = engine.ring, prompts(12, 3)
    plain = [
        made.engine(None).generate(prompt, max_new_tokens=12, temperature=0.0).token_ids
        for prompt in asked
    ]
    pool = Pool(engine, 3)
    ended = threading.Event()

    def swapping() -> None:
        seed = 0
        while not ended.is_set():
            ring.swap(
                ring.base.config,
                {**random_state(ring.base.config, seed), "d2t": ring.base.state["d2t"]},
            )
            seed += 1

    thread = threading.Thread(target=swapping)
    thread.start()
    try:
        answers = [pool.generate(asked, max_new_tokens=12, temperature=0.0) for _ in range(3)]
    finally:
        ended.set()
        thread.join()
    assert [[each.token_ids for each in found] for found in answers] == [plain] * 3
    assert len({one.drafter._stamp for one in pool.engines}) >= 1
    assert len(ring.texts()) == 48 + 12


@pytest.mark.slow
def test_the_command(
    made: Made, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "nice", lambda by: by)
    folder, model = str(tmp_path / "use"), ["--model", str(made.model), "--draft", str(made.head)]
    assert main(["train", "learn", folder, *model]) == 2
    assert "too few" in capsys.readouterr().err
    assert main(["train", "learn", folder, *model, "--minutes", "0"]) == 2
    assert "minutes: got 0" in capsys.readouterr().err
    used(made, Path(folder := str(tmp_path / "used")))
    monkeypatch.setattr("specengine.train.draft.use.GENERAL", made_general())
    assert main(["train", "learn", folder, *model, "--minutes", "0.0001"]) == 0
    printed = capsys.readouterr()
    assert printed.out in (
        "0 of 1 rounds gave a better head\n",
        "1 of 1 rounds gave a better head\n",
    )
    assert "tokens per cycle" in printed.err


def made_general() -> Any:
    from specengine.train.text import SynthesisOptions

    return SynthesisOptions(tokens=100, rows=6, length=24)


def test_chat_keeps_what_was_said(
    made: Made, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    given = ["--model", str(made.model), "--draft", str(made.head), "--max-new-tokens", "5"]
    assert main(["chat", *given, "--learn", str(tmp_path / "use")]) == 0
    (text,) = made.engine(tmp_path / "use").ring.texts()
    assert len(text.tokens) - text.prompt == 5


def test_it_waits_while_something_is_asked() -> None:
    said, heard = multiprocessing.Pipe(duplex=False)
    command._turn(said)  # nothing was said: it goes on
    heard.send(False)
    waits = threading.Thread(target=command._turn, args=(said,))
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()
    heard.send(True)
    waits.join(10)
    assert not waits.is_alive()
    heard.send(False)
    heard.close()
    with pytest.raises(EOFError):
        command._turn(said)


def test_learning_begins_and_waits_by_what_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a pretended process: begun once there are new texts and it is quiet, told to wait and to go on, ended."""
    told: list[Any] = []

    class Child:
        def __init__(self, **given: Any) -> None:
            self.start = lambda: told.append("begun")
            self.terminate = lambda: told.append("ended")
            self.is_alive = lambda: True
            self.join = lambda: None

    class Context:
        Process = Child
        Pipe = staticmethod(lambda duplex: (Said(), Said()))

    class Said:
        def send(self, going: bool) -> None:
            told.append(going)

        def close(self) -> None: ...

    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: Context)
    monkeypatch.setattr(command, "IDLE_SECONDS", 2.0)
    monkeypatch.setattr(command, "NEW", 2)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "1.json").touch()
    # by look: busy, quiet with one text, another comes, busy, quiet
    steps = iter([False, *[True] * 5, False, False, *[True] * 5])
    looks = 0

    class Ended:
        def wait(self, seconds: float) -> bool:
            nonlocal looks
            looks += 1
            if looks == 6:
                (tmp_path / "texts" / "2.json").touch()
            return looks > 13

    command._watch(None, tmp_path, lambda: next(steps), Ended())  # type: ignore[arg-type]
    assert told == ["begun", False, True, "ended"]
