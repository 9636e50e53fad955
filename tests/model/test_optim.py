"""Optimizers against torch's own, their state across save and load, and weights that take turns on a device."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from model.optim import AdamW, Chain, Muon, Weights, orthogonalise

SHAPES = [(7, 5), (33,), (4, 3, 2), (1,)]


def make_params(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_grads(params, step):
    """The same gradients for every twin of `params`; now and then a large one, for clipping to bite."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator) * (10 if step % 3 == 0 else 0.1)


def assert_equal(ours, theirs):
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.99)])
def test_adamw_equals_torch_to_the_bit_across_save_and_load(tmp_path, max_norm, weight_decay, betas):
    options = {"lr": 3e-3, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay}
    ours, theirs = make_params(SHAPES), make_params(SHAPES)
    optimizer, reference = AdamW(ours, **options), torch.optim.AdamW(theirs, foreach=False, **options)
    for step in range(50):
        set_grads(ours, step)
        set_grads(theirs, step)
        if max_norm is not None:
            for params in (ours, theirs):
                torch.nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.lr = reference.param_groups[0]["lr"] = 3e-3 * (1 - step / 50)
        optimizer.step()
        reference.step()
        assert_equal(ours, theirs)
        if step == 24:
            save_file(optimizer.tensors(), tmp_path / "state.safetensors")
            optimizer = AdamW(ours, **options)
            optimizer.load(load_file(tmp_path / "state.safetensors"))


def test_parameters_without_gradient_are_left_alone():
    ours = make_params(SHAPES)
    before = [p.detach().clone() for p in ours]
    optimizer = AdamW(ours)
    ours[0].grad = torch.ones_like(ours[0])
    optimizer.step()
    assert not torch.equal(ours[0], before[0])
    assert_equal(ours[1:], before[1:])
    optimizer.zero_grad()
    assert all(p.grad is None for p in ours)


def test_a_state_that_does_not_fit_is_refused():
    state = AdamW(make_params([(3, 2), (4,)])).tensors()
    with pytest.raises(ValueError, match=r"exp_avg\.1 is \[4\], not missing"):
        AdamW(make_params([(3, 2)])).load(state)
    with pytest.raises(ValueError, match=r"exp_avg\.0 is \[3, 2\], not \[2, 3\]"):
        AdamW(make_params([(2, 3), (4,)])).load(state)
    with pytest.raises(ValueError, match="fp32"):
        AdamW([nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))])


# Muon


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40)])
def test_orthogonalise_keeps_the_singular_vectors_and_flattens_the_values(shape):
    for matrix in torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)):
        result = orthogonalise(matrix)
        u, singular, vt = torch.linalg.svd(matrix, full_matrices=False)
        inside = u.T @ result @ vt.T  # diagonal if the singular vectors are kept
        values = inside.diagonal()
        assert (inside - values.diag()).abs().max() < 1e-4
        assert values[singular > 0.05 * singular.norm()].min() > 0.6 and values.max() < 1.3


def test_muon_equals_torch_to_the_rounding_of_its_bf16():
    shapes = [(24, 24), (40, 16), (24, 24), (16, 40)]
    ours, theirs = make_params(shapes), make_params(shapes)
    options = {"lr": 0.02, "momentum": 0.95}
    optimizer, reference = Muon(ours, **options), torch.optim.Muon(theirs, weight_decay=0.0, **options)
    for step in range(10):
        set_grads(ours, step)
        set_grads(theirs, step)
        optimizer.step()
        reference.step()
    for p, q, start in zip(ours, theirs, make_params(shapes), strict=True):
        moved, expected = p - start, q - start
        assert (moved - expected).norm() < 0.03 * expected.norm()


def test_muon_goes_on_where_it_was(tmp_path):
    whole, halves = make_params([(8, 8), (8, 4)]), make_params([(8, 8), (8, 4)])
    optimizer, first = Muon(whole), Muon(halves)
    for step in range(6):
        set_grads(whole, step)
        set_grads(halves, step)
        optimizer.step()
        first.step()
        if step == 2:
            save_file(first.tensors(), tmp_path / "state.safetensors")
            first = Muon(halves)
            first.load(load_file(tmp_path / "state.safetensors"))
    assert_equal(halves, whole)


def test_muon_takes_matrices_only():
    with pytest.raises(ValueError, match=r"shape \[33\]"):
        Muon(make_params(SHAPES))


def test_a_chain_steps_saves_and_loads_its_parts():
    matrices, rest = make_params([(8, 8)]), make_params([(5,)], seed=1)
    chain = Chain(Muon(matrices, lr=0.02), AdamW(rest, lr=3e-3))
    before = [p.detach().clone() for p in matrices + rest]
    set_grads(matrices + rest, 0)
    chain.scale_lr(0.5)
    assert [part.lr for part in chain.parts] == [0.01, 1.5e-3]
    chain.step()
    assert all(not torch.equal(p, q) for p, q in zip(matrices + rest, before, strict=True))
    chain.zero_grad()
    assert matrices[0].grad is None and rest[0].grad is None
    other = Chain(Muon(make_params([(8, 8)])), AdamW(make_params([(5,)])))
    other.load(chain.tensors())
    assert all(torch.equal(a, b) for a, b in zip(other.tensors().values(), chain.tensors().values(), strict=True))


# weights that take turns


def test_frozen_weights_leave_and_come_back_as_the_same_memory():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    trained = [module[0].weight]
    before = {name: t.detach().clone() for name, t in module.state_dict().items()}
    weights = Weights(module, trained, device="cpu")
    memory = [t.data_ptr() for t in weights.frozen]
    weights.upload()
    for tensor in (*weights.frozen, *trained):
        tensor.data = tensor.data + 1  # stands for the copy on a GPU, and something that writes to it
    trained[0].grad = torch.ones(3, 3)
    weights.release()
    assert [t.data_ptr() for t in weights.frozen] == memory
    after = module.state_dict()
    assert torch.equal(after.pop("0.weight"), before.pop("0.weight") + 1) and trained[0].grad is None
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    module = nn.Linear(64, 64, device="cpu")
    frozen = module.bias.detach().clone()
    weights = Weights(module, [module.weight], "cuda")
    optimizer = AdamW([module.weight], lr=1e-2)
    twin = nn.Parameter(module.weight.detach().clone())
    reference = torch.optim.AdamW([twin], lr=1e-2, foreach=False)
    for step in range(3):
        weights.upload()
        set_grads([twin], step)
        module.weight.grad = twin.grad.cuda()
        optimizer.step()
        reference.step()
        weights.release()
        assert module.weight.device.type == "cpu" and module.bias.data.is_pinned()
    torch.testing.assert_close(module.weight, twin)
    assert torch.equal(module.bias, frozen) and all(t.device.type == "cpu" for t in optimizer.tensors().values())
