"""Compiles for a card, without a GPU, exactly what the launchers would launch there, and reads the result.

Run as `python -m tests.kernels.aot [--card NAME] CASE...` in a process of its own (Triton must not be in its
interpreter); prints one JSON object per launched kernel: what it needs and which instructions it has. The card is sm_90
unless named. With --programs first it compiles nothing, and prints how many programs Triton would compile of each
kernel for all the cases together.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from specengine_kernels import (
    candidate_selection,
    coupling,
    entropy,
    frontier,
    kv_compaction,
    packed_linear,
    recurrence,
    rms_norm,
    rope_store,
    silu_mul,
    strict_attention,
    top_children,
    tree_attention,
    verification,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tests.kernels import all_kernels
from tests.kernels.cards import ROOM

TARGETS = {
    name: GPUTarget("cuda", int(name[3:]), 32)
    if name.startswith("sm_")
    else GPUTarget("hip", name, 64)
    for name in ROOM
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}


class Compiling:
    """Stands in for a kernel: a launch compiles it, specialised for the arguments as Triton would."""

    def __init__(self, kernel: JITFunction, target: GPUTarget = TARGETS["sm_90"]) -> None:
        self.kernel, self.target = kernel, target
        self.launched: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.launched.append(self.compile(grid, *args, **kwargs))

    def compile(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> dict[str, Any]:
        signature, constants, attributes, options = self.specialised(*args, **kwargs)
        source = ASTSource(self.kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=self.target, options=options)
        return {"kernel": self.kernel.__name__, "grid": grid, **options, **facts(compiled)}

    def specialised(
        self, *args: Any, **kwargs: Any
    ) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any], Any]:
        """Types, constants, what is known of the rest, and options: these tell one program from another."""
        options = {
            name: kwargs.pop(name)
            for name in ("num_warps", "num_stages", "enable_fp_fusion")
            if name in kwargs
        }
        values = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            value = values[parameter.name]
            special = not parameter.do_not_specialize
            if (
                parameter.is_constexpr
                or value is None
                or (special and type(value) is int and value == 1)
            ):
                signature[parameter.name], constants[(index,)] = "constexpr", value
                continue
            signature[parameter.name] = parameter.annotation_type or type_of(value)
            placed = isinstance(value, torch.Tensor) and parameter.do_not_specialize_on_alignment
            if special and not placed and divisible(value):
                attributes[(index,)] = [["tt.divisibility", 16]]
        return signature, constants, attributes, options


class Counting(Compiling):
    """A launch only tells programs apart."""

    def compile(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"program": repr(self.specialised(*args, **kwargs))}


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def divisible(value: Any) -> bool:
    number = value.data_ptr() if isinstance(value, torch.Tensor) else value
    return not isinstance(number, float) and number % 16 == 0


def facts(compiled: Any) -> dict[str, Any]:
    """Registers and spilled words of a thread, shared bytes of a program, and counts of instructions."""
    found = (
        facts_of(compiled.asm["cubin"])
        if "cubin" in compiled.asm
        else facts_of_amd(compiled.asm["amdgcn"])
    )
    races = unordered(compiled.asm["ptx"]) if "ptx" in compiled.asm else []
    return {**found, "shared": compiled.metadata.shared, "races": races}


@functools.cache  # several cases may come to one program, and the tools take longer than the compiler
def facts_of(cubin: bytes) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = printed("cuobjdump", "-res-usage", file.name)
        # the data flow would only annotate branches
        code = printed("nvdisasm", "--no-dataflow", file.name)
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    return {
        "code": hashlib.sha256(cubin).hexdigest(),
        "lopsided": lopsided(code),
        "registers": registers,
        "stack": stack,
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "wgmma": len(re.findall(r"\bHGMMA\b", code)),
        "mma": len(re.findall(r"\bHMMA\b", code)),
        "async_16_bytes": len(re.findall(r"\bLDGSTS\.E\S*\.128\b", code)),
        "load_16_bytes": len(re.findall(r"\bLDG\.E\S*\.128\b", code)),
        "load_narrow": len(re.findall(r"\bLDG\.E(?!\S*\.(?:128|64))", code)),
    }


EXCHANGED = re.compile(r"\bSHFL\.BFLY \S+, (R\d+),")
WRITTEN = re.compile(r"^\s*/\*\w+\*/\s+(?:@!?U?P\d+ )?[A-Z0-9.]+ (?:U?P\w+, )*(R\d+)")
FUSED = re.compile(r"\b[FD]FMA\S* R\d+, .*, \|?(R\d+)(?:\.reuse)?\|? ;")


def lopsided(code: str) -> list[str]:
    """Return the fused products of machine code that add another lane's product to their own.

    That lane's was rounded, the own is not, so each lane of a butterfly ends with another sum. What a kernel then makes
    of that sum, the same for all lanes as it says, depends on the lane.
    """
    exchanged: set[str] = set()
    found = []
    for line in code.splitlines():
        if (fused := FUSED.search(line)) and fused[1] in exchanged:
            found.append(" ".join(line.split()[1:-1]))
        if written := WRITTEN.search(line):
            exchanged.discard(written[1])
        if shuffled := EXCHANGED.search(line):
            exchanged.add(shuffled[1])
    return found


def facts_of_amd(text: str) -> dict[str, Any]:
    """The same of what AMD's assembler is given; its scratch memory is the stack."""

    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text)[1])

    return {
        "code": hashlib.sha256(text.encode()).hexdigest(),
        "registers": number("vgpr_count"),
        "stack": number("private_segment_fixed_size"),
        "spills": number("vgpr_spill_count"),
    }


