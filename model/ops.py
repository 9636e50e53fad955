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
def _have(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


class Rows:
    """The shape of a packed batch: how many tokens each row brings, and how many it has seen before (`past`)."""

    def __init__(self, lengths: list[int], device: torch.device | str = "cpu", past: list[int] | None = None):
        self.lengths, self.past, self.device = lengths, past or [0] * len(lengths), torch.device(device)
        self.longest = max(lengths, default=0)
        self.even = min(lengths, default=0) == self.longest  # equally long rows need no padding, only a view
        counts = torch.tensor(lengths, dtype=torch.long)
        self.starts = F.pad(counts.cumsum(0), (1, 0))  # [n+1], on the CPU like all planning
        self.row = torch.repeat_interleave(torch.arange(len(lengths)), counts)  # [T], the row of each token
        self.offset = torch.arange(int(self.starts[-1])) - self.starts[self.row]  # [T], its place among the new
        self.positions = (torch.tensor(self.past)[self.row] + self.offset).to(self.device)  # [T], in the whole row
        self.cu_seqlens = self.starts.to(self.device, torch.int32)

    def _tokens(self, rows: Tensor, first: Tensor, width: int) -> Tensor:
        """Token indices [rows, width] from place `first` of each row on; the row's last token stands for padding."""
        index = self.starts[rows, None] + first[:, None] + torch.arange(width)
        return torch.minimum(index, self.starts[rows + 1, None] - 1).clamp(min=0)

    @cached_property
    def padded(self) -> Tensor:
        """[n, longest] token indices."""
        n = len(self.lengths)
        return self._tokens(torch.arange(n), torch.zeros(n, dtype=torch.long), self.longest).to(self.device)

    @cached_property
    def groups(self) -> tuple[list[Tensor], Tensor]:
        """Rows of similar length together, so that little is padded: a list of token indices [rows, width]; and [T],
        where each token lies once the groups are flattened and joined."""
        lengths = torch.tensor(self.lengths)
        order = [i for i in lengths.argsort(descending=True).tolist() if self.lengths[i]]
        groups, base, first, begin = [], torch.zeros(len(lengths), dtype=torch.long), 0, 0
        for j in range(1, len(order) + 1):
            width = self.lengths[order[first]]
            if j == len(order) or self.lengths[order[j]] < 0.7 * width:
                rows = torch.tensor(order[first:j])
                groups.append(self._tokens(rows, torch.zeros_like(rows), width).to(self.device))
                base[rows] = begin + torch.arange(len(rows)) * width
                begin, first = begin + len(rows) * width, j
        return groups, (base[self.row] + self.offset).to(self.device)

    @cached_property
    def chunks(self) -> tuple[Tensor, Tensor, list[int], Tensor, Tensor]:
        """The chunk grid of the delta rule. Each row is padded to whole chunks; the chunks lie ordered by their number
        within the row, longer rows first, so that the k-th chunks of all rows that have one are neighbours.

        Returns token indices [N, C]; which of them are real [N, C]; for each k the number of rows with a k-th chunk;
        the place of each token in the flattened grid [T]; and the order of the rows [n]."""
        lengths, width = torch.tensor(self.lengths), min(CHUNK, self.longest)
        count = -(-lengths // width)
        order = count.argsort(descending=True, stable=True)
        active = [int((count > k).sum()) for k in range(int(count.max()))]
        first = F.pad(torch.tensor(active).cumsum(0), (1, 0))
        rank = torch.cat([torch.arange(a) for a in active])
        step = torch.repeat_interleave(torch.arange(len(active)), torch.tensor(active))
        rows, rank_of = order[rank], order.argsort()
        valid = step[:, None] * width + torch.arange(width) < lengths[rows, None]
        place = (first[self.offset // width] + rank_of[self.row]) * width + self.offset % width
        index = self._tokens(rows, step * width, width)
        return index.to(self.device), valid.to(self.device), active, place.to(self.device), order.to(self.device)


def attention(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """Causal attention within each row. q [T, H, D]; k, v [T, Hkv, D], H a multiple of Hkv. Returns [T, H, D]."""
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        return _attention_cuda(q, k, v, rows)
    if k.shape[1] < q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))

    def one(index: Tensor | None) -> Tensor:
        grid = [x.unflatten(0, (-1, rows.longest)) if index is None else x[index] for x in (q, k, v)]  # [n, L, H, D]
        q_, k_, v_ = (x.transpose(1, 2) for x in grid)
        return F.scaled_dot_product_attention(q_, k_, v_, is_causal=True).transpose(1, 2).flatten(0, 1)

    if rows.even:
        return one(None)
    groups, place = rows.groups
    return torch.cat([one(index) for index in groups])[place]


def _attention_cuda(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    cu, longest = rows.cu_seqlens, rows.longest
    if _have("flash_attn"):
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True)
    from torch.nn.attention.varlen import varlen_attn

    if k.shape[1] < q.shape[1]:  # repeated, as torch before 2.12 has no grouped heads here
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return varlen_attn(q, k, v, cu, cu, longest, longest, window_size=(-1, 0))


def cached_attention(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """Attention of a few new tokens a row over all that the row has seen, themselves included.

    q [T, H, D]; k, v [n, Hkv, M, D] hold the new tokens already, M >= past + new of every row. Returns [T, H, D]."""
    heads, length = k.shape[1], k.shape[2]
    grid = q.unflatten(0, (-1, rows.longest)) if rows.even else q[rows.padded]  # [n, S, H, D]
    n, s, h, d = grid.shape
    # The heads that share a key head become more queries of that head, so that nothing is repeated.
    grid = grid.view(n, s, heads, h // heads, d).permute(0, 2, 3, 1, 4).reshape(n, heads, -1, d)
    last = torch.tensor(rows.past, device=q.device)[:, None] + torch.arange(s, device=q.device)
    mask = torch.arange(length, device=q.device) <= last[:, :, None]  # [n, S, M]
    out = F.scaled_dot_product_attention(grid, k, v, attn_mask=mask[:, None].repeat(1, 1, h // heads, 1))
    out = out.view(n, heads, h // heads, s, d).permute(0, 3, 1, 2, 4).reshape(n * s, h, d)
    return out if rows.even else out[(rows.row * s + rows.offset).to(q.device)]


def causal_conv(x: Tensor, weight: Tensor, rows: Rows, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution within each row. x [T, C], weight [C, K], state [n, K-1, C]: the inputs before the
    row's first (zeros if None). Returns [T, C] and the last K-1 inputs of each row [n, K-1, C]."""
    n, before = len(rows.lengths), weight.shape[1] - 1
    if state is None:
        state = x.new_zeros(n, before, x.shape[1])
    # Each row is led by its K-1 earlier inputs; then the sum over taps is K shifted slices of one buffer.
    shift = torch.arange(n) * before
    lead = (rows.starts[:-1] + shift)[:, None] + torch.arange(before)  # [n, K-1]
    own = torch.arange(len(x)) + shift[rows.row]  # [T], where each token's first tap lies
    source = torch.empty(len(x) + n * before, dtype=torch.long)
    source[lead] = torch.arange(n * before).view(n, before)
    source[own + before] = n * before + torch.arange(len(x))
    buffer = torch.cat([state.flatten(0, 1).to(x.dtype), x])[source.to(x.device)]
    taps = len(buffer) - before
    out = sum(buffer[j : j + taps] * weight[:, j] for j in range(before + 1))
    return out[own.to(x.device)], buffer[(lead + torch.tensor(rows.lengths)[:, None]).to(x.device)]


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: Rows, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gated delta rule (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks"), within each row, token by token:

        S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q / sqrt(Dk)

    q, k [T, H, Dk] of unit length; v [T, H, Dv]; g <= 0 and beta [T, H]; state [n, H, Dk, Dv] in float32 (zeros if
    None). Returns o [T, H, Dv] in v's dtype and the states after each row's last token."""
    if state is None:
        state = v.new_zeros(len(rows.lengths), v.shape[1], k.shape[2], v.shape[2], dtype=torch.float32)
    if rows.longest == 1 and rows.even:
        return _delta_step(q, k, v, g, beta, state)
    if q.is_cuda and _have("fla"):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        q, k, v, g, beta = (x[None] for x in (q, k, v, g, beta))
        o, state = chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=state, output_final_state=True, cu_seqlens=rows.cu_seqlens.long()
        )
        return o[0], state
    return _delta_chunks(q, k, v, g, beta, rows, state)


def _delta_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row: T = n."""
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
    index, valid, active, place, order = rows.chunks
    q, k, v, g, beta = (x.float()[index].transpose(1, 2) for x in (q, k, v, g, beta))  # [N, H, C, ...]
    g, beta = (x * valid[:, None] for x in (g, beta))  # padding neither decays nor writes
    q = q * q.shape[-1] ** -0.5
    decay = g.cumsum(-1)  # log of the decay from the chunk's start, this token's included
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()  # [..., i, j]: j to i
    system = (beta.unsqueeze(-1) * k) @ k.mT * between  # its diagonal is taken as one
    rhs = beta.unsqueeze(-1) * torch.cat([v, k * decay.exp().unsqueeze(-1)], dim=-1)
    solved = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    new, seen = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within = q @ k.mT * between
    q = q * decay.exp().unsqueeze(-1)
    k = k * (decay[..., -1:] - decay).exp().unsqueeze(-1)
    whole = decay[..., -1].exp()[..., None, None]

    state, out, done, begin = state[order], [], [], 0
    for count in active:
        at, begin = slice(begin, begin + count), begin + count
        done.append(state[count:])  # rows that have ended
        state = state[:count]
        write = new[at] - seen[at] @ state  # what the state does not yet say
        out.append(q[at] @ state + within[at] @ write)
        state = state * whole[at] + k[at].mT @ write
    final = torch.cat([state, *reversed(done)])[order.argsort()]
    return torch.cat(out).transpose(1, 2).flatten(0, 1)[place].to(v.dtype), final
