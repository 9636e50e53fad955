"""Measure a policy on held-out tasks: success by level with its interval, pass@k, why and how episodes ended.

    python eval.py                                      the newest run, on its own evaluation set
    python eval.py --policy expert --level L1 --tasks 50
    python eval.py --policy runs/tiny --samples 8 --temperature 1 --json result.json

Tasks are the first ones of the evaluation set of each level. All luck comes from the task and the sample's number, so
the same command gives the same result. Look at a single one with sample.py --level L --seed N.
"""
import json
import sys
from pathlib import Path

from tqdm import tqdm

from rl import cli
from rl.episode import Episode
from rl.report import failure, summarize, table
from rl.tasks import held_out
from stl.levels import EVAL_COUNTS

TASKS = 50  # of a level for which nothing else is said


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser("eval.py", __doc__)
    parser.add_argument("--policy", metavar="P", help=cli.POLICY_HELP)
    parser.add_argument("--level", metavar="L", action="append", help="L0 to L8; repeated, or as L0,L1 (default: "
                        "the run's own evaluation set; for expert, naive and search, L1 to L8)")
    parser.add_argument("--tasks", type=cli.natural(1), metavar="N", help="tasks a level (default: the whole set)")
    parser.add_argument("--samples", type=cli.natural(1), default=1, metavar="K", help="of each task (default 1)")
    parser.add_argument("--temperature", type=cli.temperature, metavar="T", help="of sampling (default: the run's own)")
    parser.add_argument("--json", metavar="FILE", help="write the figures and each episode's outcome into this file")
    args = parser.parse_args(argv)
    return cli.run_script("eval.py", lambda: measure(args))


def measure(args) -> None:
    """Play the held-out set; print the table; write the file."""
    name = args.policy or cli.default_policy()
    world = cli.open_world(name)
    levels = [cli.check_level(level.strip(), world) for levels in args.level or () for level in levels.split(",")]
    cli.check_target("--json", args.json)
    policy = cli.open_policy(name)
    known = policy.config.eval_mix if policy.config else EVAL_COUNTS
    mix = {level: args.tasks or known.get(level) or EVAL_COUNTS.get(level, TASKS) for level in levels or known}
    tasks = held_out(mix, world.__name__)
    heat = args.temperature if args.temperature is not None or not policy.config else policy.config.temperature
    with tqdm(total=len(tasks) * args.samples, desc="episodes", unit="", leave=False) as bar:
        episodes = policy.play(tasks, args.samples, ("eval",), heat, progress=lambda episode: bar.update())
    summary = summarize(episodes)
    print(f"policy {name}" + (f", temperature {heat:g}" if policy.config else ""))
    print(table(summary))
    if args.json:
        content = {"policy": name, "temperature": heat, "samples": args.samples, **summary,
                   "outcomes": [outcome(episode) for episode in episodes]}
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def outcome(episode: Episode) -> dict:
    return {"task": episode.task.id, "sample": episode.sample, "reward": episode.reward, "ending": episode.ending,
            "failure": failure(episode), "turns": episode.turns, "tokens": episode.sampled}


if __name__ == "__main__":
    sys.exit(main())
