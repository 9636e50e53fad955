"""A sampler that says what it is told to: it replays given turns through the real rollout, for dry runs and tests."""
from collections.abc import Callable

from rl.sampler import Completion, never


class ScriptSampler:
    """`script(key, turn)` gives the ids of a conversation's turn number `turn` (0, 1, ...), stop token included.

    A turn that is longer than its limit is cut there, as a real sampler would cut it. Log-probabilities are made up
    (`logprob` for each token).
    """

    def __init__(self, script: Callable[[int, int], list[int]], stop_ids: list[int], logprob: float = -1.0):
        self.script, self.stop_ids, self.logprob = script, frozenset(stop_ids), logprob
        self.load(0)

    def load(self, version: int) -> None:
        self.version, self.turns, self.waiting = version, {}, []

    def add(self, key: int, ids: list[int], max_new: int, seed: int) -> None:
        self.waiting.append((key, max_new))

    def step(self, until=never) -> list[Completion]:
        done = []
        for key, max_new in self.waiting:
            turn = self.turns[key] = self.turns.get(key, -1) + 1
            ids = self.script(key, turn)[:max_new]
            done.append(Completion(key, ids, [self.logprob] * len(ids), ids[-1] in self.stop_ids))
        self.waiting = []
        return done

    def drop(self, key: int) -> None:
        self.turns.pop(key, None)

    def release(self) -> None:
        self.load(self.version)

    def metrics(self) -> dict[str, float]:
        return {}
