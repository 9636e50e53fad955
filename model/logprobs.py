"""Log-probabilities and entropies of given tokens, without ever holding a full logits matrix.

At 32k tokens and a vocabulary of 248k one fp32 copy of the logits is 32 GB. The head is therefore applied to a chunk of
tokens at a time, and in the backward pass applied again: what is kept between the two is one number a token.
"""

import torch
from torch import Tensor

CHUNK_BYTES = 2**28  # of one fp32 logits chunk where the caller does not say; about two such chunks live at a time


def token_logprobs(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, chunk: int | None = None, n_vocab: int | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probability of `targets` [T] and entropy of the distribution, from `hidden` [T, D] and `head_weight` [V, D].

    Both results are fp32 [T], in nats, of softmax(logits / temperature) over the first `n_vocab` ids (rows beyond the
    tokenizer's size are padding and can't be drawn). Only the log-probability has a gradient: to `hidden`, and to
    `head_weight` if that is trained. `chunk` is in tokens. IndexError for a target beyond the vocabulary.
    """
    n_vocab = n_vocab or len(head_weight)
    chunk = chunk or max(1, CHUNK_BYTES // (4 * len(head_weight)))
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < n_vocab:
        raise IndexError(f"target id {int(targets.max())} is not among the head's {n_vocab} ids")
    return _TokenLogprobs.apply(hidden, head_weight, targets, chunk, n_vocab, temperature)


def _logits(hidden: Tensor, weight: Tensor, n_vocab: int, temperature: float) -> Tensor:
    """fp32 logits [chunk, V]. bf16 operands are summed in fp32 and, where the device can, never rounded to bf16."""
    hidden = hidden.to(weight.dtype)
    if weight.is_cuda and weight.dtype != torch.float32:
        logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    else:
        logits = (hidden @ weight.T).float()
    if temperature != 1.0:
        logits.div_(temperature)
    # Padding rows are hidden, not cut off: a GPU multiplies matrices slowly whose width is no multiple of eight.
    logits[:, n_vocab:] = torch.finfo(torch.float32).min
    return logits


class _TokenLogprobs(torch.autograd.Function):
    """d logp / d logits = onehot - softmax: the backward pass needs the logits again and each token's logsumexp."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk, n_vocab, temperature):
        logp, entropy, logsumexp = (hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(3))
        for part in _slices(hidden.shape[0], chunk):
            logits = _logits(hidden[part], weight, n_vocab, temperature)
            top = logits.max(dim=-1, keepdim=True).values
            logits.sub_(top)
            exp = logits.exp()
            total = exp.sum(dim=-1)
            log_total = total.log()
            logp[part] = logits.gather(1, targets[part, None])[:, 0] - log_total
            entropy[part] = log_total - exp.mul_(logits).sum(dim=-1) / total
            logsumexp[part] = log_total + top[:, 0]
        ctx.save_for_backward(hidden, weight, targets, logsumexp)
        ctx.chunk, ctx.n_vocab, ctx.temperature = chunk, n_vocab, temperature
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx, grad_logp, _):
        hidden, weight, targets, logsumexp = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _slices(hidden.shape[0], ctx.chunk):
            grad = _logits(hidden[part], weight, ctx.n_vocab, ctx.temperature)
            scale = grad_logp[part, None] / ctx.temperature
            grad.sub_(logsumexp[part, None]).exp_().mul_(-scale).scatter_add_(1, targets[part, None], scale)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = (grad @ weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[part].to(weight.dtype)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _slices(length: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, length, chunk)]
