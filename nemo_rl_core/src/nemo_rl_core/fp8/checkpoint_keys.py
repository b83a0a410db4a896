# SPDX-License-Identifier: Apache-2.0
"""What vLLM 0.32 does with a scale key of a checkpoint: it loads, is dropped, stops the load, or was never tried.

Checkpoints spell scale names in many ways. Each way below was tried on the real loaders, family by family, and the
engine's answers differ: a dropped key leaves the scale at 1.0 with one warning or none, a refused one ends the load half
way. So a key is looked up here before anything is sent. What is not listed is ``unknown``. A name from
``ModelDescription.checkpoint_names`` loads in every family but Falcon, where it depends on the config.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, cast, get_args

from nemo_rl_core.errors import ScaleNameError
from nemo_rl_core.fp8.model_description import AttentionBlock, ModelDescription

__all__ = ["Fate", "KeyFate", "ScaleConfig", "fate_of_key"]

#: ``loads``: into ``KeyFate.target``. ``dropped``: the engine runs on without it. ``refused``: the engine raises in the
#: middle of the load. ``stale``: half of the live value is written, if the engine runs already. ``unknown``: never tried.
Fate = Literal["loads", "dropped", "refused", "stale", "unknown"]

#: The engine's quantisation config that makes the scale parameters.
ScaleConfig = Literal["fp8", "modelopt", "compressed-tensors"]

_KEY = re.compile(r"(?P<prefix>[A-Za-z_][\w.]*?)\.(?P<layer>0|[1-9][0-9]{0,8})\.(?P<rest>[\w.]+)", re.ASCII)

_STANDARD = frozenset(
    {
        *("LlamaForCausalLM", "Phi3ForCausalLM", "GraniteForCausalLM", "Qwen2ForCausalLM"),
        *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM", "Glm4MoeForCausalLM"),
    }
)
_QWEN3 = frozenset({"Qwen3ForCausalLM"})
_GLM4_MOE = frozenset({"Glm4MoeForCausalLM"})
_GEMMA_SHARED = frozenset({"Gemma3nForCausalLM", "Gemma4ForCausalLM"})
_GPT_OSS = frozenset({"GptOssForCausalLM"})
_NEMOTRON = frozenset({"NemotronHForCausalLM"})
_DECODERS = frozenset({"OPTForCausalLM", "WhisperForConditionalGeneration"})
_WHISPER = frozenset({"WhisperForConditionalGeneration"})
_FALCON_BLOOM = frozenset({"FalconForCausalLM", "BloomForCausalLM"})
_GPT2 = frozenset({"GPT2LMHeadModel"})
_QWEN3_5 = frozenset({"Qwen3_5ForConditionalGeneration"})
_NEW_PREFIX = _QWEN3_5 | {
    "Qwen3VLForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
}
_OLD_PREFIX_TOO = frozenset({"Qwen2_5_VLForConditionalGeneration", "Llama4ForConditionalGeneration"})
_NEXT = frozenset({"Qwen3NextForCausalLM"})
_NOT_NEMO_RL = _NEMOTRON | _GPT2 | {"Qwen3VLForConditionalGeneration", "FalconForCausalLM", "OPTForCausalLM"}
# Their mapper renames `.k_proj` before it looks at suffixes.
_STACKED_FIRST = (
    _DECODERS
    | _NEMOTRON
    | frozenset({"GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "FalconH1ForCausalLM"})
)
_MLA = frozenset({"DeepseekV3ForCausalLM"})
_JAMBA = frozenset({"JambaForCausalLM"})
# Their attention is built without the type of the cache; only a compressed-tensors config tells it in another way.
_CACHE_STAYS = frozenset({"FalconForCausalLM"})

_MODEL, _NESTED = "model.layers", "model.language_model.layers"


@dataclass(frozen=True, kw_only=True)
class KeyFate:
    """What becomes of one key.

    Attributes:
        fate: See ``Fate``.
        target: The live name that is written where the fate is ``loads``, else None.
        why: One line for people.
    """

    fate: Fate
    target: str | None = None
    why: str


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """One observation.

    Attributes:
        families: Architectures in which it was made.
        rest: Pattern of what follows the layer's number; its group ``kind`` is q, k, v or prob.
        fate: One for all configs, or by config; a config that is not there was not tried.
        why: The reason.
        prefix: What stands before the number; None for the live prefix.
        kind: The kind where the pattern has no group for it.
        absent: Whether it is about layers that the description does not have; None for any layer.
    """

    families: frozenset[str]
    rest: str
    fate: Fate | Mapping[str, Fate]
    why: str
    prefix: str | None = None
    kind: str | None = None
    absent: bool | None = False


_NOT_MAPPED = "no rule of the loader takes this form"
_PACKED_FIRST = "the projection is renamed to qkv_proj before the suffix is looked at"
_RENAMED = "renamed to the live name"
# The forms that NeMo-RL sends for every layer of every model.
_TRIPLE = r"self_attn\.(?:attn\.q|(?P<kind>[kv]))_scale"
_SHORT = r"self_attn\.(?P<kind>[kv])_scale"
_PROB_BY_CONFIG: Mapping[str, Fate] = MappingProxyType(
    {"fp8": "loads", "modelopt": "loads", "compressed-tensors": "refused"}
)

# The first that fits counts. Live names come before all of these.
_RULES: tuple[_Rule, ...] = (
    _Rule(families=_STANDARD, rest=r"self_attn\.(?P<kind>[qkv])_scale", fate="loads", why=_RENAMED),
    _Rule(families=_STANDARD, rest=r"self_attn\.[kv]_proj\.(?P<kind>[kv])_scale", fate="loads", why=_RENAMED),
    _Rule(families=_STANDARD, rest=r"self_attn\.q_proj\.(?P<kind>q)_scale", fate="refused", why=_PACKED_FIRST),
    _Rule(
        families=_QWEN3,
        rest=r"self_attn\.(?P<kind>[qkv])_proj\.output_scale",
        fate={"fp8": "loads", "modelopt": "refused", "compressed-tensors": "refused"},
        why="only the Fp8 config maps output_scale",
    ),
    _Rule(
        families=_STANDARD,
        rest=r"self_attn\.(?P<kind>[qkv])_proj\.output_scale",
        fate={"fp8": "loads"},
        why="only the Fp8 config maps output_scale",
    ),
    _Rule(families=_STANDARD, rest=r"self_attn\.(?:qk)?qkv_proj\.(?P<kind>[kv])_scale", fate="loads", why=_RENAMED),
    _Rule(families=_STANDARD, rest=r"self_attn\.kv_scale", kind="k", fate="loads", why="becomes k; v is set to k"),
    _Rule(families=_STANDARD, rest=r"self_attn\.attn\.kv_scale", fate="refused", why="mapped to a module not there"),
    _Rule(families=_STANDARD, rest=r"self_attn\.prob_scale", fate="refused", why=_NOT_MAPPED),
    _Rule(
        families=_STANDARD,
        rest=r"self_attn\.attn\.(?P<kind>prob)_scale",
        fate=_PROB_BY_CONFIG,
        why="a compressed-tensors config makes no prob_scale",
    ),
    _Rule(
        families=_STANDARD,
        rest=r"self_attn\.(?P<kind>prob)_output_scale",
        fate={"fp8": "loads", "modelopt": "refused"},
        why="only the Fp8 config maps output scales",
    ),
    _Rule(families=_STANDARD, rest=r"self_attn\.(?P<kind>q)\.scale", fate="loads", why=_RENAMED),
    _Rule(families=_STANDARD, rest=r"self_attn\.(?P<kind>[kv])_cache\.scale", fate="loads", why=_RENAMED),
    _Rule(
        families=_GLM4_MOE,
        rest=r"self_attn\.k_zero_point",
        fate={"fp8": "refused", "compressed-tensors": "dropped"},
        why="this loader knows no zero points where the config makes none",
    ),
    _Rule(
        families=_STANDARD,
        rest=r"self_attn\.k_zero_point",
        fate={"fp8": "dropped", "compressed-tensors": "dropped"},
        why="zero points are not used",
    ),
    _Rule(
        families=_STANDARD,
        rest=r"self_attn\.attn\._k_scale",
        fate="stale",
        why="writes the buffer and leaves its copies, which some kernels read, behind",
    ),
    # What comes after the last layer of a GLM-4-MoE may be a layer for multi-token prediction, which is passed over.
    _Rule(families=_STANDARD - _GLM4_MOE, rest=_SHORT, absent=True, fate="refused", why="the model has no such module"),
    _Rule(
        families=_GPT_OSS,
        rest=r"self_attn\.(?:[kv]_proj\.)?(?P<kind>[kv])_scale",
        absent=True,
        fate="dropped",
        why="this loader passes over what it does not find",
    ),
    _Rule(families=_GPT_OSS, rest=r"self_attn\.(?:k_proj\.)?(?P<kind>k)_scale", fate="loads", why=_RENAMED),
    _Rule(families=_GPT_OSS, rest=r"self_attn\.(?P<kind>v)_scale", fate="loads", why=_RENAMED),
    _Rule(families=_GPT_OSS, rest=r"self_attn\.attn\.(?P<kind>q)_scale", fate="loads", why=_RENAMED),
    _Rule(families=_GPT_OSS, rest=r"self_attn\.(?P<kind>k)_proj\.output_scale", fate={"fp8": "loads"}, why=_RENAMED),
    _Rule(
        families=_GPT_OSS,
        rest=r"self_attn\.prob(?:_output)?_scale|(?:self_attn|attn)\.attn\._k_scale",
        fate="dropped",
        why="this loader passes over what it does not find",
    ),
    _Rule(
        families=_NEMOTRON,
        prefix="backbone.layers",
        rest=r"mixer\.(?:(?P<kind>[qkv])_scale|k_proj\.k_scale)",
        kind="k",
        fate="loads",
        why=_RENAMED,
    ),
    _Rule(families=_NEMOTRON, rest=r"mixer\.(?P<kind>[kv])_scale", fate="loads", why=_RENAMED),
    _Rule(families=_NEMOTRON, rest=r"mixer\.qkv_proj\.[kv]_scale", fate="refused", why=_PACKED_FIRST),
    _Rule(families=_STACKED_FIRST, rest=r"\w+\.k_proj\.output_scale", fate={"fp8": "refused"}, why=_PACKED_FIRST),
    _Rule(
        families=_GPT2,
        rest=r"attn\.[kv]_scale",
        fate="refused",
        why="a block called attn is taken for the engine's own module; use the live name",
    ),
    _Rule(families=_FALCON_BLOOM, rest=r"self_attention\.(?P<kind>[kv])_scale", fate="loads", why=_RENAMED),
    _Rule(families=_DECODERS, rest=_SHORT, fate="loads", why=_RENAMED),
    _Rule(families=_WHISPER, rest=r"encoder_attn\.(?P<kind>[kv])_scale", fate="loads", why=_RENAMED),
    _Rule(families=_WHISPER, rest=r"encoder_attn\.k_proj\.k_scale", fate="refused", why=_PACKED_FIRST),
    _Rule(families=_NEXT, rest=_TRIPLE, absent=True, fate="refused", why="linear attention has no scales"),
    _Rule(families=_QWEN3_5, rest=_SHORT, absent=True, fate="refused", why="linear attention has no scales"),
    _Rule(
        families=_QWEN3_5,
        prefix=_NESTED,
        rest=_SHORT,
        absent=True,
        fate="refused",
        why="linear attention has no scales",
    ),
    _Rule(
        families=_NOT_NEMO_RL,
        prefix=_MODEL,
        rest=_TRIPLE,
        absent=None,
        fate="refused",
        why="this model's attention has another path",
    ),
    _Rule(families=_NEW_PREFIX, prefix=_NESTED, rest=_SHORT, fate="loads", why=_RENAMED),
    _Rule(families=_NEW_PREFIX, prefix=_MODEL, rest=_SHORT, fate="refused", why="the text model has another prefix"),
    _Rule(
        families=frozenset({"Qwen2_5_VLForConditionalGeneration"}),
        prefix=_MODEL,
        rest=r"self_attn\.attn\.(?P<kind>q)_scale",
        fate="loads",
        why="its mapper keeps the old prefix",
    ),
    _Rule(families=_OLD_PREFIX_TOO, prefix=_MODEL, rest=_SHORT, fate="loads", why="its mapper keeps the old prefix"),
    _Rule(
        families=_GEMMA_SHARED | {"Gemma3ForCausalLM", "Qwen3NextForCausalLM"},
        rest=_SHORT,
        fate="loads",
        why=_RENAMED,
    ),
    _Rule(
        families=_MLA,
        rest=r"self_attn\.mla_attn\.mla_attn\.(?P<kind>prob)_scale",
        fate={"modelopt": "loads", "fp8": "refused", "compressed-tensors": "refused"},
        why="only the ModelOpt config makes scale parameters for MLA",
    ),
    _Rule(families=_MLA, rest=r"self_attn\.(?:\w+\.)*prob_scale", fate="refused", why=_NOT_MAPPED),
    _Rule(
        families=_MLA,
        rest=r"self_attn\.(?:\w+\.)*(?:[qkv]|kv)_scale",
        fate="dropped",
        why="every form, the live name among them, is mapped to a module that is not there",
    ),
    _Rule(
        families=_JAMBA,
        rest=r"(?:self_attn|attn)\.(?:\w+\.)*(?:[qkv]|kv|prob)_scale",
        fate="refused",
        why="its attention has no scale parameters under any config",
    ),
)


def fate_of_key(key: str, model: ModelDescription, *, config: ScaleConfig = "fp8") -> KeyFate:
    """Say what vLLM 0.32 does with a scale key.

    Args:
        key: A name as a checkpoint has it, e.g. ``model.layers.0.self_attn.k_proj.k_scale``.
        model: The description of the model that loads it.
        config: The engine's quantisation config.

    Raises:
        ScaleNameError: If the key has no layer number, or the config is another.
    """
    if config not in get_args(ScaleConfig):
        raise ScaleNameError(f"config must be one of {', '.join(get_args(ScaleConfig))}, got {config!r}")
    match = _KEY.fullmatch(key) if isinstance(key, str) else None
    if match is None:
        raise ScaleNameError(
            f"a scale key is '<prefix>.<layer number>.<path>' in ASCII, got {key!r}; look up single keys of a checkpoint"
        )
    found = _fate(key, match["prefix"], int(match["layer"]), match["rest"], model, config)
    reaches_cache = found.target is not None and found.target.endswith((".k_scale", ".v_scale"))
    if reaches_cache and model.architecture in _CACHE_STAYS and config != "compressed-tensors":
        why = f"under a {config} config this family's KV cache stays in the model's dtype, so nothing reads the scale"
        return KeyFate(fate="dropped", why=why)
    return found


def _fate(key: str, prefix: str, layer: int, rest: str, model: ModelDescription, config: ScaleConfig) -> KeyFate:
    loads_by_name = all(block.delivery == "load" for block in model.blocks)
    if loads_by_name and key in model.names(include_q=True):
        return KeyFate(fate="loads", target=key, why="the live name itself")
    for block in model.blocks:
        for rule in _RULES:
            if model.architecture not in rule.families or prefix != (rule.prefix or block.prefix):
                continue
            found = re.fullmatch(rule.rest, rest, re.ASCII)
            # Two blocks in a layer: a rule's pattern may be about the other one.
            if found and rule.absent in (None, layer not in block.layers) and _is_about(block, model, rest):
                return _judged(rule, config, block, layer, found)
    return KeyFate(fate="unknown", why=f"this form was not tried with {model.architecture}; send the live name")


def _is_about(block: AttentionBlock, model: ModelDescription, rest: str) -> bool:
    return len(model.blocks) == 1 or rest.partition(".")[0] == block.module.partition(".")[0]


def _judged(rule: _Rule, config: ScaleConfig, block: AttentionBlock, layer: int, found: re.Match[str]) -> KeyFate:
    fate = rule.fate if isinstance(rule.fate, str) else rule.fate.get(config)
    if fate is None:
        return KeyFate(fate="unknown", why=f"not tried with a {config} config; send the live name")
    if fate != "loads":
        return KeyFate(fate=cast("Fate", fate), why=rule.why)
    kind = found.groupdict().get("kind") or rule.kind
    return KeyFate(fate="loads", target=f"{block.owner(layer)}.{kind}_scale", why=rule.why)
