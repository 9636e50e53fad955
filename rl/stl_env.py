"""The STL world under the names that rl/env.py asks for, and its words in the compact format."""
import json
import re

from rl.chat import ChatError, flat, number, rows
from stl import formula
from stl.expert import demonstrate
from stl.levels import LEVELS, make_task
from stl.prompts import grade, system_prompt, user_prompt
from stl.tools import TOOLS, call_tool
from stl.world import Task

__all__ = ["LEVELS", "TOOLS", "WORDS", "Task", "call_tool", "demonstrate", "grade", "make_task", "system_prompt",
           "user_prompt", "compact_task", "compact_tool", "compact_assistant", "plain_assistant"]

WORDS = ["room", "r", "v_max", "start", "wall", "Plan", "avoid", "F", "G", "U", "&", "|", "in", "out", "plan_path",
         "check_path", "t_start", "goal_region", "goal_point", "hold_until", "waypoints", "ok", "error"]
WORDS += [chr(code) for code in range(ord("A"), ord("Z") + 1) if chr(code) not in "FGU"] + ["Goal"] + [
    f"{kind}{i}" for kind in ("Key", "Door") for i in range(1, 10)]
GOOD_NEWS = "Correct:"  # how check_path's answer begins where nothing fails


def prefix(tree) -> str:
    """A formula in prefix notation: F[0,5] (in(A) & out(B)) is `F 00.00 05.00 & in A out B`."""
    match tree:
        case formula.In(region):
            return f"in {region}"
        case formula.Out(region):
            return f"out {region}"
        case formula.F(a, b, arg) | formula.G(a, b, arg):
            return f"{type(tree).__name__} {number(a)} {number(b)} {prefix(arg)}"
        case formula.Until(a, b, left, right):
            return f"U {number(a)} {number(b)} {prefix(left)} {prefix(right)}"
        case formula.And(args) | formula.Or(args):
            sign = "&" if isinstance(tree, formula.And) else "|"
            return " ".join([sign] * (len(args) - 1) + [prefix(arg) for arg in args])
    raise AssertionError(tree)


def compact_task(task: Task) -> str:
    def rect(box):
        return " ".join(number(v) for v in (box.xmin, box.ymin, box.xmax, box.ymax))

    robot = task.robot
    words = [f"room {rect(task.workspace)} r {number(robot.half_width)} v_max {number(robot.v_max)}"]
    words += [f"wall {rect(box)}" for box in task.obstacles.values()]
    words += [f"{name} {rect(box)}" for name, box in task.regions.items()]
    words += [f"start {number(robot.start[0])} {number(robot.start[1])}"]
    return " ".join([*words, *(prefix(tree) for tree in task.formulas)])


def compact_tool(text: str) -> str:
    """Of a tool's answer the waypoints, just as the final answer needs them; else only whether it is good news."""
    found = re.search(r"^waypoints: (.*)$", text, re.MULTILINE)
    if not found:
        return "ok" if text.startswith(GOOD_NEWS) else "error"
    try:
        return " ".join(flat(json.loads(found[1])))
    except (ValueError, RecursionError):  # a number that has no word, or no JSON
        return "error"


def compact_assistant(text: str) -> str:
    """Of what is said the line "Plan: 12.0 B, 30.0 A, avoid C" and the answer."""
    said, *answers = text.split("<answer>")
    plan = re.search(r"Plan: .*", said)
    words = re.findall(r"[A-Za-z]\w*|\d+(?:\.\d+)?", plan[0]) if plan else []
    words = [number(float(word)) if word[0].isdigit() else word for word in words]
    if answers:
        try:
            words += ["<answer>", *flat(json.loads(answers[-1].partition("</answer>")[0])), "</answer>"]
        except (ValueError, RecursionError) as error:
            raise ChatError(f"the compact format cannot say an answer that is no waypoints ({error})") from None
    return " ".join(words)


def plain_assistant(words: str) -> str:
    """The words with the answer's waypoints as JSON, if they are waypoints."""
    def waypoints(found: re.Match) -> str:
        path = rows(found[1].split(), 3)
        return f"<answer>{json.dumps(path)}</answer>" if path else found[0]

    return re.sub("<answer>(.*?)</answer>", waypoints, words, count=1, flags=re.DOTALL)
