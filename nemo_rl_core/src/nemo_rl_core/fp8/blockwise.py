# SPDX-License-Identifier: Apache-2.0
"""Cast of weights to FP8 in blocks of 128 x 128, as vLLM and DeepGEMM read them.

A weight ``[N, K]`` becomes e4m3 values of the same shape and one float32 scale for each block, by which a value is
multiplied to get the weight back (hence ``weight_scale_inv``, the name in checkpoints and on the wire). The rule, for
each block: ``scale = max(amax, 1e-4) / 448``, rounded up to a power of two where that is asked for, and
``value = e4m3(x * (1 / scale))``, all in float32, rounding to nearest even. A block at a ragged edge is what a block
padded with zeros would be. This is the rule of DeepGEMM's ``per_block_cast_to_fp8`` and vLLM's, bit for bit; a weight
that holds an infinity or a NaN is an error here instead of a NaN there.

Two implementations give the same bits: plain torch on any device, and a Triton kernel for NVIDIA GPUs that know e4m3.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from nemo_rl_core.errors import ModelError

__all__ = [
    "AMAX_FLOOR",
    "BLOCK",
    "E4M3_MAX",
    "Backend",
    "BlockwiseWeight",
    "cast_blockwise",
    "cast_many",
    "dequantise",
    "pairs_of",
]

#: Rows and columns of a block.
BLOCK = 128
#: Largest value of float8_e4m3fn.
E4M3_MAX = 448.0
#: A block's amax counts as at least this much, so that a block of zeros has a scale.
AMAX_FLOOR = 1e-4

#: ``auto`` takes the kernel where it runs, and torch elsewhere.
Backend = Literal["auto", "torch", "triton"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WEIGHT, _SCALE = ".weight", ".weight_scale_inv"
# The conversion to e4m3 is an instruction from Ada and Hopper on; the kernel has no other way.
_FIRST_CAPABILITY = (8, 9)
# Inside a tile the kernel counts in 32 bits: 128 rows of fewer than 2^24 elements.
_LONGEST_ROW = 2**24


@dataclass(frozen=True, kw_only=True)
class BlockwiseWeight:
    """A weight in FP8 with the scales of its blocks.

    Attributes:
        weight: The values, float8_e4m3fn ``[N, K]`` or ``[E, N, K]`` (E experts).
        weight_scale_inv: float32 ``[ceil(N/128), ceil(K/128)]``, with E in front where the weight has it; value times
            scale is the weight.
    """

    weight: torch.Tensor
    weight_scale_inv: torch.Tensor

    def __post_init__(self) -> None:
        """Check that the two fit.

        Raises:
            ModelError: If a dtype or a shape is another one, as of scales that a kernel has packed.
        """
        weight, scale = self.weight, self.weight_scale_inv
        if weight.dtype != torch.float8_e4m3fn or weight.ndim not in (2, 3):
            raise ModelError(
                f"the weight of a pair must be float8_e4m3fn with 2 or 3 dimensions, got {_shown(weight)}; "
                f"cast_blockwise makes one"
            )
        if scale.dtype != torch.float32 or tuple(scale.shape) != _scale_shape(weight):
            raise ModelError(
                f"the scales of a weight {list(weight.shape)} must be float32 {list(_scale_shape(weight))}, one for "
                f"each block of {BLOCK} x {BLOCK}, got {_shown(scale)}; send them as cast_blockwise gives them, before "
                f"any kernel packs them"
            )


def cast_blockwise(
    weight: torch.Tensor, *, power_of_two: bool = False, backend: Backend = "auto", name: str = "weight"
) -> BlockwiseWeight:
    """Cast one weight.

    Args:
        weight: ``[N, K]`` or ``[E, N, K]``, bfloat16, float16 or float32, any strides; not changed.
        power_of_two: Round each scale up to a power of two, for consumers that keep scales as exponents (UE8M0).
        backend: Which implementation runs; the bits are the same.
        name: What errors call the weight.

    Returns:
        Values and scales on the weight's device, contiguous and without gradient.

    Raises:
        ModelError: If the weight is empty, has another shape, dtype or tensor type, or a value that is not finite; or
            if ``triton`` is asked for where it can't run.
    """
    return _cast_all({name: weight}, power_of_two=power_of_two, backend=backend)[name]


def cast_many(
    weights: Mapping[str, torch.Tensor], *, power_of_two: bool = False, backend: Backend = "auto"
) -> dict[str, torch.Tensor]:
    """Cast many weights and name the results as they cross to the engine.

    On a GPU that runs the kernel all weights of one dtype are cast by one launch, and whether all values were finite
    is asked once, at the end.

    Args:
        weights: Module name (``model.layers.0.mlp.down_proj``, without ``.weight``) to weight.
        power_of_two: As in ``cast_blockwise``.
        backend: As in ``cast_blockwise``.

    Returns:
        ``<name>.weight`` followed by ``<name>.weight_scale_inv`` for each weight, in the order given.

    Raises:
        ModelError: As ``cast_blockwise``, naming the weight; and if a name ends in ``.weight`` or
            ``.weight_scale_inv``. Then nothing is returned.
    """
    for name in weights:
        if name.endswith((_WEIGHT, _SCALE)):
            raise ModelError(
                f"cast_many takes names of modules and adds {_WEIGHT!r} and {_SCALE!r} itself, got {name!r}; "
                f"pass {name.removesuffix(_SCALE).removesuffix(_WEIGHT)!r}"
            )
    tensors = {}
    for name, cast in _cast_all(weights, power_of_two=power_of_two, backend=backend).items():
        tensors[name + _WEIGHT] = cast.weight
        tensors[name + _SCALE] = cast.weight_scale_inv
    return tensors


def pairs_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, BlockwiseWeight]:
    """Return the FP8 weights of a set of tensors by module name; the inverse of ``cast_many``.

    Tensors that are neither FP8 nor scales are left out.

    Raises:
        ModelError: If half of a pair is missing, or the halves don't fit. An engine that gets half of a pair computes
            with whatever its buffer held.
    """
    pairs = {}
    for name, tensor in tensors.items():
        if name.endswith(_SCALE):
            partner = name.removesuffix(_SCALE) + _WEIGHT
            if partner not in tensors:
                raise ModelError(f"{name!r} has no {partner!r} beside it: a weight and its scales go together")
        elif tensor.dtype == torch.float8_e4m3fn:
            module = name.removesuffix(_WEIGHT)
            if not name.endswith(_WEIGHT) or module + _SCALE not in tensors:
                raise ModelError(
                    f"{name!r} is FP8 and has no scales beside it: a weight is called '<module>{_WEIGHT}' and its "
                    f"scales '<module>{_SCALE}', as cast_many names them"
                )
    for name in tensors:
        if name.endswith(_SCALE):
            module = name.removesuffix(_SCALE)
            try:
                pairs[module] = BlockwiseWeight(weight=tensors[module + _WEIGHT], weight_scale_inv=tensors[name])
            except ModelError as error:
                raise ModelError(f"{module!r}: {error}") from None
    return pairs


def dequantise(cast: BlockwiseWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return values times scales, computed in float32 and given in ``dtype``, in the weight's shape."""
    rows, columns = cast.weight.shape[-2:]
    scale = cast.weight_scale_inv.repeat_interleave(BLOCK, -2)[..., :rows, :]
    scale = scale.repeat_interleave(BLOCK, -1)[..., :columns]
    return (cast.weight.float() * scale).to(dtype)


