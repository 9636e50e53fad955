"""Collecting from a scripted server on loopback: every way it can answer, limits, kill -9, and learning from it."""
import json
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

import eval as eval_script
import sample as sample_script
import train
from rl import lessons
from rl import tasks as tasks_module
from rl.chat import CompactChat, QwenChat, read_calls
from rl.config import load_config, replace
from rl.env import EnvFault
from rl.rollout import new_episodes, rollout
from rl.run import Run
from rl.sampler_script import ScriptSampler
from rl.tasks import named_tasks, reserved
from rl.teacher import TOKENS, opening, read_completion, sendable, warn_of_usage
from stl.expert import solve
from stl.levels import make_task
from stl.prompts import user_prompt
from stl.tools import TOOLS
from stl.world import Task

ROOT = Path(__file__).resolve().parents[2]
SETS = {"eval": {"L1": 1}, "rl": {"L1": 1}, "distill": {"L0": 3, "L1": 2}}
USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 60}}
KEY = "sk-a-key-that-nobody-may-see"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tasks_module, "SETS", SETS)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def expert(task: Task) -> list[dict]:
    """What the expert says, turn by turn."""
    if "expert" not in task.cache:
        task.cache["expert"] = [message for message in solve(task) if message["role"] == "assistant"]
    return task.cache["expert"]


