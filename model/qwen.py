"""The Qwen decoder written out: dense Qwen3 (plain attention), and Qwen3.5 (gated delta nets, every fourth layer gated
attention). Llama-style checkpoints are the same network without q/k norms.

Everything is read from config.json; modules carry the names of Hugging Face checkpoints. Training runs packed rows
without padding; decoding appends tokens to the slots of a cache.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.cache import AttentionCache, Cache, DeltaCache
from model.ops import Rows, attention, cached_attention, causal_conv, delta_rule

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM", "llama": "LlamaForCausalLM"}


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of a model, named as in config.json. `prefix`: where a multimodal checkpoint keeps the decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    model_type: str = "qwen3"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    tie_word_embeddings: bool = False
    layer_types: tuple[str, ...] = ()  # "full_attention" or "linear_attention"; empty: all full
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 4
    max_position_embeddings: int = 32768
    eos_token_id: int | list[int] | None = None
    prefix: str = "model."

    @property
    def gated(self) -> bool:
        """Qwen3.5: attention's output is gated, and norms store their weight's difference from one."""
        return self.model_type == "qwen3_5_text"

    @property
    def layers(self) -> tuple[str, ...]:
        return self.layer_types or ("full_attention",) * self.num_hidden_layers

    def full_name(self, name: str) -> str:
        """The name in a Hugging Face checkpoint of this model's parameter or module `name`."""
        return name if name.startswith("lm_head") else self.prefix + name

    @classmethod
    def from_json(cls, data: dict) -> ModelConfig:
        """From a parsed config.json, of a multimodal one its text_config. ValueError names what is not supported."""
        wrapped = "text_config" in data
        tied = {"tie_word_embeddings": data.get("tie_word_embeddings", False)}
        text = tied | data["text_config"] if wrapped else data
        rope = {**text, **(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
        _refuse(text, rope)
        hybrid, heads = text["model_type"] == "qwen3_5_text", text["num_attention_heads"]
        every = text.get("full_attention_interval", 4) if hybrid else 1
        _check_whole("full_attention_interval", every)
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(text["num_hidden_layers"])]
        filled = text | {
            "num_key_value_heads": text.get("num_key_value_heads") or heads,
            "head_dim": text.get("head_dim") or text["hidden_size"] // heads,
            "rope_theta": rope.get("rope_theta", 10000.0),
            "partial_rotary_factor": rope.get("partial_rotary_factor", 0.25 if hybrid else 1.0),
            "layer_types": tuple(text.get("layer_types") or kinds),
            "prefix": "model.language_model." if wrapped else "model.",
        }
        config = cls(**{name: filled[name] for name in cls.__dataclass_fields__ if name in filled})
        _check_fit(config)
        return config

    def to_json(self) -> dict:
        """A config.json of the text model alone."""
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.gated:
            rope["partial_rotary_factor"] = self.partial_rotary_factor
        apart = {"prefix", "rope_theta", "partial_rotary_factor"}
        data = {k: v for k, v in asdict(self).items() if k not in apart and (self.gated or "linear" not in k)}
        more = {"architectures": [ARCHITECTURES[self.model_type]], "hidden_act": "silu", "attention_bias": False}
        return data | more | {"layer_types": list(self.layers), "rope_parameters": rope}


def _refuse(text: dict, rope: dict) -> None:
    """Name the first field whose value this code does not compute."""
    kind = text.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type {kind!r} is not supported, only {', '.join(ARCHITECTURES)}")
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        _check_whole(name, text.get(name))
    only = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
    only |= {"attn_output_gate": kind == "qwen3_5_text"}
    for name, value in only.items():
        if text.get(name) not in (None, value):
            raise ValueError(f"{name} {text[name]!r} is not supported, only {value!r}")
    if (rotation := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise ValueError(f"rope_type {rotation!r} is not supported, only 'default'")
    layers = text.get("layer_types")
    if layers and (len(layers) != text["num_hidden_layers"] or set(layers) - {"full_attention", "linear_attention"}):
        raise ValueError(f"layer_types must name full_attention or linear_attention for each layer; they are {layers}")


def _check_whole(name: str, value) -> None:
    if not (type(value) is int and 1 <= value <= 1 << 24):
        raise ValueError(f"{name} {value!r}: must be a whole number from 1 to {1 << 24}")


def _check_fit(c: ModelConfig) -> None:
    """Raise ValueError for numbers that no network can have, or that do not go together."""
    delta = "linear_attention" in c.layers
    for name, field in c.__dataclass_fields__.items():
        if field.type == "int" and (delta or not name.startswith("linear_")):
            _check_whole(name, getattr(c, name))
    for name, most in {"rms_norm_eps": 1.0, "rope_theta": 1e12, "partial_rotary_factor": 1.0}.items():
        if not (type(value := getattr(c, name)) in (int, float) and 0 < value <= most):
            raise ValueError(f"{name} {value!r}: must be a number above 0, at most {most}")
    if int(c.head_dim * c.partial_rotary_factor) % 2:
        raise ValueError(f"head_dim {c.head_dim}: position must turn an even number of its channels")
    shared = {"num_attention_heads": "num_key_value_heads"}
    shared |= {"linear_num_value_heads": "linear_num_key_heads"} if delta else {}
    for many, few in shared.items():
        if getattr(c, many) % (getattr(c, few) or 1):
            raise ValueError(f"{many} {getattr(c, many)}: must be a multiple of {few} ({getattr(c, few)})")


class Linear(nn.Module):
    """x @ W.T, plus the low-rank term of an adapter if one is attached (no submodule: parameters() is the base)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.lora = None

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        return y if self.lora is None else self.lora(x, y)


class RMSNorm(nn.Module):
    """x / rms(x) * (weight + offset), in float32; offset is 1 where weights are stored zero-centred."""

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.empty(size)), eps, offset

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + self.offset
        return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


def rotary(positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, 1, R/2] of the rotary embedding, which turns the first R channels of each head."""
    size = int(config.head_dim * config.partial_rotary_factor)
    channel = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32)
    angle = positions[:, None, None].float() / config.rope_theta ** (channel / size)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D]: channel i of the first half of R turns with channel i of the second half; the rest stays."""
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class Attention(nn.Module):
    """Softmax attention. Qwen normalises the queries and keys of each head; Qwen3.5 also gates each head's output."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.head_dim, self.gated = c.head_dim, c.gated
        width, kv_width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, width * (1 + c.gated))
        self.k_proj, self.v_proj = Linear(c.hidden_size, kv_width), Linear(c.hidden_size, kv_width)
        self.o_proj = Linear(width, c.hidden_size)
        norms = [RMSNorm(c.head_dim, c.rms_norm_eps, c.gated) for _ in range(2)]
        self.q_norm, self.k_norm = norms if c.model_type != "llama" else (nn.Identity(), nn.Identity())

    def forward(self, x: Tensor, rows: Rows, rope: tuple[Tensor, Tensor], cache: AttentionCache | None) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.gated:  # each head's query is followed by its gate
            q, gate = q.unflatten(1, (-1, 2)).unbind(2)
        q, k = rotate(self.q_norm(q), *rope), rotate(self.k_norm(k), *rope)
        out = cached_attention(q, *cache.append(k, v, rows), rows) if cache else attention(q, k, v, rows)
        return self.o_proj((out * gate.sigmoid() if self.gated else out).flatten(1))


