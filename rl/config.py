"""Settings of a run: one frozen dataclass, filled in by a file in configs/ and by --key=value on the command line.

Nothing else in the project holds a default of its own: what the run folder's config.json says is what was used.
"""
import ast
import dataclasses
import difflib
import json
import re
import runpy
import typing
from dataclasses import dataclass
from pathlib import Path

from model.lora import TARGETS, check_targets
from rl.env import STL, EnvError, open_env
from rl.grpo import AGGREGATIONS, STD

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


class ConfigError(ValueError):
    """A setting that cannot be: the message names it, what is wrong and what would be right."""


@dataclass(frozen=True)
class Config:
    name: str = "run"  # names the run folder: runs/NAME
    about: str = ""  # what the run does and how long it takes, said at its start
    seed: int = 0

    # The policy
    model: str = ""  # folder, or name on the Hugging Face hub; "" = a random model of this `architecture`
    adapter: str = ""  # where the LoRA starts: a folder in PEFT's format, or a run folder's newest; "": from nothing
    architecture: dict | None = None  # config.json of the random model, without vocab_size
    chat: str = "qwen"  # "qwen" (the model's own template) or "compact" (the small vocabulary)
    thinking: bool = False
    tools: bool = True
    tool_manner: str = "strict"  # "friendly" accepts walls in plan_path's `avoid`
    dtype: str = "bfloat16"  # of the frozen weights and of the compute
    device: str = "cuda"
    threads: int = 0  # of torch on the CPU; 0 leaves torch's own choice
    lora_rank: int = 64
    lora_alpha: float = 32.0
    lora_targets: tuple[str, ...] = TARGETS

    # The tasks: how many of each level are in the training mix and in the held-out set
    env: str = STL  # the task world: import path of a module with the names of rl/env.py
    mix: dict | None = None
    split: str = "rl"
    eval_mix: dict | None = None

    # One episode
    max_turns: int = 40
    max_tokens: int = 32768  # prompt, turns and tool answers together
    max_turn_tokens: int = 8192
    max_turn_calls: int = 8  # further calls of one turn are answered with a word, not run
    tool_workers: int = 0  # processes for tools, beside which the sampler goes on; 0: in this one
    tool_seconds: float = 10.0  # a call in such a process may take; then the answer says so

    # Supervised steps before RL. They imitate the scripted expert, or the conversations in `sft_file`. All weights of a
    # random model learn; over a pretrained one an adapter does.
    sft_steps: int = 0  # 0: none; with `sft_file`: sft_epochs decides
    sft_file: str = ""  # made by sample.py --collect
    sft_epochs: int = 2
    sft_held_out: int = 0  # conversations kept back to measure the loss on
    sft_patience: int = 0  # measurements without a lower held-out loss that end the stage; 0: none do
    sft_batch: int = 16  # conversations
    sft_optimizer: str = "adamw"  # "muon" takes hidden matrices with Muon, the rest with AdamW
    sft_lr: float = 1e-4
    sft_muon_lr: float = 0.02
    sft_warmup: int = 30  # steps
    sft_decay: float = 0.4  # the last share of sft_steps in which the rate falls linearly to zero
    sft_noise: float = 0.0  # the expert forgets each leg's wait, and a task's regions to avoid, with this probability
    sft_tasks: int = 0  # demonstrations made; batches go round them in a seeded shuffle
    sft_eval_every: int = 0  # steps between held-out measurements (0: only at the end)
    sft_eval_from: int = 0  # the first step that may be measured
    sft_stop: float = 1.0  # end the stage once held-out success at temperature 1 reaches this

    # A teacher behind an OpenAI-compatible API (sample.py --collect, eval.py); its key is in OPENAI_API_KEY
    teacher_model: str = ""  # as the server names it
    teacher_url: str = ""  # such as https://api.deepseek.com; "": OpenAI's own, or what OPENAI_BASE_URL says
    teacher_extra: dict | None = None  # more fields of each request, such as what turns thinking off; None removes one
    teacher_requests: int = 32  # at one time
    teacher_seconds: float = 600.0  # for an answer, after which it is asked for again
    teacher_retries: int = 8  # of a request, for overload, faults and cut connections
    teacher_pause: float = 1.0  # seconds before the first of them; it doubles, up to a minute
    teacher_prices: tuple[float, float, float] = (0.0, 0.0, 0.0)  # $ a million tokens: uncached, cached input, output
    teacher_max_cost: float = 0.0  # $ for one file of conversations, then no more requests are sent; 0: no limit
    teacher_max_tokens: int = 0  # the same in tokens of all kinds

    # GRPO (0 steps: none)
    steps: int = 80
    tasks_per_step: int = 32
    samples: int = 8  # per task: one group
    optimizer_steps: int = 2  # a step's groups are split into so many optimizer batches
    dynamic_sampling: bool = False  # draw tasks until tasks_per_step groups are mixed; the others are not learnt from
    max_drawn: int = 96  # tasks that a step of dynamic sampling draws at most
    old_logprobs: str = "all"  # "second": not of the first optimizer batch (its ratio is 1); "sampler": its own
    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 3.0
    importance_cap: float | None = 2.0  # None: no correction for the sampler's numerics
    advantage_std: str = "group"  # "none": reward minus the group's mean, undivided
    loss_aggregation: str = "token"  # "sequence", "constant" (divides by max_tokens)
    mask_truncated: bool = False
    temperature: float = 1.0  # of training and evaluation
    micro_tokens: int = 32768  # tokens of one micro-batch; a longer episode runs alone
    head_chunk: int = 2048  # tokens whose logits exist at one time

    # Measuring and keeping
    eval_every: int = 10  # steps; 0: only at the end of each stage
    peak_tflops: float = 0.0  # of one card, dense, in `dtype`: step lines then say what share of it was used
    price_per_hour: float = 0.0  # $, of the machine: the run then says what it has cost
    sampler: str = "torch"
    sampler_slots: int = 256  # episodes sampled at one time
    mismatch_bound: float = 0.05  # nats between sampler and trainer, mean over a step's tokens; beyond it: a warning

    # Sampling with vLLM (docs/vllm.md): defaults for the 9B on one H100
    sync: str = "adapter"  # vLLM computes the low-rank terms; "merged": it gets all weights with the adapter added in
    merge_rounding: str = "nearest"  # of merged weights to bfloat16; "stochastic" is unbiased, but further off
    gpu_memory: float = 0.85  # share of the GPU while it samples: weights, caches and work space
    engine_tokens: int = 16384  # read in one step of the engine
    prefix_caching: bool = True  # a turn's text is not read again for the next one, but for the rest of a block
    enforce_eager: bool = False  # no CUDA graphs: starts sooner, samples slower
    sleep_level: int = 0  # while the trainer has the GPU: 0 gives the caches back, 1 the weights too (to CPU memory)
    engine_seconds: float = 1800.0  # without a finished turn, after which the engine counts as hung
    probe_every: int = 10  # steps between proofs that new weights arrive, each kind of layer for itself; 0: none
    probe_tolerance: float = 0.1  # nats of mean difference that the proof takes for rounding
    probe_failure: str = "stop"  # "merged": build the engine anew with sync "merged", and go on if that is proven

    keep_checkpoints: int = 3
    checkpoint_seconds: float = 30.0  # between checkpoints of the supervised stage

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = coerce(field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            if isinstance(value, int | float):
                check_number(field.name, value)
        if not re.fullmatch(r"[\w.-]{1,100}", self.name) or self.name.startswith("."):
            raise ConfigError(f"name = {self.name!r}: letters, digits, '-', '_' and '.' make a folder's name")
        for field, allowed in CHOICES.items():
            if getattr(self, field) not in allowed:
                raise ConfigError(f"{field} = {getattr(self, field)!r}: choose one of {', '.join(map(str, allowed))}")
        try:
            levels = open_env(self.env).LEVELS
        except EnvError as error:
            raise ConfigError(str(error)) from None
        for field in ("mix", "eval_mix"):
            check_mix(field, getattr(self, field), levels)
        if self.split in ("", "eval"):
            raise ConfigError(f"split = {self.split!r}: any other name, such as 'rl'; the tasks of 'eval' are held out")
        if len(self.teacher_prices) != 3 or not all(price >= 0 for price in self.teacher_prices):
            raise ConfigError(f"teacher_prices = {self.teacher_prices!r}: give three, for uncached input, cached input "
                              "and output")
        if self.dual_clip is not None and self.dual_clip < 1:
            raise ConfigError(f"dual_clip = {self.dual_clip:g}: must be at least 1, or None for no such clip")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas = {self.betas!r}: give two, each at least 0 and below 1")
        try:
            check_targets(self.lora_targets)
        except ValueError as error:
            raise ConfigError(f"lora_targets: {error}") from None
        self._check_stages()
        if self.sampler == "vllm":
            self._check_vllm()

    @property
    def imitates(self) -> bool:
        """Whether there is a supervised stage."""
        return bool(self.sft_steps or self.sft_file)

    def _check_stages(self) -> None:
        """Raise ConfigError for settings that do not go together."""
        if not self.model and self.architecture is None:
            raise ConfigError("model = '': give a folder with weights, or `architecture` for a random model")
        if self.sft_steps and not self.sft_tasks and not self.sft_file:
            raise ConfigError("sft_tasks = 0: the supervised stage needs demonstrations, or set sft_steps = 0")
        if self.sft_file and self.env != STL:
            raise ConfigError(f"sft_file = {self.sft_file!r}: conversations are collected in the STL world only")
        if self.sft_patience and not (self.sft_file and self.sft_held_out and self.sft_eval_every):
            raise ConfigError("sft_patience: goes by the loss on what is held out of sft_file, so give sft_file, "
                              "sft_held_out and sft_eval_every too")
        if self.imitates and self.model and self.sft_optimizer == "muon":
            raise ConfigError("sft_optimizer = 'muon': is for all weights of a random model; an adapter takes 'adamw'")
        if self.imitates and not self.model and self.dtype != "float32":
            raise ConfigError(f"dtype = {self.dtype!r}: all weights of a random model are trained in 'float32'")
        if self.steps and self.samples < 2:
            raise ConfigError("samples = 1: GRPO compares a task's samples with each other, so at least 2")
        if self.steps and self.tasks_per_step < self.optimizer_steps:
            raise ConfigError(f"optimizer_steps = {self.optimizer_steps}: groups stay whole, so at most tasks_per_step "
                              f"({self.tasks_per_step})")
        if self.dynamic_sampling and self.max_drawn < self.tasks_per_step:
            raise ConfigError(f"max_drawn = {self.max_drawn}: at least tasks_per_step ({self.tasks_per_step})")

    def _check_vllm(self) -> None:
        """Raise ConfigError for what vLLM cannot do, or would do wrongly without a word."""
        if not self.model and not self.imitates:
            raise ConfigError("model = '': sampler = 'vllm' reads its weights from a folder; give one")
        if self.sync == "merged" and self.sleep_level != 1:
            raise ConfigError(f"sleep_level = {self.sleep_level}: sync = 'merged' is sound with 1 only")
        if self.sync == "merged" and self.merge_rounding == "stochastic" and self.dtype != "bfloat16":
            raise ConfigError(f"merge_rounding = 'stochastic': is for dtype = 'bfloat16'; for {self.dtype}: 'nearest'")
        if self.lora_rank > 512:
            raise ConfigError(f"lora_rank = {self.lora_rank}: vLLM's adapters have a rank of at most 512")


CHOICES = {
    "chat": ("qwen", "compact"), "tool_manner": ("strict", "friendly"), "dtype": ("float32", "bfloat16"),
    "device": ("cpu", "cuda"), "sft_optimizer": ("adamw", "muon"), "advantage_std": STD,
    "old_logprobs": ("all", "second", "sampler"), "loss_aggregation": AGGREGATIONS,
    "sampler": ("torch", "vllm", "script"),
    "sync": ("adapter", "merged"), "merge_rounding": ("stochastic", "nearest"), "probe_failure": ("stop", "merged"),
    "sleep_level": (0, 1),
}
POSITIVE = {  # numbers above 0; of all others but SHARES 0 has a meaning, too
    "lora_rank", "lora_alpha", "max_turns", "max_tokens", "max_turn_tokens", "max_turn_calls", "tool_seconds",
    "sft_epochs", "sft_batch", "teacher_requests", "teacher_seconds", "tasks_per_step", "samples", "optimizer_steps",
    "max_drawn", "grad_clip", "dual_clip", "importance_cap", "temperature", "micro_tokens", "head_chunk",
    "sampler_slots", "gpu_memory", "engine_tokens", "engine_seconds", "probe_tolerance", "keep_checkpoints",
}
SHARES = {"sft_lr", "sft_muon_lr", "sft_decay", "sft_noise", "sft_stop", "lr", "weight_decay", "clip_low", "gpu_memory"}

MOST = {"threads": 1024, "tool_workers": 256, "sampler_slots": 10**5}  # more would ask too much of the machine


def check_number(name: str, value: float) -> None:
    """Raise ConfigError for a number that this setting cannot be."""
    positive, high = name in POSITIVE, 1 if name in SHARES else MOST.get(name, 2**62 - 1)
    if not 0 <= value <= high or positive and value == 0:
        most = f" and at most {high}" if high < 2**62 - 1 else " and below 2**62" * (value > 0)  # infinity, too
        raise ConfigError(f"{name} = {str(value)[:40]}: must be {'above' if positive else 'at least'} 0{most}")


def check_mix(field: str, mix: dict | None, levels: tuple[str, ...]) -> None:
    """Raise ConfigError unless `mix` is a dict of known levels and positive counts."""
    if not mix:
        raise ConfigError(f"{field} = {mix!r}: say how many tasks of which level, e.g. {{{levels[0]!r}: 512}}")
    for level, count in mix.items():
        if level not in levels:
            raise ConfigError(f"{field}: unknown level {level!r}; the levels are {', '.join(levels)}")
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"{field}: {level} = {count!r}: must be a whole number of tasks, 1 or more")


