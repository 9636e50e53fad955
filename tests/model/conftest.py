"""Small random models of each family, made by transformers."""

import pytest
import torch
import transformers

SIZES = dict(vocab_size=97, hidden_size=48, intermediate_size=80, max_position_embeddings=512)
DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12, layer_types=None
)
VISION = dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=48, num_position_embeddings=16
)


def _text(**more):
    rope = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
    base = dict(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rope_parameters=rope)
    return transformers.models.qwen3_5.Qwen3_5TextConfig(**(SIZES | DELTA | base | more))


def _qwen3(**more):
    rope = {"rope_type": "default", "rope_theta": 1e4}
    base = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rope_parameters=rope)
    return transformers.Qwen3Config(**(SIZES | base | more))


def _wrapped(tied):
    text = _text(tie_word_embeddings=tied).to_dict()
    return transformers.models.qwen3_5.Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=tied)


def _llama():
    heads = dict(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    return transformers.LlamaConfig(**SIZES, **heads, tie_word_embeddings=True)


KINDS = {
    "qwen3": lambda: transformers.Qwen3ForCausalLM(_qwen3()),
    "qwen3-tied": lambda: transformers.Qwen3ForCausalLM(_qwen3(tie_word_embeddings=True, num_key_value_heads=1)),
    "qwen3-equal-heads": lambda: transformers.Qwen3ForCausalLM(_qwen3(num_key_value_heads=4)),
    "qwen3.5": lambda: transformers.Qwen3_5ForCausalLM(_text()),
    "qwen3.5-tied": lambda: transformers.Qwen3_5ForCausalLM(_text(tie_word_embeddings=True, linear_num_key_heads=4)),
    "qwen3.5-wrapped": lambda: transformers.Qwen3_5ForConditionalGeneration(_wrapped(tied=False)),
    "qwen3.5-wrapped-tied": lambda: transformers.Qwen3_5ForConditionalGeneration(_wrapped(tied=True)),
    "llama": lambda: transformers.LlamaForCausalLM(_llama()),
}


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """reference(kind) -> (transformers model in float32, the folder it was saved to), made once."""
    made = {}

    def make(kind):
        if kind not in made:
            torch.manual_seed(list(KINDS).index(kind))
            model = KINDS[kind]().eval()
            with torch.no_grad():
                for p in model.parameters():
                    if p.dim() == 1:  # norms that are all alike would hide a mix-up
                        p += 0.2 * torch.randn_like(p)
                    else:
                        p.normal_(0, 0.1)
            folder = tmp_path_factory.mktemp(kind)
            model.save_pretrained(folder)
            made[kind] = (model, folder)
        return made[kind]

    return make
