"""Tools in worker processes: the episodes are those of one process, and nothing hangs, is lost or stays behind."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from model.qwen import Qwen
from rl.chat import DEPTH, Call, CompactChat, Turn
from rl.config import load_config, replace
from rl.policy import random_shape
from rl.rollout import new_episodes, rollout
from rl.sampler_script import ScriptSampler
from rl.sampler_torch import TorchSampler
from rl.workers import DEATHS, TRIES, Workers
from stl.expert import solve
from stl.levels import make_task
from stl.tools import call_tool
from tests.rl.tools_to_run import die_once, slow, stubborn

ROOT = Path(__file__).resolve().parent.parent.parent
CHAT, TASKS = CompactChat(), [make_task("L0", "eval", index) for index in range(6)]
CONFIG = replace(load_config("tiny.py"), max_tokens=1000, max_turn_tokens=200, max_turn_calls=2)


@pytest.fixture
def workers():
    pool = Workers(2, 2.0)
    yield pool
    end(pool)


def end(pool):
    for process in pool.processes:
        process.stdin.close()
        assert process.wait(10) == 0
        process.stdout.close()


def answers(pool, count):
    found = {}
    while len(found) < count:
        found |= dict(pool.collect(block=True))
    return found


def turns(key):
    """The expert's turns of the conversation, some with three calls in one turn, some malformed."""
    said = [message for message in solve(TASKS[key // 2], explain="plan") if message["role"] == "assistant"]
    ids = [CHAT.assistant(message) for message in said]
    thrice = CHAT.assistant(said[0] | {"tool_calls": said[0]["tool_calls"] * 3})
    return [thrice, *ids] if key % 3 == 0 else [CHAT._encode("<call> wall A <end>"), *ids] if key % 3 == 1 else ids


def play(count, monkeypatch, tool=call_tool, seconds=10.0):
    monkeypatch.setattr("rl.stl_env.call_tool", tool)
    sampler = ScriptSampler(lambda key, turn: turns(key)[turn], [CHAT.stop_id, *CHAT.end_ids])
    ended = []
    episodes = rollout(sampler, CHAT, new_episodes(TASKS, 2, 0), replace(CONFIG, tool_workers=count,
                                                                         tool_seconds=seconds), ended.append)
    assert sorted(map(id, ended)) == sorted(map(id, episodes)) and not sampler.turns
    return [episode.to_json() for episode in episodes]


def test_the_same_episodes_to_the_bit(monkeypatch):
    alone = play(0, monkeypatch)
    assert sum(episode["reward"] for episode in alone) > 6
    texts = [m["content"] for episode in alone for m in episode["messages"] if m["role"] == "tool"]
    assert any("at most 2 calls" in text for text in texts) and any(text.startswith("Error") for text in texts)
    assert play(2, monkeypatch) == alone
    assert play(2, monkeypatch, slow) == alone


class CallingChat(CompactChat):
    """Reads two of three turns as two calls, whatever they say: random models call none."""

    def parse(self, ids, whole=True):
        call = Call("plan_path", {"start": [5, 5], "t_start": 0, "goal_region": "A"})
        return Turn(self.text(ids), [call, Call("wall", error="no tool")] if whole and sum(ids) % 3 else [])


def test_the_same_with_a_model(monkeypatch):
    """With fewer slots than episodes; batches differ by who waits for a tool, and with them the last bits."""
    monkeypatch.setattr("rl.stl_env.call_tool", slow)
    chat, played = CallingChat(), []
    model = Qwen.random(random_shape(CONFIG, chat.size), seed=1)
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.05, generator=torch.Generator().manual_seed(2))
        model.lm_head.weight[chat.stop_id] = 0.06  # read from the direction that all states share
        model.embed_tokens.weight += 0.7
    for count in (0, 2):
        sampler = TorchSampler(model, 5, 400, chat.size, [chat.stop_id, *chat.end_ids])
        config = replace(CONFIG, tool_workers=count, max_tokens=400, max_turn_tokens=30, max_turns=4)
        played.append(rollout(sampler, chat, new_episodes(TASKS, 2, 0), config))
    assert sum(episode.turns > 1 for episode in played[0]) > 3
    for one, other in zip(*played, strict=True):
        assert one.to_json() | {"logprobs": 0} == other.to_json() | {"logprobs": 0}
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_a_tool_that_hangs_costs_its_own_answer(monkeypatch):
    hung, alone = play(2, monkeypatch, stubborn, 2.0), play(0, monkeypatch)
    assert hung[2:] == alone[2:]
    for episode in hung[:2]:
        texts = [m["content"] for m in episode["messages"] if m["role"] == "tool"]
        assert "Error: the call took longer than 2 s and was stopped." in texts and "Path found" in texts[-1]


def test_the_sampler_goes_on_beside_a_call(workers):
    """`ready` stays False, and a collect that does not block comes back with nothing, until the answer is there."""
    workers.submit(3, [(time.strftime, "%Y", time.gmtime(0))])
    assert answers(workers, 1) == {3: ["1970"]}
    workers.submit(7, [(str, "no call"), (time.sleep, 60), (os.path.basename, "a/b")])
    assert workers.collect(block=False) == [] and workers.processes[0].poll() is None
    workers.submit(6, [(str, "an error of the call's own")])
    assert workers.collect(block=False) == [(6, ["an error of the call's own"])]  # it waits for no worker
    workers.submit(8, [(os.path.basename, "c/d")])
    assert answers(workers, 1) == {8: ["d"]}  # by the other worker
    assert not workers.ready()
    assert answers(workers, 1)[7] == ["no call", "Error: the call took longer than 2 s and was stopped.", "b"]
    assert workers.collect(block=True) == []  # nothing to wait for


def test_a_worker_that_is_killed_is_replaced(workers, tmp_path):
    before = [process.pid for process in workers.processes]
    workers.submit(0, [(die_once, str(tmp_path / "flag")), (os.path.basename, "a/b")])
    assert answers(workers, 1) == {0: ["alive", "b"]}
    for process in workers.processes:  # both, while they have nothing to do
        process.kill()
        process.wait()
    for key in range(4):
        workers.submit(key, [(os.path.basename, f"a/{key}")])
    assert answers(workers, 4) == {key: [str(key)] for key in range(4)}
    assert not {process.pid for process in workers.processes} & set(before)


def test_a_call_that_kills_its_workers_is_given_up(workers):
    workers.submit(0, [(os._exit, 5)])
    assert answers(workers, 1) == {0: ["Error: the tool failed."]}
    with pytest.raises(RuntimeError, match="With tool_workers = 0"):
        for key in range(DEATHS // TRIES + 1):
            workers.submit(key, [(os._exit, 5)])
            answers(workers, 1)
    workers.forget()  # the next rollout begins to count anew
    with pytest.raises(RuntimeError, match=f"{DEATHS} worker processes died"):
        for key in range(DEATHS // TRIES + 1):
            workers.submit(key, [(os._exit, 5)])
            answers(workers, 1)


def test_the_deepest_arguments_and_calls_that_are_forgotten(workers):
    arguments = json.loads('{"start": ' + "[" * (DEPTH - 1) + "]" * (DEPTH - 1) + "}")
    workers.submit(0, [(call_tool, TASKS[0], "plan_path", arguments)])
    assert answers(workers, 1) == {0: [call_tool(TASKS[0], "plan_path", arguments)]}
    workers.submit(1, [(time.sleep, 0.2)] * 3)
    workers.forget()
    workers.submit(1, [(os.path.basename, "a/b")])
    assert answers(workers, 1) == {1: ["b"]}


PARENT = """
import sys, time
from rl.workers import Workers
workers = Workers(2, 2.0)
workers.submit(0, [(time.sleep, 60)])
print(*(process.pid for process in workers.processes), flush=True)
{end}
"""


@pytest.mark.parametrize("finish, code", [("pass", 0), ("raise RuntimeError('as if by a fault')", 1),
                                          ("time.sleep(60)", -signal.SIGKILL)])
def test_no_worker_outlives_its_parent(finish, code):
    """One is idle and one hangs in a call, which its own timer ends."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(end=finish)], cwd=ROOT, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True)
    pids = parent.stdout.readline().split()
    assert len(pids) == 2
    if code == -signal.SIGKILL:
        parent.kill()
    assert parent.wait(20) == code
    deadline = time.monotonic() + 20
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker is still there"
        time.sleep(0.05)


def running(pid):
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
