"""Reports of a run, and its page: against the episodes that they are made of, and in a browser, if there is one."""
import base64
import json
import re
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

import eval as evaluation
import rl.page as page_module
from rl.chat import Call, CompactChat, QwenChat, Turn
from rl.config import load_config
from rl.episode import Episode
from rl.grpo import advantages
from rl.habits import uses
from rl.page import MARK, MOST_TIMED, TEMPLATE, _spelling, eval_groups, steps_shown, write
from rl.report import combine, load, of_rows, sections, side_by_side, summarize
from rl.run import Run, RunError, read_episodes
from stl.expert import demonstrate
from stl.levels import make_task
from stl.monitor import Verdict, check
from stl.prompts import grade


def made_run(root: Path, steps: int = 3, groups: int = 4, samples: int = 4, levels: tuple = ("L0",)) -> Path:
    """A run folder as train.py writes it, whose policy is the careless expert, in the compact format."""
    chat = CompactChat()
    config = load_config("tiny.py", [f"--name={root.name}"])
    run = Run.open(config, root=root)
    for step in range(1, steps + 1):
        episodes = []
        for group in range(groups):
            level = levels[group % len(levels)]
            task = make_task(level, "rl", step * groups + group)
            episodes += [made_episode(chat, task, group, sample, step) for sample in range(samples)]
        run.write_episodes(step, episodes)
        run.log({"stage": "grpo", "step": step, **summarize(episodes), "sampled": sum(e.sampled for e in episodes),
                 "learner": [{"entropy": 1 / step, "grad_norm": 0.5}, {"grad_norm": 0.0}], "trained": 7,
                 "time": {"sample": 3.0, "update": 1.0}})
        if step % 2:
            for heat in (1.0, 0.0):
                run.log({"stage": "eval", "of": "grpo", "step": step, "temperature": heat, **summarize(episodes)})
    run.close()
    return run.folder


def made_episode(chat, task, group: int, sample: int, step: int) -> Episode:
    """The compact format has no words for the higher levels: there the tokens are those of a task of L0."""
    rng, made = np.random.default_rng((step, group, sample)), Episode(task, 0, group, sample)
    spoken = task if task.level == "L0" else make_task("L0", "rl", 0)
    made.append(chat.prompt(spoken))
    made.messages = [{"role": "prompt", "content": chat.text(made.ids)}, *demonstrate(task, rng, 0.3)]
    for message in demonstrate(spoken, rng, 0.3):
        if message["role"] == "tool":
            made.append(chat.tool_turn([message["content"]]))
        else:
            ids = chat.assistant(message)
            made.append(ids, [-round(float(x), 6) for x in rng.exponential(0.3, len(ids))])
    made.turns = sum(message["role"] == "assistant" for message in made.messages)
    if sample == 3:
        made.messages.pop()
        made.end("turns")
    else:
        made.end("answer", grade(task, made.messages[-1]["content"]))
    return made


def blocks(page: Path) -> dict:
    """What the page holds, read without a browser."""
    found = re.findall(r'<script type="text/plain" id="(\w+)">([^<]*)</script>', page.read_text(encoding="utf-8"))
    return {name: json.loads(zlib.decompress(base64.b64decode(text))) for name, text in found}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return made_run(tmp_path_factory.mktemp("made"), levels=("L0", "L6"))


def all_episodes(folder: Path) -> list:
    """Of all steps, each group with a number of its own."""
    found = []
    for number, path in enumerate(sorted(folder.glob("episodes/*"))):
        for episode in read_episodes(path):
            episode.group += 100 * number
            found.append(episode)
    return found


def assert_the_report_is_that_of_the_episodes(folder: Path) -> tuple[dict, dict]:
    report, expected = load(folder), summarize(all_episodes(folder))
    for one, other in [(report["training"], expected), *((report["training"]["levels"][level], figures)
                                                         for level, figures in expected["levels"].items())]:
        for key in other.keys() - {"levels", "failures", "endings"}:
            assert one[key] == pytest.approx(other[key]), key
        assert (one["failures"], one["endings"]) == (other["failures"], other["endings"])
    assert json.loads(json.dumps(report)) == report
    return report, expected


