"""Reports from episodes and metrics: success by level with its interval, pass@k, failures, endings, tool habits, the
course of a run, its time and cost; of several runs side by side; a line for the terminal; curves as a picture."""
from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from rl import habits
from rl.episode import TRUNCATED, Episode
from rl.run import RunError, read_json, read_rows

OUTCOMES = ("fail", "mixed", "succeed")  # of a group: none of its episodes succeeds, some do, all do
BROKEN = (ValueError, TypeError, KeyError, AttributeError)  # what a file of other contents leads to
Z95 = 1.959964  # of the normal distribution: 95% lie within so many standard deviations
FAILURES = {
    "collision": "through an obstacle", "speed": "too fast", "workspace": "out of the workspace",
    "clause": "a formula fails", "format": "malformed answer", "missing": "no answer",
}
SERIES = {  # of the training steps, over which a report follows them: (stage, figure of `course`, whether a share)
    "training reward": ("grpo", "reward", True), "entropy, nats a sampled token": ("grpo", "entropy", False),
    "sampled tokens an episode": ("grpo", "tokens", False), "turns an episode": ("grpo", "turns", False),
    "share of episodes truncated": ("grpo", "truncated", True),
    "share of episodes without an answer": ("grpo", "unanswered", True), "gradient norm": ("grpo", "grad_norm", False),
    "loss, nats a token": ("sft", "loss", False), "entropy, nats a token": ("sft", "entropy", False),
}
PANELS = {  # of the picture of a run's curves: {stage: {title: {line: figure of `course`}}}
    "sft": {"loss, nats a token": {"training": "loss", "held out": "held_out_loss"},
            "entropy": {"nats a token": "entropy"}, "gradient norm": {"before clipping": "grad_norm"}},
    "grpo": {"entropy": {"nats a sampled token": "entropy"}, "length": {"sampled tokens an episode": "tokens"},
             "share of episodes": {"no answer": "unanswered", "truncated": "truncated"}},
}


def wilson(rate: float, n: int) -> tuple[float, float]:
    """95% interval for a probability of which `rate` was seen in `n` independent trials (Wilson 1927)."""
    if n == 0:
        return 0.0, 1.0
    centre, spread = rate + Z95**2 / (2 * n), Z95 * math.sqrt(rate * (1 - rate) / n + Z95**2 / (4 * n * n))
    low, high = ((centre + sign * spread) / (1 + Z95**2 / n) for sign in (-1, 1))
    return max(low, 0.0), min(high, 1.0)


def pass_at(k: int, n: int, successes: int) -> float:
    """Unbiased estimate of the chance that at least one of k samples succeeds, from n >= k samples of a task
    (Chen et al. 2021, arXiv 2107.03374)."""
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def failure(episode: Episode) -> str | None:
    """The first problem found with a failed episode, a key of FAILURES; None for a success."""
    if episode.reward > 0:
        return None
    if episode.ending != "answer" or episode.verdict is None or not episode.verdict.violations:
        return "missing"
    return episode.verdict.violations[0].kind


def summarize(episodes: Sequence[Episode]) -> dict:
    """Figures over all episodes, ready for JSON, and the same for each level under "levels".

    {"tasks", "episodes", "successes", "success", "reward", "interval", "pass_at": {"1": ...}, "groups", "histogram",
    "failures", "endings", "habits", "turns", "tokens", "levels": {"L0": {...}, ...}}

    Episodes of one `group` are samples of one task. The interval counts tasks, as samples of one task are not
    independent. "groups" counts tasks by outcome, "histogram" by the number of successes from 0 on; "habits" are the
    sums of rl.habits.count; "tokens" are those that the policy chose, a mean per episode.
    """
    levels: dict[str, list[Episode]] = {}
    for episode in episodes:
        levels.setdefault(episode.task.level or "none", []).append(episode)
    return _figures(episodes) | {"levels": {level: _figures(levels[level]) for level in sorted(levels)}}


