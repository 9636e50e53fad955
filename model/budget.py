"""Memory and FLOPs of a training step from plain numbers: what fits on a card, and what a run costs.

Formulas, with their assumptions beside them; bytes throughout. Weights and activations are bf16, adapter masters,
gradients, optimizer state and delta-net states fp32. Nothing is measured here: bench/gpu.py does that.
"""

from collections.abc import Sequence

from model.ops import CHUNK
from model.qwen import ModelConfig

GIB = 2**30
CARD = 79 * GIB  # an "80 GB" H100 as the driver reports it
CONTEXT = 2 * GIB  # CUDA context, libraries, fragmentation
ENGINE = 10 * GIB  # the sampler's own buffers: activations of a prefill batch, CUDA graphs, margin


def linears(config: ModelConfig, kind: str) -> dict[str, tuple[int, int]]:
    """The linear layers, name -> (inputs, outputs), of one decoder layer of this kind."""
    c, d, f = config, config.hidden_size, config.intermediate_size
    mlp = {"gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d)}
    if kind == "linear_attention":
        heads, values = c.linear_num_value_heads, c.linear_num_value_heads * c.linear_value_head_dim
        mixer = {"in_proj_qkv": (d, convolved(c)), "in_proj_z": (d, values), "out_proj": (values, d)}
        return mixer | {"in_proj_b": (d, heads), "in_proj_a": (d, heads)} | mlp
    width, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    mixer = {"q_proj": (d, width * (2 if c.gated else 1)), "k_proj": (d, kv), "v_proj": (d, kv), "o_proj": (width, d)}
    return mixer | mlp


def convolved(config: ModelConfig) -> int:
    """Channels of a delta net's convolution: queries, keys and values."""
    c = config
    return 2 * c.linear_num_key_heads * c.linear_key_head_dim + c.linear_num_value_heads * c.linear_value_head_dim


def layer_parameters(config: ModelConfig) -> int:
    """Parameters of the linear layers of all decoder layers: those that every token is multiplied with."""
    return sum(a * b for kind in config.layers for a, b in linears(config, kind).values())


def parameters(config: ModelConfig) -> int:
    """All parameters of the text model."""
    c = config
    delta = convolved(c) * c.linear_conv_kernel_dim + 2 * c.linear_num_value_heads + c.linear_value_head_dim
    full = 2 * c.head_dim * (c.model_type != "llama")
    mixers = sum(delta if kind == "linear_attention" else full for kind in c.layers)
    norms = (2 * len(c.layers) + 1) * c.hidden_size
    return layer_parameters(c) + mixers + norms + c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)


def adapter_parameters(config: ModelConfig, rank: int, targets: Sequence[str]) -> int:
    """Parameters of a low-rank adapter on these kinds of linear layers."""
    layers = (linears(config, kind) for kind in config.layers)
    return sum(rank * (a + b) for layer in layers for name, (a, b) in layer.items() if name in targets)


def cache_bytes(config: ModelConfig, tokens: int) -> int:
    """What the sampler holds of one episode of `tokens` tokens: keys and values, delta-net and convolution states."""
    c = config
    full = c.layers.count("full_attention")
    heads, keys, values = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    state = 4 * heads * keys * values + 2 * convolved(c) * (c.linear_conv_kernel_dim - 1)
    return full * 2 * 2 * c.num_key_value_heads * c.head_dim * tokens + (len(c.layers) - full) * state


def layer_activations(config: ModelConfig, kind: str, kernel: bool = True) -> int:
    """Bytes a token that autograd keeps of one decoder layer with a LoRA while that layer is recomputed.

    Counted on the code of model/qwen.py: 8 an MLP channel, 12 a residual channel (fp32 copies for the norms), the rest
    for the mixer. Without a fused `kernel` the delta rule keeps its chunk matrices too.
    """
    c = config
    base = 8 * c.intermediate_size + 12 * c.hidden_size
    if kind == "full_attention":
        return base + 18 * c.num_attention_heads * c.head_dim + 4 * c.num_key_value_heads * c.head_dim
    heads, values = c.linear_num_value_heads, c.linear_num_value_heads * c.linear_value_head_dim
    repeated = heads * c.linear_key_head_dim
    fused = base + 16 * c.linear_num_key_heads * c.linear_key_head_dim + 4 * repeated + 22 * values
    return fused if kernel else fused + 6 * 4 * CHUNK * heads + 24 * repeated + 12 * values