def test_the_report_of_a_run_is_that_of_its_episodes(folder):
    report, expected = assert_the_report_is_that_of_the_episodes(folder)
    assert sum(expected["histogram"]) == expected["tasks"] == 12 and expected["habits"]["calls"] > 20
    assert report["time"] == {"sample": 9.0, "update": 3.0} and report["steps"] == [1, 3]
    assert [point["entropy"] for point in report["course"]] == [1, 1 / 2, 1 / 3]


@pytest.mark.slow
def test_the_report_of_a_run_that_was_trained(tmp_path):
    subprocess.run([sys.executable, Path(__file__).parents[1] / "small_run.py"], cwd=tmp_path, check=True)
    report, expected = assert_the_report_is_that_of_the_episodes(tmp_path / "runs" / "small")
    assert expected["episodes"] == 64 and report["cost"]["sampled"] == sum(
        e.sampled for e in all_episodes(tmp_path / "runs" / "small"))


def test_steps_and_levels_restrict_a_report(folder):
    episodes = [e for e in all_episodes(folder) if e.group >= 100 and e.task.level == "L6"]
    report, expected = load(folder, 2, 3, ["L6"]), summarize(episodes)
    assert report["training"]["successes"] == expected["successes"] and list(report["training"]["levels"]) == ["L6"]
    assert report["training"]["habits"] == expected["habits"] and report["steps"] == [2, 3]
    with pytest.raises(RunError, match="has no such steps; its steps of GRPO are 1-3"):
        load(folder, 9)
    assert combine([]) is None


def test_rows_of_an_older_program_are_read(folder):
    """Which had neither habits nor histograms."""
    row = {"stage": "grpo", "step": 1, **summarize(all_episodes(folder)), "learner": [], "time": {}}
    for figures in (row, *row["levels"].values()):
        del figures["habits"], figures["histogram"]
    found = of_rows("old", [row])
    assert found["training"]["habits"] == {} and "old" in side_by_side([found])


def test_reports_stand_side_by_side(folder, tmp_path):
    result, page = tmp_path / "expert.json", tmp_path / "expert.html"
    command = ["--policy", "expert", "--level", "L0", "--tasks", "2", "--json", str(result), "--html", str(page)]
    assert evaluation.main(command) == 0
    shown = [row[2:6] for row in blocks(page)["main"]["index"]]
    assert shown == [["expert", None, "L0", "L0-eval-0"], ["expert", None, "L0", "L0-eval-1"]]
    reports = [load(folder), load(result)]
    lines = side_by_side(reports).splitlines()
    column = lines[0].index(str(result))
    line = next(line for line in lines if line.startswith("  calls answered by an error"))
    assert line[column:].startswith("0.0% of") and sections(reports[0])["time of these steps"]["sample"] == "75.0%"
    groups = sections(reports[0])["groups: number, all fail, mixed, all succeed"]["all"]
    counts = reports[0]["training"]["groups"]
    assert groups == "12: " + ", ".join(f"{counts[name] / 12:.2f}" for name in ("fail", "mixed", "succeed"))


def test_the_command_prints_and_writes(folder, tmp_path, capsys, monkeypatch):
    target, page = tmp_path / "report.json", tmp_path / "page.html"
    command = ["--report", str(folder), "--steps", "1-2", "--json", str(target), "--html", str(page)]
    assert evaluation.main(command) == 0
    assert "32 episodes" in capsys.readouterr().out and list(tmp_path.iterdir()) != [page]
    assert json.loads(target.read_text())["reports"][0]["training"]["episodes"] == 32
    assert len(blocks(page)["main"]["index"]) == 32
    monkeypatch.setattr(page_module, "MOST", 20)
    assert evaluation.main(["--report", str(folder), "--html", str(page)]) == 0
    assert ": 16 of 48 episodes, of evenly chosen steps (--steps A-B" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, said", [
    (["--report", "nowhere"], "nowhere: neither a run folder"), (["--steps", "1-2"], "--steps is for --report"),
    (["--report", "x", "--steps", "5-2"], "the first step comes first"),
    (["--html", "no/where.html"], "in a folder that is there"),
    (["--report", "x", "--policy", "expert"], "--report measures nothing"),
    (["--report", str(Path(__file__))], "not a result of eval.py --json")])
