"""Small trained networks for policies: what they read, how they compute, how they are stored.

A module of policies, none itself. Training imports the same functions, so features exist once.
"""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from specengine import ops
from specengine.errors import TRUTH, InputError, number, reader, require_input, restating, whole
from specengine.files import atomic
from specengine.policies import PerDevice

FORMAT = 1
# of a safetensors file: one entry, as their order would change from file to file
METADATA = "specengine"
# what ships, and for which target
FOLDER = Path(__file__).parent / "classifiers" / "smollm2-135m-instruct"
TOP_PROBS = 10
UNREADABLE = (OSError, SafetensorError, ValueError, KeyError, TypeError)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# whatever the process has as its defaults
_PLAIN: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
N = TypeVar("N", bound=nn.Module)


class Mlp(nn.Module):
    """Inputs to hidden ReLU units to one probability; float32 [..., inputs] to float32 [...]."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(inputs, hidden, **_PLAIN)
        self.output = nn.Linear(hidden, 1, **_PLAIN)

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return weights and biases in the order of ops.mlp."""
        return self.hidden.weight, self.hidden.bias, self.output.weight, self.output.bias

    def logits(self, features: Tensor) -> Tensor:
        return cast(Tensor, self.output(self.hidden(features).relu()))[..., 0]

    def forward(self, features: Tensor) -> Tensor:
        return (
            self.logits(features).sigmoid()
            if self.hidden.weight.requires_grad
            else ops.mlp(features, self.parts)
        )


