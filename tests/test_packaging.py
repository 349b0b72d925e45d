"""The package as users install it: folder traps, light imports, and imports that point one way."""

import ast
import importlib
import importlib.metadata
import json
import re
import runpy
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import specengine

ROOT = Path(__file__).resolve().parent.parent

# Each module may import its own layer and those above it in this list. A new module goes into one of them.
LAYERS = (
    {"errors", "files", "registry", "options", "_ops", "_cpu"},
    {"ops"},
    {"records", "request", "models", "checkpoints", "costs", "policies", "drafters"},
    {"cycle"},
    {"engine"},
    {
        "train",
        "replicas",
        "protocol",
        "batch",
        "serve",
        "integrations",
        "trace",
        "checking",
        "benchmark",
        "cli",
    }
    | {"__main__"},
)
LAYER_OF = {module: number for number, layer in enumerate(LAYERS) for module in layer}
USERS = len(LAYERS) - 1  # bench/ and research/ rank with the layer that uses the engine
APART = ("bench", "research")


def python(code: str, *, cwd: Path, path: tuple[Path, ...] = ()) -> str:
    script = f"import sys; sys.path[:0] = {[str(entry) for entry in path]!r}\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- requirements


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")
@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
def test_triton_of_torchs_wheels_for_a_cpu_and_for_cuda_can_be_installed(version: str) -> None:
    """The tests interpret kernels with 3.6.0, and torch 2.13.0's CUDA wheel requires 3.7.1 exactly."""
    requirements = pytest.importorskip("packaging.requirements")
    tomllib = importlib.import_module("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    lines = [line for extra in ("dev", "kernels") for line in extras[extra]]
    lines += [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and line[0] != "#"
    ]
    asked = [requirements.Requirement(line) for line in lines if line.startswith("triton")]
    assert len(asked) == 3
    assert all(requirement.specifier.contains(version) for requirement in asked)


# ---- folders


def test_kernels_folder_is_no_regular_package() -> None:
    assert (ROOT / "kernels").is_dir()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_kernels_folder_does_not_hide_the_package_of_that_name(tmp_path: Path) -> None:
    installed = tmp_path / "site" / "kernels"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("mark = 'the installed package'")
    out = python("import kernels; print(kernels.mark)", cwd=ROOT, path=(ROOT, installed.parent))
    assert out == "the installed package\n"


@pytest.mark.slow
def test_transformers_imports_from_the_repository_root() -> None:
    code = "import transformers; transformers.AutoModelForCausalLM; transformers.LlamaForCausalLM; print('ok')"
    assert python(code, cwd=ROOT, path=(ROOT,)) == "ok\n"


def test_specengine_kernels_is_importable_from_anywhere(tmp_path: Path) -> None:
    out = python(
        "import json, specengine_kernels; print(json.dumps(list(specengine_kernels.__path__)))",
        cwd=tmp_path,
    )
    assert any((Path(folder) / "README.md").is_file() for folder in json.loads(out))


def test_the_prompts_of_the_benchmark_are_installed() -> None:
    assert '"benchmark/**/*.jsonl"' in (ROOT / "setup.py").read_text()
    assert len(list((ROOT / "specengine" / "benchmark").glob("**/*.jsonl"))) == 6


# ---- distributions


@pytest.fixture(scope="module")
def setup_script() -> dict[str, Any]:
    pytest.importorskip("setuptools")
    return runpy.run_path(str(ROOT / "setup.py"))


def test_the_readme_of_an_index_leads_nowhere_that_it_does_not_have(
    setup_script: dict[str, Any],
) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = setup_script["for_an_index"](readme)
    assert "](docs/" in readme
    assert not re.findall(r"\]\((?!https?:)|<!--", shown)
    assert "See Getting started" in shown
    assert "| `generate`, `chat` |" in shown
    assert (
        setup_script["for_an_index"]("![a](b.svg)\n[c](https://d) [e](f.md#g)<!-- h\ni -->")
        == "[c](https://d) e"
    )


def test_a_wheel_holds_no_head(setup_script: dict[str, Any]) -> None:
    """It is four fifths of the bytes; with its own package a wheel stays below 5 MB, of which these are half."""
    files = [
        file
        for file in (ROOT / "specengine").rglob("*")
        if file.suffix not in (".so", ".pyd", ".pyc") and file.is_file()
    ]
    assert sum(len(zlib.compress(file.read_bytes())) for file in files) < 2_665_000


def test_the_source_distribution_holds_what_tests_and_documents_need() -> None:
    manifest = (ROOT / "MANIFEST.in").read_text()
    folders = re.findall(r"^\| `(\w+)/` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert {"specengine", "tests", "heads"} <= set(folders)
    for folder in set(folders) - {"specengine"}:  # which setup.py lists
        assert f"\ngraft {folder}\n" in manifest
    for file in ("Makefile", "constraints.txt", "zensical.toml"):
        assert file in manifest


def test_the_makefile_holds_what_a_contributor_needs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert len(makefile.splitlines()) <= 120
    for name in re.findall(r"\w+/targets\.mk", makefile):
        assert ".PHONY" in (ROOT / name).read_text()


@pytest.mark.parametrize(
    ("message", "refusal"),
    [
        ("scheduler: step all lanes in one pass", ""),
        ("bench.servers: one client alone\n\nThe reason.", ""),
        ("docs, tests: draw the table anew", ""),
        ("# a remark of git's\nmodels/native: read rows once", ""),
        ("Merge branch 'other'", ""),
        ("scheduler: " + "step " * 13, "72 at most"),
        ("The scheduler steps all lanes", "ROOM: CHANGE"),
        ("scheduler:", "ROOM: CHANGE"),
        ("scheduler: step lanes\nThe reason.", "an empty line"),
        ("", "ROOM: CHANGE"),
    ],
)
def test_the_hook_refuses_subjects_that_say_no_change(
    tmp_path: Path, message: str, refusal: str
) -> None:
    (tmp_path / "message").write_text(message)
    hook = [str(ROOT / ".ci" / "hooks" / "commit-msg"), str(tmp_path / "message")]
    done = subprocess.run(hook, capture_output=True, text=True, check=False)
    assert done.returncode == bool(refusal)
    assert refusal in done.stderr


def test_a_strict_build_ends_with_an_extension_that_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("pybind11")
    for strict in (False, True):
        monkeypatch.setenv("SPECENGINE_STRICT_BUILD", str(int(strict)))
        extensions = runpy.run_path(str(ROOT / "setup.py"))["extensions"]()
        assert {extension.optional for extension in extensions} == {not strict}


def cpuinfo(folder: Path, flags: str) -> str:
    file = folder / "cpuinfo"
    file.write_text(f"processor\t: 0\nflags\t\t: fpu sse2 {flags}\nbogomips\t: 4800\n")
    return str(file)


ALL_SETS = {file.stem for file in (ROOT / "csrc" / "cpu").glob("isa_*.cpp")}
PORTABLE_SETS = {"isa_portable", "isa_integer_portable"}
AVX2_SETS = PORTABLE_SETS | {"isa_avx2", "isa_integer_avx2"}
AVX512 = "fma avx2 f16c avx512f avx512dq avx512bw avx512vl"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", PORTABLE_SETS),
        ("fma avx2", PORTABLE_SETS),
        ("fma avx2 f16c", AVX2_SETS),
        ("fma avx2 f16c avx_vnni", AVX2_SETS | {"isa_integer_avxvnni"}),
        (AVX512, AVX2_SETS | {"isa_avx512", "isa_integer_avx512"}),
        (f"{AVX512} avx512_bf16 avx512_vnni", ALL_SETS - {"isa_amx", "isa_integer_avxvnni"}),
        (f"{AVX512} avx512_bf16 avx512_vnni avx_vnni amx_bf16 amx_tile amx_int8", ALL_SETS),
    ],
)
def test_a_build_in_place_has_the_instruction_sets_that_this_cpu_runs(
    setup_script: dict[str, Any], tmp_path: Path, flags: str, expected: set[str]
) -> None:
    files = [str(file) for file in (ROOT / "csrc" / "cpu").glob("isa_*.cpp")]
    binding = str(ROOT / "csrc" / "cpu_binding.cpp")
    chosen = setup_script["run_here"]([binding, *files], cpuinfo(tmp_path, flags))
    assert {Path(file).stem for file in chosen} == expected | {"cpu_binding"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", set()),
        ("fma avx2 f16c", {"isa_avx2", "isa_integer_avx2"}),
        ("fma avx2 f16c avx_vnni", {"isa_avx2", "isa_integer_avxvnni"}),
        (AVX512, {"isa_avx512", "isa_integer_avx512"}),
        (
            f"{AVX512} avx512_bf16 avx512_vnni",
            {"isa_avx512", "isa_avx512bf16", "isa_integer_avx512vnni"},
        ),
        (
            f"{AVX512} avx512_bf16 avx512_vnni avx_vnni amx_bf16 amx_tile amx_int8",
            {"isa_avx512", "isa_amx", "isa_integer_avx512vnni", "isa_integer_avxvnni"},
        ),
    ],
)
def test_of_sets_with_the_same_products_the_fastest_is_enough(
    setup_script: dict[str, Any], tmp_path: Path, flags: str, expected: set[str]
) -> None:
    files = [str(file) for file in (ROOT / "csrc" / "cpu").glob("isa_*.cpp")]
    binding = str(ROOT / "csrc" / "cpu_binding.cpp")
    run = setup_script["run_here"]([binding, *files], cpuinfo(tmp_path, flags))
    chosen = {Path(file).stem for file in setup_script["fastest"](run)}
    assert chosen == expected | PORTABLE_SETS | {"cpu_binding"}


