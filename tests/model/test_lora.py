"""Adapters against peft, the frozen base, and merging with both roundings."""

import peft
import pytest
import torch

from model.lora import TARGETS, attach, check_targets, merged, round_randomly
from model.qwen import ModelConfig, Qwen

LENGTHS = [70, 1, 33]


def with_adapters(reference, kind, targets=TARGETS):
    """transformers + peft and ours, with the same adapter, B not zero."""
    theirs, folder = reference(kind)
    theirs = type(theirs).from_pretrained(folder)
    kinds = sorted({n.rpartition(".")[2] for n, _ in theirs.named_modules()} & set(targets))
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=12, target_modules=kinds, lora_dropout=0.0))
    model = Qwen.from_folder(folder, dtype=torch.float32)
    adapter = attach(model, rank=4, alpha=12, targets=targets)
    generator = torch.Generator().manual_seed(1)
    for name, mine in adapter.tensors().items():
        mine.copy_(torch.randn(mine.shape, generator=generator) * 0.1)
        full = f"base_model.model.{adapter.prefix}{name}".replace(".weight", ".default.weight")
        theirs.get_parameter(full).data.copy_(mine)
    return theirs, model, adapter


@pytest.mark.parametrize("kind", ["qwen3", "qwen3.5", "qwen3.5-wrapped"])
def test_logits_and_gradients_equal_peft(reference, kind):
    theirs, model, adapter = with_adapters(reference, kind)
    embeddings = []
    model.embed_tokens.register_forward_hook(lambda m, i, out: embeddings.append(out.requires_grad_()) or out)
    ids = torch.randint(0, 97, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    logits = model.head(model(ids, cu_seqlens))
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weight).sum().backward()

    lookup, inputs = theirs.get_input_embeddings(), []
    for a, b in zip(cu_seqlens, cu_seqlens[1:], strict=False):
        inputs.append(lookup(ids[a:b][None]).detach().requires_grad_())
        expected = theirs(inputs_embeds=inputs[-1]).logits[0]
        assert (logits[a:b] - expected).abs().max() < 1e-4
        (expected * weight[a:b]).sum().backward()

    names = [n for n in adapter.tensors()]
    assert len(names) == sum(".lora_" in n for n, _ in theirs.named_parameters()) > 0
    for name, p in zip(names, adapter.parameters(), strict=True):
        full = f"base_model.model.{adapter.prefix}{name}".replace(".weight", ".default.weight")
        gradient = theirs.get_parameter(full).grad
        assert (p.grad - gradient).norm() < 1e-4 * gradient.norm(), name
    input_gradient = torch.cat([x.grad[0] for x in inputs])
    own = torch.autograd.grad((model.head(model(ids, cu_seqlens)) * weight).sum(), embeddings[-1])[0]
    assert (own - input_gradient).norm() < 1e-4 * input_gradient.norm()


def test_the_start_changes_nothing_and_is_peft_like(reference):
    theirs, folder = reference("qwen3.5")
    model = Qwen.from_folder(folder, dtype=torch.float32)
    ids, cu_seqlens = torch.arange(20), torch.tensor([0, 20])
    before = model(ids, cu_seqlens)
    adapter = attach(model, 8, 16, seed=3)
    assert torch.equal(model(ids, cu_seqlens), before)
    lora = peft.LoraConfig(r=8, target_modules=["out_proj"])
    like_peft = peft.get_peft_model(type(theirs).from_pretrained(folder), lora)
    a = next(p for n, p in like_peft.named_parameters() if "lora_A" in n)
    own = adapter.terms["layers.0.linear_attn.out_proj"].a
    assert own.shape == a.shape and abs(own.std() / a.std() - 1) < 0.2 and own.abs().max() <= a.shape[1] ** -0.5
    again = attach(Qwen.from_folder(folder, dtype=torch.float32), 8, 16, seed=3)
    assert all(torch.equal(p, q) for p, q in zip(adapter.parameters(), again.parameters(), strict=True))


def test_the_base_is_frozen(reference):
    _, model, adapter = with_adapters(reference, "qwen3.5")
    base = Qwen.from_folder(reference("qwen3.5")[1], dtype=torch.float32)
    ids, cu_seqlens = torch.arange(20), torch.tensor([0, 20])
    model(ids, cu_seqlens).square().sum().backward()
    torch.optim.SGD(adapter.parameters(), 0.1).step()
    assert all(p.grad is None and torch.equal(p, q) for p, q in zip(model.parameters(), base.parameters(), strict=True))
    assert all(p.dtype == torch.float32 and p.grad is not None for p in adapter.parameters())
    assert not torch.allclose(model(ids, cu_seqlens), base(ids, cu_seqlens))


