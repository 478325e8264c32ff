"""Modules: drop-ins for those of `torch.nn`, and the fused verbs that have parameters or a training mode."""

from __future__ import annotations

from kernel_fusion import functional
from kernel_fusion.functional.wording import spell_out
from kernel_fusion.nn.attention import FusedSoftmax
from kernel_fusion.nn.gated_norm import FusedGatedRMSNorm
from kernel_fusion.nn.group_norm import FusedGroupNorm
from kernel_fusion.nn.losses import FusedCrossEntropyLoss, FusedLinearCrossEntropyLoss
from kernel_fusion.nn.modulated_norm import FusedModulatedLayerNorm
from kernel_fusion.nn.norm import FusedAddLayerNorm, FusedAddRMSNorm, FusedLayerNorm, FusedRMSNorm
from kernel_fusion.nn.pointwise import FusedBiasAct, FusedGatedAct, FusedLinearAct
from kernel_fusion.nn.rotary import FusedQKNormRope

__all__ = [
    "FusedAddLayerNorm",
    "FusedAddRMSNorm",
    "FusedBiasAct",
    "FusedCrossEntropyLoss",
    "FusedGatedAct",
    "FusedGatedRMSNorm",
    "FusedGroupNorm",
    "FusedLayerNorm",
    "FusedLinearAct",
    "FusedLinearCrossEntropyLoss",
    "FusedModulatedLayerNorm",
    "FusedQKNormRope",
    "FusedRMSNorm",
    "FusedSoftmax",
]

spell_out({**vars(functional), **globals()}, __all__)