def test_mistakes_are_said_in_a_line(arguments, said, capsys, tmp_path):
    try:
        code = evaluation.main(arguments)
    except SystemExit as end:
        code = end.code
    error = capsys.readouterr().err
    assert code == 2 and said in error and error.count("\n") == 1


def test_the_page_holds_the_episodes(folder, tmp_path):
    page = tmp_path / "page.html"
    assert evaluation.main(["--report", str(folder), "--html", str(page)]) == 0
    data, chat, episodes = blocks(page), CompactChat(), all_episodes(folder)
    assert len(data["main"]["index"]) == len(episodes) == 48 and len(data) == 13
    for row, episode in zip(data["main"]["index"], episodes, strict=True):
        group = data[f"g{row[0]}"]
        found = group["episodes"][row[1]]
        assert group["prompt"] + found["ids"] == episode.ids and row[11] == episode.sampled
        mask = [int(i % 2 == 0) for i, length in enumerate(found["runs"]) for _ in range(length)]
        assert [0] * len(group["prompt"]) + mask == episode.mask
        chosen = [log for log, own in zip(episode.logprobs, episode.mask, strict=True) if own]
        assert np.array(found["logprobs"]) / 100 == pytest.approx(chosen, abs=0.0051)
        assert [m for m in episode.messages if m["role"] != "prompt"] == found["said"]
        rewards = [e.reward for e in episodes if e.group == episode.group]
        assert found["gain"] == pytest.approx(float(advantages(rewards)[episode.sample]), abs=1e-4)
        if episode.ending == "answer":
            assert [bool(spans) and spans[-1][1] == found["answer"][-1][0] for spans in found["truth"]] == \
                found["verdict"]["clauses"] == check(episode.task, found["answer"]).clauses
        assert_paths_so_far(episode, found["uses"])
    names = data["main"]["names"][str(folder)]
    shown = "".join(names[str(token)] for token in episodes[0].ids)
    assert " ".join(shown.split()) == " ".join(chat.text(episodes[0].ids).split())


def assert_paths_so_far(episode: Episode, found: list) -> None:
    ways = []
    for (turn, name, path, after, truth), use in zip(found, uses(episode), strict=True):
        assert (turn, name, path, after) == (use.turn, use.name, use.path, use.after)
        before = [] if after is None else ways[after]
        ways.append(way := [row for row in before if path and row[0] < path[0][0]] + path)
        verdict = check(episode.task, way or [[0, *episode.task.robot.start]])
        assert not way or not {"format", "speed"} & {problem.kind for problem in verdict.violations}
        assert not way or [bool(spans) and spans[-1][1] == way[-1][0] for spans in truth] == verdict.clauses


def test_tokens_are_spelt_as_they_read(qwen_folder):
    chat = QwenChat(qwen_folder)
    ids = chat.prompt(make_task("L0", "eval", 0))
    assert "".join(_spelling(chat, token) for token in ids) == chat.text(ids)


class Riddle:
    """A task of another world."""

    id, level = "riddle", "easy"

    def to_json(self) -> dict:
        return {"id": self.id, "question": "2 + 2"}


def riddle_page(file: Path) -> dict:
    episode = Episode(Riddle(), 0)
    episode.append([1, 2])
    episode.append([3, 4], [-0.5, float("-inf")])
    call = {"type": "function", "id": "call_0", "function": {"name": "sum", "arguments": '{"of": [2, 2]}'}}
    unread = Turn("", [Call("sum", error="no brackets", text="sum(2, 2")]).message()["tool_calls"]
    episode.messages = [{"role": "assistant", "content": "I add.", "tool_calls": [call, *unread]},
                        {"role": "tool", "content": "4"}, {"role": "tool", "content": "Error: no brackets."},
                        {"role": "assistant", "content": "<answer>4</answer>"}]
    episode.end("answer", Verdict(True, None, [], "right"))
    row = {"stage": "eval", "of": "me", "step": None, "temperature": float("nan"), **summarize([episode])}
    assert write(file, [of_rows("riddles", [row])], eval_groups("riddles", [episode])) == {
        "episodes": 1, "bytes": file.stat().st_size}
    return blocks(file)


