"""The benchmarks work and count right; what they measure is not tested here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import plots, policies as bench_policies, provenance, report, tree_construction
from bench.tree_construction import Case, Layer, layer_of
from docs.build.results import RESULTS
from specengine import policies
from specengine.benchmark.summaries import Answer
from specengine.benchmark.ways import EngineDecoder, Spec, parse
from specengine.costs import find_costs
from specengine.errors import InputError
from specengine.ops import Backend
from tests.toy import byte_tokenizer, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
GIVEN = tree_construction.GIVEN


# ---------------------------------------------------------------------------------------------------- tree construction


@pytest.fixture(
    params=[
        (alpha, parents, given) for alpha in (0.7, 5.0) for parents in (1, 12) for given in GIVEN
    ]
)
def layer(request: pytest.FixtureRequest) -> Layer:
    alpha, parents, given = request.param
    return layer_of(Case(1000, alpha, parents, given), CPU)


def path_scores(layer: Layer) -> torch.Tensor:
    """float64 [parents, V], from the definition."""
    log_probs = layer.logits.double() if layer.normalized else layer.logits.double().log_softmax(1)
    return layer.scores.double()[:, None] + log_probs


def test_layers_are_zipfs(layer: Layer) -> None:
    log_probs = path_scores(layer) - layer.scores.double()[:, None]
    tolerance = 0.1 if layer.logits.dtype is torch.bfloat16 else 1e-3
    ranked = log_probs.sort(dim=1, descending=True).values
    assert torch.allclose(ranked.exp().sum(1), torch.ones(1, dtype=torch.float64), atol=1e-4)
    assert torch.allclose(ranked, ranked[:1].expand_as(ranked), atol=1e-9)
    assert torch.allclose(
        (ranked[0, 0] - ranked[0, 1]) / (ranked[0, 0] - ranked[0, 3]),
        torch.tensor(0.5).double(),
        atol=tolerance,
    )
    if len(layer.logits) > 1:
        assert not torch.equal(layer.logits[0], layer.logits[1])


def test_both_beams_take_the_same(layer: Layer) -> None:
    torch_ = tree_construction.eagle_torch(layer)()
    fused = tree_construction.eagle_fused(layer)()
    assert len(torch_.scores) == len(fused.scores) == tree_construction.WIDTH
    assert_same_scores(torch_, fused)
    assert_pairs_score(layer, torch_)
    assert_pairs_score(layer, fused)


def test_all_gates_take_the_same(layer: Layer) -> None:
    reference = tree_construction.talon_torch(layer)()
    padded = tree_construction.talon_torch_without_sync(layer)()
    real = padded.scores > -torch.inf
    fused = tree_construction.talon_fused(layer)()
    assert len(padded.scores) == tree_construction.BUDGET - 1
    assert_same_scores(reference, fused)
    assert_same_scores(reference, tree_construction.Selected(*(values[real] for values in padded)))
    assert_pairs_score(layer, reference)
    assert_pairs_score(layer, fused)
    best = path_scores(layer).max()
    assert bool((fused.scores >= best + tree_construction.LOG_MU - 1e-4).all())


def test_salf_pops_the_best_of_the_first_layer(layer: Layer) -> None:
    popped = tree_construction.salf(layer)()
    assert len(popped.rows) <= tree_construction.BATCH
    if len(layer.scores) == 1:
        assert_same_scores(popped, tree_construction.eagle_torch(layer)())


def test_c2t_takes_children_of_its_parents(layer: Layer) -> None:
    taken = tree_construction.c2t(layer)()
    assert len(taken.rows) <= tree_construction.WIDTH
    assert_pairs_score(layer, taken)


def assert_same_scores(one: tree_construction.Selected, other: tree_construction.Selected) -> None:
    """Assert that the scores are equal; of equal candidates any may be selected."""
    assert torch.allclose(one.scores.sort().values, other.scores.sort().values, atol=1e-4)


def assert_pairs_score(layer: Layer, taken: tree_construction.Selected) -> None:
    """Rows and columns are those of the scores, and no pair is taken twice."""
    expected = path_scores(layer)[taken.rows, taken.columns].float()
    assert torch.allclose(expected, taken.scores, atol=1e-4)
    assert len({*zip(taken.rows.tolist(), taken.columns.tolist(), strict=True)}) == len(taken.rows)


def test_the_cases_are_the_papers_times_parents_and_forms() -> None:
    assert len(tree_construction.CASES) == len(set(tree_construction.CASES)) == 5 * 3 * 3 * 3
    assert [round(v / 1000) for v in tree_construction.VOCABULARIES] == [33, 66, 128, 152, 262]


def test_dynatrees_children_follow_the_largest_probability(layer: Layer) -> None:
    taken = tree_construction.dynatree(layer)()
    assert_pairs_score(layer, taken)
    edges = path_scores(layer) - layer.scores.double()[:, None]
    for row in range(len(layer.scores)):
        best = float(edges[row].max().exp())
        room = 1 if best >= 0.9 else 3 if best < 0.4 else 2
        probable = int((path_scores(layer)[row].topk(room).values >= tree_construction.LEAST).sum())
        assert int((taken.rows == row).sum()) == probable


def test_ltd_takes_the_beam(layer: Layer) -> None:
    taken, beam = tree_construction.ltd(layer)(), tree_construction.eagle_fused(layer)()
    assert all(torch.equal(*pair) for pair in zip(taken, beam, strict=True))


def test_ltds_network_sees_the_layers_scores(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    networks = tree_construction._networks()
    monkeypatch.setattr(networks, "goes_on", lambda *given: seen.append(given) or torch.ones(1))
    tree_construction.ltd(layer)()
    ((observation, expansions),) = seen
    assert len(observation) == networks.shape.inputs["depth"]
    room = min(10 * len(layer.scores), 100)
    best = path_scores(layer).topk(10).values.view(-1)[:room].float().clamp(min=networks.shape.pad)
    assert torch.allclose(observation[:room], best, atol=1e-4)
    assert int(expansions) == int(len(layer.scores) > 1)


def test_the_slow_fallback_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = {op: Backend("reference", "not built", ()) for op in tree_construction.USED}
    monkeypatch.setattr(tree_construction.ops, "backends", lambda _: there)
    assert tree_construction.main(["--device", "cpu"]) == 2
    assert "top_children" in (said := capsys.readouterr().err)
    assert "got the slow reference in torch on cpu (not built), accepted compiled code" in said
    there |= {op: Backend("triton", "", ()) for op in tree_construction.SELECTING}
    assert not tree_construction.fallback(torch.device("cuda"))  # the rest has no kernels
    assert tree_construction.fallback(CPU)


def test_a_cycle_is_measured_or_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_construction, "_cycle_here", lambda: 8.0)
    assert set(tree_construction.cycles(CPU, tmp_path)) == {"default model"}
    costs = {"verify_ms_by_nodes": {"8": 10, "16": 20}, "draft_pass_ms_by_width": {"4": 2}}
    (tmp_path / tree_construction.COSTS_8B).write_text(json.dumps(costs))
    assert tree_construction.cycles(CPU, tmp_path)["8B shape"]["ms"] == 15 + 3 * 2
    on_device = tree_construction.cycles(torch.device("cuda"))
    assert on_device["8B shape"]["ms"] > on_device["default model"]["ms"] > 0


@pytest.mark.model
def test_a_cycle_of_the_default_model_takes_milliseconds() -> None:
    assert 0.1 < tree_construction._cycle_here() < 10_000


@pytest.mark.slow
def test_the_cases_run_under_pytest_benchmark() -> None:
    case = "eagle and ops and logits and bfloat16 and V32768 and alpha5.0 and parents10"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "bench/tree_construction.py",
        "--benchmark-only",
        "-q",
    ]
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", "-k", case]
    alone = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    run = subprocess.run(
        [*command, *options], cwd=ROOT, env=alone, capture_output=True, text=True, timeout=600
    )
    assert "1 passed" in run.stdout, run.stdout + run.stderr


def test_tree_construction_writes_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_construction, "_cycle_here", lambda: 8.0)
    out = tmp_path / "construction.jsonl"
    command = [
        "--vocabularies",
        "500",
        "--alphas",
        "1.35",
        "--parents",
        "1",
        "10",
        "--repeats",
        "3",
        "--warm-ups",
        "1",
    ]
    assert tree_construction.main([*command, "--device", "cpu", "--out", str(out)]) == 0
    provenance, settings, *cases = read(out)
    assert (provenance["record"], settings["record"]) == ("provenance", "settings")
    assert "not measured on a GPU" in settings["clock"]
    assert len(cases) == 2 * len(GIVEN)
    for case in cases:
        assert case["repeats"] == 3
        assert set(case["mean_ms"]) == set(case["median_ms"]) == set(tree_construction.RULES)
        assert case["median_relative"][tree_construction.BASELINE] == 1.0
    capsys.readouterr()
    assert report.main([str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("One layer from") == len(GIVEN)
    assert "One layer by vocabulary; ops ran in cpp" in printed
    ltd = next(c for c in cases if (c["parents"], c["given"]) == (10, GIVEN[1]))["median_ms"][
        "ltd (ops)"
    ]
    assert f"{2 * ltd:.4f}" in printed  # per 1,000 tokens
    assert f"{100 * ltd / 8:.1f} %" in printed
    assert "eagle (torch)" in printed


def test_torchs_threads_are_what_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_construction, "_cycle_here", lambda: 8.0)
    torch.set_num_threads(2)
    few = [
        "--vocabularies",
        "500",
        "--alphas",
        "1.35",
        "--parents",
        "1",
        "--repeats",
        "1",
        "--warm-ups",
        "0",
    ]
    for given, threads in (([], 1), (["--threads", "2"], 2)):
        out = tmp_path / f"{threads}.jsonl"
        assert tree_construction.main([*few, *given, "--device", "cpu", "--out", str(out)]) == 0
        assert read(out)[1]["threads"] == threads
        assert torch.get_num_threads() == 2
    with pytest.raises(SystemExit):
        tree_construction.main(["--threads", "0"])
    assert "--threads: got 0, accepted 1 or more" in capsys.readouterr().err


def test_other_work_on_the_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_construction.os, "cpu_count", lambda: 2)
    for load, threads, told in ((0.1, 2, False), (1.0, 1, False), (1.0, 2, True), (9.0, 1, True)):
        monkeypatch.setattr(
            tree_construction.os, "getloadavg", lambda load=load: (load, load, load)
        )
        assert bool(tree_construction.crowded(threads)) == told


@pytest.mark.slow
def test_construction_is_drawn_by_vocabulary(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = [
        json.loads(line) for line in (RESULTS / "tree-construction.jsonl").read_text().splitlines()
    ]
    points = plots.construction_points(records)
    assert set(points) == set(GIVEN)
    assert list(points[GIVEN[0]]) == ["0.7", "1.35", "5"]
    for panels in points.values():
        for by_rule in panels.values():
            assert [[v for v, _ in places] for places in by_rule.values()] == [
                sorted({r["vocabulary"] for r in records if r["record"] == "case"})
            ] * len(by_rule)
            assert set(plots.DRAWN_RULES[:6]) <= set(by_rule)
    first = next(r for r in records if r["record"] == "case" and r["parents"] == 10)
    assert points[GIVEN[0]]["0.7"]["talon (torch)"][0] == [32768, first["mean_ms"]["talon (torch)"]]
    plots.draw(records, tmp_path / "a.svg")
    assert "vocabulary, thousands" in (tmp_path / "a.svg").read_text()


def test_a_slow_case_gets_fewer_repeats() -> None:
    row = tree_construction.measure(
        Case(500, 1.35, 3, GIVEN[0]), CPU, warm_ups=20, repeats=100, seconds=0.0
    )
    assert (row["warm_ups"], row["repeats"]) == (2, 10)


# ---------------------------------------------------------------------------------------------------- what to compare


def test_without_a_wish_every_policy_takes_part() -> None:
    specs = list(bench_policies.places([], []))
    assert specs[0] == "plain"
    assert set(policies.names()) <= set(specs)
    assert {name for name in policies.presets() if name.endswith("/cpu")} <= set(specs)
    assert len(specs) == len(set(specs))


def test_values_may_hold_commas() -> None:
    assert parse("fixed,branching=2,2,1") == ("fixed", {"branching": "2,2,1"})
    assert parse("eagle/cpu,width=3,budget=9") == ("eagle/cpu", {"width": "3", "budget": "9"})
    assert list(bench_policies.places(["fixed,branching=2,2,1"], [])) == [
        "plain",
        "fixed,branching=2,2,1",
    ]
    assert repr(Spec.of("fixed,branching=2,2,1").make()) == "Fixed(branching=(2, 2, 1))"


def test_sweeps_take_a_preset_and_options() -> None:
    group, points = bench_policies.sweep_points("salf-threshold/cpu,fill=false")
    assert group == "salf-threshold/cpu,fill=false"
    assert points["0.3"] == "salf/cpu,fill=false,threshold=0.3"
    assert len(points) == 10
    _, steps = bench_policies.sweep_points("dynatree,nodes=20")
    assert list(steps.values()) == [
        "fixed,branching=2,2,2,2,2",
        "dynatree/breadth,nodes=20",
        "dynatree/breadth-depth,nodes=20",
        "dynatree,nodes=20",
    ]


def test_a_policy_in_two_tables_runs_once() -> None:
    found = bench_policies.places(["talon,mu=0.05"], ["talon-mu"])
    assert found["talon,mu=0.05"] == [("policies", ""), ("talon-mu", "0.05")]


@pytest.mark.parametrize(
    ("given", "sweeps", "named"),
    [
        (["nonsense"], [], "nonsense"),
        (["chain,nonsense=1"], [], "nonsense"),
        (["chain,3"], [], "'3'"),
        (["chain/nonsense"], [], "nonsense"),
        ([], ["nonsense"], "salf-threshold"),
        ([], ["talon-mu,nonsense=1"], "nonsense"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(
    given: list[str], sweeps: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*(f"--policy={way}" for way in given), *(f"--sweep={way}" for way in sweeps)]
    with pytest.raises(SystemExit):
        bench_policies.main(words)
    assert named in capsys.readouterr().err


def test_a_sweep_of_a_policy_that_is_missing_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(
        bench_policies.SWEEPS, "absent", bench_policies.Sweep("absent", "x", (1, 2))
    )
    with pytest.raises(SystemExit):
        bench_policies.main(["--sweep", "absent"])
    assert "unknown name 'absent'" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- the table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with its tokenizer, and two prompt sets."""
    folder = tmp_path_factory.mktemp("bench")
    tiny().save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "prompts").mkdir()
    for name in ("one", "two"):
        line = json.dumps({"question_id": 7, "turns": [f"{name} and {name} and {name}"]})
        (folder / "prompts" / f"{name}.jsonl").write_text(line + "\n")
    return folder


