# SPDX-License-Identifier: Apache-2.0
"""The output head in float32 under a model that computes in less.

A logit of 20 in bfloat16 is a multiple of 1/8, so rounding the logits alone moves logprobs by several hundredths, on
each side another way. The inputs of the product stay as they are; only its sums are kept in float32.
"""

import functools
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nemo_rl_core.errors import ModelError

__all__ = ["compute_head_in_float32"]


def compute_head_in_float32(model: PreTrainedModel) -> None:
    """Make the model's output head give float32 logits whatever its weights are in; the weights are not touched.

    Args:
        model: Its head is replaced in its forward pass alone, so a later sharding of the model finds it as it was.

    Raises:
        ModelError: If the head is no plain linear layer.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ModelError(
            f"the output head of {type(model).__name__} is a {type(head).__name__}, which cannot give float32 logits; set "
            "policy.logits_precision=model"
        )
    head.forward = functools.partial(_forward, head)


def _forward(head: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    if hidden.dtype == torch.float32:
        return nn.functional.linear(hidden, head.weight, head.bias)
    logits: Any = _Float32Product.apply(hidden.reshape(-1, hidden.shape[-1]), head.weight)
    logits = logits.view(*hidden.shape[:-1], -1)
    return logits if head.bias is None else logits + head.bias.float()


class _Float32Product(torch.autograd.Function):
    """``x @ w.T`` of two bfloat16 matrices in float32; its gradients are products in bfloat16, as everywhere else."""

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, w_VD: torch.Tensor) -> torch.Tensor:
        """Return float32 [T, V]."""
        ctx.save_for_backward(x_TD, w_VD)
        if x_TD.is_cuda:
            # A float32 product would leave the tensor cores, and copy the weight.
            return torch.mm(x_TD, w_VD.t(), out_dtype=torch.float32)
        return x_TD.float() @ w_VD.float().t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gradients in the type of the inputs."""
        x_TD, w_VD = ctx.saved_tensors
        grad_TV = grads[0].to(w_VD.dtype)
        return grad_TV @ w_VD, grad_TV.t() @ x_TD
