"""Advantages, the clipped loss and its weights against published figures, plain Python and trl's own code."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl.grpo import advantages, clip_fractions, importance_weights, mismatch, token_loss, token_weights

ONE_OF_EIGHT = [1, 0, 0, 0, 0, 0, 0, 0]


def random_batch(seed=0, shape=(5, 12)):
    """New, old and sampler log-probs, advantages [n, 1] and a mask of rows of different length."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(shape, generator=generator) * 3
    new = old + 0.4 * torch.randn(shape, generator=generator)
    sampler = old + 0.3 * torch.randn(shape, generator=generator)
    advantage = torch.randn((shape[0], 1), generator=generator)
    mask = (torch.arange(shape[1]) < torch.tensor([12, 3, 7, 1, 10])[:, None]).float()
    return new, old, sampler, advantage, mask


# advantages


def test_advantages_of_one_success_in_eight():
    found = advantages(ONE_OF_EIGHT)
    assert found.tolist() == pytest.approx([2.474867] + [-0.353552] * 7, abs=1e-6)
    # The same rewards with an eps of 1e-4 are the figures that are usually quoted.
    std = torch.tensor(ONE_OF_EIGHT, dtype=torch.float64).std()
    quoted = found * (std + 1e-6) / (std + 1e-4)
    assert quoted[:2].tolist() == pytest.approx([2.47417, -0.35345], abs=1e-5)


def test_advantages_without_std():
    assert advantages(ONE_OF_EIGHT, std="none").tolist() == [0.875] + [-0.125] * 7


@pytest.mark.parametrize("rewards", [[0] * 8, [1] * 8, [0.1] * 7, [1 / 3] * 3, [1], [0.7]])
@pytest.mark.parametrize("std", ["group", "none"])
def test_equal_rewards_teach_nothing_exactly(rewards, std):
    assert advantages(rewards, std=std).tolist() == [0.0] * len(rewards)


def test_advantages_take_lists_arrays_and_tensors():
    for kind in (list, np.array, np.float32, torch.tensor):
        rewards = kind(ONE_OF_EIGHT)
        assert torch.equal(advantages(rewards), advantages(ONE_OF_EIGHT))
    assert advantages([]).shape == (0,)


def test_unknown_std_is_refused():
    with pytest.raises(ValueError, match="batch.*group, none"):
        advantages([0, 1], std="batch")


# the loss of a token


@pytest.mark.parametrize(
    "ratio, advantage, dual_clip, loss",
    [
        (1.0, 1.0, None, -1.0),
        (1.5, 1.0, None, -1.28),  # clipped above
        (0.5, 1.0, None, -0.5),  # worse and unlikely: never clipped
        (0.5, -1.0, None, 0.8),  # clipped below
        (1.5, -1.0, None, 1.5),
        (10.0, -1.0, None, 10.0),  # a wild token
        (10.0, -1.0, 3.0, 3.0),  # the dual clip bounds it
        (2.9, -1.0, 3.0, 2.9),
        (10.0, 1.0, 3.0, -1.28),  # only negative advantages
        (10.0, 0.0, 3.0, 0.0),
    ],
)
def test_token_loss_by_hand(ratio, advantage, dual_clip, loss):
    new = torch.tensor([math.log(ratio)], dtype=torch.float64)
    found = token_loss(new, torch.zeros_like(new), advantage, 0.2, 0.28, dual_clip)
    assert found.shape == new.shape
    assert found.item() == pytest.approx(loss, abs=1e-12)


def test_one_wild_token_decides_a_batch_unless_clipped():
    new = torch.tensor([0.0, 0.0, 0.0, math.log(7.0)])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    plain = token_loss(new, torch.zeros(4), advantage, 0.2, 0.28).mean()
    dual = token_loss(new, torch.zeros(4), advantage, 0.2, 0.28, dual_clip=3.0).mean()
    assert plain.item() == pytest.approx((-1 - 1 + 1 + 7) / 4)
    assert dual.item() == pytest.approx((-1 - 1 + 1 + 3) / 4)


def test_clipped_tokens_have_no_gradient():
    new = torch.log(torch.tensor([1.5, 0.5, 10.0, 1.1])).requires_grad_()
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0])
    token_loss(new, torch.zeros(4), advantage, 0.2, 0.28, dual_clip=3.0).sum().backward()
    assert new.grad[:3].tolist() == [0, 0, 0]
    assert new.grad[3].item() == pytest.approx(-1.1)


def test_extreme_log_probs_stay_finite():
    new = torch.tensor([0.0, -200.0, 0.0, -200.0], requires_grad=True)
    old = torch.tensor([-200.0, 0.0, -200.0, 0.0])
    loss = token_loss(new, old, torch.tensor([1.0, 1.0, -1.0, 0.0]), 0.2, 0.28)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(new.grad).all()


# importance weights, mismatch, clip fractions


def test_importance_weights_are_cut_from_above_and_detached():
    old = torch.tensor([0.0, -1.0, -1.0], requires_grad=True)
    weights = importance_weights(old, torch.tensor([0.0, -3.0, 0.0]), cap=2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-1)])
    assert not weights.requires_grad
    assert importance_weights(old, torch.zeros(3), cap=None).tolist() == [1, 1, 1]
    assert importance_weights(torch.tensor([300.0]), torch.tensor([-300.0]), cap=2.0).item() == 2.0


