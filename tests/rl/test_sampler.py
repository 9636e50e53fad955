"""The torch sampler against a plain forward: its log-probs are the policy's, whatever else is in the batch."""
import gc
import weakref

import numpy as np
import pytest
import torch

from model.qwen import ModelConfig, Qwen
from rl.sampler import make_seed, uniforms
from rl.sampler_torch import TorchSampler

ATTENTION = {"model_type": "qwen3", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48,
             "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
HYBRID = {"model_type": "qwen3_5_text", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48,
          "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
          "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
STOP, SIZE = 7, 36  # ids 36..39 are past the tokenizer


@pytest.fixture(params=[ATTENTION, HYBRID], ids=["attention", "hybrid"])
def model(request):
    model = Qwen.random(ModelConfig.from_json(request.param), seed=1)
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.4, generator=torch.Generator().manual_seed(2))
    return model


def play(model, prompts, slots, turns=3, max_new=9):
    """Three turns for each prompt, with given tokens between them; returns ids, mask and log-probs of each."""
    sampler = TorchSampler(model, slots, 128, SIZE, [STOP])
    rows = {key: (list(ids), [0] * len(ids), [0.0] * len(ids)) for key, ids in enumerate(prompts)}
    left = dict.fromkeys(rows, turns)
    for key, (ids, _, _) in rows.items():
        sampler.add(key, ids, max_new, make_seed("test", key))
    while any(left.values()):
        completions = sampler.step()
        assert completions
        for done in completions:
            ids, mask, logprobs = rows[done.key]
            assert done.stopped == (done.ids[-1] == STOP) and (done.stopped or len(done.ids) == max_new)
            assert STOP not in done.ids[:-1] and max(done.ids) < SIZE
            for values, new in zip((ids, mask, logprobs), (done.ids, [1] * len(done.ids), done.logprobs), strict=True):
                values += new
            left[done.key] -= 1
            if left[done.key] == 0:
                sampler.drop(done.key)
                continue
            answer = [1 + (done.key + i) % 5 for i in range(done.key % 4 + 1)]
            ids += answer
            mask += [0] * len(answer)
            logprobs += [0.0] * len(answer)
            sampler.add(done.key, ids, max_new, make_seed("test", done.key))
    assert sampler.step() == []
    return rows


def prompts(n):
    rng = np.random.default_rng(0)
    return [rng.integers(8, SIZE, size=int(rng.integers(1, 20))).tolist() for _ in range(n)]


def test_logprobs_equal_a_forward(model):
    for ids, mask, logprobs in play(model, prompts(12), slots=12).values():
        tokens = torch.tensor(ids)
        hidden = model(tokens, torch.tensor([0, len(ids)], dtype=torch.int32))
        logits = model.head(hidden)[:, :SIZE].float()  # the distribution that was sampled from
        expected = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), tokens[1:]]
        chosen = torch.tensor(mask[1:]).bool()
        assert torch.allclose(torch.tensor(logprobs[1:])[chosen], expected[chosen], atol=1e-4)


def test_a_conversation_does_not_depend_on_its_company(model):
    together = play(model, prompts(9), slots=9)
    queued = play(model, prompts(9), slots=2)
    alone = play(model, prompts(1), slots=1)
    assert alone[0][0] == together[0][0]
    assert {key: row[0] for key, row in queued.items()} == {key: row[0] for key, row in together.items()}


def test_samples_follow_the_distribution(model):
    sampler = TorchSampler(model, 500, 8, SIZE, [STOP])
    counts, n = torch.zeros(SIZE), 4000
    for start in range(0, n, 500):
        for key in range(500):
            sampler.add(key, [9, 10], 1, make_seed("d", start + key))
        done = sampler.step()
        while len(done) < 500:
            done += sampler.step()
        for completion in done:
            counts[completion.ids[0]] += 1
            sampler.drop(completion.key)
    hidden = model(torch.tensor([9, 10]), torch.tensor([0, 2], dtype=torch.int32))
    expected = model.head(hidden)[1, :SIZE].softmax(-1).detach()
    keep = expected * n > 5
    chi2 = float(((counts - expected * n) ** 2 / (expected * n))[keep].sum())
    assert chi2 < int(keep.sum()) + 5 * (2 * int(keep.sum())) ** 0.5, chi2


def test_greedy_and_limits(model):
    sampler = TorchSampler(model, 2, 16, SIZE, [STOP])
    sampler.temperature = 0
    sampler.add(0, [9, 10], 1, 0)
    (done,) = sampler.step()
    hidden = model(torch.tensor([9, 10]), torch.tensor([0, 2], dtype=torch.int32))
    assert done.ids == [int(model.head(hidden)[1, :SIZE].argmax())]
    with pytest.raises(ValueError, match="together at most 16"):
        sampler.add(1, [9] * 10, 7, 0)


def test_new_weights_are_seen_and_old_caches_forgotten(model):
    sampler = TorchSampler(model, 2, 32, SIZE, [STOP])
    sampler.add(0, [9, 10, 11], 1, 0)
    (before,) = sampler.step()
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    sampler.load(1)
    sampler.add(0, [9, 10, 11], 1, 0)
    (after,) = sampler.step()
    assert sampler.version == 1 and before.logprobs != after.logprobs
    logits = model.head(model(torch.tensor([9, 10, 11]), torch.tensor([0, 3], dtype=torch.int32)))[-1, :SIZE]
    assert after.logprobs[0] == pytest.approx(float(logits.detach().log_softmax(-1)[after.ids[0]]), abs=1e-5)


def test_uniforms():
    values = uniforms(np.full(200_000, 12345), np.arange(200_000))
    assert values.min() >= 0 and values.max() < 1
    assert abs(values.mean() - 0.5) < 0.005 and abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.01
    assert abs(uniforms(np.arange(200_000), np.full(200_000, 3)).mean() - 0.5) < 0.005


def test_release_gives_the_memory_back_at_once(model):
    """Without a garbage collection, which may come many steps later: each step's cache would stay beside the next."""
    sampler = TorchSampler(model, 4, 128, SIZE, [STOP])
    sampler.add(0, [8, 9], 3, 0)
    sampler.step()
    kept = weakref.ref(sampler.cache)
    gc.disable()
    try:
        sampler.release()
        assert kept() is None
    finally:
        gc.enable()
