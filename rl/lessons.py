"""What the supervised stage learns from: conversations, as a rollout of the student would have recorded them."""
import hashlib
from collections import Counter
from operator import itemgetter

from tqdm import tqdm

from rl.config import Config, ConfigError
from rl.env import open_env
from rl.episode import Episode
from rl.policy import Policy
from rl.run import Checkpoint
from rl.tasks import demonstrations, read_lines, reserved, robot_of, shuffled


def lessons(config: Config, policy: Policy, tasks: list) -> tuple[list[Episode], list[Episode]]:
    """What the supervised stage learns from, and what it keeps back to measure the loss on.

    Of config.sft_file: only successes, in the student's own tokens, and within its budget.
    Says what is left out. Raises ConfigError if nothing is left, or a task of `tasks` or of the evaluation or RL sets
    is in the file.
    """
    if not config.sft_file:
        return [encode(policy, d) for d in tqdm(demonstrations(config, config.sft_tasks), "encoding", leave=False)], []
    rows = list(read_lines(config.sft_file, check_row))
    taken = reserved({robot for _, robot in rows}) | {task.hash(): task.id for task in tasks}
    found, left_out = [], Counter()
    for row, _ in tqdm(rows, "encoding", leave=False):
        if row["hash"] in taken:
            raise ConfigError(f"sft_file = {config.sft_file!r}: has the task {row['id']}, which is in the evaluation "
                              f"or RL sets (as {taken[row['hash']]}); nothing may be learnt from those here")
        if not row["success"]:
            left_out["failed"] += 1
        elif (episode := try_encode(policy, row)) is None:
            left_out["that the chat format cannot say"] += 1
        elif len(episode.ids) > config.max_tokens:
            left_out[f"over max_tokens ({config.max_tokens})"] += 1
        else:
            found.append((row["hash"], episode))
    chosen = {digest for digest, _ in sorted(found, key=lambda item: item[0])[:config.sft_held_out]}
    data = [episode for digest, episode in found if digest not in chosen]
    words = "".join(f", {count} {reason}" for reason, count in left_out.items())
    print(f"{config.sft_file}: {len(data)} conversations to learn from, {len(chosen)} to measure the loss on, "
          f"{left_out.total()} left out{words}", flush=True)
    if not data:
        raise ConfigError(f"sft_file = {config.sft_file!r}: nothing is left to learn from")
    return data, [episode for digest, episode in found if digest in chosen]


def check_row(row: dict) -> tuple[float, float]:
    """The robot of a conversation's task. Raises KeyError or TypeError for what sample.py --collect did not write."""
    itemgetter("id", "hash", "success", "messages")(row)
    return robot_of(row["task"])


def encode(policy: Policy, demonstration: dict) -> Episode:
    """The episode that a rollout would have recorded, had the policy said the demonstration's words."""
    chat, answers = policy.chat, []
    episode = Episode(open_env(policy.config.env).Task.from_json(demonstration["task"]), seed=0)
    episode.append(chat.prompt(episode.task))
    for message in demonstration["messages"]:
        if message["role"] in ("system", "user"):  # the student has its own form of the prompt
            continue
        if message["role"] == "tool":
            answers.append(message["content"])
            continue
        if answers:
            episode.append(chat.tool_turn(answers))
            answers = []
        ids = chat.assistant(message)
        episode.append(ids, logprobs=[0.0] * len(ids))
    return episode


def try_encode(policy: Policy, conversation: dict) -> Episode | None:
    """As encode; None where the conversation says what the student's format has no tokens for."""
    try:
        return encode(policy, conversation)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def file_digest(name: str, last: Checkpoint | None) -> str:
    """Of the file that is learnt from, if there is one. ConfigError if there is none, or not the one of `last`."""
    if not name:
        return ""
    try:
        with open(name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"sft_file = {name!r}: cannot be read ({error.strerror}); it is made by sample.py "
                          "--collect") from None
    if last and last.state.get("data", digest) != digest:
        raise ConfigError(f"sft_file = {name!r}: has changed since this stage began; give --new")
    return digest


def sft_batch(config: Config, data: list[Episode], step: int) -> list[Episode]:
    """The demonstrations of a step: seeded shuffles of all, one after the other."""
    return [data[i] for i in shuffled(len(data), config.seed, step * config.sft_batch, config.sft_batch)]
