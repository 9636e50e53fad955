"""Chunked log-probs and entropies against the naive ones, forward, backward and in memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.logprobs import token_logprobs

T, D, V = 37, 16, 101


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, D, generator=generator)
    weight = torch.randn(V, D, generator=generator)
    targets = torch.randint(0, 90, (T,), generator=generator)
    return hidden, weight, targets


def naive(hidden, weight, targets, n_vocab=None, temperature=1.0):
    logp = ((hidden @ weight.T)[:, :n_vocab] / temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk", [1, 5, 37, 1000, None])
@pytest.mark.parametrize("n_vocab, temperature", [(None, 1.0), (90, 1.0), (95, 0.7)])
def test_equal_to_the_naive_computation(chunk, n_vocab, temperature):
    hidden, weight, targets = inputs()
    grad = torch.randn(T, generator=torch.Generator().manual_seed(1))
    results = []
    for function, extra in ((token_logprobs, {"chunk": chunk}), (naive, {})):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logp, entropy = function(h, w, targets, n_vocab=n_vocab, temperature=temperature, **extra)
        (logp * grad).sum().backward()
        results.append((logp.detach(), entropy.detach(), h.grad, w.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_equal_to_trl():
    utils = pytest.importorskip("trl.trainer.utils")
    hidden, weight, targets = inputs()
    logits = hidden @ weight.T
    logp, entropy = token_logprobs(hidden, weight, targets, chunk=8)
    torch.testing.assert_close(logp, utils.selective_log_softmax(logits, targets), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, utils.entropy_from_logits(logits), atol=1e-5, rtol=1e-5)


def test_a_frozen_head_gets_no_gradient_and_entropy_has_none():
    hidden, weight, targets = inputs()
    hidden.requires_grad_()
    logp, entropy = token_logprobs(hidden, weight, targets, chunk=8)
    assert logp.requires_grad and not entropy.requires_grad
    logp.sum().backward()
    assert weight.grad is None and hidden.grad is not None


def test_bf16_gives_fp32_results_near_the_exact_ones():
    hidden, weight, targets = inputs()
    half, half_weight = hidden.bfloat16().requires_grad_(), weight.bfloat16()
    logp, entropy = token_logprobs(half, half_weight, targets, chunk=8)
    exact, exact_entropy = naive(half.detach().float(), half_weight.float(), targets)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp, exact, atol=0.1, rtol=0.02)
    torch.testing.assert_close(entropy, exact_entropy, atol=0.1, rtol=0.02)
    logp.sum().backward()
    assert half.grad.dtype == torch.bfloat16


def test_extreme_logits_and_empty_input():
    hidden = torch.tensor([[1e4], [-1e4]])
    logp, entropy = token_logprobs(hidden, torch.tensor([[1.0], [0.0]]), torch.tensor([0, 0]))
    assert logp.tolist() == [0.0, -1e4] and entropy.tolist() == [0.0, 0.0]
    logp, entropy = token_logprobs(torch.zeros(0, D), torch.zeros(V, D), torch.zeros(0, dtype=torch.long))
    assert logp.shape == entropy.shape == (0,)


@pytest.mark.parametrize("target", [-1, 90, V])
def test_a_target_beyond_the_vocabulary_is_refused(target):
    hidden, weight, targets = inputs()
    targets[3] = target
    with pytest.raises(IndexError, match="90 ids"):
        token_logprobs(hidden, weight, targets, n_vocab=90)


MEASURE = """
import sys, torch
from bench.logprobs import memory
from model.logprobs import token_logprobs
torch.set_num_threads(1)
tokens, chunk, vocab = int(sys.argv[1]), 32, 50_000
hidden = torch.randn(tokens, 32, requires_grad=True)
weight, targets = torch.randn(vocab, 32), torch.randint(0, vocab, (tokens,))
before = memory("VmRSS")
logp, entropy = token_logprobs(hidden, weight, targets, chunk=chunk)
logp.sum().backward()
print((memory("VmHWM") - before) >> 20)
"""


def extra_mebibytes(tokens):
    command, root = [sys.executable, "-c", MEASURE, str(tokens)], Path(__file__).resolve().parents[2]
    tidy = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # glibc gives what is freed back at once
    done = subprocess.run(command, cwd=root, env=tidy, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's figures")
def test_memory_does_not_grow_with_the_number_of_tokens():
    """Fresh processes; 2,048 tokens x 50,000 ids are 400 MB of logits, a chunk of 32 is 6."""
    short, long = extra_mebibytes(128), extra_mebibytes(2048)
    assert long < short + 10
    assert long < 60
