"""Reports from episodes and metrics: success by level with its interval, pass@k, failures, endings, learning curves."""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rl.episode import TRUNCATED, Episode

Z95 = 1.959964  # of the normal distribution: 95% lie within so many standard deviations
FAILURES = {
    "collision": "through an obstacle", "speed": "too fast", "workspace": "out of the workspace",
    "clause": "a formula fails", "format": "malformed answer", "missing": "no answer",
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

    {"tasks", "episodes", "successes", "success", "reward", "interval", "pass_at": {"1": ...}, "groups", "failures",
    "endings", "turns", "tokens", "levels": {"L0": {...}, ...}}

    Episodes of one `group` are samples of one task. The interval counts tasks, as samples of one task are not
    independent. "groups" counts tasks by outcome; "tokens" are those that the policy chose, a mean per episode.
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
    outcomes = Counter("succeed" if all(group) else "mixed" if any(group) else "fail" for group in groups.values())
    return {
        "tasks": len(groups), "episodes": n, "successes": successes, "success": successes / n,
        "reward": sum(e.reward for e in episodes) / n, "interval": list(wilson(successes / n, len(groups))),
        "pass_at": {str(k): sum(pass_at(k, len(g), sum(g)) for g in groups.values()) / len(groups) for k in ks},
        "groups": {outcome: outcomes[outcome] for outcome in ("fail", "mixed", "succeed")},
        "failures": dict(Counter(filter(None, map(failure, episodes))).most_common()),
        "endings": dict(Counter(e.ending for e in episodes).most_common()),
        "turns": sum(e.turns for e in episodes) / n, "tokens": sum(e.sampled for e in episodes) / n,
    }


def table(summary: dict) -> str:
    """The summary as text: a row per level, then why and how episodes ended."""
    ks = [k for k in summary["pass_at"] if k != "1"]
    rows = [["level", "tasks", "episodes", "solved", "success", "95% interval", *(f"pass@{k}" for k in ks),
             "turns", "tokens"]]
    for level, f in [*summary["levels"].items(), ("all", summary)]:
        low, high = f["interval"]
        rows.append([level, str(f["tasks"]), str(f["episodes"]), str(f["successes"]), f"{f['success']:.2f}",
                     f"{low:.2f}-{high:.2f}", *(f"{f['pass_at'][k]:.2f}" for k in ks), f"{f['turns']:.1f}",
                     f"{f['tokens']:.0f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    failures = {FAILURES.get(kind, kind): count for kind, count in summary["failures"].items()}
    return "\n".join([*lines, "", f"why they failed (first problem): {_shares(failures, summary['episodes'])}",
                      f"how they ended: {_shares(summary['endings'], summary['episodes'])}"])


def _shares(counts: dict[str, int], n: int) -> str:
    return ", ".join(f"{name} {count} ({count / n:.0%})" for name, count in counts.items()) or "none"


def curves(rows: list[dict], path: str | Path) -> None:
    """Draw the learning curves of a run's metrics into a PNG: a row of panels for each stage that has run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    stages = [stage for stage in ("sft", "grpo") if any(row["stage"] == stage for row in rows)]
    figure = Figure(figsize=(13, 3.2 * max(1, len(stages))), layout="constrained")
    FigureCanvasAgg(figure)
    for stage, axes in zip(stages, figure.subplots(max(1, len(stages)), 4, squeeze=False), strict=False):
        steps = [row for row in rows if row["stage"] == stage]
        _success(axes[0], [row for row in rows if row["stage"] == "eval" and row["of"] == stage], steps)
        panels = SFT_PANELS if stage == "sft" else GRPO_PANELS
        for ax, (title, lines) in zip(axes[1:], panels.items(), strict=True):
            for name, value in lines.items():
                known = [row for row in steps if value(row) is not None]
                ax.plot([row["step"] for row in known], [value(row) for row in known], label=name)
            ax.set(title=title, xlabel=f"{stage} step")
            ax.legend(frameon=False)
        for ax in axes:
            ax.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=110)


def _success(ax, measured: list[dict], steps: list[dict]) -> None:
    """Held-out success by temperature with its interval, by level, and the training reward behind it."""
    if steps and "reward" in steps[0]:
        ax.plot([row["step"] for row in steps], [row["reward"] for row in steps], color="0.7", label="training reward")
    for temperature in sorted({row["temperature"] for row in measured}, reverse=True):
        own = [row for row in measured if row["temperature"] == temperature]
        x, y = [row["step"] for row in own], [row["success"] for row in own]
        bars = [[abs(row["success"] - row["interval"][i]) for row in own] for i in (0, 1)]
        ax.errorbar(x, y, bars, marker="o", capsize=3, label=f"held-out, temperature {temperature:g}")
        levels = sorted({level for row in own for level in row["levels"]})
        for level in levels if len(levels) > 1 else ():
            ax.plot(x, [row["levels"].get(level, {}).get("success") for row in own], linewidth=0.8,
                    linestyle="--" if temperature else ":", label=level)
    ax.set(title="success", xlabel="step", ylim=(-0.02, 1.02))
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize="small")


def _learner(key: str):
    """The mean of a learner's figure over the optimizer batches of a step that have it; None if none has."""
    def value(row: dict) -> float | None:
        found = [stats[key] for stats in row["learner"] if key in stats]
        return sum(found) / len(found) if found else None
    return value


SFT_PANELS = {
    "loss": {"nats a token": lambda row: row["loss"]},
    "entropy": {"nats a token": lambda row: row["entropy"]},
    "gradient norm": {"before clipping": lambda row: row["grad_norm"]},
}
GRPO_PANELS = {
    "entropy": {"nats a sampled token": _learner("entropy")},
    "length": {"sampled tokens an episode": lambda row: row["tokens"]},
    "share of episodes": {
        "no answer": lambda row: 1 - row["endings"].get("answer", 0) / row["episodes"],
        "truncated": lambda row: sum(row["endings"].get(name, 0) for name in TRUNCATED) / row["episodes"],
    },
}