def nearest(name: str, known) -> str:
    """'; did you mean X?', or the list of what is known, or where it stands if that is long."""
    close, known = difflib.get_close_matches(name, known, n=1), list(known)
    told = f"known: {', '.join(known)}" if len(known) <= 20 else "rl/config.py has them all"
    return f"; did you mean {close[0]}?" if close else f"; {told}"


def read_value(field: dataclasses.Field, text: str):
    """The value that `text` (of --key=value) stands for; its type is checked with all others. Raises ConfigError."""
    if field.type is str:
        return text
    try:
        value = {"true": True, "false": False, "none": None}.get(text.lower(), text)
        return ast.literal_eval(text) if value is text else value
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise ConfigError(f"{field.name} = {text[:40]}: cannot be read as {describe(field)}{example(field)}") from None


def example(field: dataclasses.Field) -> str:
    if isinstance(field.default, tuple):
        return f", such as {field.default}"
    return ", such as {'L1': 100}" if field.name in ("mix", "eval_mix") else ""


def describe(field: dataclasses.Field) -> str:
    return field.type.__name__ if isinstance(field.type, type) else str(field.type)


def coerce(field: dataclasses.Field, value):
    """`value` if it has the field's type (an int may stand for a float, a list for a tuple); else ConfigError."""
    try:
        return typed(field.type, value)
    except (TypeError, OverflowError):  # the latter: an int that no float is near to
        raise ConfigError(f"{field.name} = {value!r:.80}: must be {describe(field)}") from None