def _cast_all(
    weights: Mapping[str, torch.Tensor], *, power_of_two: bool, backend: Backend
) -> dict[str, BlockwiseWeight]:
    """Check every weight before the first is cast, cast them, and look for values that are not finite."""
    if backend not in get_args(Backend):
        raise ModelError(f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}")
    for name, weight in weights.items():
        _check(name, weight)
    devices = set() if backend == "torch" else _kernel_devices({weight.device for weight in weights.values()})
    by_kernel = {name for name, weight in weights.items() if weight.device in devices and _fits_the_kernel(weight)}
    if backend == "triton" and (others := [name for name in weights if name not in by_kernel]):
        raise ModelError(
            f"backend 'triton' needs triton, an NVIDIA GPU of capability {_FIRST_CAPABILITY[0]}.{_FIRST_CAPABILITY[1]} "
            f"or above and rows of fewer than {_LONGEST_ROW} values; {others[0]!r} is {_shown(weights[others[0]])} on "
            f"{weights[others[0]].device}; backend 'auto' takes torch there"
        )
    casts: dict[str, BlockwiseWeight] = {}
    # One flag for each weight that was cast on a device, so that the host asks each device once.
    flags: dict[torch.device, list[tuple[list[str], torch.Tensor]]] = {}
    kernel_work: dict[torch.device, dict[str, torch.Tensor]] = {}
    with torch.no_grad():
        for name, weight in weights.items():
            if name in by_kernel:
                kernel_work.setdefault(weight.device, {})[name] = weight.detach()
            else:
                casts[name] = cast = _cast_by_torch(weight.detach(), power_of_two)
                flag = (~torch.isfinite(cast.weight_scale_inv)).any().reshape(1)
                flags.setdefault(weight.device, []).append(([name], flag))
        for device, work in kernel_work.items():
            done, flag = _cast_by_triton(work, power_of_two)
            casts |= done
            flags.setdefault(device, []).append((list(work), flag))
    _refuse_non_finite(casts, flags)
    return {name: casts[name] for name in weights}


