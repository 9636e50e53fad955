"""Reports: intervals and estimators against their definitions, counts, and pictures that can be written."""
import itertools
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.episode import Episode
from rl.ledger import Ledger
from rl.report import course, curves, failure, load, of_rows, pass_at, sections, summarize, table, wilson
from rl.run import RunError


def episode(level: str, group: int, ending: str = "answer", *problems: str) -> Episode:
    """An ended episode whose verdict has these kinds of problems; a success without any."""
    made = Episode(SimpleNamespace(level=level), seed=0, group=group)
    made.append([1, 2])
    made.append([3] * 10, [-0.5] * 10)
    made.turns = 2
    verdict = SimpleNamespace(ok=not problems, violations=[SimpleNamespace(kind=kind) for kind in problems])
    made.end(ending, verdict if ending == "answer" else None)
    return made


EPISODES = [
    episode("L0", 0), episode("L0", 0, "answer", "speed", "clause"), episode("L0", 1), episode("L0", 1),
    episode("L1", 2, "turns"), episode("L1", 2, "answer", "collision"),
]


def test_wilson_on_published_values():
    assert wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)  # values of statsmodels
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(1.0, 20) == pytest.approx((0.8389, 1.0), abs=1e-4)
    assert wilson(0.0, 0) == (0.0, 1.0)


@given(st.floats(0, 1), st.integers(1, 10_000))
def test_wilson_holds_the_rate(rate, n):
    low, high = wilson(rate, n)
    assert 0 <= low <= rate + 1e-12 and rate - 1e-12 <= high <= 1


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_mean_over_all_choices(n, data):
    successes, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    outcomes = [i < successes for i in range(n)]
    choices = list(itertools.combinations(outcomes, k))
    assert pass_at(k, n, successes) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_failures_go_by_the_first_problem():
    assert [failure(e) for e in EPISODES] == [None, "speed", None, None, "missing", "collision"]


def test_summary_counts():
    summary = summarize(EPISODES)
    expected = {"tasks": 3, "episodes": 6, "successes": 3, "success": 0.5, "reward": 0.5,
                "groups": {"fail": 1, "mixed": 1, "succeed": 1}, "endings": {"answer": 5, "turns": 1},
                "failures": {"speed": 1, "missing": 1, "collision": 1}, "turns": 2, "tokens": 10}
    assert {key: summary[key] for key in expected} == expected
    assert summary["interval"] == list(wilson(0.5, 3))  # tasks, not samples
    assert summary["pass_at"] == pytest.approx({"1": 0.5, "2": 2 / 3})
    assert list(summary["levels"]) == ["L0", "L1"] and summary["levels"]["L0"]["success"] == 0.75
    assert summary["histogram"] == [1, 1, 1]  # tasks by successes 0, 1, 2
    assert [figures["histogram"] for figures in summary["levels"].values()] == [[0, 1, 1], [1, 0, 0]]
    assert [figures["groups"] for figures in summary["levels"].values()] == [
        {"fail": 0, "mixed": 1, "succeed": 1}, {"fail": 1, "mixed": 0, "succeed": 0}]
    assert json.loads(json.dumps(summary)) == summary


def test_uneven_groups_give_the_k_that_all_have():
    assert list(summarize(EPISODES[:3])["pass_at"]) == ["1"]
    eight = [episode("L0", 0, "answer", *(["clause"] if i else [])) for i in range(6)]
    assert summarize(eight)["pass_at"] == pytest.approx({"1": 1 / 6, "2": 1 / 3, "4": 2 / 3, "6": 1.0})


def test_table_has_a_row_a_level():
    lines = table(summarize(EPISODES)).splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["level", "L0", "L1", "all"]
    assert lines[1].split()[1:5] == ["2", "4", "3", "0.75"] and "pass@2" in lines[0]
    assert {"too fast 16.7%", "turns 16.7%"} <= {" ".join(line.split()) for line in lines}
    one = table(summarize([episode("L0", 0)]))
    assert "why episodes fail" not in one and "groups" not in one and "all" not in one.splitlines()[2]


LIVE = {"entropy": 0.5, "grad_norm": 0.75, "skipped": 0}
IDLE = {"grad_norm": 0.0, "skipped": 1}


def rows() -> list[dict]:
    made = [{"stage": "sft", "step": i, "loss": 3 / i, "entropy": 2 / i, "grad_norm": 1.0} for i in range(1, 5)]
    made += [{"stage": "grpo", "step": i, **summarize(EPISODES), "learner": [LIVE, IDLE] if i % 2 else [IDLE],
              "time": {"sample": 5.25}} for i in range(1, 5)]
    return made + [{"stage": "eval", "of": stage, "step": step, "temperature": heat, **summarize(EPISODES[:step])}
                   for stage, step, heat in (("sft", 4, 1.0), ("sft", 4, 0.0), ("grpo", 2, 1.0), ("grpo", 6, 1.0))]


