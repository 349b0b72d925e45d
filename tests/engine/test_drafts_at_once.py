"""Every kind of draft serves several texts at once: answers are those given alone, and copies draft what it does."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import specengine
from specengine import Engine, drafters
from specengine.batch.answering import answered
from specengine.batch.lines import Item
from specengine.cycle import Inspected
from specengine.drafters import Drafter, RowDraft
from specengine.drafters._wrappers import Coupled, Guided, Origins
from specengine.drafters.dflash import Dflash
from specengine.drafters.eagle import EagleDraft
from specengine.drafters.lookup import Lookup
from specengine.drafters.ngram import NGram
from specengine.drafters.recycling import Recycling
from specengine.drafters.small_model import SmallModel
from specengine.errors import UnsupportedModelError
from specengine.models import kv_cache
from specengine.models.eagle import EagleHead, TorchHead, head_from
from specengine.models.native import NativeDflashHead, NativeHead, NativeLM, NativeTarget
from specengine.ops.tree import TokenTree
from specengine.records import Cycle, Seconds
from tests.drafters.test_other_tokens import drafter_of
from tests.heads import block_config, deep
from tests.models.mtp_checkpoints import NEMOTRON, QWEN, checkpoint
from tests.models.native_engines import native_lm, needs_extension
from tests.models.test_assistant import assistant
from tests.serve.served import TEXT, served, until
from tests.toy import (
    VOCABULARY,
    byte_tokenizer,
    head_config,
    near_copy,
    policy_for,
    random_state,
    tiny,
    tiny_head,
)

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]

CPU = torch.device("cpu")
# of all prompts, so that caches are copied
SHARED = [(11 * i * i + 5 * i + 3) % 250 for i in range(70)]
PROMPTS = [[*SHARED, 200 + number, *SHARED[number : 3 * number]] for number in range(4)]
Made = Callable[[Path, pytest.MonkeyPatch], Engine]


def engine_of(lm: NativeLM, draft: Any, policy: str = "eagle") -> Engine:
    return Engine(NativeTarget(lm), draft, policy_for(policy), byte_tokenizer())


def free(draft: Callable[[], Any]) -> Made:
    return lambda folder, patch: engine_of(native_lm(tiny()), draft())


def eagle(*, native: bool = True, mixed: bool = False, **config: Any) -> Made:
    def made(folder: Path, patch: pytest.MonkeyPatch) -> Engine:
        lm, sizes = native_lm(deep()), head_config(**config)
        state = random_state(sizes)
        head = (
            NativeHead(sizes, state, lm) if native else head_from(sizes, state, torch.float32, CPU)
        )
        draft = EagleDraft(head, lm)
        return engine_of(lm, Lookup(draft, Recycling()) if mixed else draft)

    return made


def dflash(*, native: bool = True) -> Made:
    def made(folder: Path, patch: pytest.MonkeyPatch) -> Engine:
        lm, config = native_lm(deep()), block_config()
        head: Any = tiny_head(config)
        if native:
            head = NativeDflashHead(config, random_state(config), lm)
        return engine_of(lm, Dflash(head, lm), "ddtree")

    return made


def small(family: str, target: str = "llama", *, native: bool = True) -> Made:
    def made(folder: Path, patch: pytest.MonkeyPatch) -> Engine:
        own = near_copy(family, vocab_size=VOCABULARY)
        return engine_of(native_lm(tiny(target)), SmallModel(native_lm(own) if native else own))

    return made


def mtp(name: str, *, native: bool = True) -> Made:
    def made(folder: Path, patch: pytest.MonkeyPatch) -> Engine:
        checkpoint(name, folder, vocab_size=VOCABULARY)
        if not native:
            patch.setattr("specengine.checkpoints.mtp.NativeMtpHead", refuse)
        found = Engine.from_pretrained(
            str(folder),
            "mtp",
            "eagle",
            dtype=torch.float32,
            backend="native",
            lookup=False,
            tokenizer=byte_tokenizer(),
        )
        patch.undo()
        return found

    return made


def refuse(*_: Any) -> None:
    raise UnsupportedModelError("native: no such block")


def of_assistant(*, native: bool = True) -> Made:
    def made(folder: Path, patch: pytest.MonkeyPatch) -> Engine:
        assistant(folder, patch)
        if not native:
            patch.setattr("specengine.checkpoints.mtp.NativeAssistant", refuse)
        options = {"backend": "native", "lookup": False, "tokenizer": byte_tokenizer()}
        found = Engine.from_pretrained(tiny("gemma4_text"), str(folder), "eagle", **options)
        patch.undo()
        return found

    return made


KINDS: dict[str, Made] = {
    "recycling": free(Recycling),
    "ngram": free(NGram),
    "lookup over recycling": free(lambda: Lookup(Recycling(), Recycling())),
    "lookup over a head": eagle(mixed=True),
    "eagle 1": eagle(native=False, version=1),
    "eagle 2, with temperatures": eagle(native=False, version=1, temperatures=(1.0, 1.5)),
    "eagle 3": eagle(),
    "eagle 3, torch": eagle(native=False),
    "dflash": dflash(),
    "dflash, torch": dflash(native=False),
    "small model": small("llama"),
    "small model, torch": small("llama", native=False),
    "small model, uneven heads": small("gemma4_text", "gemma4_text"),
    "small model, latent keys": small("deepseek_v3"),
    "small model, recurrent": small("qwen3_5_text"),
    "small model, other tokens": free(lambda: drafter_of("bytes", "merges")),
    **{f"mtp {name}": mtp(name) for name in (*QWEN, "deepseek_v3", "glm4_moe", NEMOTRON)},
    "mtp torch": mtp("glm4_moe", native=False),
    "mtp torch, latent keys": mtp("deepseek_v3", native=False),
    "assistant": of_assistant(),
    "assistant, torch": of_assistant(native=False),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"do_sample": True, "seed": 5, "temperature": 0.9},
    "grammar": {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 3}},
}


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill memory that nobody has written with NaN: what is read of it shows."""

    class Poisoned:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def empty(*sizes: Any, **options: Any) -> Tensor:
            return torch.empty(*sizes, **options).fill_(float("nan"))

    def new_empty(tensor: Tensor, *sizes: Any, **options: Any) -> Tensor:
        made = torch.empty(*sizes, **{"dtype": tensor.dtype, "device": tensor.device, **options})
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(kv_cache, "torch", Poisoned())
    monkeypatch.setattr(Tensor, "new_empty", new_empty)


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        yield KINDS[request.param](tmp_path, patch)