def _figures(episodes: Sequence[Episode]) -> dict:
    groups: dict[int, list[bool]] = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append(episode.reward > 0)
    n, successes = len(episodes), sum(map(sum, groups.values()))
    fewest = min(map(len, groups.values()))
    ks = [2**i for i in range(fewest.bit_length()) if 2**i < fewest] + [fewest]
    counts = list(map(habits.count, episodes))
    outcomes = Counter("succeed" if all(group) else "mixed" if any(group) else "fail" for group in groups.values())
    return {
        "tasks": len(groups), "episodes": n, "successes": successes, "success": successes / n,
        "reward": sum(e.reward for e in episodes) / n, "interval": list(wilson(successes / n, len(groups))),
        "pass_at": {str(k): sum(pass_at(k, len(g), sum(g)) for g in groups.values()) / len(groups) for k in ks},
        "groups": {outcome: outcomes[outcome] for outcome in OUTCOMES},
        "histogram": [sum(sum(g) == i for g in groups.values()) for i in range(max(map(len, groups.values())) + 1)],
        "failures": dict(Counter(filter(None, map(failure, episodes))).most_common()),
        "endings": dict(Counter(e.ending for e in episodes).most_common()),
        "habits": {name: sum(count[name] for count in counts) for name in counts[0]},
        "turns": sum(e.turns for e in episodes) / n, "tokens": sum(e.sampled for e in episodes) / n,
    }


def combine(summaries: Sequence[dict], levels: Sequence[str] = ()) -> dict | None:
    """The summary of all episodes of `summaries`, between which no group is split; only of `levels`, if given. None
    without episodes. What an older program did not count is left out."""
    parts: dict[str, list[dict]] = {}
    for summary in summaries:
        for level, figures in summary["levels"].items():
            if not levels or level in levels:
                parts.setdefault(level, []).append(figures)
    if not parts:
        return None
    whole = _sum([figures for part in parts.values() for figures in part])
    return whole | {"levels": {level: _sum(parts[level]) for level in sorted(parts)}}


def _sum(parts: list[dict]) -> dict:
    def add(name: str) -> dict:
        total: Counter = Counter()
        for part in parts:
            total.update(part.get(name, {}))
        return dict(total)

    def mean(value, weight: str) -> float:
        return sum(value(part) * part[weight] for part in parts) / total[weight]

    total = {name: sum(part[name] for part in parts) for name in ("tasks", "episodes", "successes")}
    rate, long = total["successes"] / total["episodes"], [part.get("histogram", []) for part in parts]
    ks = [k for k in parts[0]["pass_at"] if all(k in part["pass_at"] for part in parts)]
    return total | {
        "success": rate, "reward": mean(lambda part: part["reward"], "episodes"),
        "interval": list(wilson(rate, total["tasks"])),
        "pass_at": {k: mean(lambda part, k=k: part["pass_at"][k], "tasks") for k in ks},
        "groups": add("groups"), "histogram": [sum(column) for column in zip_longest(*long, fillvalue=0)],
        **{name: dict(Counter(add(name)).most_common()) for name in ("failures", "endings")}, "habits": add("habits"),
        **{name: mean(lambda part, name=name: part[name], "episodes") for name in ("turns", "tokens")},
    }


def course(row: dict) -> dict:
    """What a training step's row of the metrics says for the curves; see SERIES and PANELS."""
    if row["stage"] == "sft":
        return {key: row.get(key) for key in ("stage", "step", "loss", "held_out_loss", "entropy", "grad_norm")}
    found = {key: row[key] for key in ("stage", "step", "reward", "tokens", "turns")}
    for key in ("entropy", "grad_norm"):  # an optimizer batch without a live group has no entropy
        values = [stats[key] for stats in row["learner"] if key in stats]
        found[key] = sum(values) / len(values) if values else None
    ended = {"unanswered": row["episodes"] - row["endings"].get("answer", 0),
             "truncated": sum(row["endings"].get(ending, 0) for ending in TRUNCATED)}
    return found | {key: count / row["episodes"] for key, count in ended.items()} | {
        "levels": {level: figures["success"] for level, figures in row["levels"].items()}}