def test_another_world_has_no_map(tmp_path):
    data = riddle_page(tmp_path / "riddle.html")
    found = data["g0"]["episodes"][0]
    assert (found["answer"], found["truth"], found["logprobs"]) == (None, None, [-50, -9900])
    assert [call.get("text") for call in found["said"][0]["tool_calls"]] == [None, "sum(2, 2"]
    assert data["main"]["reports"][0]["held_out"][0]["temperature"] is None  # a browser's JSON knows no NaN


def strange_page(file: Path) -> dict:
    """An episode with thoughts, calls whose arguments are no object, log-probs that are none and a long zigzag."""
    task, episode = make_task("L1", "eval", 0), Episode(make_task("L1", "eval", 0), 0)
    x, y = task.robot.start
    long = json.dumps([[float(i), x + i % 2, y] for i in range(MOST_TIMED + 1)])
    given = ["null", "5", "[1, 2]", '"a"', '{"start": [1,', '{"goal_region": null}', f'{{"waypoints": {long}}}']
    calls = [{"type": "function", "id": "a", "function": {"name": "check_path", "arguments": text}} for text in given]
    episode.append([1])
    episode.append([2, 3, 4, 5], [float("nan"), float("inf"), float("-inf"), -0.5])
    episode.messages = [{"role": "assistant", "content": "Well.", "reasoning_content": "Hm, I doubt it.",
                         "tool_calls": calls}, *({"role": "tool", "content": "Error: no."} for _ in calls),
                        {"role": "assistant", "content": f"So</think><answer>{long}</answer>"}]
    episode.end("answer", grade(task, episode.messages[-1]["content"]))
    row = {"stage": "eval", "of": "me", "step": None, "temperature": 1.0, **summarize([episode])}
    write(file, [of_rows("strange", [row])], eval_groups("strange", [episode]))
    return blocks(file)["g0"]["episodes"][0]


def test_strange_episodes_make_a_page(tmp_path):
    found = strange_page(tmp_path / "strange.html")
    assert found["logprobs"] == [None, 9900, -9900, -50]
    assert len(found["answer"]) == MOST_TIMED + 1 and found["truth"] is None  # it would take quadratic time
    assert [(len(way), truth) for _, _, way, _, truth in found["uses"]] == [(0, None)] * 6 + [(MOST_TIMED + 1, None)]


def test_long_runs_are_thinned_to_whole_steps(folder):
    def steps(**options) -> list[int]:
        return list(steps_shown(folder, **options))

    assert (steps(), steps(most=47), steps(most=16), steps(most=1)) == ([1, 2, 3], [1, 3], [3], [3])
    assert (steps(first=2), steps(last=2), steps(first=4)) == ([2, 3], [1, 2], [])


def test_the_page_is_small_and_asks_for_nothing():
    text = TEMPLATE.read_text(encoding="utf-8")
    assert text.count(MARK) == 1 and len(text.splitlines()) <= 900
    assert re.findall(r"https?://[^\s\"]+", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"<(link|script|img|iframe)[^>]+(src|href)=\"(?!data:)", text)


# ------------------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    if not (program := shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("no chromium here (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def view(browser, folder, tmp_path):
    """The page of the made run in a tab; no error may have been reported when the test is over."""
    file = tmp_path / "page.html"
    assert evaluation.main(["--report", str(folder), "--html", str(file)]) == 0
    yield from tab(browser, file)


def tab(browser, file: Path, width: int = 1366):
    page, errors = browser.new_page(viewport={"width": width, "height": 800}), []
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(("file:", "data:", "blob:")) else
            errors.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("#report .card")
    yield page
    page.close()
    assert errors == []


def open_list(page) -> None:
    page.click("#tab-episodes")
    page.wait_for_selector("#map")


def place(page) -> tuple[float, float]:
    """The centre of the body in the task's metres."""
    return tuple(page.evaluate("""() => { const box = document.getElementById("body"), r = group.task.robot.half_width;
        return [+box.getAttribute("x") + r, flip(+box.getAttribute("y") + r)]; }"""))