ACCESS = re.compile(r"\b(ld|st|atom|red|cp)\.\S*global\S*\s.*\[\s*(%rd\d+)")
PARAMETER = re.compile(r"\bld\.param\.\S+\s+(%rd\d+),\s*\[\s*(\w+)")
REGISTER = re.compile(r"%[a-z]+\d+")


def unordered(ptx: str) -> list[str]:
    """Return the pointers through which a program of several warps loads and stores without a barrier in between.

    A pointer is a parameter; an address is its own if it was computed from it. Read from top to bottom, so what lies
    between two passes of a loop counts if it stands between the load and the store.
    """
    if int(re.search(r"\.reqntid (\d+)", ptx)[1]) <= 32:
        return []
    names = re.findall(r"\.param \.u?\w+ (?:\.ptr \S+ \.align \d+ )?(\w+)", ptx)
    base: dict[str, str] = {}  # of the registers that hold addresses
    last: dict[str, set[str]] = {}  # accesses of a pointer since a barrier
    found = set()
    for line in ptx.splitlines():
        if re.search(r"\b(?:bar|barrier)\.(?:cta\.)?sync", line):
            last.clear()
        elif parameter := PARAMETER.search(line):
            base[parameter[1]] = parameter[2]
        elif (access := ACCESS.search(line)) and access[2] in base:
            pointer, kind = base[access[2]], "ld" if access[1] in ("ld", "cp") else "st"
            last.setdefault(pointer, set()).add(kind)
            if last[pointer] == {"ld", "st"}:
                found.add(names.index(pointer))
        elif len(registers := REGISTER.findall(line)) > 1 and not access:
            target, *sources = registers[1:] if line.lstrip().startswith("@") else registers
            if owner := next((base[source] for source in sources if source in base), None):
                base[target] = owner
    return sorted(found)