def run(folder: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    out = folder / "out.jsonl"
    command = [
        "--model",
        str(folder / "model"),
        "--draft",
        "ngram",
        "--prompts",
        str(folder / "prompts"),
    ]
    status = bench_policies.main(
        [
            *command,
            "--per-set",
            "1",
            "--max-new-tokens",
            "8",
            "--dtype",
            "float32",
            "--out",
            str(out),
            *options,
        ]
    )
    assert not out.with_suffix(".rows").exists()
    return status, read(out)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["record"] == kind]


WAYS = ("--policy", "chain,length=3", "--policy", "eagle,width=2,expansions=2,budget=6")


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_the_table_counts(
    folder: Path, temperature: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, records = run(folder, *WAYS, "--rounds", "2", "--temperature", temperature)
    assert status == 0
    assert records[0]["record"] == "provenance"
    names = ["plain", *WAYS[1::2]]
    assert [record["way"] for record in of(records, "way")] == names
    rows, sums = of(records, "row"), of(records, "summary")
    assert [(row["way"], row["set"]) for row in rows] == [
        (name, set_) for set_ in ("one", "two") for name in names
    ]
    for row in rows:
        assert row["new_tokens"] == row["emitted"] == 8
        assert len(row["seconds"]) == 2
        assert row["diverges_at"] is None
        assert row["cycles"] <= row["verified"] <= row["cycles"] * 6
    by_way = {record["way"]: record for record in sums if record["set"] == "all"}
    assert len(sums) == 3 * 3
    plain = by_way["plain"]
    assert (plain["tau"], plain["delta"], plain["verified"], plain["gamma"]) == (1.0, 0.0, 1.0, 16)
    assert plain["speed_mean"] == plain["speed_total"] == 1.0
    for name in names[1:]:
        assert by_way[name]["delta"] >= 1.0
        assert by_way[name]["diverging"] == 0
        assert 0 < by_way[name]["policy_share"] < 1
    printed = capsys.readouterr().out
    assert "Policies, all sets" in printed
    assert "By set" in printed


def test_by_default_every_policy_runs_or_is_listed(folder: Path) -> None:
    status, records = run(folder, "--counters-only", "--max-new-tokens", "4")
    assert status == 0
    expected = set(bench_policies.places([], []))
    summarised, dropped = (
        {record["way"] for record in of(records, kind)} for kind in ("summary", "not run")
    )
    assert summarised | dropped == expected
    assert not summarised & dropped
    assert {"plain", "eagle", "talon", "salf", "opt_tree", "dynatree"} <= summarised


def test_counters_do_not_need_times(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, records = run(folder, *WAYS, "--counters-only", "--rounds", "3")
    assert status == 0
    assert of(records, "settings")[0]["rounds"] == 1
    assert not any(name in row for row in of(records, "row") for name in report.TIMES)
    assert "speed_mean" not in of(records, "summary")[0]
    assert report.NOTHING in capsys.readouterr().out


class NeedsHidden(policies.TreePolicy):
    """Refuses a draft without hidden states."""

    capacity = 2
    error: type[Exception] = InputError

    def grow(self, tree: Any, frontier: Any, step: Any) -> Any:
        raise self.error("it needs the draft's hidden states")


@pytest.mark.parametrize(
    ("error", "status", "verdict"), [(InputError, 0, "cannot run"), (IndexError, 1, "fault")]
)
def test_a_policy_that_cannot_run_is_reported(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: type[Exception],
    status: int,
    verdict: str,
) -> None:
    real = policies.make
    monkeypatch.setattr(NeedsHidden, "error", error)
    monkeypatch.setattr(
        policies,
        "make",
        lambda name, **options: NeedsHidden() if name == "fixed" else real(name, **options),
    )
    found, records = run(folder, "--policy", "fixed", "--policy", "chain")
    assert found == status
    (dropped,) = of(records, "not run")
    assert (dropped["way"], dropped["fault"]) == ("fixed", bool(status))
    assert "hidden states" in dropped["reason"]
    assert {row["way"] for row in of(records, "row")} == {"plain", "chain"}
    printed = capsys.readouterr().out
    assert "Not run" in printed
    assert verdict in printed


def test_counters_alone_need_no_plain_decoding(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, records = run(folder, "--policy", "chain", "--counters-only", "--no-plain")
    assert found == 0
    assert {row["way"] for row in of(records, "row")} == {"chain"}
    assert all("diverges_at" not in row and "seconds" not in row for row in of(records, "row"))
    (total,) = (record for record in of(records, "summary") if record["set"] == "all")
    assert total["tau"] >= 1
    assert "diverging" not in total
    assert "| chain " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(folder, "--policy", "chain", "--no-plain")


def test_another_answer_than_plain_decodings_is_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = EngineDecoder.__call__

    def broken(self: EngineDecoder, prompt: list[int], length: int) -> Answer:
        answer = real(self, prompt, length)
        return (
            answer
            if self.engine.policy is None
            else answer._replace(tokens=[*answer.tokens[:5], -1])
        )

    monkeypatch.setattr(EngineDecoder, "__call__", broken)
    status, records = run(folder, "--policy", "chain")
    assert status == 1
    assert [row["diverges_at"] for row in of(records, "row") if row["way"] == "chain"] == [5, 5]
    assert [
        record["diverging"] for record in of(records, "summary") if record["way"] == "chain"
    ] == [1, 1, 2]


# ---------------------------------------------------------------------------------------------------- provenance


@pytest.mark.parametrize(
    ("program", "module"),
    [("bench.report", "bench.report"), ("research.inflate.__main__", "research.inflate")],
)
def test_the_command_names_the_module(
    program: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, "__main__", SimpleNamespace(__spec__=SimpleNamespace(name=program))
    )
    monkeypatch.setattr("sys.argv", ["/a/folder/file.py", "--out", "/some/other/folder/x.jsonl"])
    assert provenance.provenance()["command"] == f"python -m {module} --out x.jsonl"


# ---------------------------------------------------------------------------------------------------- report


def test_the_report_shows_sweeps_sets_and_rows_of_a_run_cut_short(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, records = run(folder, "--sweep", "talon-robust/cpu,budget=6")
    cut = tmp_path / "cut.rows"
    cut.write_text(
        "".join(json.dumps(record) + "\n" for record in records if record["record"] != "summary")
    )
    capsys.readouterr()
    assert report.main([str(folder / "out.jsonl")]) == 0
    whole = capsys.readouterr().out
    assert report.main([str(cut)]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == whole.splitlines()[2:]
    assert "Sweep talon-robust/cpu,budget=6" in whole
    assert [line.split("|")[1].strip() for line in whole.splitlines() if line.startswith("| ")][
        2:6
    ] == list("0123")
    assert report.main([str(cut), "--only", "losses"]) == 1


def test_the_report_shows_losses_by_tree() -> None:
    cells = [
        {
            "record": "cell",
            "loss": loss,
            "tree": tree,
            "speedup_over_plain": speed,
            "mean_acceptance_length": 2.0,
        }
        for loss, tree, speed in (
            ("hass", "beam", 1.5),
            ("hass", "salf", 1.6),
            ("talf", "beam", 1.7),
        )
    ]
    (table,) = report.tables(cells)
    assert table.header == ("loss", "beam", "salf")
    assert table.rows == [
        ["hass", "1.50 (2.00)", "1.60 (2.00)"],
        ["talf", "1.70 (2.00)", report.NOTHING],
    ]
    widths = {len(line) for line in table.markdown().splitlines()[2:]}
    assert len(widths) == 1


def test_what_a_run_that_breaks_off_has_measured_stays(tmp_path: Path) -> None:
    def measured() -> Any:
        for number in range(3):
            if number == 2:
                raise RuntimeError("the device is gone")
            yield {"record": "case", "number": number}

    out, seen = tmp_path / "results" / "x.jsonl", []
    with pytest.raises(RuntimeError):
        seen.extend(provenance.keep(measured(), out))
    kept = read(out.with_suffix(".rows"))
    assert [record["record"] for record in kept] == ["provenance", "case", "case"]
    assert not out.exists()
    assert provenance.show(iter(kept[1:]), out) == kept[1:] == read(out)[1:]
    assert read(out)[0]["record"] == "provenance"
    assert [file.name for file in out.parent.iterdir()] == ["x.jsonl"]


def test_records_are_on_disk_before_the_next_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"

    def measured() -> Any:
        for number in range(3):
            assert len(out.with_suffix(".rows").read_text().splitlines()) == number + (number > 0)
            yield {"number": number}

    assert len(list(provenance.keep(measured(), out))) == 3


# ---------------------------------------------------------------------------------------------------- costs


def test_costs_are_measured_beside_the_ways(folder: Path) -> None:
    status, records = run(folder, "--policy", "generate", "--policy", "chain", "--costs")
    assert status == 0
    assert [record["way"] for record in of(records, "way")] == ["plain", "generate", "chain"]
    assert find_costs(str(folder / "out.jsonl")).verify
