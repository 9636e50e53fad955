"""Packed operations against the plain definition, row by row: values, gradients, states handed on."""

import pytest
import torch
import torch.nn.functional as F

from model.ops import Rows, attention, cached_attention, causal_conv, delta_rule

MIXES = [[1], [5, 5, 5], [1, 70, 64, 2, 128, 63, 65, 1], [200, 3, 190, 4, 100]]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def row_slices(lengths):
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return [slice(a, b) for a, b in zip(starts, starts[1:], strict=False)]


def assert_same_with_gradients(own, expected, inputs, tolerance=2e-5):
    """Values, and the gradients of a random projection of them."""
    weight = torch.randn_like(expected)
    assert (own - expected).abs().max() < tolerance * max(1, expected.abs().max())
    mine, theirs = (torch.autograd.grad((y * weight).sum(), inputs, retain_graph=True) for y in (own, expected))
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).abs().max() < tolerance * 5 * max(1, b.abs().max())


@pytest.mark.parametrize("lengths", MIXES)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_attention(lengths, key_heads):
    total = sum(lengths)
    q, k, v = normal(total, 4, 8), normal(total, key_heads, 8, seed=1), normal(total, key_heads, 8, seed=2)
    parts = []
    for row in row_slices(lengths):
        keys, values = (x[row].repeat_interleave(4 // key_heads, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[row], keys) * 8**-0.5
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        parts.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(future, -torch.inf).softmax(-1), values))
    assert_same_with_gradients(attention(q, k, v, Rows(lengths)), torch.cat(parts), (q, k, v))


def test_cached_attention_sees_its_row_and_nothing_later():
    past, new = [3, 0, 6], [2, 4, 0]
    whole = [a + b for a, b in zip(past, new, strict=True)]
    q, k, v = normal(9 + 6, 4, 8), normal(9 + 6, 2, 8, seed=1), normal(9 + 6, 2, 8, seed=2)
    expected = attention(q, k, v, Rows(whole))
    keys = torch.full((3, 2, 6, 8), 7.0)
    values = keys.clone()
    for b, row in enumerate(row_slices(whole)):
        keys[b, :, : whole[b]], values[b, :, : whole[b]] = k[row].transpose(0, 1), v[row].transpose(0, 1)
    fresh = torch.tensor([3, 4, 5, 6, 7, 8])
    own = cached_attention(q[fresh], keys, values, Rows(new, past=past))
    assert torch.allclose(own, expected[fresh], atol=1e-6)


@pytest.mark.parametrize("lengths", MIXES)
def test_causal_convolution(lengths):
    x, weight, state = normal(sum(lengths), 6), normal(6, 4, seed=1), normal(len(lengths), 3, 6, seed=2)
    parts, last = [], []
    for b, row in enumerate(row_slices(lengths)):
        led = torch.cat([state[b], x[row]])
        parts.append(F.conv1d(led.T[None], weight[:, None], groups=6)[0].T)
        last.append(led[-3:])
    out, kept = causal_conv(x, weight, Rows(lengths), state)
    assert_same_with_gradients(out, torch.cat(parts), (x, weight, state))
    assert torch.equal(kept, torch.stack(last))
    assert torch.equal(causal_conv(x, weight, Rows(lengths))[0], causal_conv(x, weight, Rows(lengths), 0 * state)[0])


def one_by_one(q, k, v, g, beta, lengths, state):
    """The recurrence of the docstring, as a loop over tokens."""
    outs, finals = [], []
    for b, row in enumerate(row_slices(lengths)):
        s = state[b]
        for t in range(row.start, row.stop):
            s = s * g[t].exp()[:, None, None]
            error = v[t] - torch.einsum("hk,hkv->hv", k[t], s)
            s = s + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
            outs.append(torch.einsum("hk,hkv->hv", q[t], s) * q.shape[-1] ** -0.5)
        finals.append(s)
    return torch.stack(outs), torch.stack(finals)


@pytest.mark.parametrize("lengths", MIXES + [[1, 1, 1]])
@pytest.mark.parametrize("forget", [0.01, 1.0, 30.0])
def test_delta_rule(lengths, forget):
    total, n = sum(lengths), len(lengths)
    raw = normal(total, 2, 8), normal(total, 2, 8, seed=1), normal(total, 2, 6, seed=2)
    gates = normal(total, 2, seed=3), normal(total, 2, seed=4)
    state = normal(n, 2, 8, 6, seed=5)
    q, k, v = F.normalize(raw[0], dim=-1), F.normalize(raw[1], dim=-1), raw[2]
    g, beta = -forget * F.softplus(gates[0]), gates[1].sigmoid()
    out, final = delta_rule(q, k, v, g, beta, Rows(lengths), state)
    expected, last = one_by_one(q, k, v, g, beta, lengths, state)
    inputs = (*raw, *gates, state)
    both, expected_both = (torch.cat([a.flatten(), b.flatten()]) for a, b in ((out, final), (expected, last)))
    assert_same_with_gradients(both, expected_both, inputs)


def test_delta_rule_leaves_rows_without_tokens_alone():
    lengths = [0, 3, 0, 70]
    q, k, v = (normal(73, 2, 8, seed=i) for i in range(3))
    g, beta, state = -normal(73, 2, seed=3).square(), normal(73, 2, seed=4).sigmoid(), normal(4, 2, 8, 8, seed=5)
    out, final = delta_rule(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, g, beta, Rows(lengths), state)
    assert len(out) == 73 and torch.equal(final[[0, 2]], state[[0, 2]]) and not torch.equal(final[1], state[1])