def parts(drafter: Drafter) -> Iterator[object]:
    """Yield a draft, what it wraps, and their heads."""
    yield drafter
    for name in ("inner", "recycling", "head"):
        if (inner := getattr(drafter, name, None)) is not None:
            yield from parts(inner)


@pytest.mark.slow
def test_every_class_of_drafts_and_heads_stands_here(tmp_path: Path) -> None:
    modules = {module.name for module in pkgutil.walk_packages(specengine.__path__, "specengine.")}
    for name in modules:
        if name.startswith(("specengine.drafters.", "specengine.models.")):
            importlib.import_module(name)
    known = set[type]()
    waiting: list[type] = [Drafter, *heads()]
    while waiting:
        one = waiting.pop()
        waiting += one.__subclasses__()
        if one.__module__ in modules and not inspect.isabstract(
            one
        ):  # other tests make drafters of their own
            known.add(one)
    # made around a draft for one answer, see WAYS
    known -= {drafters.Wrapped, Coupled, Guided, Origins, Inspected}
    seen = set[type]()
    for number, made in enumerate(KINDS.values()):
        with pytest.MonkeyPatch.context() as patch:
            folder = tmp_path / str(number)
            folder.mkdir()
            seen |= {type(part) for part in parts(made(folder, patch).drafter)}
    left = {one.__name__ for one in known - seen}
    assert not left, f"no text of these was answered beside another one: {', '.join(sorted(left))}"


def heads() -> list[type]:
    """Return what an EagleDraft accepts as its head, and what runs those that do not run themselves."""
    accepted = typing.get_args(typing.get_type_hints(EagleDraft.__init__)["head"])
    return [TorchHead, *(head for head in accepted if head is not EagleHead)]


def answers(engine: Engine, options: dict[str, Any]) -> list[tuple[list[int], str]]:
    return [said(engine.generate(prompt, max_new_tokens=8, **options)) for prompt in PROMPTS]


