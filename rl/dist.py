"""Several GPUs of one machine: `torchrun --nproc-per-node N train.py` starts N processes, the ranks, which share a
step's work.

Each rank samples whole groups, and then holds the episodes of all of them; it runs its share of the micro-batches of
each optimizer batch, and the gradients are summed, so that all ranks take the same optimizer step. Token counts are
those of the whole batch. Rank 0 alone writes. Without torchrun there is one rank, and nothing here does anything.
"""
import datetime
import os
import sys
from collections.abc import Callable
from functools import partialmethod

import torch
import torch.distributed as torch_dist
from torch import Tensor
from tqdm import tqdm

_place = (0, 1)  # rank and ranks; not asked of torch, whose group vLLM takes away when it closes an engine


def start(device: str) -> None:
    """Join the other ranks, if torchrun has started this process: one card each, and only rank 0 prints.

    To be called before CUDA is: a rank sees its own card only, as card 0.
    """
    global _place
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or ranks() > 1:
        return
    if device == "cuda":
        local, seen = int(os.environ["LOCAL_RANK"]), os.environ.get("CUDA_VISIBLE_DEVICES")
        cards = seen.split(",") if seen else [str(i) for i in range(local + 1)]
        os.environ["CUDA_VISIBLE_DEVICES"] = cards[local] if local < len(cards) else ""
    torch_dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                                  timeout=datetime.timedelta(hours=3))  # the longest that one may wait for another
    _place = torch_dist.get_rank(), torch_dist.get_world_size()
    if rank():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)


def stop() -> None:
    """Leave the other ranks, at a run's end: a process that ends with the group open may die of it."""
    if ranks() > 1:
        torch_dist.barrier()
        if "vllm" not in sys.modules:  # whose engine ends the group with itself, and fails if it is gone
            torch_dist.destroy_process_group()


def rank() -> int:
    return _place[0]


def ranks() -> int:
    return _place[1]


def gather(items: list) -> list:
    """The items of all ranks, rank 0's first, on every rank."""
    if ranks() == 1:
        return items
    parts = [None] * ranks()
    torch_dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def sum_gradients(params: list[Tensor]) -> None:
    """Give every rank the sum of all ranks' gradients; who had no micro-batch adds zeros."""
    if ranks() > 1:
        for p in params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            torch_dist.all_reduce(p.grad)


def on_first(work: Callable):
    """What `work` returns on rank 0, on every rank. An error is raised by rank 0; the others end with it."""
    if ranks() == 1:
        return work()
    box = [None, False]
    try:
        if rank() == 0:
            box = [work(), True]
    finally:
        torch_dist.broadcast_object_list(box)
    if not box[1]:
        raise SystemExit(1)
    return box[0]


class Shared:
    """rank 0's object on all ranks: a method runs on rank 0 only, and every rank gets what it returns. All ranks must
    call the same ones in the same order."""

    def __init__(self, kind: type, own):
        self._kind, self._own = kind, own

    def __getattr__(self, name: str):
        if callable(getattr(self._kind, name, None)):
            return lambda *args, **kwargs: on_first(lambda: getattr(self._own, name)(*args, **kwargs))
        return on_first(lambda: getattr(self._own, name))

    def close(self) -> None:
        """Not together: also called when ranks have ended at different places."""
        if self._own is not None:
            self._own.close()


def shared(kind: type, make: Callable):
    """The `kind` that make() returns: itself for one rank, else Shared."""
    if ranks() == 1:
        return make()
    box: list = []
    on_first(lambda: box.append(make()))
    return Shared(kind, box[0] if box else None)
