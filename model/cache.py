"""What the layers remember of the rows that are being decoded: keys and values, or the state of the delta rule."""

import weakref

import torch
from torch import Tensor

from model.ops import Rows


class AttentionCache:
    """Keys and values of one layer: [slots, Hkv, max_len, D] each."""

    def __init__(self, owner: "Cache", config, slots: int, like: Tensor):
        self.owner = owner
        shape = (slots, config.num_key_value_heads, owner.max_len, config.head_dim)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)

    def append(self, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Store k, v [T, Hkv, D]; return the keys and values of the selected rows, as far as any of them reaches."""
        slot = self.owner.slots[rows.row].to(k.device)
        self.keys[slot, :, rows.positions], self.values[slot, :, rows.positions] = k, v
        return self.keys[:, :, : rows.reach][self.owner.where], self.values[:, :, : rows.reach][self.owner.where]


class DeltaCache:
    """One layer's last K-1 inputs of the convolution [slots, K-1, C] and float32 states [slots, H, Dk, Dv]."""

    def __init__(self, owner: "Cache", config, slots: int, like: Tensor):
        self.owner, heads = owner, config.linear_num_value_heads
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        channels = 2 * keys + heads * config.linear_value_head_dim
        shape = (slots, heads, config.linear_key_head_dim, config.linear_value_head_dim)
        self.conv = like.new_zeros(slots, config.linear_conv_kernel_dim - 1, channels)
        self.state = like.new_zeros(shape, dtype=torch.float32)

    def read(self) -> tuple[Tensor, Tensor]:
        return self.conv[self.owner.where], self.state[self.owner.where]

    def write(self, conv: Tensor, state: Tensor) -> None:
        self.conv[self.owner.where], self.state[self.owner.where] = conv, state


class Cache:
    """Room for `slots` rows of at most `max_len` tokens. `lengths` [slots], on the CPU, counts the tokens of each."""

    def __init__(self, config, slots: int, max_len: int, like: Tensor):
        self.lengths, self.max_len, self.device = torch.zeros(slots, dtype=torch.long), max_len, like.device
        kinds = {"linear_attention": DeltaCache, "full_attention": AttentionCache}
        owner = weakref.proxy(self)  # not in a circle: the memory goes when the last one who uses it lets go
        self.layers = [kinds[kind](owner, config, slots, like.detach()) for kind in config.layers]

    def select(self, bring: dict[int, int]) -> Rows:
        """Aim at the slots for one forward pass that brings bring[slot] tokens to each.

        Slots that fill most of a range are taken as that range, with no tokens for the idle ones: a view of the cache
        is cheaper than a copy of the rest."""
        slots, first, last = list(bring), min(bring), max(bring)
        if 2 * len(slots) > last - first:
            slots, self.where = list(range(first, last + 1)), slice(first, last + 1)
        else:
            self.where = torch.tensor(slots, device=self.device)
        self.slots = torch.tensor(slots)
        counts, past = [bring.get(slot, 0) for slot in slots], self.lengths[self.slots].tolist()
        for slot, old, new in zip(slots, past, counts, strict=True):
            if new and old + new > self.max_len:
                raise ValueError(f"slot {slot} holds {old} tokens; {new} more exceed max_len {self.max_len}")
        return Rows(counts, self.device, past)

    def reset(self, slots: Tensor | list[int]) -> None:
        """Empty these slots. Old keys are never looked at again; the delta nets' memories are set to zero."""
        slots = torch.as_tensor(slots, dtype=torch.long)
        self.lengths[slots] = 0
        for layer in self.layers:
            if isinstance(layer, DeltaCache):
                layer.conv[slots.to(self.device)], layer.state[slots.to(self.device)] = 0, 0
