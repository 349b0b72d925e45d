"""specengine doctor --inspect: what is installed here, what it runs on, and what there is to choose from."""

import argparse
import dataclasses
import importlib.metadata
import inspect
import platform
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

import specengine
from specengine import checkpoints as models, drafters, ops, policies, registry
from specengine.checkpoints.eagle import Convention, head_folder, listed, one_step_agreement
from specengine.cli import given
from specengine.cli.terminal import as_json, say
from specengine.cli.train_arguments import as_typed
from specengine.drafters import Drafter
from specengine.engine import Engine, parallel_of
from specengine.errors import InputError
from specengine.models.eagle import head_from, require_fit, with_appended_tokens
from specengine.models.extension import NOT_BUILT, instruction_sets
from specengine.models.huggingface import HuggingFaceTarget
from specengine.models.native import NativeTarget
from specengine.policies import TreePolicy

# Prompts for the target: a head's agreement is measured on the target's own text.
OPENINGS = (
    "Explain why the sky is blue and why sunsets are red.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "How do I sort a list of names by last name in Python?",
)
OPENING_TOKENS = 64  # new tokens per opening
READY_LATER = "not there yet, it is fetched at first use"
PACKAGES = ("torch", "transformers", "triton", "flash-attn")


def run(arguments: argparse.Namespace) -> int:
    there = devices()
    facts: dict[str, Any] = {
        "versions": versions(),
        "devices": there,
        "backends": {
            kind: {op: dataclasses.asdict(backend) for op, backend in ops.backends(kind).items()}
            for kind in dict.fromkeys(name.partition(":")[0] for name in there)
        },
        "cache": cache_state(),
        "policies": _variants(policies, TreePolicy, "policy"),
        "drafters": _variants(drafters, Drafter, "draft"),
    }
    if arguments.model is not None or arguments.draft is not None:
        options = given.load_options(arguments) | {"draft_options": {}}  # those are of the head
        engine = Engine.from_pretrained(arguments.model, policy="plain", **options)
        facts["model"] = model_facts(arguments.model or models.embedded.NAME, engine)
        if arguments.draft is not None:
            facts["draft"] = _draft(arguments, engine)
    if not arguments.json:
        facts["backends"] = {
            name: line
            for kind, of_kind in facts["backends"].items()
            for name, line in _backends(kind, of_kind, every=arguments.ops).items()
        }
    print_facts(facts, in_json=arguments.json)
    return 0


def print_facts(facts: dict[str, Any], *, in_json: bool) -> None:
    """Print sections of facts by name, of lines, or texts: as JSON, or for people."""
    print(as_json(facts, default=str) if in_json else "\n".join(_lines(facts)))


