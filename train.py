"""Train a planner: imitate the scripted expert (where the config says so), then improve by GRPO on exact rewards.

    python train.py                          the small run of configs/tiny.py, on a laptop's CPU
    python train.py --config l8.py           the main run, on one H100
    python train.py --config l8.py --dry-run     all of its code in small, on any machine, and what the run takes
    torchrun --nproc-per-node 4 train.py --config l8.py      on four of them, which share each step's work
    python train.py --steps=40 --lr=2e-5     any setting of rl/config.py can be changed by --key=value

Stop it at any time, even with kill -9: the same command goes on where it was. A run is written to runs/NAME; data/
keeps the demonstrations and tasks that were made, and may be deleted: what is needed is made again.
"""
import difflib
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while all this is imported: no traceback

import numpy as np
from tqdm import tqdm

from model.checkpoint import save_adapter, save_folder
from model.optim import AdamW, Chain, Muon
from rl import cli, dist, report
from rl.chat import open_chat
from rl.config import FIELDS, Config, ConfigError, load_config, replace
from rl.dryrun import dry_run
from rl.env import EnvFault
from rl.episode import Episode
from rl.grpo import advantages
from rl.learner import Learner, sampler_logprobs
from rl.ledger import Clock, Ledger, against_plan, flops
from rl.lessons import file_digest, lessons, sft_batch
from rl.plan import show_plan
from rl.policy import Policy, check_machine, check_prompts, resume_policy
from rl.probe import prove
from rl.run import Checkpoint, Run, latest_checkpoint, run_folder
from rl.tasks import held_out, training_tasks


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser("train.py", __doc__)
    parser.add_argument("--config", default="tiny.py", help="a Python file, or the name of one in configs/")
    parser.add_argument("--new", action="store_true", help="begin a new run beside the finished or unfinished one")
    parser.add_argument("--force", action="store_true", help="go on with a run although its settings have changed")
    parser.add_argument("--plan", action="store_true", help="print the memory that a step takes on a card, and end")
    parser.add_argument("--dry-run", action="store_true", help="go the whole way in small, print the plan, and end")
    args, overrides = parser.parse_known_args(argv)
    options = [name.replace("_", "-") for name in vars(args)]
    for item in overrides:
        close = difflib.get_close_matches(item.strip("-").partition("=")[0], [*options, *FIELDS], n=1)
        if close and close[0] in options:
            parser.error(f"unexpected {item!r} (did you mean --{close[0]}?)")
    if stray := [item for item in overrides if not item.startswith("--")]:
        parser.error(f"unexpected {stray[0]!r}: settings are written --KEY=VALUE")
    signal.signal(signal.SIGTERM, stop)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def work() -> None:
        config = load_config(args.config, overrides)
        if args.dry_run and os.environ.get("RANK", "0") == "0":  # with torchrun, one process goes the way alone
            dry_run(config, train)
        dist.start("cpu" if args.dry_run or args.plan else config.device)
        if args.dry_run or args.plan:
            show_plan(config)
        else:
            train(config, args.new, args.force)
        dist.stop()

    return cli.run_script("train.py", work)


def train(config: Config, new: bool = False, force: bool = False) -> None:
    """Go through the stages of `config` in its run folder, from wherever the last process left it."""
    model = check(config, begun=latest_checkpoint(run_folder(config, new=new)) is not None)
    run = dist.shared(Run, lambda: Run.open(config, new=new, force=force))  # a mistake so far leaves no folder
    folder = run.folder  # asked for here: ranks that are interrupted do so at different places
    try:
        if run.finished:
            more = "steps" if config.steps else "sft_steps"
            print(f"{folder} is finished: curves in {folder}/curves.png; --{more}=N --force goes on to more steps, "
                  "--new begins another run")
            return
        print(f"{folder}: {config.about}" if config.about else folder, flush=True)
        ledger = Ledger(folder, config)
        if config.imitates:
            imitate(config, run, ledger)
        if config.steps:
            if config.device == "cuda":
                show_plan(replace(config, model=str(model or "")))  # the first step says how it compares
            reinforce(config, run, ledger)
        rows, path = run.rows(), folder / "curves.png"
        dist.on_first(lambda: report.curves(rows, path))
        run.finish()
        if config.sampler != "script":  # of a dry run nothing is left
            print(f"done: curves in {folder}/curves.png; try python sample.py --policy {folder}")
    except KeyboardInterrupt:
        if config.sampler != "script" and dist.rank() == 0:
            last = latest_checkpoint(folder)
            words = f"after {last.stage} step {last.step}" if last else "from the beginning"
            print(f"\n{folder}: stopped; the same command{' without --new' * new} goes on {words}", file=sys.stderr)
        raise
    finally:
        run.close()