class GatedDeltaNet(nn.Module):
    """Linear attention whose state forgets (g) and overwrites (beta): the recurrence is in `model.ops.delta_rule`."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.keys, self.heads = c.linear_num_key_heads, c.linear_num_value_heads
        key, value = self.keys * c.linear_key_head_dim, self.heads * c.linear_value_head_dim
        self.sizes = [key, key, value]
        self.in_proj_qkv = Linear(c.hidden_size, sum(self.sizes))
        self.in_proj_z = Linear(c.hidden_size, value)
        self.in_proj_b, self.in_proj_a = Linear(c.hidden_size, self.heads), Linear(c.hidden_size, self.heads)
        self.out_proj = Linear(value, c.hidden_size)
        channels = 2 * key + value
        self.conv1d = nn.Conv1d(channels, channels, c.linear_conv_kernel_dim, groups=channels, bias=False)
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(self.heads)) for _ in range(2))
        self.norm = RMSNorm(c.linear_value_head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, rows: Rows, rope: tuple[Tensor, Tensor], cache: DeltaCache | None) -> Tensor:
        before, state = (None, None) if cache is None else cache.read()
        mixed, before = causal_conv(self.in_proj_qkv(x), self.conv1d.weight[:, 0], rows, before)
        q, k, v = F.silu(mixed).split(self.sizes, dim=-1)
        q, k = (unit(y.unflatten(-1, (self.keys, -1)).float()) for y in (q, k))
        q, k = (y.repeat_interleave(self.heads // self.keys, dim=1) for y in (q, k))  # shared by several value heads
        v = v.unflatten(-1, (self.heads, -1))
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        out, state = delta_rule(q, k, v, g, self.in_proj_b(x).sigmoid(), rows, state)
        if cache is not None:
            cache.write(before, state)
        gate = F.silu(self.in_proj_z(x).float()).view_as(out)
        return self.out_proj((self.norm(out) * gate).to(x.dtype).flatten(1))


def unit(x: Tensor) -> Tensor:
    """x at unit length along the last axis; the constant inside the root is Qwen's."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Each half reads the normalised residual stream and adds to it."""

    def __init__(self, c: ModelConfig, kind: str):
        super().__init__()
        self.mixer = "linear_attn" if kind == "linear_attention" else "self_attn"
        self.add_module(self.mixer, GatedDeltaNet(c) if kind == "linear_attention" else Attention(c))
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, c.gated)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, c.gated)

    def forward(self, x: Tensor, rows: Rows, rope: tuple[Tensor, Tensor], cache=None) -> Tensor:
        x = x + getattr(self, self.mixer)(self.input_layernorm(x), rows, rope, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen(nn.Module):
    """A causal language model. Its weights start uninitialised: use `from_folder` or `random`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, self.gradient_checkpointing = config, False
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.gated)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)

    @classmethod
    def from_folder(cls, path: str | Path, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Qwen:
        """Open a Hugging Face folder (config.json, safetensors). CheckpointError says in one line what does not fit."""
        from model.checkpoint import load_folder

        return load_folder(path, dtype, device)

    @classmethod
    def random(cls, config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32, device="cpu") -> Qwen:
        """A fresh model to train: unit embeddings, matrices of variance 1/fan-in (those that write to the residual
        stream smaller by sqrt(2 layers)). The first loss is near log(vocab_size).

        An untied head starts as the embeddings times 6 / hidden_size: where a layer passes a token's embedding on, that
        token's logit rises, up to 6. So copying is learnt once and not for each token (docs/log.md, 2026-11-30).
        """
        with torch.device("meta"):
            model = cls(config).to(dtype)
        generator = torch.Generator(device).manual_seed(seed)
        for name, p in model.to_empty(device=device).named_parameters():
            _init(name, p, config, generator)
        if not config.tie_word_embeddings:
            model.lm_head.weight.data.copy_(model.embed_tokens.weight).mul_(6 / config.hidden_size)
        return model

    @property
    def head_weight(self) -> Tensor:
        """[V, D]"""
        return self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> logits [..., V]. Ids from the tokenizer's size on are the caller's to mask."""
        return F.linear(hidden, self.head_weight)

    def forward(self, ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Packed rows, blind to each other: ids [T], cu_seqlens [n+1] from 0 to T -> normed hidden [T, D]."""
        starts = cu_seqlens.tolist()
        lengths = [b - a for a, b in zip(starts, starts[1:], strict=False)]
        if starts[:1] != [0] or starts[-1] != len(ids) or min(lengths, default=0) < 1:
            raise ValueError(f"cu_seqlens must rise from 0 to the number of ids, {len(ids)}; it is {starts}")
        return self._decoder(ids, Rows(lengths, ids.device), None)

    def _decoder(self, ids: Tensor, rows: Rows, cache: Cache | None) -> Tensor:
        x = self.embed_tokens(ids)
        rope = rotary(rows.positions, self.config, x.dtype)
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        for layer, own in zip(self.layers, cache.layers if cache else [None] * len(self.layers), strict=True):
            x = checkpoint(layer, x, rows, rope, use_reentrant=False) if recompute else layer(x, rows, rope, own)
        return self.norm(x)

    def new_cache(self, slots: int, max_len: int) -> Cache:
        """Room for `slots` rows of at most `max_len` tokens each."""
        return Cache(self.config, slots, max_len, self.embed_tokens.weight)

    @torch.no_grad()
    def extend(self, new: list[list[int]], cache: Cache, slots: list[int]) -> Tensor:
        """Append the ids new[b], one or more, to row slots[b] of the cache (no slot twice) -> the hidden state of the
        last of each [B, D]. ValueError if a row would outgrow max_len."""
        bring = dict(zip(slots, new, strict=True))
        rows = cache.select({slot: len(ids) for slot, ids in bring.items()})
        taken = cache.slots.tolist()
        ids = torch.tensor([token for slot in taken for token in bring.get(slot, ())])
        hidden = self._decoder(ids.to(rows.device), rows, cache)
        cache.lengths[cache.slots] += rows.lengths
        last = dict(zip(taken, (rows.starts[1:] - 1).tolist(), strict=True))
        return hidden[torch.tensor([last[slot] for slot in slots])]


@torch.no_grad()
def _init(name: str, p: Tensor, config: ModelConfig, generator: torch.Generator) -> None:
    """Fill one parameter of a fresh model."""
    if name.endswith("norm.weight"):
        p.fill_(0.0 if config.gated and "linear_attn" not in name else 1.0)
    elif name == "embed_tokens.weight":
        p.normal_(0, config.hidden_size**-0.5 if config.tie_word_embeddings else 1.0, generator=generator)
    elif name.endswith("A_log"):
        p.uniform_(1, 16, generator=generator).log_()
    elif name.endswith("dt_bias"):  # softplus(dt_bias) between 0.001 and 0.1, evenly in the logarithm
        p.uniform_(math.log(0.001), math.log(0.1), generator=generator).exp_().expm1_().log_()
    else:
        smaller = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
        fan_in = p[0].numel() * (2 * config.num_hidden_layers if smaller else 1)
        p.normal_(0, fan_in**-0.5, generator=generator)