def printed(tool: str, *arguments: str) -> str:
    done = subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def attention(
    nodes: int,
    groups: int,
    size: int,
    dtype: str,
    splits: int | None = None,
    tiles: list[int] | None = None,
    slots: int = 4352,
    texts: int = 1,
    causal: bool = False,
) -> None:
    """texts: sequences; of more than one a table finds the caches; causal: rows of a prompt."""
    kind, kv_heads = getattr(torch, dtype), 8
    q = torch.empty(texts, nodes, groups * kv_heads, size, dtype=kind)
    cache = torch.empty(1, kv_heads, slots, size, dtype=kind).expand(texts, -1, -1, -1)
    words, ones = torch.empty(texts, nodes, 4, dtype=torch.int64), torch.empty(texts).int()
    options = {"splits": splits, "tiles": tree_attention.Tiles(*tiles) if tiles else None}
    options |= {"causal": causal}
    if texts > 1:
        options |= {"table": torch.empty(texts, 2, dtype=torch.int64)}
    tree_attention.tree_attention(q, cache, cache, words, ones, ones, ones, **options)


def strict(groups: int, size: int, dtype: str) -> None:
    kind, kv_heads = getattr(torch, dtype), 8
    q, one = (
        torch.empty(1, 64, groups * kv_heads, size, dtype=kind),
        torch.empty(1, dtype=torch.int32),
    )
    cache, nodes = (
        torch.empty(1, kv_heads, 4352, size, dtype=kind),
        torch.empty(1, 64, 64, dtype=torch.int32),
    )
    strict_attention.strict_attention(q, cache, cache, nodes, nodes[..., 0].contiguous(), one, one)


def selection(rows: int, columns: int, most: int, dtype: str) -> None:
    logits = torch.empty(rows, columns, dtype=getattr(torch, dtype))
    limits = {name: torch.empty(1) for name in ("log_gate", "bound")}
    budget = torch.empty(1, dtype=torch.int32)
    candidate_selection.select_candidates(logits, torch.empty(rows), most, budget=budget, **limits)


def entropies(rows: int, columns: int, top: int, normalized: bool, dtype: str) -> None:
    entropy.top_entropy(torch.empty(rows, columns, dtype=getattr(torch, dtype)), top, normalized)


def children(rows: int, columns: int, k: int, dtype: str) -> None:
    top_children.top_children(torch.empty(rows, columns, dtype=getattr(torch, dtype)), k)


def compaction(layers: int, heads: int, size: int, dtype: str) -> None:
    slab = torch.empty(layers, 2, heads, 512, size, dtype=getattr(torch, dtype))
    one = torch.empty(1, dtype=torch.int32)
    kv_compaction.compact_kv(slab, torch.empty(16, dtype=torch.int32), one, one)


def choice(nodes: int, columns: int, sampled: bool, dtype: str) -> None:
    logits, whole = (
        torch.empty(nodes, columns, dtype=getattr(torch, dtype)),
        torch.empty(nodes, dtype=torch.int64),
    )
    verification.choose_tokens(logits, whole, whole[:1] if sampled else None, torch.empty(1))


def walk(nodes: int) -> None:
    whole, one = torch.empty(nodes, dtype=torch.int64), torch.empty(1, dtype=torch.int32)
    verification.walk(whole, whole, whole, one, whole, one, whole[:1])


def record(rows: int, longest: int, budget: int) -> None:
    whole, one = torch.empty(rows, dtype=torch.int64), torch.empty(1, dtype=torch.int32)
    reals, last = torch.empty(rows), torch.empty(1, dtype=torch.int64)
    verified = verification.Verified(whole, whole, whole, reals, reals, whole)
    lists = torch.empty(7 + 2 * longest + 5 * budget, dtype=torch.int64)
    verification.record_walk(verified, (whole, one, last), (one,) * 5, lists, last, longest)


