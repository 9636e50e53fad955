"""Attention, the short convolution and the gated delta rule over packed rows of different lengths.

A packed batch is one long axis of T tokens: row i owns tokens cu_seqlens[i] .. cu_seqlens[i+1]. `Rows` holds what
every layer needs to know about it. On CUDA each operation takes a fast kernel where one is installed, else plain torch.
"""

import importlib.util
from functools import cache, cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens that the chunked delta rule takes at once


@cache
def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


class Rows:
    """The shape of a packed batch: how many tokens each row brings, and how many it has seen before (`past`)."""

    def __init__(self, lengths: list[int], device: torch.device | str = "cpu", past: list[int] | None = None):
        self.lengths, self.past, self.device = torch.tensor(lengths), torch.tensor(past or [0] * len(lengths)), device
        self.longest, self.reach = max(lengths), int((self.lengths + self.past).max())
        self.even = min(lengths) == self.longest  # equally long rows need no padding, only a view
        self.starts = F.pad(self.lengths.cumsum(0), (1, 0))  # [n+1], on the CPU like all planning
        self.row = torch.repeat_interleave(torch.arange(len(lengths)), self.lengths)  # [T], the row of each token
        self.offset = torch.arange(int(self.starts[-1])) - self.starts[self.row]  # [T], its place among the new tokens
        self.positions = (self.past[self.row] + self.offset).to(device)  # [T], its place in the whole row
        self.cu_seqlens = self.starts.to(device, torch.int32)

    def _tokens(self, rows: Tensor, first: Tensor | int, width: int) -> Tensor:
        """Token indices [rows, width] from place `first` of each row on; the row's last token stands for padding."""
        index = (self.starts[rows] + first)[:, None] + torch.arange(width)
        return torch.minimum(index, self.starts[rows + 1, None] - 1).clamp(min=0).to(self.device)

    @cached_property
    def padded(self) -> tuple[Tensor, Tensor]:
        """Token indices [n, longest], and the place of each token in that grid, flattened [T]."""
        place = self.row * self.longest + self.offset
        return self._tokens(torch.arange(len(self.lengths)), 0, self.longest), place.to(self.device)

    @cached_property
    def visible(self) -> Tensor:
        """[n, longest, reach]: which tokens of the whole row each new token sees in a cache."""
        last = self.past[:, None] + torch.arange(self.longest)
        return (torch.arange(self.reach) <= last[:, :, None]).to(self.device)

    @cached_property
    def chunks(self) -> tuple[Tensor, Tensor, list[int], Tensor, Tensor]:
        """The chunk grid of the delta rule. Each row is padded to whole chunks; the chunks lie ordered by their number
        within the row, rows with more chunks first, so that the k-th chunks of all rows are neighbours.

        Returns token indices [N, C]; which of them are real [N, C]; for each k the number of rows with a k-th chunk;
        the place of each token in the flattened grid [T]; and the order of the rows [n]."""
        width = min(CHUNK, self.longest)
        count = -(-self.lengths // width)
        order = count.argsort(descending=True, stable=True)
        active = [int((count > k).sum()) for k in range(int(count.max()))]
        first = F.pad(torch.tensor(active).cumsum(0), (1, 0))
        rows = order[torch.cat([torch.arange(a) for a in active])]
        begin = torch.repeat_interleave(torch.arange(len(active)), torch.tensor(active)) * width
        valid = begin[:, None] + torch.arange(width) < self.lengths[rows, None]
        place = (first[self.offset // width] + order.argsort()[self.row]) * width + self.offset % width
        index = self._tokens(rows, begin, width)
        return index, valid.to(self.device), active, place.to(self.device), order.to(self.device)


def attention(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """Causal attention within each row. q [T, H, D]; k, v [T, Hkv, D], H a multiple of Hkv. Returns [T, H, D]."""
    cu, longest, repeats = rows.cu_seqlens, rows.longest, q.shape[1] // k.shape[1]
    half = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    if half and installed("flash_attn"):
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True)
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    if half:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(q, k, v, cu, cu, longest, longest, window_size=(-1, 0))
    each = (x.transpose(0, 1)[None].split(rows.lengths.tolist(), dim=2) for x in (q, k, v))  # [1, H, L, D] of each row
    out = [F.scaled_dot_product_attention(*row, is_causal=True) for row in zip(*each, strict=True)]
    return torch.cat(out, dim=2)[0].transpose(0, 1)


def cached_attention(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """Attention of a few new tokens a row over all that the row has seen, themselves included.

    q [T, H, D]; k, v [n, Hkv, reach, D] hold the new tokens already. Returns [T, H, D]."""
    grid = q.unflatten(0, (-1, rows.longest)) if rows.even else q[rows.padded[0]]
    (n, s, h, d), heads = grid.shape, k.shape[1]  # [n, S, H, D]
    # The heads that share a key head become more queries of that head, so that no key is repeated.
    grid = grid.view(n, s, heads, h // heads, d).permute(0, 2, 3, 1, 4).reshape(n, heads, -1, d)
    mask = rows.visible[:, None].repeat(1, 1, h // heads, 1)
    out = F.scaled_dot_product_attention(grid, k, v, attn_mask=mask)
    out = out.view(n, heads, h // heads, s, d).permute(0, 3, 1, 2, 4).reshape(n * s, h, d)
    return out if rows.even else out[rows.padded[1]]


def causal_conv(x: Tensor, weight: Tensor, rows: Rows, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution within each row. x [T, C], weight [C, K], state [n, K-1, C]: the inputs before the
    row's first (zeros if None). Returns [T, C] and the last K-1 inputs of each row [n, K-1, C]."""
    # Each row is led by its K-1 earlier inputs in one buffer; the sum over taps is then K shifted slices of it.
    n, before = len(rows.lengths), weight.shape[1] - 1
    lead = (rows.starts[:-1] + torch.arange(n) * before)[:, None] + torch.arange(before)  # [n, K-1] places
    own = torch.arange(len(x)) + rows.row * before  # [T], the place of each token's first tap
    source = torch.empty(len(x) + n * before, dtype=torch.long)
    source[lead], source[own + before] = torch.arange(n * before).view(n, before), torch.arange(len(x)) + n * before
    earlier = x.new_zeros(n * before, x.shape[1]) if state is None else state.flatten(0, 1).to(x.dtype)
    buffer = torch.cat([earlier, x])[source.to(x.device)]
    out = sum(buffer[j : len(buffer) - before + j] * weight[:, j] for j in range(before + 1))
    return out[own.to(x.device)], buffer[(lead + rows.lengths[:, None]).to(x.device)]


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: Rows, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gated delta rule (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks"), within each row, token by token:

        S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q / sqrt(Dk)

    q, k [T, H, Dk] of unit length; v [T, H, Dv]; g <= 0 and beta [T, H]; state [n, H, Dk, Dv] in float32 (zeros if
    None). Returns o [T, H, Dv] in v's dtype and the states after each row's last token."""
    if state is None:
        state = v.new_zeros(len(rows.lengths), v.shape[1], k.shape[2], v.shape[2], dtype=torch.float32)
    if rows.even and rows.longest == 1:
        return _delta_step(q, k, v, g, beta, state)
    if q.is_cuda and installed("fla"):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        q, k, v, g, beta = (x[None] for x in (q.to(v.dtype), k.to(v.dtype), v, g, beta))
        more = {"initial_state": state, "output_final_state": True, "cu_seqlens": rows.cu_seqlens.long()}
        o, state = chunk_gated_delta_rule(q, k, v, g, beta, **more)
        return o[0], state
    return _delta_chunks(q, k, v, g, beta, rows, state)


def _delta_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row, T = n: the recurrence as it is written above."""
    q, k = q.float() * q.shape[-1] ** -0.5, k.float()
    state = state * g.float().exp()[..., None, None]
    error = v.float() - (k.unsqueeze(-2) @ state).squeeze(-2)  # [n, H, Dv]
    state = state + k.unsqueeze(-1) * (beta.float().unsqueeze(-1) * error).unsqueeze(-2)
    return (q.unsqueeze(-2) @ state).squeeze(-2).to(v.dtype), state


def _delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: Rows, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Chunk by chunk, with matrix products: within a chunk the writes depend on each other through a unit triangular
    system, which is solved for all chunks at once; then the state goes from chunk to chunk."""
    dtype = v.dtype
    index, valid, active, place, order = rows.chunks
    q, k, v, g, beta = (x.float()[index].transpose(1, 2) for x in (q, k, v, g, beta))  # [N, H, C, ...]
    g, beta = (x * valid[:, None] for x in (g, beta))  # padding neither decays nor writes
    decay = g.cumsum(-1)  # log of the decay since the chunk's start, this token's included
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()  # [..., i, j]: j to i
    since, until = decay.exp().unsqueeze(-1), (decay[..., -1:] - decay).exp().unsqueeze(-1)
    beta, q = beta.unsqueeze(-1), q * q.shape[-1] ** -0.5
    system, rhs = (beta * k) @ k.mT * between, beta * torch.cat([v, k * since], dim=-1)
    solved = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)  # the diagonal counts as one
    new, seen = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within, q, k = q @ k.mT * between, q * since, k * until
    state, out, done, begin = state[order], [], [], 0
    for count in active:
        at, begin = slice(begin, begin + count), begin + count
        done.append(state[count:])  # rows that have ended
        state = state[:count]
        write = new[at] - seen[at] @ state  # what the state does not say yet
        out.append(q[at] @ state + within[at] @ write)
        state = state * since[at, :, -1:] + k[at].mT @ write
    final = torch.cat([state, *reversed(done)])[order.argsort()]
    return torch.cat(out).transpose(1, 2).flatten(0, 1)[place].to(dtype), final