def test_mismatch():
    new, sampler = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    found = mismatch(new, sampler)
    assert found["mean"] == pytest.approx(0.75)
    assert found["max"] == pytest.approx(1.0)
    assert found["k3"] == pytest.approx((math.exp(0.5) - 1.5 + math.exp(-1)) / 2)
    assert mismatch(new, new) == {"mean": 0, "max": 0, "k3": 0}
    assert mismatch(torch.zeros(0), torch.zeros(0)) == {"mean": 0, "max": 0, "k3": 0}


def test_k3_estimates_the_kl_divergence():
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randn(20, generator=generator).log_softmax(0) for _ in range(2))
    tokens = torch.multinomial(theirs.exp(), 200_000, replacement=True, generator=generator)
    exact = (theirs.exp() * (theirs - ours)).sum().item()
    assert mismatch(ours[tokens], theirs[tokens])["k3"] == pytest.approx(exact, rel=0.02)


def test_clip_fractions():
    new = torch.log(torch.tensor([1.5, 0.5, 1.5, 0.5, 10.0]))
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0])
    found = clip_fractions(new, torch.zeros(5), advantage, 0.2, 0.28, 3.0)
    assert found == pytest.approx({"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.2})
    assert clip_fractions(new, torch.zeros(5), advantage, 0.2, 0.28)["dual_clip"] == 0


def test_weights_of_whole_episodes_would_collapse():
    """Why weights are per token: with noise of 0.02 nats a token, the median over episodes of 8k tokens is 0.18."""
    noise = 0.02 * torch.randn(500, 8192, generator=torch.Generator().manual_seed(0))
    weights = importance_weights(noise - 0.02**2 / 2, torch.zeros(()), cap=2.0)  # the mean of exp is 1
    assert weights.mean().item() == pytest.approx(1, abs=1e-4)
    assert weights.double().log().sum(1).exp().median().item() == pytest.approx(0.18, abs=0.06)


# what a token weighs


def test_token_weights():
    assert token_weights([3, 0, 1]) == [0.25, 0.0, 0.25]
    assert token_weights([3, 0, 1], "sequence") == pytest.approx([1 / 6, 0, 1 / 2])
    assert token_weights([3, 0, 1], "constant", max_tokens=10) == [0.05, 0.0, 0.05]
    assert token_weights([0, 0], "token") == [0, 0]
    with pytest.raises(ValueError, match="tokens.*token, sequence, constant"):
        token_weights([1], "tokens")


def test_micro_batch_denominators_would_give_another_answer():
    """Why weights are fixed for the whole batch: the mean of means is not the mean."""
    losses, counts = [4.0, 1.0], [1, 9]
    weights = token_weights(counts)
    whole = sum(loss * count * weight for loss, count, weight in zip(losses, counts, weights, strict=True))
    assert whole == pytest.approx(1.3)
    assert sum(losses) / 2 == 2.5


# trl's code on the same numbers


def trl_loss(loss_type, new, old, sampler, advantage, mask, cap, delta):
    """GRPOTrainer's loss of given log-probs, its surroundings replaced by the little that the method reads."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    metrics = {"train": {name: [] for name in (
        "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "clip_ratio/low_min",
        "clip_ratio/high_max")}}
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (new, torch.zeros_like(new), None),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1),
        args=SimpleNamespace(delta=delta, steps_per_generation=1), _metrics=metrics, aux_loss_enabled=False, beta=0.0,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token",
        loss_type=loss_type, epsilon_low=0.2, epsilon_high=0.28, use_vllm=True,
        vllm_importance_sampling_correction=True, current_gradient_accumulation_steps=1, max_completion_length=12,
        _entropy_bonus_enabled=False, model=SimpleNamespace(training=True),
    )
    n = len(new)
    inputs = {"prompt_ids": torch.zeros(n, 1), "prompt_mask": torch.ones(n, 1), "completion_ids": torch.zeros_like(new),
              "completion_mask": mask, "advantages": advantage[:, 0], "old_per_token_logps": old,
              "importance_sampling_ratio": (old - sampler).exp().clamp(max=cap), "num_items_in_batch": mask.sum()}
    loss = trainer._compute_loss(stub, None, inputs)
    return loss, {name: values[0] for name, values in metrics["train"].items()}


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("aggregation, loss_type", [("token", "dapo"), ("sequence", "grpo"), ("constant", "dr_grpo")])
def test_loss_and_gradient_equal_trl(aggregation, loss_type, dual_clip):
    """trl's `delta`, an upper bound of the ratio, is what others call the dual clip."""
    new, old, sampler, advantage, mask = random_batch()
    ours, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
    weights = token_weights(mask.sum(1).int().tolist(), aggregation, max_tokens=12)
    loss = token_loss(ours, old, advantage, 0.2, 0.28, dual_clip) * importance_weights(old, sampler, 2.0)
    loss = (loss * mask * torch.tensor(weights)[:, None]).sum()
    expected, metrics = trl_loss(loss_type, theirs, old, sampler, advantage, mask, cap=2.0, delta=dual_clip)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    loss.backward()
    expected.backward()
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)
    inside = mask.bool()
    fractions = clip_fractions(new[inside], old[inside], advantage.expand_as(new)[inside], 0.2, 0.28)
    assert fractions["clip_low"] == pytest.approx(metrics["clip_ratio/low_mean"], abs=1e-6)
    assert fractions["clip_high"] == pytest.approx(metrics["clip_ratio/high_mean"], abs=1e-6)