def append(most: int, capacity: int) -> None:
    whole, one = torch.empty(capacity, dtype=torch.int64), torch.empty(1, dtype=torch.int32)
    tree = frontier.Tree(
        whole, whole, whole, torch.empty(capacity), torch.empty(capacity), whole[:, None], one
    )
    tree = tree._replace(ancestors=torch.empty(capacity, -(-capacity // 64), dtype=torch.int64))
    drawn = (
        torch.empty(most, dtype=torch.int64),
        torch.empty(most, dtype=torch.int64),
        torch.empty(most),
    )
    frontier.append_nodes(tree, *drawn, one, torch.empty(most, dtype=torch.int64), one)


def gather(width: int, channels: int, dtype: str) -> None:
    rows, whole = (
        torch.empty(64, channels, dtype=getattr(torch, dtype)),
        torch.empty(64, dtype=torch.int64),
    )
    frontier.gather_rows(rows, whole[:width], rows, whole[:width], rows[:width], rows[:width])


def level(width: int, capacity: int, factors: bool = False) -> None:
    whole, one = torch.empty(capacity, dtype=torch.int64), torch.empty(1, dtype=torch.int32)
    words = torch.empty(capacity + 1, -(-capacity // 64), dtype=torch.int64)
    tree = frontier.Tree(whole, whole, whole, *[torch.empty(capacity)] * 2, words[:-1], one)
    depths = torch.empty(4) if factors else None
    frontier.level_rows(tree, whole[:width], one, one, one, one, words, depths)


def enter(width: int, channels: int, dtype: str) -> None:
    rows, whole = torch.empty(64, channels, dtype=getattr(torch, dtype)), torch.empty(width)
    weights = rows[0].clone(), rows[0].clone()
    rms_norm.gather_norms(rows, whole.long(), rows, whole.long(), weights, 1e-5)


def rope(rows: int, groups: int, size: int, dtype: str, way: str = "") -> None:
    """way: `` for heads, `stepwise` for layers of a target, `normed` where those norm queries and keys, `texts` where
    each of a few texts has a cache of its own."""
    kind, kv_heads = getattr(torch, dtype), 8
    query, key = (
        torch.empty(rows, heads, size, dtype=kind) for heads in (groups * kv_heads, kv_heads)
    )
    table, cache = torch.empty(4096, size // 2), torch.empty(kv_heads, 4096, size, dtype=kind)
    texts = min(rows, 4) if way == "texts" else 1
    numbers = torch.empty(texts, dtype=torch.int64), torch.empty(texts, dtype=torch.int32)
    positions = torch.empty(rows, dtype=torch.int64)
    norms = [torch.empty(size, dtype=kind) for _ in range(2)] if way == "normed" else [None, None]
    places = positions, table, table, cache, cache, *numbers
    table = torch.empty(texts, 2, dtype=torch.int64) if texts > 1 else None
    rope_store.rope_store(query, key, key, *places, *norms, 1e-5, stepwise=bool(way), table=table)


def norm(rows: int, channels: int, dtype: str, adds: bool = True) -> None:
    states = torch.empty(rows, channels, dtype=getattr(torch, dtype))
    rms_norm.add_rms_norm(states, states if adds else None, states[0], 1e-5)


def gate(rows: int, channels: int, dtype: str) -> None:
    both = torch.empty(rows, 2 * channels, dtype=getattr(torch, dtype))
    silu_mul.silu_mul(both[:, :channels], both[:, channels:])


def couple(rows: int, columns: int, dtype: str, mapped: bool) -> None:
    logits, whole = (
        torch.empty(rows, columns, dtype=getattr(torch, dtype)),
        torch.empty(columns, dtype=torch.int64),
    )
    coupling.couple(logits, whole if mapped else None, whole[:rows], whole[:1], torch.empty(1))


def packed(
    rows: int, outputs: int, inputs: int, kind: str, dtype: str, splits: int | None = None
) -> None:
    states = torch.empty(rows, inputs, dtype=getattr(torch, dtype))
    weight = all_kernels.quantised(kind, 1, inputs, 0)
    # of many outputs, whose numbers would take seconds to draw
    weight = packed_linear.Weight(
        *(None if part is None else part.new_empty(outputs, *part.shape[1:]) for part in weight)
    )
    packed_linear.packed_linear(states, weight, states[0, :1].expand(outputs), splits=splits)


def states(layers: int, shared: int, heads: int, keys: int, values: int, way: str) -> None:
    """way: `delta` or `sum`, of a tree of 64 rows; with `text`, of a prompt; `fold`, of the accepted path."""
    rows = 64
    query, value = torch.empty(rows, shared, keys), torch.empty(rows, heads, values)
    scalars, whole = torch.empty(rows, heads), torch.empty(rows, dtype=torch.int64)
    states = torch.empty(layers, heads, keys, values)
    if way == "fold":
        stored = [part.expand(layers, *part.shape).contiguous() for part in (scalars, query, value)]
        count = torch.empty(1, dtype=torch.int32)
        recurrence.advance_states(states, *stored, whole, count)
        return
    scratch = torch.empty(rows, heads, keys, values)
    tree = whole, whole > 0, scratch, scalars, query, value
    given = query, query, value, scalars, scalars, states[0]
    recurrence.tree_recurrence(
        *given, None if "text" in way else tree, delta=way.startswith("delta")
    )


def convolution(rows: int, channels: int, taps: int, dtype: str, silu: bool) -> None:
    inputs = torch.empty(rows, channels, dtype=getattr(torch, dtype))
    weight, sources = inputs[:taps].t(), torch.empty(rows, taps, dtype=torch.int64)
    recurrence.tree_convolution(inputs, weight, None if silu else inputs[0], sources, silu=silu)


CASES = {
    "attention": attention,
    "selection": selection,
    "compaction": compaction,
    "choice": choice,
    "walk": walk,
}
CASES |= {"append": append, "gather": gather, "rope": rope, "strict": strict}
CASES |= {"children": children, "entropy": entropies, "couple": couple, "norm": norm, "gate": gate}
CASES |= {"states": states, "convolution": convolution}
CASES |= {"packed": packed, "level": level, "enter": enter, "record": record}
MODULES = (
    tree_attention,
    strict_attention,
    candidate_selection,
    coupling,
    entropy,
    top_children,
    kv_compaction,
    verification,
    frontier,
    packed_linear,
    recurrence,
    rms_norm,
    rope_store,
    silu_mul,
)


def random_trees(seeds: int) -> None:
    """Launch what all_kernels launches. Its checks are off, as nothing computes the results."""
    for run in all_kernels.KERNELS.values():
        for seed in range(seeds):
            with contextlib.suppress(AssertionError):
                run(seed, "cpu")


CASES["random_trees"] = random_trees


def stand_ins(kind: type[Compiling], target: GPUTarget = TARGETS["sm_90"]) -> list[Compiling]:
    """Put in the place of all kernels that are launched."""
    kernels = [
        (module, name, kind(value, target))
        for module in MODULES
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
        and f"{name}[" in Path(module.__file__).read_text()  # it is launched
    ]
    for module, name, kernel in kernels:
        setattr(module, name, kernel)
    return [kernel for _, _, kernel in kernels]


def main() -> None:
    """Compile cases. Each argument is a JSON list: a name of CASES, then its arguments."""
    arguments = sys.argv[1:]
    if arguments[0] == "--programs":
        kernels = stand_ins(Counting)
        for argument in arguments[1:]:
            case, *values = json.loads(argument)
            CASES[case](*values)
        names = [
            f"{Path(kernel.kernel.fn.__code__.co_filename).stem}.{kernel.kernel.__name__}"
            for kernel in kernels
        ]
        programs = [
            len({launched["program"] for launched in kernel.launched}) for kernel in kernels
        ]
        print(
            json.dumps({name: count for name, count in zip(names, programs, strict=True) if count})
        )
        return
    card = "sm_90"
    if arguments[0] == "--card":
        _, card, *arguments = arguments
    tree_attention.shared_bytes = lambda device: ROOM[card]
    kernels = stand_ins(Compiling, TARGETS[card])
    for argument in arguments:
        case, *values = json.loads(argument)
        CASES[case](*values)
        for kernel in kernels:
            for launched in kernel.launched:
                print(json.dumps({"case": [case, *values], **launched}), flush=True)
            kernel.launched.clear()


if __name__ == "__main__":
    main()
