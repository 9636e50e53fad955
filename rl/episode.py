"""The Episode: one conversation as the one flat list of token ids that the sampler, the tools and the learner share."""
from dataclasses import asdict, dataclass, field

from rl.env import STL, open_env
from stl.monitor import Verdict, Violation

ENDINGS = ("answer", "no answer", "turns", "tokens", "length", "eos", "error")
TRUNCATED = ("turns", "tokens", "length")


@dataclass
class Episode:
    """ids, mask and logprobs have one length and only ever grow.

    mask is 1 where the policy chose the token (each turn's stop token too) and 0 elsewhere (prompt, tool answers);
    logprobs holds the sampler's log-probability of each chosen token and 0.0 elsewhere.
    """

    task: object  # of the task world
    seed: int  # decides every random number of this episode
    group: int = 0  # episodes of one task in one step share it
    sample: int = 0  # number within the group
    version: int = 0  # of the weights that sampled it
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    messages: list[dict] = field(default_factory=list)  # what was said, to read; training never looks at it
    turns: int = 0
    ending: str | None = None  # one of ENDINGS once it is over
    verdict: Verdict | None = None
    reward: float = 0.0

    def append(self, ids: list[int], logprobs: list[float] | None = None) -> None:
        """Add tokens: chosen by the policy if their log-probabilities are given, else given to it."""
        self.ids.extend(ids)
        self.mask.extend([0 if logprobs is None else 1] * len(ids))
        self.logprobs.extend([0.0] * len(ids) if logprobs is None else logprobs)
        assert len(self.ids) == len(self.mask) == len(self.logprobs), "ids, mask and logprobs grew apart"

    def end(self, ending: str, verdict: Verdict | None = None) -> None:
        assert self.ending is None and ending in ENDINGS, (self.ending, ending)
        self.ending, self.verdict = ending, verdict
        self.reward = 1.0 if verdict is not None and verdict.ok else 0.0

    @property
    def truncated(self) -> bool:
        return self.ending in TRUNCATED

    @property
    def sampled(self) -> int:
        """How many of its tokens the policy chose."""
        return sum(self.mask)

    def to_json(self) -> dict:
        """A readable record that from_json turns back into the same episode, to the bit."""
        verdict = self.verdict and asdict(self.verdict)
        return {"task": self.task.to_json(), "group": self.group, "sample": self.sample, "seed": self.seed,
                "version": self.version, "ending": self.ending, "reward": self.reward, "turns": self.turns,
                "messages": self.messages, "verdict": verdict, "ids": self.ids, "mask": self.mask,
                "logprobs": self.logprobs}

    @classmethod
    def from_json(cls, data: dict, env: str = STL) -> "Episode":
        verdict = data["verdict"]
        if verdict:
            verdict = Verdict(**verdict | {"violations": [Violation(**v) for v in verdict["violations"]]})
        return cls(**data | {"task": open_env(env).Task.from_json(data["task"]), "verdict": verdict})
