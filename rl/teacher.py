"""Learning from a teacher: many conversations at once with an OpenAI-compatible API, and conversations as a data set.

    python sample.py --collect data/distill.jsonl --policy api --tasks distill --teacher_model=NAME --teacher_url=URL

    data/distill.jsonl             a finished conversation a line, good or bad: messages in OpenAI's form, verdict, task
    data/distill.requests.jsonl    each request before it is sent, each answer as it comes: what is there costs no more
    data/distill.manifest.json     settings, counts, prices and the bill

The key is read from the environment (OPENAI_API_KEY) and neither printed nor written.
"""
import asyncio
import fcntl
import hashlib
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import cache
from operator import itemgetter
from pathlib import Path

from tqdm import tqdm

from rl.chat import clean, each_text, read_calls
from rl.cli import UsageError
from rl.config import Config
from rl.env import STL, Fault, ask, open_env
from rl.episode import Episode
from rl.rollout import fail, finish, what_to_run
from rl.run import read_json, write_file, write_json
from rl.tasks import read_lines, reserved
from stl.world import Task

TOKENS = ("uncached", "cached", "output")  # as they are billed: input not seen lately, input seen lately, output
OURS = (400, 413, 422)  # statuses for a request that cannot be answered as it is, such as one that is too long
FATAL = (401, 402, 403, 404)  # key, money, rights, address: every other request would be answered the same way
LONGEST_PAUSE = 60.0  # seconds between two attempts, unless the server asks for more


