"""The Qwen decoder written out: dense Qwen3 (plain attention) and Qwen3.5 (three gated delta nets to one gated attention).

Llama-style checkpoints are the same network without q/k norms. Everything is read from config.json; modules carry the names of
Hugging Face checkpoints. Training runs packed rows (no padding); decoding appends tokens to the slots of a cache.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.ops import Rows, attention, cached_attention, causal_conv, delta_rule

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM", "llama": "LlamaForCausalLM"}


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of a model, under the names of config.json. `prefix` is where the decoder lies in a multimodal checkpoint."""

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
    eos_token_id: int | tuple[int, ...] | None = None
    prefix: str = "model."

    @property
    def gated(self) -> bool:
        """Qwen3.5: a gate on attention's output, and norm weights stored as their difference from one."""
        return self.model_type == "qwen3_5_text"

    @property
    def layers(self) -> tuple[str, ...]:
        return self.layer_types or ("full_attention",) * self.num_hidden_layers

    @classmethod
    def from_json(cls, data: dict) -> "ModelConfig":
        """From a parsed config.json; a multimodal one is read for its text_config. ValueError names what is not supported."""
        wrapped = "text_config" in data
        text = {"tie_word_embeddings": data.get("tie_word_embeddings", False), **data["text_config"]} if wrapped else dict(data)
        kind = text.get("model_type")
        if kind not in ARCHITECTURES:
            raise ValueError(f"model_type {kind!r} is not supported; known: {', '.join(ARCHITECTURES)} (or wrapped: qwen3_5)")
        rope = {**text, **(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
        _refuse(text, rope)
        layers = text["num_hidden_layers"]
        every = text.get("full_attention_interval", 4)
        hybrid = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
        layer_types = text.get("layer_types") or (hybrid if kind == "qwen3_5_text" else ["full_attention"] * layers)
        heads, eos = text["num_attention_heads"], text.get("eos_token_id")
        filled = text | {
            "num_key_value_heads": text.get("num_key_value_heads") or heads,
            "head_dim": text.get("head_dim") or text["hidden_size"] // heads,
            "rope_theta": rope.get("rope_theta", 10000.0),
            "partial_rotary_factor": rope.get("partial_rotary_factor", 0.25 if kind == "qwen3_5_text" else 1.0),
            "layer_types": tuple(layer_types),
            "eos_token_id": tuple(eos) if isinstance(eos, list) else eos,
            "prefix": "model.language_model." if wrapped else "model.",
        }
        return cls(**{name: filled[name] for name in cls.__dataclass_fields__ if name in filled})

    def to_json(self) -> dict:
        """A config.json of the text model alone."""
        data = {name: value for name, value in asdict(self).items() if name not in ("prefix", "rope_theta", "partial_rotary_factor")}
        rope = {"rope_type": "default", "rope_theta": self.rope_theta, "partial_rotary_factor": self.partial_rotary_factor}
        if not self.gated:
            data = {name: value for name, value in data.items() if not name.startswith("linear_")}
            rope.pop("partial_rotary_factor")
        fixed = {"architectures": [ARCHITECTURES[self.model_type]], "hidden_act": "silu", "attention_bias": False}
        return data | fixed | {"layer_types": list(self.layers), "rope_parameters": rope}


def _refuse(text: dict, rope: dict) -> None:
    """Name the first field whose value this code does not compute."""
    wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "attn_output_gate": None}
    wanted["attn_output_gate"] = True if text["model_type"] == "qwen3_5_text" else False
    for name, value in wanted.items():
        if text.get(name) not in (None, value):
            raise ValueError(f"{name} {text[name]!r} is not supported, only {value!r}")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise ValueError(f"rope_type {rope_type!r} is not supported, only 'default'")
    unknown = set(text.get("layer_types") or ()) - {"full_attention", "linear_attention"}
    if unknown:
        raise ValueError(f"layer_types {sorted(unknown)} are not supported, only full_attention and linear_attention")


class Linear(nn.Module):
    """x @ W.T, plus a low-rank term when an adapter is attached (`lora`, not a submodule: the base alone is in parameters())."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.lora = None

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        return y if self.lora is None else self.lora(x, y)


class RMSNorm(nn.Module):
    """x / rms(x) * weight in float32; `offset` 1 for zero-centred weights."""

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.empty(size)), eps, offset

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + self.offset if self.offset else self.weight.float()
        return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


def rotary(positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, 1, R/2] of the rotary embedding on the first R channels of each head."""
    size = int(config.head_dim * config.partial_rotary_factor)
    frequency = config.rope_theta ** -(torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size)
    angle = positions[:, None, None].float() * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D]: channel i of the first half turns with channel i of the second half; channels past R stay."""
    a, b, rest = x.split([cos.shape[-1], cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class Attention(nn.Module):
    """Softmax attention with rotary embedding; Qwen normalises queries and keys, Qwen3.5 also gates the output."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.head_dim, self.gated = c.head_dim, c.gated
        width = c.num_attention_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, width * (2 if c.gated else 1))
        self.k_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = Linear(width, c.hidden_size)
        normed = c.model_type != "llama"
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, float(c.gated)) if normed else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, float(c.gated)) if normed else nn.Identity()

    def forward(self, x: Tensor, rows: Rows, rope: tuple[Tensor, Tensor], cache: "AttentionCache | None") -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.gated:  # each head's query is followed by its gate
            q, gate = q.unflatten(1, (-1, 2)).unbind(2)
        q, k = rotate(self.q_norm(q), *rope), rotate(self.k_norm(k), *rope)
        out = attention(q, k, v, rows) if cache is None else cached_attention(q, *cache.append(k, v, rows), rows)
        if self.gated:
            out = out * gate.sigmoid()
        return self.o_proj(out.flatten(1))


