"""bench.papers: verdicts from figures, the file of a run, and a claim on the default model."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import paper_rows, papers, report, verdicts
from bench.papers import CLAIMS, Bench, Found
from bench.verdicts import CONFIRMED, NOT_RUN, REFUTED, UNDECIDED
from specengine.benchmark.ways import Spec
from specengine.benchmark.workloads import Workload


class Figures:
    """Stands in for a Bench: the figures of replays are given."""

    items: tuple[Workload, ...] = ()

    def __init__(self, replays: dict[str, dict[str, Any]] | None = None) -> None:
        self._replays = replays or {}

    def replays(self, ways: Sequence[str]) -> dict[str, dict[str, Any]]:
        return {way: self._replays[way] for way in ways}


def rows(way: str, seconds: Sequence[float], passes: int) -> list[dict[str, Any]]:
    counts = {"cycles": 10, "emitted": 20, "passes": passes, "verified": 100, "drafted": 90}
    return [
        {
            "record": "row",
            "way": way,
            "set": "a",
            "id": str(n),
            "new_tokens": 20,
            "seconds": [time],
            **counts,
        }
        for n, time in enumerate(seconds)
    ]


@pytest.mark.parametrize(
    ("noise", "speed", "passes", "verdict"),
    [
        ((0.0, 0.01), 1.1, 3.0, CONFIRMED),
        ((0.0, 0.01), 0.8, 3.0, REFUTED),
        ((0.4, -0.4), 1.05, 3.0, UNDECIDED),
        ((0.0, 0.01), 1.1, 8.0, REFUTED),  # no fewer passes
    ],
)
def test_a_speed_is_judged_by_its_interval(
    noise: Sequence[float], speed: float, passes: float, verdict: str
) -> None:
    own = {"by_answer": answers({verdicts.THEIRS: 1 / speed}, noise=noise), "delta": passes}
    own["missed_nodes_share"] = 0.1
    beam = {"by_answer": answers({verdicts.THEIRS: 1.0}), "delta": 8.0}
    found = papers.talon(
        Figures({"talon": own | {"tau": 2.0}, paper_rows.BEAM: beam | {"tau": 2.1}})  # type: ignore[arg-type]
    )
    assert found.verdict == verdict
    assert f"passes {passes:.2f} and 8.00, tau 2.00 and 2.10" in found.ours


def test_salf_must_beat_both() -> None:
    for speed, verdict in ((2.0, CONFIRMED), (1.2, REFUTED)):
        given = {"salf/paper": speed, paper_rows.BEAM: 1.0, "salf/optimal": 1.4}
        assert papers.salf(speeds(given)).verdict == verdict  # type: ignore[arg-type]


def answers(
    figures: dict[str, float], of: int = 6, noise: Sequence[float] = (0.0,)
) -> list[dict[str, float]]:
    """Figures of replayed answers; `noise` is added to them in turn, relative."""
    same = {"committed": 1.0, "cycles": 1.0, **figures}
    return [
        {
            name: value * (1 + noise[n % len(noise)] * (name in figures))
            for name, value in same.items()
        }
        for n in range(of)
    ]


def speeds(values: dict[str, float]) -> Figures:
    return Figures(
        {
            way: {
                "speedup": {verdicts.THEIRS: speed, papers.OURS.stem: speed},
                "by_answer": answers({verdicts.THEIRS: 1 / speed, papers.OURS.stem: 1 / speed}),
                "missed_nodes_share": 0.0,
            }
            for way, speed in values.items()
        }
    )


def test_a_medium_threshold_is_neither_end() -> None:
    names = [f"salf,threshold={threshold:g},fill=false" for threshold in papers.THRESHOLDS]
    for best, verdict in ((0, REFUTED), (3, CONFIRMED), (len(names) - 1, REFUTED)):
        figures = speeds(
            {name: 2.0 if number == best else 1.5 for number, name in enumerate(names)}
        )
        found = papers.salf_threshold(figures)  # type: ignore[arg-type]
        assert found.verdict == verdict
        assert f"best 2.00 at {papers.THRESHOLDS[best]:g}" in found.ours


def test_dynatrees_gain_is_of_its_depth() -> None:
    for values, verdict in (
        ((1.0, 0.8, 1.4, 1.4), CONFIRMED),
        ((1.0, 1.4, 1.5, 1.5), REFUTED),
        ((1.5, 0.8, 1.4, 1.4), REFUTED),
    ):
        figures = speeds(dict(zip(papers.DYNATREE.values(), values, strict=True)))
        assert papers.dynatree(figures).verdict == verdict  # type: ignore[arg-type]


def test_c2ts_nodes_are_held_against_the_beam_of_the_same_length() -> None:

    def of(tau: float, gamma: float) -> dict[str, Any]:
        sums = answers({"committed": tau, "verified": gamma})
        return {"tau": tau, "gamma": gamma, "by_answer": sums}

    beams = {way: of(1 + 0.1 * n, 10.0 * (n + 1)) for n, way in enumerate(papers.BEAMS)}
    for tau, nodes, verdict in (
        (1.35, 20.0, CONFIRMED),
        (1.35, 44.0, REFUTED),
        (9.0, 20.0, UNDECIDED),
    ):
        found = papers.c2t(Figures(beams | {papers.C2T: of(tau, nodes)}))  # type: ignore[arg-type]
        assert found.verdict == verdict
    assert papers.nodes_at(1.35, [(1.0, 10.0), (1.3, 40.0), (1.4, 50.0)]) == pytest.approx(45.0)
    assert papers.nodes_at(1.0, [(1.0, 10.0), (1.0, 20.0)]) == 10.0


def test_c2t_is_held_against_a_beam_of_its_width_and_depth() -> None:
    for nodes, tau, noise, verdict in (
        (40.0, 1.0, (0.0,), CONFIRMED),
        (40.0, 0.9, (0.0,), REFUTED),  # shorter
        (70.0, 1.0, (0.0,), REFUTED),
        (60.0, 1.0, (0.3, -0.3), UNDECIDED),
    ):
        own = [
            {**answer, "committed": tau}
            for answer in answers({"verified": nodes * tau}, noise=noise)
        ]
        sums = (own, answers({"verified": 60.0}))
        ways = {
            way: {"tau": 2.0, "gamma": 9.0, "by_answer": by_answer}
            for way, by_answer in zip((papers.C2T_OF_THE_BEAM, paper_rows.BEAM), sums, strict=True)
        }
        assert papers.c2t_same_beam(Figures(ways)).verdict == verdict  # type: ignore[arg-type]


def test_an_interval_is_over_prompts_and_pairs_them() -> None:
    noisy = {"by_answer": answers({"verified": 10.0}, noise=(0.9, 0.0, -0.9))}
    share = verdicts.resampled(
        [noisy, noisy],
        lambda drawn: verdicts.total(drawn[0], "verified") / verdicts.total(drawn[1], "verified"),
    )
    assert share == [1.0, 1.0, 1.0]  # the same prompts for both
    whole, low, high = verdicts.resampled(
        [noisy], lambda drawn: verdicts.total(drawn[0], "verified")
    )
    assert low < whole < high
    assert verdicts.resampled([noisy], lambda _: None)[0] == float("inf")


def test_the_time_left_is_what_the_others_took() -> None:
    assert papers._time_left(0, 4, 0.0) == ""
    assert papers._time_left(1, 4, 60.0) == ", about 3.0 min left"


def test_every_form_of_distributions_counts() -> None:
    assert papers.construction_verdict([[1.2, 1.3], [1.1, 1.4]]) == CONFIRMED
    assert papers.construction_verdict([[1.2, 1.3], [0.9, 1.4]]) == UNDECIDED
    assert papers.construction_verdict([[0.8, 0.9], [0.9, 1.4]]) == REFUTED


def test_the_layers_are_those_of_ten_parents_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measure(case: Any, *_: Any) -> dict[str, Any]:
        asked.append(case)
        if len(asked) == 5:
            raise KeyboardInterrupt
        return {"record": "case", "given": case.given}

    monkeypatch.setattr(papers.tree_construction, "measure", measure)
    bench = papers._bench(arguments(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        bench.layers()
    again = papers._bench(arguments(tmp_path))
    assert len(again.layers()) == 45
    assert len(set(asked)) == 45
    assert {case.parents for case in asked} == {10}


def test_beside_other_work_the_layers_are_the_committed_ones(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args.untimed = True
    found = papers.talon_layers(papers._bench(args))
    assert found.verdict == REFUTED
    assert f"(medians, {papers.LAYERS})" in found.ours
    torch_ratios = found.figures["eagle_over_talon"]["float32 log-probs"]["torch"]
    assert len(torch_ratios) == 15  # vocabularies by exponents


def arguments(folder: Path) -> Any:
    return papers.argparse.Namespace(
        folder=folder, quick=True, prompts=None, untimed=False, assistant=None
    )


def test_what_is_done_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(bench: Bench) -> Found:
        ran.append(bench.scale)
        return Found("1.5", CONFIRMED, {})

    monkeypatch.setattr(
        papers, "CLAIMS", {name: claim._replace(run=run) for name, claim in CLAIMS.items()}
    )
    monkeypatch.setattr(paper_rows, "SETS", {})
    given = [str(tmp_path), "--quick"]
    assert papers.main([*given, "--claim", "talon"]) == 0
    assert len(ran) == 1
    assert papers.main(given) == 0
    assert len(ran) == len(CLAIMS)
    assert papers.main(given) == 0
    assert ran == [papers.QUICK] * len(CLAIMS)
    assert capsys.readouterr().out.count("Claims of the papers") == 3
    assert papers.main([str(tmp_path)]) == 2  # other settings
    assert "name another file" in capsys.readouterr().err
    assert report.main([str(tmp_path / "papers.jsonl"), "--only", "claims"]) == 0
    assert capsys.readouterr().out.count(CONFIRMED) == len(CLAIMS)


def test_ctrl_c_says_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(bench: Bench) -> Found:
        raise KeyboardInterrupt

    monkeypatch.setattr(papers, "CLAIMS", {"talon": CLAIMS["talon"]._replace(run=run)})
    assert papers.main([str(tmp_path), "--quick", "--claim", "talon"]) == 130
    assert "interrupted; the same command goes on" in capsys.readouterr().err


def test_what_is_timed_is_left_out_beside_other_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(bench: Bench) -> Found:
        return Found("", CONFIRMED, {})

    def yields(bench: Bench) -> Iterator[dict[str, Any]]:
        ran.append("set")
        yield from ()

    claims = {name: claim._replace(run=run) for name, claim in CLAIMS.items()}
    monkeypatch.setattr(papers, "CLAIMS", claims)
    sets = {name: each._replace(run=yields) for name, each in paper_rows.SETS.items()}
    monkeypatch.setattr(paper_rows, "SETS", sets)
    assert papers.main([str(tmp_path), "--quick", "--untimed"]) == 0
    lines = (tmp_path / "papers.jsonl").read_text().splitlines()
    found = {record.get("name", record.get("set")) for record in map(json.loads, lines[2:])}
    timed = {"talon-t1", "overhead", "c2t-lanes", "assisted"}
    assert found == {*CLAIMS, *sets} - timed
    assert papers.main([str(tmp_path), "--quick"]) == 0
    assert len(ran) == len(sets)  # and those that had run were not run again


def test_what_takes_hours_is_quoted_from_the_committed_files() -> None:
    rewards = papers.ltd_rewards(Figures())  # type: ignore[arg-type]
    assert rewards.verdict == NOT_RUN
    committed = (papers.RESULTS / "ltd-cpu.jsonl").read_text().splitlines()
    by_way = {r.get("way"): r for r in map(json.loads, committed)}
    assert f"throughput {by_way['ltd, its size: cpu']['speed']:.2f}" in rewards.ours
    losses = papers.talf(Figures())  # type: ignore[arg-type]
    assert losses.verdict == UNDECIDED
    longer, low, high = losses.figures["over_hass"]["after equal steps"]
    assert 0 < low < longer < high
    assert f"{longer:+.2f} ({low:+.2f} to {high:+.2f}) after equal steps" in losses.ours
    _, low, high = losses.figures["over_hass"]["at equal time"]
    assert low < 0 < high


def test_every_way_can_be_made() -> None:
    for way in (papers.C2T, papers.C2T_OF_THE_BEAM, *papers.BEAMS, *papers.DYNATREE.values()):
        Spec.of(way).make()
    assert {claim.paper for claim in CLAIMS.values()} == {
        "TALON",
        "SALF",
        "C2T",
        "DynaTree",
        "LTD",
        "TALF",
    }


@pytest.mark.model
@pytest.mark.slow
def test_the_claims_run_on_the_default_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(papers, "QUICK", papers.Scale(1, 8, 4, 12, 1, 0.0))
    given = [str(tmp_path), "--quick"]
    for claim in ("talon", "salf", "salf-threshold", "c2t", "c2t-same-beam", "dynatree", "ltd"):
        given += ["--claim", claim]
    assert papers.main(given) == 0
    assert capsys.readouterr().err.count("Here ") == 7


@pytest.mark.model
@pytest.mark.slow
def test_the_row_sets_run_and_have_their_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the default model, two ways of one sweep and one of each other; the same command then runs nothing again."""
    monkeypatch.setattr(papers, "QUICK", papers.Scale(1, 8, 4, 12, 1, 0.0))
    monkeypatch.setattr(paper_rows, "PARALLEL", (1, 2))
    counts = dict.fromkeys(paper_rows.SWEEPS, 1) | {next(iter(paper_rows.SWEEPS)): 2}
    few = {name: ways[: counts[name]] for name, ways in paper_rows.SWEEPS.items()}
    monkeypatch.setattr(paper_rows, "SWEEPS", few)
    given = [str(tmp_path), "--quick"]
    for name in paper_rows.SETS:
        given += ["--rows", name]
    assert papers.main(given) == 0
    records = [json.loads(line) for line in (tmp_path / "papers.jsonl").read_text().splitlines()]
    sets = {record["set"]: record["rows"] for record in records if record["record"] == "set"}
    assert list(sets) == list(paper_rows.SETS)
    for name, found in sets.items():
        assert found, name
        assert all(list(row) == list(paper_rows.SETS[name].columns) for row in found)
    for name, ways in few.items():
        assert [row["way"] for row in sets[name]] == list(ways)
        for row in sets[name]:
            for value, low, high in row["speed"].values():
                assert 0 < low <= value <= high
        assert set(sets[name][0]["verdict"].values()) == {"undecided"}  # of the first, by itself
    assert sum(row["taken"] for row in sets["acceptance"]) <= sum(
        row["nodes"] for row in sets["acceptance"]
    )
    printed = capsys.readouterr().out
    assert printed.count("**Rows ") == len(paper_rows.SETS)

    def never(bench: Any) -> Any:
        raise AssertionError("it ran again")

    again = {name: each._replace(run=never) for name, each in paper_rows.SETS.items()}
    monkeypatch.setattr(paper_rows, "SETS", again)
    assert papers.main(given) == 0
    assert capsys.readouterr().out == printed