def typed(kind, value):
    """`value` as the annotation `kind` has it: a type, tuple[...] of one type, or such with None. Raises TypeError."""
    if typing.get_origin(kind) is tuple:
        return tuple(typed(typing.get_args(kind)[0], item) for item in typed(list | tuple, value))
    if kind in (float, float | None) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or isinstance(value, bool) and kind is not bool:
        raise TypeError
    return value


FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def field_of(key: str) -> dataclasses.Field:
    if key not in FIELDS:
        raise ConfigError(f"unknown setting {key!r}{nearest(key, FIELDS)}")
    return FIELDS[key]


def replace(config: Config, **changes) -> Config:
    """A copy of `config` with some fields changed. Raises ConfigError on an unknown field or a wrong value."""
    return dataclasses.replace(config, **{field_of(key).name: value for key, value in changes.items()})


def load_config(name: str = "tiny.py", overrides: list[str] = ()) -> Config:
    """The `config` of the Python file `name` (a path, or a name in configs/), changed by "key=value" strings.

    Raises ConfigError: no such file, unknown key, a value of the wrong type or out of range.
    """
    path = Path(name)
    if not path.is_file():
        known = sorted(p.name for p in CONFIGS.glob("*.py"))
        path = CONFIGS / (path.name if path.suffix else path.name + ".py")
        if not path.is_file():
            raise ConfigError(f"no config {name!r}{nearest(path.name, known)}")
    if path.suffix != ".py":
        raise ConfigError(f"{path}: settings are a Python file, such as {CONFIGS.name}/tiny.py")
    try:
        config = runpy.run_path(str(path)).get("config")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno}: {error.msg}") from None
    except Exception as error:  # whatever a user's own code can do
        unknown = str(error).rpartition("unexpected keyword argument ")[2].strip("'")
        hint = nearest(unknown, FIELDS) if "unexpected keyword" in str(error) else ""
        raise ConfigError(f"{path}: {type(error).__name__}: {error}{hint}") from None
    if not isinstance(config, Config):
        raise ConfigError(f"{path}: must set `config = Config(...)`")
    changes = {}
    for item in overrides:
        key, equals, text = item.removeprefix("--").partition("=")
        field = field_of(key.replace("-", "_"))
        if not equals:
            raise ConfigError(f"{item}: write --{field.name}=VALUE")
        changes[field.name] = read_value(field, text)
    config = replace(config, **changes)
    if config.sampler == "script":
        raise ConfigError("sampler = 'script': is of the dry run alone; choose one of torch, vllm")
    return config


def to_json(config: Config) -> dict:
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json(data: dict) -> Config:
    """The Config that to_json wrote. Raises ConfigError."""
    try:
        return Config(**{field_of(key).name: value for key, value in data.items()})
    except ConfigError as error:
        raise ConfigError(f"config.json: {error}") from None