class GatedDeltaNet(nn.Module):
    """Linear attention whose state forgets (g) and overwrites (beta); see `model.ops.delta_rule` for the recurrence."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.key_dim, self.value_dim = c.linear_key_head_dim, c.linear_value_head_dim
        self.keys, self.heads = c.linear_num_key_heads, c.linear_num_value_heads
        self.sizes = [self.keys * self.key_dim, self.keys * self.key_dim, self.heads * self.value_dim]
        self.in_proj_qkv = Linear(c.hidden_size, sum(self.sizes))
        self.in_proj_z = Linear(c.hidden_size, self.sizes[2])
        self.in_proj_b = Linear(c.hidden_size, self.heads)
        self.in_proj_a = Linear(c.hidden_size, self.heads)
        self.out_proj = Linear(self.sizes[2], c.hidden_size)
        self.conv1d = nn.Conv1d(sum(self.sizes), sum(self.sizes), c.linear_conv_kernel_dim, groups=sum(self.sizes), bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.empty(self.heads)), nn.Parameter(torch.empty(self.heads))
        self.norm = RMSNorm(self.value_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, rows: Rows, rope: tuple[Tensor, Tensor], cache: "DeltaCache | None") -> Tensor:
        before, state = (None, None) if cache is None else cache.read()
        mixed, before = causal_conv(self.in_proj_qkv(x), self.conv1d.weight[:, 0], rows, before)
        q, k, v = (t.unflatten(-1, (n, -1)) for t, n in zip(F.silu(mixed).split(self.sizes, -1), (self.keys, self.keys, self.heads), strict=True))
        # Each key head serves several value heads. The length is bounded below inside the root, as Qwen does.
        q, k = (t.float() * (t.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
        q, k = (t.repeat_interleave(self.heads // self.keys, dim=1) for t in (q, k))
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        out, state = delta_rule(q, k, v, g, self.in_proj_b(x).sigmoid(), rows, state)
        if cache is not None:
            cache.write(before, state)
        gate = F.silu(self.in_proj_z(x).float()).view_as(out)
        return self.out_proj((self.norm(out) * gate).to(x.dtype).flatten(1))


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
    def __init__(self, c: ModelConfig, kind: str):
        super().__init__()
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(c)
        else:
            self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, float(c.gated))
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, float(c.gated))
        self.kind = kind

    def forward(self, x: Tensor, rows: Rows, rope: tuple[Tensor, Tensor], cache=None) -> Tensor:
        mixer = self.linear_attn if self.kind == "linear_attention" else self.self_attn
        x = x + mixer(self.input_layernorm(x), rows, rope, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen(nn.Module):
    """A causal language model. Weights start uninitialised: use `from_folder` or `random`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, self.gradient_checkpointing = config, False
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, float(config.gated))
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)

    @classmethod
    def from_folder(cls, path: str | Path, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> "Qwen":
        """Open a Hugging Face folder (config.json and safetensors). CheckpointError says in one line what cannot be loaded."""
        from model.checkpoint import load_folder

        return load_folder(path, dtype, device)

    @classmethod
    def random(cls, config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> "Qwen":
        """A fresh model to train: unit embeddings, matrices of variance 1/fan-in (those that write to the residual stream smaller
        by sqrt(2 x layers)), and an untied head at zero, so that the first loss is log(vocab_size)."""
        with torch.device(device):
            model = cls(config).to(dtype)
        generator = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            for name, p in model.named_parameters():
                _init(name, p, config, generator)
        return model

    @property
    def head_weight(self) -> Tensor:
        """[V, D]"""
        return self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> logits [..., V]. Ids at and above the tokenizer's size are the caller's to mask."""
        return F.linear(hidden, self.head_weight)

    def forward(self, ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Packed rows: ids [T], cu_seqlens [n+1] from 0 to T -> hidden [T, D] after the final norm. Rows do not see each other."""
        lengths = cu_seqlens.diff().tolist()
        if int(cu_seqlens[0]) != 0 or sum(lengths) != len(ids) or min(lengths, default=0) < 1:
            raise ValueError(f"cu_seqlens must rise from 0 to the number of ids, {len(ids)}; it is {cu_seqlens.tolist()}")
        return self._decoder(ids, Rows(lengths, ids.device), None)

    def _decoder(self, ids: Tensor, rows: Rows, cache: "Cache | None") -> Tensor:
        x = self.embed_tokens(ids)
        rope = rotary(rows.positions, self.config, x.dtype)
        for i, layer in enumerate(self.layers):
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, rows, rope, use_reentrant=False)
            else:
                x = layer(x, rows, rope, None if cache is None else cache.layers[i])
        return self.norm(x)

    def new_cache(self, slots: int, max_len: int) -> "Cache":
        """Room for `slots` rows of at most `max_len` tokens each."""
        return Cache(self.config, slots, max_len, self.embed_tokens.weight)

    @torch.no_grad()
    def extend(self, ids: Tensor, counts: Tensor, cache: "Cache", slots: Tensor | None = None) -> Tensor:
        """Append counts[b] new tokens, ids[b, :counts[b]], to row slots[b] of the cache -> hidden [B, S, D] (padding: zeros).

        ids [B, S], counts [B] from 0 to S. `slots` None means the first B slots; these, or any run of neighbours, cost no copy of
        the cache. ValueError if a row would outgrow max_len."""
        counts = torch.as_tensor(counts).tolist()
        rows = cache.select(counts, list(range(len(ids))) if slots is None else torch.as_tensor(slots).tolist())
        if rows.even and rows.longest == ids.shape[1]:
            hidden = self._decoder(ids.flatten(), rows, cache).unflatten(0, ids.shape)
        else:
            place = (rows.row.to(ids.device), rows.offset.to(ids.device))
            packed = self._decoder(ids[place], rows, cache)
            hidden = packed.new_zeros(*ids.shape, packed.shape[-1])
            hidden[place] = packed
        cache.advance(counts)
        return hidden


def _init(name: str, p: Tensor, config: ModelConfig, generator: torch.Generator) -> None:
    """Fill one parameter of a fresh model."""
    if name.endswith("norm.weight"):
        p.fill_(0.0 if config.gated and "linear_attn" not in name else 1.0)
    elif name == "lm_head.weight":
        p.zero_()
    elif name == "embed_tokens.weight":
        p.normal_(0, config.hidden_size**-0.5 if config.tie_word_embeddings else 1.0, generator=generator)
    elif name.endswith("A_log"):
        p.uniform_(1, 16, generator=generator).log_()
    elif name.endswith("dt_bias"):  # softplus(dt_bias) between 0.001 and 0.1, evenly in the logarithm
        p.uniform_(math.log(0.001), math.log(0.1), generator=generator).exp_().expm1_().log_()
    else:
        std = p[0].numel() ** -0.5
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            std *= (2 * config.num_hidden_layers) ** -0.5
        p.normal_(0, std, generator=generator)


class AttentionCache:
    """Keys and values of one layer: [slots, Hkv, max_len, D] each."""

    def __init__(self, owner: "Cache", c: ModelConfig, slots: int, max_len: int, like: Tensor):
        self.owner = owner
        self.keys, self.values = like.new_zeros(2, slots, c.num_key_value_heads, max_len, c.head_dim)

    def append(self, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Store k, v [T, Hkv, D]; return the selected rows' keys and values, as far as any of them reaches."""
        slot = self.owner.slots.to(k.device)[rows.row.to(k.device)]
        self.keys[slot, :, rows.positions], self.values[slot, :, rows.positions] = k, v
        reach = max(map(sum, zip(rows.past, rows.lengths, strict=True)))
        return self.keys[:, :, :reach][self.owner.where], self.values[:, :, :reach][self.owner.where]


class DeltaCache:
    """The last K-1 inputs of the convolution [slots, K-1, C] and the float32 state [slots, H, Dk, Dv] of one layer."""

    def __init__(self, owner: "Cache", c: ModelConfig, slots: int, max_len: int, like: Tensor):
        keys, values = c.linear_num_key_heads * c.linear_key_head_dim, c.linear_num_value_heads * c.linear_value_head_dim
        self.owner = owner
        self.conv = like.new_zeros(slots, c.linear_conv_kernel_dim - 1, 2 * keys + values)
        shape = (slots, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
        self.state = like.new_zeros(shape, dtype=torch.float32)

    def read(self) -> tuple[Tensor, Tensor]:
        return self.conv[self.owner.where], self.state[self.owner.where]

    def write(self, conv: Tensor, state: Tensor) -> None:
        self.conv[self.owner.where], self.state[self.owner.where] = conv, state


class Cache:
    """What the layers remember of each slot's row. `lengths` [slots] (on the CPU) counts its tokens."""

    def __init__(self, config: ModelConfig, slots: int, max_len: int, like: Tensor):
        self.lengths, self.max_len, self.device = torch.zeros(slots, dtype=torch.long), max_len, like.device
        kinds = {"linear_attention": DeltaCache, "full_attention": AttentionCache}
        self.layers = [kinds[kind](self, config, slots, max_len, like.detach()) for kind in config.layers]

    def select(self, counts: list[int], slots: list[int]) -> Rows:
        """Aim at these slots for one forward pass that brings counts[b] tokens to slots[b]."""
        self.slots = torch.tensor(slots)
        neighbours = slots == list(range(slots[0], slots[0] + len(slots)))
        self.where = slice(slots[0], slots[0] + len(slots)) if neighbours else self.slots.to(self.device)
        past = self.lengths[self.slots].tolist()
        for slot, old, new in zip(slots, past, counts, strict=True):
            if old + new > self.max_len:
                raise ValueError(f"slot {slot} holds {old} tokens; {new} more exceed max_len {self.max_len}")
        return Rows(counts, self.device, past)

    def advance(self, counts: list[int]) -> None:
        self.lengths[self.slots] += torch.tensor(counts)

    def reset(self, slots: Tensor | list[int]) -> None:
        """Empty these slots. Old keys are never looked at again; the delta nets' states are set to zero."""
        self.lengths[torch.as_tensor(slots, dtype=torch.long)] = 0
        for layer in self.layers:
            if isinstance(layer, DeltaCache):
                layer.conv[slots], layer.state[slots] = 0, 0
