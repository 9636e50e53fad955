"""The probe: proof that new weights arrive in the sampler, for each kind of layer by itself.

B of one kind is changed by a known, large amount; after a sync the sampler's log-probs must be those of the changed
policy and no longer those of the old one. The trainer computes both, before and after the sampler has its turn, so
that the two need not have the GPU at one time.
"""
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from model.logprobs import token_logprobs
from rl import dist
from rl.env import open_env
from rl.sampler import Completion, make_seed
from rl.sampler_vllm import SamplerError

PROMPT = 1200  # tokens at most; some blocks of a prefix cache
TURN = 16  # tokens sampled from each changed policy
MOVE = 3  # times the tolerance: by how much a change moves the trainer's own log-probs, on average


class ProbeError(SamplerError):
    """Weights do not arrive in the sampler as they are: which, and what to set instead."""


def prove(policy, say=print) -> None:
    """Raise ProbeError unless every kind of layer of the adapter reaches the sampler.

    With config.probe_failure "merged" a failure of vLLM's own adapters is said, and the sampler rebuilt for merged
    weights; only if these fail too, or there are other ranks, beside which no engine can be rebuilt, is it raised.
    """
    try:
        probe(policy, say)
    except SamplerError as error:
        if policy.config.probe_failure != "merged" or policy.sampler.sync != "adapter" or dist.ranks() > 1:
            raise
        say(f"{error}; building the engine anew for sync = 'merged', as probe_failure says")
        policy.sampler.rebuild("merged")
        probe(policy, say)


def probe(policy, say=print) -> dict[str, tuple[float, float]]:
    """{kind: mean |log-prob difference| of the sampler to the changed policy, and to the unchanged one}; the entry ""
    is of no change at all. Raises ProbeError. Adapter and sampler are left as they were.

    A kind to which the model's output is almost indifferent proves nothing: that is said, and it is left out."""
    sampler, adapter, config = policy.sampler, policy.adapter, policy.config
    task = open_env(config.env).make_task(next(iter(config.mix)), "probe", 0)
    prompt = policy.chat.prompt(task)[:min(PROMPT, config.max_tokens - TURN)]
    with policy.uploaded():
        kinds = {kind: find_scale(policy, kind, prompt)
                 for kind in dict.fromkeys(name.rpartition(".")[2] for name in adapter.terms)}
    for kind in (kind for kind, scale in kinds.items() if scale is None):
        say(f"the probe cannot tell whether {kind} arrives: its B moves the policy by no more than rounding does")
    kinds = {kind: scale for kind, scale in kinds.items() if scale} | {"": 0.0}
    version, sampler.temperature, turns = sampler.version, 1.0, {}
    try:
        for kind, scale in kinds.items():  # the unchanged one last, so that the sampler has it again
            with changed(adapter, kind, scale):
                sampler.load(version)
                turns[kind] = sample(sampler, prompt)
    except SamplerError as error:
        raise ProbeError(f"with new weights of {kind}: {error}" if kind else str(error)) from error
    finally:
        sampler.release()
    with policy.uploaded():
        found = {kind: compare(policy, kind, kinds[kind], prompt, turn) for kind, turn in reversed(turns.items())}
    sampler.metrics()  # not of the run
    return found


def sample(sampler, prompt: list[int]) -> Completion:
    """The same prompt twice: the second time, what a prefix cache holds of it is used."""
    for key in (-1, -2):
        sampler.add(key, prompt, TURN, make_seed("probe"))
        (turn,) = sampler.step()
        sampler.drop(key)
    return turn


def compare(policy, kind: str, scale: float, prompt: list[int], turn: Completion) -> tuple[float, float]:
    """Distances of a sampled turn to the changed and the unchanged policy. Raises ProbeError."""
    ids, own, n = prompt + turn.ids, torch.tensor(turn.logprobs), len(turn.ids)
    with changed(policy.adapter, kind, scale):
        near = float((logprobs(policy, ids, n) - own).abs().mean())
    far = float((logprobs(policy, ids, n) - own).abs().mean())
    limit, what = policy.config.probe_tolerance, f"new weights of {kind} do" if kind else "the weights at the start do"
    # The sampler must be nearer to the changed policy, not far from the old one by any fixed distance: tokens that it
    # chose itself may be almost as likely under both. Written so that a NaN fails.
    if not near <= limit or kind and not far > near:
        sign = ", and it says token 0 for ever" if not any(turn.ids) else ""
        raise ProbeError(f"{what} not arrive in vLLM: its log-probs differ by {near:.3g} from the trainer's (at most "
                         f"{limit:g}), and by {far:.3g} from those before the change{sign}; {policy.sampler.remedy}")
    return near, far


@torch.no_grad()
def logprobs(policy, ids: list[int], n: int) -> torch.Tensor:
    """The trainer's log-probs of the last n of `ids`: fp32 [n] on the CPU."""
    model = policy.model
    tokens = torch.tensor(ids, device=model.head_weight.device)
    hidden = model(tokens, torch.tensor([0, len(ids)]))[-n - 1:-1]
    return token_logprobs(hidden, model.head_weight, tokens[-n:], n_vocab=policy.chat.size)[0].cpu()


def find_scale(policy, kind: str, prompt: list[int]) -> float | None:
    """The smallest power of four by which noise in B of this kind moves the trainer's log-probs enough; None: none."""
    n = len(prompt) // 2
    before = logprobs(policy, prompt, n)
    for exponent in range(-10, 6, 2):
        with changed(policy.adapter, kind, 2.0**exponent):
            moved = (logprobs(policy, prompt, n) - before).abs().mean()
        if moved > MOVE * policy.config.probe_tolerance:
            return 2.0**exponent
    return None


@contextmanager
def changed(adapter, kind: str, scale: float) -> Iterator[None]:
    """Within, B of every layer of this kind has noise of this size on it; afterwards it is as before, to the bit."""
    terms = [term for name, term in adapter.terms.items() if name.rpartition(".")[2] == kind]
    kept = [term.b.detach().clone() for term in terms]
    generator = torch.Generator().manual_seed(make_seed("probe", kind))
    with torch.no_grad():
        for term in terms:
            term.b += (scale * torch.randn(term.b.shape, generator=generator)).to(term.b)
    try:
        yield
    finally:
        with torch.no_grad():
            for term, b in zip(terms, kept, strict=True):
                term.b.copy_(b)
