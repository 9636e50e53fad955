"""The rollout loop, driven by scripted turns: every way an episode can go on or end, to the token."""
import dataclasses
import json

import pytest

from rl.chat import CompactChat, QwenChat
from rl.config import load_config, replace
from rl.episode import Episode
from rl.rollout import new_episodes, rollout
from rl.sampler_script import ScriptSampler
from stl.expert import solve
from stl.levels import make_task

CONFIG = replace(load_config("tiny.py"), max_tokens=1000, max_turn_tokens=200)
CHAT = CompactChat()


def play(turns, task=None, chat=CHAT, config=CONFIG, stop_ids=None):
    """One episode in which the model says `turns`: messages, texts to encode, or ids."""
    def ids(turn):
        if isinstance(turn, dict):
            return chat.assistant(turn)
        return chat._encode(turn) if isinstance(turn, str) else turn

    task = task or make_task("L0", "eval", 0)
    sampler = ScriptSampler(lambda key, turn: ids(turns[turn]), stop_ids or [chat.stop_id, *chat.end_ids])
    (episode,) = rollout(sampler, chat, new_episodes([task], 1, 0), config)
    assert len(episode.ids) <= config.max_tokens
    assert episode.turns == sum(message["role"] == "assistant" for message in episode.messages)
    assert not sampler.turns, "the sampler was told to forget it"
    return episode


def expert_turns(task):
    return [message for message in solve(task, explain="plan") if message["role"] == "assistant"]


@pytest.mark.parametrize("format", ["compact", "qwen"])
def test_expert_is_rewarded_and_its_tokens_alone_are_masked_in(qwen_folder, format):
    chat = CHAT if format == "compact" else QwenChat(qwen_folder)
    config = CONFIG if format == "compact" else replace(CONFIG, max_tokens=30_000, max_turn_tokens=3000)
    for index in range(4):
        task = make_task("L0", "eval", index)
        episode = play(expert_turns(task), task, chat, config)
        assert (episode.ending, episode.reward) == ("answer", 1.0)
        prompt = chat.prompt(task)
        assert episode.ids[:len(prompt)] == prompt and not any(episode.mask[:len(prompt)])
        said = [token for message in expert_turns(task) for token in chat.assistant(message)]
        assert [token for token, own in zip(episode.ids, episode.mask, strict=True) if own] == said
        assert all(own or lp == 0.0 for lp, own in zip(episode.logprobs, episode.mask, strict=True))
        stops = [i for i, token in enumerate(episode.ids) if token == chat.stop_id and i >= len(prompt)]
        assert sum(episode.mask[i] for i in stops) == episode.turns  # each turn's stop token is trained
        tool_texts = [m["content"] for m in episode.messages if m["role"] == "tool"]
        assert tool_texts == [m["content"] for m in solve(task, explain="plan") if m["role"] == "tool"]


def test_wrong_and_missing_answers():
    task = make_task("L0", "eval", 0)
    x, y = task.robot.start
    wrong = play([{"content": f"<answer>[[0, {x}, {y}]]</answer>"}], task)
    assert (wrong.ending, wrong.reward) == ("answer", 0.0) and wrong.verdict.violations[0].kind == "clause"
    silent = play(["Plan A 01.00 <end>"], task)
    assert (silent.ending, silent.reward) == ("no answer", 0.0)
    broken = play(["<answer> 01.00 02.00 </answer> <end>"], task)
    assert (broken.ending, broken.reward) == ("answer", 0.0) and broken.verdict.violations[0].kind == "format"


def test_an_answer_beside_a_call_is_not_graded():
    task = make_task("L0", "eval", 1)
    *turns, final = expert_turns(task)
    both = final | {"tool_calls": turns[0]["tool_calls"]}
    episode = play([*turns, both, "Plan <end>"], task)
    assert episode.ending == "no answer" and episode.turns == len(turns) + 2


def test_a_cut_turn_is_never_run():
    task = make_task("L0", "eval", 0)
    call = CHAT.assistant(expert_turns(task)[0])
    episode = play([call], task, config=replace(CONFIG, max_turn_tokens=len(call) - 1))
    assert episode.ending == "length" and not any(m["role"] == "tool" for m in episode.messages)
    assert episode.sampled == len(call) - 1 and episode.truncated


def test_budgets_count_every_token():
    task = make_task("L0", "eval", 0)
    turns = expert_turns(task)
    whole = play(turns, task)
    for budget in range(len(CHAT.prompt(task)) + 1, len(whole.ids) + 1):
        episode = play(turns, task, config=replace(CONFIG, max_tokens=budget))
        if budget == len(whole.ids) and whole.ending == "answer":
            assert episode.ids == whole.ids and episode.reward == 1.0
        else:
            assert (episode.ending, episode.reward) == ("tokens", 0.0)
        assert episode.ids == whole.ids[:len(episode.ids)]


def test_turns_and_calls_are_capped():
    task = make_task("L0", "eval", 0)
    call = expert_turns(task)[0]
    episode = play([call] * 10, task, config=replace(CONFIG, max_turns=3, max_tokens=1000))
    assert (episode.ending, episode.turns) == ("turns", 3)
    many = call | {"tool_calls": call["tool_calls"] * 5}
    episode = play([many, "<end>"], task, config=replace(CONFIG, max_turn_calls=2))
    answers = [m["content"] for m in episode.messages if m["role"] == "tool"]
    assert len(answers) == 5 and all("at most 2 calls" in text for text in answers[2:])
    assert answers[0] == answers[1] and answers[0].startswith("Path found")


