"""The decoder against transformers: logits, packed rows, decoding."""

import math

import pytest
import torch

from model.qwen import ModelConfig, Qwen

FAMILIES = ["qwen3", "qwen3-tied", "qwen3-equal-heads", "qwen3.5", "qwen3.5-tied", "llama"]
LENGTHS = [70, 1, 64, 3, 131, 2, 66]  # around the chunk of 64 of the delta rule, and below the convolution's reach


def packed(lengths, vocabulary=97, seed=0):
    ids = torch.randint(0, vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return ids, torch.tensor([0, *lengths]).cumsum(0)


def split(x, cu_seqlens):
    return [x[a:b] for a, b in zip(cu_seqlens, cu_seqlens[1:], strict=False)]


def relative(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("kind", FAMILIES + ["qwen3.5-wrapped", "qwen3.5-wrapped-tied"])
def test_logits_equal_transformers(reference, kind):
    theirs, folder = reference(kind)
    model = Qwen.from_folder(folder, dtype=torch.float32)
    ids, cu_seqlens = packed(LENGTHS)
    with torch.no_grad():
        logits = model.head(model(ids, cu_seqlens))
        for own, row in zip(split(logits, cu_seqlens), split(ids, cu_seqlens), strict=True):
            expected = theirs(row[None]).logits[0]
            alone = model.head(model(row, torch.tensor([0, len(row)])))
            assert (own - expected).abs().max() < 1e-4
            assert (own - alone).abs().max() < 1e-5 * expected.abs().max()
    assert expected.std() > 0.3  # a model that says something


@pytest.mark.parametrize("kind", ["qwen3", "qwen3.5"])
def test_bfloat16_is_as_near_as_transformers(reference, kind):
    theirs, folder = reference(kind)
    model = Qwen.from_folder(folder)
    ids, cu_seqlens = packed([150])
    with torch.no_grad():
        exact = theirs(ids[None]).logits[0].log_softmax(-1)
        own = model.head(model(ids, cu_seqlens)).float().log_softmax(-1)
        half = type(theirs).from_pretrained(folder, dtype=torch.bfloat16)(ids[None]).logits[0].float().log_softmax(-1)
    assert own.dtype == torch.float32 and model.embed_tokens.weight.dtype == torch.bfloat16
    assert (own - exact).abs().mean() < 1.3 * (half - exact).abs().mean()


@pytest.mark.parametrize("kind", FAMILIES)
def test_decoding_token_by_token_equals_the_forward(reference, kind):
    model = Qwen.from_folder(reference(kind)[1], dtype=torch.float32)
    ids, cu_seqlens = packed([9, 1, 5])
    expected = split(model(ids, cu_seqlens).detach(), cu_seqlens)
    rows, cache = split(ids, cu_seqlens), model.new_cache(3, 16)
    for t in range(9):
        live = [i for i in range(3) if t < len(rows[i])]
        hidden = model.extend([rows[i][t : t + 1].tolist() for i in live], cache, live)
        for own, i in zip(hidden, live, strict=True):
            assert relative(own, expected[i][t]) < 5e-5
    assert cache.lengths.tolist() == [9, 1, 5]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3.5"])
def test_decoding_in_pieces_into_any_slots(reference, kind):
    """Pieces of differing length, rows that pause, slots far apart and out of order, a slot used again."""
    model = Qwen.from_folder(reference(kind)[1], dtype=torch.float32)
    ids, cu_seqlens = packed([140, 80, 30])
    expected, rows = split(model(ids, cu_seqlens).detach(), cu_seqlens), split(ids, cu_seqlens)
    cache = model.new_cache(20, 140)
    model.extend([[0, 0, 0]] * 20, cache, list(range(20)))
    cache.reset(range(20))
    slots, at = [17, 2, 9], [0, 0, 0]
    for counts in ([70, 2, 1], [0, 1, 1], [1, 1, 1], [69, 76, 0], [0, 0, 27]):
        live = [b for b in range(3) if counts[b]]
        new = [rows[b][at[b] : at[b] + counts[b]].tolist() for b in live]
        hidden = model.extend(new, cache, [slots[b] for b in live])
        for own, b in zip(hidden, live, strict=True):
            at[b] += counts[b]
            assert relative(own, expected[b][at[b] - 1]) < 5e-5
    assert [len(r) for r in rows] == at == cache.lengths[slots].tolist()


def test_new_tokens_follow_the_cache_to_its_device():
    """A sampler plans on the CPU wherever the model is; the meta device stands for a GPU."""
    with torch.device("meta"):
        model = Qwen(ModelConfig(11, 8, 8, 1, 2, 1, 4))
    seen = []
    model.embed_tokens.register_forward_pre_hook(lambda _, ids: seen.append(ids[0].device.type))
    model.extend([[1, 2, 3], [4]], model.new_cache(2, 4), [0, 1])
    assert seen == ["meta"]


def test_cache_refuses_what_does_not_fit():
    model = Qwen.random(ModelConfig(11, 8, 8, 1, 2, 1, 4))
    cache = model.new_cache(2, 4)
    with pytest.raises(ValueError, match="slot 1 holds 0 tokens; 5 more exceed max_len 4"):
        model.extend([[0] * 4, [0] * 5], cache, [0, 1])
    assert cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3.5"])
def test_gradients_do_not_cross_rows_and_survive_checkpointing(reference, kind):
    model = Qwen.from_folder(reference(kind)[1], dtype=torch.float32)
    ids, cu_seqlens = packed([5, 1, 67])
    rows = split(ids, cu_seqlens)

    def gradients(run):
        model.zero_grad()
        run().square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    together = gradients(lambda: model(ids, cu_seqlens))
    alone = gradients(lambda: torch.cat([model(row, torch.tensor([0, len(row)])) for row in rows]))
    model.gradient_checkpointing = True
    again = gradients(lambda: model(ids, cu_seqlens))
    for name, gradient in together.items():
        assert relative(gradient, alone[name]) < 1e-4, name
        assert torch.equal(gradient, again[name]), name


def test_random_model_starts_near_the_uniform_guess_and_favours_the_token_that_is_passed_on():
    delta = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
    kinds = ("linear_attention",) * 3 + ("full_attention",)
    config = ModelConfig(50, 32, 64, 4, 4, 2, 8, "qwen3_5_text", layer_types=kinds, **delta)
    a, b = Qwen.random(config, seed=1), Qwen.random(config, seed=1)
    hidden = a(*packed([20], 50))
    ids = torch.arange(49)
    loss = torch.nn.functional.cross_entropy(a.head(a(ids, torch.tensor([0, 49]))), ids + 1)  # 50 tokens, each once
    assert torch.isfinite(hidden).all() and math.log(50) < loss < math.log(50) + 2
    assert torch.equal(a.head(a.embed_tokens.weight).argmax(1), torch.arange(50))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("cu_seqlens", [[0, 4], [1, 5], [0, 3, 3, 5], []])
def test_cu_seqlens_are_checked(cu_seqlens):
    model = Qwen.random(ModelConfig(11, 8, 8, 1, 2, 1, 4))
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the number of ids, 5"):
        model(torch.zeros(5, dtype=torch.long), torch.tensor(cu_seqlens))