def versions() -> dict[str, str | None]:
    """Return the version of each package, or None where it is not installed."""
    installed: dict[str, str | None] = {
        "specengine": specengine.__version__,
        "python": platform.python_version(),
    }
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def devices() -> dict[str, str]:
    integers = ", ".join(instruction_sets("integer"))
    by_name = {
        "cpu": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads; "
        f"native forward: {', '.join(instruction_sets()) or NOT_BUILT}"
        f"{'; integer numerics: ' * bool(integers)}{integers}"
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        by_name[f"cuda:{index}"] = (
            f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, "
            f"compute capability {properties.major}.{properties.minor}"
        )
    return by_name


def cache_state() -> dict[str, str]:
    """Return the cache folder, and whether the default model is there: its GGUF file."""
    name = models.embedded.NAME
    try:
        root = models.cache_dir()
        folder = root / "models" / f"{name}-gguf"
        damage = models.embedded.folder_damage(folder)
        state = f"damaged: {damage}" if folder.exists() else READY_LATER
    except OSError as error:
        return {"folder": "none that can be read", name: str(error)}
    return {"folder": str(root), name: state if damage else "ready"}


def _variants(package: ModuleType, base: type, field: str) -> dict[str, dict[str, Any]]:
    variants: dict[str, dict[str, Any]] = {}
    for name in (*registry.names(package), *sorted(registry.plugins(package.__name__))):
        try:
            cls: type = registry.find(package, base, name, field)
        except InputError as error:  # of a plug-in
            variants[name] = {"about": str(error), "options": {}, "default policy": None}
            continue
        variants[name] = {
            "about": (inspect.getdoc(cls) or "").partition("\n")[0],
            "options": dict(_options(cls)),
            "default policy": {"name": cls.about.policy, **cls.about.options}
            if issubclass(cls, Drafter)
            else None,
        }
        if issubclass(cls, TreePolicy):
            variants[name]["presets"] = cls.presets
    return variants


def _options(cls: type) -> Iterator[tuple[str, Any]]:
    for item in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if item.init:
            factory = item.default_factory
            yield item.name, item.default if factory is dataclasses.MISSING else factory()


def model_facts(name: str, engine: Engine) -> dict[str, Any]:
    target = engine.target
    assert isinstance(target, HuggingFaceTarget | NativeTarget)
    dtype = str(target.dtype).removeprefix("torch.")
    return {
        "name": name,
        "type": target.lm.config.model_type,
        "parameters": target.lm.parameters,
        "dtype": dtype,
        "device": str(target.device),
        "backend": target.backend,
        "numerics": target.lm.numerics if isinstance(target, NativeTarget) else dtype,
        **(
            {"instruction set": target.lm.instruction_set}
            if isinstance(target, NativeTarget)
            else {}
        ),
        "layers": target.lm.layers,
        "context": target.max_context,
        "answers at once": parallel_of(engine),
        "vocabulary": target.vocab_size,
        "attention": target.lm.attention,
        **({"layers run as": target.lm.modules} if isinstance(target, HuggingFaceTarget) else {}),
        "packed copy": target.lm.packed,
        "chat template": bool(getattr(engine.tokenizer, "chat_template", None)),
    }


def _draft(arguments: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    folder = head_folder(arguments.draft, offline=arguments.offline)
    if folder is None:
        raise InputError(
            f"draft: got {arguments.draft}, accepted a folder or Hub id of an EAGLE head"
        )
    config, state, dialect = given.load_head(folder, arguments)
    described = {
        "name": arguments.draft,
        "dialect": str(dialect),
        "notes": list(dialect.notes),
        "parameters": sum(tensor.numel() for name, tensor in state.items() if name != "d2t"),
        "tensors": [
            f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            for name, tensor in state.items()
        ],
        "config": [f"{name}={value}" for name, value in dataclasses.asdict(config).items()],
    }
    target = engine.target
    assert isinstance(target, HuggingFaceTarget | NativeTarget)
    config, state = with_appended_tokens(config, state, target.lm)
    try:
        require_fit(config, target.lm)
    except InputError as error:
        say(
            f"specengine: warning: {error}; its agreement with {arguments.model or 'the default model'} is not measured"
        )
        return described
    if not config.kind.startswith("EAGLE"):  # whose blocks no convention of EAGLE is measured by
        return described
    measured = one_step_agreement(
        head_from(config, state, target.dtype, target.device), target.lm, _texts(engine)
    )
    _warn(measured)
    return described | {
        "agreement": {
            one.name: f"{one.agreement:.3f} with hidden states {listed(one.layer_ids)}"
            for one in measured
        }
    }


def _texts(engine: Engine) -> list[list[int]]:
    """Return token ids of the openings and of the target's continuations."""
    texts = []
    for opening in OPENINGS:
        answer = engine.stream(opening, max_new_tokens=OPENING_TOKENS, temperature=0.0)
        texts.append([*answer.prompt, *answer.run().token_ids])
    return texts


def _warn(measured: list[Convention]) -> None:
    read, best = measured[0], max(measured, key=lambda one: one.agreement)
    if best.surely_better_than(read):
        say(
            f"specengine: warning: the draft agrees with the target more often ({best.agreement:.3f} instead of "
            f"{read.agreement:.3f}) when it reads hidden states {listed(best.layer_ids)} instead of "
            f"{listed(read.layer_ids)}; pass --draft-option layer_ids={','.join(map(str, best.layer_ids))}"
        )


def _backends(kind: str, backends: dict[str, Any], *, every: bool) -> dict[str, Any]:
    """Return the backend of every op, or how many ops each backend has."""
    if every:
        return {f"{kind} {op}": backend for op, backend in backends.items()}
    counts = Counter(backend["name"] for backend in backends.values())
    counted = ", ".join(f"{name} for {count} ops" for name, count in counts.most_common())
    return {kind: f"{counted} (--ops lists them)"}


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    for title, entries in facts.items():
        if isinstance(entries, str):
            yield f"\n{entries}"
        elif entries:
            yield title
            if isinstance(entries, list):
                yield from (f"  {line}" for line in entries)
            else:
                for name, value in entries.items():
                    yield from _entry_lines(name, value)


def _entry_lines(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and "about" in value:
        yield from _part(name, value)
    elif isinstance(value, list):
        for index, line in enumerate(value):
            yield f"  {'' if index else name:<22}{line}"
    elif isinstance(value, dict):
        yield f"  {name:<22}{'; '.join(f'{key}: {as_typed(item)}' for key, item in value.items())}"
    else:
        words = (
            "not installed"
            if value is None
            else ("no", "yes")[value]
            if isinstance(value, bool)
            else value
        )
        yield f"  {name:<22}{words}"


def _part(name: str, value: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a policy or a draft."""
    yield f"  {name:<22}{value['about']}"
    if value["options"]:
        yield f"  {'':<22}{_assignments(value['options'])}"
    for preset, options in value.get("presets", {}).items():
        yield f"  {'':<22}{name}/{preset}: {_assignments(options) or 'the defaults'}"
    if value["default policy"]:
        yield f"  {'':<22}default policy: {_assignments(value['default policy'])}"


def _assignments(options: dict[str, Any]) -> str:
    return " ".join(f"{name}={as_typed(value)}" for name, value in options.items())
