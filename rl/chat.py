"""Chat formats: a task and a conversation as token ids, and sampled ids back as words and tool calls.

Two formats stand behind one interface. QwenChat speaks a pretrained model's own template, on the tokenizer of its
folder. CompactChat is a vocabulary of a few hundred words for the small model that is trained from scratch: the same
tasks, tools and grading with numbers in two tokens. In both, a conversation is only ever appended to:

    ids = chat.prompt(task); ids += sampled turn; ids += chat.tool_turn(answers); ids += sampled turn; ...
"""
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from rl.env import STL, EnvFault, ask, called, open_env, raised
from stl.world import unique

DEPTH = 50  # of lists and objects within each other in a call's arguments; no tool takes more
SURROGATES = re.compile(r"[\ud800-\udfff]")  # JSON can spell half a character, which no encoding can write


class ChatError(ValueError):
    """A task or a model folder that a chat format cannot express: the message says what and what would be right."""


def clean(text: str) -> str:
    return SURROGATES.sub("\ufffd", text)


def each_text(value, change: Callable[[str], str], depth: int = DEPTH):
    """A JSON value with `change` made to each text in it, names too. RecursionError if it is nested deeper."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | dict) and not depth:
        raise RecursionError
    if isinstance(value, dict):
        return {change(key): each_text(item, change, depth - 1) for key, item in value.items()}
    return [each_text(item, change, depth - 1) for item in value] if isinstance(value, list) else value


@dataclass
class Call:
    """One tool call; `error` says why it cannot be run (then arguments are empty), `text` is what the model wrote."""

    name: str
    arguments: dict = field(default_factory=dict)
    error: str | None = None
    text: str = ""


@dataclass
class Turn:
    """One assistant turn: its text (with the <answer> block, if any), its tool calls in order, and the thoughts before
    both, which are never graded or run."""

    content: str
    calls: list[Call]
    thoughts: str = ""

    def message(self) -> dict:
        """The turn as a chat message in OpenAI's form; thoughts are "reasoning_content", as Qwen's template calls them.
        A call that cannot be run also has its "text", to be shown."""
        calls = []
        for i, call in enumerate(self.calls):
            function = {"name": call.name, "arguments": json.dumps(call.arguments)}
            shown = {"type": "function", "id": f"call_{i}", "function": function}
            calls.append(shown | ({"text": call.text} if call.error else {}))
        thoughts = {"reasoning_content": self.thoughts} if self.thoughts else {}
        return {"role": "assistant", "content": self.content} | thoughts | ({"tool_calls": calls} if calls else {})


@cache
def argument_schemas(env: str) -> dict[str, dict[str, dict]]:
    """{tool: {argument: its JSON schema}} of a task world. Raises ChatError for tools that are not in OpenAI's form."""
    schemas = {}
    try:
        for function in (tool["function"] for tool in open_env(env).TOOLS):
            properties = (function.get("parameters") or {}).get("properties", {})
            schemas[function["name"]] = {key: dict(schema) for key, schema in properties.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ChatError(f"env = {env!r}: TOOLS are not in OpenAI's form; examples/countdown/env.py shows it") from None
    return schemas


def is_text(schema: dict) -> bool:
    """Whether a value of this schema is a string, which is read as it stands."""
    match schema:
        case {"type": kind}:
            return kind == "string"
        case {"enum": [str(), *_]}:
            return True
    return False


def read_calls(message: dict) -> list[Call]:
    """The calls of a message in OpenAI's form; one whose arguments are not an object as JSON has an error."""
    calls = []
    for function in (call["function"] for call in message.get("tool_calls") or ()):
        try:
            arguments = each_text(json.loads(function["arguments"], object_pairs_hook=unique), clean)
        except (ValueError, TypeError, RecursionError):
            arguments = None
        error = None if isinstance(arguments, dict) else "the arguments are not a JSON object"
        calls.append(Call(function["name"], {} if error else arguments, error))
    return calls


def sayable_calls(message: dict) -> Iterator[tuple[str, dict]]:
    """Name and arguments of each call, without what is null: no template can say what is absent. Raises ChatError."""
    for call in read_calls(message):
        if call.error:
            raise ChatError(call.error)
        yield call.name, {key: value for key, value in call.arguments.items() if value is not None}


def open_chat(config, folder: str | Path | None = None) -> "QwenChat | CompactChat":
    """The chat format that `config` names; QwenChat reads its tokenizer and template from the model `folder`."""
    if config.chat == "compact":
        return CompactChat(config.env, config.tools)
    return QwenChat(folder, config.tools, config.thinking, config.env)


# ---------------------------------------------------------------------------------------------------- Qwen's format


class QwenChat:
    """Qwen's chat template, used once: afterwards only the constant strings between turns, taken from it, are added."""

    def __init__(self, folder: str | Path, tools: bool = True, thinking: bool = False, env: str = STL):
        from transformers import AutoTokenizer  # takes a second; the small model does without

        argument_schemas(env)  # says so if a call could not be read
        if not folder or not (Path(folder) / "tokenizer_config.json").is_file():
            raise ChatError(f"model folder {str(folder)!r}: has no tokenizer_config.json")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        if not self.tokenizer.chat_template:
            raise ChatError(f"model folder {str(folder)!r}: its tokenizer has no chat template")
        self.tools, self.thinking, self.env_name, self.env = tools, thinking, env, open_env(env)
        self.size = len(self.tokenizer)
        # Strings of the vocabulary's own control tokens must not be made by text that comes from outside.
        self.control = re.compile("|".join(map(re.escape, self.tokenizer.get_added_vocab())) or "(?!)")
        self._derive_glue()

    def _render(self, messages: list[dict], generation: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=self.env.TOOLS if self.tools else None, tokenize=False, add_generation_prompt=generation,
            enable_thinking=self.thinking)

    def _derive_glue(self) -> None:
        """Find what the template puts around tool answers, and check that it only ever appends."""
        self.example = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
        said = [*self.example, {"role": "assistant", "content": "ALPHA"}, {"role": "tool", "content": "BETA"}]
        one = self._render(said, True).partition("ALPHA")[2]
        two = self._render([*said, {"role": "tool", "content": "GAMMA"}], True).partition("ALPHA")[2]
        before, _, self.after = one.partition("BETA")
        self.between = two.partition("BETA")[2].partition("GAMMA")[0]
        ids = self._encode(before)
        self.stop_id = ids[0]
        self.stop_text = self.tokenizer.decode(ids[:1])
        self.before = before.removeprefix(self.stop_text)
        self.opened = self.after.rstrip().endswith("<think>")  # the template begins a turn's thoughts
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

    def prompt(self, task) -> list[int]:
        """The system and user message and the opening of the first assistant turn."""
        messages = [{"role": "system", "content": ask(self.env.system_prompt, self.tools)},
                    {"role": "user", "content": self.plain(ask(self.env.user_prompt, task))}]
        return self._encode(self._render(messages, True))

    def tool_turn(self, answers: list[str]) -> list[int]:
        """What stands between a turn's stop token and the next turn: the tools' answers, and its opening."""
        return self._encode(self.before + self.between.join(self.plain(text.strip()) for text in answers) + self.after)

    def assistant(self, message: dict) -> list[int]:
        """The ids that sampling would have had to produce to say `message`, the stop token included. Its thoughts are
        said where the chat format has thinking on. Raises ChatError for a call that cannot be read."""
        calls = [{"type": "function", "function": {"name": self.plain(name),
                                                   "arguments": each_text(arguments, self.plain)}}
                 for name, arguments in sayable_calls(message)]
        said = {"role": "assistant", "content": self.plain(message.get("content") or ""), "tool_calls": calls}
        if self.thinking and message.get("reasoning_content"):
            said["reasoning_content"] = self.plain(message["reasoning_content"])
        opening, text = self._render(self.example, True), self._render([*self.example, said], False)
        assert text.startswith(opening), "the template renders an answered turn unlike the turn it opens"
        return self._encode(text[len(opening):text.rindex(self.stop_text)]) + [self.stop_id]

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def parse(self, ids: list[int], whole: bool = True) -> Turn:
        """A turn (with or without its stop token) as text and calls; hostile text gives Call.error.

        What stands before the last </think> are thoughts; a turn that begins in them, by the template or by itself, and
        has no </think> has neither calls nor an answer. whole: False for a turn that was cut, not read for calls.
        """
        text = self.text(ids[:-1] if ids and ids[-1] == self.stop_id else ids)
        thoughts, closed, said = text.rpartition("</think>")
        if not closed and (self.opened or said.lstrip().startswith("<think>")):
            thoughts, said = said, ""
        content, *blocks = said.split("<tool_call>") if whole else [said]
        calls = [read_call(block, self.env_name) for block in blocks]
        return Turn(content.strip() if calls or closed else content, calls, thoughts.strip())


def read_call(block: str, env: str = STL) -> Call:
    """A call from what stands behind <tool_call>: Qwen3.5's XML, or the JSON of the older Hermes style."""
    text, closed, _ = block.partition("</tool_call>")
    text = text.strip()
    try:
        if not closed:
            raise ValueError("it is not closed by </tool_call>")
        name, arguments = read_hermes(text) if text.startswith("{") else read_xml(text, argument_schemas(env))
        return Call(clean(name), each_text(arguments, clean))
    except RecursionError:
        error = f"it is nested more than {DEPTH} deep"
    except ValueError as what:
        error = str(what)
    return Call("?", error=f"the tool call cannot be read: {error}", text=text)


def read_hermes(text: str) -> tuple[str, dict]:
    """Name and arguments of a call in JSON. Raises ValueError."""
    match json.loads(text, object_pairs_hook=unique):
        case {"name": str(name), "arguments": dict(arguments)}:
            return name, arguments
    raise ValueError('in JSON it must be {"name": ..., "arguments": {...}}')


def read_xml(text: str, schemas: dict[str, dict[str, dict]]) -> tuple[str, dict]:
    """Name and arguments of a call in XML: a string as it stands, anything else as JSON, or Python's None, True, False;
    what is neither is a text too, and the tool says what it would have wanted. Raises ValueError."""
    if not text.startswith("<function=") or ">" not in text or not text.endswith("</function>"):
        raise ValueError("it is written <function=NAME> <parameter=KEY> VALUE </parameter> </function>")
    name, _, rest = text.removeprefix("<function=").partition(">")
    arguments = {}
    for piece in rest.removesuffix("</function>").split("<parameter=")[1:]:
        key, _, value = piece.partition(">")
        value, closed, _ = value.partition("</parameter>")
        if not closed:
            raise ValueError(f"parameter {key[:40].strip()!r} is not closed by </parameter>")
        if key in arguments:
            raise ValueError(f"parameter {key[:40].strip()!r} is there twice")
        arguments[key] = value = value.removeprefix("\n").removesuffix("\n")
        if not is_text(schemas.get(name, {}).get(key, {})):
            value = {"None": "null", "True": "true", "False": "false"}.get(value.strip(), value)
            with suppress(ValueError):
                arguments[key] = json.loads(value)
    return name, arguments


# -------------------------------------------------------------------------------------------------- compact format

CONTROL = ["<pad>", "<unk>", "<task>", "<turn>", "<end>", "<call>", "<tool>", "<answer>", "</answer>"]
DIGITS = [f"{i:02d}" for i in range(100)] + [f".{i:02d}" for i in range(100)]


def number(value: float) -> str:
    """`value` as dd.dd. Raises ChatError for what is no number, is outside 0..99.99 or has more than two decimals."""
    if type(value) not in (int, float) or not 0 <= value <= 99.99 or abs(round(value, 2) - value) > 1e-9:
        raise ChatError(f"the compact format writes numbers from 0 to 99.99 with two decimals, not {value!r}")
    return f"{value:05.2f}"


def flat(value, whole: bool = False) -> list[str]:
    """The words of a value, or of all in nested lists: 03.50; of an int 3, if `whole`; true; a text as it stands."""
    if isinstance(value, list):
        return [word for item in value for word in flat(item, whole)]
    if isinstance(value, bool) or whole and isinstance(value, int):
        return [json.dumps(value)]
    return [value if isinstance(value, str) else number(value)]


def sayable(value, schema: dict):
    """A value of this schema as it can be said: with two decimals where it is a number and not a whole one."""
    match value, schema:
        case list(), {"items": items}:
            return [sayable(item, items) for item in value]
        case (int(), {"type": "number"}) | (float(), _) if not isinstance(value, bool):
            return float(number(value))
    return value


def rows(words: list[str], width: int) -> list[list[float]] | None:
    """[[t, x, y], ...], `width` numbers a row, of dd.dd words; None if they are no such rows."""
    if not words or len(words) % width or not all(re.fullmatch(r"\d\d\.\d\d", word) for word in words):
        return None
    values = [float(word) for word in words]
    return [values[i:i + width] for i in range(0, len(values), width)]


def read_word(word: str) -> str | float | bool:
    """A word as the value that it looks like."""
    if re.fullmatch(r"\d*\.?\d+", word):
        return float(word) if "." in word else int(word)
    return {"true": True, "false": False}.get(word, word)


def read_words(schema: dict, words: list[str]):
    """The value of this schema that flat wrote as `words`. What is of another type is for the tool to refuse."""
    match schema:
        case {"type": "array", "items": {"type": "array", "minItems": width}}:
            return rows(words, width) or words
        case {"type": "array"}:
            return words if is_text(schema.get("items")) else [read_word(word) for word in words]
    return read_word(words[0]) if len(words) == 1 and not is_text(schema) else " ".join(words)


def translate(function: Callable, given) -> str:
    """What a function of the world makes of a task or a text. Raises EnvFault, or the ChatError that it raises."""
    try:
        text = function(given)
    except ChatError:
        raise
    except Exception as error:
        raise EnvFault(f"{raised(function, error)}; given {given!r:.80}") from None
    if not isinstance(text, str):
        raise EnvFault(f"{called(function)} returned no text but {text!r:.80}; given {given!r:.80}")
    return text


class CompactChat:
    """The small model's format: the words of the task world, and numbers in halves ("03" and ".25" make 3.25). It has
    no room for prose: of a message it keeps what the world says, its calls and its answer."""

    def __init__(self, env: str = STL, tools: bool = True):
        self.env_name, self.env = env, open_env(env)
        if not self.env.WORDS:
            raise ChatError(f"chat = 'compact': env {env!r} has no words for it; say chat = 'qwen'")
        self._check_words(tools)
        self.names = list(dict.fromkeys([*CONTROL, *self.env.WORDS, *DIGITS]))
        vocabulary = {word: i for i, word in enumerate(self.names)}
        self.tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        self.tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"\.\d\d$"), "isolated")])
        self.size = len(self.names)
        self.stop_id = vocabulary["<end>"]
        self.end_ids: list[int] = []

    def _check_words(self, tools: bool) -> None:
        """Raise ChatError if the tools, where there are any, cannot be called in the world's words."""
        words, world = self.env.WORDS, f"env = {self.env_name!r}"
        for word in words:
            if not isinstance(word, str) or len(word.split()) != 1 or re.search(r".\.\d\d$", word):
                raise ChatError(f"{world}: {word!r} in WORDS is no single word")
        for tool, schemas in argument_schemas(self.env_name).items() if tools else ():
            if missing := [word for word in (tool, *schemas) if word not in words]:
                raise ChatError(f"{world}: WORDS lacks {', '.join(missing)}, with which {tool} is called")
            for key, schema in schemas.items():
                match schema:
                    case {"items": {"type": "array", "minItems": int(width)}} if width > 0:
                        continue
                    case {"items": {"type": "array"}}:
                        raise ChatError(f"{world}: argument {key!r} of {tool}: the rows of an array need minItems")

    def _encode(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text).ids
        if self.names.index("<unk>") in ids:
            unknown = next(word for word in text.split() if "<unk>" in self.tokenizer.encode(word).tokens)
            raise ChatError(f"the compact format has no word for {unknown!r}; its words are numbers and "
                            + " ".join(self.env.WORDS))
        return ids

    def save(self, folder: Path) -> None:
        self.tokenizer.save(str(folder / "tokenizer.json"))

    def prompt(self, task) -> list[int]:
        return self._encode(f"<task> {translate(self.env.compact_task, task)} <turn>")

    def tool_turn(self, answers: list[str]) -> list[int]:
        words = [f"<tool> {translate(self.env.compact_tool, text)}" for text in answers]
        return self._encode(" ".join([*words, "<turn>"]))

    def assistant(self, message: dict) -> list[int]:
        """What the world keeps of the text, the calls, and the stop token. Raises ChatError for a call that would be
        read as another one."""
        words, calls = [translate(self.env.compact_assistant, message.get("content") or "")], []
        for name, arguments in sayable_calls(message):
            schemas = argument_schemas(self.env_name).get(name, {})
            calls.append(Call(name, {key: sayable(value, schemas.get(key)) for key, value in arguments.items()}))
            words += ["<call>", name]
            words += [word for key, value in calls[-1].arguments.items() for word in (key, *flat(value, whole=True))]
        ids = self._encode(" ".join([*words, "<end>"]))
        read = self._read_calls(ids)[1] if calls else []
        if repr(read) != repr(calls):  # which tells 3 from 3.0 and True
            raise ChatError(f"the compact format cannot say {calls}, which would be read as {read}")
        return ids

    def text(self, ids: list[int]) -> str:
        return re.sub(r" (?=\.\d\d\b)", "", " ".join([self.names[i] for i in ids]))

    def parse(self, ids: list[int], whole: bool = True) -> Turn:
        """As QwenChat.parse; there are no thoughts, and a turn that was cut stays in the format's words."""
        if not whole:
            return Turn(self.text(ids), [])
        said, calls = self._read_calls(ids)
        return Turn(translate(self.env.plain_assistant, said).strip(), calls)

    def _read_calls(self, ids: list[int]) -> tuple[str, list[Call]]:
        """The words before the calls, and the calls."""
        said, *calls = self.text([i for i in ids if i != self.stop_id]).split("<call>")
        return said.strip(), [self._read_call(call.strip()) for call in calls]

    def _read_call(self, text: str) -> Call:
        name, *words = text.split() or ["?"]
        schemas = argument_schemas(self.env_name).get(name, {})
        starts = [i for i, word in enumerate(words) if word in schemas]
        if words and starts[:1] != [0]:
            return Call(name, error="the name of a tool is followed by its arguments", text=text)
        if len({words[start] for start in starts}) < len(starts):
            return Call(name, error="an argument is there twice", text=text)
        return Call(name, {words[start]: read_words(schemas[words[start]], words[start + 1:end])
                           for start, end in pairwise([*starts, len(words)])})
