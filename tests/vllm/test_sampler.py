"""The vLLM sampler through the real rollout and learner: its policy is the trainer's, before and after each sync."""
import dataclasses

import pytest
import torch

from model.optim import AdamW
from rl.config import replace
from rl.learner import Learner
from rl.probe import ProbeError, logprobs, probe, prove
from stl.levels import make_task
from stl.monitor import Verdict

NOISE = 0.03  # nats of mean difference between two bfloat16 computations of these models; measured: 0.007 to 0.014
TASKS = [make_task("L0", "eval", index) for index in range(2)]


def only(*kinds):
    """A test for some of the engines."""
    return pytest.mark.parametrize("engine", kinds, indirect=True)


def distance(policy, episodes) -> float:
    """Mean |log-prob difference| between sampler and trainer over the sampled tokens."""
    gaps = []
    for e in episodes:
        trainer = logprobs(policy, e.ids, len(e.ids) - 1)
        gaps += [abs(float(trainer[i - 1]) - e.logprobs[i]) for i in range(len(e.ids)) if e.mask[i]]
    return sum(gaps) / len(gaps)


def test_conversations_with_tools(policy):
    chat, episodes = policy.chat, policy.play(TASKS, 8, ("t",))
    assert max(e.turns for e in episodes) == 3 and any(m["role"] == "tool" for e in episodes for m in e.messages)
    assert len({tuple(e.ids) for e in episodes}) == 16
    for e in episodes:
        prompt = chat.prompt(e.task)
        assert e.ids[:len(prompt)] == prompt and not any(e.mask[:len(prompt)])
        said = [token for token, own in zip(e.ids, e.mask, strict=True) if own]
        texts = [m["content"] for m in e.messages if m["role"] == "assistant"]
        assert sum(e.mask) == len(said) and chat.text(said).startswith(texts[0]) and max(said) < chat.size
        stops = sum(token == chat.stop_id for token in said)
        assert stops >= e.turns - 1  # each turn's stop token but a cut last one's is trained
        assert all(own or logprob == 0.0 for logprob, own in zip(e.logprobs, e.mask, strict=True))
    assert distance(policy, episodes) < NOISE
    counts = policy.sampler.metrics()
    assert counts["turns"] == sum(e.turns for e in episodes) and counts["preemptions"] == 0
    assert counts["generated"] == sum(map(sum, (e.mask for e in episodes)))
    assert counts["prefix_hits"] > 0.5 * counts["prompts"] > 0  # the group's prompt, and earlier turns
    assert not policy.sampler.requests and not policy.sampler.lengths


@only("qwen3-adapter")
def test_a_seed_decides_its_turn(policy):
    prompt = policy.chat.prompt(TASKS[0])

    def sample(seeds):
        for key, seed in enumerate(seeds):
            policy.sampler.add(key, prompt, 12, seed)
        turns = {}
        while done := policy.sampler.step():
            turns |= {turn.key: turn.ids for turn in done}
            assert all(turn.stopped == (turn.ids[-1] == policy.chat.stop_id) for turn in done)
        for key in turns:
            policy.sampler.drop(key)
        return list(turns.values())

    first = sample([5, 6])
    assert first[0] != first[1] and sample([5, 6]) == first
    with pytest.raises(ValueError, match="together at most 4096"):
        policy.sampler.add(0, [9] * 4090, 7, 0)


def test_three_syncs_with_the_learner(policy, short_prompts):
    """After each update the sampler is the new policy, and the old one no more; stamps say which."""
    config, params = policy.config, policy.adapter.parameters()
    learner = Learner(policy.model, params, AdamW(params, config.lr), config, "cpu", policy.chat.size)
    for version in (1, 2, 3):
        episodes = policy.play(TASKS, 2, ("t", version))
        assert {e.version for e in episodes} == {version - 1}
        stats = learner.grpo_step(episodes, [1.0, -1.0, 1.0, -1.0], learner.old_logprobs(episodes))
        assert stats["steps"] == 1 and stats["mismatch_mean"] < NOISE
        old = distance(policy, episodes)
        before = [p.detach().clone() for p in params]
        policy.sampler.load(version)
        assert all(map(torch.equal, before, params))
        assert distance(policy, policy.play(TASKS, 2, ("t", version))) < NOISE < old


