"""Chat formats: a task and a conversation as token ids, and sampled ids back as words and tool calls.

Two formats stand behind one interface. QwenChat speaks a pretrained model's own template, on the tokenizer of its
folder. CompactChat is a vocabulary of a few hundred words for the small model that is trained from scratch: the same
tasks, tools and grading with numbers in two tokens. In both, a conversation is only ever appended to:

    ids = chat.prompt(task); ids += sampled turn; ids += chat.tool_turn(answers); ids += sampled turn; ...
"""
import json
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from stl import formula
from stl.prompts import system_prompt, user_prompt
from stl.tools import TOOLS
from stl.world import Task

KINDS = {name: schema for tool in TOOLS for name, schema in tool["function"]["parameters"]["properties"].items()}


class ChatError(ValueError):
    """A task or a model folder that a chat format cannot express: the message says what and what would be right."""


@dataclass
class Call:
    """One tool call as the model wrote it; `error` says why it cannot be run (then arguments are empty)."""

    name: str
    arguments: dict = field(default_factory=dict)
    error: str | None = None


@dataclass
class Turn:
    """One assistant turn: its text (with the <answer> block, if any) and its tool calls in order."""

    content: str
    calls: list[Call]

    def message(self) -> dict:
        """The turn as a chat message in OpenAI's form."""
        functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in self.calls]
        calls = [{"type": "function", "id": f"call_{i}", "function": function} for i, function in enumerate(functions)]
        return {"role": "assistant", "content": self.content} | ({"tool_calls": calls} if calls else {})


def open_chat(config, folder: str | Path | None = None) -> "QwenChat | CompactChat":
    """The chat format that `config` names; QwenChat reads its tokenizer and template from the model `folder`."""
    if config.chat == "compact":
        return CompactChat(config.tools)
    return QwenChat(folder, config.tools, config.thinking)


# ---------------------------------------------------------------------------------------------------- Qwen's format


class QwenChat:
    """Qwen's chat template, used once: afterwards only the constant strings between turns, taken from it, are added."""

    def __init__(self, folder: str | Path, tools: bool = True, thinking: bool = False):
        from transformers import AutoTokenizer  # takes a second; the small model does without

        if not folder or not (Path(folder) / "tokenizer_config.json").is_file():
            raise ChatError(f"model folder {str(folder)!r}: has no tokenizer_config.json")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        if not self.tokenizer.chat_template:
            raise ChatError(f"model folder {str(folder)!r}: its tokenizer has no chat template")
        self.tools, self.thinking = tools, thinking
        self.size = len(self.tokenizer)
        # Strings of the vocabulary's own control tokens must not be made by text that comes from outside.
        self.control = re.compile("|".join(map(re.escape, self.tokenizer.get_added_vocab())) or "(?!)")
        self._derive_glue()

    def _render(self, messages: list[dict], generation: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=TOOLS if self.tools else None, tokenize=False, add_generation_prompt=generation,
            enable_thinking=self.thinking)

    def _derive_glue(self) -> None:
        """Find what the template puts around tool answers, and check that it only ever appends."""
        base = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
        self.example = base
        called = {"role": "assistant", "content": "ALPHA"}
        one = self._render([*base, called, {"role": "tool", "content": "BETA"}], True).partition("ALPHA")[2]
        two = self._render([*base, called, {"role": "tool", "content": "BETA"}, {"role": "tool", "content": "GAMMA"}],
                           True).partition("ALPHA")[2]
        before, _, self.after = one.partition("BETA")
        self.between = two.partition("BETA")[2].partition("GAMMA")[0]
        ids = self._encode(before)
        self.stop_id = ids[0]
        self.stop_text = self.tokenizer.decode(ids[:1])
        self.before = before.removeprefix(self.stop_text)
        end_of_text = self.tokenizer.convert_tokens_to_ids("<|endoftext|>")
        self.end_ids = [end_of_text] if end_of_text is not None and end_of_text != self.stop_id else []
        if two != before + "BETA" + self.between + "GAMMA" + self.after or before == self.before:
            raise ChatError("the chat template does not append tool answers turn by turn, as Qwen3.5's does")

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def plain(self, text: str) -> str:
        """`text` with the control tokens' spellings broken up, so that it encodes to ordinary tokens."""
        return self.control.sub(lambda found: found[0][0] + " " + found[0][1:], text)

    def save(self, folder: Path) -> None:
        """Put the tokenizer's files into a model folder."""
        self.tokenizer.save_pretrained(folder)

    def prompt(self, task: Task) -> list[int]:
        """The system and user message and the opening of the first assistant turn."""
        messages = [{"role": "system", "content": system_prompt(self.tools)},
                    {"role": "user", "content": self.plain(user_prompt(task))}]
        return self._encode(self._render(messages, True))

    def tool_turn(self, answers: list[str]) -> list[int]:
        """What stands between a turn's stop token and the next turn: the tools' answers, and its opening."""
        return self._encode(self.before + self.between.join(self.plain(text.strip()) for text in answers) + self.after)

    def assistant(self, message: dict) -> list[int]:
        """The ids that sampling would have had to produce to say `message`, the stop token included."""
        message = {"role": "assistant", "content": self.plain(message.get("content") or "")} | {
            "tool_calls": [{"type": "function", "function": {"name": call["function"]["name"],
                                                             "arguments": json.loads(call["function"]["arguments"])}}
                           for call in message.get("tool_calls", ())]}
        opening = self._render(self.example, True)
        text = self._render([*self.example, message], False)
        assert text.startswith(opening), "the template renders an answered turn unlike the turn it opens"
        return self._encode(text[len(opening):text.rindex(self.stop_text)]) + [self.stop_id]

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def parse(self, ids: list[int]) -> Turn:
        """A finished turn (with or without its stop token) as text and calls; hostile text gives Call.error."""
        text = self.text(ids[:-1] if ids and ids[-1] == self.stop_id else ids)
        content, *blocks = text.split("<tool_call>")
        calls = [read_call(block.partition("</tool_call>")) for block in blocks]
        return Turn(content.strip() if calls else content, calls)


