"""Writes docs/tour.md: one task from its JSON to a changed policy, with the numbers of a run that takes some seconds.

    python docs/tour.py [--out FILE]
"""
import argparse
import json
import sys
import textwrap
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from model import lora
from model.optim import AdamW
from rl.config import Config
from rl.episode import Episode
from rl.grpo import EPS, importance_weights, token_weights
from rl.learner import Learner
from rl.lessons import encode
from rl.policy import Policy, make_policy
from rl.sampler import uniforms
from stl.expert import demonstrate
from stl.levels import make_task
from stl.prompts import user_prompt
from stl.world import Task
from train import advantages_of

CONFIG = Config(
    name="tour", architecture={"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128,
                               "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
                               "head_dim": 32, "rope_theta": 1000.0, "tie_word_embeddings": False},
    chat="compact", dtype="float32", device="cpu", threads=1, mix={"L0": 1}, eval_mix={"L0": 1},
    max_turns=6, max_tokens=448, max_turn_tokens=160, lora_rank=4, lora_alpha=8.0, steps=1, tasks_per_step=1, samples=8,
    optimizer_steps=1, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0, micro_tokens=1024)
IMITATION_STEPS = 90
FOLLOWED, NUDGE = "layers.1.mlp.down_proj", 0.01
KEY = (5, "grpo", 1)  # no token's luck is within 0.001 of a border, so that other machines sample the same episodes


class Recorder(AdamW):
    """AdamW that keeps the gradients of its last step, as they are after clipping."""

    def step(self) -> None:
        self.seen = [p.grad.clone() for p in self.params]
        super().step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).with_suffix(".md")))
    args = parser.parse_args()
    task = make_task("L0", "rl", 0)
    policy, losses = imitate(task)
    parts = [opening(task), tokens(policy, task), learnt(policy, losses)]
    episodes = policy.play([task], CONFIG.samples, KEY)
    parts += [rollout(policy, episodes), verdicts(policy, episodes), update(policy, episodes)]
    Path(args.out).write_text("\n\n".join(map(reflow, parts)) + "\n", encoding="utf-8")
    print(f"{args.out}: written")


def imitate(task: Task) -> tuple[Policy, list[float]]:
    """A policy that knows two conversations about `task` by heart, a right one and a careless one; the losses."""
    policy = make_policy(CONFIG)
    learner = Learner(policy.model, list(policy.model.parameters()),
                      AdamW(list(policy.model.parameters()), 1e-2, weight_decay=0.0), CONFIG)
    data = [encode(policy, {"task": task.to_json(), "messages": demonstrate(task, np.random.default_rng(0), noise)})
            for noise in (0.0, 1.0)]
    losses = []
    for step in range(IMITATION_STEPS):
        learner.optimizer.scale_lr(1 - step / IMITATION_STEPS)
        losses.append(learner.sft_step(data)["loss"])
    policy.model.requires_grad_(False)
    policy.adapter = lora.attach(policy.model, CONFIG.lora_rank, CONFIG.lora_alpha)
    return policy, losses


def reflow(text: str) -> str:
    """`text` with its paragraphs filled to 118 columns; headings, tables and indented blocks stay."""
    blocks = text.strip("\n").split("\n\n")
    return "\n\n".join(b if b.startswith(("    ", "|", "#")) else
                       textwrap.fill(" ".join(b.split()), 118, break_long_words=False, break_on_hyphens=False)
                       for b in blocks)


def block(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.split("\n") if line)


def words(policy: Policy, ids: list[int]) -> str:
    return block(textwrap.fill(policy.chat.text(ids), 108, break_long_words=False, break_on_hyphens=False))


