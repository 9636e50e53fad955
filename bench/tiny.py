"""The small run measured: held-out success after imitation, after GRPO, for a control, and with the tools taken away.

    python bench/tiny.py                    three seeds, half an hour a seed on one core; resumes if killed
    python bench/tiny.py --seeds 0 --tasks 512 --out bench-tiny

Each seed trains the small run and its control, which spends the seconds that GRPO took on more imitation; some also
run without tools: imitation of as many tokens of the teacher's bare answers, and as many GRPO steps. Success is
measured on `--tasks` fresh tasks (the split "bench"), greedily and at temperature 1. The figures go to OUT/result.json,
a table to the terminal, the learning curves with and without tools to OUT/tools-SEED.png.
"""
import argparse
import json
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl import report
from rl.config import Config, load_config, replace
from rl.policy import load_policy, make_policy
from rl.run import latest_checkpoint, read_rows, write_file
from stl.levels import make_task
from train import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny.py")
    parser.add_argument("--seeds", default="0,1,2", help="comma list")
    parser.add_argument("--without-tools", default="0", help="comma list of the seeds that are also run without tools")
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--out", default="bench-tiny", help="folder of runs and results")
    args, overrides = parser.parse_known_args()
    base = load_config(args.config, overrides)
    out = Path(args.out).absolute()
    out.mkdir(exist_ok=True)
    os.chdir(out)  # runs/ and data/ come to lie here
    results = {}
    for seed in args.seeds.split(","):
        file = out / f"seed-{seed}.json"
        if not file.exists():
            result = with_tools(base, int(seed), args.tasks)
            if seed in args.without_tools.split(","):
                result |= without_tools(base, int(seed), args.tasks, result["sft_tokens"])
            write_file(file, json.dumps(result, indent=1).encode())
        results[seed] = json.loads(file.read_text())
    write_file(out / "result.json", json.dumps(results, indent=1).encode())
    print(table(results))
    for seed in args.without_tools.split(","):
        draw(base, seed, out / f"tools-{seed}.png")


def with_tools(base: Config, seed: int, n_tasks: int) -> dict:
    """Train the small run and its control, and measure them."""
    main_run = replace(base, seed=seed, name=f"seed{seed}")
    folder = go(main_run)
    imitation, grpo = read_rows(folder, "sft"), read_rows(folder, "grpo")
    result = {"sft_steps": len(imitation), "sft_tokens": sum(row["read"] for row in imitation),
              "sft_seconds": seconds(imitation), "grpo_seconds": seconds(grpo)}
    result["imitation"], result["grpo"] = measure(folder, "sft", n_tasks), measure(folder, "grpo", n_tasks)

    # The control goes on imitating from the same checkpoint for as many seconds, with a rate that falls to zero
    extra = round(seconds(grpo) * len(imitation) / seconds(imitation))
    total = len(imitation) + extra
    control = replace(main_run, name=f"seed{seed}-control", sft_steps=total, sft_decay=extra / total, sft_stop=1.0,
                      sft_eval_every=0, steps=0)
    copy_checkpoint(folder, Path("runs") / control.name)
    result["control_steps"], result["control"] = total, measure(go(control), "sft", n_tasks)
    return result


def without_tools(base: Config, seed: int, n_tasks: int, tokens: int) -> dict:
    """Train and measure the run without tools: as many tokens of (shorter) demonstrations, as many GRPO steps."""
    config = replace(base, seed=seed, name=f"seed{seed}-notools", tools=False, sft_stop=1.0, sft_eval_every=0)
    steps = round(tokens / tokens_a_step(config))
    folder = go(replace(config, sft_steps=steps))
    return {"notools_steps": steps, "notools_imitation": measure(folder, "sft", n_tasks),
            "notools_grpo": measure(folder, "grpo", n_tasks)}


def go(config: Config) -> Path:
    """Train (or finish training) a run; its folder."""
    print(f"--- {config.name}", flush=True)
    train(config)
    return Path("runs") / config.name


def copy_checkpoint(folder: Path, target: Path) -> None:
    """Begin a run folder with the last supervised checkpoint of another."""
    last = latest_checkpoint(folder, "sft")
    if not target.exists():
        shutil.copytree(last.folder, target / "checkpoints" / last.folder.name)


def seconds(rows: list[dict]) -> float:
    return sum(sum(row["time"].values()) for row in rows)


def tokens_a_step(config: Config) -> float:
    """Mean tokens of a batch of demonstrations."""
    from rl.lessons import encode
    from rl.tasks import demonstrations

    policy = make_policy(config)
    lengths = [len(encode(policy, d).ids) for d in demonstrations(config, config.sft_tasks)[:500]]
    return config.sft_batch * sum(lengths) / len(lengths)


def measure(folder: Path, stage: str, n_tasks: int) -> dict:
    """Success of a run's last checkpoint of a stage on fresh tasks: {"1": {...}, "0": {...}} by temperature."""
    checkpoint = latest_checkpoint(folder, stage)
    policy = load_policy(folder, stage=stage)
    level = next(iter(policy.config.mix))
    tasks = [make_task(level, "bench", index) for index in range(n_tasks)]
    found = {}
    for temperature in (1.0, 0.0):
        summary = report.summarize(policy.play(tasks, 1, ("bench",), temperature))
        found[f"{temperature:g}"] = {key: summary[key] for key in ("success", "interval", "failures", "endings")}
        print(f"{folder.name} {stage} {checkpoint.step}, T={temperature:g}: {summary['success']:.3f}", flush=True)
    return found


def table(results: dict) -> str:
    """Rows: what was measured; columns: each seed, at temperature 1 and greedily."""
    names = {"imitation": "after imitation", "grpo": "after GRPO", "control": "control: more imitation",
             "notools_imitation": "no tools, imitation", "notools_grpo": "no tools, GRPO",
             "sft_steps": "imitation steps", "control_steps": "control's imitation steps",
             "notools_steps": "imitation steps without tools",
             "sft_seconds": "seconds of imitation", "grpo_seconds": "seconds of GRPO"}
    lines = [f"{'success (temperature 1 / greedy)':34}" + "".join(f"{'seed ' + seed:>16}" for seed in results)]
    for key, name in names.items():
        cells = (cell(result.get(key)) for result in results.values())
        lines.append(f"{name:34}" + "".join(f"{text:>16}" for text in cells))
    return "\n".join(lines)


def cell(value: dict | float | None) -> str:
    if isinstance(value, dict):
        return f"{value['1']['success']:.3f} / {value['0']['success']:.3f}"
    return "-" if value is None else f"{value:.0f}"


def draw(config: Config, seed: str, path: Path) -> None:
    """Training reward over GRPO steps, with and without tools."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, label in ((f"seed{seed}", "with tools"), (f"seed{seed}-notools", "without tools")):
        rows = read_rows(Path("runs") / name, "grpo")
        axes.plot([row["step"] for row in rows], [row["reward"] for row in rows], label=label)
    axes.set(xlabel="GRPO step", ylabel="mean reward of a step's episodes", ylim=(-0.03, 1),
             title=f"level {', '.join(config.mix)}, equal budgets, seed {seed}")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
