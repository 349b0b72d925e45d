"""csrc/*.cu: what nvcc makes of them, the library without a GPU, and the answers of the kernels, on a GPU and emulated.

Emulated means that the kernels' sources are compiled by g++ with csrc/tests/emulated/cuda_runtime.h.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from specengine import cuda, ops, reference
from specengine.errors import BackendError, InputError
from specengine.tree import TokenTree
from tests.test_native import COMPILER, build_and_run

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc on the path")
KERNELS = {"start_kernel", "push_kernel", "draw_kernel", "append_kernel", "walk_kernel", "compact_kernel"}


@pytest.fixture(scope="module")
def setup_script() -> ModuleType:
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(setup_script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The library, by the command of setup.py with warnings as errors, and what ptxas says of it."""
    library = tmp_path_factory.mktemp("cuda") / "_cuda.so"
    sources = sorted(str(source) for source in CSRC.glob("*.cu"))
    command = setup_script.nvcc_command(NVCC, sources, str(library), str(CSRC))
    strict = ["-Werror", "all-warnings", "-Xptxas", "-v"]
    done = subprocess.run([*command, *strict], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return library, done.stderr + done.stdout


@pytest.fixture
def library(built: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    monkeypatch.setattr(cuda, "LIBRARY", built[0])
    return cuda.library()


def declarations() -> dict[str, str]:
    """Names and arguments of what csrc/spec/device_abi.hpp exports."""
    text = re.sub(r"//.*", "", (CSRC / "spec" / "device_abi.hpp").read_text(encoding="utf-8"))
    return dict(re.findall(r"^SPEC_EXPORT [\w ]+?[ *]+(\w+)\(([^)]*)\);", text, re.MULTILINE))


def ctype(argument: str) -> type:
    if "*" in argument:
        return ctypes.c_void_p
    return {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "double": ctypes.c_double}[argument.split()[0]]


# ---- the interface


def test_signatures_are_those_of_the_header() -> None:
    declared = {name: [ctype(one.strip()) for one in rest.split(",") if one] for name, rest in declarations().items()}
    assert len(declared) == 13
    for name, arguments in cuda.SIGNATURES.items():
        assert list(arguments) == declared.pop(name), name
    assert set(declared) == {"spec_abi_version", "spec_error", "spec_queues_bytes"}


def test_numbers_are_those_of_the_headers() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in (CSRC / "spec").glob("device_*.hpp"))
    assert f"SPEC_ABI_VERSION {cuda.ABI_VERSION} " in text
    assert f"kCapacity = {cuda.CAPACITY};" in text
    assert f"kMostWalked = {cuda.MOST_WALKED};" in text


# ---- what nvcc makes of it


@needs_nvcc
def test_compiles_for_each_target_without_spills(built: tuple[Path, str]) -> None:
    report = built[1]
    compiled = re.findall(r"Compiling entry function '(\w+)' for '(\w+)'", report)
    for target in ("sm_80", "sm_90a"):
        names = " ".join(name for name, one in compiled if one == target)
        assert all(kernel in names for kernel in KERNELS | {"condition_kernel"}), target
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert len(spills) == len(compiled)
    assert set(spills) == {("0", "0", "0")}
    assert max(int(count) for count in re.findall(r"Used (\d+) registers", report)) <= 64


@needs_nvcc
def test_exports_the_interface_alone(built: tuple[Path, str]) -> None:
    done = subprocess.run(["nm", "-D", "--defined-only", built[0]], capture_output=True, text=True, check=True)
    assert {line.split()[-1] for line in done.stdout.splitlines()} == set(declarations())


@needs_nvcc
def test_library_needs_neither_cuda_nor_torch_to_load(built: tuple[Path, str]) -> None:
    done = subprocess.run(["readelf", "-d", built[0]], capture_output=True, text=True, check=True)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", done.stdout)
    assert needed
    assert not [name for name in needed if "cuda" in name or "torch" in name]


# ---- where something is missing


def test_library_that_is_not_built_names_the_build_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", tmp_path / "_cuda.so")
    with pytest.raises(BackendError, match=r"not built; .* SPECENGINE_CUDA=1 pip install"):
        cuda.library()
    with pytest.raises(ImportError, match="not built"):
        cuda.implementations()


def test_library_that_is_damaged_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    damaged = tmp_path / "_cuda.so"
    damaged.write_bytes(b"nothing that loads")
    monkeypatch.setattr(cuda, "LIBRARY", damaged)
    with pytest.raises(BackendError, match=r"cannot be loaded .* build it again"):
        cuda.library()


@needs_nvcc
def test_library_of_other_sources_says_so(built: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    older = built[0].with_name("older.so")
    shutil.copy(built[0], older)
    monkeypatch.setattr(cuda, "LIBRARY", older)
    monkeypatch.setattr(cuda, "ABI_VERSION", cuda.ABI_VERSION + 1)
    with pytest.raises(BackendError, match="interface"):
        cuda.library()


@needs_nvcc
def test_calls_without_a_driver_give_a_clean_error(library: ctypes.CDLL) -> None:
    if cuda.driver_version():
        pytest.skip("there is a driver")
    nothing, loop = [None] * 20, ctypes.c_void_p()
    codes = [
        library.spec_queues_start(None, 60, 10, 60, None, None),
        library.spec_queues_push(*nothing[:8], 0, *nothing[:3]),
        library.spec_queues_draw(None, 1, 0.5, *nothing[:9]),
        library.spec_tree_append(*nothing[:7], 64, 1, *nothing[:6], 0, *nothing[:5]),
        library.spec_walk(*nothing[:4], 64, *nothing[:4]),
        library.spec_compact_kv(None, 4, 64, 128, *nothing[:4]),
        library.spec_loop_create(None, 1, None, 1, 1, 8, ctypes.byref(loop)),
    ]
    for code in codes:
        with pytest.raises(BackendError, match=r"CUDA error \d+: .*no NVIDIA driver was found"):
            cuda.check(code)
    assert not loop
    cuda.check(0)


@needs_nvcc
def test_sizes_outside_the_capacity_are_refused(library: ctypes.CDLL) -> None:
    invalid = 1  # cudaErrorInvalidValue
    nothing = [None] * 20
    assert library.spec_queues_start(None, cuda.CAPACITY + 1, 1, 1, None, None) == invalid
    assert library.spec_queues_start(None, 1, 0, 1, None, None) == invalid
    assert library.spec_walk(*nothing[:4], cuda.MOST_WALKED + 1, *nothing[:4]) == invalid
    assert library.spec_tree_append(*nothing[:7], 65, 1, *nothing[:6], 0, *nothing[:5]) == invalid
    assert library.spec_compact_kv(None, 0, 64, 128, *nothing[:4]) == invalid
    assert library.spec_loop_create(None, None, None, None, None, 8, None) == invalid


@needs_nvcc
def test_provider_offers_ops_of_that_name(library: ctypes.CDLL) -> None:
    assert set(cuda.implementations()) <= set(ops.backends())
    large = cuda.best_first(cuda.CAPACITY + 1, 3, 3, "cpu")
    assert isinstance(large, reference.BestFirst)


def test_what_does_not_fit_is_refused_before_any_call() -> None:
    whole, real = torch.zeros(3, dtype=torch.int64), torch.zeros(1, 2, 1, 4, 4)
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(InputError, match="budget"):
        cuda.Queues(cuda.CAPACITY + 1, 1, 1)
    with pytest.raises(InputError, match=r"tokens: int64 \[3\] on cuda is needed"):
        cuda.walk_into(whole, whole, whole, whole, one, whole)
    with pytest.raises(InputError, match=r"tokens: got 0"):
        cuda.walk_into(whole[:0], whole, whole, whole, one, whole)
    with pytest.raises(InputError, match="slab"):
        cuda.compact_rows(real, whole, one, one)
    with pytest.raises(InputError, match="limit"):
        cuda.Loop(None, one, one, 0)
    with pytest.raises(InputError, match="flag"):
        cuda.Loop(None, one, one, 1)


# ---- when the library is built


@pytest.mark.parametrize(
    ("asked", "home", "wanted"), [("1", "", True), ("0", "/opt/cuda", False), ("", "/nowhere", False)]
)
def test_build_is_asked_for(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, asked: str, home: str, wanted: bool
) -> None:
    monkeypatch.setenv("SPECENGINE_CUDA", asked)
    monkeypatch.setenv("CUDA_HOME", home)
    assert setup_script.cuda_is_wanted() is wanted


def test_nvcc_on_the_path_of_a_machine_without_a_device_is_left_alone(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECENGINE_CUDA", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(setup_script.os.path, "exists", lambda path: False)
    assert not setup_script.cuda_is_wanted()


def test_library_is_not_named_like_a_module_of_python(setup_script: ModuleType) -> None:
    build = object.__new__(setup_script.OptionalBuildExt)  # naming a file needs no distribution
    assert build.get_ext_filename("specengine._cuda") == str(Path("specengine", "_cuda.so"))
    assert build.get_ext_filename("_cuda") == "_cuda.so"


def test_unknown_wish_is_refused(setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECENGINE_CUDA", "yes")
    with pytest.raises(SystemExit, match="SPECENGINE_CUDA"):
        setup_script.cuda_is_wanted()


# ---- the logic of the kernels, on the host under the sanitizers


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler (g++ or clang++) on the path")
def test_logic_of_the_kernels_on_the_host(tmp_path: Path) -> None:
    run = build_and_run(CSRC / "tests" / "device_logic_test.cpp", tmp_path / "device_logic_test")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all checks passed" in run.stdout


# ---- the answers of the kernels, against the reference


def emulated_source(file: Path) -> str:
    return re.sub(r"([\w<>]+)<<<(.*?)>>>\(", r"emulated::launch(\1, \2)(", file.read_text(encoding="utf-8"))


LOOP_STUBS = """
#include "spec/device_abi.hpp"
int spec_loop_create(void*, void*, void*, const int32_t*, int32_t*, int, void**) { return 1; }
int spec_loop_launch(void*, void*) { return 1; }
int spec_loop_destroy(void*) { return 1; }
"""


@pytest.fixture(scope="module")
def emulated_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C++ compiler (g++ or clang++) on the path")
    folder = tmp_path_factory.mktemp("emulated")
    sources = {file.stem: emulated_source(file) for file in CSRC.glob("*.cu") if file.stem != "graph"}
    sources["graph"] = LOOP_STUBS
    for name, text in sources.items():
        (folder / f"{name}.cpp").write_text(text)
    files = [str(folder / f"{name}.cpp") for name in sources]
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", f"-I{CSRC / 'tests' / 'emulated'}", f"-I{CSRC}"]
    done = subprocess.run([COMPILER, *flags, *files, "-o", str(folder / "_cuda.so")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "_cuda.so"


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of the tensors that the kernels take."""
    if request.param == "cuda":
        assert cuda.LIBRARY.exists(), f"on a GPU the library is tested too; build it by: {cuda.BUILD}"
        return "cuda"
    monkeypatch.setattr(cuda, "LIBRARY", request.getfixturevalue("emulated_library"))
    monkeypatch.setattr(cuda, "DEVICE", "cpu")
    monkeypatch.setattr(cuda, "_run", lambda name, _, *given: cuda.check(getattr(cuda.library(), name)(*given, None)))
    return "cpu"


def random_parents(size: int, generator: torch.Generator) -> Tensor:
    parents = [-1] + [int(torch.randint(node, (1,), generator=generator)) for node in range(1, size)]
    return torch.tensor(parents)


@pytest.mark.parametrize("size", [1, 2, 64, 65, 300, 1024, 1100])
def test_walk(device: str, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for _ in range(10):
        parents, tokens = random_parents(size, generator), torch.randperm(size, generator=generator)
        chosen = torch.randint(size, (size,), generator=generator)
        node = int(torch.randint(size, (1,), generator=generator))
        while node > 0:
            chosen[parents[node]] = tokens[node]
            node = int(parents[node])
        given = [values.to(device) for values in (tokens, parents, chosen)]
        assert cuda.walk(*given) == reference.walk(tokens, parents, chosen)


def test_walk_of_a_part_gives_the_bonus_token(device: str) -> None:
    tokens, parents = torch.tensor([0, 5, 6, 7], device=device), torch.tensor([-1, 0, 1, 2], device=device)
    chosen, size = torch.tensor([5, 6, 7, 8], device=device), torch.tensor([3], dtype=torch.int32, device=device)
    path, count, bonus = torch.empty_like(tokens), torch.empty_like(size), tokens.new_empty(1)
    cuda.walk_into(tokens, parents, chosen, path, count, bonus, size)
    assert path[: int(count)].tolist() == [0, 1, 2]
    assert int(bonus) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [3, 64, 80])
def test_compact_kv(device: str, dtype: torch.dtype, head_size: int) -> None:
    generator = torch.Generator().manual_seed(head_size)
    slab = torch.randn(3, 2, 2, 100, head_size, generator=generator).to(dtype)
    for taken in (1, 2, 9, 40):
        path = [0, *(1 + torch.randperm(60, generator=generator)[: taken - 1]).sort().values.tolist()]
        expected, got = slab.clone(), slab.clone().to(device)
        reference.compact_kv(expected, 30, path)
        cuda.compact_kv(got, 30, path)
        assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("budget", [1, 3, 60, 256])
@pytest.mark.parametrize("batch", [1, 10])
def test_best_first(device: str, budget: int, batch: int) -> None:
    generator = torch.Generator().manual_seed(budget)
    expected, queues = reference.BestFirst(budget, batch, 4, "cpu"), cuda.BestFirst(budget, batch, 4, device)
    for step in range(15):
        count = int(torch.randint(2 * budget + 2, (1,), generator=generator))
        whole = [torch.randint(5, (count,), generator=generator) for _ in range(3)]
        scores = -torch.randint(20 if step % 2 else 10000, (count,), generator=generator).float() / 8
        scores[scores == 0] = -math.inf
        given = *whole, scores / 2, scores
        expected.push(*given)
        queues.push(*(values.to(device) for values in given))
        assert queues.bound == expected.bound
        a, b = (one.fill() if step % 7 == 6 else one.pop() for one in (queues, expected))
        for mine, theirs in zip(a[:4], b[:4], strict=True):
            assert mine.tolist() == theirs.tolist()
        assert a.mass == pytest.approx(b.mass, rel=1e-12)


def test_best_first_refuses_nan(device: str) -> None:
    queues, whole = cuda.BestFirst(3, 1, 3, device), torch.zeros(2, dtype=torch.int64, device=device)
    good, bad = torch.tensor([-1.0, -2.0], device=device), torch.tensor([-1.0, math.nan], device=device)
    with pytest.raises(InputError, match="NaN"):
        queues.push(whole, whole, whole, good, bad)
    queues.push(whole, whole, whole, good, good)
    assert queues.pop().log_probs.tolist() == [-1.0]


def arrays_of(tree: TokenTree) -> tuple[Tensor, ...]:
    names = ("tokens", "parents", "depths", "log_probs", "path_log_probs", "ancestors")
    return tuple(getattr(tree, f"_{name}") for name in names)


def test_appended_nodes_are_those_of_a_token_tree(device: str) -> None:
    """A SALF search in device memory: push by rows of the frontier, draw, append."""
    width, expected = 6, TokenTree.root(7, 130)
    made = (values.clone().to(device) for values in arrays_of(TokenTree.root(7, 130)))
    tree = cuda.TreeArrays(*made, torch.ones(1, dtype=torch.int32, device=device))
    queues = cuda.Queues(60, width, 60, device)
    whole = torch.zeros(2, width, dtype=torch.int64, device=device)
    frontier = cuda.Frontier(whole[0], whole[1], torch.full((width,), -math.inf, device=device))
    frontier.scores[0] = 0.0
    generator, tokens = torch.Generator().manual_seed(0), torch.arange(20, device=device)
    for _ in range(5):
        rows = torch.randint(width, (20,), generator=generator).to(device)
        edges = -torch.rand(20, generator=generator).to(device)
        count = torch.tensor([18], dtype=torch.int32, device=device)
        queues.push(
            frontier.nodes, frontier.depths, tokens, edges, frontier.scores[rows] + edges, rows=rows, count=count
        )
        drawn = queues.draw(threshold=0.1)
        cuda.append_nodes(tree, drawn, queues.refused, frontier)
        nodes, kept = int(drawn.nodes), int(drawn.expanded)
        added = expected.add(*(values[:nodes].cpu() for values in (drawn.parents, drawn.tokens, drawn.log_probs)))
        expand = added[drawn.expand[:kept].cpu()]
        assert frontier.nodes.tolist() == [*expand.tolist(), *[0] * (width - kept)]
        assert frontier.depths[:kept].tolist() == expected.depths[expand].tolist()
        assert frontier.scores[:kept].tolist() == expected.path_log_probs[expand].tolist()
        assert frontier.scores[kept:].tolist() == [-math.inf] * (width - kept)
        assert bool(drawn.alive) == (kept > 0 and float(drawn.mass) >= 0.1)
    cuda.append_nodes(tree, queues.draw(expands=False), queues.refused)
    size = int(tree.size)
    assert size == len(expected) + int(queues.drawn.nodes) > 20
    for mine, theirs in zip(tree[:6], arrays_of(expected), strict=True):
        assert torch.equal(mine[: len(expected)].cpu(), theirs[: len(expected)])
    assert not int(queues.refused)


def test_nodes_beyond_the_capacity_are_refused(device: str) -> None:
    made = (values.to(device) for values in arrays_of(TokenTree.root(7, 2)))
    tree = cuda.TreeArrays(*made, torch.ones(1, dtype=torch.int32, device=device))
    queues, whole = cuda.Queues(9, 9, 9, device), torch.zeros(2, dtype=torch.int64, device=device)
    edges = torch.tensor([-1.0, -2.0], device=device)
    queues.push(whole, whole, whole, edges, edges)
    cuda.append_nodes(tree, queues.draw(), queues.refused)
    assert (int(tree.size), int(queues.refused)) == (1, 1)


@pytest.mark.gpu
class TestCaptured:
    def test_step(self) -> None:
        queues = cuda.Queues(10, 3, 10)
        nodes = torch.zeros(1, dtype=torch.int64, device="cuda")
        rows, tokens = torch.zeros(4, dtype=torch.int64, device="cuda"), torch.arange(4, device="cuda")
        scores = torch.tensor([-1.0, -2.0, -3.0, -4.0], device="cuda")

        def step() -> None:
            queues.start()
            queues.push(nodes, nodes, tokens, scores, scores, rows=rows)
            queues.draw()

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        scores.copy_(torch.tensor([-4.0, -3.0, -2.0, -1.0]))
        graph.replay()
        assert queues.drawn.tokens[: int(queues.drawn.nodes)].tolist() == [3, 2, 1]

    def test_loop_runs_while_the_flag_is_set(self) -> None:
        flag, rounds, total = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(3))

        def captured(*work: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph):
                for step in work:
                    step()
            return graph

        before = captured(lambda: flag.fill_(5), lambda: total.zero_())
        body, after = captured(lambda: flag.sub_(1), lambda: total.add_(1)), captured(lambda: total.mul_(10))
        for limit, passes in ((100, 5), (3, 3)):
            loop = cuda.Loop(body, flag, rounds, limit, before, after)
            for _ in range(2):
                loop.launch()
                assert (int(rounds), int(total)) == (passes, 10 * passes)
