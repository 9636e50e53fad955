"""What a model is told and how its reply is read: the system prompt, the task as text, and the <answer> block.

Every model gets the same two messages; they describe the world and the task and contain no solved example.
"""

import json

from stl.formula import decimal
from stl.monitor import Verdict, check, malformed, shape_problem
from stl.world import Rect, Task

MAX_ANSWER_CHARS = 200_000

WORLD = """\
You plan the motion of a robot so that its path satisfies a specification in signal temporal logic.

World. Lengths are in metres, times in seconds, speeds in metres per second. The robot's body is a square that \
moves without turning; its position (x, y) is the square's centre, and r, the half-width, is the distance from the \
centre to each side. The body must stay inside the workspace and must not overlap any obstacle. Touching is \
allowed. Obstacles, regions and the workspace are rectangles [xmin, ymin, xmax, ymax] with sides along the axes. \
Regions do not block the robot; only formulas speak about them.

Path. A path is a list of waypoints [t, x, y]. The first one is [0, x, y] at the start position, and times never \
decrease. Between two waypoints the robot moves in a straight line at constant speed, at most v_max; to wait, repeat \
a position with a later time. After the last waypoint the robot stays where it is for ever.

Formulas. Every formula must hold at time 0. Windows [a,b] are counted from the moment at which their formula is \
evaluated, and both ends are included.
- in(R): the whole body is inside region R, so xmin + r <= x <= xmax - r, and likewise for y.
- out(R): the body does not overlap region R; touching its edge counts as out. A body partly inside R is \
neither in nor out.
- p & q: both hold. p | q: at least one holds.
- F[a,b] p: p holds at some moment of the window. F[5,20] in(A): be inside A at some time from 5 to 20.
- G[a,b] p: p holds during the whole window. G[0,30] out(B): keep out of B until time 30.
- p U[a,b] q: q holds at some moment of the window, and p holds all the time from now up to and including that \
moment. out(D) U[0,60] in(K): reach K by time 60, and keep out of D until then.
Operators nest: F[10,40] G[0,5] in(A) asks for 5 seconds without a break inside A that begin between 10 and 40.

Any path is right that avoids collisions, respects v_max and satisfies every formula; it need not be the shortest.
"""

ANSWER = """\
Answer. End with the complete list of waypoints as JSON between <answer> and </answer>: [[t, x, y], ...] with plain \
numbers only. If there are several such blocks, the last one of your final message counts."""

WITH_TOOLS = """\
Tools. plan_path gives the shortest collision-free way from a point to a region or a point, at full speed from \
t_start on; it keeps clear of obstacles by itself, goes through regions unless they are listed in avoid, and can wait \
at the goal until hold_until. check_path runs the exact checker on a list of waypoints and tells what fails and why. \
Each call uses up part of a limited budget, so call with a purpose. A good way to work: decide the order of the \
visits and their times from the formulas; build the path leg by leg, each leg starting where and when the last one \
ended; wait with a later t_start or with hold_until; join the lists of waypoints; verify with check_path; repair what \
fails; answer. A message without a tool call is taken as your final one.
"""

WITHOUT_TOOLS = """\
How to work. Reason about geometry first: keep the centre at least r away from every obstacle on each straight \
segment, and go round obstacles by way of points that are at least r away from their corners in x and in y. Then \
reason about timing: a segment of length d takes at least d / v_max seconds, and waits must fit the windows. \
Then answer.
"""


def system_prompt(tools: bool = True) -> str:
    """The system message: world, path, formulas, how to work (with the two tools or without) and how to answer."""
    return "\n".join([WORLD, WITH_TOOLS if tools else WITHOUT_TOOLS, ANSWER])


def user_prompt(task: Task) -> str:
    """The user message: every number of the task and its numbered formulas; never the witness."""
    space, robot = task.workspace, task.robot
    lines = [
        f"Workspace: {_rect(space)}",
        f"Robot: half-width r = {decimal(robot.half_width)}, v_max = {decimal(robot.v_max)}, "
        f"start = [{decimal(robot.start[0])}, {decimal(robot.start[1])}]",
    ]
    for title, named in (("Obstacles", task.obstacles), ("Regions", task.regions)):
        lines += ["", f"{title}:"] + ([f"- {name}: {_rect(rect)}" for name, rect in named.items()] or ["- none"])
    formulas = [f"{i}. {text}" for i, text in enumerate(task.spec, 1)] or ["none: any safe path will do"]
    return "\n".join(lines + ["", "Formulas:", *formulas])


def answer_block(text: str) -> str | None:
    """What stands in the last complete <answer>...</answer> block of a message; None if it has none."""
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    return None if start < 0 else text[start + len("<answer>") : text.find("</answer>", start)]


def read_answer(text: str | None) -> tuple[list[list[float]] | None, str | None]:
    """The waypoints [[t, x, y], ...] of the last complete <answer> block, or None and one line on what is wrong.

    Reads text from a model, so it never raises: JSON only, bounded in size and depth, finite numbers only.
    """
    block = answer_block(text if isinstance(text, str) else "")
    if block is None:
        return None, "there is no <answer>...</answer> block"
    if len(block) > MAX_ANSWER_CHARS:
        return None, f"the answer has {len(block)} characters; at most {MAX_ANSWER_CHARS} are read"
    try:
        # Integers as floats: 10**400 becomes infinite and is refused below, like NaN and 1e999.
        waypoints = json.loads(block, parse_int=float)
    except (ValueError, RecursionError):
        return None, "the answer is not valid JSON; write waypoints as [[t, x, y], ...]"
    problem = shape_problem(waypoints)
    return (None, problem) if problem else (waypoints, None)


def grade(task: Task, text: str | None) -> Verdict:
    """The exact verdict on the answer in `text`; a missing or malformed answer fails with a "format" violation."""
    waypoints, problem = read_answer(text)
    return malformed(problem) if problem else check(task, waypoints)


def _rect(rect: Rect) -> str:
    return "[" + ", ".join(decimal(v) for v in rect) + "]"

