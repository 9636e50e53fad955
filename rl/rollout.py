"""Many episodes at once: sample a turn, run its tools, append their answers, sample on, until all have ended."""
from collections import Counter
from collections.abc import Callable

from rl.chat import Call
from rl.env import Fault, answer_call, called, open_env, raised
from rl.episode import Episode
from rl.sampler import Completion, make_seed
from rl.workers import open_workers
from stl.monitor import Verdict
from stl.prompts import answer_block


def new_episodes(tasks: list, samples: int, *seed_parts) -> list[Episode]:
    """`samples` episodes of each task, a task's side by side; each one's seed comes from (seed_parts, task, sample).
    Where a task is there again, its samples count on, so that no two groups have the same luck."""
    played, episodes = Counter(), []
    for group, task in enumerate(tasks):
        for sample in range(samples):
            episodes.append(Episode(task, make_seed(*seed_parts, task.id, played[task.id]), group, sample))
            played[task.id] += 1
    return episodes


def rollout(sampler, chat, episodes: list[Episode], config, progress: Callable[[Episode], None] | None = None
            ) -> list[Episode]:
    """Play `episodes` to their ends and return them, in their order.

    Each ends as Episode.ending says; a tool or grader that raises is a fault of the task world, and ends one episode.
    While config.tool_workers processes run the tools, the sampler goes on with the other episodes: what an episode
    says does not depend on when its answers come, but who is sampled beside whom does, and so does the rounding of a
    sampler that rounds differently in another batch.
    """
    workers = open_workers(config.tool_workers, config.tool_seconds)
    workers.forget()

    def go_on(key: int, episode: Episode) -> None:
        if episode.ending is None:
            ask(sampler, key, episode, config)
        if episode.ending is not None:
            sampler.drop(key)
            if progress:
                progress(episode)

    for key, episode in enumerate(episodes):
        episode.version = sampler.version
        prompt = chat.prompt(episode.task)
        episode.append(prompt)
        episode.messages.append({"role": "prompt", "content": chat.text(prompt)})
        go_on(key, episode)
    while any(episode.ending is None for episode in episodes):
        completions = sampler.step(workers.ready)
        for completion in completions:
            episode = episodes[completion.key]
            if calls := take_turn(chat, episode, completion, config):
                workers.submit(completion.key, [what_to_run(i, call, episode.task, config)
                                                for i, call in enumerate(calls)])
            else:
                go_on(completion.key, episode)
        for key, texts in workers.collect(block=not completions):
            take_answers(chat, episodes[key], texts, config)
            go_on(key, episodes[key])
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


def take_turn(chat, episode: Episode, completion: Completion, config) -> list[Call]:
    """Append a sampled turn and return its calls, which are to be answered; without calls the episode has ended."""
    episode.append(completion.ids, completion.logprobs)
    episode.turns += 1
    if not completion.stopped or completion.ids[-1] != chat.stop_id:  # not a whole turn: it is not read for calls
        cut = "tokens" if len(episode.ids) >= config.max_tokens else "length"
        episode.messages.append(chat.parse(completion.ids, whole=False).message())
        episode.end("eos" if completion.stopped else cut)
        return []
    turn = chat.parse(completion.ids)
    episode.messages.append(turn.message())
    if not turn.calls:
        finish(episode, turn.content, open_env(config.env).grade)
    return turn.calls


def finish(episode: Episode, text: str, grade: Callable) -> None:
    """Grade the final message; a grader that raises makes it fail."""
    try:
        verdict = grade(episode.task, text)
    except Exception as error:
        return fail(episode, raised(grade, error))
    if not isinstance(verdict, Verdict):
        return fail(episode, f"{called(grade)} returned no stl.monitor.Verdict but {verdict!r:.80}")
    episode.end("no answer" if answer_block(text) is None else "answer", verdict)


def fail(episode: Episode, reason: str) -> None:
    """End the episode without a reward, by a fault of the task world; train.py stops a run where this is not rare."""
    episode.messages.append({"role": "error", "content": reason})
    episode.end("error")


def what_to_run(place: int, call: Call, task, config) -> tuple:
    """The function and its arguments that answer a turn's call number `place`."""
    if place >= config.max_turn_calls:
        return str, f"Error: not run, a turn has at most {config.max_turn_calls} calls."
    if call.error:
        return str, f"Error: {call.error}."
    if not config.tools:
        return str, "Error: there are no tools here; answer directly."
    return answer_call, open_env(config.env).call_tool, task, call.name, call.arguments, config.tool_manner


def take_answers(chat, episode: Episode, texts: list[str], config) -> None:
    """Append the answers to the last turn's calls, unless they no longer fit or a tool raised."""
    for i, text in enumerate(texts):
        if isinstance(text, Fault):
            return fail(episode, str(text))
        episode.messages.append({"role": "tool", "tool_call_id": f"call_{i}", "content": text})
    ids = chat.tool_turn(texts)
    if len(episode.ids) + len(ids) >= config.max_tokens:
        episode.end("tokens")  # the budget counts tool text too, and never overflows
    else:
        episode.append(ids)
