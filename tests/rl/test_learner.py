"""The learner: packing, gradients that do not depend on it, dead groups, masks, and what is logged."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from model.lora import attach
from model.optim import AdamW
from model.qwen import ModelConfig, Qwen
from rl.learner import Learner, pack, plan, sampler_logprobs

VOCAB = 11


class Toy(nn.Module):
    """A small network that sees two tokens, of its own row only; it has what the learner asks of a model."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.before, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, 8), nn.Linear(8, VOCAB, bias=False)
        self.tokens_seen = 0

    @property
    def head_weight(self):
        return self.head.weight

    def forward(self, ids, cu_seqlens):
        self.tokens_seen += len(ids)
        x = self.embed(ids)
        first = torch.zeros(len(ids), 1)
        first[cu_seqlens[:-1].long()] = 1
        return torch.tanh(x + (1 - first) * self.before(x.roll(1, 0)))


def settings(**changes):
    values = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "importance_cap": 2.0, "loss_aggregation": "token",
              "max_tokens": 64, "micro_tokens": 64, "grad_clip": 1.0, "temperature": 1.0, "mask_truncated": False,
              "head_chunk": 7, "old_logprobs": "all"}
    return SimpleNamespace(**(values | changes))


def make_items(n=6, seed=1, level="L0"):
    generator = torch.Generator().manual_seed(seed)
    items = []
    for i in range(n):
        length = int(torch.randint(5, 20, (), generator=generator))
        ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        mask = [0, 0] + torch.randint(0, 2, (length - 3,), generator=generator).tolist() + [1]
        logprobs = [-2.0 * m for m in mask]
        items.append(SimpleNamespace(ids=ids, mask=mask, logprobs=logprobs, truncated=i == 0,
                                     task=SimpleNamespace(level=f"L{i % 2}")))
    return items


def learner_of(model, **changes):
    params = list(model.parameters())
    return Learner(model, params, AdamW(params, lr=1e-2), settings(**changes))


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


class NoStep:
    """An optimizer that only looks: keeps the gradients for the test to read."""

    def __init__(self, params):
        self.params, self.grads, self.steps = params, None, 0

    def step(self):
        self.grads, self.steps = [p.grad.clone() for p in self.params], self.steps + 1

    def zero_grad(self):
        for p in self.params:
            p.grad = None


def probe_of(model, **changes):
    params = list(model.parameters())
    return Learner(model, params, NoStep(params), settings(**({"grad_clip": math.inf} | changes)))


def assert_close(ours, theirs, **tolerance):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


# packing


def test_plan_fills_longest_first_and_lets_long_items_run_alone():
    assert plan([5, 90, 20, 31, 20], 40) == [[1], [3], [2, 4], [0]]
    assert plan([10, 10, 10], 100) == [[0, 1, 2]]
    assert plan([], 40) == []


def test_pack_predicts_each_masked_token_from_the_one_before():
    items = [SimpleNamespace(ids=[5, 6, 7], mask=[0, 1, 1]), SimpleNamespace(ids=[1, 2, 3, 4], mask=[0, 0, 1, 0])]
    packed = pack(items, [1, 0], torch.device("cpu"))
    assert packed.ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert packed.cu_seqlens.tolist() == [0, 4, 7] and packed.cu_seqlens.dtype == torch.int32
    assert packed.sources.tolist() == [1, 4, 5] and packed.targets.tolist() == [3, 6, 7]
    assert packed.counts == [1, 2]
    assert packed.spread([0.5, -1.0]).tolist() == [-1.0, 0.5, 0.5]


def test_a_first_token_cannot_be_learnt():
    with pytest.raises(ValueError, match="mask.0."):
        pack([SimpleNamespace(ids=[1, 2], mask=[1, 1])], [0], torch.device("cpu"))


# imitation


def naive_logprobs(model, item):
    """Log-probs of an item's masked tokens, straight from the definition."""
    ids = torch.tensor(item.ids)
    logits = model.head(model(ids, torch.tensor([0, len(ids)])))
    return torch.stack([logits[i - 1].log_softmax(-1)[ids[i]] for i, m in enumerate(item.mask) if m])