def read_call(parts: tuple[str, str, str]) -> Call:
    """A call from what stands behind <tool_call>: Qwen3.5's XML, or the JSON of the older Hermes style."""
    body, closed = parts[0].strip(), parts[1]
    if not closed:
        return Call("?", error="the tool call is not closed by </tool_call>")
    if body.startswith("{"):
        try:
            data = json.loads(body)
        except (ValueError, RecursionError):
            return Call("?", error="the tool call is not valid JSON")
        if not isinstance(data.get("name"), str) or not isinstance(data.get("arguments"), dict):
            return Call("?", error='the tool call must be {"name": ..., "arguments": {...}}')
        return Call(data["name"], data["arguments"])
    if not body.startswith("<function=") or ">" not in body or not body.endswith("</function>"):
        return Call("?", error="a tool call is written <function=NAME> <parameter=KEY> VALUE </parameter> </function>")
    name, _, rest = body.removeprefix("<function=").partition(">")
    arguments = {}
    for piece in rest.removesuffix("</function>").split("<parameter=")[1:]:
        key, opened, value = piece.partition(">")
        value, closed, _ = value.partition("</parameter>")
        if not opened or not closed:
            return Call(name, error=f"parameter {key[:40].strip()!r} is not closed by </parameter>")
        arguments[key] = read_value(key, value.removeprefix("\n").removesuffix("\n"))
    return Call(name, arguments)


def read_value(key: str, text: str):
    """A parameter's value: a string as it stands, anything else as JSON, or Python's None, True, False."""
    if KINDS.get(key, {}).get("type") == "string":
        return text
    try:
        return json.loads({"None": "null", "True": "true", "False": "false"}.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text  # the tool says what it would have wanted


# -------------------------------------------------------------------------------------------------- compact format

CONTROL = ["<pad>", "<unk>", "<task>", "<turn>", "<end>", "<call>", "<tool>", "<answer>", "</answer>"]
WORDS = ["room", "r", "v_max", "start", "wall", "Plan", "avoid", "F", "G", "U", "&", "|", "in", "out", "plan_path",
         "check_path", "t_start", "goal_region", "goal_point", "hold_until", "waypoints", "ok", "error"]
NAMES = [chr(code) for code in range(ord("A"), ord("Z") + 1) if chr(code) not in "FGU"] + ["Goal"] + [
    f"{kind}{i}" for kind in ("Key", "Door") for i in range(1, 10)]
GOOD_NEWS = "Correct:"  # how check_path's answer begins where nothing fails
DIGITS = [f"{i:02d}" for i in range(100)] + [f".{i:02d}" for i in range(100)]


def compact_tokenizer() -> Tokenizer:
    """Words, names and number halves ("03" and ".25" make 3.25), as a `tokenizers` model."""
    vocabulary = {word: i for i, word in enumerate(CONTROL + WORDS + NAMES + DIGITS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"\.\d\d$"), "isolated")])
    return tokenizer


def number(value: float) -> str:
    """`value` as dd.dd. Raises ChatError outside 0..99.99 or with more than two decimals."""
    if not 0 <= value <= 99.99 or abs(round(value, 2) - value) > 1e-9:
        raise ChatError(f"the compact format writes numbers from 0 to 99.99 with two decimals, not {value}")
    return f"{value:05.2f}"


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


