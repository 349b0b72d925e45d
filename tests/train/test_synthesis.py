"""Text that a model writes itself: its form, its origin, and that an interrupted writer ends with the same text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AddedToken, PreTrainedModel

from specengine.errors import InputError
from specengine.models.huggingface import HuggingFaceTarget
from specengine.models.native import NativeLM, NativeTarget, from_model
from specengine.train.text import SynthesisOptions, synthesis
from specengine.train.text.corpus import Corpus, Text
from specengine.train.text.synthesis import ChatFormat, write_corpus
from tests.toy import byte_tokenizer, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENIZER = byte_tokenizer()
OPTIONS = SynthesisOptions(tokens=900, rows=6, length=48, seed=3)
WAYS = pytest.mark.parametrize("way", ["lockstep", "lanes"])
USER, ASSISTANT, SYSTEM, END = TOKENIZER.convert_tokens_to_ids(
    ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Ends a turn now and then."""
    made = tiny(initializer_range=0.15)
    made.generation_config.eos_token_id = END
    with torch.no_grad():
        made.lm_head.weight[END] *= 2
    return made


def target_of(model: PreTrainedModel | NativeLM) -> HuggingFaceTarget | NativeTarget:
    return (
        NativeTarget(model) if isinstance(model, NativeLM) else HuggingFaceTarget(model, pack=False)
    )


def write(
    model: PreTrainedModel | NativeLM,
    folder: Path,
    options: SynthesisOptions = OPTIONS,
    **more: Any,
) -> Corpus:
    return write_corpus(
        target_of(model), more.pop("tokenizer", TOKENIZER), folder, options, name="tiny", **more
    )


def source(model: PreTrainedModel, way: str) -> PreTrainedModel | NativeLM:
    return model if way == "lockstep" else from_model(model)


def texts(corpus: Corpus) -> list[tuple[list[int], list[bool]]]:
    return [(text.tokens.tolist(), text.answers.tolist()) for text in corpus]


# ---------------------------------------------------------------------------------------------------- form


def test_the_template_is_read_off_the_tokenizer() -> None:
    form = ChatFormat.of(TOKENIZER, frozenset({END}))
    assert (form.before, form.to_answer, form.to_user) == ([USER], [END, ASSISTANT], [END, USER])
    assert form.stops == {END}


def test_templates_that_hide_what_was_said_are_refused() -> None:
    with pytest.raises(InputError, match="chat template"):
        ChatFormat.of(byte_tokenizer("{{ 'nothing' }}"), frozenset())


@WAYS
def test_conversations_have_the_form_of_the_template(
    model: PreTrainedModel, tmp_path: Path, way: str
) -> None:
    corpus = write(source(model, way), tmp_path)
    found = texts(corpus)
    assert sum(len(tokens) for tokens, _ in found) >= OPTIONS.tokens
    turns = 0
    for tokens, answers in found:
        assert len(tokens) <= OPTIONS.length
        assert tokens[0] == USER
        assert any(answers)
        asks = True
        for place in range(1, len(tokens)):
            token, before = tokens[place], tokens[place - 1]
            if asks:
                assert not answers[place]
                if token == END:
                    assert before != USER, "a question has at least one word"
                    asks = place + 1 < len(tokens) and tokens[place + 1] != ASSISTANT
                assert token not in (USER, SYSTEM)
            elif token == USER and before == END:
                asks = True
                turns += 1
            else:
                assert answers[place] == (token != ASSISTANT or before != END)
    assert turns > 3, "some conversations have a second turn"


@WAYS
def test_questions_end_in_time(tmp_path: Path, way: str) -> None:
    """A model that never ends a turn is made to: each of its conversations comes to an answer."""
    endless = tiny()
    with torch.no_grad():
        endless.lm_head.weight[END] = 0
    for tokens, answers in texts(write(source(endless, way), tmp_path)):
        assert tokens.index(END) <= OPTIONS.length * synthesis.QUESTION_LIMIT + 2
        assert len(tokens) == OPTIONS.length
        assert answers[-1]


