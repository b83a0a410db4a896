# SPDX-License-Identifier: Apache-2.0
"""Weights that travel in FP8: which matrices a model has, and how each of its tensors is sent."""

from collections.abc import Iterator

import torch

from nemo_rl_core.errors import ModelError
from nemo_rl_core.fp8.blockwise import BLOCK, cast_many
from nemo_rl_core.protocols.settings import Fp8Weights, ModelSettings
from nemo_rl_core.refit.manifest import TensorSpec
from nemo_rl_core.workers.checkpoint_names import CheckpointNames, live_tensors
from nemo_rl_core.workers.models import empty_model

__all__ = ["Fp8Caster", "matrix_shapes"]

_WEIGHT, _SCALE = ".weight", ".weight_scale_inv"


#: A stack of matrices is at least so wide; what is narrower is the kernel of a convolution.
_LEAST_WIDTH = 16


def matrix_shapes(settings: ModelSettings) -> dict[str, tuple[int, ...]]:
    """Return the shape of every matrix of a model by its module's name, as in a checkpoint; loads no weights.

    Linear layers, embeddings, heads and router gates have one, [N, K]; a matrix that is no module's ``weight`` is left out.
    Experts that a checkpoint too has in one tensor come with its name and three dimensions, [E, N, K].

    Raises:
        ModelError: If the model cannot be built from its config.
    """
    try:
        model = empty_model(settings)
    except ModelError:
        raise
    except Exception as error:  # transformers raises whatever a config's values happen to break
        raise ModelError(f"no model can be built from this config: {type(error).__name__}: {error}") from error
    names, found = CheckpointNames(model), {}
    for live, tensor in live_tensors(model):
        for name, part in names.parts(live, tensor):
            is_stack = part.ndim == 3 and min(part.shape[1:]) >= _LEAST_WIDTH
            if (name.endswith(_WEIGHT) and part.ndim == 2) or is_stack:
                found[name.removesuffix(_WEIGHT)] = tuple(part.shape)
    return found


class Fp8Caster:
    """Turns each tensor that a refit sends into what travels: itself, or a cast weight and the scales of its blocks."""

    def __init__(self, weights: Fp8Weights | None) -> None:
        """Remember what is cast; None casts nothing."""
        self._modules = frozenset(weights.cast if weights else ())
        self._power_of_two = bool(weights and weights.power_of_two)

    def specs(self, spec: TensorSpec) -> Iterator[TensorSpec]:
        """Yield what of a tensor travels: a weight that is cast, and its scales right after it."""
        module = self._module_of(spec.name)
        if module is None:
            yield spec
            return
        rows, columns = spec.shape
        scales = (-(-rows // BLOCK), -(-columns // BLOCK))
        yield TensorSpec(name=spec.name, shape=spec.shape, dtype="float8_e4m3fn")
        yield TensorSpec(name=module + _SCALE, shape=scales, dtype="float32")

    def tensors(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same as `specs`, with values.

        Raises:
            ModelError: If a weight that is cast holds an infinity or a NaN.
        """
        module = self._module_of(name)
        if module is None:
            yield name, tensor
        else:
            yield from cast_many({module: tensor}, power_of_two=self._power_of_two).items()

    def require(self, names: frozenset[str]) -> None:
        """Check that a model has all that is to be cast.

        Args:
            names: Names of the tensors that a refit sends.

        Raises:
            ModelError: If one is not there: it would be cast nowhere, and the engine would wait for it.
        """
        missing = sorted(module for module in self._modules if module + _WEIGHT not in names)
        if missing:
            raise ModelError(
                f"{missing[0]!r} is to be cast to FP8 ({len(missing)} such modules), but the model sends no weight of that "
                "name: the list was settled for another model; settle it for this one"
            )

    def _module_of(self, name: str) -> str | None:
        module = name.removesuffix(_WEIGHT)
        return module if module != name and module in self._modules else None