@pytest.mark.parametrize("turn", ["<call> wall A <end>", "<call> <end>", "<call> plan_path start 01.00 <end>",
                                  "<call> plan_path t_start A <end>", "<call> check_path waypoints 01.00 <end>",
                                  "<call> plan_path start 01.00 01.00 t_start 00.00 goal_region Z <end>"])
def test_bad_calls_are_answered_not_raised(turn):
    episode = play([turn, "<end>"])
    (answer,) = [m["content"] for m in episode.messages if m["role"] == "tool"]
    assert answer.startswith(("Error", "Malformed")) and episode.ending == "no answer"


def test_tools_can_be_off():
    task = make_task("L0", "eval", 0)
    episode = play([expert_turns(task)[0], "<end>"], task, config=replace(CONFIG, tools=False))
    assert "no tools" in [m["content"] for m in episode.messages if m["role"] == "tool"][0]
    (answer,) = solve(task, tools=False, explain="plan")
    assert play([answer], task, CompactChat(), replace(CONFIG, tools=False)).reward == 1.0


def test_thoughts_are_not_graded(qwen_folder):
    """Right in the thoughts alone earns nothing, a turn that never ends its thoughts has no answer."""
    chat, task = QwenChat(qwen_folder, thinking=True), make_task("L0", "eval", 0)
    right, config = f"<answer>{json.dumps(task.witness)}</answer>", replace(
        CONFIG, max_tokens=9000, max_turn_tokens=900)
    for said, ending, reward in ((f"draft {right}\n</think>\n\nI give up", "no answer", 0), (right, "no answer", 0),
                                 (f"Hm.\n</think>\n\n{right}", "answer", 1)):
        episode = play([[*chat._encode(said), chat.stop_id]], task, chat, config)
        assert (episode.ending, episode.reward) == (ending, reward), said
    cut = play([chat._encode("I am still thinking")], task, chat, config)
    assert cut.messages[-1] == {"role": "assistant", "content": "", "reasoning_content": "I am still thinking"}


def test_a_block_is_one_for_ending_and_verdict():
    """</answer> before <answer> is no block."""
    episode = play(["</answer> 01.00 <answer> <end>"])
    assert episode.ending == "no answer" and "no <answer>" in episode.verdict.text


def test_end_of_text_is_not_the_end_of_a_turn(qwen_folder):
    chat = QwenChat(qwen_folder)
    config = replace(CONFIG, max_tokens=30_000, max_turn_tokens=3000)
    (end,) = chat.end_ids
    ids = chat._encode("<answer>[[0, 1, 1]]</answer>")
    episode = play([[*ids, end]], chat=chat, config=config)
    assert (episode.ending, episode.reward, episode.sampled) == ("eos", 0.0, len(ids) + 1)


def test_a_fault_of_the_grader_costs_one_reward(monkeypatch):
    def fail(task, text):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("rl.stl_env.grade", fail)
    task = make_task("L0", "eval", 0)
    episode = play(expert_turns(task), task)
    assert (episode.ending, episode.reward) == ("error", 0.0)
    said = episode.messages[-1]["content"]
    assert "fail raised RuntimeError: a fault of ours (" in said and 'raise RuntimeError("a fault of ours")' in said
    monkeypatch.setattr("rl.stl_env.grade", lambda task, text: True)
    said = play(expert_turns(task), task).messages[-1]["content"]
    assert said.endswith("returned no stl.monitor.Verdict but True")


@pytest.mark.parametrize("count", [0, 1])
def test_a_tool_that_raises_ends_the_episode(monkeypatch, count):
    task, config = make_task("L0", "eval", 0), replace(CONFIG, tool_workers=count)
    for tool, said in [(json.loads, "json.loads raised TypeError: "), (print, "print returned no text but None")]:
        monkeypatch.setattr("rl.stl_env.call_tool", tool)
        episode = play(expert_turns(task), task, config=config)
        assert (episode.ending, episode.reward, episode.turns) == ("error", 0.0, 1)
        assert said in episode.messages[-1]["content"]


def test_episodes_survive_json():
    for task in (make_task("L0", "eval", 0), make_task("L0", "eval", 1)):
        for turns in (expert_turns(task), ["Plan <end>"], ["<call> wall <end>", "<end>"]):
            episode = play(turns, task)
            episode.logprobs = [value / 3 for value in episode.logprobs]
            again = Episode.from_json(json.loads(json.dumps(episode.to_json())))
            for name in (field.name for field in dataclasses.fields(Episode)):
                if name not in ("task", "verdict"):
                    assert getattr(again, name) == getattr(episode, name), name
            assert again.task.to_json() == episode.task.to_json()
            assert (again.verdict.ok, again.verdict.clauses) == (episode.verdict.ok, episode.verdict.clauses)


def test_seeds_tell_episodes_apart():
    tasks = [make_task("L0", "eval", i) for i in range(3)]
    seeds = [e.seed for step in range(4) for e in new_episodes(tasks, 8, 0, step)]
    assert len(set(seeds)) == len(seeds)
    assert seeds[:24] == [e.seed for e in new_episodes(tasks, 8, 0, 0)]