def test_sft_loss_is_the_mean_over_masked_tokens():
    model, items = Toy(), make_items()
    loss = -torch.cat([naive_logprobs(model, item) for item in items]).mean()
    loss.backward()
    expected = gradients(model)
    model.zero_grad()
    learner = probe_of(model)
    found = learner.sft_step(items)
    assert found["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert found["tokens"] == sum(sum(item.mask) for item in items)
    assert_close(learner.optimizer.grads, expected, atol=1e-6, rtol=1e-5)


def test_sft_learns_a_small_set_by_heart():
    model, items = Toy(), make_items(3)
    learner = learner_of(model)
    losses = [learner.sft_step(items)["loss"] for _ in range(60)]
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("micro_tokens", [1, 30, 10_000])
def test_sft_gradient_does_not_depend_on_the_micro_batch(micro_tokens):
    found, expected = probe_of(Toy(), micro_tokens=micro_tokens), probe_of(Toy())
    found.sft_step(make_items())
    expected.sft_step(make_items())
    assert_close(found.optimizer.grads, expected.optimizer.grads, atol=1e-6, rtol=1e-5)


# GRPO


ADVANTAGES = [1.0, 0.0, -1.0, 0.5, 0.0, -0.5]


def drifted_old(items, seed=3):
    """Old log-probs some way off, so that ratios, clips and weights differ from token to token."""
    torch.manual_seed(seed)
    return [naive_logprobs(Toy(seed), item).detach() + 0.3 * torch.randn(sum(item.mask)) for item in items]


def naive_grpo_loss(model, items, advantages, old, c):
    """The loss token by token in plain Python numbers and torch scalars."""
    total, tokens = 0.0, sum(sum(item.mask) for item in items)
    for item, advantage, before in zip(items, advantages, old, strict=True):
        sampler = [logprob for logprob, m in zip(item.logprobs, item.mask, strict=True) if m]
        for new, o, s in zip(naive_logprobs(model, item), before, sampler, strict=True):
            ratio = (new - o).exp()
            loss = -min(ratio * advantage, ratio.clamp(1 - c.clip_low, 1 + c.clip_high) * advantage)
            loss = min(loss, -c.dual_clip * advantage) if advantage < 0 else loss
            total = total + loss * min(float((o - s).exp()), c.importance_cap) / tokens
    return total


def test_grpo_equals_the_loss_written_out():
    model, items = Toy(), make_items()
    old, learner = drifted_old(items), probe_of(model)
    loss = naive_grpo_loss(model, items, ADVANTAGES, old, learner.config)
    loss.backward()
    expected = gradients(model)
    model.zero_grad()
    found = learner.grpo_step(items, ADVANTAGES, old)
    assert found["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert_close(learner.optimizer.grads, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("micro_tokens", [1, 30, 10_000])
def test_grpo_gradient_does_not_depend_on_the_micro_batch(micro_tokens, aggregation):
    items = make_items()
    found = probe_of(Toy(), micro_tokens=micro_tokens, loss_aggregation=aggregation)
    expected = probe_of(Toy(), loss_aggregation=aggregation)
    stats = [p.grpo_step(items, ADVANTAGES, drifted_old(items)) for p in (found, expected)]
    assert_close(found.optimizer.grads, expected.optimizer.grads, atol=1e-6, rtol=1e-5)
    assert stats[0] == pytest.approx(stats[1], rel=1e-4, abs=1e-6)


def test_only_masked_tokens_have_a_gradient():
    items = [SimpleNamespace(ids=[1, 2, 3, 4], mask=[0, 0, 1, 0], logprobs=[0, 0, -1.0, 0], truncated=False,
                             task=SimpleNamespace(level="L0"))]
    learner = probe_of(Toy())
    learner.grpo_step(items, [1.0], None)
    embedding = learner.optimizer.grads[0]
    seen = [i for i in range(VOCAB) if embedding[i].abs().sum() > 0]
    assert seen == [1, 2]  # 3 is predicted from 1 and 2; what comes after it, and 3 itself, moved nothing
    other = [SimpleNamespace(**{**vars(items[0]), "ids": [1, 2, 3, 9], "logprobs": [7.0, 7.0, -1.0, 7.0]})]
    again = probe_of(Toy())
    again.grpo_step(other, [1.0], None)
    assert all(torch.equal(a, b) for a, b in zip(learner.optimizer.grads, again.optimizer.grads, strict=True))


def test_dead_episodes_are_counted_but_not_run():
    items, model = make_items(), Toy()
    learner = probe_of(model)
    found = learner.grpo_step(items, ADVANTAGES, [None if a == 0 else o for a, o in zip(ADVANTAGES, drifted_old(items),
                                                                                        strict=True)])
    assert model.tokens_seen == sum(len(item.ids) for item, a in zip(items, ADVANTAGES, strict=True) if a)
    assert found["tokens"] == sum(sum(item.mask) for item in items) > found["live_tokens"]
    assert found["live_episodes"] == 4


def test_a_batch_without_live_episodes_makes_no_step():
    model, items = Toy(), make_items()
    learner = learner_of(model)
    learner.grpo_step(items, ADVANTAGES, drifted_old(items))  # gives the optimizer momentum
    before = [p.detach().clone() for p in model.parameters()]
    found = learner.grpo_step(items, [0.0] * len(items), [None] * len(items))
    assert found["skipped"] == 1 and found["steps"] == 0
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert learner.optimizer.steps == 1


@pytest.mark.parametrize("micro_tokens", [1, 30, 10_000])
def test_first_ratio_is_one_and_old_needs_no_second_pass(micro_tokens):
    items = make_items()
    learner, other = probe_of(Toy(), micro_tokens=micro_tokens), probe_of(Toy(), micro_tokens=micro_tokens)
    old = learner.old_logprobs(items, ADVANTAGES)
    assert [o is None for o in old] == [a == 0 for a in ADVANTAGES]
    for item, before in zip(items, learner.old_logprobs(items), strict=True):
        torch.testing.assert_close(before, naive_logprobs(learner.model, item), atol=1e-5, rtol=1e-5)
    found, without = learner.grpo_step(items, ADVANTAGES, old), other.grpo_step(items, ADVANTAGES, None)
    assert found["ratio_mean"] == found["ratio_max"] == 1.0
    assert found == without
    assert found["clip_low"] == found["clip_high"] == found["dual_clip"] == 0


def test_old_logprobs_of_the_sampler_need_no_correction():
    """The ratio then holds the sampler's numerics too; how far off they are is known from the first batch alone."""
    items, learner = make_items(), probe_of(Toy(), old_logprobs="sampler")
    old = sampler_logprobs(items)
    assert [o.tolist() for o in old] == [[-2.0] * sum(item.mask) for item in items]
    expected = naive_grpo_loss(learner.model, items, ADVANTAGES, old, learner.config)
    first, second = (learner.grpo_step(items, ADVANTAGES, old, first=first) for first in (True, False))
    assert first["loss"] == second["loss"] == pytest.approx(expected.item(), abs=1e-6)
    assert first["importance_mean"] == 1 and first["importance_cut"] == 0
    live = [i for i, a in enumerate(ADVANTAGES) if a]
    new = torch.cat([naive_logprobs(learner.model, items[i]) for i in live]).detach()
    assert first["ratio_mean"] == pytest.approx((new + 2).exp().mean().item(), rel=1e-5)
    assert first["mismatch_mean"] == pytest.approx((new + 2).abs().mean().item(), rel=1e-5)
    assert not any(name.startswith("mismatch") for name in second)


def test_figures_cover_the_live_tokens():
    items, model = make_items(), Toy()
    live = [i for i, a in enumerate(ADVANTAGES) if a]
    old, learner = drifted_old(items), probe_of(model)
    found = learner.grpo_step(items, ADVANTAGES, old)
    new = torch.cat([naive_logprobs(model, items[i]) for i in live]).detach()
    before = torch.cat([old[i] for i in live])
    ratio, weight = (new - before).exp(), (before + 2.0).exp()  # the sampler's log-probs are all -2
    assert found["ratio_mean"] == pytest.approx(ratio.mean().item(), rel=1e-5)
    assert found["ratio_max"] == pytest.approx(ratio.max().item(), rel=1e-5)
    assert found["importance_mean"] == pytest.approx(weight.clamp(max=2).mean().item(), rel=1e-5)
    assert found["importance_cut"] == pytest.approx((weight > 2).float().mean().item(), abs=1e-6)
    assert found["mismatch_mean"] == pytest.approx((before + 2.0).abs().mean().item(), rel=1e-5)
    by_level = {level: sum(sum(items[i].mask) for i in live if items[i].task.level == level) for level in ("L0", "L1")}
    mean = sum(found[f"entropy_{level}"] * tokens for level, tokens in by_level.items()) / sum(by_level.values())
    assert found["entropy"] == pytest.approx(mean, rel=1e-6)


def test_masking_truncated_episodes_takes_them_out_of_the_denominator():
    items = make_items()  # the first is truncated
    old = drifted_old(items)
    masked, without = probe_of(Toy(), mask_truncated=True), probe_of(Toy())
    found = masked.grpo_step(items, ADVANTAGES, old)
    expected = without.grpo_step(items[1:], ADVANTAGES[1:], old[1:])
    assert found == pytest.approx(expected, abs=1e-7)
    assert_close(masked.optimizer.grads, without.optimizer.grads, atol=1e-7, rtol=1e-6)
    assert masked.old_logprobs(items, ADVANTAGES)[0] is None


def test_importance_correction_can_be_off_and_temperature_counts():
    items = make_items()
    old = drifted_old(items)
    off, on = probe_of(Toy(), importance_cap=None), probe_of(Toy())
    assert off.grpo_step(items, ADVANTAGES, old)["importance_mean"] == 1
    assert on.grpo_step(items, ADVANTAGES, old)["importance_mean"] != 1
    hot, cold = probe_of(Toy(), temperature=2.0), probe_of(Toy())
    assert hot.sft_step(items)["entropy"] > cold.sft_step(items)["entropy"]


def test_a_gradient_that_is_not_finite_makes_no_step():
    model, items = Toy(), make_items()
    learner = learner_of(model)
    before = [p.detach().clone() for p in model.parameters()]
    items[2].logprobs = [float("-inf")] * len(items[2].ids)
    found = learner.grpo_step(items, [0, 0, float("nan"), 0, 0, 0], None)
    assert found["nonfinite"] == 1 and found["steps"] == 0
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert learner.grpo_step(items, [1.0, 0, 0, -1.0, 0, 0], None)["steps"] == 1


# with the network and the adapter that it is made for


def qwen(kind):
    hybrid = {"model_type": "qwen3_5_text", "layer_types": ("linear_attention", "full_attention"),
              "partial_rotary_factor": 0.25, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
              "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    own = hybrid if kind == "hybrid" else {}
    config = ModelConfig(vocab_size=VOCAB + 5, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, head_dim=16, **own)
    model = Qwen.random(config, seed=0)
    torch.nn.init.normal_(model.lm_head.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    adapter = attach(model, rank=2, alpha=4)
    for i, p in enumerate(adapter.parameters()):
        torch.nn.init.normal_(p, std=0.2, generator=torch.Generator().manual_seed(i))
    return model, adapter.parameters()


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_adapter_gradient_does_not_depend_on_packing(kind):
    results = []
    for micro_tokens in (1, 30, 10_000):
        model, params = qwen(kind)
        base = {name: p.clone() for name, p in model.named_parameters()}
        config = settings(micro_tokens=micro_tokens, grad_clip=math.inf)
        learner = Learner(model, params, NoStep(params), config, n_vocab=VOCAB)
        items = make_items()
        old = learner.old_logprobs(items, ADVANTAGES)
        stats = learner.grpo_step(items, ADVANTAGES, old)
        assert stats["ratio_max"] == pytest.approx(1, abs=1e-5)
        assert all(torch.equal(p, base[name]) and p.grad is None for name, p in model.named_parameters())
        results.append((stats["loss"], learner.optimizer.grads))
    for loss, grads in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-6)
        assert_close(grads, results[0][1], atol=1e-6, rtol=1e-4)
    assert all(grad.abs().max() > 0 for grad in results[0][1])


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_gradient_checkpointing_changes_nothing(kind):
    results = []
    for checkpointing in (False, True):
        model, params = qwen(kind)
        model.gradient_checkpointing = checkpointing
        learner = Learner(model, params, NoStep(params), settings(grad_clip=math.inf), n_vocab=VOCAB)
        learner.grpo_step(make_items(), ADVANTAGES, drifted_old(make_items()))
        results.append(learner.optimizer.grads)
    assert_close(*results, atol=1e-7, rtol=1e-5)


def test_grpo_makes_rewarded_tokens_likelier():
    model, params = qwen("attention")
    learner = Learner(model, params, AdamW(params, lr=1e-2), settings(importance_cap=None), n_vocab=VOCAB)
    items = make_items()
    before = [logprobs.mean() for logprobs in learner.old_logprobs(items)]
    for _ in range(5):
        learner.grpo_step(items, ADVANTAGES, learner.old_logprobs(items, ADVANTAGES))
    after = [logprobs.mean() for logprobs in learner.old_logprobs(items)]
    assert all((a - b) * gain > 0 for a, b, gain in zip(after, before, ADVANTAGES, strict=True) if gain)