@pytest.mark.parametrize("count", [1, 2, 20])
def test_units_include_each_source_once_and_stay_as_they_are(
    setup_script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.chdir(ROOT)
    sources = ["csrc/ops_binding.cpp", *sorted(map(str, Path("csrc/ops").glob("*.cpp")))]
    units = setup_script["in_units"](sources, count, str(tmp_path / "new"))
    assert len(units) == min(count, len(sources))
    lines = [line for unit in units for line in Path(unit).read_text().splitlines()]
    assert sorted(lines) == sorted(
        f'#include "{source.removeprefix("csrc/")}"' for source in sources
    )
    written = [Path(unit).stat().st_mtime_ns for unit in units]
    assert setup_script["in_units"](sources, count, str(tmp_path / "new")) == units
    assert [Path(unit).stat().st_mtime_ns for unit in units] == written


def test_where_no_flags_are_told_all_instruction_sets_are_built(
    setup_script: dict[str, Any], tmp_path: Path
) -> None:
    files = [str(file) for file in (ROOT / "csrc" / "cpu").glob("isa_*.cpp")]
    (tmp_path / "of-an-arm").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    for told in ("of-an-arm", "missing"):
        assert setup_script["run_here"](files, str(tmp_path / told)) == files


@pytest.mark.parametrize("all_sets", [False, True])
@pytest.mark.parametrize("option", [None, "inplace", "editable_mode"])
def test_a_wheel_has_all_instruction_sets(
    monkeypatch: pytest.MonkeyPatch,
    setup_script: dict[str, Any],
    tmp_path: Path,
    option: str | None,
    all_sets: bool,
) -> None:
    pytest.importorskip("pybind11")
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setup_script["build_ext"], "run", lambda self: None)
    told = (cpuinfo(tmp_path, AVX512),)
    monkeypatch.setenv("SPECENGINE_ALL_SETS", str(int(all_sets)))
    monkeypatch.setattr(setup_script["run_here"], "__defaults__", told)
    distribution = setuptools.Distribution({"ext_modules": setup_script["extensions"]()})
    command = setup_script["OptionalBuildExt"](distribution)
    command.ensure_finalized()
    if option:
        setattr(command, option, True)
    command.run()
    built = {Path(file).stem for extension in command.extensions for file in extension.sources}
    here = {"isa_avx512", "isa_integer_avx512"} | (AVX2_SETS if all_sets else PORTABLE_SETS)
    assert built & ALL_SETS == (here if option else ALL_SETS)
    assert {"cpu_binding", "ops_binding"} <= built