def load(source: str | Path, first: int = 1, last: int | None = None, levels: Sequence[str] = ()) -> dict:
    """The report of a run folder, or of a file that eval.py --json wrote, ready for JSON. Raises RunError.

    {"name", "steps": [first, last] or None, "training": the summary of those GRPO steps or None, "held_out": [summaries
    with "of", "step" and "temperature"], "course": [of each training step], "time": {phase: seconds of the GRPO steps},
    "cost": {"seconds", "money", "sampled", "trained", ...} or None}

    `levels` restricts the summaries to some levels; "held_out" and "course" are of the whole run, whatever the steps.
    """
    path = Path(source)
    if path.is_file():
        try:
            row = json.loads(path.read_bytes())
            return of_rows(str(source), [row | {"stage": "eval", "of": row["policy"], "step": None}], levels=levels)
        except (*BROKEN, ZeroDivisionError):  # the latter: it has no episodes
            raise RunError(f"{source}: not a result of eval.py --json") from None
    rows, cost = read_rows(path), path / "cost.json"
    if not rows:
        raise RunError(f"{source}: neither a run folder with metrics nor a result of eval.py --json")
    try:
        made = of_rows(str(source), rows, first, last, levels)
    except (*BROKEN, ZeroDivisionError) as error:
        raise RunError(f"{path}/metrics.jsonl: a row is not as train.py writes it ({type(error).__name__}: {error})"
                       ) from None
    known = [row["step"] for row in rows if row["stage"] == "grpo"]
    if known and not made["steps"]:
        raise RunError(f"{source}: has no such steps; its steps of GRPO are {known[0]}-{known[-1]}")
    return made | {"cost": read_json(cost) if cost.exists() else None}


def of_rows(name: str, rows: list[dict], first: int = 1, last: int | None = None, levels: Sequence[str] = ()) -> dict:
    """The same from rows of the metrics, but for the cost."""
    chosen = [row for row in rows if row["stage"] == "grpo" and first <= row["step"] <= (last or row["step"])]
    imitated, time = [row for row in rows if row["stage"] == "sft"], Counter()
    for row in chosen:
        time.update(row.get("time", {}))
    return {"name": name, "steps": [chosen[0]["step"], chosen[-1]["step"]] if chosen else None,
            "training": combine(chosen, levels), "time": dict(time.most_common()),
            "imitation": {"steps": len(imitated),
                          "seconds": sum(row.get("time", {}).get("seconds", 0) for row in imitated)},
            "held_out": list(filter(None, (_measured(row, levels) for row in rows if row["stage"] == "eval"))),
            "course": [course(row) for row in rows if row["stage"] in ("sft", "grpo")], "cost": None}


def _measured(row: dict, levels: Sequence[str]) -> dict | None:
    figures = combine([row], levels)
    return figures and {key: row[key] for key in ("of", "step", "temperature")} | figures


def sections(report: dict) -> dict[str, dict[str, str]]:
    """What `load` found as tables of words: {title: {row: cell}}."""
    made, last = {}, {row["temperature"]: row for row in report["held_out"]}
    for heat, row in sorted(last.items(), key=lambda item: -(item[0] or 0)):
        own = [r for r in report["held_out"] if r["temperature"] == heat and r["of"] == row["of"]]
        made["held-out success" + (f", temperature {heat:g}" if heat is not None else "")] = {
            "measured after": f"{row['of']} step {row['step']}" if row["step"] is not None else row["of"],
            **{level: _rate(figures) for level, figures in _by_level(row)},
            **({"all, by step": " ".join(f"{r['step']}:{r['success']:.2f}" for r in own)} if len(own) > 1 else {})}
    if imitation := report["imitation"]["steps"]:
        made["imitation, first step to last"] = _courses(report, "sft", 1, imitation) | {
            "steps": str(imitation), "seconds": f"{report['imitation']['seconds']:.0f}"}
    of, steps = report["training"] or (report["held_out"] or [None])[-1], report["steps"]
    if steps:
        made["training success (95% interval)"] = {"steps": f"{steps[0]}-{steps[1]}"} | {
            level: _rate(figures) for level, figures in _by_level(of)} if of else {}
    if of:
        made |= breakdown(of)
    if steps:
        made["course, first step to last"] = _courses(report, "grpo", *steps)
    total = sum(report["time"].values())
    made["time of these steps"] = {phase: f"{value / total:.1%}" for phase, value in report["time"].items()}
    if cost := report["cost"]:
        made["cost of the whole run"] = {
            "hours": f"{cost['seconds'] / 3600:.2f}", "money": f"{cost['money']:.2f}" if cost["money"] else "not set",
            "tokens sampled": f"{cost['sampled']:,}", "tokens trained": f"{cost['trained']:,}"}
    return {title: rows for title, rows in made.items() if rows}