class Server(ThreadingHTTPServer):
    """Answers as `script(task, turn, attempt)` says: a message, or (status, headers, body), or "hang" and the like.
    `asked` counts each body; `histories` are checked to be what OpenAI's servers accept."""

    daemon_threads = True
    request_queue_size = 64  # with the usual five, one of many that call at once is refused

    def __init__(self, script, tasks):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.tasks = script, {user_prompt(task): task for task in tasks}
        self.asked, self.lock, self.let_go = Counter(), threading.Lock(), threading.Event()
        self.faults = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"]))
        body, server = json.loads(text), self.server
        with server.lock:
            server.asked[text] += 1
            attempt = server.asked[text]
        try:
            assert self.path == "/v1/chat/completions" and self.headers["Authorization"] == f"Bearer {KEY}"
            check_history(body)
            task = server.tasks[body["messages"][1]["content"]]
            turn = sum(message["role"] == "assistant" for message in body["messages"])
            self.reply(server.script(task, turn, attempt))
        except AssertionError as error:
            server.faults.append(repr(error))
            raise

    def reply(self, answer):
        if answer == "hang":
            self.server.let_go.wait(20)
            return
        if answer == "half":  # the connection ends in the middle of the answer
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [{"message": {"role": "assi')
            return
        if isinstance(answer, dict):
            message = {"role": "assistant", "content": None} | answer
            reason = message.pop("reason", "tool_calls" if message.get("tool_calls") else "stop")
            choice = {"index": 0, "message": message, "finish_reason": reason}
            answer = 200, {}, json.dumps({"id": "x", "object": "chat.completion", "choices": [choice], "usage": USAGE})
        status, headers, content = answer
        self.send_response(status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(content))} | headers
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *args):
        pass


def check_history(body):
    """Calls have JSON arguments, and each is answered, in order, right behind its message."""
    assert body["model"] == "wise" and body["tools"] == TOOLS and body["temperature"] == 1.0 and body["max_tokens"] > 0
    assert [message["role"] for message in body["messages"][:2]] == ["system", "user"]
    open_calls = []
    for message in body["messages"][2:]:
        if message["role"] == "tool":
            assert message["tool_call_id"] == open_calls.pop(0)
            continue
        assert message["role"] == "assistant" and not open_calls
        for call in message.get("tool_calls", ()):
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
            open_calls.append(call["id"])
    assert not open_calls


@pytest.fixture
def serve():
    servers = []

    def start(script, tasks):
        servers.append(Server(script, tasks))
        return servers[-1]

    yield start
    for server in servers:
        server.let_go.set()
        server.shutdown()
        assert not server.faults


def arguments(server, file="data/d.jsonl", tasks="distill", **settings):
    changes = {"teacher_model": "wise", "teacher_url": server.url, "teacher_pause": 0.01, "teacher_seconds": 60}
    return ["--collect", file, "--policy", "api", "--tasks", tasks, "--config", str(ROOT / "configs/sft.py"),
            *(f"--{key}={value}" for key, value in (changes | settings).items())]


def collect(server, **settings):
    """(exit code, records by task id, manifest) of sample.py --collect."""
    code = sample_script.main(arguments(server, **settings))
    path = Path(settings.get("file", "data/d.jsonl"))
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    manifest = path.with_suffix(".manifest.json")
    return code, {row["id"]: row for row in rows}, json.loads(manifest.read_text()) if manifest.exists() else None


def several(task):
    """The expert's plan in two turns: all calls of plan_path at once, with words beside them, then the answer."""
    turns = expert(task)
    calls = [call for turn in turns for call in turn.get("tool_calls", ()) if call["function"]["name"] == "plan_path"]
    calls = [call | {"id": f"id-{i}"} for i, call in enumerate(calls)]
    return [{"content": "All legs at once.", "tool_calls": calls}, {"content": turns[-1]["content"]}]


def broken(task):
    call = {"type": "function", "id": "b", "function": {"name": "plan_path", "arguments": '{"start": [1, 2'}}
    return [{"tool_calls": [call]}, *expert(task)]


GOOD = {"good": expert, "several": several, "broken": broken}
ONCE = {"429": (429, {"Retry-After": "0"}, "{}"), "500": (500, {}, "oops"), "hang": "hang", "half": "half",
        "page": (200, {"Content-Type": "text/html"}, "<html>"), "no json": (200, {}, '{"choices": [{"mess'),
        "no choice": (200, {}, '{"error": "overloaded"}')}
BAD = {"cut": ({"content": "I think", "reason": "length"}, "length"), "silent": ({"content": "I pass."}, "no answer"),
       "wrong": ({"content": "<answer>[[0, 1, 1]]</answer>"}, "answer"),
       "long": ((400, {}, '{"error": {"message": "context too long"}}'), "error")}


def test_every_way_to_answer(serve, capsys):
    cases = [*GOOD, *ONCE, *BAD]
    tasks = {case: make_task("L0", "distill", i) for i, case in enumerate(cases)}
    case_of = {task.id: case for case, task in tasks.items()}

    def script(task, turn, attempt):
        case = case_of[task.id]
        if case in BAD and turn == 1:
            return BAD[case][0]
        if case in ONCE and turn == 1 and attempt == 1:
            return ONCE[case]
        return GOOD.get(case, expert)(task)[turn]

    server = serve(script, tasks.values())
    prices = {"teacher_prices": "(1.0, 0.1, 10.0)", "teacher_seconds": 8, "tasks": f"distill:L0={len(cases)}"}
    code, rows, manifest = collect(server, **prices)
    assert code == 0 and list(rows) == [task.id for task in tasks.values()]
    for case, task in tasks.items():
        row = rows[task.id]
        assert row["success"] == (case not in BAD), case
        assert row["ending"] == (BAD[case][1] if case in BAD else "answer")
        assert row["hash"] == task.hash() == Task.from_json(row["task"]).hash() and "plan" not in row["task"]
        turns = GOOD.get(case, expert)(task) if case not in BAD else [None] * (1 if case == "long" else 2)
        assert row["turns"] == len(turns)
        assert row["tokens"] == {"uncached": 40 * len(turns), "cached": 60 * len(turns), "output": 10 * len(turns)}
        assert [m["role"] for m in row["messages"][:2]] == ["system", "user"]
    said = rows[tasks["several"].id]["messages"]
    assert said[2]["content"] == "All legs at once." and len(said[2]["tool_calls"]) == len(said) - 4
    answers = [m["content"] for m in solve(tasks["several"]) if m["role"] == "tool"]
    assert [m["content"] for m in said[3:-1]] == answers[:-1]
    said = rows[tasks["broken"].id]["messages"]
    assert said[2]["tool_calls"][0]["function"]["arguments"] == '{"start": [1, 2'
    assert said[3]["content"] == "Error: the arguments are not a JSON object."
    used = Counter()
    for row in rows.values():
        used.update(row["tokens"])
    assert manifest["tokens"] == used and manifest["successes"] == len(GOOD) + len(ONCE)
    assert manifest["dollars"] == pytest.approx((used["uncached"] + used["cached"] / 10 + used["output"] * 10) / 1e6)
    assert sum(manifest["errors"].values()) == len(ONCE) + 1 and manifest["in_flight_at_a_kill"] == 0
    assert {"429", "500", "400", "APIConnectionError", "ValueError"} <= manifest["errors"].keys()
    assert manifest["requests"] == sum(server.asked.values())
    retried = sum(count - 1 for count in server.asked.values())
    assert retried == len(ONCE)
    out = capsys.readouterr()
    assert "0.71" in out.out and KEY not in out.out + out.err  # ten of fourteen are solved
    assert not any(KEY in path.read_text() for path in Path("data").iterdir())
    assert collect(server, **prices)[1] == rows and sum(server.asked.values()) == manifest["requests"]  # nothing again


def mistake(capsys, *argv):
    assert sample_script.main(list(argv)) == 2
    lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    (line,) = [line for line in lines if line.startswith("sample.py")]
    return line


def test_a_server_that_fails_is_reported_and_gone_on_with(serve, capsys):
    down = {"all"}

    def script(task, turn, attempt):
        if "all" in down or task.level in down and turn == 1:
            return 503, {}, "down"
        return expert(task)[turn]

    server = serve(script, named_tasks("distill"))
    args = arguments(server, teacher_retries=1)
    line = mistake(capsys, *args)
    assert "does not answer (503" in line and "same command" in line
    down.clear()
    down.add("L1")
    line = mistake(capsys, *args)
    assert "2 conversations are unfinished" in line and "L1-distill-" in line
    down.clear()
    code, rows, manifest = collect(server, teacher_retries=1)
    assert code == 0 and len(rows) == manifest["successes"] == 5
    answered = sum(len(expert(task)) for task in named_tasks("distill"))
    assert manifest["requests"] == answered + manifest["errors"]["503"] == sum(server.asked.values())


def test_what_is_refused_stops_at_once(serve, capsys):
    server = serve(lambda *_: (401, {}, json.dumps({"error": {"message": f"wrong key {KEY}"}})), named_tasks("distill"))
    line = mistake(capsys, *arguments(server, teacher_requests=1))
    assert "refuses to answer (401" in line and "[key]" in line and KEY not in line
    assert sum(server.asked.values()) == 1 and KEY not in Path("data/d.requests.jsonl").read_text()
    server.script = lambda *_: (400, {}, "no such parameter")  # from the first request on: it is not the conversation
    assert "refuses to answer (400" in mistake(capsys, *arguments(server, teacher_requests=1))
    assert sum(server.asked.values()) == 2 and not Path("data/d.jsonl").read_text()


@pytest.mark.parametrize("limit, said", [
    ({"teacher_max_tokens": 500}, "500: reached, 550"),
    ({"teacher_max_cost": 0.0005, "teacher_prices": "(1,1,1)"}, "0.0005: reached")])
def test_limits_end_it_and_can_be_raised(serve, capsys, limit, said):
    server = serve(lambda task, turn, attempt: expert(task)[turn], named_tasks("distill"))
    line = mistake(capsys, *arguments(server, teacher_requests=1, **limit))
    assert said in line and sum(server.asked.values()) == 5  # of 110 tokens each
    manifest = json.loads(Path("data/d.manifest.json").read_text())
    assert manifest["tasks"] == 5 > manifest["conversations"] and sum(manifest["tokens"].values()) == 550
    code, rows, manifest = collect(server)
    assert code == 0 and len(rows) == 5 and set(server.asked.values()) == {1}


KILLED = """
import sys
sys.path.insert(0, {root!r})
from rl import tasks
tasks.SETS = {sets!r}
import sample
sys.exit(sample.main(sys.argv[1:]))
"""


def test_after_kill_9_only_what_was_in_flight_is_repeated(serve):
    tasks = named_tasks("distill")
    state = SimpleNamespace(begun=0, hold=9)  # the tenth request and the next ones are not answered

    def script(task, turn, attempt):
        with server.lock:
            state.begun += 1
            held = state.begun > state.hold
        return "hang" if held else expert(task)[turn]

    server = serve(script, tasks)
    command = [sys.executable, "-c", KILLED.format(root=str(ROOT), sets=SETS), *arguments(server, teacher_requests=3,
                                                                                       teacher_seconds=60)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while state.begun < state.hold + 3 and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -9 and state.begun == state.hold + 3  # three conversations at a time
    in_flight = [body for body, count in server.asked.items() if count]
    journal = Path("data/d.requests.jsonl")
    with journal.open("a") as file:  # and a line that the kill cut
        file.write('{"key": "half')
    state.hold = 10**9
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    repeated = [body for body, count in server.asked.items() if count > 1]
    assert len(repeated) == 3 and max(server.asked.values()) == 2 and set(repeated) <= set(in_flight)
    manifest = json.loads(Path("data/d.manifest.json").read_text())
    assert manifest["in_flight_at_a_kill"] == 3 and manifest["successes"] == 5
    assert manifest["requests"] == sum(server.asked.values()) == sum(len(expert(task)) for task in tasks) + 3


def test_one_process_at_a_time_and_one_policy_a_file(serve, capsys):
    server = serve(lambda task, turn, attempt: expert(task)[turn], named_tasks("distill"))
    assert collect(server)[0] == 0
    plain = ["--collect", "data/d.jsonl", "--tasks", "distill", "--config", str(ROOT / "configs/sft.py")]
    assert "begun with policy = 'api', not 'expert'" in mistake(capsys, *plain)
    assert "begun with tools" in mistake(capsys, *arguments(server, tools="false"))
    import fcntl

    with open("data/d.requests.jsonl", "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "another process" in mistake(capsys, *arguments(server))
    Path("t.jsonl").write_text(json.dumps(make_task("L0", "sft", 1).to_json()) + "\n")
    assert "t.jsonl, line 1" in mistake(capsys, *plain[:1], "t.jsonl", *plain[2:])
    assert Path("t.jsonl").read_text().startswith('{"id": "L0-sft-1"')


def test_a_teacher_is_measured_on_the_held_out_set_and_billed(serve, capsys):
    tasks = [make_task(level, "eval", i) for level in ("L0", "L1") for i in range(2)]
    server = serve(lambda task, turn, attempt: expert(task)[turn], tasks)
    command = ["--policy", "api", "--level", "L0,L1", "--tasks", "2", "--samples", "2", "--json", "out.json",
               "--html", "out.html", *arguments(server, teacher_prices="(1,2,3)")[6:]]
    for _ in range(2):  # the second time, all answers are there
        assert eval_script.main(command) == 0
        out = capsys.readouterr().out
        requests = 2 * sum(len(expert(task)) for task in tasks)
        assert sum(server.asked.values()) == requests and set(server.asked.values()) == {2}  # a request for each sample
        result = json.loads(Path("out.json").read_text())
        assert result["success"] == 1.0 and result["episodes"] == 8 and f"{100 * requests * 6 // 10:,}" in out
        assert result["bill"] == {"uncached": 40 * requests, "cached": 60 * requests, "output": 10 * requests,
                                  "dollars": pytest.approx((40 + 120 + 30) * requests / 1e6)}


@pytest.mark.parametrize("policy", ["expert", "search"])
def test_policies_without_an_api_collect_the_same_way(policy, capsys):
    command = ["--collect", "e.jsonl", "--policy", policy, "--tasks", "distill:L0=2,L1=1", "--config", "tiny.py"]
    assert sample_script.main(command) == 0
    whole = Path("e.jsonl").read_text()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert [row["id"] for row in rows] == ["L0-distill-0", "L0-distill-1", "L1-distill-0"]
    assert all(row["success"] and row["policy"] == policy and row["hash"] for row in rows)
    assert policy == "search" or rows[0]["messages"][2]["content"].startswith("Plan: ")  # as the small student speaks
    Path("e.jsonl").write_text(whole.splitlines()[1] + "\n" + whole[:100])  # killed: one is there, and half a line
    assert sample_script.main(command) == 0 and Path("e.jsonl").read_text() == whole


def test_tasks_of_the_sets_are_refused_under_any_name(capsys):
    assert len(reserved({(0.3, 1.0)})) == 2 and len(list(Path("data").glob("*keep-out*"))) == 1
    args = ["--collect", "e.jsonl", "--tasks"]
    assert "as L1-eval-0" in mistake(capsys, *args, "eval")
    renamed = make_task("L1", "rl", 0).to_json() | {"id": "mine", "level": "L7"}
    Path("mine.jsonl").write_text(json.dumps(renamed) + "\n")
    assert "task mine" in (line := mistake(capsys, *args, "mine.jsonl")) and "as L1-rl-0" in line
    assert not Path("e.jsonl").exists()


@pytest.mark.parametrize("argv, said", [
    (["--collect", "x.jsonl"], "one needs the other"),
    (["--collect", "x.json", "--tasks", "distill"], "must end in .jsonl"),
    (["--collect", "/proc/x/x.jsonl", "--tasks", "distill"], "--collect /proc/x/x.jsonl: cannot be written"),
    (["--collect", "a.jsonl", "--tasks", "distill"], "--collect a.jsonl: must be a file"),
    (["--collect", "x.jsonl", "--tasks", "nothing"], "no such file; give one, or eval, rl, distill"),
    (["--collect", "x.jsonl", "--tasks", "sft:L0"], "how many"),
    (["--collect", "x.jsonl", "--tasks", "sft:L99=1"], "the levels are"),
    (["--collect", "x.jsonl", "--tasks", "distill", "--level", "L1"], "not for --collect"),
    (["--collect", "x.jsonl", "--tasks", "distill", "--teacher_modle=x"], "did you mean teacher_model"),
    (["--collect", "x.jsonl", "--tasks", "distill", "--policy", "api"], "teacher_model = ''"),
    (["--collect", "x.jsonl", "--tasks", "distill", "--policy", "api", "--teacher_model=x", "--teacher_max_cost=3"],
     "give teacher_prices too"),
])
def test_mistakes_are_named(capsys, argv, said):
    Path("a.jsonl").mkdir()
    assert said in mistake(capsys, *argv) and not Path("x.jsonl").exists()


def test_a_key_must_be_there(capsys, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    args = ["--collect", "x.jsonl", "--tasks", "distill", "--policy", "api", "--teacher_model=x"]
    assert "OPENAI_API_KEY is not set" in mistake(capsys, *args)


def completion(usage=None, **message) -> dict:
    """As read_completion reads it."""
    return read_completion({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})


@pytest.mark.parametrize("usage, tokens", [
    ({"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1000}}, (0, 10, 5)),
    ({"prompt_tokens": -7, "completion_tokens": -5, "prompt_cache_hit_tokens": -3}, (0, 0, 0)),
    ({"prompt_tokens": float("inf"), "completion_tokens": float("nan")}, (0, 0, 0)),
    ({"prompt_tokens": "12", "completion_tokens": "some", "prompt_cache_hit_tokens": [3]}, (12, 0, 0)),
    ({"prompt_tokens": 10**400, "completion_tokens": 2.5}, (0, 0, 0)),
    ({"prompt_tokens": 12.0, "completion_tokens": "10", "prompt_tokens_details": {"cached_tokens": "3"}}, (9, 3, 10)),
    ({"prompt_tokens": 12, "completion_tokens": None, "prompt_tokens_details": 3}, (12, 0, 0)),
    ("many", (0, 0, 0)), (None, (0, 0, 0))])
def test_figures_that_cannot_be(usage, tokens, capsys):
    warn_of_usage.cache_clear()
    for _ in range(3):
        assert completion(usage, content="x")["tokens"] == dict(zip(TOKENS, tokens, strict=True))
    said = capsys.readouterr().err.count("counts as 0")
    assert said == (0 if usage and "prompt_tokens_details" in usage and tokens[2] else 1)


def test_a_prompt_that_raises_is_one_line(monkeypatch):
    monkeypatch.setattr("rl.stl_env.user_prompt", lambda task: task.nothing)
    with pytest.raises(EnvFault, match="raised AttributeError: .*; asked for L0-eval-0"):
        opening(make_task("L0", "eval", 0), load_config("tiny.py"))


def test_what_servers_say_in_other_forms():
    parts = [{"type": "text", "text": "a "}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert completion(content=parts)["message"] == {"role": "assistant", "content": "a b"}
    said = completion(content="<think>\nx <answer>1</answer>\n</think>\n\nNo.")["message"]
    assert said == {"role": "assistant", "content": "No.", "reasoning_content": "x <answer>1</answer>"}
    assert sendable(said) == {"role": "assistant", "content": "No."}
    deep = {"a": json.loads("[" * 300 + "]" * 300)}
    calls = [{"id": "\udc00", "function": {"name": "p\ud83d", "arguments": arguments}}
             for arguments in ({"goal_region": "\ud83d", "avoid": None}, '{"goal_region": "\\ud83d"}', "\ud83d", deep,
                               [1])]
    message = completion(content="x \ud83d", tool_calls=calls)["message"]
    json.dumps(message, ensure_ascii=False).encode()  # what goes over the wire
    assert message["content"] == "x \ufffd" and message["tool_calls"][0]["id"] == "\ufffd"
    read = read_calls(message)
    assert [call.arguments for call in read] == [{"goal_region": "\ufffd", "avoid": None}, {"goal_region": "\ufffd"},
                                                 {}, {}, {}]
    assert [bool(call.error) for call in read] == [False, False, True, True, True]


def test_strange_calls_neither_stop_collecting_nor_spoil_the_table(serve, capsys):
    """Half a character, an object and broken JSON as arguments, one each, and then the expert's turns."""
    strange = ['{"start": [1, 1], "t_start": 0, "goal_region": "\ud83d"}', {"start": [1, 1], "t_start": 0},
               '{"start": [1,']
    tasks = [make_task("L0", "eval", i) for i in range(len(strange))]

    def script(task, turn, attempt):
        place = [one.id for one in tasks].index(task.id)
        call = {"type": "function", "id": "b", "function": {"name": "plan_path", "arguments": strange[place]}}
        return [{"content": "\ud83d", "tool_calls": [call]}, *expert(task)][turn]

    server = serve(script, tasks)
    args = ["--policy", "api", *arguments(server)[6:], "--level", "L0", "--tasks", "3", "--json", "o.json"]
    for _ in range(2):  # the second time from the journal
        assert eval_script.main([*args, "--html", "o.html"]) == 0
        found = json.loads(Path("o.json").read_text())
        assert found["success"] == 1 and found["habits"]["errors"] == 3 and found["bill"]["output"] > 0
    assert "calls answered by an error" in capsys.readouterr().out


def test_a_journal_of_something_else_is_named_with_its_line(capsys):
    Path("data").mkdir()
    Path("data/d.requests.jsonl").write_text('{"key": "a", "task": "t", "sent": 1}\n{"id": "a"}\n')
    args = ["--collect", "data/d.jsonl", "--tasks", "distill", "--policy", "api", "--teacher_model=x"]
    assert "data/d.requests.jsonl, line 2: 'key' is missing" in mistake(capsys, *args)
    Path("data/d.requests.jsonl").write_text('{"key": "a", "task": "t", "message": {}, "cut": false}\n')
    assert "data/d.requests.jsonl, line 1: 'tokens' is missing" in mistake(capsys, *args)


def test_usage_in_other_words():
    answer = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}],
              "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_cache_hit_tokens": 4}}
    assert read_completion(answer)["tokens"] == {"uncached": 5, "cached": 4, "output": 2}
    assert read_completion(answer | {"usage": None})["tokens"] == {"uncached": 0, "cached": 0, "output": 0}


# ------------------------------------------------------------------------------------------ what is learnt from them


@pytest.mark.parametrize("format", ["compact", "qwen", "real"])
@pytest.mark.parametrize("words", [expert, several])
def test_encoding_equals_what_a_rollout_records(format, words, request, serve):
    """The file's messages and a rollout in which the model says the same words: the same ids, mask and tool texts."""
    folder = None if format == "compact" else request.getfixturevalue("qwen_folder" if format == "qwen" else
                                                                      "real_qwen_folder")
    chat = QwenChat(folder) if folder else CompactChat()
    level = "L0" if format == "compact" else "L3"
    tasks = named_tasks(f"distill:{level}=2")
    code, rows, _ = collect(serve(lambda task, turn, attempt: words(task)[turn], tasks), tasks=f"distill:{level}=2")
    assert code == 0
    config = replace(load_config("tiny.py"), max_tokens=30_000, max_turn_tokens=9000, max_turns=40, max_turn_calls=20)
    for task in tasks:
        messages = rows[task.id]["messages"]
        turns = [message for message in messages if message["role"] == "assistant"]
        sampler = ScriptSampler(lambda key, turn: chat.assistant(turns[turn]), [chat.stop_id])  # noqa: B023
        (played,) = rollout(sampler, chat, new_episodes([task], 1, 0), config)
        learnt = lessons.encode(SimpleNamespace(chat=chat, config=config), rows[task.id])
        assert (learnt.ids, learnt.mask) == (played.ids, played.mask) and played.reward == 1.0
        assert [m["content"] for m in played.messages if m["role"] == "tool"] == [
            m["content"] for m in messages if m["role"] == "tool"]
        own = [token for token, mask in zip(learnt.ids, learnt.mask, strict=True) if mask]
        assert own.count(chat.stop_id) == len(turns) and own[-1] == chat.stop_id
        if folder:
            calls = [{"role": m["role"], "content": m["content"]} | ({"tool_calls": [
                {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
                for call in m["tool_calls"]]} if "tool_calls" in m else {}) for m in messages]
            assert chat.text(learnt.ids) + "\n" == chat._render(calls, False)  # the whole by the template at once


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


SHAPE = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": False}
SMALL = ["--name=small", "--chat=qwen", "--sft_steps=0", "--sft_batch=2", "--sft_epochs=2", "--sft_optimizer=adamw",
         "--sft_held_out=2", "--sft_eval_every=2", "--sft_eval_from=0", "--sft_stop=1", "--sft_lr=0.01",
         "--sft_warmup=1",
         "--max_tokens=6000", "--micro_tokens=9000", "--max_turns=2", "--max_turn_tokens=6", "--lora_rank=4",
         "--steps=1", "--tasks_per_step=2", "--samples=2", "--checkpoint_seconds=0", '--mix={"L0": 40}',
         '--eval_mix={"L0": 2}']


def killed_after(step):
    """Run.save that ends the process, as it were, once it has written that step's checkpoint."""
    save = Run.save

    def wrapped(run, stage, at, *rest):
        save(run, stage, at, *rest)
        if (stage, at) == ("sft", step):
            raise KeyboardInterrupt

    return wrapped


def test_an_adapter_learns_from_the_file_and_resumes_to_the_bit(qwen_folder, tmp_path, monkeypatch, capsys):
    """Collect, imitate (killed), then RL in the same run, which goes on from the imitation's adapter."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    import torch
    from safetensors.torch import load_file

    from model.checkpoint import save_folder
    from model.qwen import ModelConfig, Qwen

    chat = QwenChat(qwen_folder)
    save_folder(Qwen.random(ModelConfig.from_json(SHAPE | {"vocab_size": chat.size}), 1), tmp_path / "model")
    chat.save(tmp_path / "model")
    before = (tmp_path / "model/model.safetensors").read_bytes()
    assert sample_script.main(["--collect", "d.jsonl", "--tasks", "sft:L0=9"]) == 0
    rows = [json.loads(line) for line in Path("d.jsonl").read_text().splitlines()]
    rows[0]["messages"][2]["tool_calls"][0]["function"]["arguments"] = "{"
    rows[1]["success"] = False
    rows[2]["messages"][2]["content"] = "word " * 4000
    write(tmp_path / "d.jsonl", rows)
    argv = [*SMALL, f"--model={tmp_path / 'model'}", f"--sft_file={tmp_path / 'd.jsonl'}"]
    found = {}
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        if name == "killed":
            with monkeypatch.context() as patch:
                patch.setattr(Run, "save", killed_after(2))
                assert train.main(argv) == 1
        capsys.readouterr()
        assert train.main(argv) == 0
        out = capsys.readouterr().out
        run = tmp_path / name / "runs/small"
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        weights = load_file(run / "checkpoints/sft-000004/adapter_model.safetensors")
        found[name] = [{k: v for k, v in row.items() if k != "time"} for row in metrics], weights
        assert "4 conversations to learn from, 2 to measure the loss on, 3 left out" in out
        assert all(f", 1 {why}" in out for why in ("failed", "over max_tokens (6000)", "that the chat format"))
    assert found["whole"][0] == found["killed"][0]
    assert all(torch.equal(found["killed"][1][key], tensor) for key, tensor in found["whole"][1].items())
    steps = [row for row in found["whole"][0] if row["stage"] == "sft"]
    assert [row["step"] for row in steps] == [1, 2, 3, 4] and steps[3]["loss"] < steps[0]["loss"]
    losses = [row["held_out_loss"] for row in steps if "held_out_loss" in row]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert (tmp_path / "model/model.safetensors").read_bytes() == before
    assert not (run / "checkpoints/sft-000004/model.safetensors").exists()
    # peft reads the adapter, and finds the loss that was logged
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, run / "checkpoints/sft-000004")
    chosen = sorted(rows[3:], key=lambda row: row["hash"])[:2]
    policy = SimpleNamespace(chat=chat, config=load_config("tiny.py"))
    total = count = 0
    for episode in (lessons.encode(policy, row) for row in chosen):
        ids, mask = torch.tensor(episode.ids), torch.tensor(episode.mask, dtype=torch.bool)
        with torch.no_grad():
            logp = model(ids[None]).logits[0].float().log_softmax(-1)
        total -= float(logp[:-1].gather(1, ids[1:, None])[:, 0][mask[1:]].sum())
        count += int(mask.sum())
    assert losses[1] == pytest.approx(total / count, abs=1e-4)
    # RL began from it
    sampled = next(row for row in found["whole"][0] if row.get("of") == "grpo" and row["step"] == 0)
    ended = [row for row in found["whole"][0] if row.get("of") == "sft" and row["temperature"] == 1.0][-1]
    assert sampled["tokens"] == ended["tokens"] and sampled["endings"] == ended["endings"]
    for change, said in ((rows[:5], "has changed since this stage began"), ([], "nothing is left to learn from")):
        write(tmp_path / "d.jsonl", change)
        fresh = [] if change else ["--new"]
        for ended in ("grpo-000001", "sft-000004"):  # one that has ended does not look at the file
            shutil.rmtree(run / "checkpoints" / ended, ignore_errors=True)
        (run / "finished").unlink(missing_ok=True)
        capsys.readouterr()
        assert train.main([*argv, *fresh]) == 2 and said in capsys.readouterr().err
    assert train.main([*argv, "--new", "--sft_file=nowhere"]) == 2
    assert "sft_file = 'nowhere': cannot be read" in capsys.readouterr().err
