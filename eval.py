"""Measure a policy on held-out tasks: success by level with its interval, pass@k, why and how episodes ended.

    python eval.py                                      the newest run, on its own evaluation set
    python eval.py --policy expert --level L1 --tasks 50
    python eval.py --policy runs/tiny --samples 8 --temperature 1 --json result.json --html result.html
    python eval.py --model Qwen/Qwen3.5-9B --tools off --samples 8 --level L1,L8 --tasks 20       before any training
    python eval.py --model FOLDER --adapter runs/l8 --sampler torch --max_tokens=16384 --thinking=true
    python eval.py --policy api --teacher_model=NAME --teacher_url=URL      a teacher, with the bill; see rl/teacher.py
    python eval.py --report runs/tiny runs/tiny-2       what their logs tell, side by side; measures nothing
    python eval.py --report runs/tiny --steps 1-5 --html tiny.html

Tasks are the first ones of the evaluation set of each level. All luck comes from the task and the sample's number, so
the same command gives the same result. Look at a single one with sample.py --level L --seed N. With several samples a
task the ladder is printed too: of how many tasks all samples fail, some succeed, all succeed. GRPO learns from the
mixed ones alone, so measure it before a run.
"""
import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from rl import cli, page, report
from rl.episode import Episode
from rl.report import failure, summarize, table
from rl.run import write_json
from rl.tasks import held_out
from stl.levels import EVAL_COUNTS

TASKS = 50  # of a level for which nothing else is said


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser("eval.py", __doc__)
    parser.add_argument("--policy", metavar="P", help=cli.POLICY_HELP)
    parser.add_argument("--model", metavar="M", help="in place of --policy: a model folder, or a name on the Hugging "
                        "Face hub; any setting of rl/config.py can be changed by --KEY=VALUE")
    parser.add_argument("--adapter", metavar="DIR", help="on --model: a LoRA in PEFT's format, or a run folder")
    parser.add_argument("--tools", choices=("on", "off"), help="change that of a model or run")
    parser.add_argument("--sampler", choices=("torch", "vllm"), help="for --model: vllm where it runs, else torch; for "
                        "a run: its own")
    parser.add_argument("--level", metavar="L", action="append", help="L0 to L8; repeated, or as L0,L1 (default: "
                        "the run's own evaluation set; for expert, naive and search, L1 to L8)")
    parser.add_argument("--tasks", type=cli.natural(1), metavar="N", help="tasks a level (default: the whole set)")
    parser.add_argument("--samples", type=cli.natural(1), default=1, metavar="K", help="of each task (default 1)")
    parser.add_argument("--temperature", type=cli.temperature, metavar="T", help="of sampling (default: the run's own)")
    parser.add_argument("--json", metavar="FILE", help="write the figures and each episode's outcome into this file")
    parser.add_argument("--report", metavar="RUN", nargs="+", help="run folders, or files that --json wrote")
    parser.add_argument("--steps", type=span, metavar="A-B", help="with --report: these steps only (default: all)")
    parser.add_argument("--html", metavar="FILE", help="write one page with curves, tables and an episode browser")
    args = parser.parse(argv)
    if args.model and args.policy or args.adapter and not args.model:
        parser.error("--model M [--adapter DIR] stands in place of --policy")
    if args.report and (args.policy or args.model or args.tasks or args.samples != 1 or args.temperature is not None):
        parser.error("--report measures nothing: leave --policy, --tasks, --samples and --temperature out")
    if args.steps and not args.report:
        parser.error("--steps is for --report")
    return cli.run_script("eval.py", lambda: (compare if args.report else measure)(args))


def span(text: str) -> tuple[int, int]:
    """For argparse: A-B, or one number."""
    first, dash, last = text.partition("-")
    found = cli.natural(1)(first), cli.natural(1)(last if dash else first)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: the first step comes first, as in 1-5")
    return found


