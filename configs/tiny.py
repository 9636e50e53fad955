"""The small run: a model of 0.9M parameters, trained from scratch on a laptop's CPU, learns to plan with tools.

It imitates the scripted expert (with some noise) until it solves 40% of held-out tasks, then GRPO goes on from
there with the same code that trains the 9B model. The recipe was found by trial; docs/log.md has what did not work.
"""
from rl.config import Config

config = Config(
    name="tiny",
    about="a planner from scratch: imitation of the expert, then GRPO; about 15 minutes on 2 CPU cores",
    # A Qwen3-type decoder, all attention
    architecture={"model_type": "qwen3", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
                  "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "rope_theta": 1000.0,
                  "tie_word_embeddings": False},
    chat="compact",
    dtype="float32",
    device="cpu",
    threads=1,  # two are little faster on matrices this small, and collapse where another process wants a core
    # Rooms with two or three timed visits
    mix={"L0": 5000},
    eval_mix={"L0": 256},
    max_turns=6,
    max_tokens=448,
    max_turn_tokens=160,
    max_turn_calls=2,
    # Imitation of a teacher who is careless: in 45% of the legs it forgets to wait, in 45% of the tasks to keep out.
    # The stage ends once 40% of the held-out tasks are solved, so that there is something left to improve.
    sft_steps=900,
    sft_batch=16,
    sft_optimizer="muon",
    sft_lr=4e-3,
    sft_muon_lr=0.03,
    sft_warmup=30,
    sft_decay=0.7,
    sft_noise=0.45,
    sft_tasks=12_000,
    sft_eval_every=40,
    sft_eval_from=320,
    sft_stop=0.4,
    # GRPO on a LoRA of the frozen weights
    lora_rank=16,
    lora_alpha=32.0,
    steps=24,
    tasks_per_step=24,
    samples=8,
    optimizer_steps=2,
    lr=2e-3,
    betas=(0.9, 0.99),
    weight_decay=0.0,
    micro_tokens=2048,
    head_chunk=2048,
    eval_every=6,
    sampler_slots=192,
)
