"""Memory and time of the log-probabilities of a long micro-batch over the whole vocabulary, forward and backward.

    python bench/logprobs.py                    # 32,768 tokens x 248,320 ids on the CPU: several minutes; Linux
    python bench/logprobs.py --tokens 2048

A full matrix of fp32 logits would take 30 GiB. What is measured is the process's peak beyond what it held when hidden
states and head weight were in place; the gradient of the hidden states counts. Exit code 1 if it is over --limit.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from model.logprobs import CHUNK_BYTES, token_logprobs


def memory(field: str) -> int:
    """Bytes of main memory that this process holds (VmRSS) or has held at most (VmHWM). Unlike getrusage's figure it
    does not count what the parent process held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=248320)
    parser.add_argument("--chunk", type=int, help="tokens whose logits exist at one time (default: 256 MiB of them)")
    parser.add_argument("--limit", type=float, default=1.5, help="GB")
    args = parser.parse_args()
    hidden = torch.randn(args.tokens, args.hidden, requires_grad=True)
    weight = torch.randn(args.vocabulary, args.hidden).mul_(args.hidden**-0.5)
    targets = torch.randint(0, args.vocabulary, (args.tokens,))
    chunk = args.chunk or max(1, CHUNK_BYTES // (4 * args.vocabulary))
    before, began = memory("VmRSS"), time.perf_counter()
    logp, entropy = token_logprobs(hidden, weight, targets, chunk)
    between = time.perf_counter()
    logp.mean().backward()
    after, extra = time.perf_counter(), (memory("VmHWM") - before) / 1e9
    print(f"{args.tokens:,} tokens, hidden {args.hidden}, {args.vocabulary:,} ids, chunks of {chunk}, "
          f"torch {torch.__version__}, {torch.get_num_threads()} threads")  # fmt: skip
    print(f"mean log-probability {float(logp.detach().mean()):.3f}, mean entropy {float(entropy.mean()):.3f}")
    print(f"extra peak memory {extra:.2f} GB (limit {args.limit:g}), forward {between - began:.0f} s, "
          f"backward {after - between:.0f} s")  # fmt: skip
    return 0 if extra <= args.limit else 1


if __name__ == "__main__":
    sys.exit(main())