def plan(
    config: ModelConfig, rank: int, targets: Sequence[str], tokens: int, head_chunk: int, sync: str = "adapter",
    resident: bool = False, kernel: bool = True, gpu_memory: float = 1.0,
) -> dict[str, dict[str, int]]:  # fmt: skip
    """Bytes on the card, phase by phase and item by item; "free" is what is left, for caches where the sampler runs.

    `tokens` is a micro-batch (or the longest episode). `sync` "adapter": the sampler runs base and adapter side by
    side; "merged": it gets fresh base + B A, one matrix at a time. `resident`: its weights stay on the card meanwhile.
    `gpu_memory`: the share of the card that the sampler may take, its caches included.
    """
    base, adapter = 2 * parameters(config), adapter_parameters(config, rank, targets)
    largest = max(a * b for kind in set(config.layers) for a, b in linears(config, kind).values())
    sampler = {"sampler's weights": base} | ({"adapter, bf16": 2 * adapter} if sync == "adapter" else {})
    trainer = {"CUDA context": CONTEXT, **(sampler if resident else {}), "frozen weights": base}
    trainer["adapter, fp32"] = 4 * adapter  # its bf16 copies are counted with the layers
    hidden = 2 * 2 * tokens * config.hidden_size  # after the last layer, and its gradient
    head = {"head chunk": head_chunk * config.vocab_size * 8 + hidden}  # fp32 logits and their exponentials or gradient
    widest = max(layer_activations(config, kind, kernel) for kind in config.layers)
    update = {
        "gradients": 4 * adapter,  # AdamW's state lives in main memory and visits one matrix at a time
        "layer checkpoints": 2 * tokens * config.hidden_size * len(config.layers),
        "one layer recomputed": tokens * widest,
        "its gradients": tokens * 6 * config.intermediate_size,  # of the MLP's three wide activations
    }
    fresh = {"one matrix, fp32 and bf16": 6 * largest} if sync == "merged" else {}
    phases = {
        "sampling": {"CUDA context": CONTEXT, "sampler's buffers": ENGINE} | sampler,
        "recompute": trainer | {"one layer forward": tokens * widest // 2} | head,  # half of what autograd would keep
        "update": trainer | update | head,
        "sync": {"CUDA context": CONTEXT} | sampler | {"adapter, fp32": 4 * adapter} | fresh,
    }
    room = {"sampling": int(gpu_memory * CARD)}
    return {name: items | {"free": room.get(name, CARD) - sum(items.values())} for name, items in phases.items()}


def host(config: ModelConfig, rank: int, targets: Sequence[str], asleep: bool = True) -> dict[str, int]:
    """Bytes of main memory for each GPU: the trainer's weights and state, and the sampler's weights if they sleep.

    All but the adapter is pinned, for which torch takes a power of two a tensor; norms and convolutions are left out.
    """
    layers, d = [linears(config, kind) for kind in config.layers], config.hidden_size
    sizes = [a * b for layer in layers for a, b in layer.values()]
    sizes += [config.vocab_size * d] * (1 if config.tie_word_embeddings else 2)
    low_rank = [rank * n for layer in layers for name, sides in layer.items() if name in targets for n in sides]
    base, state = sum(pinned(2 * n) for n in sizes), 2 * sum(pinned(4 * n) for n in low_rank)
    trainer = {"frozen weights": base, "adapter, fp32": 4 * sum(low_rank), "optimizer state": state}
    return trainer | ({"sampler's weights, at sleep_level 1": base} if asleep else {})


def pinned(size: int) -> int:
    """Bytes that torch takes for a pinned tensor of `size`."""
    return 1 << (size - 1).bit_length()


def table(
    config: ModelConfig, rank: int, targets: Sequence[str], tokens: int, longest: int, head_chunk: int,
    gpu_memory: float = 1.0, asleep: bool = True,
) -> str:  # fmt: skip
    """The plan of a step in GiB, both ways of syncing side by side, and what fits. `longest`: tokens of an episode;
    `asleep`: the sampler's weights go to main memory while the trainer has the card."""
    def plans(**more) -> list[dict[str, dict[str, int]]]:
        more |= {"gpu_memory": gpu_memory}
        return [plan(config, rank, targets, tokens, head_chunk, sync, **more) for sync in ("adapter", "merged")]

    def row(name: str, sizes: list[int]) -> str:
        return f"{name:<48}" + "".join(f"{size / GIB:9.1f}" for size in sizes)

    both, lines = plans(), [
        f"{parameters(config):,} parameters in bfloat16, adapter {adapter_parameters(config, rank, targets):,}",
        f"micro-batches of {tokens:,} tokens, head chunks of {head_chunk:,}",
        f"an 80 GB card, of which {CARD // GIB} GiB can be used; by the formulas of model/budget.py, not measured\n",
        f"{'GiB; way of syncing:':<48}{'adapter':>9}{'merged':>9}",
    ]
    for phase in both[0]:
        lines.append(row(phase, [sum(p[phase].values()) - p[phase]["free"] for p in both]))
        items = dict.fromkeys(item for p in both for item in p[phase])
        lines += [row("  " + item, [p[phase].get(item, 0) for p in both]) for item in items if item != "free"]
        lines.append(row("  left" + ", for caches" * (phase in ("sampling", "sync")), [p[phase]["free"] for p in both]))
    lines.append("what fits")
    for length in (longest // 8, longest // 4, longest // 2, longest):
        fit = [max(0, p["sampling"]["free"]) // cache_bytes(config, length) for p in both]
        name = f"  episodes of {length:,} tokens, {cache_bytes(config, length) / GIB:.2f} of cache each"
        lines.append(f"{name:<48}" + "".join(f"{n:9,}" for n in fit))
    for name, more in (("sampler's weights kept", {"resident": True}), ("no fused delta rule", {"kernel": False})):
        lines.append(row(f"  left in the update, {name}", [p["update"]["free"] for p in plans(**more)]))
    sizes = host(config, rank, targets, asleep)
    lines.append(row("main memory, pinned, for each GPU", [sum(sizes.values())]))
    return "\n".join(lines + [row("  " + item, [size]) for item, size in sizes.items()])


def forward_flops(config: ModelConfig, lengths: Sequence[int], scored: int) -> int:
    """FLOPs of one forward pass over episodes of these lengths, the head applied to `scored` tokens in all.

    Two a parameter and token; causal attention 4 x width x half the length a token; the delta rule 6 x Dk x Dv a head.
    A frozen base's backward costs as much again (no weight gradients), and layer checkpoints one more forward: useful
    work is 2 of these for an update and 1 for old log-probs, hardware work 3 and 1.
    """
    c, tokens = config, sum(lengths)
    full = c.layers.count("full_attention")
    attention = 2 * c.num_attention_heads * c.head_dim * sum(n * n for n in lengths)
    delta = 6 * c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim * tokens
    linear = 2 * layer_parameters(c) * tokens + 2 * c.vocab_size * c.hidden_size * scored
    return linear + full * attention + (len(c.layers) - full) * delta