def compare(args) -> None:
    """Print the reports of runs side by side; write the files."""
    cli.check_target("--json", args.json)
    cli.check_target("--html", args.html)
    names = list(dict.fromkeys(args.report))
    levels = wanted_levels(args, cli.open_world(names[0]))
    steps = args.steps or (1, None)
    reports = [report.load(name, *steps, levels) for name in names]
    print(report.side_by_side(reports))
    if args.json:
        write_json(Path(args.json), {"reports": reports})
    if args.html:
        runs = [name for name in names if Path(name).is_dir()]
        groups, chats = page.of_runs(runs, *steps, levels)
        write_page(args.html, reports, groups, chats)


def write_page(file: str, reports: list[dict], groups, chats: dict) -> None:
    written = page.write(file, reports, groups, chats)
    shown, made = written["episodes"], [report["training"]["episodes"] for report in reports if report["training"]]
    words = f"{shown} episodes" if max(made, default=0) <= page.MOST // len(reports) else (
        f"{shown} of {sum(made)} episodes, of evenly chosen steps (--steps A-B shows others)")
    print(f"{file}: {words}, {written['bytes'] / 1e6:.1f} MB; open it in a browser")


def wanted_levels(args, world) -> list[str]:
    return [cli.check_level(name.strip(), world) for names in args.level or () for name in names.split(",")]


def measure(args) -> None:
    """Play the held-out set; print the table; write the file."""
    name = args.model or args.policy or cli.default_policy()
    world = cli.open_world(name)
    levels = wanted_levels(args, world)
    cli.check_target("--json", args.json)
    cli.check_target("--html", args.html)
    policy = cli.open_model(args) if args.model else cli.open_policy(
        name, cli.teacher_settings(args), **cli.model_changes(args))
    cli.warn_of_expert(args.model or args.policy, name)
    known = policy.config.eval_mix if policy.config else EVAL_COUNTS
    mix = {level: args.tasks or known.get(level) or EVAL_COUNTS.get(level, TASKS) for level in levels or known}
    tasks = held_out(mix, world.__name__)
    if hasattr(policy, "chat"):
        from rl.policy import check_prompts  # brings torch, which scripted policies do without

        check_prompts(policy.config, policy.chat, tasks)
    temperature = policy.config.temperature if policy.config and args.temperature is None else args.temperature
    with tqdm(total=len(tasks) * args.samples, desc="episodes", unit="", leave=False) as bar:
        episodes = policy.play(tasks, args.samples, ("eval",), temperature, progress=lambda episode: bar.update())
    summary = summarize(episodes)
    with_tools = "with" if policy.config and policy.config.tools else "without"
    print(f"policy {name}" + (f" and {args.adapter}" if args.adapter else "") + (
        f", temperature {temperature:g}, {with_tools} tools" if policy.config else ""))
    print(table(summary))
    text, bill = policy.bill(episodes) if name == cli.API else ("", None)
    if bill:
        print(f"\n{text}")
    if args.json:
        settings = {"adapter": args.adapter, "tools": policy.config.tools} if policy.config else {}
        settings |= {"model": policy.config.teacher_model, "bill": bill} if bill else {}
        content = {"policy": name, "temperature": temperature, "samples": args.samples, **settings, **summary,
                   "outcomes": [outcome(episode) for episode in episodes]}
        write_json(Path(args.json), content)
    if args.html:
        row = {"stage": "eval", "of": name, "step": None, "temperature": temperature} | summary
        write_page(args.html, [report.of_rows(name, [row])], page.eval_groups(name, episodes),
                   {name: policy.chat} if hasattr(policy, "chat") else {})


def outcome(episode: Episode) -> dict:
    return {"task": episode.task.id, "sample": episode.sample, "reward": episode.reward, "ending": episode.ending,
            "failure": failure(episode), "turns": episode.turns, "tokens": episode.sampled}


if __name__ == "__main__":
    sys.exit(main())