def opening(task: Task) -> str:
    data = {key: value for key, value in task.to_json().items() if key not in ("witness", "plan")}
    lines = ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items())
    visit = [f"{f.arg.region} at some time from {f.a:g} s to {f.b:g} s" for f in task.formulas]
    return f"""
# One task, from JSON to a changed policy

Written by `python docs/tour.py`; a test writes it again and compares. The model is small, the functions are those that
train the 9B, and the numbers are what they return.

## 1. A task

`make_task("L0", "rl", 0)` (`stl/levels.py:make_task`) draws a task, the same one on every machine. As JSON, without the
known solution:

{block("{" + lines + "}")}

A square robot of half-width {task.robot.half_width} m, at most {task.robot.v_max:g} m/s fast, has to be inside
{visit[0]}, and inside {visit[1]}, clear of the obstacles all the time.

## 2. The prompt

A pretrained model reads a system prompt, and this (`stl/prompts.py:user_prompt`):

{block(user_prompt(task))}
"""


def tokens(policy: Policy, task: Task) -> str:
    ids = policy.chat.prompt(task)
    table = "\n".join(f"| {i} | {token} | `{policy.chat.names[token]}` |" for i, token in enumerate(ids[:7]))
    return f"""
The small model reads the same in a vocabulary of {policy.chat.size} words (`rl/chat.py:CompactChat`), as {len(ids)}
tokens:

{words(policy, ids)}

## 3. Tokens

A number is two of them. The first ones:

| place | id | word |
|---|---|---|
{table}
"""


def learnt(policy: Policy, losses: list[float]) -> str:
    return f"""
## 4. Something to begin with

A model with random weights says nothing of use. Ours, of {sum(p.numel() for p in policy.model.parameters()):,} numbers,
first imitates two conversations of the scripted expert about this very task, {len(losses)} steps of both
(`rl/learner.py:Learner.sft_step`): one is right, in the other the expert forgets to wait. The loss is the mean of
-log p over the tokens that a policy would have chosen; it falls from {losses[0]:.2f} to {losses[-1]:.3f}. Then these
weights are frozen, and an adapter of rank {CONFIG.lora_rank} is laid on every linear layer (`model/lora.py:attach`):
y = W x + (alpha / rank) B A x with alpha / rank = {CONFIG.lora_alpha:g} / {CONFIG.lora_rank} and B = 0. So far it
changes nothing.
"""


def rollout(policy: Policy, episodes: list[Episode]) -> str:
    episode, names = next(e for e in episodes if e.reward), policy.chat.names
    start = len(policy.chat.prompt(episode.task))
    end = start + episode.mask[start:].index(0)
    after = end + episode.mask[end:].index(1)
    luck = uniforms(np.full(start + 9, episode.seed), np.arange(start + 9))
    rows = "\n".join(f"| {i} | `{names[episode.ids[i]]}` | {np.exp(episode.logprobs[i]):.3f} | "
                     f"{episode.logprobs[i]:.4f} | {luck[i]:.3f} |" for i in range(start, start + 9))
    call = episode.messages[1]["tool_calls"][0]["function"]
    visits = ", ".join(f"{f.arg.region} at {f.a:g} s" for f in sorted(episode.task.formulas, key=lambda f: f.a))
    return f"""
## 5. A turn, a call, an answer

A group is {CONFIG.samples} episodes of one task. Each has a seed, made of (seed of the run, stage, step, task, sample),
and a token's luck is a function of that and its place: where it falls in the distribution function, that token it is
(`rl/rollout.py:new_episodes`, `rl/sampler.py:uniforms`). Episode {episode.sample} begins:

| place | token | probability | log-prob | luck |
|---|---|---|---|---|
{rows}

Its first turn has {end - start} tokens, the stop token `<end>` included:

{words(policy, episode.ids[start:end])}

It begins with a plan, the visits in the order in which their windows open: {visits}. `rl/chat.py:CompactChat.parse`
reads it as a call of `{call["name"]}` with

{block(call["arguments"])}

which `stl/tools.py:call_tool` answers:

{block(episode.messages[2]["content"])}

The compact format keeps the waypoints. These {after - end} tokens are appended with mask 0, since nobody chose them:

{words(policy, episode.ids[end:after])}

So it goes on, turn by turn, on one list of {len(episode.ids)} ids, {episode.sampled} of them chosen, to the last
message:

{block(episode.messages[-1]["content"])}
"""