def _check(name: str, weight: object) -> None:
    """Refuse what has no blocks."""
    if not isinstance(weight, torch.Tensor) or type(weight) not in (torch.Tensor, torch.nn.Parameter):
        raise ModelError(
            f"weight {name!r} must be a plain torch.Tensor, got {type(weight).__name__}; of a sharded tensor, gather "
            f"it first (full_tensor()): a block must lie whole on one rank"
        )
    if weight.device.type == "meta" or weight.layout != torch.strided:
        raise ModelError(
            f"weight {name!r} must be a dense tensor with values, got {weight.layout} on {weight.device}; load it first"
        )
    if weight.dtype not in _DTYPES:
        names = ", ".join(_dtype_name(dtype) for dtype in _DTYPES)
        raise ModelError(
            f"weight {name!r} must be one of {names}, got {_dtype_name(weight.dtype)}; cast from the master weights"
        )
    if weight.ndim not in (2, 3):
        raise ModelError(
            f"weight {name!r} must have the shape [N, K], or [E, N, K] for experts, got {list(weight.shape)}; biases, "
            f"norms and the like stay as they are: leave them out of the cast"
        )
    if weight.numel() == 0:
        raise ModelError(
            f"weight {name!r} is empty, {list(weight.shape)}: it has no block to scale; pass the whole weight, not an "
            f"empty shard"
        )


def _kernel_devices(devices: set[torch.device]) -> set[torch.device]:
    """Return those of the devices on which the Triton kernel runs."""
    if importlib.util.find_spec("triton") is None or torch.version.hip is not None:
        return set()
    return {
        device
        for device in devices
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
    }


def _fits_the_kernel(weight: torch.Tensor) -> bool:
    return max(weight.shape[-1], weight.stride(-2)) < _LONGEST_ROW