def breakdown(summary: dict) -> dict[str, dict[str, str]]:
    """Of a summary all but success, as tables of words: groups, failures, endings, habits, lengths."""
    made, n = {}, summary["episodes"]
    if len(summary["histogram"]) > 2:
        made["groups: number, all fail, mixed, all succeed"] = {level: f"{f['tasks']}: " + ", ".join(
            f"{f['groups'][outcome] / f['tasks']:.2f}" for outcome in OUTCOMES) for level, f in _by_level(summary)}
        made["groups by successes 0, 1, 2, ..."] = {
            level: " ".join(map(str, f["histogram"])) for level, f in _by_level(summary)}
    return made | {
        "why episodes fail (first problem)": {FAILURES.get(kind, kind): f"{count / n:.1%}"
                                              for kind, count in summary["failures"].items()},
        "how episodes end": {kind: f"{count / n:.1%}" for kind, count in summary["endings"].items()},
        "tool habits": habits.shares(summary["habits"]),
        "length of an episode": {"turns": f"{summary['turns']:.1f}", "sampled tokens": f"{summary['tokens']:.0f}"}}


def _by_level(figures: dict) -> list[tuple[str, dict]]:
    """The levels of a summary, and all of them together if they are several."""
    return [*figures["levels"].items(), *([("all", figures)] if len(figures["levels"]) > 1 else [])]


def _rate(figures: dict) -> str:
    low, high = figures["interval"]
    return f"{figures['success']:.2f} ({low:.2f}-{high:.2f})"


def _courses(report: dict, stage: str, first: int, last: int) -> dict[str, str]:
    """Of each series of a stage's steps from `first` to `last`: the first value, the last, the lowest, the highest."""
    found = {}
    for title, (of, key, _) in (SERIES | {"held-out loss, nats a token": ("sft", "held_out_loss", False)}).items():
        values = [point[key] for point in report["course"] if stage == of == point["stage"]
                  and first <= point["step"] <= last and point[key] is not None]
        if values:
            found[title] = f"{values[0]:.4g} to {values[-1]:.4g} (from {min(values):.4g} to {max(values):.4g})"
    return found


def side_by_side(reports: Sequence[dict]) -> str:
    """The reports as one table of text, a column each."""
    return in_columns([sections(report) for report in reports], [report["name"] for report in reports])