class CompactChat:
    """The small model's format. It has no room for prose: of a message it keeps the plan line, calls and answer."""

    def __init__(self, tools: bool = True):
        self.tools = tools
        self.tokenizer = compact_tokenizer()
        self.size = self.tokenizer.get_vocab_size()
        self.names = [self.tokenizer.id_to_token(i) for i in range(self.size)]
        self.stop_id = self.tokenizer.token_to_id("<end>")
        self.end_ids: list[int] = []

    def _encode(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text).ids
        if self.tokenizer.token_to_id("<unk>") in ids:
            unknown = next(word for word in text.split() if self.names[1] in self.tokenizer.encode(word).tokens)
            names = "A..Z but F, G, U, Goal, Key1..9, Door1..9"
            raise ChatError(f"the compact format has no word for {unknown!r}; regions are {names}")
        return ids

    def save(self, folder: Path) -> None:
        self.tokenizer.save(str(folder / "tokenizer.json"))

    def prompt(self, task: Task) -> list[int]:
        def rect(box):
            return " ".join(number(v) for v in (box.xmin, box.ymin, box.xmax, box.ymax))

        robot = task.robot
        words = [f"<task> room {rect(task.workspace)} r {number(robot.half_width)} v_max {number(robot.v_max)}"]
        words += [f"wall {rect(box)}" for box in task.obstacles.values()]
        words += [f"{name} {rect(box)}" for name, box in task.regions.items()]
        words += [f"start {number(robot.start[0])} {number(robot.start[1])}"]
        words += [prefix(tree) for tree in task.formulas]
        return self._encode(" ".join([*words, "<turn>"]))

    def tool_turn(self, answers: list[str]) -> list[int]:
        return self._encode(" ".join([f"<tool> {self._answer(text)}" for text in answers] + ["<turn>"]))

    def _answer(self, text: str) -> str:
        """Of a tool's answer the waypoints, just as the final answer needs them; else only whether it is good news."""
        found = re.search(r"^waypoints: (.*)$", text, re.MULTILINE)
        try:
            if found:
                return " ".join(self._flat(json.loads(found[1])))
            return "ok" if text.startswith(GOOD_NEWS) else "error"
        except ChatError:
            return "error"

    def assistant(self, message: dict) -> list[int]:
        """Of `message` the line "Plan: B 12.0, A 30.0, avoid C", the calls and the answer, and the stop token."""
        content, answer = (message.get("content") or "").split("<answer>"), []
        words = self._plan(content[0])
        for call in message.get("tool_calls", ()):
            words += ["<call>", call["function"]["name"]]
            for key, value in json.loads(call["function"]["arguments"]).items():
                words += [key, *self._flat(value)]
        if len(content) > 1:
            answer = json.loads(content[-1].partition("</answer>")[0])
            words += ["<answer>", *self._flat(answer), "</answer>"]
        return self._encode(" ".join([*words, "<end>"]))

    def _plan(self, text: str) -> list[str]:
        found = re.search(r"Plan: .*", text)
        words = re.findall(r"[A-Za-z]\w*|\d+(?:\.\d+)?", found[0]) if found else []
        return [number(float(word)) if word[0].isdigit() else word for word in words]

    def _flat(self, value) -> list[str]:
        if isinstance(value, list):
            return [word for item in value for word in self._flat(item)]
        return [value if isinstance(value, str) else number(value)]

    def text(self, ids: list[int]) -> str:
        return re.sub(r" (?=\.\d\d\b)", "", " ".join(self.names[i] for i in ids))

    def parse(self, ids: list[int]) -> Turn:
        words = self.text([i for i in ids if i != self.stop_id]).split()
        text, *calls = " ".join(words).split("<call>")
        plan, opened, answer = text.partition("<answer>")
        if opened and "</answer>" in answer:
            answer, _, rest = answer.partition("</answer>")
            waypoints = self._triples(answer.split())
            plan += f"<answer>{json.dumps(waypoints) if waypoints else answer}</answer>{rest}"
        elif opened:
            plan += opened + answer
        return Turn(plan.strip(), [self._read_call(call.split()) for call in calls])

    def _read_call(self, words: list[str]) -> Call:
        name, arguments = (words[0] if words else "?"), {}
        keys = [i for i, word in enumerate(words) if word in KINDS]
        if keys and keys[0] != 1:
            return Call(name, error="the name of a tool is followed by its arguments")
        for start, end in pairwise([*keys, len(words)]):
            try:
                arguments[words[start]] = self._read_value(words[start], words[start + 1:end])
            except ValueError:
                return Call(name, error=f"{words[start]} has a value of the wrong kind")
        return Call(name, arguments)

    def _read_value(self, key: str, words: list[str]):
        kind = KINDS[key]
        if kind["type"] == "number":
            (word,) = words
            return float(word)
        if kind["type"] == "string":
            (word,) = words
            return word
        if key == "waypoints":
            return self._triples(words) or words
        return words if kind["items"]["type"] == "string" else [float(word) for word in words]

    def _triples(self, words: list[str]) -> list[list[float]] | None:
        """[[t, x, y], ...] of dd.dd words, or None."""
        if not words or len(words) % 3 or not all(re.fullmatch(r"\d\d\.\d\d", word) for word in words):
            return None
        values = [float(word) for word in words]
        return [values[i:i + 3] for i in range(0, len(values), 3)]
