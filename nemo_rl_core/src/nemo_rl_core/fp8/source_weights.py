# SPDX-License-Identifier: Apache-2.0
"""Which weights a calibration can run: plain ones, and FP8 ones that each have a ``weight_scale_inv``.

transformers leaves scales under other names aside without an error, and would run FP8 values as if they were the weights:
every scale that came out would be wrong. So other forms are refused, by what a folder says and by what its tensors are.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import ModelError

__all__ = ["require_usable_weights"]

_SCALE = "_scale_inv"
_OTHER_SCALES = ("weight_scale", "input_scale", "weight_scale_2", "weight_packed")
#: What packers leave beside or in ``config.json``.
_OTHER_CONFIG_FILES = ("hf_quant_config.json",)
_OTHER_CONFIG_KEYS = ("compression_config",)
_WAY_OUT = (
    "calibrate the model that it was made from, or give FP8 weights with quant_method 'fp8' and a weight_scale_inv for "
    "each of them"
)


def require_usable_weights(folder: Path, config: Mapping[str, Any], dtypes: Mapping[str, str]) -> None:
    """Refuse a quantised model whose weights would not be what its layers compute with.

    Args:
        folder: The model.
        config: Its ``config.json``.
        dtypes: Tensor to its dtype, as safetensors calls it.

    Raises:
        ModelError: If a file, a configuration or a tensor speaks of another quantisation than FP8 with
            ``weight_scale_inv``, or an FP8 weight and its scale are not both there.
    """
    where = f"{str(folder)!r}"
    is_fp8 = _is_fp8(where, config)
    for name in _OTHER_CONFIG_FILES:
        if (folder / name).exists():
            raise ModelError(
                f"{where} has {name!r}, so its weights are quantised in a way that cannot be run here; {_WAY_OUT}"
            )
    for key in _OTHER_CONFIG_KEYS:
        if config.get(key):
            raise ModelError(
                f"{where} has {key!r} in its config.json, so its weights are quantised in a way that cannot be run here; "
                f"{_WAY_OUT}"
            )
    for name, dtype in dtypes.items():
        if name.endswith(_OTHER_SCALES):
            raise ModelError(
                f"{where} has the tensor {name!r}: transformers would leave it aside, and run its weight unscaled; {_WAY_OUT}"
            )
        if name.endswith(_SCALE):
            weight = name.removesuffix(_SCALE)
            if not is_fp8 or dtypes.get(weight) != "F8_E4M3":
                raise ModelError(
                    f"{where} has the scale {name!r}, but {_why_not(is_fp8, weight, dtypes.get(weight))}; {_WAY_OUT}"
                )
        elif dtype.startswith(("F8_", "F6_", "F4")) and not (is_fp8 and dtype == "F8_E4M3" and name + _SCALE in dtypes):
            raise ModelError(
                f"{where} has the tensor {name!r} in {dtype}, and it is run only with a {name + _SCALE!r} beside it under "
                f"quant_method 'fp8'; {_WAY_OUT}"
            )


def _is_fp8(where: str, config: Mapping[str, Any]) -> bool:
    """Whether the configuration says FP8; another quantisation is refused."""
    text_config = config.get("text_config")
    if isinstance(text_config, dict) and text_config.get("quantization_config"):
        raise ModelError(
            f"{where} has a quantization_config inside of text_config, which transformers does not read; {_WAY_OUT}"
        )
    quantization = config.get("quantization_config")
    if not quantization:
        return False
    if not isinstance(quantization, dict):
        raise ModelError(f"{where} must have an object as quantization_config, got {quantization!r:.80}; {_WAY_OUT}")
    method = quantization.get("quant_method")
    if method != "fp8":
        raise ModelError(
            f"{where} is quantised by {method!r:.80}; scales can be added to models without quantisation and to those "
            f"with quant_method 'fp8'. Calibrate the model that it was made from, and serve that one"
        )
    return True


def _why_not(is_fp8: bool, weight: str, dtype: str | None) -> str:
    if not is_fp8:
        return "no quantization_config with quant_method 'fp8' in its config.json"
    return f"no {weight!r}" if dtype is None else f"{weight!r} is {dtype}, not F8_E4M3"
