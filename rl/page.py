"""One HTML file that shows reports and episodes anywhere: rl/viewer.html with the data put in, compressed.

Each block of data is JSON, deflated and in base64, in a <script> of its own that the browser does not read before it
is asked for. "main" holds the reports, an index of all episodes and the names of the tokens; "g0", "g1", ... a group
each: the task, the prompt once, and of each episode what was said and sampled, the path of each call, the answer, and
when each formula turns true on the paths so far.
"""
from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from rl.episode import Episode
from rl.habits import uses
from rl.report import FAILURES, SERIES, failure, sections
from rl.run import episode_files, latest_checkpoint, read_episodes, read_rows, read_settings
from stl.formula import And, Or, children
from stl.monitor import truth_if_stopped
from stl.prompts import read_answer
from stl.world import Task

MOST = 2000  # episodes of a page; of longer runs whole steps are left out, evenly
MOST_TIMED = 500  # waypoints of a path for which the page says when formulas hold: that takes quadratic time
TEMPLATE = Path(__file__).with_name("viewer.html")
MARK = "<!-- data -->"
FIELDS = ("chunk", "place", "run", "step", "level", "task", "sample", "reward", "outcome", "ending", "turns", "tokens")


def steps_shown(folder: str | Path, first: int = 1, last: int | None = None, most: int = MOST) -> dict[int, Path]:
    """The episode files of a run's steps first..last; evenly chosen ones, the last too, if those are too many."""
    files = episode_files(folder)
    sizes = {row["step"]: row["episodes"] for row in read_rows(folder, "grpo")}
    steps = [step for step in files if step in sizes and first <= step <= (last or step)]
    stride = 1
    while steps and sum(sizes[step] for step in steps[::-1][::stride]) > most and stride < len(steps):
        stride += 1
    return {step: files[step] for step in steps[::-1][::stride][::-1]}


def open_names(folder: str | Path):
    """The chat format of a run, or None if its vocabulary is not on this machine."""
    from rl.chat import ChatError, open_chat  # import torch
    from rl.config import from_json

    config, base = from_json(read_settings(folder)), latest_checkpoint(folder, "sft")
    for place in (base and base.folder, config.model):
        try:
            return open_chat(config, place)
        except (ChatError, OSError):
            continue
    return None


