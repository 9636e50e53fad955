"""The small run measured: held-out success after imitation, after GRPO, for a control, and with the tools taken away.

    python bench/tiny.py                    three seeds, half an hour a seed on one core; resumes if killed
    python bench/tiny.py --seeds 0 --tasks 512 --out bench-tiny

Each seed trains four times: the small run itself; the control, which spends the seconds that GRPO took on more
imitation; and, without tools, imitation of as many tokens of the expert's bare answers and as many GRPO steps. Success
is measured on `--tasks` fresh tasks (the split "bench") greedily and at temperature 1. The figures go to
OUT/result.json, a table to the terminal, and both learning curves of the first seed to OUT/tools.png.
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
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--out", default="bench-tiny", help="folder of runs and results")
    args, overrides = parser.parse_known_args()
    base = load_config(args.config, overrides)
    out = Path(args.out).absolute()
    out.mkdir(exist_ok=True)
    os.chdir(out)  # runs/ and data/ come to lie here
    results = {}
    for seed in map(int, args.seeds.split(",")):
        file = out / f"seed-{seed}.json"
        if not file.exists():
            write_file(file, json.dumps(one_seed(base, seed, args.tasks), indent=1).encode())
        results[seed] = json.loads(file.read_text())
    write_file(out / "result.json", json.dumps(results, indent=1).encode())
    print(table(results))
    draw(results, base, min(results), out / "tools.png")


def one_seed(base: Config, seed: int, n_tasks: int) -> dict:
    """Train the four runs of a seed and measure them."""
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

    # Without tools: demonstrations are shorter, so as many tokens are more steps
    bare = replace(main_run, name=f"seed{seed}-notools", tools=False, sft_stop=1.0, sft_eval_every=100, sft_eval_from=0)
    steps = round(result["sft_tokens"] / tokens_a_step(bare))
    folder = go(replace(bare, sft_steps=steps, sft_decay=0.0))
    result["notools_steps"] = steps
    result["notools_imitation"] = measure(folder, "sft", n_tasks)
    result["notools_grpo"] = measure(folder, "grpo", n_tasks)
    return result


def go(config: Config) -> Path:
    """Train (or finish training) a run; its folder."""
    print(f"--- {config.name}", flush=True)
    train(config)
    return Path("runs") / config.name


def copy_checkpoint(folder: Path, target: Path) -> None:
    """Begin a run folder with the last supervised checkpoint of another, as if its stage had not ended there."""
    last = latest_checkpoint(folder, "sft")
    copy = target / "checkpoints" / last.folder.name
    if not target.exists():
        shutil.copytree(last.folder, copy)
        (copy / "state.json").write_text(json.dumps(last.state | {"stopped": False}))


def seconds(rows: list[dict]) -> float:
    return sum(sum(row["time"].values()) for row in rows)


def tokens_a_step(config: Config) -> float:
    """Mean tokens of a batch of demonstrations."""
    from rl.tasks import demonstrations
    from train import encode

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
    """Rows: what was measured; columns: each seed at temperature 1 and greedily."""
    names = {"imitation": "after imitation", "grpo": "after GRPO", "control": "control: more imitation",
             "notools_imitation": "no tools, imitation", "notools_grpo": "no tools, GRPO"}
    lines = [f"{'success (temperature 1 / greedy)':32}" + "".join(f"{'seed ' + str(seed):>16}" for seed in results)]
    for key, name in names.items():
        cells = (f"{r[key]['1']['success']:.3f} / {r[key]['0']['success']:.3f}" for r in results.values())
        lines.append(f"{name:32}" + "".join(f"{cell:>16}" for cell in cells))
    for key in ("sft_steps", "control_steps", "notools_steps"):
        lines.append(f"{key:32}" + "".join(f"{r[key]:>16}" for r in results.values()))
    for key in ("sft_seconds", "grpo_seconds"):
        lines.append(f"{key:32}" + "".join(f"{r[key]:>16.0f}" for r in results.values()))
    return "\n".join(lines)


def draw(results: dict, config: Config, seed: int, path: Path) -> None:
    """Training reward over GRPO steps, with and without tools."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, label in ((f"seed{seed}", "with tools"), (f"seed{seed}-notools", "without tools")):
        rows = read_rows(Path("runs") / name, "grpo")
        axes.plot([row["step"] for row in rows], [row["reward"] for row in rows], label=label)
    axes.set(xlabel="GRPO step", ylabel="mean reward of a step's episodes", ylim=(0, 1),
             title=f"level {', '.join(config.mix)}, equal budgets, seed {seed}")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
