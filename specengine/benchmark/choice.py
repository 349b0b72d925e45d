"""From the names of ways to the ways: checked before a model is loaded, made once it is."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specengine.benchmark import peers
from specengine.benchmark.measuring import longest
from specengine.benchmark.peers import Model as PeerModel
from specengine.benchmark.ways import (
    ASSISTED,
    COMPILED,
    GENERATE,
    LOOKUP,
    PLAIN,
    Engines,
    Spec,
    Way,
    baseline,
    refuse_assistant,
)
from specengine.benchmark.workloads import Workload
from specengine.checkpoints import embedded
from specengine.engine import Engine, loading
from specengine.errors import InputError, require_input
from specengine.files import cache_dir
from specengine.options import LoadOptions
from specengine.request.options import GenerationOptions

BASELINES = (GENERATE, COMPILED, LOOKUP, ASSISTED)


@dataclass
class Comparison:
    """The ways to compare, plain decoding first.

    names      of ways: a Spec's text, one of BASELINES or of peers.NAMES; plain decoding takes part unasked
    model      an id, a path or None for the embedded one
    draft      of the ways that name none; None is the model's best
    assistant  of the assisted way, gguf of the peers', by default the model's own
    peers      the folder with the environments of the peers
    load       options of Engine.from_pretrained
    options    of Engine.generate but for the length

    Raises SpecEngineErrors for whatever cannot be had, as far as that shows without a model.
    """

    names: list[str]
    model: str | None = None
    draft: str | None = None
    assistant: str | None = None
    gguf: Path | None = None
    peers: Path = Path(".peers")
    load: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = list(dict.fromkeys([PLAIN, *self.names]))
        if (engine := next((name for name in self.names if name in peers.MODES), None)) is not None:
            raise InputError(f"way: got {engine!r}; another engine is named {peers.PREFIX}{engine}")
        self.other_engines = [name for name in self.names if name.startswith(peers.PREFIX)]
        self.specs = {
            name: Spec.of(name)
            for name in self.names
            if name not in BASELINES and name not in self.other_engines
        }
        self._load = LoadOptions.of(self.load)
        for spec in self.specs.values():
            spec.check(
                LoadOptions.of(
                    {name: value for name, value in self.load.items() if name != "draft_options"}
                )
            )
        self.drafts = any(
            spec.draft is None and spec.policy != PLAIN for spec in self.specs.values()
        )
        require_input(
            "draft: no way uses it; name a policy, as --way auto",
            self.draft is None or bool(self.drafts),
        )
        require_input(
            f"draft: got {self.draft!r}, but there are ways that draft; name a draft",
            not self.drafts or self.draft not in loading.PLAIN,
        )
        refuse_assistant(self.assistant, ASSISTED in self.names)
        for name in self.other_engines:
            peers.check(name)
        if self.other_engines:
            self.gguf = peers.gguf_file(self.model, self.gguf)
        elif self.gguf is not None:
            raise InputError(f"gguf: no way uses it; add way {peers.NAMES[0]}")
        GenerationOptions.of(dict(self.options), None, 1, 1 << 20)

    @property
    def samples(self) -> bool:
        return self.options["temperature"] > 0

    def engine(self) -> Engine:
        """Return an engine: the target, with the draft of the ways that name none."""
        return Engine.from_pretrained(
            self.model, self.draft, None if self.drafts else PLAIN, **self.load
        )

    @staticmethod
    def plain(first: Engine) -> Engine:
        """Return plain decoding on the target of `first`."""
        return Engine(first.target, None, None, first.tokenizer)

    def ways(
        self, first: Engine, items: Sequence[Workload], length: int, turns: int = 1
    ) -> list[Way]:
        """Return the ways on the target of `first`; length: of an answer, in tokens."""
        engines = Engines(first, self._load)
        plain = self.plain(first)
        ends = plain.stream([0], max_new_tokens=1).options.eos_token_ids

        def made(name: str) -> Way:
            if name in self.specs:
                return engines.way(self.specs[name], self.options)
            if name in BASELINES:
                return baseline(name, plain, self.options, ends, str(self.assistant), self._load)
            require_input(
                f"way {name}: peers are compared greedily, leave out --temperature",
                not self.samples,
            )
            return peers.way(
                name, self.peers, self._files(), ends, longest(plain, items, length, turns)
            )

        return [made(name) for name in self.names]

    def _files(self) -> PeerModel:
        """Return the files of the model that other engines read."""
        if self.gguf is None:
            folder = embedded.path()
            return PeerModel(embedded.gguf(), folder, embedded.draft_head(str(folder)), cache_dir())
        model = Path(self.model or self.gguf)
        head = None if self.draft is None or not Path(self.draft).is_dir() else Path(self.draft)
        return PeerModel(self.gguf, model if model.is_dir() else None, head, cache_dir())


def sampling(temperature: float, seed: int) -> dict[str, Any]:
    """Return options of Engine.generate: greedy at 0, else the model's whole distribution at this temperature."""
    if temperature == 0:
        return {"temperature": 0.0}
    return {"temperature": temperature, "seed": seed, "top_k": 0, "top_p": 1.0}