class Journal:
    """A file of JSON lines that one process appends to, synced line by line. A last line that a kill cut is dropped.
    `check` raises KeyError or TypeError for a line of something else, and UsageError says where it is."""

    def __init__(self, path: Path, check: Callable[[dict], object]):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(path, "a+b")  # noqa: SIM115
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"{path}: another process writes it; wait for it, or name another file") from None
        self.file.seek(0)
        self.file.truncate(self.file.read().rfind(b"\n") + 1)
        self.rows = [row for row, _ in read_lines(path, check)]

    def append(self, row: dict) -> None:
        self.file.write(json.dumps(row).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.rows.append(row)

    def close(self) -> None:
        self.file.close()


def check_request(row: dict) -> None:
    """Raises KeyError or TypeError for a line that no Teacher wrote."""
    itemgetter("key", "task", *(("cut", "tokens") if "message" in row else ()))(row)


class Teacher:
    """A model behind an API, behind the interface of rl.policy.Policy. Episodes have messages but no tokens.

    `path` names the journal. A request is known by all that it says and by the sample's number, and what the journal
    holds is never asked for again: a killed command goes on, a finished one repeats itself for nothing.
    """

    def __init__(self, config: Config, path: Path):
        try:
            import openai
        except ImportError:
            raise UsageError("--policy api: the client is missing; pip install -r requirements-teacher.txt") from None
        self.openai, self.config, self.key = openai, config, os.environ.get("OPENAI_API_KEY", "")
        if not config.teacher_model:
            raise UsageError("teacher_model = '': name the model that the API serves, --teacher_model=NAME")
        if not self.key:
            raise UsageError("OPENAI_API_KEY is not set; a server that asks for no key takes any text")
        if config.teacher_max_cost and not any(config.teacher_prices):
            raise UsageError("teacher_max_cost: is a limit on money, so give teacher_prices too")
        self.journal = Journal(path, check_request)
        self.answers = {row["key"]: row for row in self.journal.rows if "message" in row}
        self.spent = Counter()  # tokens of all that was answered, in the journal's whole life
        for answer in self.answers.values():
            self.spent.update(answer["tokens"])
        self.usage: dict[tuple[str, int], Counter] = {}  # tokens by task and sample
        self.unfinished: dict[str, str] = {}  # task: why
        self.stop = ""  # why no more requests are sent

    def counts(self) -> dict:
        """Requests sent in the journal's whole life, those in flight at a kill (they were sent again), retried errors.
        """
        rows = self.journal.rows
        sent, ends = sum("sent" in row for row in rows), sum("message" in row or "error" in row for row in rows)
        return {"requests": sent, "in_flight_at_a_kill": sent - ends,
                "errors": dict(Counter(row["error"].partition(":")[0] for row in rows if "error" in row))}

    def play(self, tasks: list[Task], samples: int, seed: tuple = (), temperature: float | None = None,
             progress: Callable[[Episode], None] | None = None) -> list[Episode]:
        """As Policy.play, but the luck is the server's. Raises UsageError, once the requests in flight are answered,
        at a limit, for an endpoint that is of no use, and if some conversation could not be finished."""
        episodes = [Episode(task, 0, group, sample) for group, task in enumerate(tasks) for sample in range(samples)]
        temperature = self.config.temperature if temperature is None else temperature
        self.stop, self.unfinished = "", {}
        asyncio.run(self._play(episodes, temperature, progress))
        if self.stop:
            raise UsageError(self.stop)
        for name, reason in self.unfinished.items():
            raise UsageError(f"{len(self.unfinished)} conversations are unfinished, {name} first ({reason}); the "
                               "same command goes on with them")
        return episodes

    async def _play(self, episodes: list[Episode], temperature: float, progress: Callable | None) -> None:
        c, gate = self.config, asyncio.Semaphore(self.config.teacher_requests)

        async def converse(episode: Episode) -> None:
            async with gate:
                await self._converse(client, episode, temperature)
                if episode.ending and progress:
                    progress(episode)

        async with self.openai.AsyncOpenAI(api_key=self.key, base_url=c.teacher_url or None, max_retries=0,
                                           timeout=c.teacher_seconds) as client:
            await asyncio.gather(*map(converse, episodes))

    async def _converse(self, client, episode: Episode, temperature: float) -> None:
        """Turn after turn to the episode's end, as rl.rollout does; without an ending if the teacher fell silent."""
        c, env, room = self.config, open_env(self.config.env), self.config.max_tokens
        episode.messages += opening(episode.task, c)
        usage = self.usage[episode.task.id, episode.sample] = Counter()
        while episode.ending is None:
            if episode.turns == c.max_turns or room < 1:
                return episode.end("turns" if room > 0 else "tokens")
            body = {"model": c.teacher_model, "messages": list(map(sendable, episode.messages)),
                    "temperature": temperature, "max_tokens": min(room, c.max_turn_tokens)}
            body |= ({"tools": env.TOOLS} if c.tools else {}) | (c.teacher_extra or {})
            answer = await self._turn(client, episode, {key: v for key, v in body.items() if v is not None})
            if answer is None:
                return
            usage.update(answer["tokens"])
            room = c.max_tokens - sum(answer["tokens"].values())
            take_turn(episode, answer, c)

    async def _turn(self, client, episode: Episode, body: dict) -> dict | None:
        """The answer to a request, from the journal or from the server; None if there is none for now."""
        key = hashlib.sha256(json.dumps([body, episode.sample], sort_keys=True).encode()).hexdigest()
        if key in self.answers:
            return self.answers[key]
        row, known = {"key": key, "task": episode.task.id, "turn": episode.turns + 1}, len(self.answers)
        pause, reason = 0.0, ""
        for attempt in range(self.config.teacher_retries + 1):
            await asyncio.sleep(pause)
            if self._stopped():
                return None
            self.journal.append(row | {"sent": attempt + 1})
            try:
                async with asyncio.timeout(self.config.teacher_seconds):
                    answer = read_completion(await client.post("/chat/completions", body=body, cast_to=object))
            except (self.openai.OpenAIError, TimeoutError, ValueError, RecursionError) as error:
                reason, pause = self._reason(error), self._pause(attempt, key, error)
                self.journal.append(row | {"error": reason})
                if self._refused(getattr(error, "status_code", 0), reason, episode):
                    return None
            else:
                self.answers[key] = row | answer
                self.spent.update(answer["tokens"])
                self.journal.append(self.answers[key])
                return self.answers[key]
        self.unfinished[episode.task.id] = reason
        if len(self.answers) == known:  # in all that time nobody was answered
            self.stop = self.stop or f"the endpoint does not answer ({reason}); the same command goes on once it does"
        return None

    def _refused(self, status: int, reason: str, episode: Episode) -> bool:
        """Whether to try again is pointless: then this episode has ended, or all stop."""
        if status in FATAL or status in OURS and not self.answers:
            self.stop = self.stop or f"the endpoint refuses to answer ({reason})"
        elif status in OURS:  # this conversation cannot go on, others can
            fail(episode, reason)
        return status in FATAL + OURS

    def _stopped(self) -> str:
        """Why no request may be sent any more; "" if it may. Those in flight are waited for, and paid."""
        c, dollars, tokens = self.config, cost(self.spent, self.config.teacher_prices), self.spent.total()
        if c.teacher_max_cost and dollars >= c.teacher_max_cost:
            self.stop = f"teacher_max_cost = {c.teacher_max_cost:g}: reached, ${dollars:.2f} are spent"
        elif c.teacher_max_tokens and tokens >= c.teacher_max_tokens:
            self.stop = f"teacher_max_tokens = {c.teacher_max_tokens}: reached, {tokens} are used"
        return self.stop

    def _reason(self, error: Exception) -> str:
        """An error in one line that begins with its kind, without the key, which some servers quote."""
        text = f"{getattr(error, 'status_code', '') or type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return text.replace(self.key, "[key]") if len(self.key) > 7 else text  # a shorter one is no secret

    def _pause(self, attempt: int, key: str, error: Exception) -> float:
        """Seconds to wait: twice as long each time, spread so that not all come back together; more if told so."""
        wait = min(LONGEST_PAUSE, self.config.teacher_pause * 2**attempt)
        wait *= random.Random(f"{key}/{attempt}").uniform(0.5, 1.5)
        asked = getattr(getattr(error, "response", None), "headers", {}).get("retry-after", "")
        return max(wait, min(float(asked), self.config.teacher_seconds)) if asked.isdecimal() else wait

    def bill(self, episodes: list[Episode]) -> tuple[str, dict]:
        """What `episodes` cost: a table by level, and the sums for JSON."""
        levels = tally({"level": e.task.level or "none", "success": e.reward > 0, "turns": e.turns,
                        "tokens": self.usage[e.task.id, e.sample]} for e in episodes)
        used, prices = levels["all"], self.config.teacher_prices
        return bill_table(levels, prices), {kind: used[kind] for kind in TOKENS} | {"dollars": cost(used, prices)}


def tally(rows: Iterable[dict]) -> dict[str, Counter]:
    """Conversations, successes, turns and tokens by level, and of "all", from records as `record` makes them."""
    levels: dict[str, Counter] = {}
    for row in rows:
        counts = {"conversations": 1, "successes": int(row["success"]), "turns": row["turns"]} | row["tokens"]
        for name in (row["level"], "all"):
            levels.setdefault(name, Counter()).update(counts)
    return dict(sorted(levels.items(), key=lambda item: (item[0] == "all", item[0]))) or {"all": Counter()}


def bill_line(levels: dict[str, Counter], prices: tuple[float, float, float]) -> str:
    """Success by level, tokens and money so far."""
    solved = " ".join(f"{name} {own['successes']}/{own['conversations']}" for name, own in levels.items())
    used = "+".join(f"{levels['all'][kind] / 1e6:.2f}M" for kind in TOKENS)
    return f"{solved}, {used} tokens" + (f", ${cost(levels['all'], prices):.2f}" if any(prices) else "")


def bill_table(levels: dict[str, Counter], prices: tuple[float, float, float]) -> str:
    """The same with the turns of a conversation, a row per level. Retried requests are not in it."""
    heads = "".join(f"{kind:>14}" for kind in TOKENS)
    lines = [f"{'level':>5}{'tasks':>7}{'solved':>8}{'success':>9}{'turns':>7}{heads}{'dollars':>10}"]
    for name, own in levels.items():
        n = own["conversations"] or 1
        tokens = "".join(f"{own[kind]:14,}" for kind in TOKENS)
        dollars = f"{cost(own, prices):.2f}" if any(prices) else "-"
        lines.append(f"{name:>5}{own['conversations']:7}{own['successes']:8}{own['successes'] / n:9.2f}"
                     f"{own['turns'] / n:7.1f}{tokens}{dollars:>10}")
    return "\n".join(lines)


def cost(tokens: Counter, prices: tuple[float, float, float]) -> float:
    """Dollars for token counts, at dollars a million."""
    return sum(tokens[kind] * price for kind, price in zip(TOKENS, prices, strict=True)) / 1e6


def opening(task: Task, config: Config) -> list[dict]:
    """The system and the user message, the same for every model."""
    env = open_env(config.env)
    return [{"role": "system", "content": ask(env.system_prompt, config.tools)},
            {"role": "user", "content": ask(env.user_prompt, task)}]


def read_completion(data) -> dict:
    """{"message", "cut", "tokens"} of a chat completion in OpenAI's form. ValueError if it is anything else.

    A content in parts is joined, arguments that are no text are kept as their JSON, half characters are replaced. What
    stands before a </think> of the content are thoughts, as in rl.chat.QwenChat.parse.
    """
    try:
        choice, said = data["choices"][0], data["choices"][0]["message"]
        content = said.get("content") or ""
        if isinstance(content, list):
            content = "".join(str(part.get("text") or "") for part in content)
        thoughts, closed, content = str(content).rpartition("</think>")
        thoughts = {"reasoning_content": thoughts.strip().removeprefix("<think>").strip()} if closed else {}
        calls = [{"type": "function", "id": str(call.get("id") or f"call_{i}"), "function": {
                  "name": str(call["function"]["name"]), "arguments": as_json(call["function"].get("arguments") or {})}}
                 for i, call in enumerate(said.get("tool_calls") or ())]
        message = {"role": "assistant", "content": content.strip() if closed else content} | thoughts | (
            {"tool_calls": calls} if calls else {})
        return {"message": each_text(message, clean), "cut": choice.get("finish_reason") == "length",
                "tokens": read_usage(data.get("usage"))}
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a chat completion ({type(error).__name__}: {error})") from None


def as_json(arguments: object) -> str:
    """A call's arguments as the text that they should be."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def read_usage(usage: object) -> dict[str, int]:
    """Token counts by TOKENS. What is no count counts as 0, which is said once; no more of the input is cached than
    there is."""
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    told = [usage.get("prompt_tokens"), usage.get("completion_tokens"),
            cached or usage.get("prompt_cache_hit_tokens") or 0]
    counts = list(map(read_count, told))
    if None in counts:
        warn_of_usage()
    given, output, cached = (count or 0 for count in counts)
    cached = min(given, cached)
    return dict(zip(TOKENS, (given - cached, cached, output), strict=True))


def read_count(figure: object) -> int | None:
    """A count of tokens, which some servers write 10.0 or "10"; None if it is none, or more than any model reads."""
    with suppress(TypeError, ValueError, OverflowError):
        if 0 <= (count := float(figure)) < 1e12 and count.is_integer():
            return int(count)
    return None


@cache  # once
def warn_of_usage() -> None:
    tqdm.write("warning: the endpoint does not always tell how many tokens it used; what it does not tell counts as 0, "
               "in the bill and for the limits", file=sys.stderr)


def sendable(message: dict) -> dict:
    """`message` as part of a history: many servers refuse one in which a call's arguments are not JSON, or that has
    thoughts."""
    sent = {key: value for key, value in message.items() if key != "reasoning_content"}
    if "tool_calls" in sent:
        sent["tool_calls"] = [call | {"function": call["function"] | {"arguments": "{}"}} if read.error else call
                              for call, read in zip(sent["tool_calls"], read_calls(message), strict=True)]
    return sent


def take_turn(episode: Episode, answer: dict, config: Config) -> None:
    """Append a turn; run its calls and append their answers, or end the episode. See rl.rollout, which has tokens."""
    message = answer["message"]
    episode.messages.append(message)
    episode.turns += 1
    if answer["cut"]:  # a turn that was cut is not read for calls
        return episode.end("length")
    for i, call in enumerate(read_calls(message)):
        function, *arguments = what_to_run(i, call, episode.task, config)
        text = function(*arguments)
        if isinstance(text, Fault):
            return fail(episode, str(text))
        episode.messages.append({"role": "tool", "tool_call_id": message["tool_calls"][i]["id"], "content": text})
    if "tool_calls" not in message:
        finish(episode, message["content"], open_env(config.env).grade)


def collect(policy, name: str, tasks: list[Task], path: Path, config: Config) -> None:
    """Have `policy`, called `name`, solve each task once, keep the conversations in `path` (see the module), and print
    the bill. Goes on where a killed command was.

    `config` counts where the policy has none. Raises UsageError if a task is one of the evaluation or RL sets, or if
    `path` was begun by another policy or with other settings.
    """
    config = policy.config or config
    if config.env != STL:
        raise UsageError(f"env = {config.env!r}: only tasks of the STL world can be collected, as they have a hash")
    wanted = {task.hash(): task for task in tasks}
    taken = reserved({(task.robot.half_width, task.robot.v_max) for task in tasks})
    for digest in wanted.keys() & taken.keys():
        raise UsageError(f"task {wanted[digest].id}: the evaluation and RL sets have it (as {taken[digest]}), and "
                           "nothing may be learnt from them here; a teacher is measured by eval.py --policy api")
    keys = itemgetter("hash", "level", "success", "turns", "tokens", "messages", "task")
    with closing(Journal(path, keys)) as file:
        manifest, prices = begin_manifest(path, name, config), config.teacher_prices
        done = {row["hash"] for row in file.rows}
        rest = [task for digest, task in wanted.items() if digest not in done]

        def keep(episode: Episode) -> None:
            file.append(record(episode, name, config, policy))
            bar.set_postfix_str(bill_line(tally(file.rows), prices), refresh=False)
            bar.update()

        try:
            with tqdm(total=len(wanted), initial=len(wanted) - len(rest), desc="conversations", unit="") as bar:
                policy.play(rest, 1, ("collect",), config.temperature, keep)
            order = {digest: i for i, digest in enumerate(wanted)}  # not the order in which they came to an end
            rows = sorted(file.rows, key=lambda row: order.get(row["hash"], len(order)))
            write_file(path, b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        finally:
            end_manifest(path, manifest, file.rows, policy, len(wanted))
            print(bill_table(tally(file.rows), prices))
    print(f"{path}: {len(rows)} conversations, {path.stat().st_size / 1e6:.1f} MB; see {path.stem}.manifest.json")


def begin_manifest(path: Path, name: str, config: Config) -> dict:
    """The manifest with its settings. UsageError if there is one already, with others."""
    fields = ("chat", "tools", "tool_manner", "temperature", "max_turns", "max_tokens", "max_turn_tokens",
              "max_turn_calls", *(("teacher_model", "teacher_url", "teacher_extra") if name == "api" else ()))
    settings = {"policy": name} | {field: getattr(config, field) for field in fields}
    file = path.with_suffix(".manifest.json")
    manifest = read_json(file) if file.exists() else {"settings": settings}
    for key, value in settings.items():
        if (old := manifest["settings"].get(key)) != value:
            raise UsageError(f"{path}: was begun with {key} = {old!r}, not {value!r}; name another file")
    write_json(file, manifest)
    return manifest


def end_manifest(path: Path, manifest: dict, rows: list[dict], policy, wanted: int) -> None:
    """Complete the manifest: counts, and the bill, in which answers to unfinished conversations stand too."""
    levels = tally(rows)
    total = levels.pop("all")
    tokens, prices, requests = total, (0.0, 0.0, 0.0), {}
    if isinstance(policy, Teacher):
        tokens, prices, requests = policy.spent, policy.config.teacher_prices, policy.counts()
    write_json(path.with_suffix(".manifest.json"), manifest | {
        "tasks": wanted, "conversations": len(rows), "successes": total["successes"],
        "endings": dict(Counter(row["ending"] for row in rows)), "levels": levels,
        "tokens": {kind: tokens[kind] for kind in TOKENS}, "dollars": cost(tokens, prices),
        "dollars_per_million_tokens": dict(zip(TOKENS, prices, strict=True)), **requests})


def record(episode: Episode, name: str, config: Config, policy) -> dict:
    """A finished conversation of the policy called `name`, as its line in the file. The task goes without its known
    solution. Tokens: a teacher's as billed, a network's own as sampled and as read."""
    task, sampled = episode.task, episode.sampled
    used = {"uncached": len(episode.ids) - sampled, "cached": 0, "output": sampled}
    if isinstance(policy, Teacher):
        used = {kind: policy.usage[task.id, episode.sample][kind] for kind in TOKENS}
    said = [message for message in episode.messages if message["role"] in ("assistant", "tool")]
    return {"id": task.id, "hash": task.hash(), "level": task.level or "none", "policy": name,
            "success": episode.reward > 0, "ending": episode.ending, "turns": episode.turns, "tokens": used,
            "verdict": episode.verdict and asdict(episode.verdict), "messages": opening(task, config) + said,
            "task": replace(task, witness=None, plan=None).to_json()}
