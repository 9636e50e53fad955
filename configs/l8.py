"""The main run: Qwen3.5-9B learns with tools on all levels, half of the tasks L8. One H100 80 GB.

The reference is a technical post, "From Words to Waypoints", which trained the same model with verl in two to three
days, interruptions included; "not said" marks what it leaves open, with the reason for the value here.
`python train.py --config l8.py --plan` prints what fits, and the time that is expected.
"""
from model.lora import TARGETS
from rl.config import Config

config = Config(
    name="l8",
    about="GRPO on Qwen3.5-9B with tools; one H100 80 GB (the post took two to three days)",
    seed=0,  # not said
    # The policy
    model="Qwen/Qwen3.5-9B",  # fetched from the Hugging Face hub, 18 GB; --model=FOLDER where it lies on the disk
    adapter="",  # the LoRA starts from nothing; l8_distilled begins with one that imitation has trained
    architecture={  # the published numbers, for --plan where the folder is absent; else its config.json counts
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 32, "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "tie_word_embeddings": False,
    },
    chat="qwen",  # the model's own template
    thinking=False,  # as in all its main runs: thinking took 1.7 times the tokens and solved fewer tasks
    tools=True,
    tool_manner="strict",  # as there; "friendly", walls in `avoid` forgiven, is its suggestion for later
    dtype="bfloat16",
    device="cuda",
    lora_rank=64,
    lora_alpha=32.0,  # not said; alpha / rank = 1/2 keeps the first steps small at this rate
    lora_targets=TARGETS,  # all linear layers: q, k, v, o alone would reach 8 of the 32 layers
    # The tasks: 5,864 to train on, few of them easy, since groups that always succeed teach nothing; 550 held out
    mix={"L1": 44, "L2": 133, "L3": 888, "L4": 44, "L5": 888, "L6": 44, "L7": 891, "L8": 2932},
    split="rl",
    eval_mix={"L1": 50, "L2": 50, "L3": 50, "L4": 50, "L5": 50, "L6": 50, "L7": 50, "L8": 200},
    # One episode
    max_turns=40,
    max_tokens=32768,
    max_turn_tokens=8192,  # not said; a quarter of the episode, so that one rambling turn does not use it up
    max_turn_calls=8,  # not said; a plan leg by leg needs one or two
    tool_workers=4,  # ours: tools run beside the sampler, which never waits for them
    tool_seconds=10.0,  # ours; a call takes milliseconds
    # GRPO: 256 episodes a step in two optimizer batches of 128
    sft_steps=0,  # straight from the published model
    steps=80,  # 40 planned there, then continued to 80
    tasks_per_step=32,
    samples=8,
    optimizer_steps=2,
    old_logprobs="all",  # recomputed by the trainer, as there: 9% of a step; "second" halves that, to the same effect
    dynamic_sampling=False,  # as there, though four in ten groups of L8 teach nothing at first; ours with max_drawn=96
    lr=1e-5,  # constant: whether it was is not said, but 160 optimizer steps leave little to decay
    betas=(0.9, 0.999),  # not said; AdamW's defaults
    weight_decay=0.01,  # not said; verl's default
    grad_clip=1.0,  # not said; verl's default
    clip_low=0.2,
    clip_high=0.28,  # clip-higher: unlikely tokens may grow, which keeps entropy up
    dual_clip=3.0,  # not said; verl's default
    importance_cap=2.0,  # not said, verl's default is no correction; sampler and trainer round differently in bfloat16
    advantage_std="group",  # not said; verl's default: over the group's unbiased standard deviation
    loss_aggregation="token",  # the mean over all sampled tokens of the optimizer batch; and no KL term
    mask_truncated=False,  # not said; an episode that runs out of tokens has failed, and should learn to be shorter
    temperature=1.0,  # not said; the distribution that the gradient is about
    micro_tokens=32768,  # ours: the longest episode runs alone, short ones share a micro-batch
    head_chunk=1024,  # ours: 1.9 GiB of logits at a time
    # Measuring and keeping
    eval_every=10,  # one episode a task, at the same temperature, with fixed seeds
    sampler="vllm",
    sampler_slots=256,  # ours: a step's episodes, of which vLLM admits what fits; 40 for "torch", which reserves all
    sync="adapter",  # ours: merging into bfloat16 loses most of a small change to rounding (docs/vllm.md)
    merge_rounding="nearest",  # ours, for "merged" only: closer than "stochastic" at each size that was tried
    sleep_level=0,  # ours: the engine keeps its weights, 17 GiB, while the trainer works; by the plan both fit
    gpu_memory=0.85,  # ours: of the card while it samples, when the trainer's weights are in CPU memory
    engine_tokens=16384,  # ours: read in one step of the engine; half of the longest episode; more takes buffers
    prefix_caching=True,  # ours: a continuation reads its new part only
    enforce_eager=False,  # ours: CUDA graphs take a minute to record, once, and make each small step of decoding faster
    engine_seconds=1800.0,  # ours: without a finished turn, the engine counts as hung and is built anew, once
    mismatch_bound=0.05,  # ours, nats; rounding alone makes about 0.01
    probe_every=10,  # ours: proof that new weights arrive in vLLM
    probe_tolerance=0.1,  # ours, nats: ten times what rounding makes, a third of what the probe's change moves
    probe_failure="stop",  # ours: with "merged" the run would go on, but slower to learn; somebody should look first
    peak_tflops=989.0,  # of an H100 SXM in bfloat16, by its datasheet
    price_per_hour=2.0,  # there spot machines cost 0.8 to 2 dollars; set what yours costs
    keep_checkpoints=3,  # ours; one is written after every step, 2 GB
)