def said(result: Any) -> tuple[list[int], str]:
    return result.token_ids, result.finish_reason


@pytest.mark.sliced(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("engine", KINDS, indirect=True)
@pytest.mark.usefixtures("poisoned")
def test_answers_at_once_are_those_given_alone(engine: Engine, way: str) -> None:
    options = WAYS[way]
    alone = answers(engine, options)
    many = engine.generate_many(PROMPTS, parallel=3, max_new_tokens=8, **options)
    assert list(map(said, many)) == alone
    assert any(result.stats.num_draft_tokens for result in many)


@pytest.mark.sliced(1)
@pytest.mark.parametrize("engine", KINDS, indirect=True)
@pytest.mark.usefixtures("poisoned")
def test_asynchronous_streams_and_batches_are_those_given_alone(engine: Engine) -> None:
    alone = answers(engine, {})

    async def one(prompt: list[int]) -> tuple[list[int], str]:
        stream = engine.astream(prompt, parallel=3, max_new_tokens=8)
        async for _ in stream:
            pass
        return said(stream.result)

    async def all_of_them() -> list[tuple[list[int], str]]:
        return await asyncio.gather(*map(one, PROMPTS))

    assert asyncio.run(all_of_them()) == alone
    items = [
        Item(number, number, prompt, options={"max_new_tokens": 8})
        for number, prompt in enumerate(PROMPTS)
    ]
    lines = [found.line for found in answered(lambda: engine, items, lambda facts: None, 3)]
    assert [(line["token_ids"], line["finish_reason"]) for line in lines] == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", ["mtp qwen3_5_text", "assistant", "small model, uneven heads"], indirect=True
)
@pytest.mark.usefixtures("poisoned")
def test_a_server_answers_with_every_head(engine: Engine) -> None:
    asked = [TEXT | {"prompt": prompt, "max_tokens": 8, "temperature": 0} for prompt in PROMPTS]
    with served(lambda: engine, parallel=1) as server:
        alone = [server.post(body, "/v1/completions").json()["choices"] for body in asked]
    with served(lambda: engine, parallel=3) as server, ThreadPoolExecutor(5) as many:
        found = list(
            many.map(lambda body: server.post(body, "/v1/completions").json()["choices"], asked)
        )
        until(lambda: server.worker.jobs.idle)
    assert found == alone


def begin(engine: Engine, known: list[int]) -> None:
    """Take in a prompt as an answer does."""
    drafter = engine.drafter
    engine.target.want(drafter.traits.features)
    with torch.inference_mode():
        kept = min(engine.target.cached(known), drafter.cached(known))
        drafter.begin(known, engine.target.prefill(known, kept))


def cycle(tree: TokenTree, features: Tensor | None) -> Cycle:
    return Cycle(tree, [0], [SHARED[61]], Seconds(), features=features)


@pytest.mark.sliced(9)
@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("engine", KINDS, indirect=True)
@pytest.mark.usefixtures("poisoned")
def test_a_copied_prompt_drafts_what_the_whole_one_does(engine: Engine, waiting: bool) -> None:
    """waiting: the draft that is copied has tokens that it has not run."""
    pool = specengine.engine.Pool(engine, 2)
    one, other = pool.engines
    if not isinstance(drafters.innermost(one.drafter), RowDraft) or one.target.cache.states:
        pytest.skip("no cache is copied from text to text")
    known = SHARED[:60]
    begin(one, known)
    if waiting:
        tree = TokenTree.root(SHARED[60], 4)
        with torch.inference_mode():
            features = one.target.verify(tree)[1]
            one.target.commit(tree, [0])
            drafters.innermost(one.drafter).accept(cycle(tree, features))
        known = SHARED[:61]
    other.target.copy_from(one.target, len(known))
    drafters.copy_prompt(other.drafter, one.drafter, len(known))
    begin(other, [*known, 17, 4])
    fresh = specengine.engine.Pool(engine, 1).engines[0]
    begin(fresh, [*known, 17, 4])
    roots = [
        drafters.innermost(each.drafter).root(TokenTree.root(9, 4)).logits
        for each in (other, fresh)
    ]
    torch.testing.assert_close(*roots, rtol=1e-4, atol=1e-4)
