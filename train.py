"""Train a planner: imitate the scripted expert (where the config says so), then improve by GRPO on exact rewards.

    python train.py                          the small run of configs/tiny.py, on a laptop's CPU
    python train.py --config l8.py           the main run, on one H100
    python train.py --config l8.py --dry-run     all of its code in small, on any machine, and what the run takes
    torchrun --nproc-per-node 4 train.py --config l8.py      on four of them, which share each step's work
    python train.py --steps=40 --lr=2e-5     any setting of rl/config.py can be changed by --key=value

Stop it at any time, even with kill -9: the same command goes on where it was. A run is written to runs/NAME; data/
keeps the demonstrations and tasks that were made, and may be deleted: what is needed is made again.
"""
import math
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while all this is imported: no traceback

import numpy as np
import torch
from tqdm import tqdm

from model.checkpoint import save_adapter, save_folder
from model.optim import AdamW, Chain, Muon
from rl import cli, dist, report
from rl.chat import open_chat
from rl.config import Config, ConfigError, load_config, replace
from rl.dryrun import dry_run
from rl.env import EnvFault
from rl.episode import Episode
from rl.grpo import advantages
from rl.learner import Learner, sampler_logprobs
from rl.ledger import Ledger, against_plan, flops
from rl.lessons import file_digest, lessons, sft_batch
from rl.plan import show_plan
from rl.policy import Policy, check_machine, check_prompts, resume_policy
from rl.probe import prove
from rl.run import Checkpoint, Run, latest_checkpoint, run_folder
from rl.tasks import TaskStream, held_out


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser("train.py", __doc__)
    parser.add_argument("--config", default="tiny.py", help="a Python file, or the name of one in configs/")
    parser.add_argument("--new", action="store_true", help="begin a new run beside the finished or unfinished one")
    parser.add_argument("--force", action="store_true", help="go on with a run although its settings have changed")
    parser.add_argument("--plan", action="store_true", help="print the memory that a step takes on a card, and end")
    parser.add_argument("--dry-run", action="store_true", help="go the whole way in small, print the plan, and end")
    args, overrides = parser.parse_known_args(argv)
    if stray := [item for item in overrides if not item.startswith("--")]:
        parser.error(f"unexpected {stray[0]!r}: settings are written --KEY=VALUE")
    signal.signal(signal.SIGTERM, stop)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def work() -> None:
        config = load_config(args.config, overrides)
        if args.dry_run:
            dry_run(config, train)
        elif args.plan:
            dist.start("cpu")  # with torchrun: a plan for all ranks, printed once
            show_plan(config)
            dist.stop()
        else:
            train(config, args.new, args.force)
            dist.stop()

    return cli.run_script("train.py", work)


def stop(*_) -> None:
    """A spot machine's warning: end as by Ctrl-C, and in 20 s at the latest. What has its name on the disk is whole."""
    set_alarm()
    raise KeyboardInterrupt


def set_alarm() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(20)  # nothing handles it, so it ends the process even in the middle of a kernel


@contextmanager
def held_back(came: list[int]) -> Iterator[None]:
    """SIGTERM does not interrupt what is done inside, but is entered in `came`: who asked for this ends soon."""
    def enter(number: int, _) -> None:
        set_alarm()
        came.append(number)

    before = signal.signal(signal.SIGTERM, enter)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def train(config: Config, new: bool = False, force: bool = False) -> None:
    """Go through the stages of `config` in its run folder, from wherever the last process left it."""
    dist.start(config.device)
    if dist.ranks() > 1 and config.sampler == "vllm" and config.model and config.sft_file and config.steps:
        raise ConfigError("sft_file: vLLM's engine cannot be ended for a second one beside other ranks; with several "
                          "GPUs imitate with steps = 0, then start a run with `adapter` from that one's folder")
    begun = latest_checkpoint(run_folder(config, new=new)) is not None  # then its checkpoints have what it began with
    model = check_machine(replace(config, adapter="") if begun else config, config.model)
    if not begun:
        first = TaskStream(config.mix, config.split, config.seed, config.env).batch(0, config.tasks_per_step)
        tasks = held_out(config.eval_mix, config.env) + first * bool(config.steps)
        check_prompts(config, open_chat(config, model), tasks)
    run = dist.shared(Run, lambda: Run.open(config, new=new, force=force))  # a mistake so far leaves no folder
    folder = run.folder  # asked for here: ranks that are interrupted do so at different places
    try:
        if run.finished:
            print(f"{folder} is finished: curves in {folder}/curves.png; give --new for another run")
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