@only("qwen3.5-adapter")
def test_admission_by_whole_conversations(policy, monkeypatch):
    """Conversations wait while the cache is promised to others; none is preempted, none is forgotten."""
    sampler, most = policy.sampler, []
    sampler.grown.clear()
    sampler.grown.append(3000)
    monkeypatch.setattr(sampler, "budget", 2 * sampler._blocks(3000) + 1)
    complete = sampler._complete
    monkeypatch.setattr(sampler, "_complete", lambda output: (most.append(len(sampler.lengths)), complete(output))[1])
    episodes = policy.play(TASKS, 3, ("a",))
    assert max(most) == 2 and all(e.ending for e in episodes)
    assert policy.sampler.metrics()["preemptions"] == 0


@only("qwen3.5-adapter")
def test_continuations_go_first(policy, short_prompts, monkeypatch):
    order, add = [], policy.sampler.engine.add_request
    monkeypatch.setattr(policy.sampler.engine, "add_request",
                        lambda *args, **more: (order.append(more["priority"]), add(*args, **more))[1])
    policy.play(TASKS, 2, ("t",))
    assert order[:4] == [1] * 4 and set(order[4:]) == {0}


@only("qwen3-adapter")
def test_the_same_run_as_with_the_torch_sampler(policy, short_prompts, monkeypatch):
    """96 episodes with tools by either sampler; those that come to a final message are rewarded.

    Rewards, tokens an episode and log-probs a token must have Welch's |t| < 4, by chance once in 16,000 times each. A
    sampler at temperature 1.3 does not pass.
    """
    from rl.sampler_torch import TorchSampler

    config, size = policy.config, policy.chat.size
    monkeypatch.setattr("rl.stl_env.grade", lambda task, text: Verdict(True, None, [], ""))
    torch_sampler = TorchSampler(policy.model, 96, 512, size, [policy.chat.stop_id])
    figures = []
    for sampler, temperature in ((torch_sampler, 1.0), (policy.sampler, 1.0), (policy.sampler, 1.3)):
        other = dataclasses.replace(policy, sampler=sampler, config=replace(config, max_tokens=512))
        episodes = other.play(TASKS, 48, ("same", len(figures)), temperature)
        assert max(e.turns for e in episodes) > 1 and 5 < sum(e.reward for e in episodes) < 91
        figures.append([torch.tensor(values) for values in zip(*(
            (e.reward, float(e.sampled), sum(e.logprobs) / e.sampled) for e in episodes), strict=True)])
    expected, ours, hotter = figures
    assert max(welch(*pair) for pair in zip(expected, ours, strict=True)) < 4, (expected, ours)
    assert max(welch(*pair) for pair in zip(expected, hotter, strict=True)) > 4


def welch(a, b) -> float:
    """|t| of the difference of two means of as many values each."""
    return abs(float((a.mean() - b.mean()) / ((a.var() + b.var()) / len(a)).sqrt()))


