"""Tests that the fuzzer's checks find faults, and that its changes take effect."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine import Engine, cycle
from specengine.drafters.small_model import SmallModel
from specengine.request.text import TextStream
from tests.fuzz import changes, forms, lives, living
from tests.fuzz.outcomes import Finding
from tests.fuzz.settings import SETTINGS
from tests.fuzz.workers import worker
from tests.toy import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [7, 3, 9, 7, 3]
# that need another one before, say something about training alone, or are read when a model is made
QUIET = {
    "adapter_switched",
    "config_edited",
    "ends",
    "frozen",
    "mode",
    "resized",
    "unhooked",
    "cast",
    "cast_in_part",
}
# now and then: rows that are not read, the same norm again, the activation that was there
NO_MATTER = {
    "one_number",
    "swapped",
    "zeros",
    "frequencies",
    "by_numpy",
    "norm_replaced",
    "activation",
}
EXACT = {"marked", "doubling", "negated_view", "transposed", "strided", "offset"}


def logits(model: PreTrainedModel) -> Tensor:
    return living.logits_of(model, PROMPT)


def answer(model: PreTrainedModel) -> list[int]:
    ids = torch.tensor([PROMPT])
    out = model.generate(ids, max_new_tokens=living.TOKENS, do_sample=False, pad_token_id=0)
    return out[0, len(PROMPT) :].tolist()  # type: ignore[index]


@pytest.mark.parametrize("name", sorted(changes.CHANGES.keys() - QUIET))
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_change_changes_the_model(name: str, family: str) -> None:
    moved = 0
    for seed in range(3):
        model = tiny(family)
        before = logits(model)
        changes.CHANGES[name](model, random.Random(seed))
        moved += bool((logits(model) - before).abs().max() > 1e-3)
    assert moved == 3 or (name in NO_MATTER and moved)


@pytest.mark.parametrize("name", sorted(forms.FORMS))
def test_a_form_says_the_same_or_does_not_run(name: str) -> None:
    model = tiny()
    before = logits(model)
    try:
        forms.change(model, random.Random(1), name)
        found = logits(model)
    except (Finding, RuntimeError):  # also where torch is built without such tensors
        assert name not in EXACT
        return
    assert name not in EXACT or torch.allclose(found, before, atol=1e-4)


def test_an_answer_of_another_model_is_found() -> None:
    model, other = tiny(), tiny(seed=1)
    found = answer(model)
    living.check_greedy(model, PROMPT, found)
    for wrong in (answer(other), [*found[:-1], (found[-1] + 1) % 260], [*found[:-1], 260]):
        with pytest.raises(Finding, match=r"another answer|do not exist"):
            living.check_greedy(model, PROMPT, wrong)


def test_another_end_is_found() -> None:
    model = tiny()
    found = answer(model)
    with pytest.raises(Finding, match="another end"):
        living.check_greedy(model, PROMPT, found[:-1])
    end = next(place for place in range(1, len(found)) if found[place] not in found[:place])
    model.generation_config.eos_token_id = found[end]
    living.check_greedy(model, PROMPT, found[: end + 1])
    with pytest.raises(Finding, match="another end"):
        living.check_greedy(model, PROMPT, found)


def test_half_precision_has_the_room_that_its_rounding_takes() -> None:
    model = tiny().to(torch.bfloat16)
    living.check_greedy(model, PROMPT, answer(model))
    with pytest.raises(Finding, match="another answer"):
        living.check_greedy(model, PROMPT, answer(tiny(seed=1)))


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_setting_is_put_back(name: str) -> None:
    def now() -> tuple[object, ...]:
        return (torch.get_default_dtype(), torch.zeros(1).device, torch.is_grad_enabled(), torch.get_num_threads(),
                torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cpu"),
                torch.get_float32_matmul_precision(), torch.is_inference_mode_enabled())  # fmt: skip

    before = now()
    with pytest.raises(KeyError), living.within([name]):
        raise KeyError
    assert now() == before


ENDING = """
import os, signal
from tests.fuzz import cases, workers
from tests.fuzz.outcomes import Outcome
cases.KINDS["head"] = lambda place, pick: ("given", lambda: os.kill(os.getpid(), signal.SIGSEGV))
cases.KINDS["target"] = lambda place, pick: ("given", lambda: Outcome("answered"))
workers.serve()
"""


@pytest.mark.slow
def test_a_case_that_ends_the_process_is_found_and_the_next_is_run() -> None:
    with worker("-c", ENDING) as run:
        assert run("0/target/0").outcome == "answered"
        ended = run("0/head/1")
        assert (ended.outcome, ended.given) == ("found", "what this name draws")
        assert ended.error == "the process died of SIGSEGV; before it this process ran 0/target/0"
        assert run("0/target/2").outcome == "answered"


def another_choice(patch: pytest.MonkeyPatch) -> None:
    walk = cycle.walk

    def wrong(tree: Any, choose: Callable[[int], int], *how: Any) -> Any:
        return walk(tree, choose if len(tree) == 1 else lambda node: choose(node) ^ 1, *how)

    patch.setattr(cycle, "walk", wrong)


def shorter_pieces(patch: pytest.MonkeyPatch) -> None:
    push = TextStream.push
    patch.setattr(TextStream, "push", lambda self, tokens: push(self, tokens)[1:])


def a_draft_that_fails(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SmallModel, "root", lambda *_: 1 / 0)


def a_life(numbers: str, **act: Any) -> dict[str, Any]:
    """Three times the same act."""
    shown = {
        "act": "stream",
        "prompts": [[104, 101, 108]],
        "options": {"max_new_tokens": 12},
        "after": 1,
        "seed": 1,
    }
    made = {
        "family": "llama",
        "draft": "small model",
        "policy": "eagle",
        "numbers": numbers,
        "lookup": False,
    }
    return made | {"acts": [shown | act] * 3}


@pytest.mark.parametrize("fault", [another_choice, shorter_pieces, a_draft_that_fails])
@pytest.mark.parametrize("numbers", ["float32", "modules"])
def test_a_life_with_a_fault_is_found(
    fault: Callable[[pytest.MonkeyPatch], None],
    numbers: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    life = lives.Life(a_life(numbers), tmp_path)
    assert life.run().kind == "answered"
    fault(monkeypatch)
    with pytest.raises((Finding, ZeroDivisionError)):
        life.run()


@pytest.mark.parametrize("name", ["generate", "stream", "given up", "many", "refresh", "changed"])
def test_a_prediction_without_a_draft_must_be_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_new_tokens": 4, "policy": "plain", "prediction": [104, 101]}
    life = lives.Life(a_life("float32", act=name, options=options) | {"draft": "ngram"}, tmp_path)
    assert life.run() == ("refused", "InputError")
    monkeypatch.setattr(Engine, "generate", without_prediction(Engine.generate))
    monkeypatch.setattr(Engine, "stream", without_prediction(Engine.stream))
    monkeypatch.setattr(Engine, "generate_many", without_prediction(Engine.generate_many))
    with pytest.raises(Finding, match="answered, and no draft copied the prediction"):
        life.run()


def without_prediction(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, prompts, **options: method(self, prompts, **options | {"prediction": None})
