"""`specengine batch`: the engine's answers, one a line, the same bytes however often it is interrupted."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specengine import Engine
from specengine.batch import answering
from specengine.batch.answering import answer as answer_of
from specengine.batch.files import Files, beside
from specengine.batch.lines import Item, read, seed_of
from specengine.cycle import result_of
from specengine.errors import InputError
from specengine.records import GenerationResult, Stats
from tests.batch import files
from tests.batch.conftest import Example
from tests.toy import byte_tokenizer, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS: dict[str, Any] = {"record": "settings"}
CALLING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
)
PROVENANCE: dict[str, Any] = {"record": "provenance"}


# ---- answers


def test_answers_are_the_engines(example: Example) -> None:
    engine = Engine.from_pretrained(str(example.model), policy="plain")
    entries, answers = files.read(example.prompts), files.read(example.out)
    assert len(answers) == len(entries)
    for place, (entry, answer) in enumerate(zip(entries[:7], answers, strict=False)):
        options = {"max_new_tokens": 12, "seed": seed_of(0, place)}
        if place == 0:
            assert (answer["id"], answer["text"]) == (1, engine.generate(entry, **options).text)
        elif place == 1:
            assert answer["token_ids"] == engine.generate(entry["messages"], **options).token_ids
        elif place == 2:
            assert (
                answer["token_ids"]
                == engine.generate(entry["prompt"], **options | entry["options"]).token_ids
            )
        elif place == 3:
            assert answer["id"] == 1003
            session = engine.session()
            assert [turn["text"] for turn in answer["turns"]] == [
                session.generate(turn, **options).text for turn in entry["turns"]
            ]
        elif place == 4:
            choice = answer["response"]["body"]["choices"][0]
            result = engine.generate(entry["body"]["messages"], **options, temperature=1)
            assert (answer["custom_id"], choice["message"]["content"]) == ("r4", result.text)
        elif place == 5:
            assert answer["token_ids"] == engine.generate(entry["prompt"], **options).token_ids
        else:
            assert answer["error"]["type"] == "InputError"
            assert "99999" in answer["error"]["message"]


def test_a_turn_follows_all_turns_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[Any] = []
    monkeypatch.setattr(
        answering, "TextGeneration", lambda engine, prompt, options: prompts.append(prompt)
    )

    def said(*_: Any) -> Iterator[None]:
        yield from ()
        return GenerationResult(f"said {len(prompts)}", [], "stop", Stats())

    monkeypatch.setattr(answering, "complete", said)
    assert not result_of(answering.answer(None, Item(0, "a", "one", later=("two", "three")))).failed  # type: ignore[arg-type]
    assert [turn["content"] for turn in prompts[-1]] == ["one", "said 1", "two", "said 2", "three"]


def test_figures_stand_beside_and_nothing_measured_in_the_answers(example: Example) -> None:
    head, stats = files.read(beside(example.out))[:3], files.read(beside(example.out))[3:]
    assert [record["record"] for record in head] == ["provenance", "settings", "engine"]
    assert [record["id"] for record in stats] == [_id(answer) for answer in files.read(example.out)]
    turns = [turn for record in stats for turn in record["stats"]]
    assert all(turn["elapsed_s"] > 0 for turn in turns)
    assert "elapsed_s" not in example.out.read_text()


def _id(answer: dict[str, Any]) -> Any:
    return answer.get("custom_id", answer["id"])


def test_each_place_samples_with_a_seed_of_its_own(example: Example, tmp_path: Path) -> None:
    file = files.write(
        tmp_path / "same.jsonl", ["tell me"] * 3 + [{"prompt": "tell me", "options": {"seed": 7}}]
    )
    sampled = ("--temperature", "1", "--seed", "4")
    assert files.batch(file, tmp_path / "out.jsonl", example.model, *sampled) == 0
    answers = [answer["token_ids"] for answer in files.read(tmp_path / "out.jsonl")]
    assert len({tuple(answer) for answer in answers}) == 4
    engine = Engine.from_pretrained(str(example.model))
    for place, answer in enumerate(answers):
        seed = 7 if place == 3 else seed_of(4, place)
        assert (
            engine.generate("tell me", temperature=1, max_new_tokens=12, seed=seed).token_ids
            == answer
        )


def test_openais_form(example: Example, tmp_path: Path) -> None:
    body = {"prompt": "the cat and the dog", "max_tokens": 12, "model": "any"}
    entry = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    out = tmp_path / "out.jsonl"
    assert files.batch(files.write(tmp_path / "in.jsonl", [entry]), out, example.model) == 0
    whole = files.read(out)[0]["response"]["body"]
    text = whole["choices"][0]["text"]
    assert whole["usage"] == {"prompt_tokens": 19, "completion_tokens": 12, "total_tokens": 31}
    stop = text[3]
    stopped = {**entry, "custom_id": "b", "body": body | {"stop": stop}}
    bad = {**entry, "custom_id": "c", "body": body | {"prompt": [1, 99999]}}
    assert (
        files.batch(
            files.write(tmp_path / "2.jsonl", [stopped, bad]), tmp_path / "2", example.model
        )
        == 1
    )
    first, second = files.read(tmp_path / "2")
    assert first["response"]["body"]["choices"][0]["text"] == text[: text.index(stop)]
    assert (second["response"], second["error"]["code"], second["custom_id"]) == (
        None,
        "InputError",
        "c",
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"body": {"messages": [{"role": "user", "content": "a"}], "n": 0}}, "body.n: "),
        ({"body": {"messages": []}}, "body.messages: "),
        ({"body": {"messages": [{"role": "user"}]}}, "body.messages[0].content: "),
        (
            {"body": {"messages": [{"role": "user", "content": "a"}], "nonsense": 1}},
            "body.nonsense: unknown",
        ),
        (
            {"body": {"messages": [{"role": "user", "content": "a"}], "stream": True}},
            "body.stream: got True",
        ),
        (
            {"url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 0}},
            "body.max_tokens: got 0",
        ),
        ({"body": []}, "body: got []"),
        ({"url": "/v1/embeddings", "body": {"input": "a"}}, "url: got '/v1/embeddings'"),
        ({"method": "GET", "body": {}}, "method: got 'GET'"),
    ],
)
def test_a_request_that_is_refused_is_a_line_of_its_own(
    tmp_path: Path, change: Any, named: str
) -> None:
    pytest.importorskip("pydantic")
    items = read(
        files.write(tmp_path / "in.jsonl", ["fine", {"custom_id": "a", **change}]), {}
    ).items
    assert items[0].fault is None
    answered = result_of(answer_of(None, items[1]))  # type: ignore[arg-type]
    assert answered.failed
    assert (answered.line["custom_id"], answered.line["response"]) == ("a", None)
    assert answered.line["error"]["message"].startswith(named)


CHOICE = {"enum": ["yes", "no"]}
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def test_requests_have_the_servers_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance")
    model = files.make_model(tmp_path / "calling", CALLING)
    said = [{"role": "user", "content": "hello"}]
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": CHOICE}}
    forced = {
        "tools": [FUNCTION],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 99,
    }
    bodies: list[dict[str, Any]] = [
        {"messages": said, "response_format": format},
        {"messages": said, **forced, "model": "gpt-4o-mini", "metadata": {"a": "b"}},
        {"messages": said, "logprobs": True, "top_logprobs": 2, "max_tokens": 3},
        {"messages": said, "logit_bias": {"65": 100}, "top_k": 1, "max_tokens": 3},
        {"messages": said, "nonsense": 1},
        {"messages": said, "logit_bias": {"9999": 1}},
        {"messages": said, "n": 3, "temperature": 1.5, "max_tokens": 9},
    ]
    entries = [
        {"custom_id": f"r{place}", "url": "/v1/chat/completions", "body": body}
        for place, body in enumerate(bodies)
    ]
    tool = {"type": "function", "name": "f"}
    answered = {
        "input": "hello",
        "tools": [tool],
        "tool_choice": "required",
        "max_output_tokens": 99,
    }
    message = {"messages": said, "max_tokens": 9, "temperature": 1.0}
    entries += [
        {"custom_id": "r7", "url": "/v1/responses", "body": answered},
        {"custom_id": "r8", "url": "/v1/messages", "body": message},
        {
            "custom_id": "r9",
            "url": "/v1/responses",
            "body": {"input": "a", "previous_response_id": "x"},
        },
    ]
    out = tmp_path / "out.jsonl"
    assert files.batch(files.write(tmp_path / "in.jsonl", entries), out, model) == 1
    assert (
        "1 requests name another model (gpt-4o-mini); calling answers them"
        in capsys.readouterr().err
    )
    lines = files.read(out)
    choices = [line["response"]["body"]["choices"][0] for line in lines[:4]]
    assert choices[0]["message"]["content"] in ('"yes"', '"no"')
    calls = choices[1]["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "f", "arguments": "{}"}]
    assert choices[1]["finish_reason"] == "tool_calls"
    assert [len(rated["top_logprobs"]) for rated in choices[2]["logprobs"]["content"]] == [2, 2, 2]
    assert choices[3]["message"]["content"] == byte_tokenizer().decode([65]) * 3
    assert [line["custom_id"] for line in lines if line["error"]] == ["r4", "r5", "r9"]
    (item,) = lines[7]["response"]["body"]["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "f", "{}")
    assert lines[8]["response"]["body"]["stop_reason"] == "max_tokens"
    assert lines[9]["error"]["message"].startswith(
        "body.previous_response_id: this server keeps no responses"
    )
    assert "9999" in lines[5]["error"]["message"]
    several = lines[6]["response"]["body"]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in several["choices"]}) > 1
    assert several["usage"]["completion_tokens"] > 9
    again = tmp_path / "again.jsonl"
    files.batch(tmp_path / "in.jsonl", again, model)
    assert again.read_bytes() == out.read_bytes()


# ---- going on


@pytest.mark.slow
def test_files_cut_anywhere_go_on_to_the_same_bytes(example: Example, tmp_path: Path) -> None:
    whole, stats = example.out.read_bytes(), beside(example.out).read_bytes()
    out = tmp_path / "answers.jsonl"
    draw = random.Random(0)
    for _ in range(8):
        out.write_bytes(whole[: draw.randrange(len(whole))])
        beside(out).write_bytes(
            stats[: draw.randrange(stats.index(b'{"record": "answer"'), len(stats))]
        )
        assert files.batch(example.prompts, out, example.model) == 1
        assert out.read_bytes() == whole
        assert [record.get("id") for record in files.read(beside(out))] == [
            record.get("id") for record in map(json.loads, stats.splitlines())
        ]


def test_a_finished_file_is_not_touched_and_loads_nothing(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = example.out.read_bytes(), beside(example.out).read_bytes()
    monkeypatch.setattr(Engine, "from_pretrained", None)
    assert files.batch(example.prompts, example.out, example.model) == 1
    assert (example.out.read_bytes(), beside(example.out).read_bytes()) == before


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--max-new-tokens", "13"), "options: {'max_new_tokens': 12"),
        (("--policy", "chain"), "policy: None there, 'chain' now"),
        (("--draft", "ngram"), "draft: None there"),
        (("--dtype", "bfloat16"), "dtype: 'auto' there"),
        (("--seed", "3"), "options"),
    ],
)
def test_other_settings_are_refused_by_name(
    example: Example, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], named: str
) -> None:
    before = example.out.read_bytes()
    assert files.batch(example.prompts, example.out, example.model, *more) == 2
    assert named in capsys.readouterr().err
    assert example.out.read_bytes() == before


def test_other_prompts_and_files_of_others_are_refused(
    example: Example, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = files.write(tmp_path / "changed.jsonl", ["another", *files.lines(28)[1:]])
    assert files.batch(changed, example.out, example.model) == 2
    assert "digest: " in capsys.readouterr().err
    alone = tmp_path / "alone.jsonl"
    shutil.copy(example.out, alone)
    assert files.batch(example.prompts, alone, example.model) == 2
    assert "exists without" in capsys.readouterr().err
    beside(alone).write_text('{"record": "trace"}\n')
    assert files.batch(example.prompts, alone, example.model) == 2
    assert "was not written by `specengine batch`" in capsys.readouterr().err


def test_an_engine_that_answers_otherwise_is_refused(tmp_path: Path) -> None:
    items = [Item(0, "a", "x", {"seed": 0})]
    with Files(tmp_path / "out.jsonl", items, PROVENANCE, SETTINGS) as opened:
        opened.loaded({"device": "one", "dtype": "float32"})
    with (
        Files(tmp_path / "out.jsonl", items, PROVENANCE, SETTINGS) as opened,
        pytest.raises(InputError, match=r"other engine .device: 'one' there, 'two' now"),
    ):
        opened.loaded({"device": "two", "dtype": "float32"})


@pytest.mark.parametrize("changed", ["chat template", "weights", "generation config"])
def test_a_model_that_was_replaced_between_runs_is_refused(
    changed: str, tmp_path: Path, capsys: Any
) -> None:
    model = files.make_model(tmp_path / "tiny")
    prompts, out = files.write(tmp_path / "in.jsonl", ["a", "b"]), tmp_path / "out.jsonl"
    assert files.batch(prompts, out, model) == 0
    whole = out.read_bytes()
    out.write_bytes(whole[: whole.index(b"\n") + 1])
    if changed == "chat template":
        byte_tokenizer("[{{ messages[-1].content }}]").save_pretrained(model)
    elif changed == "weights":
        tiny(seed=2, initializer_range=0.1, max_position_embeddings=512).save_pretrained(model)
    else:
        (model / "generation_config.json").write_text('{"repetition_penalty": 1.5}')
    assert files.batch(prompts, out, model) == 2
    assert f"other engine ({changed}: " in capsys.readouterr().err
    assert out.read_bytes() == whole[: whole.index(b"\n") + 1]


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    first = Files(tmp_path / "out.jsonl", [], PROVENANCE, SETTINGS)
    with first, pytest.raises(InputError, match="another process is writing"):
        Files(tmp_path / "out.jsonl", [], PROVENANCE, SETTINGS).__enter__()


# ---- what is refused before any work


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("{", "line 2 is not JSON"),
        ({"text": "x"}, 'one of "prompt", "turns", "messages", "body"'),
        ({"prompt": "x", "messages": []}, "is not a string or an object with one of"),
        ({"prompt": ""}, "prompt: got '', accepted a string or a list"),
        ({"prompt": 3}, "prompt: got 3"),
        ({"turns": [1]}, "turns: got [1]"),
        ({"messages": [{"content": "x"}]}, "messages: got"),
        ({"prompt": "x", "temperature": 1}, 'options are accepted within "options"'),
        ({"prompt": "x", "options": {"nonsense": 1}}, "options: unknown 'nonsense'"),
        ({"prompt": "x", "options": {"max_time": 1}}, "options: unknown 'max_time'"),
        ({"prompt": "x", "options": {"temperature": -1}}, "temperature: got -1"),
        ({"prompt": "x", "id": [1]}, "id: got [1]"),
        ({"prompt": "x", "id": 1}, "id: got 1, the id of line 1"),
        ({"body": {"messages": []}}, "custom_id: got None"),
        ({"id": "row 7", "body": {"messages": []}}, "custom_id: got None"),
        ({"prompt": "x", "max_tokens": 2}, "unknown field 'max_tokens', accepted id, "),
        ({"prompt": "x", "max_tokens": 2}, "did you mean max_new_tokens?"),
        ({"messages": [], "response_format": {}}, 'fields of OpenAI\'s requests within "body"'),
        ({"turns": ["x"], "tools": []}, "unknown field 'tools'"),
        ({"prompt": "x", "temprature": 1}, "did you mean temperature?"),
        ({"prompt": "x", "option": {}}, "did you mean options?"),
        (
            {"custom_id": "a", "body": {}, "options": {}},
            "unknown field 'options', accepted id, custom_id, ",
        ),
        (
            {"custom_id": "a", "body": {}, "max_tokens": 1},
            'fields of the request are accepted within "body"',
        ),
        ({"custom_id": "a", "body": {}, "metod": "POST"}, "did you mean method?"),
    ],
)
def test_a_line_that_cannot_be_taken_is_named(tmp_path: Path, entry: Any, named: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('"fine"\n' + (entry if entry == "{" else json.dumps(entry)) + "\n")
    with pytest.raises(InputError) as error:
        read(file, {})
    assert str(error.value).startswith(f"prompts: {file}, line 2")
    assert named in str(error.value)


def test_system_messages_stand_before_prompts_and_turns_alone(tmp_path: Path) -> None:
    file = files.write(
        tmp_path / "in.jsonl",
        ["a", {"messages": [{"role": "user", "content": "b"}]}, {"prompt": [1]}],
    )
    found = read(file, {}, system="be kind").items
    assert found[0].prompt == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a"},
    ]
    assert (found[1].prompt, found[2].prompt) == ([{"role": "user", "content": "b"}], [1])


def test_a_request_is_known_by_its_custom_id(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]}
    entries: list[dict[str, Any]] = [
        {"id": "row 1", "custom_id": "mine", "body": body},
        {"question_id": 2, "custom_id": "yours", "body": body},
        {"id": 3, "custom_id": "mine", "prompt": "a"},
    ]
    items = read(files.write(tmp_path / "in.jsonl", entries), {}).items
    assert [item.id for item in items] == ["mine", "yours", 3]
    twice = [{**entry, "custom_id": "same"} for entry in entries[:2]]
    with pytest.raises(InputError, match="line 2: id: got 'same', the id of line 1"):
        read(files.write(tmp_path / "twice.jsonl", twice), {})


def test_fields_of_benchmarks_may_stand_beside_their_turns(tmp_path: Path) -> None:
    line = {
        "question_id": 81,
        "category": "writing",
        "turns": ["a", "b"],
        "reference": ["x"],
        "multiturn": True,
    }
    assert read(files.write(tmp_path / "in.jsonl", [line]), {}).items[0].later == ("b",)


# ---- answers at once


def test_answers_at_once_are_the_same_bytes(example: Example, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    assert (
        files.batch(example.prompts, out, example.model, "--parallel", "4") == 1
    )  # some lines are errors
    assert out.read_bytes() == example.out.read_bytes()


def test_answers_at_once_go_on_where_a_file_ends(example: Example, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    whole = example.out.read_bytes()
    shutil.copy(beside(example.out), beside(out))
    out.write_bytes(whole[: len(whole) // 2])
    assert files.batch(example.prompts, out, example.model, "--parallel", "3") == 1
    assert out.read_bytes() == whole


@pytest.mark.parametrize(
    ("given", "named"), [(["0"], "1 or more"), (["2", "--replicas", "2"], "1 with replicas")]
)
def test_wrong_numbers_of_answers_at_once_are_refused(
    example: Example,
    tmp_path: Path,
    given: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "answers.jsonl"
    assert files.batch(example.prompts, out, example.model, "--parallel", *given) == 2
    assert f"parallel: got {given[0]}, accepted {named}" in capsys.readouterr().err
    assert not out.exists()
