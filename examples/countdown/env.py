"""Countdown: reach a target from given numbers, each used exactly once, by + - * /. A task world as rl/env.py asks."""
import ast
import json
import operator
import re
import zlib
from dataclasses import asdict, dataclass
from fractions import Fraction
from random import Random

from stl.monitor import Verdict, Violation

LEVELS = ("N2", "N3", "N4")  # how many numbers there are
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
HELP = "write whole numbers, + - * / and parentheses, at most 200 characters"
TOOLS = [{"type": "function", "function": {
    "name": "calculate", "description": f"The value of an expression, and how it compares: {HELP}.", "parameters": {
        "type": "object", "required": ["expression"], "properties": {"expression": {"type": "string"}}}}}]


@dataclass
class Task:
    id: str
    level: str
    numbers: list[int]
    target: int
    solution: str  # one of them, for the teacher
    to_json = asdict
    from_json = classmethod(lambda cls, data: cls(**data))


def make_task(level: str, split: str, index: int) -> Task:
    """Drawn from a solution. One puzzle in eight, by its hash, belongs to the split "eval" alone."""
    rng = Random(f"{level}-{split}-{index}")
    while True:
        numbers = [rng.randint(1, 12) for _ in range(int(level[1:]))]
        solution = guess(numbers, rng)
        target, used = evaluate(solution)
        held_out = zlib.crc32(f"{used} {target}".encode()) % 8 == 0
        if 1 <= target <= 99 and held_out == (split == "eval"):
            return Task(f"{level}-{split}-{index}", level, numbers, int(target), solution)


def guess(numbers: list[int], rng: Random) -> str:
    """A random expression of all numbers, such as ( 3 + 7 ) * 5."""
    text, *others = map(str, rng.sample(numbers, len(numbers)))
    for i, number in enumerate(others):
        text = f"{f'( {text} )' if i else text} {rng.choice('+-*')} {number}"
    return text


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression, and its numbers in order of size. ValueError with HELP for any other text."""
    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        return OPERATORS[type(node.op)](value(node.left), value(node.right))

    if len(text) > 200 or not re.fullmatch(r"[\d\s()*/+-]+", text, re.ASCII):
        raise ValueError(HELP)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return value(tree), sorted(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    except ZeroDivisionError:
        raise ValueError("it divides by zero") from None
    except (SyntaxError, AttributeError, KeyError, TypeError, RecursionError, MemoryError):
        raise ValueError(HELP) from None


def system_prompt(tools: bool = True) -> str:
    how = "The tool calculate gives the value of an expression; try until one is right. " if tools else ""
    return ("Find an arithmetic expression of the given numbers, each used exactly once, whose value is the target. "
            f"Allowed are + - * / and parentheses. {how}End with <answer> expression </answer>.")


def user_prompt(task: Task) -> str:
    return f"Numbers: {', '.join(map(str, task.numbers))}. Target: {task.target}."


def call_tool(task: Task, name: str, arguments: dict, manner: str = "strict") -> str:
    """"EXPRESSION = VALUE, right" (or too low, too high), or "Error: ..."; never raises."""
    text = arguments.get("expression")
    if name != "calculate" or not isinstance(text, str):
        return "Error: the only tool is calculate, and its argument is expression, a text."
    try:
        above = (value := evaluate(text)[0]) - task.target
        return f"{text} = {value}, {'too high' if above > 0 else 'too low' if above < 0 else 'right'}"
    except ValueError as error:
        return f"Error: {error}."


def grade(task: Task, text: str) -> Verdict:
    """The verdict on the last answer in `text`."""
    kind, reason = "wrong value", ""
    try:
        value, used = evaluate((re.findall(r"<answer>([^<]*)</answer>", text) or [""])[-1])
        if used != sorted(task.numbers):
            kind, reason = "other numbers", f"the answer uses {used}, not {sorted(task.numbers)}"
        elif value != task.target:
            reason = f"the answer's value is {value}, not {task.target}"
    except ValueError as error:
        kind, reason = "format", f"the answer cannot be read: {error}"
    return Verdict(not reason, None, [Violation(kind, reason)] if reason else [], reason or "right")


def demonstrate(task: Task, rng, noise: float, tools: bool = True, explain: str = "plan") -> list[dict]:
    """Up to five different wrong guesses, each seen to be wrong by the tool, then the solution. A hasty teacher: with
    probability `noise` each, a wrong guess is the answer."""
    draw, messages = Random(int(rng.integers(2**32))), []
    guesses = {evaluate(text)[0]: text for text in (guess(task.numbers, draw) for _ in range(draw.randint(0, 5)))}
    guesses.pop(task.target, None)
    for text in [*guesses.values(), task.solution] if tools else [task.solution]:
        function = {"name": "calculate", "arguments": json.dumps({"expression": text})}
        call = {"type": "function", "id": "call_0", "function": function}
        answer = call_tool(task, "calculate", {"expression": text})
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]},
                     {"role": "tool", "tool_call_id": "call_0", "content": answer}]
        if draw.random() < noise:
            break
    return [*messages[:None if tools else 0], {"role": "assistant", "content": f"<answer> {text} </answer>"}]


# The compact format of a model from scratch: every text above already is words with spaces between them
WORDS = ["numbers", "target", "calculate", "expression", "right", "low", "high", "error", *"+-*/()"]
WORDS += map(str, range(100))


def compact_task(task: Task) -> str:
    return f"numbers {' '.join(map(str, task.numbers))} target {task.target}"


def compact_tool(text: str) -> str:
    return next((word for word in ("right", "low", "high") if text.endswith(word)), "error")


compact_assistant = plain_assistant = str