@WAYS
def test_greedy_answers_are_the_targets_own(
    model: PreTrainedModel, tmp_path: Path, way: str
) -> None:
    """Rows of temperature 0 hold the best token everywhere in the answers; the sampled rows do not."""
    kind: Any = synthesis.Lockstep if way == "lockstep" else synthesis.Lanes
    writer = kind(
        target_of(source(model, way)),
        ChatFormat.of(TOKENIZER, frozenset({END})),
        OPTIONS,
        TOKENIZER,
    )
    hits: dict[bool, list[bool]] = {True: [], False: []}
    for shard in range(8):
        rows = [writer.row(number, shard, []) for number in range(OPTIONS.rows)]
        kept = _all_rows(writer, shard)
        assert len(kept) == len(rows)
        for row, text in zip(rows, kept, strict=True):
            with torch.no_grad():
                best = model(text.tokens.long()[None]).logits[0].argmax(-1)
            chosen = text.answers[1:]
            hits[row.temperature == 0].extend((best[:-1] == text.tokens[1:])[chosen].tolist())
    assert all(hits[True])
    assert len(hits[True]) > 100
    assert 0.05 < sum(hits[False]) / len(hits[False]) < 0.95


def _all_rows(writer: Any, shard: int) -> list[Text]:
    """Return all rows, conversations without an answer included, so that rows and texts can be matched."""
    rows, fill = list[Any](), writer._fill
    writer._fill = lambda given, generator: (rows.extend(given), fill(given, generator))
    writer.write(shard, [])
    writer._fill = fill
    return [row.text() for row in rows]


@WAYS
def test_base_models_continue_single_tokens(tmp_path: Path, way: str) -> None:
    tokenizer = byte_tokenizer(None)
    found = texts(write(source(tiny(), way), tmp_path, tokenizer=tokenizer))
    assert all(answers == [False] + [True] * (len(tokens) - 1) for tokens, answers in found)
    assert len({tokens[0] for tokens, _ in found}) > 5
    assert all(len(tokens) == OPTIONS.length for tokens, _ in found)


def test_draws_follow_the_distribution() -> None:
    """Frequencies of 20,000 draws within five standard errors; tokens below the cut never come."""
    logits = torch.tensor([0.0, 1.0, 2.0, -4.0, float("-inf")])
    for temperature in (0.7, 1.0):
        expected = (logits / temperature).softmax(-1)
        expected[expected < synthesis.MIN_P * expected.max()] = 0
        expected /= expected.sum()
        count = 20_000
        rows, temperature = logits.expand(count, -1), torch.full((count,), temperature)
        drawn = synthesis._sample(
            rows, torch.arange(len(rows)), temperature, torch.Generator().manual_seed(1)
        )
        found = drawn.bincount(minlength=5) / count
        error = (expected * (1 - expected) / count).sqrt()
        assert ((found - expected).abs() <= 5 * error).all()
        assert found[expected == 0].sum() == 0


# ---------------------------------------------------------------------------------------------------- prompts


def test_a_users_turn_begins_with_an_opener(model: PreTrainedModel, tmp_path: Path) -> None:
    """In the share of the conversations that is asked for, with those that leave room for an answer."""
    fitting = [
        [USER, *ids]
        for text in synthesis.OPENERS
        if len(ids := TOKENIZER(text)["input_ids"]) < synthesis.TURN_ROOM * OPTIONS.length
    ]
    assert 5 < len(fitting) < len(synthesis.OPENERS)
    for share, low, high in ((0.0, 0.0, 0.05), (0.5, 0.2, 0.8), (1.0, 1.0, 1.0)):
        options = replace(OPTIONS, opener_share=share, rows=30)
        found = texts(write(model, tmp_path / str(share), options))
        opened = [
            tokens for tokens, _ in found if any(tokens[: len(ids)] == ids for ids in fitting)
        ]
        assert low <= len(opened) / len(found) <= high
        if share == 1.0:
            assert len({tuple(tokens[:4]) for tokens, _ in found}) > 5, "they vary"


