"""Small models of the diffusers and timm libraries, with random inputs, without a download."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kernel_fusion.bench.tiny_models import Architecture, randomized

Random = Callable[..., Tensor]


def architectures() -> list[Architecture]:
    """Transformers and a U-Net for images and video; image classifiers."""
    return [
        *(
            Architecture("diffusers", "denoising", name, partial(_make, name, config), partial(_inputs, inputs))
            for name, (config, inputs) in _MODELS.items()
        ),
        *(
            Architecture("timm", "image", name, partial(_make_timm, name, config), partial(_pixels, config))
            for name, config in _TIMM.items()
        ),
    ]


def _make_timm(name: str, config: dict[str, Any]) -> nn.Module:
    return randomized(importlib.import_module("timm").create_model(name, pretrained=False, num_classes=5, **config))


def _pixels(config: dict[str, Any], model: Any, seed: int) -> dict[str, Any]:
    size = config.get("img_size", 32)
    return {"x": torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(seed + 1))}


def _make(name: str, config: dict[str, Any]) -> nn.Module:
    return randomized(getattr(importlib.import_module("diffusers"), name)(**config))


def _inputs(make: Callable[[Random], dict[str, Any]], model: Any, seed: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed + 1)
    return make(partial(torch.randn, generator=random))


def _steps(*values: float) -> Tensor:
    return torch.tensor(values)


_MODELS: dict[str, tuple[dict[str, Any], Callable[[Random], dict[str, Any]]]] = {
    "DiTTransformer2DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "sample_size": 8,
            "patch_size": 2,
            "num_embeds_ada_norm": 8,
            "activation_fn": "gelu-approximate",
            "norm_type": "ada_norm_zero",
            "norm_elementwise_affine": False,
        },
        lambda r: {"hidden_states": r(2, 4, 8, 8), "timestep": _steps(1, 5), "class_labels": torch.tensor([0, 3])},
    ),
    "PixArtTransformer2DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "sample_size": 8,
            "patch_size": 2,
            "cross_attention_dim": 32,
            "caption_channels": 24,
        },
        lambda r: {
            "hidden_states": r(2, 4, 8, 8),
            "encoder_hidden_states": r(2, 5, 24),
            "timestep": _steps(1, 5),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "SD3Transformer2DModel": (
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "caption_projection_dim": 32,
            "joint_attention_dim": 24,
            "pooled_projection_dim": 20,
            "out_channels": 4,
            "pos_embed_max_size": 8,
            "qk_norm": "rms_norm",
        },
        lambda r: {
            "hidden_states": r(2, 4, 8, 8),
            "encoder_hidden_states": r(2, 5, 24),
            "pooled_projections": r(2, 20),
            "timestep": _steps(1, 5),
        },
    ),
    "FluxTransformer2DModel": (
        {
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 24,
            "pooled_projection_dim": 20,
            "axes_dims_rope": [4, 4, 8],
        },
        lambda r: {
            "hidden_states": r(2, 16, 4),
            "encoder_hidden_states": r(2, 5, 24),
            "pooled_projections": r(2, 20),
            "timestep": _steps(1.0, 0.5),
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(5, 3),
        },
    ),
    "SanaTransformer2DModel": (
        {
            "patch_size": 1,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
            "caption_channels": 24,
            "sample_size": 8,
        },
        lambda r: {"hidden_states": r(2, 4, 8, 8), "encoder_hidden_states": r(2, 5, 24), "timestep": _steps(1, 5)},
    ),
    "LTXVideoTransformer3DModel": (
        {
            "in_channels": 8,
            "out_channels": 8,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "cross_attention_dim": 32,
            "num_layers": 2,
            "caption_channels": 24,
        },
        lambda r: {
            "hidden_states": r(2, 2 * 4 * 4, 8),
            "encoder_hidden_states": r(2, 5, 24),
            "timestep": _steps(1, 5),
            "encoder_attention_mask": torch.ones(2, 5),
            "num_frames": 2,
            "height": 4,
            "width": 4,
        },
    ),
    "CogVideoXTransformer3DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 8,
            "text_embed_dim": 24,
            "num_layers": 2,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "patch_size": 2,
            "max_text_seq_length": 5,
        },
        lambda r: {"hidden_states": r(2, 2, 4, 8, 8), "encoder_hidden_states": r(2, 5, 24), "timestep": _steps(1, 5)},
    ),
    "WanTransformer3DModel": (
        {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 24,
            "freq_dim": 32,
            "ffn_dim": 48,
            "num_layers": 2,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 32,
        },
        lambda r: {"hidden_states": r(2, 4, 2, 8, 8), "encoder_hidden_states": r(2, 5, 24), "timestep": _steps(1, 5)},
    ),
    "Lumina2Transformer2DModel": (
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "hidden_size": 48,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "multiple_of": 16,
            "axes_dim_rope": (4, 4, 4),
            "axes_lens": (32, 32, 32),
            "cap_feat_dim": 24,
        },
        lambda r: {
            "hidden_states": r(2, 4, 8, 8),
            "encoder_hidden_states": r(2, 5, 24),
            "timestep": _steps(0.1, 0.5),
            "encoder_attention_mask": torch.ones(2, 5, dtype=torch.bool),
        },
    ),
    "HunyuanDiT2DModel": (
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "cross_attention_dim": 24,
            "cross_attention_dim_t5": 24,
            "pooled_projection_dim": 8,
            "hidden_size": 32,
            "text_len": 4,
            "text_len_t5": 4,
            "activation_fn": "gelu-approximate",
        },
        lambda r: {
            "hidden_states": r(2, 4, 8, 8),
            "encoder_hidden_states": r(2, 4, 24),
            "text_embedding_mask": torch.ones(2, 4),
            "encoder_hidden_states_t5": r(2, 4, 24),
            "text_embedding_mask_t5": torch.ones(2, 4),
            "timestep": _steps(1.0, 5.0),
            "image_meta_size": r(2, 6),
            "style": torch.tensor([0, 0]),
            "image_rotary_emb": [r(16, 8), r(16, 8)],
        },
    ),
    "UNet2DConditionModel": (
        {
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 24,
            "attention_head_dim": 8,
            "norm_num_groups": 8,
        },
        lambda r: {"sample": r(2, 4, 16, 16), "timestep": _steps(1, 5), "encoder_hidden_states": r(2, 5, 24)},
    ),
    "AuraFlowTransformer2DModel": (
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 24,
            "caption_projection_dim": 32,
            "out_channels": 4,
            "pos_embed_max_size": 16,
        },
        lambda r: {"hidden_states": r(2, 4, 8, 8), "encoder_hidden_states": r(2, 5, 24), "timestep": _steps(0.1, 0.5)},
    ),
    "AllegroTransformer3DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 24,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "cross_attention_dim": 48,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 8,
            "caption_channels": 24,
            "patch_size": 2,
        },
        lambda r: {
            "hidden_states": r(2, 4, 2, 8, 8),
            "encoder_hidden_states": r(2, 1, 5, 24),
            "timestep": _steps(1, 5),
        },
    ),
}

_SMALL: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 4}
_TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, **_SMALL},
    "vit_small_patch14_reg4_dinov2": {"img_size": 28, **_SMALL},
    "eva02_tiny_patch14_224": {"img_size": 28, **_SMALL},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32,
        "window_size": 4,
        "embed_dim": 24,
        "depths": (1, 1),
        "num_heads": (2, 4),
    },
    "davit_tiny": {"depths": (1, 1), "embed_dims": (32, 32), "num_heads": (2, 2)},
}