def _cast_by_torch(weight: torch.Tensor, power_of_two: bool) -> BlockwiseWeight:
    """The reference: the rule as it stands in this module's docstring, on any device."""
    experts = weight.reshape(-1, *weight.shape[-2:])
    count, rows, columns = experts.shape
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    # A weight with fewer rows than a block has one block of that height, which needs no padding.
    height, width = min(BLOCK, rows), min(BLOCK, columns)
    if (rows, columns) != (down * height, across * width):
        experts = torch.nn.functional.pad(experts, (0, across * width - columns, 0, down * height - rows))
    blocks = experts.reshape(count, down, height, across, width)
    amax = blocks.abs().amax(dim=(2, 4), keepdim=True).float().clamp(min=AMAX_FLOOR)
    # By a tensor: torch on CUDA divides by a Python number by multiplying with its reciprocal, which is not the quotient.
    scale = amax / torch.full((), E4M3_MAX, device=amax.device)
    if power_of_two:
        scale = torch.where(amax.isfinite(), _next_power_of_two(scale), scale)
    # Clamped because a build of torch may turn what lies beyond 448 into NaN; a rounded 1 / scale can lead there.
    values = (blocks.float() * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    values = values.reshape(count, down * height, across * width)[:, :rows, :columns]
    return BlockwiseWeight(
        weight=values.reshape(weight.shape).contiguous(),
        weight_scale_inv=scale.reshape(_scale_shape(weight)),
    )


def _next_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Round positive float32 values up to powers of two, by their bits: log2 is off by one just above a power."""
    bits = scale.view(torch.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF).ne(0)
    return (exponent.clamp(1, 254) << 23).to(torch.int32).view(torch.float32)


def _cast_by_triton(
    weights: Mapping[str, torch.Tensor], power_of_two: bool
) -> tuple[dict[str, BlockwiseWeight], torch.Tensor]:
    """Cast weights that lie on one device; the flags are 1 where a weight is not finite, in the order of the names."""
    # Here because triton comes with torch's CUDA builds only, and a train node on CPUs casts as well.
    from nemo_rl_core.fp8 import blockwise_triton

    casts, jobs = {}, []
    for name, weight in weights.items():
        cast = casts[name] = BlockwiseWeight(
            weight=torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device),
            weight_scale_inv=torch.empty(_scale_shape(weight), dtype=torch.float32, device=weight.device),
        )
        source = weight if weight.stride(-1) == 1 else weight.contiguous()
        jobs.append(blockwise_triton.Job(source=source, values=cast.weight, scales=cast.weight_scale_inv))
    return casts, blockwise_triton.cast(jobs, power_of_two=power_of_two)


def _refuse_non_finite(
    casts: Mapping[str, BlockwiseWeight], flags: Mapping[torch.device, list[tuple[list[str], torch.Tensor]]]
) -> None:
    """Ask each device once which weights were not finite, and name the first with its block."""
    bad = []
    for parts in flags.values():
        names = [name for part, _ in parts for name in part]
        told = torch.cat([flag.to(torch.int32) for _, flag in parts]).tolist()
        bad += [name for name, flag in zip(names, told, strict=True) if flag]
    if not bad:
        return
    scale = casts[bad[0]].weight_scale_inv
    blocks = (~torch.isfinite(scale)).nonzero().tolist()
    *expert, down, across = blocks[0]
    place = f"rows from {down * BLOCK}, columns from {across * BLOCK}" + (f" of expert {expert[0]}" if expert else "")
    more = f"; the same holds for {len(bad) - 1} more, among them {bad[1]!r}" if len(bad) > 1 else ""
    raise ModelError(
        f"weight {bad[0]!r} has an infinity or a NaN in {len(blocks)} of its {scale.numel()} blocks, first in block "
        f"{blocks[0]} ({place}){more}; a scale can't be made of it: look for the training step that made it, nothing "
        f"was cast"
    )


def _scale_shape(weight: torch.Tensor) -> tuple[int, ...]:
    *experts, rows, columns = weight.shape
    return (*experts, -(-rows // BLOCK), -(-columns // BLOCK))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(tensor: torch.Tensor) -> str:
    return f"{_dtype_name(tensor.dtype)} {list(tensor.shape)}"