def verdicts(policy: Policy, episodes: list[Episode]) -> str:
    rewards, gains = [episode.reward for episode in episodes], advantages_of(episodes, CONFIG)
    rows = "\n".join(f"| {e.sample} | {e.sampled} | {e.ending} | "
                     f"{'; '.join(v.text for v in e.verdict.violations) or 'right'} | {e.reward:g} | {gain:+.3f} |"
                     for e, gain in zip(episodes, gains, strict=True))
    right, wrong = (next(e for e in episodes if e.reward == reward) for reward in (1, 0))
    place = next(i for i, (a, b) in enumerate(zip(right.ids, wrong.ids, strict=False)) if a != b)
    said, instead = (policy.chat.names[e.ids[place]] for e in (right, wrong))
    return f"""
## 6. Verdict, reward, advantage

`stl/monitor.py:check` judges each path in continuous time. The reward is 1 or 0. The advantage
(`rl/grpo.py:advantages`) is (reward - {np.mean(rewards):.3f}) / ({np.std(rewards, ddof=1):.3f} + {EPS:g}), of the
group's mean and its unbiased standard deviation.

| episode | chosen tokens | ending | verdict | reward | advantage |
|---|---|---|---|---|---|
{rows}

The failed ones begin as the right ones do, up to place {place}. There they say `{instead}`, and the others `{said}`:

{words(policy, wrong.ids[wrong.mask.index(1):wrong.mask.index(0, place)])}

This call asks for no wait, so the robot leaves A before the window opens. One of the two demonstrations forgot the wait
just so, and the policy has learnt both: `{said}` has the probability {np.exp(right.logprobs[place]):.3f} here. To raise
it is what this group has to teach.
"""


def update(policy: Policy, episodes: list[Episode]) -> str:
    """The optimizer batch: log-probs before, the step, log-probs after."""
    optimizer = Recorder(policy.adapter.parameters(), CONFIG.lr, CONFIG.betas, weight_decay=CONFIG.weight_decay)
    learner = Learner(policy.model, policy.adapter.parameters(), optimizer, CONFIG, n_vocab=policy.chat.size)
    gains = advantages_of(episodes, CONFIG)
    old = learner.old_logprobs(episodes, gains)
    slope = by_differences(policy, learner, episodes, gains, old)
    stats = learner.grpo_step(episodes, gains, old)
    new = learner.old_logprobs(episodes)
    e = next(i for i, gain in enumerate(gains) if gain > 0)  # a right episode, and its token that grows most
    j = int((new[e] - old[e]).argmax())
    token = (e, j, [i for i, chosen in enumerate(episodes[e].mask) if chosen][j])
    return "\n".join([loss(policy, episodes, gains, old, stats, token), step(policy, optimizer, stats, slope),
                      sync(policy, episodes, gains, old, new, token)])


def by_differences(policy: Policy, learner: Learner, episodes, gains, old) -> float:
    """The derivative of the loss by the followed number, without a backward pass."""
    number, losses = policy.adapter.tensors()[f"{FOLLOWED}.lora_B.weight"], []
    for value in (NUDGE, -NUDGE):
        number[0, 0] = value
        new = learner.old_logprobs(episodes)
        losses.append(-sum(gain * float((b - a).double().exp().sum())
                           for gain, a, b in zip(gains, old, new, strict=True)) / sum(e.sampled for e in episodes))
    number[0, 0] = 0.0
    return (losses[0] - losses[1]) / (2 * NUDGE)