class AcceptanceHead(nn.Module):
    """A draft's hidden state to the probability that its token is accepted once its parent is.

    Each block is x + SiLU(W x + b); where the first one changes the width, its shortcut is cut or filled with zeros.
    States are scaled to a root mean square of 1 first. [..., hidden_size] in any dtype to float32 [...].
    Source: SpecDec++, Huang et al. 2025; one block of width 1024 as in Learning to Draft, A.1.
    """

    def __init__(self, hidden_size: int, width: int = 1024, blocks: int = 1) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(
            nn.Linear(hidden_size if i == 0 else width, width, **_PLAIN) for i in range(blocks)
        )
        self.output = nn.Linear(width, 1, **_PLAIN)

    def logits(self, states: Tensor) -> Tensor:
        states = states.float()
        states = states * (states.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        for block in self.blocks:
            states = pad(states, (0, self.width - states.shape[-1])) + silu(block(states))
        return cast(Tensor, self.output(states))[..., 0]

    def forward(self, states: Tensor) -> Tensor:
        return self.logits(states).sigmoid()


def c2t_features(
    path_log_probs: Tensor, entropies: Tensor, depths: Tensor, depth_base: int
) -> Tensor:
    """Return float32 [..., 3]: path probability, entropy of the parent's distribution in nats, depth.

    path_log_probs: float32 [...]; entropies, float32, and depths broadcast to it; depths: of the nodes, 1 for the
    root's children, which count as `depth_base`. Source: C2T, section 4.1 and Algorithm 1.
    """
    probs, depths = path_log_probs.exp(), (depths + (depth_base - 1)).float()
    return torch.stack((probs, entropies.expand_as(probs), depths.expand_as(probs)), -1)


def disco_features(top_probs: Tensor, entropies: Tensor, depths: Tensor, depth_base: int) -> Tensor:
    """Return float32 [rows, 12]: the 10 largest probabilities of a draft distribution, its entropy in nats, the depth.

    top_probs: float32 [rows, <= 10], descending, filled up with 0; depths: int64 [rows], of the children proposed, 1
    for the root's, which count as `depth_base`. Source: Disco, Mamou et al. 2024; as in Learning to Draft, A.1.
    """
    missing = TOP_PROBS - top_probs.shape[1]
    probs = pad(top_probs, (0, missing)) if missing else top_probs
    return torch.cat([probs, entropies[:, None], (depths + (depth_base - 1)).float()[:, None]], 1)


class ClassifierKind(NamedTuple):
    """features: their names, in order; make: the network, from the file's facts; sizes: facts of the kind, with what
    holds in files that do not record them. entropy: whether the network sees it; if not, its feature is 0."""

    features: tuple[str, ...]
    make: Callable[[Mapping[str, Any]], nn.Module]
    sizes: Mapping[str, Any]


KINDS = {
    "c2t": ClassifierKind(
        ("path probability", "entropy", "depth"),
        lambda facts: Mlp(3, facts.get("units", 48)),
        {"units": 48, "entropy": True},
    ),
    "disco": ClassifierKind(
        (*(f"probability {rank}" for rank in range(1, TOP_PROBS + 1)), "entropy", "depth"),
        lambda facts: Mlp(12, facts.get("units", 128)),
        {"units": 128},
    ),
    "specdecpp": ClassifierKind(
        ("hidden state",),
        lambda facts: AcceptanceHead(facts["hidden_size"], facts["width"], facts["blocks"]),
        {"hidden_size": None, "width": None, "blocks": None},
    ),
}


class Classifier:
    """A trained network and the facts in its file.

    facts: `depth_base`, `top` (tokens that entropies are summed over), `beta` (calibrated threshold), sizes, and the
    record of its training.
    """

    def __init__(self, net: Any, facts: Mapping[str, Any]) -> None:
        self.net, self.facts = net, facts
        # the network by device; its parts, kept here because a module is slow to list them
        self.on = PerDevice(
            lambda device: (
                net if net.output.weight.device == device else copy.deepcopy(net).to(device)
            )
        )
        self.parts = PerDevice(lambda device: self.on[device].parts)


def save(
    file: Path,
    kind: str,
    net: nn.Module,
    facts: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a classifier; `facts` are JSON values and hold at least depth_base, top, beta and the kind's sizes."""
    write(
        file,
        net,
        {
            "format": FORMAT,
            "kind": kind,
            "features": list(KINDS[kind].features),
            "log_base": "e",
            **facts,
        },
        dtype,
    )


def write(file: Path, net: nn.Module, facts: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Write a network with facts, JSON values, as `read` reads them. dtype: of the tensors in the file."""
    state = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in net.state_dict().items()
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic(file) as part:
        save_file(state, part, metadata={METADATA: json.dumps(facts)})


def read(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the facts of a file; one of UNREADABLE where it is damaged."""
    with safe_open(file, framework="pt") as opened:
        state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return state, dict(json.loads((opened.metadata() or {})[METADATA]))


def load(kind: str, classifier: str) -> Classifier:
    """Load the classifier of policy `kind`: `auto` is the one that ships, else the path of a file.

    InputError naming the option where the file is missing, damaged, of another kind, or has other tensors.
    """
    file = FOLDER / f"{kind}.safetensors" if classifier == "auto" else Path(classifier).expanduser()
    where = f"policy {kind}.classifier: {file}"
    require_input(
        f"{where} is not a file; train one with: {training_command(kind)}", file.is_file()
    )
    with restating(
        UNREADABLE,
        lambda error: InputError(
            f"{where} cannot be read ({error!r}); train it again with: {training_command(kind)}"
        ),
    ):
        state, facts = read(file)
    readers = {
        "format": reader(f"{FORMAT}", lambda value: value == FORMAT),
        "kind": reader(kind, lambda value: value == kind),
        "features": reader(
            ", ".join(KINDS[kind].features),
            lambda value: value == list(KINDS[kind].features),
        ),
        "log_base": reader("e", lambda value: value == "e"),
        "depth_base": whole(0),
        "top": whole(1),
        "beta": number(0, 1, "0 to 1"),
        **{name: TRUTH if name == "entropy" else whole(1) for name in KINDS[kind].sizes},
    }
    for name, each in readers.items():
        each.check(f"{where} records {name}", facts.get(name, KINDS[kind].sizes.get(name)))
    return Classifier(filled(KINDS[kind].make(facts), state, where), facts)


def training_command(kind: str) -> str:
    return f"specengine train classifier FOLDER --kind {kind} --data TEXT"


def filled(net: N, state: Mapping[str, Tensor], where: str) -> N:
    """Return a network with the tensors of `state`. Raise InputError with a list of what does not fit."""
    expected = net.state_dict()
    wrong = {
        "unused": [name for name in state if name not in expected],
        "missing": [name for name in expected if name not in state],
        "mis-shaped": [
            f"{name} {list(state[name].shape)} instead of {list(tensor.shape)}"
            for name, tensor in expected.items()
            if name in state and state[name].shape != tensor.shape
        ],
        "not float32, bfloat16 or float16": [
            name for name, tensor in state.items() if tensor.dtype not in FLOATS
        ],
    }
    if not any(wrong.values()):
        wrong["not finite"] = [
            name for name, tensor in state.items() if not bool(tensor.isfinite().all())
        ]
    faults = [f"{what}: {', '.join(names)}" for what, names in wrong.items() if names]
    require_input(
        f"{where} holds other tensors than this policy's network; {'; '.join(faults)}", not faults
    )
    net.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return net.eval().requires_grad_(False)
