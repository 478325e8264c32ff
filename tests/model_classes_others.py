"""Small models of the diffusers and timm libraries, with random inputs, without a download.

Sizes and inputs go by the names of arguments that many classes share; a table has what a class needs beside them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from model_classes import Architecture, randomized
from torch import Tensor, nn

Random = Callable[..., Tensor]


def architectures() -> list[Architecture]:
    """Transformers and a U-Net for images and video; image classifiers."""
    return [
        *(
            Architecture("diffusers", "denoising", name, partial(_make, name, more), partial(_inputs, name))
            for name, more in _MORE.items()
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


def _make(name: str, more: dict[str, Any]) -> nn.Module:
    kind = getattr(importlib.import_module("diffusers"), name)
    return randomized(kind(**_taken(_SIZES, kind.__init__) | more))


def _inputs(name: str, model: Any, seed: int) -> dict[str, Any]:
    random = partial(torch.randn, generator=torch.Generator().manual_seed(seed + 1))
    common = {
        "hidden_states": random(2, 4, 8, 8),
        "encoder_hidden_states": random(2, 5, 24),
        "pooled_projections": random(2, 20),
        "timestep": torch.tensor([1, 5]),
    }
    more = _MORE_INPUTS.get(name)
    return _taken(common, model.forward) | (more(random) if more else {})


def _taken(values: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Those of the values that a function has arguments for."""
    return {name: values[name] for name in inspect.signature(function).parameters if name in values}


_SIZES: dict[str, Any] = {
    **dict.fromkeys(("in_channels", "out_channels"), 4),
    **dict.fromkeys(("num_attention_heads", "num_layers", "patch_size"), 2),
    **dict.fromkeys(("sample_size", "sample_width", "sample_height"), 8),
    **dict.fromkeys(("caption_channels", "joint_attention_dim"), 24),
    **{"attention_head_dim": 16, "cross_attention_dim": 32, "pooled_projection_dim": 20},
}
_MORE: dict[str, dict[str, Any]] = {
    "DiTTransformer2DModel": {"num_embeds_ada_norm": 8, "norm_type": "ada_norm_zero"}
    | {"activation_fn": "gelu-approximate", "norm_elementwise_affine": False},
    "PixArtTransformer2DModel": {"out_channels": 8},
    "SD3Transformer2DModel": {"caption_projection_dim": 32, "pos_embed_max_size": 8, "qk_norm": "rms_norm"},
    "FluxTransformer2DModel": {"patch_size": 1, "num_layers": 1, "num_single_layers": 1, "axes_dims_rope": [4, 4, 8]},
    "SanaTransformer2DModel": {"patch_size": 1, "num_layers": 1}
    | {"num_cross_attention_heads": 2, "cross_attention_head_dim": 16},
    "LTXVideoTransformer3DModel": {"patch_size": 1, "in_channels": 8, "out_channels": 8},
    "CogVideoXTransformer3DModel": {"time_embed_dim": 8, "text_embed_dim": 24}
    | {"sample_frames": 5, "max_text_seq_length": 5},
    "WanTransformer3DModel": {"patch_size": (1, 2, 2), "text_dim": 24, "freq_dim": 32, "ffn_dim": 48}
    | {"cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32},
    "Lumina2Transformer2DModel": {"hidden_size": 48, "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 16}
    | {"num_refiner_layers": 1, "axes_dim_rope": (4, 4, 4), "axes_lens": (32, 32, 32), "cap_feat_dim": 24},
    "HunyuanDiT2DModel": {"hidden_size": 32, "num_attention_heads": 4, "attention_head_dim": 8}
    | {"pooled_projection_dim": 8, "activation_fn": "gelu-approximate"}
    | dict.fromkeys(("cross_attention_dim", "cross_attention_dim_t5"), 24)
    | dict.fromkeys(("text_len", "text_len_t5"), 4),
    "UNet2DConditionModel": {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
    | {"num_attention_heads": None, "attention_head_dim": 8, "cross_attention_dim": 24, "sample_size": 16}
    | {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")}
    | {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")},
    "AuraFlowTransformer2DModel": {"num_mmdit_layers": 1, "num_single_dit_layers": 1}
    | {"caption_projection_dim": 32, "pos_embed_max_size": 16},
    "AllegroTransformer3DModel": {"attention_head_dim": 24, "cross_attention_dim": 48}
    | {"num_layers": 1, "sample_frames": 8},
}
_MORE_INPUTS: dict[str, Callable[[Random], dict[str, Any]]] = {
    "DiTTransformer2DModel": lambda r: {"class_labels": torch.tensor([0, 3])},
    "PixArtTransformer2DModel": lambda r: {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    "FluxTransformer2DModel": lambda r: (
        {"hidden_states": r(2, 16, 4), "timestep": torch.tensor([1.0, 0.5])}
        | {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3)}
    ),
    "LTXVideoTransformer3DModel": lambda r: (
        {"hidden_states": r(2, 2 * 4 * 4, 8), "encoder_attention_mask": torch.ones(2, 5)}
        | {"num_frames": 2, "height": 4, "width": 4}
    ),
    "CogVideoXTransformer3DModel": lambda r: {"hidden_states": r(2, 2, 4, 8, 8)},
    "WanTransformer3DModel": lambda r: {"hidden_states": r(2, 4, 2, 8, 8)},
    "Lumina2Transformer2DModel": lambda r: {
        "timestep": torch.tensor([0.1, 0.5]),
        "encoder_attention_mask": torch.ones(2, 5, dtype=torch.bool),
    },
    "HunyuanDiT2DModel": lambda r: (
        {"encoder_hidden_states": r(2, 4, 24), "encoder_hidden_states_t5": r(2, 4, 24)}
        | {"timestep": torch.tensor([1.0, 5.0])}
        | dict.fromkeys(("text_embedding_mask", "text_embedding_mask_t5"), torch.ones(2, 4))
        | {"image_meta_size": r(2, 6), "style": torch.tensor([0, 0]), "image_rotary_emb": [r(16, 8), r(16, 8)]}
    ),
    "UNet2DConditionModel": lambda r: {"sample": r(2, 4, 16, 16)},
    "AuraFlowTransformer2DModel": lambda r: {"timestep": torch.tensor([0.1, 0.5])},
    "AllegroTransformer3DModel": lambda r: {"hidden_states": r(2, 4, 2, 8, 8), "encoder_hidden_states": r(2, 1, 5, 24)},
}

_SMALL: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 4}
_TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, **_SMALL},
    "vit_small_patch14_reg4_dinov2": {"img_size": 28, **_SMALL},
    "eva02_tiny_patch14_224": {"img_size": 28, **_SMALL},
    "swin_tiny_patch4_window7_224": {"img_size": 32, "window_size": 4}
    | {"embed_dim": 24, "depths": (1, 1), "num_heads": (2, 4)},
    "davit_tiny": {"depths": (1, 1), "embed_dims": (32, 32), "num_heads": (2, 2)},
}