def test_filters_and_keys(view, folder):
    episodes = all_episodes(folder)
    open_list(view)
    for filters, expected in [({"level": "L6"}, [e for e in episodes if e.task.level == "L6"]),
                              ({"level": "", "outcome": "success"}, [e for e in episodes if e.reward]),
                              ({"step": "2"}, [e for e in episodes if e.reward and 100 <= e.group < 200]),
                              ({"step": "", "outcome": "", "ending": "turns"}, [e for e in episodes if e.truncated])]:
        for name, value in filters.items():
            view.select_option(f"#filters [name={name}]", value)
        assert view.inner_text("#count").startswith(f"{len(expected)} of 48 episodes")
        assert view.inner_text("#row0").split()[1] == expected[0].task.id
    view.select_option("#filters [name=ending]", "")
    view.fill("#filters [name=task]", episodes[-1].task.id)
    assert view.inner_text("#count").startswith("4 of 48")
    view.click("#row0")
    view.wait_for_function("one.sample === 0 && episode === group.episodes[0]")
    view.focus("#list")
    view.keyboard.press("j")
    view.keyboard.press("ArrowDown")
    view.wait_for_function("episode === group.episodes[2]")
    assert view.evaluate("one.sample") == 2 and episodes[-1].task.id in view.inner_text("#detail .top")
    view.keyboard.press("t")
    assert view.get_attribute("#to-tokens", "aria-selected") == "true"


def test_the_robot_is_where_it_should_be_and_stops(view, folder):
    open_list(view)
    view.select_option("#filters [name=outcome]", "success")
    view.click("#row1")
    view.wait_for_function("episode === group.episodes[one.place] && one === shown[1] && episode.answer")
    way = np.array(view.evaluate("episode.answer"))
    truth, end = view.evaluate("episode.truth"), way[-1, 0]
    for moment in np.linspace(0, end, 9):
        view.evaluate(f"setTime({moment})")
        assert place(view) == pytest.approx([np.interp(moment, way[:, 0], way[:, axis]) for axis in (1, 2)], abs=1e-6)
        marks = view.evaluate("[...document.querySelectorAll('.mark')].map(mark => mark.textContent === '✓')")
        assert marks == [any(lo <= moment <= hi for lo, hi in spans) for spans in truth]
    view.evaluate("setTime(0)")
    view.select_option("#speed", "50")
    view.click("#play")
    view.wait_for_function("now > 0 && playing === null")
    assert view.evaluate("now") == end and place(view) == pytest.approx(way[-1, 1:])
    assert set(view.evaluate("[...document.querySelectorAll('.mark')].map(mark => mark.textContent)")) == {"✓"}
    view.keyboard.press("[")  # the path so far at the last leg's call is that of the answer
    number = view.evaluate("call")
    assert view.evaluate("path") == way.tolist() and f"call {number + 1} of" in view.inner_text("#which")
    view.evaluate(f"setTime({end})")
    assert set(view.evaluate("[...document.querySelectorAll('.mark')].map(mark => mark.textContent)")) == {"✓"}
    view.evaluate("choose(0)")
    first = view.evaluate("soFar(0)")
    assert first == view.evaluate("episode.uses[0][2]")
    assert view.evaluate("path") == first and view.evaluate("document.querySelector('.call.shown').id") == "call0"


def test_a_chart_of_one_measurement_begins_at_0(view):
    texts = view.evaluate("""[...chart("held out", [{name: "", points: [[250, 0.5]]}], true)[0]
        .querySelectorAll(".axis")].map(text => text.textContent)""")
    assert texts == ["0", "0.5", "1", "0", "100", "200", "step"]


def test_an_episode_opens_at_its_end_with_its_verdict(view):
    open_list(view)
    view.select_option("#filters [name=outcome]", "a formula fails")
    view.click("#row0")
    view.wait_for_function("one === shown[0] && episode === group.episodes[one.place] && call === null")
    marks, clauses = view.evaluate("[[...document.querySelectorAll('.mark')].map(mark => mark.textContent), "
                                   "episode.verdict.clauses]")
    assert marks == ["✓" if holds else "✗" for holds in clauses] and not all(clauses)
    view.evaluate("choose(1)")  # played on from where its own leg begins
    leg = view.evaluate("episode.uses[1][2]")
    assert view.evaluate("now") == leg[-1][0] > leg[0][0] > 0
    assert view.evaluate("play(), pause(), now") == leg[0][0]