def test_the_course_of_a_run_by_hand():
    """Of six episodes one runs out of turns; entropy is a mean over the batches that had a forward pass."""
    steps = [course(row) for row in rows() if row["stage"] == "grpo"][:2]
    assert steps[0] == {"stage": "grpo", "step": 1, "reward": 0.5, "tokens": 10, "turns": 2, "entropy": 0.5,
                        "grad_norm": 0.375, "unanswered": 1 / 6, "truncated": 1 / 6, "levels": {"L0": 0.75, "L1": 0.0}}
    assert (steps[1]["entropy"], steps[1]["grad_norm"]) == (None, 0.0)


def test_a_report_in_words():
    cost = {"seconds": 5400.0, "money": 4.5, "sampled": 12345, "trained": 678}
    found = sections(of_rows("mine", rows(), 2, 3) | {"cost": cost})
    assert found["training success (95% interval)"] == {
        "steps": "2-3", "L0": "0.75 (0.30-0.95)", "L1": "0.00 (0.00-0.66)", "all": "0.50 (0.19-0.81)"}
    assert found["groups by successes 0, 1, 2, ..."] == {"L0": "0 2 2", "L1": "2 0 0", "all": "2 2 2"}
    assert found["why episodes fail (first problem)"] == {
        "too fast": "16.7%", "no answer": "16.7%", "through an obstacle": "16.7%"}
    assert found["course, first step to last"]["gradient norm"] == "0 to 0.375 (from 0 to 0.375)"
    assert found["cost of the whole run"] == {"hours": "1.50", "money": "4.50", "tokens sampled": "12,345",
                                              "tokens trained": "678"}
    assert found["held-out success, temperature 1"]["all, by step"] == "2:0.50 6:0.50"


def test_a_report_of_the_imitation_alone():
    """Also before anything was measured."""
    made = [row | {"time": {"seconds": 2.5}} | ({"held_out_loss": 4 / row["step"]} if row["step"] % 2 == 0 else {})
            for row in rows()[:4]]
    cost = {"seconds": 5400.0, "money": 0.0, "sampled": 0, "trained": 678}
    found = sections(of_rows("mine", made) | {"cost": cost})
    assert found == {
        "imitation, first step to last": {
            "loss, nats a token": "3 to 0.75 (from 0.75 to 3)", "entropy, nats a token": "2 to 0.5 (from 0.5 to 2)",
            "held-out loss, nats a token": "2 to 1 (from 1 to 2)", "steps": "4", "seconds": "10"},
        "cost of the whole run": {"hours": "1.50", "money": "not set", "tokens sampled": "0", "tokens trained": "678"}}
    measured = sections(of_rows("mine", made + rows()[8:9]))
    assert measured["held-out success, temperature 1"]["measured after"] == "sft step 4"
    assert measured["imitation, first step to last"] == found["imitation, first step to last"]


def test_files_of_other_contents_are_named(tmp_path):
    """A broken row, a broken cost.json, and results that are none."""
    run, log = tmp_path / "run", tmp_path / "run/metrics.jsonl"
    run.mkdir()
    log.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "time"}) + "\n" for row in rows()))
    assert load(run)["time"] == {} and load(run)["imitation"] == {"steps": 4, "seconds": 0}
    with pytest.raises(RunError, match=r"run: has no such steps; its steps of GRPO are \d-\d$"):
        load(run, 30, 50)
    for text in ("{", "[1]"):
        (run / "cost.json").write_text(text)
        for read in (lambda: load(run), lambda: Ledger(run, None)):
            with pytest.raises(RunError, match="run/cost.json: cannot be read"):
                read()
    log.write_text('{"stage": "grpo", "step": 1}\n')
    with pytest.raises(RunError, match="metrics.jsonl: a row is not as train.py writes it .KeyError: 'levels'"):
        load(run)
    nothing = {"levels": {"L0": summarize(EPISODES)["levels"]["L0"] | {"episodes": 0, "tasks": 0}}}
    nothing |= {"policy": "p", "temperature": 1}
    for text in ("{}", "[]", "{", json.dumps(nothing)):
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(RunError, match="r.json: not a result of eval.py --json"):
            load(tmp_path / "r.json")


@pytest.mark.parametrize("chosen", [rows(), rows()[:4], rows()[5:6], []])
def test_curves_are_drawn_from_whatever_there_is(tmp_path, chosen):
    chosen = json.loads(json.dumps(chosen))  # as they come from the log
    curves(chosen, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("chosen", [rows(), rows()[5:6]])
def test_legends_cover_no_line_and_single_points_are_seen(monkeypatch, chosen):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    curves(json.loads(json.dumps(chosen)), "")
    drawn[0].canvas.draw()
    for ax in filter(lambda ax: ax.lines, drawn[0].axes):
        assert ax.get_legend().get_window_extent().y1 < ax.get_window_extent().y0
        assert ax.get_ylim()[0] <= 0 and ax.get_xlim()[0] < 0
        assert all(line.get_marker() != "None" for line in ax.lines if len(line.get_xdata()) == 1)
