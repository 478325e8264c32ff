"""Small models of every transformers architecture, made from configurations, without a download.

A configuration is shrunk through field names that many share; few models need more.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

VOCABULARY, LENGTH, IMAGE = 96, 12, 32
_HIDDEN, _INNER, _HEADS, _LAYERS = 64, 96, 4, 2
_LARGEST = 3e7

# Sizes by the names that configurations give them.
_SIZES: list[tuple[int, str]] = [
    (VOCABULARY, "vocab_size src_vocab_size tgt_vocab_size"),
    (
        _HIDDEN,
        "hidden_size d_model n_embd dim embed_dim word_embed_proj_dim embedding_size emb_dim hidden_dim "
        "lru_width attention_hidden_size n_embed projection_dim decoder_hidden_size",
    ),
    (
        _INNER,
        "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size dim_ff "
        "mlp_hidden_size shared_expert_intermediate_size dense_intermediate_size shared_intermediate_size "
        "decoder_intermediate_size",
    ),
    (
        _LAYERS,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
        "decoder_num_hidden_layers n_dense_layers",
    ),
    (
        _HEADS,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "mamba_num_heads decoder_num_attention_heads",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads n_groups mamba_n_groups num_experts_per_tok moe_topk num_experts_per_token "
        "moe_k moe_top_k top_k num_codebooks",
    ),
    (
        16,
        "head_dim d_kv kv_lora_rank qk_nope_head_dim v_head_dim state_size mamba_d_state ssm_state_size mamba_head_dim "
        "attention_head_size linear_key_head_dim linear_value_head_dim mamba_d_head d_head time_step_rank "
        "index_head_dim chunk_size mamba_chunk_size global_head_dim partial_head_dim swa_head_dim",
    ),
    (8, "qk_rope_head_dim patch_size hidden_size_per_layer_input mamba_n_heads rotary_dim"),
    (
        32,
        "moe_intermediate_size q_lora_rank expert_dim image_size moe_shared_expert_intermediate_size "
        "expert_ffn_hidden_size expert_hidden_size",
    ),
    (
        4,
        "num_experts num_local_experts n_routed_experts moe_num_experts n_experts linear_num_key_heads "
        "linear_num_value_heads index_n_heads",
    ),
    (
        1,
        "n_group topk_group n_shared_experts num_nextn_predict_layers num_shared_experts moe_num_shared_experts "
        "first_k_dense_replace",
    ),
    (64, "max_position_embeddings n_positions max_seq_len n_ctx"),
    (VOCABULARY, "vocab_size_per_layer_input"),
]
_FIELDS = {name: size for size, names in _SIZES for name in names.split()}
# Token numbers that lie in the small vocabulary.
_FIELDS |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}
_NO_DROPOUT = ("dropout", "drop_path_rate", "layerdrop", "pdrop")

# Windows that fit into the last stage, which halves the image three times.
_WINDOWS = {"embed_dim": 48, "window_size": 2, "image_size": 64, "patch_size": 4}

_ZAMBA = {"attention_hidden_size": 128, "attention_head_dim": 32}  # the hidden state and the embeddings, side by side

# Fields that the sizes above do not cover, by types of configurations.
_OTHERS: dict[str, dict[str, Any]] = {
    "convnext convnextv2": {"image_size": 64},
    "donut-swin swin swinv2": _WINDOWS,
    "hunyuan_v1_dense hunyuan_v1_moe ministral": {"head_dim": 16},
    "kimi_linear qwen3_next qwen3_5_text qwen3_5_moe_text qwen4_exp_text": {"num_hidden_layers": 4},
    "longt5 t5": {"decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu"},
    "switch_transformers": {"decoder_start_token_id": 0},
    "bamba": {"attn_layer_indices": [1]},
    "bit": {"num_groups": 8},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hgnet_v2": {"hidden_sizes": [256, 512, 1024, 2048], "stage_out_channels": [128, 512, 1024, 2048]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 16},
    "mamba2": {"num_heads": 8},
    "mobilevitv2": {"image_size": 256},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "perceiver": {"d_latents": 64, "num_latents": 16, "num_self_attends_per_block": 2}
    | {"num_self_attention_heads": 1, "num_cross_attention_heads": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "levit": {"image_size": 64, "patch_size": 16},
    "textnet": {"hidden_sizes": [64, 64, 128, 256, 512], "image_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": _ZAMBA | {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2},
    "zamba2": _ZAMBA | {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
_MORE = {type_: more for types, more in _OTHERS.items() for type_ in types.split()}


@dataclass(frozen=True)
class Architecture:
    """A model class: library, task, name, how to make it small, and inputs from a seed."""

    library: str
    task: str
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[Any, int], dict[str, Any]]


def architectures() -> list[Architecture]:
    """Every causal language model, masked language model, image classifier and text-to-text model."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    tasks = {
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "image": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        "text to text": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    found: dict[str, Architecture] = {}
    for task, mapping in tasks.items():
        for type_, names in mapping.items():
            for name in names if isinstance(names, tuple) else (names,):
                make, inputs = partial(_make, type_, name), partial(_inputs, task)
                found.setdefault(name, Architecture("transformers", task, name, make, inputs))
    return list(found.values())


