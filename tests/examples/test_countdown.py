"""The other task world: its values against Python's own arithmetic, hostile text, and a small run of the trainer."""
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.countdown import env
from rl.chat import CompactChat, QwenChat
from rl.config import load_config
from rl.episode import Episode
from rl.rollout import new_episodes, rollout
from rl.run import read_episodes, read_rows
from rl.sampler_script import ScriptSampler

ROOT = Path(__file__).resolve().parent.parent.parent
NAME, CONFIG = "examples.countdown.env", ROOT / "examples" / "countdown" / "config.py"
TASK = env.Task("t", "N3", [3, 7, 5], 50, "( 3 + 7 ) * 5")


@given(st.lists(st.integers(0, 99), min_size=1, max_size=5), st.data())
def test_values_are_python_s(numbers, data):
    text = str(numbers[0])
    for number in numbers[1:]:
        text = f"({text}) {data.draw(st.sampled_from('+-*'))} {number}"
    assert env.evaluate(text) == (eval(text), sorted(numbers))


@given(st.text(alphabet="0123456789+-*/() \n.e_", max_size=250) | st.text(max_size=30))
def test_hostile_text_is_answered(text):
    assert isinstance(env.call_tool(TASK, "calculate", {"expression": text}), str)
    verdict = env.grade(TASK, f"<answer>{text}</answer>")
    assert verdict.ok == (not verdict.violations)


@pytest.mark.parametrize("text", ["9**9**9", "1//2", "-3", "3(4)", "07", "(" * 200, "print()", "1e9", "1 2", ""])
def test_what_is_no_expression(text):
    assert env.call_tool(TASK, "calculate", {"expression": text}).startswith("Error: write whole numbers")


def test_grades():
    def kind(answer):
        verdict = env.grade(TASK, answer)
        return None if verdict.ok else verdict.violations[0].kind

    assert kind("<answer>1</answer> no: <answer>5*(7+3)</answer>") is None
    assert kind("<answer>(3+7)*5+0</answer>") == "other numbers" and kind("<answer>3+7+5</answer>") == "wrong value"
    assert kind("<answer>5*(7+3</answer>") == kind("5*(7+3)") == kind("<answer>50/(7-7)</answer>") == "format"
    assert env.call_tool(TASK, "calculate", {"expression": "7/2"}) == "7/2 = 7/2, too low"
    assert all(env.call_tool(TASK, name, {}).startswith("Error") for name in ("plan", "calculate"))


def test_tasks_can_be_solved_and_sets_are_apart():
    sets = {split: [env.make_task(level, split, i) for level in env.LEVELS for i in range(200)]
            for split in ("eval", "rl", "sft")}
    for task in itertools.chain(*sets.values()):
        assert env.grade(task, f"<answer>{task.solution}</answer>").ok and 1 <= task.target <= 99
        assert env.Task.from_json(json.loads(json.dumps(task.to_json()))) == task
    puzzles = {split: {(tuple(sorted(t.numbers)), t.target) for t in tasks} for split, tasks in sets.items()}
    assert not puzzles["eval"] & (puzzles["rl"] | puzzles["sft"])


@pytest.mark.parametrize("format", ["compact", "qwen"])
def test_the_expert_is_rewarded_in_both_formats(qwen_folder, format):
    chat = CompactChat(env=NAME) if format == "compact" else QwenChat(qwen_folder, env=NAME)
    config = load_config(str(CONFIG), ["--max_tokens=4000", "--max_turn_tokens=400"])
    tasks = [env.make_task("N3", "rl", i) for i in range(4)]
    talks = [env.demonstrate(task, np.random.default_rng(i), 0.0) for i, task in enumerate(tasks)]
    turns = [[chat.assistant(message) for message in talk if message["role"] == "assistant"] for talk in talks]
    sampler = ScriptSampler(lambda key, turn: turns[key][turn], [chat.stop_id])
    for episode, talk in zip(rollout(sampler, chat, new_episodes(tasks, 1, 0), config), talks, strict=True):
        assert (episode.ending, episode.reward) == ("answer", 1.0)
        answers = [[message["content"] for message in messages if message["role"] == "tool"]
                   for messages in (episode.messages, talk)]
        assert answers[0] == answers[1]
        assert Episode.from_json(json.loads(json.dumps(episode.to_json())), NAME) == episode


def test_a_small_run_and_its_measurement(tmp_path):
    small = ["--sft_steps=2", "--sft_tasks=40", "--sft_batch=4", "--steps=1", "--tasks_per_step=4", "--samples=2",
             "--max_turns=2", '--eval_mix={"N3": 4}', "--eval_every=0"]
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(CONFIG), *small]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    run = tmp_path / "runs" / "countdown"
    (row,) = read_rows(run, "grpo")
    episodes = read_episodes(next((run / "episodes").iterdir()))
    assert row["episodes"] == len(episodes) == 8 and isinstance(episodes[0].task, env.Task)
    for script, *arguments, said in [("eval.py", "--level", "N2", "--tasks", "3", "N2"), ("sample.py", "Numbers: ")]:
        done = subprocess.run([sys.executable, str(ROOT / script), "--policy", str(run), *arguments], cwd=tmp_path,
                              capture_output=True, text=True)
        assert done.returncode == 0 and said in done.stdout, done.stderr