def table(summary: dict) -> str:
    """The summary as text: a row per level, then what else there is to say."""
    ks = [k for k in summary["pass_at"] if k != "1"]
    rows = [["level", "tasks", "episodes", "solved", "success", "95% interval", *(f"pass@{k}" for k in ks),
             "turns", "tokens"]]
    for level, f in _by_level(summary):
        low, high = f["interval"]
        rows.append([level, str(f["tasks"]), str(f["episodes"]), str(f["successes"]), f"{f['success']:.2f}",
                     f"{low:.2f}-{high:.2f}", *(f"{f['pass_at'][k]:.2f}" for k in ks), f"{f['turns']:.1f}",
                     f"{f['tokens']:.0f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, in_columns([breakdown(summary)])])


def in_columns(columns: Sequence[dict[str, dict[str, str]]], names: Sequence[str] = ()) -> str:
    """Tables of words as text, those of one title beside each other; `names` stand above the columns."""
    lines = [["", *names]] if names else []
    for title in dict.fromkeys(title for one in columns for title, rows in one.items() if rows):
        rows = dict.fromkeys(row for one in columns for row in one.get(title, ()))
        rows = sorted(rows, key=lambda row: row.startswith("all"))  # below the levels of every report
        lines += [[], [title], *(["  " + row, *(one.get(title, {}).get(row, "-") for one in columns)] for row in rows)]
    widths = [max(len(line[i]) for line in lines if len(line) > 1) for i in range(len(columns) + 1)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip()
                     for line in lines)


def step_line(row: dict) -> str:
    """A GRPO step in one line."""
    def mean(key: str, form: str = ".3f") -> str:
        values = [stats[key] for stats in row["learner"] if key in stats]
        return format(sum(values) / len(values), form) if values else "-"

    levels = " ".join(f"{level} {figures['success']:.2f}" for level, figures in row["levels"].items())
    endings = " ".join(f"{name} {count}" for name, count in row["endings"].items())
    seconds = " ".join(f"{phase} {value:.1f}s" for phase, value in row["time"].items())
    kept = f"{sum(row['kept'].values())} of {row['tasks']} groups kept  " if "kept" in row else ""
    update = (f"entropy {mean('entropy')}  clipped {mean('clip_low')}/{mean('clip_high')}  "
              f"mismatch {mean('mismatch_mean', '.1e')}") if mean("entropy") != "-" else "no mixed group, no update"
    return (f"step {row['step']:3d}  reward {row['reward']:.3f} ({levels})  {kept}"
            f"{row['tokens']:.0f} tokens {row['turns']:.1f} turns ({endings})  {update}  {seconds}")


def eval_line(row: dict) -> str:
    """A measurement in one line."""
    manner = "greedy" if row["temperature"] == 0 else f"temperature {row['temperature']:g}"
    low, high = row["interval"]
    return (f"held-out after {row['of']} step {row['step']}, {manner}: {row['success']:.3f} of {row['tasks']} tasks "
            f"(95% interval {low:.2f}-{high:.2f})")


def mismatch_warning(row: dict, bound: float) -> str | None:
    """Words if sampler and trainer were not the same policy within `bound` in a GRPO step: nats a token, on average."""
    worst = max((stats.get("mismatch_mean", 0.0) for stats in row["learner"]), default=0.0)
    return None if worst <= bound else (
        f"warning: log-probs of sampler and trainer differ by {worst:.3g} on average, more than mismatch_bound "
        f"({bound:g}); the gradient is corrected for up to importance_cap only")


def curves(rows: list[dict], path: str | Path) -> None:
    """Draw the learning curves of a run's metrics into a PNG: a row of panels for each stage that has run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = [course(row) for row in rows if row["stage"] in PANELS]
    stages = [stage for stage in PANELS if any(point["stage"] == stage for point in points)]
    figure = Figure(figsize=(13, 3.8 * max(1, len(stages))), layout="constrained")
    FigureCanvasAgg(figure)
    for stage, axes in zip(stages, figure.subplots(max(1, len(stages)), 4, squeeze=False), strict=False):
        steps = [point for point in points if point["stage"] == stage]
        measured = [row for row in rows if row["stage"] == "eval" and row["of"] == stage]
        last = max(row["step"] for row in steps + measured)
        _success(axes[0], measured, steps)
        for ax, (title, lines) in zip(axes[1:], PANELS[stage].items(), strict=True):
            for name, key in lines.items():
                known = [point for point in steps if point[key] is not None]
                if not known and len(lines) > 1:
                    continue
                ax.plot([point["step"] for point in known], [point[key] for point in known], label=name,
                        marker="o" if len(known) == 1 else None)
            top = ax.get_ylim()[1]
            ax.set(title=title, ylim=(-0.02 * top, 1.04 * top))  # none is below 0
        for ax in axes:
            ax.grid(alpha=0.3)
            ax.set_xlabel(f"{stage} step")
            ax.xaxis.get_major_locator().set_params(integer=True)
            ax.set_xlim(-0.04 * last, 1.04 * last)  # one for all of a stage, however many points there are
            if labels := ax.get_legend_handles_labels()[1]:
                ax.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16),  # below
                          ncols=1 if len(labels) < 5 else 3)
    figure.savefig(path, format="png", dpi=110)


def _success(ax, measured: list[dict], steps: list[dict]) -> None:
    """Held-out success by temperature with its interval, by level, and the training reward behind it."""
    if steps and "reward" in steps[0]:
        ax.plot([row["step"] for row in steps], [row["reward"] for row in steps], color="0.7", label="training reward",
                marker="o" if len(steps) == 1 else None)
    for temperature in sorted({row["temperature"] for row in measured}, reverse=True):
        own = [row for row in measured if row["temperature"] == temperature]
        x, y = [row["step"] for row in own], [row["success"] for row in own]
        bars = [[abs(row["success"] - row["interval"][i]) for row in own] for i in (0, 1)]
        ax.errorbar(x, y, bars, marker="o", capsize=3, label=f"held-out, temperature {temperature:g}")
    heat = max((row["temperature"] for row in measured), default=0)
    own = [row for row in measured if row["temperature"] == heat]  # of greedy sampling too: too many lines
    levels = sorted({level for row in own for level in row["levels"]})
    for level in levels if len(levels) > 1 else ():
        ax.plot([row["step"] for row in own], [row["levels"].get(level, {}).get("success") for row in own],
                linewidth=0.8, linestyle="--", label=level)
    ax.set(title="success", ylim=(-0.02, 1.02))