def of_runs(folders: Sequence[str], first: int = 1, last: int | None = None, levels: Sequence[str] = ()
            ) -> tuple[Iterator[tuple], dict]:
    """The groups of some runs' steps and the runs' chat formats, for `write`."""
    groups = (group for folder in folders for group in _groups_of(folder, first, last, levels, MOST // len(folders)))
    return groups, {folder: chat for folder in folders if (chat := open_names(folder))}


def _groups_of(folder: str, first: int, last: int | None, levels: Sequence[str], most: int) -> Iterator[tuple]:
    """(name, step, episodes, advantages) of each group."""
    from rl.grpo import advantages  # imports torch

    std = read_settings(folder).get("advantage_std", "group")
    for step, path in steps_shown(folder, first, last, most).items():
        episodes = (episode for episode in read_episodes(path) if not levels or episode.task.level in levels)
        for _, _, group, _ in eval_groups(folder, episodes):
            gains = advantages([episode.reward for episode in group], std).tolist()
            yield folder, step, group, [round(gain, 4) for gain in gains]


def eval_groups(name: str, episodes: Iterable[Episode]) -> Iterator[tuple]:
    """The groups, for `write`, of episodes that were only measured: no step, no advantages."""
    for _, found in groupby(episodes, key=lambda episode: episode.group):
        group = list(found)
        yield name, None, group, [None] * len(group)


def write(path: str | Path, reports: Sequence[dict], groups: Iterable[tuple], chats: dict | None = None) -> dict:
    """Write the page; returns {"episodes", "bytes"}.

    reports: of rl.report.load. groups: of of_runs or eval_groups. chats: {name: chat format, which knows how tokens
    are called}; where it is missing the page shows their numbers.
    """
    before, mark, after = TEMPLATE.read_text(encoding="utf-8").partition(MARK)
    temporary, index, ids, chats = Path(f"{path}.tmp"), [], {}, chats or {}
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(before)
        for number, (name, step, group, gains) in enumerate(groups):
            file.write(_block(f"g{number}", _group(group, gains)))
            for place, episode in enumerate(group):
                ids.setdefault(name, set()).update(episode.ids)
                kind = failure(episode) or "success"
                index.append([number, place, name, step, episode.task.level or "none", episode.task.id, episode.sample,
                              episode.reward, FAILURES.get(kind, kind), episode.ending, episode.turns, episode.sampled])
        names = {name: {token: _spelling(chat, token) for token in sorted(ids.get(name, ()))}
                 for name, chat in chats.items()}
        shown = [{key: report[key] for key in ("name", "course", "held_out")} | {"sections": sections(report)}
                 for report in reports]
        main = {"reports": shown, "series": SERIES, "fields": FIELDS, "index": index, "names": names}
        file.write(_block("main", main) + after)
    temporary.replace(path)
    return {"episodes": len(index), "bytes": Path(path).stat().st_size}


def _block(name: str, data: dict) -> str:
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:  # a browser's JSON knows no NaN
        text = json.dumps(json.loads(json.dumps(data), parse_constant=lambda name: None))
    packed = zlib.compress(text.encode(), 6)
    return f'<script type="text/plain" id="{name}">{base64.b64encode(packed).decode()}</script>\n'


def _spelling(chat, token: int) -> str:
    """A token as it reads within the text; the compact format leaves the spaces between its words out."""
    text = chat.text([token])
    return text if hasattr(chat, "before") or text[:1] == "." else f" {text}"


def _group(group: list[Episode], gains: list[float | None]) -> dict:
    task, first = group[0].task, group[0]
    prompt = first.ids[:first.mask.index(1)] if 1 in first.mask else first.ids
    data = {key: value for key, value in task.to_json().items() if key not in ("witness", "plan")}
    if planar := isinstance(task, Task):
        data["windows"] = [_windows(formula) for formula in task.formulas]
    opening = next((message["content"] for message in first.messages if message["role"] == "prompt"), "")
    return {"task": data, "prompt": prompt, "opening": opening,
            "episodes": [_episode(task if planar else None, episode, len(prompt), gain)
                         for episode, gain in zip(group, gains, strict=True)]}


def _windows(formula) -> list[list[float]]:
    """The windows [a, b] of the outermost temporal operators, in seconds from time 0."""
    if isinstance(formula, And | Or):
        return [window for child in children(formula) for window in _windows(child)]
    return [[formula.a, formula.b]] if hasattr(formula, "a") else []


def _episode(task: Task | None, episode: Episode, start: int, gain: float | None) -> dict:
    """An episode from its token number `start` on; log-probs in hundredths, of sampled tokens alone, None for NaN."""
    said = [message for message in episode.messages if message["role"] != "prompt"]
    lengths = [len(list(run)) for _, run in groupby(episode.mask[start:])]  # of sampled, given, sampled, ... tokens
    chosen = [None if math.isnan(log) else round(100 * min(max(log, -99.0), 99.0))
              for log, mask in zip(episode.logprobs, episode.mask, strict=True) if mask]
    answer = read_answer(said[-1]["content"])[0] if task and said and episode.ending == "answer" else None
    verdict = episode.verdict and {
        "ok": episode.verdict.ok, "clauses": episode.verdict.clauses,
        "problems": [[problem.kind, problem.text, problem.segment] for problem in episode.verdict.violations[:20]]}
    return {"said": said, "ids": episode.ids[start:], "runs": lengths, "logprobs": chosen, "gain": gain,
            "verdict": verdict, "answer": answer, "truth": _truth(task, answer),
            "uses": _uses(task, episode)}


def _uses(task: Task | None, episode: Episode) -> list[list]:
    """Of each call its turn and name, its path, the number of the call that it goes on from, and when each formula
    holds on the path so far: its own, after those that it goes on from."""
    found, ways = [], []
    for use in uses(episode):
        before = [] if use.after is None else ways[use.after]
        ways.append([row for row in before if use.path and row[0] < use.path[0][0]] + use.path)
        found.append([use.turn, use.name, use.path, use.after, _truth(task, ways[-1])])
    return found


def _truth(task: Task, path: list | None) -> list | None:
    """truth_if_stopped; None where there is no path or a very long one."""
    return truth_if_stopped(task, path) if path and len(path) <= MOST_TIMED else None