# ------------------------------------------------------------------------------------------------------- imitation


def imitate(config: Config, run: Run, ledger: Ledger) -> None:
    """The supervised stage: all weights of a random model, or an adapter over config.model, learn conversations."""
    last, asked = run.latest("sft"), [config.sft_steps, config.sft_epochs]
    over = last is not None and last.state["stopped"] and not any(  # --force may ask for more than it was ended with
        now > then for now, then in zip(asked, last.state["asked"], strict=True))
    if run.latest("grpo"):
        if not over:
            print(f"{run.folder}: imitates no further, as GRPO has begun; for more of it give --new")
        return
    if over and all(measured(run, "sft", last.step, t) for t in (config.temperature, 0.0)):
        return
    tasks = held_out(config.eval_mix, config.env)
    digest = file_digest(config.sft_file, last)
    policy = resume_policy(config if config.model else replace(config, sampler="torch"), None, last,
                           adapter=bool(config.model))
    run.rewind("sft", last.step if last else 0)
    state = {"data": digest, "asked": asked}
    step = last.step if over else learn(config, policy, run, ledger, tasks, last, state)
    for temperature in (config.temperature, 0.0):
        measure_sft(policy, run, ledger, tasks, step, temperature)
    if config.steps:  # and otherwise not: vLLM would take the ranks' group with it
        policy.close()