def _make(type_: str, name: str) -> nn.Module:
    transformers = importlib.import_module("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    kind = getattr(transformers, name)
    config = tiny_config(kind.config_class or transformers.CONFIG_MAPPING[type_])
    with torch.device("meta"):
        _check_size(kind(config))
    return randomized(kind(config))


def randomized(model: nn.Module) -> nn.Module:
    """The model in fp32 and evaluation mode, with random weights, so that every norm's weight matters."""
    with torch.no_grad():
        for parameter in model.float().parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def _check_size(model: nn.Module) -> None:
    """Refuse a model that stayed large because a field has an unknown name."""
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > _LARGEST:
        name, largest = max(model.named_parameters(), key=lambda item: item[1].numel())
        raise ValueError(f"{count / 1e6:.0f} million parameters, the largest {name} of shape {tuple(largest.shape)}")


def tiny_config(kind: Any) -> Any:
    """The configuration, with small sizes in all fields of known names."""
    default = kind()
    return kind(**_shrunk(default) | _MORE.get(default.model_type, {}))


def _shrunk(default: Any) -> dict[str, Any]:
    """The fields to set, in a configuration and those inside it."""
    fields: dict[str, Any] = {}
    for name, value in default.to_dict().items():
        if name in _FIELDS and (value is None or isinstance(value, int | float)) and not isinstance(value, bool):
            if value is not None or name.endswith("token_id"):
                fields[name] = _FIELDS[name]
        elif name in ("depths", "layer_depths") and isinstance(value, list | tuple):
            fields[name] = [1] * len(value)
        elif name in ("hidden_sizes", "embed_dims", "stage_out_channels") and isinstance(value, list | tuple):
            fields[name] = [size // 4 for size in value]
        elif any(part in name for part in _NO_DROPOUT) and isinstance(value, float):
            fields[name] = 0.0
        elif isinstance(value, Mapping) and name.endswith("config") and hasattr(getattr(default, name), "to_dict"):
            inner = getattr(default, name)
            fields[name] = type(inner)(**_shrunk(inner)).to_dict()
    for name, alias in (getattr(default, "attribute_map", None) or {}).items():
        if name in _FIELDS and alias in fields:
            fields[alias] = _FIELDS[name]
    if "qk_rope_head_dim" in fields:  # latent attention has rotary columns of its own and no shared heads
        fields |= {name: size for name, size in (("head_dim", 8), ("num_key_value_heads", _HEADS)) if name in fields}
    return fields


def _inputs(task: str, model: Any, seed: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed + 1)
    if task == "image":
        size, channels = getattr(model.config, "image_size", IMAGE), getattr(model.config, "num_channels", 3)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return {"pixel_values": torch.randn(2, channels, height, width, generator=random)}
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH), generator=random)
    return {"input_ids": tokens} | ({"decoder_input_ids": tokens.flip(1)} if task == "text to text" else {})
