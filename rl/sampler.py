"""What a sampler is: it continues lists of token ids, many at once, and remembers what it has read.

One key is one conversation. `add` a turn's request, call `step` until its Completion comes, append tool answers, `add`
the longer list under the same key (a sampler keeps the caches of what it has read and reads the new part only), and
`drop` the key when the conversation is over.
"""
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass
class Completion:
    """One sampled turn: its ids (the stop token included) and their log-probabilities under what was sampled from."""

    key: int
    ids: list[int]
    logprobs: list[float]
    stopped: bool  # False: cut by max_new


def never() -> bool:
    return False


class Sampler(Protocol):
    version: int  # of the weights it samples from

    def add(self, key: int, ids: list[int], max_new: int, seed: int) -> None:
        """Ask for a continuation of `ids` by up to `max_new` tokens; `seed` decides its random numbers."""

    def step(self, until: Callable[[], bool] = never) -> list[Completion]:
        """Work until at least one request is done, or `until` says that the caller has other work; [] where that comes
        first, or no request can be worked on."""

    def drop(self, key: int) -> None:
        """Forget a conversation."""

    def load(self, version: int) -> None:
        """The policy's weights have changed: forget every cache, and stamp what comes with `version`."""

    def release(self) -> None:
        """Give memory back; the next request takes it again."""

    def metrics(self) -> dict[str, float]:
        """What was counted since the last call."""


def open_sampler(config, model, adapter, chat, folder=None) -> Sampler:
    """The sampler that `config` names. vLLM reads the weights of the model `folder`, which are those of `model`."""
    if config.sampler == "script":
        from rl.dryrun import Script

        return Script(config, chat)
    stop_ids = [chat.stop_id, *chat.end_ids]
    if config.sampler == "vllm":
        from rl.sampler_vllm import VllmSampler

        return VllmSampler(config, folder, model, adapter, chat.size, stop_ids)
    from rl.sampler_torch import TorchSampler

    return TorchSampler(model, slots=config.sampler_slots, max_len=config.max_tokens, n_vocab=chat.size,
                        stop_ids=stop_ids)


def make_seed(*parts) -> int:
    """A 63-bit seed from any printable parts, the same on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (seed, position), both [n]: a token's luck depends on nothing else in the batch.

    The mixing function is splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    """
    with np.errstate(over="ignore"):
        x = seeds.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)) * 2.0**-53