def learn(config: Config, policy: Policy, run: Run, ledger: Ledger, tasks: list, last: Checkpoint | None, state: dict
          ) -> int:
    """The supervised steps after the checkpoint `last`; returns the last one's number. `state` goes with each
    checkpoint."""
    optimizer = sft_optimizer(config, policy)
    learner = Learner(policy.model, trained(policy), optimizer, config, config.device, policy.chat.size)
    step = last.step if last else 0
    if last:
        optimizer.load(last.tensors("optimizer"))

    def done() -> bool:
        return due(config, step) and enough(
            config, run, measure_sft(policy, run, ledger, tasks, step, config.temperature))

    data, kept_back = lessons(config, policy, tasks)
    total = config.sft_steps or max(1, config.sft_epochs * len(data) // config.sft_batch)
    policy.sampler.release()  # the trainer has the device first
    saved, came = time.monotonic(), []
    stopped = last is not None and not last.state["stopped"] and done()  # a measurement that an interruption has cost
    with tqdm(total=total, initial=step, desc="imitation", unit="step") as bar:
        while not stopped and step < total:
            with held_back(came):
                row = sft_step(config, policy, learner, kept_back, sft_batch(config, data, step), step + 1, total)
                step += 1
                run.log(row)
                ledger.enter({"trained": row["tokens"]}, {"imitation": row["time"]["seconds"]}, write=False)
                bar.set_postfix(loss=f"{row['loss']:.3f}", refresh=False)
                bar.update()
                ends, waited = dist.on_first(lambda then=saved: (bool(came), time.monotonic() - then))
                if ends or step == total or due(config, step) or waited > config.checkpoint_seconds:
                    run.save("sft", step, {"optimizer": optimizer.tensors()}, state | {"stopped": False},
                             lambda folder: save_model(policy, folder))
                    ledger.enter({}, {})
                    saved = time.monotonic()
            if dist.on_first(lambda: bool(came)):
                raise KeyboardInterrupt
            stopped = step < total and done()
    run.amend("sft", stopped=True)
    return step


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


def measure_sft(policy: Policy, run: Run, ledger: Ledger, tasks: list, step: int, temperature: float) -> float:
    """Held-out success of the weights as they are after `step`."""
    if policy.sampler.version != step:
        policy.sampler.load(step)
    return evaluate(policy, run, ledger, tasks, "sft", step, temperature)


def enough(config: Config, run: Run, success: float) -> bool:
    """Whether to stop early: held-out success is reached, or the held-out loss has not fallen for too long."""
    losses = [row["held_out_loss"] for row in run.rows("sft") if "held_out_loss" in row]
    patience = config.sft_patience
    return success >= config.sft_stop or bool(patience) and len(losses) > patience + losses.index(min(losses))


def trained(policy: Policy) -> list[torch.Tensor]:
    return policy.adapter.parameters() if policy.adapter else list(policy.model.parameters())


def save_model(policy: Policy, folder: Path) -> None:
    """What has been learnt: an adapter in PEFT's format, or a model folder with weights, config.json and tokenizer."""
    if policy.adapter:
        save_adapter(policy.adapter, folder, policy.base)
        return
    save_folder(policy.model, folder)
    policy.chat.save(folder)


def sft_optimizer(config: Config, policy: Policy) -> AdamW | Chain:
    """AdamW; or Muon for the matrices inside the layers and AdamW for embeddings, head and vectors."""
    def adamw(params):
        return AdamW(params, config.sft_lr, config.betas, weight_decay=0.0)

    if config.sft_optimizer == "adamw":
        return adamw(trained(policy))
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
    base, last = run.latest("sft"), run.latest("grpo")
    policy = resume_policy(config, base, last, adapter=True)
    optimizer = AdamW(policy.adapter.parameters(), config.lr, config.betas, weight_decay=config.weight_decay)
    learner = Learner(policy.model, policy.adapter.parameters(), optimizer, config, config.device, policy.chat.size)
    step = begun = last.step if last else 0
    if last:
        optimizer.load(last.tensors("optimizer"))
    run.rewind("grpo", step)
    stream, tasks = TaskStream(config.mix, config.split, config.seed, config.env), held_out(config.eval_mix, config.env)
    saving: dict[str, float] = {}
    with tqdm(total=config.steps, initial=step, desc="grpo", unit="step") as bar:
        while True:
            if config.sampler == "vllm" and config.probe_every and (step == begun or step % config.probe_every == 0):
                prove(policy, tqdm.write)
            if (config.eval_every and step % config.eval_every == 0) or step >= config.steps:
                evaluate(policy, run, ledger, tasks, "grpo", step, config.temperature)
            if step >= config.steps:  # more: --force has set fewer steps than were done
                break
            step += 1
            row = grpo_step(config, run, policy, learner, stream, step)
            row["time"] |= saving  # of the checkpoint before
            run.log(row)  # before the checkpoint: a resumed run drops rows that are ahead of its last checkpoint
            with (clock := Clock())("checkpoint"):
                run.save("grpo", step, {"optimizer": optimizer.tensors()}, {},
                         lambda folder: save_adapter(policy.adapter, folder, policy.base))
            saving, row["time"] = clock.seconds, row["time"] | clock.seconds
            bar.write(f"{step_line(row)}\n{ledger.step(row)}")
            if "memory" in row and step == begun + 1:
                bar.write(against_plan(config, policy.model.config, row["memory"]))
            warn_of_mismatch(config, row, bar.write)
            bar.update()
    evaluate(policy, run, ledger, tasks, "grpo", step, 0.0)


def grpo_step(config: Config, run: Run, policy: Policy, learner: Learner, stream: TaskStream, step: int) -> dict:
    """One step, phase by phase; returns the row of the log."""
    clock = Clock()
    with clock("sample"):
        episodes = run.read_episodes(step)  # finished before a kill: only the update is done again
        if episodes is None:
            episodes = sample_groups(config, policy, stream, step)
            check_errors(episodes)  # before they are kept: once the grader is mended, they are made again
            run.write_episodes(step, episodes)
    kept = accepted(config, episodes)
    batches = [[e for group in part for e in group] for part in split(kept, config, step)]
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


def sample_groups(config: Config, policy: Policy, stream: TaskStream, step: int) -> list[Episode]:
    """The step's episodes, group after group in the order in which their tasks were drawn. Which tasks may be drawn
    depends on (seed, step) alone: dynamic sampling has max_drawn for each step, and passes over those it does not need.
    """
    tasks = stream.batch(step - 1, config.max_drawn if config.dynamic_sampling else config.tasks_per_step)
    episodes, drawn, more = [], 0, config.tasks_per_step
    while more:
        with tqdm(total=more * config.samples, desc="episodes", leave=False) as bar:
            episodes += policy.play(tasks[:drawn + more], config.samples, (config.seed, "grpo", step),
                                    progress=lambda e, bar=bar: bar.update(), first=drawn)
        drawn += more
        more = how_many_more(config, len(accepted(config, episodes)), drawn)
    return episodes


def how_many_more(config: Config, mixed: int, drawn: int) -> int:
    """Tasks of the next round of dynamic sampling, by the share of mixed groups so far; 0 ends it."""
    missing = config.tasks_per_step - mixed
    if not config.dynamic_sampling or not missing:
        return 0
    return min(math.ceil(missing * drawn / max(mixed, 1)), config.tasks_per_step, config.max_drawn - drawn)


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


def split(groups: list[list[Episode]], config: Config, step: int) -> list[list[list[Episode]]]:
    """The step's groups, shuffled and dealt into the optimizer batches; a group stays whole."""
    order = np.random.default_rng((config.seed, step)).permutation(len(groups))
    return [[groups[i] for i in part] for part in np.array_split(order, config.optimizer_steps)]


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


def evaluate(policy: Policy, run: Run, ledger: Ledger, tasks: list, stage: str, step: int, temperature: float
             ) -> float:
    """Held-out success, one episode a task, unless it is in the log already.

    Training does not notice: no weight changes, and an episode's random numbers are its own.
    """
    row = measured(run, stage, step, temperature)
    if row is None:
        began, row = time.monotonic(), {"stage": "eval", "of": stage, "step": step, "temperature": temperature}
        with tqdm(total=len(tasks), desc="held-out", leave=False) as bar:
            episodes = policy.play(tasks, 1, ("eval",), temperature, progress=lambda episode: bar.update())
        check_errors(episodes)  # before they are counted
        row |= report.summarize(episodes) | policy.traffic() | {"time": {"seconds": time.monotonic() - began}}
        run.log(row)
        ledger.enter({}, {"evaluate": row["time"]["seconds"]})
        tqdm.write(eval_line(row))
    return row["success"]


def measured(run: Run, stage: str, step: int, temperature: float) -> dict | None:
    """The row of the log that evaluate wrote, if it did."""
    asked = {"of": stage, "step": step, "temperature": temperature}
    return next((row for row in run.rows("eval") if asked.items() <= row.items()), None)


def warn_of_mismatch(config: Config, row: dict, say) -> None:
    """Say so if sampler and trainer are not the same policy within the bound that is set."""
    worst = max((stats.get("mismatch_mean", 0.0) for stats in row["learner"]), default=0.0)
    if not worst <= config.mismatch_bound:
        say(f"warning: log-probs of sampler and trainer differ by {worst:.3g} on average, more than mismatch_bound "
            f"({config.mismatch_bound:g}); the gradient is corrected for up to importance_cap only")


def step_line(row: dict) -> str:
    """A GRPO step in one line."""
    def mean(key: str, form: str = ".3f") -> str:
        values = [stats[key] for stats in row["learner"] if key in stats]
        return format(sum(values) / len(values), form) if values else "-"

    levels = " ".join(f"{level} {figures['success']:.2f}" for level, figures in row["levels"].items())
    endings = " ".join(f"{name} {count}" for name, count in row["endings"].items())
    seconds = " ".join(f"{phase} {value:.1f}s" for phase, value in row["time"].items())
    kept = f"{sum(row['kept'].values())} of {row['tasks']} groups kept  " if "kept" in row else ""
    update = (f"entropy {mean('entropy')}  clipped {mean('clip_low')}/{mean('clip_high')}  "
              f"mismatch {mean('mismatch_mean', '.1e')}") if mean("entropy") != "-" else "no mixed group, no update"
    return (f"step {row['step']:3d}  reward {row['reward']:.3f} ({levels})  {kept}"
            f"{row['tokens']:.0f} tokens {row['turns']:.1f} turns ({endings})  {update}  {seconds}")


def eval_line(row: dict) -> str:
    manner = "greedy" if row["temperature"] == 0 else f"temperature {row['temperature']:g}"
    low, high = row["interval"]
    return (f"held-out after {row['of']} step {row['step']}, {manner}: {row['success']:.3f} of {row['tasks']} tasks "
            f"(95% interval {low:.2f}-{high:.2f})")


class Clock:
    """Seconds spent in named phases, and on a GPU the most bytes that were allocated in each."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            self.peaks[phase] = max(self.peaks.get(phase, 0), torch.cuda.max_memory_allocated())
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began

    def figures(self) -> dict[str, dict]:
        """For a row of the log: the seconds as a mean over the ranks, so that they add up to the step's; the most bytes
        of any rank."""
        ranks = dist.gather([(self.seconds, self.peaks)])
        seconds = {phase: sum(times[phase] for times, _ in ranks) / len(ranks) for phase in self.seconds}
        peaks = {phase: max(most[phase] for _, most in ranks) for phase in self.peaks}
        return {"time": seconds} | ({"memory": peaks} if peaks else {})


if __name__ == "__main__":
    sys.exit(main())
