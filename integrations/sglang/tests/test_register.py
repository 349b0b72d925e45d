"""The plugin in SGLang's own registries of algorithms and hooks, whose modules need no GPU; skipped without SGLang.

What these modules import of the rest of SGLang stands in here.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import specengine_sglang
import torch


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """SGLang's packages without what they run when imported; gives the settings of the run."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("SGLang is not installed")
    root = spec.submodule_search_locations[0]
    settings = SimpleNamespace(speculative_algorithm="SPECENGINE", disable_overlap_schedule=False)
    before = {name for name in sys.modules if name.partition(".")[0] == "sglang"}
    assert not before
    for name in (
        "sglang",
        "sglang.srt",
        "sglang.srt.arg_groups",
        "sglang.srt.speculative",
        "sglang.srt.plugins",
    ):
        package = ModuleType(name)
        package.__path__ = ["/".join([root, *name.split(".")[1:]])]
        monkeypatch.setitem(sys.modules, name, package)
    stand_ins = {
        "arg_groups.overrides": {"resolving_view": lambda _arguments: settings},
        "runtime_context": {"get_spec": lambda: settings},
        "speculative.eagle_utils": {"organize_draft_results": lambda *given: ("its own", *given)},
        "speculative.eagle_worker_v2": {"EAGLEWorkerV2": type("EAGLEWorkerV2", (), {})},
    }
    for name, contents in stand_ins.items():
        module = ModuleType(f"sglang.srt.{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    specengine_sglang._policy.cache_clear()
    yield settings
    for name in [
        name for name in sys.modules if name.startswith(("sglang", "specengine_sglang.algorithm"))
    ]:
        del sys.modules[name]


def test_sglang_takes_the_algorithm_for_eagle3_with_its_own_worker(
    running: SimpleNamespace,
) -> None:
    specengine_sglang.register()
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    found = SpeculativeAlgorithm.from_string("specengine")
    assert type(found).__name__ == "PolicyAlgorithm"
    assert found.create_worker(SimpleNamespace()).__name__ == "EAGLEWorkerV2"
    eagle3 = SpeculativeAlgorithm.EAGLE3
    asked = [name for name in vars(SpeculativeAlgorithm) if name.startswith("is_")]
    assert len(asked) > 8
    assert {name: getattr(found, name)() for name in asked} == {
        name: getattr(eagle3, name)() for name in asked
    }
    interface = {
        name
        for name, part in vars(SpeculativeAlgorithm).items()
        if callable(part) and name[0] != "_"
    }
    assert interface - {"from_string", "register"} <= set(dir(found))


def test_the_policy_stands_in_for_its_choice_of_nodes(
    running: SimpleNamespace, monkeypatch: Any
) -> None:
    monkeypatch.setenv("SPECENGINE_POLICY", "fixed")
    monkeypatch.setenv("SPECENGINE_POLICY_OPTIONS", "branching=2")
    specengine_sglang.register()
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    organize = sys.modules["sglang.srt.speculative.eagle_utils"].organize_draft_results
    scores = [torch.tensor([[[0.6, 0.1]]]), torch.tensor([[[0.5, 0.05], [0.06, 0.04]]])]
    tokens = [torch.tensor([[1, 2]]), torch.tensor([[3, 4, 5, 6]])]
    parents = [torch.tensor([[-1, 0, 1]]), torch.tensor([[2, 4]])]
    _, chosen, ids = organize(scores, tokens, parents, 3)
    assert (chosen.tolist(), ids.tolist()) == ([[0, 1]], [[1, 2]])  # the likeliest two are 0 and 2
    running.speculative_algorithm = "EAGLE3"
    assert organize(scores, tokens, parents, 3)[0] == "its own"


def test_a_chain_and_an_unknown_policy_are_refused_at_the_start(
    running: SimpleNamespace, monkeypatch: Any
) -> None:
    specengine_sglang.register()
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    validate = SpeculativeAlgorithm.from_string("SPECENGINE").validate_server_args
    validate(SimpleNamespace(speculative_eagle_topk=4))
    with pytest.raises(ValueError, match="speculative-eagle-topk: 2 or more"):
        validate(SimpleNamespace(speculative_eagle_topk=1))
    monkeypatch.setenv("SPECENGINE_POLICY", "ltd")
    specengine_sglang._policy.cache_clear()
    with pytest.raises(ValueError, match="policy: got 'ltd', accepted chain"):
        validate(SimpleNamespace(speculative_eagle_topk=4))
