"""Tiny models of transformers, made from configurations without a download."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_WIDTH = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {"vocab_size": 128}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
_SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 96}
_WHISPER = {"d_model": 64, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16, "dropout": 0.0}
_WHISPER |= {f"{side}_{what}": count for side in ("encoder", "decoder") for what, count in _SIDE.items()}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0}

# The class, the class of its configuration, what that gets, and the names of the inputs.
_MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _WIDTH | _TEXT | _GROUPED, ("input_ids",)),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _WIDTH | _TEXT | _GROUPED, ("input_ids",)),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _WIDTH | _TEXT | _GROUPED, ("input_ids",)),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2 | _TEXT | {"attn_pdrop": 0.0} | _TOKENS, ("input_ids",)),
    "vit": ("ViTForImageClassification", "ViTConfig", _WIDTH | {"image_size": 32, "patch_size": 8}, ("pixel_values",)),
    "bert": (
        *("BertForMaskedLM", "BertConfig"),
        _WIDTH | _TEXT | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        ("input_ids",),
    ),
    "t5": (
        *("T5ForConditionalGeneration", "T5Config"),
        _T5 | _TEXT | {"decoder_start_token_id": 0},
        ("input_ids", "decoder_input_ids"),
    ),
    "whisper": (
        *("WhisperForConditionalGeneration", "WhisperConfig"),
        _WHISPER | _TEXT | _TOKENS,
        ("input_features", "decoder_input_ids"),
    ),
}


def tiny(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model in evaluation mode, and its inputs."""
    import transformers

    model_class, config_class, sizes, names = _MODELS[name]
    config = getattr(transformers, config_class)(**sizes)
    config.use_cache = False
    inputs = {
        "input_ids": torch.randint(128, (2, 8)),
        "decoder_input_ids": torch.randint(128, (2, 8)),
        "pixel_values": torch.randn(2, 3, 32, 32),
        "input_features": torch.randn(2, 8, 32),
    }
    return getattr(transformers, model_class)(config).eval(), {name: inputs[name] for name in names}