@only("qwen3-adapter", "qwen3.5-merged")
def test_the_engine_takes_the_calls_of_sleep_and_wake(policy, short_prompts, monkeypatch):
    """The scheduler that refuses to sleep in the middle of something is the GPU's; only the allocator is left out."""
    import rl.sampler_vllm as module

    sampler, calls = policy.sampler, []
    executor, prompt = sampler.core.model_executor, policy.chat.prompt(TASKS[0])
    rpc = executor.collective_rpc

    def without_allocator(method, *args, **more):
        if method not in ("sleep", "wake_up", "discard"):
            return rpc(method, *args, **more)
        calls.append(method)

    monkeypatch.setattr(executor, "collective_rpc", without_allocator)
    monkeypatch.setattr(module, "free_bytes", lambda: 0)
    monkeypatch.setattr(sampler, "sleeps", True)
    for version in (1, 2):
        for key in range(3):
            sampler.add(key, prompt, 5 + 30 * key, key)
        assert len(sampler.step()) == 1  # the others are in the middle of their turns
        sampler.release()
        assert sampler.core.is_sleeping() and not sampler.awake
        sampler.load(version)
        assert policy.play(TASKS, 1, ("s",)) and not sampler.awake
    adapter = policy.sampler.sync == "adapter"
    assert set(calls) == {"discard" if adapter else "sleep", "wake_up"}
    sampler._wake()
    assert not sampler.core.is_sleeping()


# ------------------------------------------------------------------------------------------------------- the probe


def test_probe_passes(policy):
    before = [p.detach().clone() for p in policy.adapter.parameters()]
    found = probe(policy)
    assert set(found) == {name.rpartition(".")[2] for name in policy.adapter.terms} | {""}
    assert all(near < NOISE * 2 for near, far in found.values()), found
    assert all(map(torch.equal, before, policy.adapter.parameters()))


@only("qwen3.5-adapter", "qwen3-merged")
def test_a_dropped_kind_is_named(policy, monkeypatch):
    import rl.sampler_vllm as module

    save, merged = module.save_adapter, module.merged
    kind = "up_proj" if policy.sampler.sync == "merged" else "in_proj_z"
    monkeypatch.setattr(module, "save_adapter", lambda a, *rest: save(Without(a, kind), *rest))
    monkeypatch.setattr(module, "merged", lambda m, a, *rest: merged(m, Without(a, kind), *rest))
    with pytest.raises(ProbeError, match=f"new weights of {kind} do not arrive .* set sync = "):
        probe(policy)


class Without:
    """An adapter whose B of one kind is `times` as large on the way."""

    def __init__(self, adapter, kind, times=0.0):
        self.rank, self.alpha, self.prefix = adapter.rank, adapter.alpha, adapter.prefix
        self.named, self.kind, self.times = adapter.tensors(), kind, times
        self.terms = {name: term for name, term in adapter.terms.items() if not name.endswith(kind)}

    def tensors(self):
        return {name: torch.where(t == 0, t, t * self.times) if f".{self.kind}.lora_B" in name else t
                for name, t in self.named.items()}


@only("qwen3-merged")
def test_token_0_for_ever_is_said(policy, monkeypatch):
    """The row of the head that belongs to token 0 arrives so large that the engine says nothing else."""
    import rl.sampler_vllm as module

    def spoilt(*arguments):
        for name, tensor in merged(*arguments):
            yield name, torch.cat([torch.ones_like(tensor[:1]), tensor[1:]]) if name == "lm_head.weight" else tensor

    merged = module.merged
    monkeypatch.setattr(module, "merged", spoilt)
    with pytest.raises(ProbeError, match="do not arrive .* it says token 0 for ever; set sync = 'adapter'"):
        probe(policy)


@only("qwen3-merged")
def test_a_stale_prefix_cache_is_found(policy, monkeypatch):
    monkeypatch.setattr(policy.sampler.engine, "reset_prefix_cache", lambda: True)
    with pytest.raises(ProbeError, match="do not arrive"):
        probe(policy)


@only("qwen3-adapter")
def test_an_adapter_that_keeps_its_id_is_found(policy, monkeypatch):
    from vllm.lora import request

    real = request.LoRARequest
    monkeypatch.setattr(request, "LoRARequest", lambda name, number, path: real(name, 10**6, path))
    monkeypatch.setattr(policy.sampler.engine, "remove_lora", lambda number: True)
    with pytest.raises(ProbeError, match="do not arrive"):
        probe(policy)