def loss(policy: Policy, episodes, gains, old, stats, token) -> str:
    e, j, place = token
    sampler, counts = episodes[e].logprobs[place], [episode.sampled for episode in episodes]
    weight = float(importance_weights(old[e][j], torch.tensor(sampler), CONFIG.importance_cap))
    share = token_weights(counts)[e]
    by_hand = -sum(gain * count for gain, count in zip(gains, counts, strict=True)) * share
    return f"""
## 7. Loss

The trainer computes the log-probs of all chosen tokens itself, in one pass over the packed episodes
(`rl/learner.py:Learner.old_logprobs`). They differ from the sampler's by
{"less" if stats["mismatch_max"] < 1e-4 else "more"} than 0.0001.

The loss of a token is -A times the ratio of new to old probability, clipped (`rl/grpo.py:token_loss`), times an
importance weight for what sampler and trainer differ by, divided by the number of chosen tokens of all
{len(episodes)} episodes, {stats["tokens"]}. Take the token
`{policy.chat.names[episodes[e].ids[place]]}` at place {place} of episode {e}:

| | |
|---|---|
| log-prob by the sampler | {sampler:.4f} |
| log-prob by the trainer, before the step | {float(old[e][j]):.4f} |
| ratio of new to old: nothing has moved yet | 1.0000 |
| importance weight | {weight:.4f} |
| advantage | {gains[e]:+.4f} |
| its share of the loss | {-gains[e] * weight * share:+.6f} |

All {stats["live_tokens"]} together are {stats["loss"]:+.4f}. With every ratio 1 that is minus the sum of advantage
times chosen tokens, over {stats["tokens"]}: {by_hand:+.4f}. Its value says only that right and wrong episodes differ in
length; what counts is its gradient.
"""


def step(policy: Policy, optimizer: Recorder, stats, slope: float) -> str:
    grads = dict(zip(policy.adapter.tensors(), optimizer.seen, strict=True))
    of_a = max(float(grad.abs().max()) for name, grad in grads.items() if "lora_A" in name)
    name = f"{FOLLOWED}.lora_B.weight"
    return f"""
## 8. Gradient and step

B is 0 at first, so the gradient of every A is {of_a:g}, and the first step moves B alone. The gradient's norm is
{stats["grad_norm"]:.4f}; above {CONFIG.grad_clip:g} it would be scaled down. Follow one number: row 0, column 0 of B of
`{FOLLOWED}` has the gradient {float(grads[name][0, 0]):+.6f}. By hand: with that number at {-NUDGE:g} and at {NUDGE:g},
all else as it was, the loss differs by {2 * NUDGE * slope:+.7f}, which is {slope:+.6f} per unit.

AdamW's first step (`model/optim.py:AdamW`) is the rate times the sign of the gradient: the number goes from 0 to
{float(policy.adapter.tensors()[name][0, 0]):+.5f}, at a rate of {CONFIG.lr:g}. The model's own weights are not touched.
"""


def sync(policy: Policy, episodes, gains, old, new, token) -> str:
    (e, j, place), model = token, policy.model
    rows = "\n".join(f"| {e.sample} | {gain:+.3f} | {float(before.sum()):.2f} | {float(after.sum()):.2f} |"
                     for e, gain, before, after in zip(episodes, gains, old, new, strict=True))
    policy.sampler.load(1)
    ids = episodes[e].ids
    with torch.no_grad():  # as the sampler computes: one after the other, into a cache
        hidden = model.extend([ids[:place]], model.new_cache(1, CONFIG.max_tokens), [0])
        logp = torch.log_softmax(model.head(hidden[0])[:policy.chat.size], -1)[ids[place]]
    fresh = policy.play([episodes[e].task], 64, (*KEY[:2], 2))
    assert {episode.version for episode in fresh} == {1}
    before, after = float(old[e][j]), float(new[e][j])
    return f"""
## 9. The sampler has the new policy

`policy.sampler.load(1)` makes the sampler forget its caches (vLLM is also handed the adapter) and stamp what it samples
with version 1. The same token in the same place now has the log-prob {after:.4f} by the trainer, {before:.4f} before:
its probability went from {np.exp(before):.3f} to {np.exp(after):.3f}. The sampler's way, reading into a cache, gives it
{float(logp):.4f} too. By all their chosen tokens, the log-probs of the episodes are

| episode | advantage | before | after |
|---|---|---|---|
{rows}

Of the {len(episodes)} episodes before the step a share of {np.mean([x.reward for x in episodes]):.3f} was right; of
{len(fresh)} fresh ones of the same task by version 1 it is {np.mean([x.reward for x in fresh]):.3f}. What a policy has
learnt for other tasks is measured on held-out ones (`train.py:evaluate`). That was a step of GRPO. The main run,
configs/l8.py, takes 80 of them, each on 32 tasks with 8 episodes a task.
"""


if __name__ == "__main__":
    main()