def test_on_windows_the_forward_is_compiled_with_clang_cl(
    setup_script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    take, compiler = setup_script["take_clang_cl"], SimpleNamespace(initialized=False, cc="cl.exe")
    compiler.initialize = lambda: vars(compiler).update(initialized=True)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(setup_script["CompileError"], match="clang-cl was not found"):
        take(compiler)
    monkeypatch.setattr("shutil.which", lambda name: f"C:\\{name}.exe")
    take(compiler)
    assert (compiler.cc, compiler.initialized) == ("C:\\clang-cl.exe", True)
    monkeypatch.setitem(setup_script["flags_of_forward"].__globals__, "WINDOWS", True)
    assert all(flag.startswith("/clang:-") for flag in setup_script["flags_of_forward"]())


def test_every_version_of_python_that_is_stated_gets_a_wheel() -> None:
    tomllib = importlib.import_module("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    stated = re.findall(r"Python :: 3\.(\d+)", " ".join(project["project"]["classifiers"]))
    assert project["tool"]["cibuildwheel"]["build"] == [f"cp3{minor}-*" for minor in stated]
    assert project["project"]["requires-python"] == f">=3.{stated[0]}"


# ---- what `import specengine` costs


def modules_of_extras() -> set[str]:
    """Import names of what only the extras for users bring."""
    requirements = importlib.metadata.requires("specengine") or []
    of_extras = [
        line
        for line in requirements
        if "extra ==" in line and "dev" not in line.split("extra ==")[1]
    ]
    return {re.split(r"[^\w-]", line, maxsplit=1)[0].replace("-", "_") for line in of_extras}


def test_extras_are_read_from_the_metadata() -> None:
    assert {"triton", "fastapi", "uvicorn", "flash_attn"} <= modules_of_extras()
    assert "torch" not in modules_of_extras()


def test_import_needs_no_extra_and_asks_for_none(tmp_path: Path) -> None:
    optional = modules_of_extras() | {"gguf", "accelerate", "pytest", "vllm", "sglang", "ray"}
    # torch and transformers import some of these for themselves where they are: so ask who imports, not what is loaded
    code = f"""
import builtins, json, sys
sys.modules.update(dict.fromkeys({sorted(optional)}))  # importing any of them raises
real_import, asked = builtins.__import__, set()
def noting_import(name, globals=None, *rest, **options):
    if globals and str(globals.get("__name__")).partition(".")[0] == "specengine":
        asked.add(name.partition(".")[0])
    return real_import(name, globals, *rest, **options)
builtins.__import__ = noting_import
import specengine
specengine.Engine
print(json.dumps(sorted(asked)))
"""
    asked = set(json.loads(python(code, cwd=tmp_path)))
    assert {"torch", "transformers"} <= asked
    assert not asked & optional


def test_import_alone_takes_neither_torch_nor_transformers() -> None:
    code = "import specengine; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    assert python(code, cwd=ROOT, path=(ROOT,)) == "[]\n"


def test_the_names_of_specengine_are_the_same_for_a_type_checker_and_at_run_time() -> None:
    source = ast.parse((ROOT / "specengine" / "__init__.py").read_text(encoding="utf-8"))
    guarded = next(node for node in source.body if isinstance(node, ast.If))
    typed = {
        alias.name: node.module
        for node in guarded.body
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
        if alias.name != "Prompt"  # of an annotation alone
    }
    assert typed == {name: f"specengine.{module}" for name, module in specengine._MODULES.items()}
    assert {*typed, "generate"} == set(specengine.__all__) <= set(dir(specengine))
    for name, module in typed.items():
        assert getattr(specengine, name) is getattr(importlib.import_module(str(module)), name)
    assert specengine.policies.names()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        specengine.nonsense  # noqa: B018


# ---- imports point one way


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each absolute import, those inside functions and TYPE_CHECKING blocks included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def against_the_direction(source: str, own_layer: int) -> list[str]:
    """Return the imports that a module of layer `own_layer` must not have, as "line: name (reason)"."""
    wrong = []
    for line, name in imported_names(ast.parse(source)):
        top, _, rest = name.partition(".")
        if top in APART and own_layer <= USERS:
            wrong.append(f"{line}: {name} (the package stands without it)")
        if top == "specengine_kernels" and own_layer != LAYER_OF["ops"]:
            wrong.append(f"{line}: {name} (ops is the only door to the kernels)")
        if top != "specengine":
            continue
        module = rest.partition(".")[0]
        if module not in LAYER_OF and own_layer < USERS:
            wrong.append(
                f"{line}: {name} (the package itself imports this module, or LAYERS does not know it)"
            )
        elif LAYER_OF.get(module, 0) > own_layer:
            wrong.append(f"{line}: {name} (a later layer)")
    return wrong


def files_by_layer() -> list[tuple[Path, int]]:
    inside = [
        file
        for file in sorted((ROOT / "specengine").rglob("*.py"))
        if file.parent.name != "__pycache__"
    ]
    named = [
        (file, file.relative_to(ROOT / "specengine").parts[0].removesuffix(".py"))
        for file in inside
    ]
    layered = [(file, LAYER_OF[name]) for file, name in named if name in LAYER_OF]
    return layered + [
        (file, USERS + 1)
        for folder in sorted(APART)
        for file in sorted((ROOT / folder).rglob("*.py"))
    ]


def test_each_module_has_a_layer() -> None:
    top = {
        entry.name.removesuffix(".py")
        for entry in (ROOT / "specengine").iterdir()
        if entry.suffix in {".py", ""}
    }
    unknown = top - set(LAYER_OF) - {"__init__", "__pycache__", "py.typed"}
    assert not unknown, f"add {sorted(unknown)} to LAYERS in {Path(__file__).name}"


def test_imports_point_one_way() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{finding}"
        for file, layer in files_by_layer()
        for finding in against_the_direction(file.read_text(encoding="utf-8"), layer)
    ]
    assert not wrong, "\n".join(wrong)


def imports_by_module() -> dict[str, set[str]]:
    """Return by file of the package the files that it imports, except for annotations alone."""
    files = {}
    for file in sorted((ROOT / "specengine").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    found = {}
    for module, file in files.items():
        names = set()
        for node in at_run_time(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= {name if name in files else node.module for name in whole}
        found[module] = (names & set(files)) - {module}
    return found


def at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from at_run_time(child)


def test_no_import_goes_round() -> None:
    imports, done = imports_by_module(), set[str]()
    assert "specengine.ops.tree" in imports["specengine.ops.tree"] | imports["specengine.ops"]

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join([*way[way.index(module) :], module])
        if module not in done:
            for other in imports[module]:
                visit(other, (*way, module))
            done.add(module)

    for module in imports:
        visit(module, ())


def test_kernels_know_nothing_of_specengine() -> None:
    for file in (ROOT / "kernels").rglob("*.py"):
        names = [name for _, name in imported_names(ast.parse(file.read_text(encoding="utf-8")))]
        assert not [name for name in names if name.partition(".")[0] == "specengine"], file


@pytest.mark.parametrize(
    ("source", "own", "expected"),
    [
        ("from specengine import engine", "ops", 1),
        ("def f():\n    from specengine.policies.baselines.eagle import Eagle", "ops", 1),
        ("import specengine_kernels.verification", "engine", 1),
        ("from specengine import generate", "engine", 1),
        ("import bench.report", "ops", 1),
        ("from research.ltd import training", "cli", 1),
        ("from specengine.ops.tree import TokenTree", "engine", 0),
        ("from specengine.drafters import Step", "policies", 0),
        ("import specengine_kernels.verification", "ops", 0),
        ("from specengine import generate", "cli", 0),
    ],
)
def test_the_direction_rule_itself(source: str, own: str, expected: int) -> None:
    assert len(against_the_direction(source, LAYER_OF[own])) == expected
