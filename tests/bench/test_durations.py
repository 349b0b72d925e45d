"""Test of the table of the slowest tests."""

from pathlib import Path

from bench.durations import records

REPORT = """<testsuites><testsuite>
{cases}
</testsuite></testsuites>"""


def test_the_slowest_tenth_is_told_with_all_cases_of_a_test(tmp_path: Path) -> None:
    times = {"tests.a::test_slow[x]": 2.0, "tests.a::test_slow[y]": 1.0}
    times |= {f"tests.b::test_{number}": 0.1 for number in range(19)}
    cases = "\n".join(
        '<testcase classname="{}" name="{}" time="{}"/>'.format(*name.split("::"), seconds)
        for name, seconds in times.items()
    )
    (tmp_path / "report.xml").write_text(REPORT.format(cases=cases))
    total, *slowest = records(tmp_path / "report.xml")
    assert total == {"record": "tests", "tests": 20, "cases": 21, "seconds": 4.9}
    assert [record["name"] for record in slowest][:1] == ["tests.a::test_slow"]
    assert len(slowest) == 2
    assert slowest[0] | {"record": "test", "cases": 2, "seconds": 3.0, "longest": 2.0} == slowest[0]
