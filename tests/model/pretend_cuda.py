"""A GRPO step and the torch sampler on tensors that say they are on a GPU, in a process of its own (test_cuda.py).

A `Card` holds a CPU tensor, and says "cuda:0" where it is asked. Operations on it are computed on the CPU, and are
refused where CUDA would refuse them: between the two devices (scalars, copies and indices apart), and a matrix product
of two dtypes. The kernels that only CUDA has are plain torch here, behind the demands that theirs make. For torch
the cards are on a device "lazy", as a build without CUDA cannot go backward through the real one.
"""

import sys
import types
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.gpu import SMALL
from model import ops
from model.lora import attach
from model.optim import AdamW
from model.qwen import Qwen
from rl.config import Config
from rl.episode import Episode
from rl.learner import Learner
from rl.sampler_torch import TorchSampler

aten, HERE = torch.ops.aten, torch.device("cuda:0")
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)


class Card(torch.Tensor):
    device, is_cuda, __torch_function__ = property(lambda self: HERE), True, torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, real):
        made = torch.Tensor._make_wrapper_subclass(cls, real.shape, real.stride(), dtype=real.dtype, device="lazy:0")
        made.held = real
        return made

    def tolist(self):
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, operation, kinds, args=(), more=None):
        return compute(operation, args, more or {})


class Pretending(TorchDispatchMode):
    def __torch_dispatch__(self, operation, kinds, args=(), more=None):
        return compute(operation, args, more or {})


def compute(operation, args, more):
    name, tensors = operation.overloadpacket, [x for x in tree_iter((args, more)) if isinstance(x, torch.Tensor)]
    cards = [x for x in tensors if isinstance(x, Card)]
    on_card = bool(cards)
    if (device := more.get("device")) is not None:
        on_card, more = torch.device(device).type != "cpu", more | {"device": "cpu"}
    elif name in (aten.copy_, *INDEXING):  # may mix; but a GPU's indices do not fit a CPU's tensor
        assert isinstance(args[0], Card) or not cards or name is aten.copy_, operation
        on_card = isinstance(args[0], Card)
    elif cards and any(x.dim() for x in tensors if not isinstance(x, Card)):
        raise RuntimeError(f"{operation}: {[(list(x.shape), str(x.device)) for x in tensors]}")
    if name in (aten.mm, aten.bmm, aten.addmm):
        assert len({x.dtype for x in tensors}) == 1, operation
    args, more = tree_map(lambda x: x.held if isinstance(x, Card) else x, (args, more))
    if operation is aten.mm.dtype:  # bf16 operands, sums of another dtype: on CUDA only
        return Card(args[0].to(args[2]) @ args[1].to(args[2]))
    out = operation(*args, **more)
    if operation._schema.is_mutable:
        return tensors[0]
    return tree_map(lambda x: Card(x) if isinstance(x, torch.Tensor) else x, out) if on_card else out


def varlen_attn(q, k, v, cu_q, cu_k, longest_q, longest_k, *, window_size):
    """torch.nn.attention.varlen's, by its docstring."""
    assert {q.dtype, k.dtype, v.dtype} == {torch.bfloat16} and q.shape == k.shape and window_size == (-1, 0)
    assert cu_q.dtype == cu_k.dtype == torch.int32 and cu_q.is_cuda and {x.stride(-1) for x in (q, k, v)} == {1}
    lengths = torch.tensor(cu_q.tolist()).diff().tolist()
    assert longest_q == longest_k == max(lengths)
    return ops.attention(q.float(), k.float(), v.float(), ops.Rows(lengths, HERE)).to(q.dtype)


def chunk_gated_delta_rule(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens):
    """flash-linear-attention's, by its docstring and source: shapes [1, T, H, ...], states [n, H, Dk, Dv]."""
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16 and g.dtype == initial_state.dtype == torch.float32
    assert q.shape == k.shape and g.shape == beta.shape == v.shape[:3] and len(q) == 1
    assert cu_seqlens.dtype == torch.int64 and len(initial_state) == len(cu_seqlens) - 1
    rows = ops.Rows(torch.tensor(cu_seqlens.tolist()).diff().tolist(), HERE)
    out, state = ops._delta_chunks(*(x[0] for x in (q, k, v, g, beta)), rows, initial_state)
    return out[None], state


def pretend(kernels: bool) -> None:
    """From here on this process seems to have a GPU, with flash-linear-attention or without."""
    torch.cuda._lazy_init, torch.cuda.is_available = lambda: None, lambda: True
    torch.Tensor.pin_memory = lambda self: self
    torch.autograd.set_multithreading_enabled(False)
    import torch.nn.attention.varlen as varlen

    varlen.varlen_attn = varlen_attn
    ops.installed = lambda module: module == "fla" and kernels
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = chunk_gated_delta_rule


def learn(model, device) -> dict[str, float]:
    """What the log says of the second of two optimizer steps."""
    model.gradient_checkpointing = True
    params = attach(model, 8, 8).parameters()
    assert {p.device for p in params} == {torch.device(device)}
    settings = {field.name: field.default for field in fields(Config)} | {"micro_tokens": 200, "head_chunk": 64}
    learner = Learner(model, params, AdamW(params, 1e-3), SimpleNamespace(**settings), device, n_vocab=990)
    generator, episodes = torch.Generator().manual_seed(0), []
    for length in (130, 2, 168):
        ids = torch.randint(0, 990, (length,), generator=generator).tolist()
        episodes.append(episode := Episode(SimpleNamespace(level=None), seed=0))
        episode.append(ids[:1])
        episode.append(ids[1:], [-6.9] * (length - 1))
    gains = [1.0, -1.0, 1.0]
    return [learner.grpo_step(episodes, gains, learner.old_logprobs(episodes, gains)) for _ in range(2)][1]


def main() -> None:
    models = [Qwen.random(SMALL, dtype=torch.bfloat16) for _ in range(2)]
    expected = learn(models[0], "cpu")
    pretend(kernels=sys.argv[1] == "kernels")
    with Pretending():
        for module in models[1].modules():
            module._parameters |= {n: torch.nn.Parameter(Card(p.detach())) for n, p in module._parameters.items()
                                   if p is not None}
        found = learn(models[1], HERE)
        sampler, done = TorchSampler(models[1], slots=6, max_len=128, n_vocab=990, stop_ids=[5]), []
        for key in range(8):
            sampler.add(key, [7] * (3 + key), 10, key)
        while turns := sampler.step():
            done += turns
            for turn in turns:
                sampler.drop(turn.key)
    assert sorted(turn.key for turn in done) == list(range(8))
    for name in ("loss", "entropy", "grad_norm"):
        assert abs(found[name] - expected[name]) < 0.02 * abs(expected[name]), (name, found, expected)
    assert found["steps"] == 1 and abs(found["ratio_max"] - 1) < 1e-5


if __name__ == "__main__":
    main()