def test_bfloat16_base_with_float32_masters(reference):
    model = Qwen.from_folder(reference("qwen3.5")[1])
    adapter = attach(model, 4, 8)
    hidden = model(torch.arange(9), torch.tensor([0, 9]))
    hidden.float().square().sum().backward()
    assert hidden.dtype == torch.bfloat16
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in adapter.parameters())


def test_targets():
    config = ModelConfig(11, 8, 8, 2, 2, 1, 4)
    adapter = attach(Qwen.random(config), 2, 4)  # kinds that the model lacks are passed over
    assert len(adapter.terms) == 14 and len(adapter.parameters()) == len(adapter.tensors()) == 28
    one = attach(Qwen.random(config), 2, 4, ["v_proj"])
    assert list(one.terms) == ["layers.0.self_attn.v_proj", "layers.1.self_attn.v_proj"]
    for targets, message in [
        (["q_proj", "qkv_proj"], "LoRA targets: qkv_proj; known are q_proj, k_proj"),
        (["in_proj_z", "q_proj"], "in_proj_z needs in_proj_qkv"),
        ([], "none given"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_targets(targets)
    with pytest.raises(ValueError, match="this model has no layer named out_proj"):
        attach(Qwen.random(config), 2, 4, ["out_proj"])
    with pytest.raises(ValueError, match="rank must be at least 1"):
        attach(Qwen.random(config), 0, 4)


def test_load_is_all_or_nothing():
    adapter = attach(Qwen.random(ModelConfig(11, 8, 8, 1, 2, 1, 4)), 2, 4, ["q_proj"])
    name = "layers.0.self_attn.q_proj.lora_A.weight"
    good = {n: torch.full_like(t, 2.0) for n, t in adapter.tensors().items()}
    with pytest.raises(ValueError, match=f"{name} is missing"):
        adapter.load({n: t for n, t in good.items() if n != name})
    with pytest.raises(ValueError, match="other is unexpected"):
        adapter.load(good | {"other": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"has shape \[8\], not \[2, 8\]"):
        adapter.load(good | {name: torch.zeros(8)})
    assert not any((p == 2).any() for p in adapter.parameters())
    adapter.load(good)
    assert all((p == 2).all() for p in adapter.parameters())


@pytest.mark.parametrize("kind", ["qwen3", "qwen3.5-wrapped"])
def test_merged_in_float32_equals_the_adapter(reference, kind):
    theirs, model, adapter = with_adapters(reference, kind)
    pairs = dict(merged(model, adapter, torch.float32))
    expected = theirs.merge_and_unload().state_dict()
    text = {n for n in expected if "visual" not in n}
    assert set(pairs) == text
    own = {t.data_ptr() for t in model.parameters()}
    for name, tensor in pairs.items():
        assert torch.allclose(tensor, expected[name], atol=1e-6), name
        assert tensor.data_ptr() not in own


def test_stochastic_rounding_keeps_a_small_delta_that_nearest_loses():
    torch.manual_seed(0)
    base = torch.randn(512, 512).bfloat16().float()
    delta = torch.randn(512, 512) * base.abs() * 1e-4
    noisy = torch.stack([round_randomly(base + delta, torch.Generator().manual_seed(i)).float() for i in range(64)])
    exact = torch.full((1000,), 1.0 + 2**-9)
    assert set(round_randomly(exact, torch.Generator().manual_seed(0)).tolist()) == {1.0, 1.0 + 2**-7}
    assert torch.equal(round_randomly(base, torch.Generator()).float(), base)  # what fits is kept

    def kept(x):
        return ((x - base) * delta).sum() / delta.square().sum()

    assert abs(kept(noisy.mean(0)) - 1) < 0.05
    assert abs(kept((base + delta).bfloat16().float())) < 0.5


def test_merged_refuses_unknown_rounding():
    model = Qwen.random(ModelConfig(11, 8, 8, 1, 2, 1, 4))
    adapter = attach(model, 2, 4)
    for rounding, dtype in [("up", torch.bfloat16), ("stochastic", torch.float32)]:
        with pytest.raises(ValueError, match="choose nearest, or stochastic"):
            next(merged(model, adapter, dtype, rounding))