@only("qwen3-adapter", "qwen3-merged")
def test_names_that_vllm_does_not_know_are_found(policy, monkeypatch):
    """Unknown modules are an error, or are passed over without a word, which the probe sees."""
    if policy.sampler.sync == "adapter":
        monkeypatch.setattr(policy.adapter, "prefix", "model.language_model.")
    else:
        monkeypatch.setattr(type(policy.model.config), "full_name", lambda self, name: "model.language_model." + name)
    with pytest.raises(ValueError, match="(did not take|do not arrive).* set sync = "):
        probe(policy)
    if policy.sampler.sync == "merged":  # an engine that failed in a sync is not to be trusted
        monkeypatch.undo()
        policy.sampler.rebuild("merged")


@only("qwen3-merged")
def test_no_reset_is_an_error(policy, monkeypatch):
    monkeypatch.setattr(policy.sampler.engine, "reset_prefix_cache", lambda: False)
    with pytest.raises(ValueError, match="did not empty its prefix cache"):
        policy.sampler.load(1)


@only("qwen3-merged")
def test_weights_that_are_no_numbers(policy, short_prompts):
    with torch.no_grad():
        policy.adapter.parameters()[1].fill_(float("nan"))
    policy.sampler.load(1)
    with pytest.raises(ValueError, match="log-probs are not finite .* set sync = "):
        policy.play(TASKS, 1, ("n",))


# -------------------------------------------------------------------------------------------------------- failures


def failing(engine, monkeypatch, at: int, how):
    """The engine's step number `at` fails."""
    step, count = engine.step, [0]

    def wrapped():
        count[0] += 1
        return how() if count[0] == at else step()

    monkeypatch.setattr(engine, "step", wrapped)


def die():
    raise RuntimeError("as if the engine had died")


@only("qwen3-adapter")
def test_an_engine_that_dies_is_rebuilt_once(policy, short_prompts, monkeypatch, capsys):
    with torch.no_grad():
        for term in policy.adapter.terms.values():
            term.b.normal_(0, 0.05, generator=torch.Generator().manual_seed(3))
    policy.sampler.load(4)
    failing(policy.sampler.engine, monkeypatch, 12, die)
    episodes = policy.play(TASKS, 2, ("f",))
    assert all(e.ending for e in episodes) and {e.version for e in episodes} == {4}
    assert distance(policy, episodes) < NOISE  # by the trainer's weights, in the second engine too
    assert "as if the engine had died" in capsys.readouterr().err
    failing(policy.sampler.engine, monkeypatch, 3, die)
    with pytest.raises(RuntimeError, match="failed again"):
        policy.play(TASKS, 2, ("f",))


@only("qwen3-merged")
def test_an_engine_that_hangs_is_rebuilt(policy, short_prompts, monkeypatch, capsys):
    def hang():
        while True:
            pass

    failing(policy.sampler.engine, monkeypatch, 5, hang)
    monkeypatch.setattr(policy.sampler, "config", replace(policy.config, engine_seconds=5.0))
    assert all(e.ending for e in policy.play(TASKS, 1, ("h",)))
    assert "no turn was done in 5 s" in capsys.readouterr().err


@only("qwen3-adapter")
def test_merged_weights_as_the_other_way(policy, monkeypatch):
    """The engine computes NaN where B of one kind is not zero, as a kernel did. The probe names the kind; with
    probe_failure = "merged" the engine is built anew without adapters, and proven."""
    import rl.sampler_vllm as module

    save = module.save_adapter
    monkeypatch.setattr(module, "save_adapter", lambda a, *rest: save(Without(a, "up_proj", float("nan")), *rest))
    with pytest.raises(ProbeError, match="new weights of up_proj: .* not finite .* set sync = 'merged'"):
        prove(policy)
    monkeypatch.setattr(policy, "config", replace(policy.config, probe_failure="merged"))
    said = []
    prove(policy, said.append)
    assert policy.sampler.sync == "merged" and "new weights of up_proj: " in said[0]
