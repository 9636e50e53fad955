"""The plan's numbers against the modules they describe, and against the published figures of the 9B."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import model.qwen
from model import budget
from model.lora import TARGETS, attach
from model.ops import Rows
from model.qwen import ModelConfig, Qwen, rotary

QWEN_9B = ModelConfig(
    vocab_size=248320, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, num_attention_heads=16,
    num_key_value_heads=4, head_dim=256, model_type="qwen3_5_text", partial_rotary_factor=0.25,
    layer_types=("linear_attention",) * 3 * 8 + ("full_attention",) * 8, linear_num_key_heads=16,
    linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
)  # fmt: skip
HYBRID = ModelConfig(
    vocab_size=64, hidden_size=256, intermediate_size=768, num_hidden_layers=3, num_attention_heads=16,
    num_key_value_heads=4, head_dim=16, model_type="qwen3_5_text", partial_rotary_factor=0.25,
    layer_types=("linear_attention", "linear_attention", "full_attention"), linear_num_key_heads=4,
    linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=32,
)  # fmt: skip
PLAIN = ModelConfig(
    vocab_size=50, hidden_size=32, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8,
)  # fmt: skip
LLAMA = ModelConfig(**{**PLAIN.__dict__, "model_type": "llama", "tie_word_embeddings": True})


def test_the_9b_in_figures():
    assert budget.parameters(QWEN_9B) / 1e9 == pytest.approx(8.95, abs=0.01)
    assert 2 * budget.parameters(QWEN_9B) / budget.GIB == pytest.approx(16.7, abs=0.05)
    assert budget.adapter_parameters(QWEN_9B, 64, TARGETS) / 1e6 == pytest.approx(173, abs=0.5)
    assert budget.cache_bytes(QWEN_9B, 1000) - budget.cache_bytes(QWEN_9B, 999) == 32 * 1024
    assert budget.cache_bytes(QWEN_9B, 0) / 2**20 == pytest.approx(49, abs=0.5)


@pytest.mark.parametrize("config", [HYBRID, PLAIN, LLAMA])
def test_counts_equal_the_modules(config):
    network = Qwen.random(config)
    assert budget.parameters(config) == sum(p.numel() for p in network.parameters())
    cache = network.bfloat16().new_cache(slots=1, max_len=10)
    kept = [t for layer in cache.layers for t in vars(layer).values() if isinstance(t, torch.Tensor)]
    assert budget.cache_bytes(config, 10) == sum(t.numel() * t.element_size() for t in kept)
    for targets in (TARGETS, ("q_proj", "down_proj")):
        adapter = attach(Qwen.random(config), rank=4, alpha=8, targets=targets)
        assert budget.adapter_parameters(config, 4, targets) == sum(p.numel() for p in adapter.parameters())


@pytest.mark.parametrize("config", [HYBRID, PLAIN, LLAMA])
def test_pinned_memory_by_tensor(config):
    assert [budget.pinned(size) for size in (1, 4, 5, 2**20, 2**20 + 1)] == [1, 4, 8, 2**20, 2**21]
    network = Qwen.random(config)
    matrices = [p for p in network.parameters() if p.ndim == 2]
    adapter = attach(network, rank=3, alpha=8, targets=("q_proj", "down_proj")).parameters()
    asleep = {"sampler's weights, at sleep_level 1": (base := sum(budget.pinned(2 * p.numel()) for p in matrices))}
    awake = {"frozen weights": base, "adapter, fp32": sum(4 * p.numel() for p in adapter),
             "optimizer state": 2 * sum(budget.pinned(4 * p.numel()) for p in adapter)}
    assert budget.host(config, 3, ("q_proj", "down_proj")) == awake | asleep
    assert budget.host(config, 3, ("q_proj", "down_proj"), asleep=False) == awake


class FusedDelta(torch.autograd.Function):
    """Stands for a fused kernel: keeps its inputs and nothing else."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return inputs[2].clone()


def kept_bytes_per_token(layer: int, tokens: int = 256) -> float:
    """What autograd really keeps of one layer's forward pass."""
    network = Qwen.random(HYBRID, dtype=torch.bfloat16)
    adapter = attach(network, rank=8, alpha=8)
    rows = Rows([tokens], "cpu")
    x = torch.randn(tokens, HYBRID.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    weights = {p.data_ptr() for p in (*network.parameters(), *adapter.parameters())}
    kept = {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        network.layers[layer](x, rows, rotary(rows.positions, HYBRID, x.dtype), None)
    return sum(t.untyped_storage().nbytes() for p, t in kept.items() if p not in weights) / tokens


def test_activations_of_a_layer(monkeypatch):
    assert budget.layer_activations(HYBRID, "full_attention") == pytest.approx(kept_bytes_per_token(2), rel=0.1)
    plain = budget.layer_activations(HYBRID, "linear_attention", kernel=False)
    assert plain == pytest.approx(kept_bytes_per_token(0), rel=0.1)

    def fused(q, k, v, g, beta, rows, state=None):
        return FusedDelta.apply(q.to(v.dtype), k.to(v.dtype), v, g, beta), None

    monkeypatch.setattr(model.qwen, "delta_rule", fused)
    assert budget.layer_activations(HYBRID, "linear_attention") == pytest.approx(kept_bytes_per_token(0), rel=0.1)


def test_flops_of_the_matrix_products():
    network, lengths = Qwen.random(PLAIN), [7, 12]
    with FlopCounterMode(display=False) as counter:
        hidden = network(torch.zeros(19, dtype=torch.long), torch.tensor([0, 7, 19]))
        network.head(hidden[:5])
    counts = counter.get_flop_counts()["Global"]
    counted = counts[torch.ops.aten.mm]
    attention = 2 * 2 * 32 * (7 * 7 + 12 * 12)
    assert budget.forward_flops(PLAIN, lengths, scored=5) - attention == counted


def test_a_plan_adds_up_and_says_what_is_left():
    for sync in ("adapter", "merged"):
        phases = budget.plan(QWEN_9B, 64, TARGETS, tokens=32768, head_chunk=1024, sync=sync)
        assert set(phases) == {"sampling", "recompute", "update", "sync"}
        assert all(sum(items.values()) == budget.CARD for items in phases.values())
        assert 35 < (budget.CARD - phases["update"]["free"]) / budget.GIB < 48
        assert 45 < phases["sampling"]["free"] / budget.GIB < 55
    resident = budget.plan(QWEN_9B, 64, TARGETS, tokens=32768, head_chunk=1024, resident=True)
    assert 0 < resident["update"]["free"] < phases["update"]["free"]


def test_the_plan_as_text():
    lines = budget.table(QWEN_9B, 64, TARGETS, tokens=32768, longest=32768, head_chunk=1024).splitlines()
    figures = {line[:48].strip(): line[48:].split() for line in lines}
    assert figures["sampling"] == ["29.0", "28.7"] and figures["update"] == ["41.4", "41.4"]
    assert figures["one matrix, fp32 and bf16"] == ["0.0", "0.3"]
    assert figures["episodes of 32,768 tokens, 1.05 of cache each"] == ["47", "48"]
    assert figures["main memory, pinned, for each GPU"] == ["41.9"]
    assert figures["sampler's weights, at sleep_level 1"] == ["19.9"]
