"""bench.papers: verdicts from figures, the file of a run, and a claim on the default model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import papers, report
from bench.papers import CLAIMS, CONFIRMED, NOT_RUN, REFUTED, UNDECIDED, Bench, Found
from specengine.benchmark.ways import Spec
from specengine.benchmark.workloads import Workload


class Figures:
    """Stands in for a Bench: the figures of replays and rows are given."""

    items: tuple[Workload, ...] = ()

    def __init__(
        self, replays: dict[str, dict[str, Any]] | None = None, rows: Sequence[dict[str, Any]] = ()
    ) -> None:
        self._replays, self._rows = replays or {}, list(rows)

    def replays(self, ways: Sequence[str]) -> dict[str, dict[str, Any]]:
        return {way: self._replays[way] for way in ways}

    def live(self) -> list[dict[str, Any]]:
        return self._rows


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
    ("own", "passes", "verdict"),
    [
        ([0.9, 0.92, 0.91, 0.93], 30, CONFIRMED),
        ([1.2, 1.21, 1.19, 1.22], 30, REFUTED),
        ([0.8, 1.25, 0.8, 1.25], 30, UNDECIDED),
        ([0.9, 0.92, 0.91, 0.93], 80, REFUTED),  # no fewer passes
    ],
)
def test_a_speed_is_judged_by_its_interval(own: list[float], passes: int, verdict: str) -> None:
    found = papers.talon(Figures(rows=[*rows("eagle", [1.0] * 4, 80), *rows("talon", own, passes)]))  # type: ignore[arg-type]
    assert found.verdict == verdict
    assert f"passes {passes / 10:.2f} and 8.00" in found.ours


def test_salf_must_beat_both() -> None:
    base = [*rows("eagle", [1.0] * 4, 80), *rows("salf/optimal", [0.7] * 4, 70)]
    for time, verdict in ((0.5, CONFIRMED), (0.8, REFUTED)):
        assert (
            papers.salf(Figures(rows=[*base, *rows("salf/paper", [time] * 4, 20)])).verdict
            == verdict
        )  # type: ignore[arg-type]


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
                "speedup": {papers.THEIRS: speed, papers.OURS.stem: speed},
                "by_answer": answers({papers.THEIRS: 1 / speed, papers.OURS.stem: 1 / speed}),
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
            for way, by_answer in zip(papers.SAME_BEAM, sums, strict=True)
        }
        assert papers.c2t_same_beam(Figures(ways)).verdict == verdict  # type: ignore[arg-type]


def test_an_interval_is_over_prompts_and_pairs_them() -> None:
    noisy = {"by_answer": answers({"verified": 10.0}, noise=(0.9, 0.0, -0.9))}
    share = papers.resampled(
        [noisy, noisy],
        lambda drawn: papers._sum(drawn[0], "verified") / papers._sum(drawn[1], "verified"),
    )
    assert share == [1.0, 1.0, 1.0]  # the same prompts for both
    whole, low, high = papers.resampled([noisy], lambda drawn: papers._sum(drawn[0], "verified"))
    assert low < whole < high
    assert papers.resampled([noisy], lambda _: None)[0] == float("inf")


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


def arguments(folder: Path) -> Any:
    return papers.argparse.Namespace(folder=folder, quick=True, prompts=None)


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


def test_what_takes_hours_is_quoted_from_the_committed_files() -> None:
    for run in (papers.ltd_rewards, papers.talf):
        found = run(Figures())  # type: ignore[arg-type]
        assert found.verdict == NOT_RUN
        assert ".jsonl has " in found.ours
    lengths = [
        r
        for r in map(json.loads, (papers.RESULTS / "losses.jsonl").read_text().splitlines())
        if r.get("loss") == "talf"
    ]
    beam = next(r for r in lengths if r.get("tree") == "beam" and r["record"] == "cell")
    assert f"talf {beam['mean_acceptance_length']:.2f}" in papers.talf(Figures()).ours  # type: ignore[arg-type]


def test_every_way_can_be_made() -> None:
    for way in (*papers.LIVE, papers.C2T, *papers.BEAMS, *papers.DYNATREE.values()):
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
    monkeypatch.setattr(papers, "QUICK", papers.Scale(1, 8, 4, 1, 0.0))
    given = [str(tmp_path), "--quick"]
    for claim in ("talon", "salf", "salf-threshold", "c2t", "c2t-same-beam", "dynatree", "ltd"):
        given += ["--claim", claim]
    assert papers.main(given) == 0
    assert capsys.readouterr().out.count("Here ") == 7