def test_users_write_no_special_token_of_any_kind(model: PreTrainedModel) -> None:
    """Also none that the tokenizer has no role for, as a GGUF file's has for most of them."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("a", special=True)])
    letter = tokenizer("a")["input_ids"][0]
    assert letter not in tokenizer.all_special_ids
    form = ChatFormat.of(tokenizer, frozenset({END}))
    writer = synthesis.Lockstep(HuggingFaceTarget(model, pack=False), form, OPTIONS, tokenizer)
    logits = torch.zeros(1, model.config.vocab_size)
    logits[0, letter] = 50.0
    row = synthesis.Row(form, OPTIONS.length, 0.0, [form.before])
    row.forced.clear()
    drawn = {writer.draw(logits.clone(), [row], torch.Generator())[0] for _ in range(20)}
    assert letter not in drawn


@WAYS
def test_prompts_are_mixed_in(model: PreTrainedModel, tmp_path: Path, way: str) -> None:
    """Half of the rows begin with a given question; its later turns follow in order, and nobody else asks."""
    options = replace(OPTIONS, prompt_share=0.5)
    given = [["abc", "de"], ["xyz"]]
    found = texts(write(source(model, way), tmp_path, options, prompts=given))
    begin = {
        text: [USER, *TOKENIZER(text)["input_ids"], END, ASSISTANT] for text in ("abc", "de", "xyz")
    }
    first = [tokens for tokens, _ in found if tokens[: len(begin["abc"])] == begin["abc"]]
    second = [tokens for tokens, _ in found if tokens[: len(begin["xyz"])] == begin["xyz"]]
    assert first
    assert second
    assert 0.3 < (len(first) + len(second)) / len(found) < 0.7
    assert all(tokens.count(USER) == 1 for tokens in second)
    longer = [tokens for tokens in first if tokens.count(USER) == 2]
    assert longer
    for tokens in longer:
        place = tokens.index(USER, 1)
        assert tokens[place : place + len(begin["de"])] == begin["de"][: len(tokens) - place]


def test_prompts_that_are_too_long_are_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="prompts: each is longer"):
        write(model, tmp_path, prompts=[["a" * 100]])
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------- on disk


def test_an_interrupted_writer_ends_with_the_same_text(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    whole = write(model, tmp_path / "whole")
    lines: list[str] = []

    def stop(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(model, tmp_path / "cut", progress=stop)
    assert 0 < len(Corpus.open(tmp_path / "cut").shards()) < len(whole.shards())
    assert texts(write(model, tmp_path / "cut")) == texts(whole)
    assert lines[0] == "Writing the first shard; a line follows each"
    assert "per second" in lines[1]


def test_who_stops_a_writer_is_told_where(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: Any
) -> None:
    real, lines, shards = synthesis.Lockstep.write, list[str](), list[int]()

    def interrupted(self: synthesis.Lockstep, number: int, turns: Any) -> Any:
        shards.append(number)
        if len(shards) == 3:
            raise KeyboardInterrupt
        return real(self, number, turns)

    monkeypatch.setattr(synthesis.Lockstep, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(model, tmp_path, progress=lines.append)
    written = lines[-2].split(" tokens written")[0]
    assert lines[-1] == f"Stopped at {written} tokens; the shard under way is lost, the others stay"
    assert len(Corpus.open(tmp_path).shards()) == 2


def test_another_seed_writes_other_text(model: PreTrainedModel, tmp_path: Path) -> None:
    first = write(model, tmp_path / "a")
    second = write(model, tmp_path / "b", replace(OPTIONS, seed=4))
    assert texts(first) != texts(second)


def test_a_folder_begun_otherwise_is_left_alone(model: PreTrainedModel, tmp_path: Path) -> None:
    write(model, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(InputError, match=r"^length: the text in .* was begun with 48, got 40"):
        write(model, tmp_path, replace(OPTIONS, length=40))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = Corpus.create(tmp_path, {"target": "tiny", "vocab_size": 9})

    def fails(tensors: Any, file: Path) -> None:
        Path(file).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("specengine.train.text.corpus.save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        corpus.add(0, [Text(torch.tensor([1, 2]), torch.tensor([False, True]))])
    assert [file.name for file in tmp_path.iterdir()] == ["corpus.json"]


def test_damaged_corpora_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a folder of training text"):
        Corpus.open(tmp_path)
    (tmp_path / "corpus.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(InputError, match="another format"):
        Corpus.open(tmp_path)
    corpus = Corpus.create(tmp_path / "new", {"vocab_size": 9})
    corpus.add(3, [Text(torch.tensor([1, 2]), torch.tensor([False, True]))])
    assert corpus.numbers() == [3]
    file = corpus.shard(3)
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(InputError, match=r"00003\.safetensors is damaged"):
        list(corpus)


# ---------------------------------------------------------------------------------------------------- states


FEATURES = (1, 2)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "gemma3_text", "llama"])
def test_kept_states_are_those_of_the_forward_that_serves(tmp_path: Path, family: str) -> None:
    """Biases, tied heads and scales included: as the target reads the whole text, and its likeliest tokens after it."""
    lm = from_model(tiny(family, num_hidden_layers=3))
    corpus = write(lm, tmp_path, features=FEATURES)
    target = NativeTarget(lm)
    for text in list(corpus)[:4]:
        assert text.states is not None
        target.reset()
        target.want((*FEATURES, lm.layers))
        with torch.inference_mode():
            read = target.prefill(text.tokens.tolist(), 0)
            logs = lm.head(read[:, -lm.shape.hidden :].contiguous()).log_softmax(-1)
        kept = text.states
        assert torch.equal(kept.features, read[:, : -lm.shape.hidden].bfloat16())
        before_answers = text.answers.nonzero()[:, 0] - 1
        best = logs[before_answers].topk(synthesis.TOP, dim=-1)
        torch.testing.assert_close(
            kept.logs[before_answers].float(), best.values, rtol=1e-2, atol=1e-2
        )
        assert torch.equal(kept.ids[before_answers, 0].long(), best.indices[:, 0])
        drawn = text.tokens[before_answers + 1]
        assert (kept.ids[before_answers] == drawn[:, None]).any(1).float().mean() > 0.3


def test_texts_and_states_do_not_depend_on_those_beside_them(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    """Greedy rows of a shard of six, written again alone from the same beginnings."""
    lm = from_model(model)
    corpus = write(lm, tmp_path, features=FEATURES)
    writer = synthesis.Lanes(
        target_of(lm),
        ChatFormat.of(TOKENIZER, frozenset({END})),
        replace(OPTIONS, rows=1),
        TOKENIZER,
        FEATURES,
    )
    for text in list(corpus)[:3]:
        alone = synthesis.Row(writer.form, OPTIONS.length, 0.0, [text.tokens.tolist()])
        writer._fill([alone], torch.Generator())
        again = alone.text()
        assert again.states is not None
        assert text.states is not None
        count = len(text.tokens)
        assert torch.equal(again.states.features[:count], text.states.features)


def test_an_interrupted_writer_ends_with_the_same_states(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    lm, calls = from_model(model), list[int]()
    whole = write(lm, tmp_path / "whole", features=FEATURES)
    real = lm.run_lanes

    def stop(batch: Any) -> torch.Tensor | None:
        calls.append(len(batch))
        if len(calls) == 70:
            raise KeyboardInterrupt
        return real(batch)

    lm.run_lanes = stop  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        write(lm, tmp_path / "cut", features=FEATURES)
    lm.run_lanes = real  # type: ignore[method-assign]
    assert 0 < len(Corpus.open(tmp_path / "cut").shards()) < len(whole.shards())
    again = write(lm, tmp_path / "cut", features=FEATURES)
    for one, other in zip(whole, again, strict=True):
        assert one.states is not None
        assert other.states is not None
        assert all(map(torch.equal, (*one[:2], *one.states), (*other[:2], *other.states)))


def test_the_bound_on_disk_is_kept(model: PreTrainedModel, tmp_path: Path) -> None:
    lm = from_model(model)
    writer = synthesis.Lanes(
        target_of(lm), ChatFormat.of(TOKENIZER, frozenset({END})), OPTIONS, TOKENIZER, FEATURES
    )
    gib = 3.5 * OPTIONS.rows * OPTIONS.length * writer.token_bytes / 2**30
    options = replace(OPTIONS, tokens=10**9, gib=gib)
    corpus = write(lm, tmp_path / "a", options, features=FEATURES)
    states = sum(part.nbytes for text in corpus if text.states is not None for part in text.states)
    assert 0.6 * gib * 2**30 < states <= gib * 2**30
    with pytest.raises(InputError, match=r"^gib: got .* the hidden states of 288 tokens take"):
        write(lm, tmp_path / "b", replace(options, gib=gib / 8), features=FEATURES)
    assert not (tmp_path / "b").exists()
    none = write(lm, tmp_path / "c", replace(OPTIONS, gib=0.0), features=FEATURES)
    assert all(text.states is None for text in none)
    larger = write(lm, tmp_path / "a", replace(options, gib=2 * gib), features=FEATURES)
    assert sum(len(text.tokens) for text in larger) * writer.token_bytes > gib * 2**30


def test_writing_ends_with_its_time(model: PreTrainedModel, tmp_path: Path) -> None:
    corpus = write(
        from_model(model), tmp_path, replace(OPTIONS, tokens=10**9), features=FEATURES, seconds=0.3
    )
    spent = [corpus.seconds(number) for number in corpus.numbers()]
    assert sum(spent[:-1]) < 0.3 <= sum(spent)
    assert len(
        write(from_model(model), tmp_path, OPTIONS, features=FEATURES, seconds=0.3).shards()
    ) == len(spent)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"gib": -1.0}, "gib"),
        ({"tokens": 0}, "tokens"),
        ({"rows": 0}, "rows"),
        ({"length": 3}, "length"),
        ({"prompt_share": 2.0}, "prompt_share"),
    ],
)
def test_options_out_of_range_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=f"^{field}: got"):
        replace(OPTIONS, **changes)