def test_tokens_have_two_colours_and_say_their_log_prob(view, folder):
    open_list(view)
    view.click("#row0")
    view.wait_for_function("episode && episode === group.episodes[one.place]")
    view.click("#to-tokens")
    episode = all_episodes(folder)[0]
    start = episode.mask.index(1)
    given = view.evaluate("[...document.querySelectorAll('#own b')].map(token => +!token.matches('.g'))")
    assert given == episode.mask[start:]
    view.hover(f"#t{start + 2}")
    said = view.inner_text("#tip")
    assert f"log-prob {episode.logprobs[start + 2]:.2f}" in said.replace("-0.00", "0.00") and "advantage" in said
    view.focus("#tokens")
    view.keyboard.press("ArrowRight")
    assert f"token {start + 3}," in view.inner_text("#tip")


def test_another_world_in_the_browser(browser, tmp_path):
    riddle_page(tmp_path / "riddle.html")
    for page in tab(browser, tmp_path / "riddle.html"):
        page.click("#tab-episodes")
        page.wait_for_selector(".said.final")
        for key in "[] tcjk":
            page.keyboard.press(key)
        text = page.inner_text("#text")
        assert "I add." in text and "sum(2, 2" in text and page.query_selector("#map") is None
        assert "4" in page.inner_text(".call:has-text('answer')") and "waypoints" not in text


def test_strange_episodes_in_the_browser(browser, tmp_path):
    """They open without an error, thoughts are folded up, and what is no object is shown as it is."""
    strange_page(tmp_path / "strange.html")
    for page in tab(browser, tmp_path / "strange.html"):
        open_list(page)
        assert page.locator("#text summary", has_text="thinking").count() == 2
        assert not page.locator("text=I doubt it").is_visible()
        shown = [page.inner_text(f"#call{i}").split("check_path")[1].strip() for i in range(6)]
        assert shown == ["null", "5", "[1,2]", "a", '{"start": [1,', "goal_region  null"]
        page.keyboard.press("t")
        page.hover("#t1")
        assert "log-prob NaN" in page.inner_text("#tip")


@pytest.mark.parametrize("width", [1366, 390])
def test_nothing_is_wider_than_the_window(browser, folder, tmp_path, width):
    file = tmp_path / "page.html"
    assert evaluation.main(["--report", str(folder), "--html", str(file)]) == 0
    for page in tab(browser, file, width):
        for selector in (None, "#tab-episodes", "#row1", "#to-tokens"):
            if selector:
                page.click(selector)
                page.wait_for_timeout(200)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, selector
        assert page.evaluate("document.getElementById('tokens').getBoundingClientRect().bottom") < 800
        page.click("#to-talk")
        page.click(".call button")
        page.wait_for_timeout(100)
        assert page.evaluate("document.getElementById('map').getBoundingClientRect().top") > 0


@pytest.mark.slow
def test_two_thousand_episodes(browser, tmp_path, capsys):
    """Prints the figures: run it with -s."""
    folder, file = made_run(tmp_path, steps=10, groups=25, samples=8), tmp_path / "page.html"
    began = time.perf_counter()
    assert evaluation.main(["--report", str(folder), "--html", str(file)]) == 0
    made = time.perf_counter()
    for page in tab(browser, file):
        opened = time.perf_counter()
        open_list(page)
        assert page.inner_text("#count").startswith("2000 of 2000") and len(page.query_selector_all(".row")) < 60
        page.evaluate("document.getElementById('list').scrollTop = 1e9")
        page.wait_for_selector("#row1999")
        with capsys.disabled():
            print(f"\nmade in {made - began:.1f} s, {file.stat().st_size / 1e6:.1f} MB, opened in {opened - made:.1f} "
                  f"s, first episode and scrolling to the end {time.perf_counter() - opened:.1f} s")
