"""Plan one task and show everything: the conversation with its tool calls and their answers, the verdict, a picture.

    python sample.py                                    a task of the newest run's own level, by the newest run
    python sample.py --policy expert --level L1 --seed 3 --draw out.png
    python sample.py --policy runs/tiny --task docs/task.json --temperature 0
    python sample.py --policy search --task docs/task.json      can it be done? a path, or none found within 10 s
    python sample.py --collect data/distill.jsonl --policy api --tasks distill --teacher_model=NAME --teacher_url=URL

--level and --seed name a task of the evaluation set (its number there; beyond its end come fresh tasks), and what a
model says is what eval.py got for it. Without a run in runs/ the scripted expert plans.

--collect has many tasks solved and keeps the conversations to learn from, by the expert if no --policy is named; the
same command goes on where it was. rl/teacher.py says what is written, configs/sft.py what comes next.
"""
import json
import sys
from pathlib import Path

from rl import cli
from rl.cli import printable
from rl.env import STL
from rl.episode import Episode
from stl.monitor import check
from stl.prompts import read_answer
from stl.world import Task

COLOURS = {"assistant": "36", "tool": "33", "good": "32", "bad": "31", "dim": "2", "bold": "1"}


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser("sample.py", __doc__)
    parser.add_argument("--policy", metavar="P", help=cli.POLICY_HELP)
    parser.add_argument("--level", metavar="L", help="L0 to L8 (default: the run's own level, else L1)")
    parser.add_argument("--seed", type=cli.natural(0), default=0, metavar="N", help="number of the task (default 0)")
    parser.add_argument("--task", metavar="FILE", help="plan the task in this JSON file instead; docs/task.json is "
                        "one, stl/world.py says what may stand in it")
    parser.add_argument("--temperature", type=cli.temperature, metavar="T", help="of sampling (default: the run's own)")
    parser.add_argument("--draw", metavar="FILE", help="draw map and path into a .png, .svg or .gif")
    parser.add_argument("--collect", metavar="FILE", help="solve --tasks and keep the conversations in FILE (.jsonl)")
    parser.add_argument("--tasks", metavar="T", help="distill; or some of a split, such as sft:L0=3000,L1=5; or a file "
                        "with a task's JSON on each line")
    args = parser.parse(argv)
    return cli.run_script("sample.py", lambda: collect(args) if args.collect or args.tasks else plan(args))


def collect(args) -> None:
    """Fill the file of --collect."""
    from rl import teacher
    from rl.config import load_config
    from rl.tasks import named_tasks

    if not (args.collect and args.tasks):
        raise cli.UsageError("--collect and --tasks: one needs the other")
    if args.level or args.task or args.draw or args.temperature is not None:
        raise cli.UsageError("--level, --task, --draw, --temperature: are not for --collect; see --tasks and --config")
    if not args.collect.endswith(".jsonl"):
        raise cli.UsageError(f"--collect {args.collect}: the name must end in .jsonl")
    name, config, path = args.policy or "expert", load_config(args.config, args.overrides), Path(args.collect)
    cli.check_folder(f"--collect {args.collect}", path.parent)
    cli.check_target("--collect", args.collect)
    policy = cli.open_policy(name, config, path)
    if args.overrides and policy.config not in (None, config):
        raise cli.UsageError(f"{args.overrides[0]}: {name} keeps the settings that it was trained with")
    teacher.collect(policy, name, named_tasks(args.tasks), path, config)


def plan(args) -> None:
    """Choose task and policy, play the episode, print it and draw it."""
    cli.check_target("--draw", args.draw, (".png", ".svg", ".gif"))
    if args.task and args.level:
        raise cli.UsageError("--task and --level: give one of the two")
    name = args.policy or cli.default_policy()
    world = cli.open_world(name)
    if world.__name__ != STL and (args.task or args.draw):
        raise cli.UsageError(f"--task and --draw: are for the STL world only, and {name} was trained in another")
    level = args.level and cli.check_level(args.level, world)
    task = Task.from_file(args.task) if args.task else None
    policy = cli.open_policy(name, cli.teacher_settings(args))
    if task is None:
        level = level or (next(iter(policy.config.eval_mix)) if policy.config else "L1")
        task = world.make_task(level, "eval", args.seed)
    if isinstance(policy, cli.Scripted):
        policy.check(task)
    cli.warn_of_expert(args.policy, name)
    if world.__name__ == STL:
        warn_of_start(task)
    print(paint(f"task {printable(task.id)}, policy {name}", "bold"))
    print(printable(world.user_prompt(task)), flush=True)
    (episode,) = policy.play([task], 1, ("eval",), args.temperature)
    print_episode(episode)
    if args.draw:
        from stl.draw import draw

        draw(task, read_answer(episode.messages[-1]["content"])[0], args.draw)
        print(f"picture: {args.draw}")


def warn_of_start(task: Task) -> None:
    """Say so where no path can be right because the robot does not fit where it starts."""
    for violation in check(task, [[0.0, *task.robot.start]]).violations:
        if violation.kind in ("workspace", "collision"):
            print(f"warning: no path can be right, as the start fails: {printable(violation.text)}", file=sys.stderr)


def print_episode(episode: Episode) -> None:
    """The messages in order, then how it ended and why."""
    for message in episode.messages:
        if message["role"] in ("prompt", "system", "user"):  # the task, as this policy reads it
            continue
        print("\n" + paint(message["role"], message["role"]))
        if message.get("reasoning_content"):
            print(paint(indent(f"thinking: {message['reasoning_content']}"), "dim"))
        if message.get("content"):
            print(indent(message["content"]))
        for call in message.get("tool_calls", ()):
            function = call["function"]  # one that could not be read has its text
            print(paint(indent(call.get("text") or f"{function['name']}({arguments(function['arguments'])})"), "bold"))
    verdict = episode.verdict
    print("\n" + (paint("verdict: solved", "good") if episode.reward else paint("verdict: failed", "bad")))
    if episode.ending != "answer":
        print(f"  the episode ended without an answer to grade: {episode.ending}")
    elif verdict.clauses is not None:
        for holds, formula in zip(verdict.clauses, episode.task.spec, strict=True):
            print(f"  {paint('holds', 'good') if holds else paint('fails', 'bad')}  {formula}")
    for violation in verdict.violations if verdict and episode.ending == "answer" else ():
        print(indent(violation.text))


def arguments(text: str) -> str:
    """The JSON arguments of a call as key=value; what is not an object is shown as it is."""
    try:
        values = json.loads(text)
        return ", ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
    except (ValueError, AttributeError, RecursionError):
        return text


def indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in printable(text).split("\n"))


def paint(text: str, colour: str) -> str:
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m" if sys.stdout.isatty() and colour in COLOURS else text


if __name__ == "__main__":
    sys.exit(main())
