"""The sampler in plain PyTorch, for any machine: continuous batching over slots whose caches live between turns."""
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from rl.sampler import Completion, never, uniforms


@dataclass
class Request:
    key: int
    ids: list[int]  # everything so far, grown token by token
    start: int  # where the new turn begins in ids
    limit: int  # length at which the turn is cut
    seed: int
    logprobs: list[float] = field(default_factory=list)


class TorchSampler:
    """Samples from `model` itself (so a sync costs nothing), at most `slots` conversations at one time.

    Each slot holds the key-value and delta-net caches of one conversation. New text is read in batches of whole turns;
    then all slots decode one token at a time, until enough of them are done to make the next batch worth its while.
    """

    def __init__(self, model, slots: int, max_len: int, n_vocab: int, stop_ids: list[int], temperature: float = 1.0):
        self.model, self.slots, self.max_len, self.n_vocab = model, slots, max_len, n_vocab
        self.stop_ids = frozenset(stop_ids)
        self.temperature = temperature  # 0: the most likely token
        self.version = 0
        self.cache = None  # made at the first request, and given back by release()
        self.load(0)

    def load(self, version: int) -> None:
        self.version = version
        self.waiting: deque[Request] = deque()  # read as soon as they have a slot
        self.active: list[Request] = []  # between two tokens
        self.slot: dict[int, int] = {}  # of each conversation
        self.free = list(range(self.slots))[::-1]
        if self.cache is not None:
            self.cache.reset(torch.arange(self.slots))

    def release(self) -> None:
        """Give the caches' memory back; the next request makes them anew."""
        self.cache = None
        self.load(self.version)

    def metrics(self) -> dict[str, float]:
        return {}

    def add(self, key: int, ids: list[int], max_new: int, seed: int) -> None:
        if len(ids) + max_new > self.max_len or max_new < 1:
            raise ValueError(f"{len(ids)} tokens and {max_new} new ones: at least 1, together at most {self.max_len}")
        self.waiting.append(Request(key, list(ids), len(ids), len(ids) + max_new, seed))

    def drop(self, key: int) -> None:
        if (slot := self.slot.pop(key, None)) is not None:
            self.cache.reset(torch.tensor([slot]))
            self.free.append(slot)

    @torch.no_grad()
    def step(self, until: Callable[[], bool] = never) -> list[Completion]:
        done: list[Completion] = []
        enough = max(1, len(self.active) // 8)  # turns to finish before their next ones are read together
        while len(done) < enough and (self.waiting or self.active) and not until():
            requests, starts = self._admit()
            if not requests:
                if not self.active:
                    break  # every slot belongs to a conversation that has not come back yet
                requests, starts = self.active, None
            self._advance(requests, starts, done)
        return done

    def _admit(self) -> tuple[list[Request], list[int] | None]:
        """Waiting requests that have a slot or get one, and how much of each its cache already holds."""
        admitted, postponed = [], deque()
        while self.waiting:
            request = self.waiting.popleft()
            if request.key not in self.slot:
                if not self.free:
                    postponed.append(request)
                    continue
                if self.cache is None:
                    self.cache = self.model.new_cache(self.slots, self.max_len)
                self.slot[request.key] = self.free.pop()
            admitted.append(request)
        self.waiting = postponed
        slots = [self.slot[request.key] for request in admitted]
        return admitted, self.cache.lengths[slots].tolist() if slots else None

    def _advance(self, requests: list[Request], starts: list[int] | None, done: list[Completion]) -> None:
        """Read new tokens of `requests` (from `starts` on; None: the last one), and choose one more for each."""
        new = [r.ids[-1:] for r in requests] if starts is None else [
            r.ids[start:] for r, start in zip(requests, starts, strict=True)]
        hidden = self.model.extend(new, self.cache, [self.slot[r.key] for r in requests])
        tokens, logprobs = self._choose(requests, hidden)
        if starts is not None:
            self.active += requests
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            request.ids.append(token)
            request.logprobs.append(logprob)
            if token in self.stop_ids or len(request.ids) == request.limit:
                stopped = token in self.stop_ids
                done.append(Completion(request.key, request.ids[request.start:], request.logprobs, stopped))
        finished = {completion.key for completion in done}
        self.active = [request for request in self.active if request.key not in finished]

    def _choose(self, requests: list[Request], hidden: torch.Tensor) -> tuple[list[int], list[float]]:
        """One token for each row of hidden [B, D] and its log-probability, by inverting the distribution function."""
        logits = self.model.head(hidden)[:, :self.n_vocab].float()  # ids past the tokenizer are never chosen
        logp = torch.log_softmax(logits / (self.temperature or 1.0), dim=-1)
        if self.temperature == 0:
            tokens = logp.argmax(-1)
        else:
            luck = uniforms(np.array([r.seed for r in requests]), np.array([len(r.ids) for r in requests]))
            cumulative = logp.double().exp().cumsum(-1)
            target = torch.from_numpy(luck).to(cumulative)[:, None] * cumulative[:, -1:]
            tokens = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=self.n_vocab - 1)
        return tokens.tolist(), logp.gather(1, tokens[:, None])[:, 0].tolist()