def test_every_way_of_the_row_sets_can_be_made() -> None:
    for ways in paper_rows.SWEEPS.values():
        assert len(set(ways)) == len(ways)
        for way in ways:
            Spec.of(way).make()


def test_live_rows_are_held_against_the_first_way() -> None:
    by_way = {
        "first": rows("first", [1.0] * 4, 8),
        "fast": rows("fast", [0.5] * 4, 8),
        "slow": rows("slow", [2.0, 1.9] * 2, 8),
        "either": rows("either", [0.5, 2.0] * 2, 8),
    }
    found = list(paper_rows._live_rows(by_way))
    assert [row["verdict"] for row in found] == ["undecided", "faster", "slower", "undecided"]
    assert found[1]["tokens_per_second"] == [40.0, 40.0, 40.0]
    assert found[1]["over_first"] == [2.0, 2.0, 2.0]
    assert {row["tau"] for row in found} == {2.0}
    assert all(tuple(row) == paper_rows.LIVE for row in found)


def test_siblings_are_ranked_by_probability() -> None:
    logged = Namespace(
        log_probs=torch.tensor([0.0, -3.0, -1.0, -2.0, -0.5, -0.2]),
        parents=torch.tensor([-1, 0, 0, 0, 2, 2]),
    )
    assert paper_rows._sibling_ranks(logged).tolist() == [3, 1, 2, 2, 1]  # type: ignore[arg-type]
