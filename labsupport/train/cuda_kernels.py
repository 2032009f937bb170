"""What a CUDA device would do otherwise than a CPU, as far as memory sees it: for plans that are traced on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.nn import functional

_dropout_of_torch = functional.dropout
_attention_of_torch = functional.scaled_dot_product_attention


@contextmanager
def as_on_cuda(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within it, dropout keeps masks of one byte an element, attention runs CUDA's fused kernels, and the optimizer
    updates all parameters at once (foreach is the default there).

    It exchanges functions of torch.nn.functional, which torch's own modules call too; what was imported from there by
    name before keeps the CPU's way.
    """
    for group in optimizer.param_groups:
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True
    with (
        patch.object(functional, "dropout", _dropout),
        patch.object(functional, "scaled_dot_product_attention", _attention),
    ):
        yield


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if inplace or not training or not p:
        return _dropout_of_torch(input, p, training, inplace)
    # native_dropout is the fused kernel of CUDA; on a CPU dropout() multiplies by a mask of the input's type
    return torch.native_dropout(input, p, training)[0]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The kernel that CUDA picks by type: flash attention takes half precision without a mask, the memory-efficient
    one takes the rest. Neither stores the scores, only their log-sum-exp."""
    masked = attn_mask is not None and attn_mask.requires_grad
    if query.dim() != 4 or query.dtype == torch.float64 or masked:  # not fused there either
        return _attention_of_torch(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, return_debug_mask=False, scale=scale)[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask.logical_not(), -torch.inf)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.size(-2))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale)[0]
