"""What a CUDA device would do otherwise than a CPU, as far as memory sees it: for plans that are traced on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode


@contextmanager
def as_on_cuda(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within it, dropout keeps masks of one byte an element, attention runs CUDA's fused kernels, and the optimizer
    updates all parameters at once (foreach is the default there)."""
    for group in optimizer.param_groups:
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True
    with _CudaKernels():
        yield


class _CudaKernels(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.dropout or func is torch.dropout:
            return _dropout(*args, **kwargs)
        if func is scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None
) -> torch.Tensor:
    # native_dropout is the fused kernel of CUDA; on a CPU dropout() multiplies by a mask of the input's type
    return torch.native_dropout(input, p, training if train is None else train)[0]


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
