"""train.py in small, for tests: a few steps, and a grader that flips a coin so that groups are mixed from the start.

    python small_run.py [--kill STAGE:STEP:PHASE] [train.py's arguments]

--kill ends the process with SIGKILL at a chosen moment: in the supervised stage right after a step's checkpoint; in a
GRPO step after its rollouts are written ("rollouts"), after its update ("update"), or half-way through writing its
checkpoint ("checkpoint").
"""
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rl.rollout
import train
from rl.sampler import make_seed
from stl.monitor import Verdict

SMALL = ["--name=small", "--sft_steps=12", "--sft_tasks=24", "--sft_eval_every=0", "--steps=4",
         "--tasks_per_step=4", "--samples=4", "--max_turns=2", "--max_turn_tokens=12", "--eval_every=2", "--threads=1",
         "--checkpoint_seconds=0", "--micro_tokens=700", "--sft_stop=1", "--sft_warmup=2",
         '--mix={"L0": 40}', '--eval_mix={"L0": 3}']


def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)


def coin(episode, text, grade=None):
    """A reward that depends on nothing but the episode's seed and what was sampled."""
    ok = make_seed(episode.seed, sum(episode.ids)) % 2 == 0
    episode.end("answer", Verdict(ok, [], [], "by coin"))


def flip_at_the_end(take_turn):
    """Episodes that would end by their length are graded too: an untrained model rarely ends a turn."""
    def wrapped(chat, episode, completion, config):
        if completion.stopped:
            take_turn(chat, episode, completion, config)
        else:
            episode.append(completion.ids, completion.logprobs)
            episode.turns += 1
            episode.messages.append({"role": "assistant", "content": chat.text(completion.ids)})
            coin(episode, "")

    return wrapped


def arrange_kill(where: str) -> None:
    stage, step, phase = where.split(":")

    def killing(function, when):
        def wrapped(*args, **kwargs):
            if when(*args, **kwargs):
                if phase == "checkpoint":  # the weights are there, the rest is not
                    kwargs["fill"] = None
                    args = [*args[:4], {}, lambda folder: ((folder / "half").write_bytes(b"0" * 1000), die())]
                    return function(*args)
                result = function(*args, **kwargs)
                die()
                return result
            return function(*args, **kwargs)

        return wrapped

    if phase == "rollouts":
        train.Run.write_episodes = killing(train.Run.write_episodes, lambda run, at, episodes: at == int(step))
    elif phase == "update":
        train.grpo_step = killing(train.grpo_step, lambda *args: args[-1] == int(step))
    else:
        train.Run.save = killing(train.Run.save, lambda run, name, at, *rest: (name, at) == (stage, int(step)))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["--kill"]:
        arrange_kill(arguments[1])
        arguments = arguments[2:]
    rl.rollout.finish = coin
    rl.rollout.take_turn = flip_at_the_end(rl.rollout.take_turn)
    sys.exit(train.main([*SMALL, *arguments]))
