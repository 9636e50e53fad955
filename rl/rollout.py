"""Many episodes at once: sample a turn, run its tools, append their answers, sample on, until all have ended."""
from collections.abc import Callable

from rl.episode import Episode
from rl.sampler import Completion, make_seed
from stl.prompts import grade
from stl.tools import call_tool
from stl.world import Task


def new_episodes(tasks: list[Task], samples: int, *seed_parts) -> list[Episode]:
    """`samples` episodes of each task, a task's side by side; each one's seed comes from (seed_parts, task, sample)."""
    return [Episode(task, make_seed(*seed_parts, task.id, sample), group, sample)
            for group, task in enumerate(tasks) for sample in range(samples)]


def rollout(sampler, chat, episodes: list[Episode], config, progress: Callable[[Episode], None] | None = None
            ) -> list[Episode]:
    """Play `episodes` to their ends and return them, in their order.

    Each ends as Episode.ending says. Errors that the tools raise on a model's text would be faults of ours; text from
    a model leads to readable tool answers, never to exceptions.
    """
    for key, episode in enumerate(episodes):
        episode.version = sampler.version
        prompt = chat.prompt(episode.task)
        episode.append(prompt)
        episode.messages.append({"role": "prompt", "content": chat.text(prompt)})
        ask(sampler, key, episode, config)
    while any(episode.ending is None for episode in episodes):
        for completion in sampler.step():
            episode = episodes[completion.key]
            take_turn(chat, episode, completion, config)
            if episode.ending is None:
                ask(sampler, completion.key, episode, config)
            if episode.ending is not None:
                sampler.drop(completion.key)
                if progress:
                    progress(episode)
    return episodes


def ask(sampler, key: int, episode: Episode, config) -> None:
    """Request the episode's next turn, or end it where its budget does not allow one."""
    room = config.max_tokens - len(episode.ids)
    if episode.turns == config.max_turns:
        episode.end("turns")
    elif room < 1:
        episode.end("tokens")
    else:
        sampler.add(key, episode.ids, min(room, config.max_turn_tokens), episode.seed)


def take_turn(chat, episode: Episode, completion: Completion, config) -> None:
    """Append a sampled turn; run its calls and append their answers, or end the episode."""
    episode.append(completion.ids, completion.logprobs)
    episode.turns += 1
    last = completion.ids[-1]
    if not completion.stopped:  # a turn that was cut is not read for calls
        episode.messages.append({"role": "assistant", "content": chat.text(completion.ids)})
        episode.end("tokens" if len(episode.ids) >= config.max_tokens else "length")
    elif last != chat.stop_id:
        episode.messages.append({"role": "assistant", "content": chat.text(completion.ids)})
        episode.end("eos")
    else:
        turn = chat.parse(completion.ids)
        episode.messages.append(turn.message())
        if turn.calls:
            answer_calls(chat, episode, turn.calls, config)
        else:
            finish(episode, turn.content)


def finish(episode: Episode, text: str) -> None:
    """Grade the final message. A fault of the grader's own is counted as the ending "error", and costs one reward."""
    try:
        verdict = grade(episode.task, text)
    except Exception as error:  # train.py stops a run in which this is not rare
        episode.messages.append({"role": "error", "content": f"{type(error).__name__}: {error}"})
        episode.end("error")
        return
    answered = "<answer>" in text and "</answer>" in text
    episode.end("answer" if answered else "no answer", verdict)


def answer_calls(chat, episode: Episode, calls: list, config) -> None:
    """Run a turn's calls in order and append their answers, unless they no longer fit."""
    answers = []
    for i, call in enumerate(calls):
        if i >= config.max_turn_calls:
            text = f"Error: not run, a turn has at most {config.max_turn_calls} calls."
        elif call.error:
            text = f"Error: {call.error}."
        elif not config.tools:
            text = "Error: there are no tools here; answer directly."
        else:
            text = call_tool(episode.task, call.name, call.arguments, config.tool_manner)
        answers.append(text)
        episode.messages.append({"role": "tool", "tool_call_id": f"call_{i}", "content": text})
    ids = chat.tool_turn(answers)
    if len(episode.ids) + len(ids) >= config.max_tokens:
        episode.end("tokens")  # the budget counts tool text too, and never overflows
    else:
        episode.append(ids)