def check(config: Config, begun: bool) -> Path | None:
    """Look for a user's mistakes before anything is written; returns the local folder of config.model. ConfigError.

    Of a run that has `begun`, the checkpoints have the adapter that it started from, and its prompts had room.
    """
    if dist.ranks() > 1 and config.sampler == "vllm" and config.model and config.sft_file and config.steps:
        raise ConfigError("sft_file: vLLM's engine cannot be ended for a second one beside other ranks; with several "
                          "GPUs imitate with steps = 0, then start a run with `adapter` from that one's folder")
    model = check_machine(replace(config, adapter="") if begun else config, config.model)
    if not begun:
        first = training_tasks(config, 0, config.tasks_per_step)
        tasks = held_out(config.eval_mix, config.env) + first * bool(config.steps)
        check_prompts(config, open_chat(config, model), tasks)
    return model


# ------------------------------------------------------------------------------------------------------- imitation


def imitate(config: Config, run: Run, ledger: Ledger) -> None:
    """The supervised stage: all weights of a random model, or an adapter over config.model, learn conversations."""
    if run.latest("grpo"):
        print(f"{run.folder}: the imitation is over, as GRPO has begun")
        return
    last, tasks = run.latest("sft"), held_out(config.eval_mix, config.env)
    until = [config.sft_steps, config.sft_epochs, config.sft_stop, config.sft_patience]
    ended = last is not None and measured(run, of="sft", step=last.step, temperature=0.0)
    if ended and last.state.get("until", until) == until:  # else --force asks for another end than it has come to
        return
    digest = file_digest(config.sft_file, last)
    policy = resume_policy(config if config.model else replace(config, sampler="torch"), None, last,
                           adapter=bool(config.model))
    learner = begin(config, policy, sft_optimizer(config, policy), last)
    step = last.step if last else 0
    run.rewind("sft", step)
    data, kept_back = lessons(config, policy, tasks)
    total = config.sft_steps or max(1, config.sft_epochs * len(data) // config.sft_batch)
    policy.sampler.release()  # the trainer has the device first

    def measure(temperature: float) -> float:
        return evaluate(policy, run, ledger, tasks, "sft", step, temperature)

    saved, came = time.monotonic(), []
    with tqdm(total=total, initial=step, desc="imitation", unit="step") as bar:
        while step < total and not (due(config, step) and not (ended and step == last.step)
                                    and enough(config, run, measure(config.temperature))):
            with held_back(came):
                row = sft_step(config, policy, learner, kept_back, sft_batch(config, data, step), step + 1, total)
                step += 1
                run.log(row)
                ledger.enter({"trained": row["tokens"]}, {"imitation": row["time"]["seconds"]})
                bar.set_postfix(loss=f"{row['loss']:.3f}", refresh=False)
                bar.update()
                ends, waited = dist.on_first(lambda since=saved: (bool(came), time.monotonic() - since))
                if ends or step == total or due(config, step) or waited > config.checkpoint_seconds:
                    save(run, policy, learner, "sft", step, {"data": digest, "until": until})
                    saved = time.monotonic()
            if ends:  # a signal that came later ends the next step
                raise KeyboardInterrupt
    if dist.on_first(lambda: bool(came)):
        raise KeyboardInterrupt
    for temperature in (config.temperature, 0.0):
        measure(temperature)
    if config.steps:  # and otherwise not: vLLM would take the ranks' group with it
        policy.close()


def due(config: Config, step: int) -> bool:
    """Whether the weights after a supervised step are measured, and kept before that, as it takes long."""
    return step >= max(1, config.sft_eval_from) and step % (config.sft_eval_every or math.inf) == 0


def sft_step(config: Config, policy: Policy, learner: Learner, kept_back: list[Episode], batch: list[Episode],
             step: int, total: int) -> dict:
    """The supervised step number `step` of `total`; returns the row of the log."""
    began = time.monotonic()
    learner.optimizer.scale_lr(rate(config, step - 1, total))
    with policy.uploaded():
        stats = learner.sft_step(batch) | {"read": sum(len(episode.ids) for episode in batch)}
    if kept_back and (due(config, step) or step == total):
        stats["held_out_loss"] = mean_loss(policy, learner, kept_back)
    return {"stage": "sft", "step": step, **stats, "time": {"seconds": time.monotonic() - began}}


def mean_loss(policy: Policy, learner: Learner, episodes: list[Episode]) -> float:
    """Mean of -log p over the masked tokens of `episodes`, in nats."""
    with policy.uploaded():
        own = [logprobs for logprobs in learner.old_logprobs(episodes) if logprobs is not None]
    sums = dist.gather([(float(sum(part.double().sum() for part in own)), sum(map(len, own)))])
    return -sum(loss for loss, _ in sums) / max(1, sum(tokens for _, tokens in sums))


def enough(config: Config, run: Run, success: float) -> bool:
    """Whether to stop early: held-out success is reached, or the held-out loss has not fallen for too long."""
    losses = [row["held_out_loss"] for row in run.rows("sft") if "held_out_loss" in row]
    patience = config.sft_patience
    return success >= config.sft_stop or bool(patience) and len(losses) > patience + losses.index(min(losses))


def sft_optimizer(config: Config, policy: Policy) -> AdamW | Chain:
    """AdamW; or Muon for the matrices inside the layers and AdamW for embeddings, head and vectors."""
    def adamw(params):
        return AdamW(params, config.sft_lr, config.betas, weight_decay=0.0)

    if config.sft_optimizer == "adamw":
        return adamw(policy.trained())
    named = dict(policy.model.named_parameters())
    inside = {name: p for name, p in named.items() if name.startswith("layers.") and p.ndim == 2}
    rest = [p for name, p in named.items() if name not in inside]
    return Chain(Muon(list(inside.values()), config.sft_muon_lr), adamw(rest))


def rate(config: Config, step: int, total: int) -> float:
    """The share of the full learning rate at a supervised step of `total`: linear warm-up, flat, linear decay."""
    left = (total - step) / max(1.0, config.sft_decay * total)
    return min(1.0, (step + 1) / max(1, config.sft_warmup), left)


# -------------------------------------------------------------------------------------------- reinforcement (GRPO)


def reinforce(config: Config, run: Run, ledger: Ledger) -> None:
    """GRPO: sample groups of episodes, grade them exactly, move the adapter towards what beat its group's mean."""
    last = run.latest("grpo")
    policy = resume_policy(config, run.latest("sft"), last, adapter=True)
    optimizer = AdamW(policy.trained(), config.lr, config.betas, weight_decay=config.weight_decay)
    learner = begin(config, policy, optimizer, last)
    step = begun = last.step if last else 0
    run.rewind("grpo", step)
    tasks, clock = held_out(config.eval_mix, config.env), Clock()
    with tqdm(total=config.steps, initial=step, desc="grpo", unit="step") as bar:
        while True:
            if config.sampler == "vllm" and config.probe_every and (step == begun or step % config.probe_every == 0):
                prove(policy, tqdm.write)
            if (config.eval_every and step % config.eval_every == 0) or step >= config.steps:
                evaluate(policy, run, ledger, tasks, "grpo", step, config.temperature)
            if step >= config.steps:  # more: --force has set fewer steps than were done
                break
            step += 1
            row = grpo_step(config, run, policy, learner, step, clock)
            run.log(row)  # before the checkpoint: a resumed run drops rows that are ahead of its last checkpoint
            with clock("checkpoint"):  # its time is in the next step's row
                save(run, policy, learner, "grpo", step, {})
            bar.write(f"{report.step_line(row)}\n{ledger.step(row)}")
            if "memory" in row and step == begun + 1:
                bar.write(against_plan(config, policy.model.config, row["memory"]))
            if warning := report.mismatch_warning(row, config.mismatch_bound):
                bar.write(warning)
            bar.update()
    evaluate(policy, run, ledger, tasks, "grpo", step, 0.0)


def grpo_step(config: Config, run: Run, policy: Policy, learner: Learner, step: int, clock: Clock) -> dict:
    """One step, phase by phase; returns the row of the log."""
    with clock("sample"):
        episodes = run.read_episodes(step)  # finished before a kill: only the update is done again
        if episodes is None:
            episodes = sample_groups(config, policy, step)
            check_errors(episodes)  # before they are kept: once the grader is mended, they are made again
            run.write_episodes(step, episodes)
    kept = accepted(config, episodes)
    batches = split(kept, config, step)
    gains = [advantages_of(batch, config) for batch in batches]
    with clock("handover"):
        policy.upload()
    with clock("old_logprobs"):  # all of them before the first optimizer step
        old = old_logprobs(config, learner, batches, gains)
    with clock("update"):
        stats = [learner.grpo_step(*parts, first=i == 0)
                 for i, parts in enumerate(zip(batches, gains, old, strict=True))]
    with clock("handover"):
        policy.release()
    with clock("sync"):
        policy.sampler.load(step)
    live = [[batch[i] for i in learner.live(batch, gain)] for batch, gain in zip(batches, gains, strict=True)]
    row = {"stage": "grpo", "step": step, **report.summarize(episodes), "learner": stats,
           "stale": sum(episode.version != step - 1 for episode in episodes),  # sampled by an older policy
           "sampled": sum(e.sampled for e in episodes), "trained": sum(e.sampled for part in live for e in part),
           "flops": flops(policy.model.config, episodes, live, config.old_logprobs), **policy.traffic()}
    if config.dynamic_sampling:
        row["kept"] = dict(sorted(Counter(group[0].task.level or "none" for group in kept).items()))  # of row["levels"]
    return row | clock.figures()


def sample_groups(config: Config, policy: Policy, step: int) -> list[Episode]:
    """The step's episodes, group after group in the order in which their tasks were drawn.

    Dynamic sampling goes on, round by round, until enough groups are mixed or max_drawn tasks are used up. Which tasks
    may be drawn depends on (seed, step) alone: each step has its own max_drawn, and passes over those it does not need.
    """
    tasks = training_tasks(config, step - 1, config.max_drawn if config.dynamic_sampling else config.tasks_per_step)
    episodes, drawn, more = [], 0, config.tasks_per_step
    while more:
        with tqdm(total=more * config.samples, desc="episodes", leave=False) as bar:
            episodes += policy.play(tasks[:drawn + more], config.samples, (config.seed, "grpo", step),
                                    progress=lambda e, bar=bar: bar.update(), first=drawn)
        drawn += more
        found = len(accepted(config, episodes))  # by whose share the next round is as large as it will have to be
        more = math.ceil((config.tasks_per_step - found) * drawn / max(found, 1))
        more = min(more, config.tasks_per_step, len(tasks) - drawn)
    return episodes


def accepted(config: Config, episodes: list[Episode]) -> list[list[Episode]]:
    """The groups to learn from: all; with dynamic sampling the first tasks_per_step mixed ones in the order drawn."""
    groups = [episodes[i:i + config.samples] for i in range(0, len(episodes), config.samples)]
    if config.dynamic_sampling:
        groups = [group for group in groups if len({episode.reward for episode in group}) > 1]
    return groups[:config.tasks_per_step]


def old_logprobs(config: Config, learner: Learner, batches: list[list[Episode]], gains: list[list[float]]) -> list:
    """What the ratios of each optimizer batch are taken to, by the setting of this name.

    "all": the trainer's log-probs. "second": not of the first batch, which sees the very policy that they would be of.
    "sampler": the sampler's own; the ratio itself then corrects for its numerics, inside the clip, and importance
    weights are 1.
    """
    if config.old_logprobs == "sampler":
        return [sampler_logprobs(batch) for batch in batches]
    skip = int(config.old_logprobs == "second")
    return [None] * skip + [learner.old_logprobs(*pair) for pair in list(zip(batches, gains, strict=True))[skip:]]


def split(groups: list[list[Episode]], config: Config, step: int) -> list[list[Episode]]:
    """The episodes of the step's groups, shuffled and dealt into the optimizer batches; a group stays whole."""
    order = np.random.default_rng((config.seed, step)).permutation(len(groups))
    return [[episode for i in part for episode in groups[i]] for part in np.array_split(order, config.optimizer_steps)]


def advantages_of(batch: list[Episode], config: Config) -> list[float]:
    """Each episode's advantage within its own group."""
    rewards = [episode.reward for episode in batch]
    return [float(a) for i in range(0, len(batch), config.samples)
            for a in advantages(rewards[i:i + config.samples], config.advantage_std)]


def check_errors(episodes: list[Episode]) -> None:
    """Stop a run whose tools or grader fail on more than one episode in twenty: its rewards would mean nothing."""
    failed = [episode for episode in episodes if episode.ending == "error"]
    if len(failed) > 0.05 * len(episodes):
        raise EnvFault(f"the task world failed on {len(failed)} of {len(episodes)} episodes, first on task "
                       f"{failed[0].task.id}: {failed[0].messages[-1]['content']}; once it is mended, the same command "
                       "goes on from here")


# ------------------------------------------------------------------------------------------------------------ both


def begin(config: Config, policy: Policy, optimizer: AdamW | Chain, last: Checkpoint | None) -> Learner:
    """The learner of a stage, with the optimizer's state of its last checkpoint."""
    if last:
        optimizer.load(last.tensors("optimizer"))
    return Learner(policy.model, policy.trained(), optimizer, config, config.device, policy.chat.size)


def save(run: Run, policy: Policy, learner: Learner, stage: str, step: int, state: dict) -> None:
    """A checkpoint: what has been learnt, and all that the stage needs to go on to the bit."""
    def fill(folder: Path) -> None:
        if policy.adapter:  # in PEFT's format
            save_adapter(policy.adapter, folder, policy.base)
        else:  # a model folder with weights, config.json and tokenizer
            save_folder(policy.model, folder)
            policy.chat.save(folder)

    run.save(stage, step, {"optimizer": learner.optimizer.tensors()}, state, fill)


def evaluate(policy: Policy, run: Run, ledger: Ledger, tasks: list, stage: str, step: int, temperature: float
             ) -> float:
    """Held-out success of the weights after `step`, one episode a task, unless it is in the log already.

    Training does not notice: no weight changes, and an episode's random numbers are its own.
    """
    asked = {"stage": "eval", "of": stage, "step": step, "temperature": temperature}
    row = measured(run, **asked)
    if row is None:
        began = time.monotonic()
        if policy.sampler.version != step:  # imitation does not hand over each step's weights
            policy.sampler.load(step)
        with tqdm(total=len(tasks), desc="held-out", leave=False) as bar:
            episodes = policy.play(tasks, 1, ("eval",), temperature, progress=lambda episode: bar.update())
        check_errors(episodes)  # before they are counted
        row = asked | report.summarize(episodes) | policy.traffic() | {"time": {"seconds": time.monotonic() - began}}
        run.log(row)
        ledger.enter({}, {"evaluate": row["time"]["seconds"]})
        tqdm.write(report.eval_line(row))
    return row["success"]


def measured(run: Run, **asked) -> dict | None:
    """The row of the log that evaluate wrote, if it did."""
    return next((row for row in run.rows("eval") if asked.items() <= row.items()), None)


def stop(*_) -> None:
    """SIGTERM, a spot machine's warning: end as by Ctrl-C, and in 20 s at the latest. What has its name on the disk is
    whole."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(20)  # nothing handles it, so it ends the process even in the middle of a kernel
    raise KeyboardInterrupt


@contextmanager
def held_back(came: list[bool]) -> Iterator[None]:
    """SIGTERM and the first Ctrl-C do not interrupt what is done inside, but are entered in `came`: who asked for this
    ends soon."""
    def enter(number: int, _) -> None:
        came.append(True)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if dist.rank() == 0:  # not by print, which may be interrupted in the middle of its own work
                os.write(2, b"\nCtrl-C: ends after this step, which is kept; once more ends at once\n")
            return
        with suppress(KeyboardInterrupt):
            stop()

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:  # as a shell has it for what runs in the background
                signal.signal(number, enter)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
