# SPDX-License-Identifier: Apache-2.0
"""The description of a model's attention, from its Hugging Face configuration.

The families are those whose live scale names were found by building tiny models of them in vLLM 0.32; which layers have
a cache is read from the configuration. Nothing is guessed: an architecture that was not tried, a kind of layer that is
not known, or a field that is not there is refused, and the way out is a ``ModelDescription`` written by hand. No default
of transformers is repeated here, so a terse ``config.json`` has to go through ``AutoConfig`` first.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nemo_rl_core.errors import ModelError
from nemo_rl_core.fp8.model_description import AttentionBlock, CacheKind, Delivery, ModelDescription

__all__ = ["SUPPORTED_ARCHITECTURES", "describe_model"]

_WAY_OUT = "describe the model by hand with nemo_rl_core.fp8.model_description.ModelDescription"
_AUTO = "pass the object that AutoConfig.from_pretrained gives, which has the defaults filled in"

# Kinds of layers as transformers writes them in `layer_types` and `layers_block_type`.
_WITH_CACHE = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
_WITHOUT_CACHE = frozenset({"linear_attention", "mamba", "moe", "mlp"})
# Letters of Nemotron-H's pattern: Mamba, MLP, experts, attention.
_LETTERS = MappingProxyType({"M": "mamba", "-": "mlp", "E": "moe", "*": "attention"})


@dataclass(frozen=True, kw_only=True)
class _Section:
    """The part of a configuration that describes the text model.

    Attributes:
        architecture: For messages.
        where: Path of the section with its dot, empty at the top.
        fields: What stands there.
    """

    architecture: str
    where: str
    fields: Mapping[str, Any]

    def problem(self, what: str, way_out: str | None = None) -> ModelError:
        ways = f"{way_out}, or {_WAY_OUT}" if way_out else _WAY_OUT
        return ModelError(f"the configuration of {self.architecture}: {what}; {ways}")

    def count(self, *names: str, least: int = 1) -> int:
        """Return the whole number that stands under the first of the names that is there."""
        name = next((name for name in names if self.fields.get(name) is not None), None)
        if name is None:
            raise self.problem(f"{self.where}{names[0]} is missing", _AUTO)
        value = self.fields[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.problem(f"{self.where}{name} must be a whole number of at least {least}, got {value!r}")
        return value

    def kinds(self, name: str) -> tuple[str, ...] | None:
        """Return the list of layer kinds under a name, None where there is none."""
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise self.problem(f"{self.where}{name} must be a list with the kind of each layer, got {value!r}")
        for kind in value:
            if not isinstance(kind, str) or kind not in _WITH_CACHE | _WITHOUT_CACHE:
                known = ", ".join(sorted(_WITH_CACHE | _WITHOUT_CACHE))
                raise self.problem(f"{self.where}{name} has the kind of layer {kind!r}; known are {known}")
        return tuple(value)


#: Layers with attention, and pairs (reader, writer) of those that share a cache.
_Layers = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]


def _every_layer(section: _Section, *counts: str) -> _Layers:
    """All layers have attention; a list of kinds, where there is one, has to agree."""
    number = section.count(*(counts or ("num_hidden_layers",)))
    kinds = section.kinds("layer_types")
    if kinds is not None and len(kinds) != number:
        raise section.problem(f"{section.where}layer_types has {len(kinds)} entries for {number} layers")
    if strange := [kind for kind in kinds or () if kind not in _WITH_CACHE]:
        raise section.problem(
            f"{section.where}layer_types has {strange[0]!r}, but this family was known with attention in every layer"
        )
    return tuple(range(number)), ()


def _transformer_layers(section: _Section) -> _Layers:
    return _every_layer(section, "n_layer", "num_hidden_layers")


def _decoder_layers(section: _Section) -> _Layers:
    return _every_layer(section, "decoder_layers")


def _typed_layers(section: _Section) -> _Layers:
    """Qwen3-Next and its kin: a list of kinds, or every n-th layer has full attention."""
    number = section.count("num_hidden_layers")
    kinds = section.kinds("layer_types")
    if kinds is None:
        interval = section.count("full_attention_interval")
        return tuple(range(interval - 1, number, interval)), ()
    return _with_cache(section, "layer_types", kinds, number), ()


def _nemotron_layers(section: _Section) -> _Layers:
    """Nemotron-H: a list of kinds, or a string with a letter for each layer."""
    forms = {name: kinds for name in ("layers_block_type", "layer_types") if (kinds := section.kinds(name))}
    if pattern := section.fields.get("hybrid_override_pattern"):
        if not isinstance(pattern, str) or set(pattern) - set(_LETTERS):
            raise section.problem(
                f"{section.where}hybrid_override_pattern must have a letter of {''.join(_LETTERS)!r} for each layer, "
                f"got {pattern!r}"
            )
        forms["hybrid_override_pattern"] = tuple(_LETTERS[letter] for letter in pattern)
    if not forms:
        raise section.problem(f"{section.where}hybrid_override_pattern and layers_block_type are missing", _AUTO)
    number = len(next(iter(forms.values())))
    if section.fields.get("num_hidden_layers") is not None:
        number = section.count("num_hidden_layers")
    found = {name: _with_cache(section, name, kinds, number) for name, kinds in forms.items()}
    if len(set(found.values())) > 1:
        raise section.problem(f"{' and '.join(found)} disagree on the layers with attention")
    return next(iter(found.values())), ()


def _jamba_layers(section: _Section) -> _Layers:
    """Jamba: every n-th layer, counted from an offset."""
    number, period = section.count("num_hidden_layers"), section.count("attn_layer_period")
    offset = section.count("attn_layer_offset", least=0)
    return tuple(range(offset, number, period)) if offset < period else (), ()


def _shared_by_kind(section: _Section) -> _Layers:
    """Gemma 4: the last layers read the cache of the last layer of their kind that has its own."""
    kinds, first = _kinds_and_first_shared(section)
    pairs = []
    for reader in range(first, len(kinds)):
        earlier = [layer for layer in range(first) if kinds[layer] == kinds[reader]]
        if not earlier:
            raise section.problem(
                f"layer {reader} ({kinds[reader]}) shares a cache, and none of the first {first} layers is of its kind"
            )
        pairs.append((reader, earlier[-1]))
    return tuple(range(len(kinds))), tuple(pairs)


def _shared_gemma3n(section: _Section) -> _Layers:
    """Gemma 3n: as Gemma 4 in transformers, while vLLM counts back one layer (full) or two (sliding)."""
    layers, pairs = _shared_by_kind(section)
    kinds, first = _kinds_and_first_shared(section)
    for reader, writer in pairs:
        in_vllm = first - (2 if kinds[reader] == "sliding_attention" else 1)
        if writer != in_vllm:
            raise section.problem(
                f"layer {reader} reads the cache of layer {writer} in transformers and of layer {in_vllm} in vLLM; the "
                f"two agree where the last layers before the shared ones are a sliding and a full one",
                "change layer_types or num_kv_shared_layers, since no scales make these two models the same",
            )
    return layers, pairs


def _kinds_and_first_shared(section: _Section) -> tuple[tuple[str, ...], int]:
    """Return the layers' kinds, and the number of the first layer without a cache of its own."""
    layers, _ = _every_layer(section)
    shared = section.count("num_kv_shared_layers", least=0)
    if shared >= len(layers):
        raise section.problem(
            f"{section.where}num_kv_shared_layers must leave a layer with a cache, got {shared} of {len(layers)}"
        )
    kinds = section.kinds("layer_types")
    if kinds is None:
        raise section.problem(f"{section.where}layer_types is missing", _AUTO)
    return kinds, len(layers) - shared


def _with_cache(section: _Section, name: str, kinds: tuple[str, ...], number: int) -> tuple[int, ...]:
    if len(kinds) != number:
        raise section.problem(f"{section.where}{name} has {len(kinds)} entries for {number} layers")
    return tuple(layer for layer, kind in enumerate(kinds) if kind in _WITH_CACHE)


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What is the same for all models of an architecture.

    Attributes:
        model_type: The configuration's own type: what its fields mean.
        prefix: Live path before a layer's number.
        modules: Live attention modules inside a layer.
        layers: Reads layers and sharing.
        text: None where the text model's fields stand at the top; ``nested`` where they stand in ``text_config``;
            ``either`` where older configurations have them at the top.
        text_types: Types that the text model may have; empty for any.
        cache: As in ``AttentionBlock``.
        delivery: As in ``AttentionBlock``.
    """

    model_type: str
    prefix: str = "model.layers"
    modules: tuple[str, ...] = ("self_attn.attn",)
    layers: Callable[[_Section], _Layers] = _every_layer
    text: str | None = None
    text_types: tuple[str, ...] = ()
    cache: CacheKind = "kv"
    delivery: Delivery = "load"


_MULTIMODAL: Any = MappingProxyType({"prefix": "language_model.model.layers", "text": "nested"})

_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "LlamaForCausalLM": _Family(model_type="llama"),
        "Phi3ForCausalLM": _Family(model_type="phi3"),
        "GraniteForCausalLM": _Family(model_type="granite"),
        "Qwen2ForCausalLM": _Family(model_type="qwen2"),
        "Qwen3ForCausalLM": _Family(model_type="qwen3"),
        "Qwen3MoeForCausalLM": _Family(model_type="qwen3_moe"),
        "MixtralForCausalLM": _Family(model_type="mixtral"),
        "Glm4MoeForCausalLM": _Family(model_type="glm4_moe"),
        "GemmaForCausalLM": _Family(model_type="gemma"),
        "Gemma2ForCausalLM": _Family(model_type="gemma2"),
        "Gemma3ForCausalLM": _Family(model_type="gemma3_text"),
        "Gemma3nForCausalLM": _Family(model_type="gemma3n_text", layers=_shared_gemma3n),
        "Gemma4ForCausalLM": _Family(model_type="gemma4_text", layers=_shared_by_kind),
        "FalconH1ForCausalLM": _Family(model_type="falcon_h1"),
        "GptOssForCausalLM": _Family(model_type="gpt_oss", modules=("attn.attn",)),
        "NemotronHForCausalLM": _Family(model_type="nemotron_h", modules=("mixer.attn",), layers=_nemotron_layers),
        "Qwen3NextForCausalLM": _Family(model_type="qwen3_next", layers=_typed_layers),
        "Qwen3_5ForConditionalGeneration": _Family(model_type="qwen3_5", layers=_typed_layers, **_MULTIMODAL),
        "Qwen2_5_VLForConditionalGeneration": _Family(
            model_type="qwen2_5_vl", prefix="language_model.model.layers", text="either"
        ),
        "Qwen3VLForConditionalGeneration": _Family(model_type="qwen3_vl", **_MULTIMODAL),
        "Gemma3ForConditionalGeneration": _Family(model_type="gemma3", **_MULTIMODAL),
        "LlavaForConditionalGeneration": _Family(model_type="llava", text_types=("llama",), **_MULTIMODAL),
        "Llama4ForConditionalGeneration": _Family(model_type="llama4", **_MULTIMODAL),
        "GPT2LMHeadModel": _Family(
            model_type="gpt2", prefix="transformer.h", modules=("attn.attn",), layers=_transformer_layers
        ),
        "FalconForCausalLM": _Family(
            model_type="falcon", prefix="transformer.h", modules=("self_attention.attn",), layers=_transformer_layers
        ),
        "BloomForCausalLM": _Family(
            model_type="bloom", prefix="transformer.h", modules=("self_attention.attn",), layers=_transformer_layers
        ),
        "OPTForCausalLM": _Family(model_type="opt", prefix="model.decoder.layers"),
        "WhisperForConditionalGeneration": _Family(
            model_type="whisper",
            prefix="model.decoder.layers",
            modules=("self_attn.attn", "encoder_attn.attn"),
            layers=_decoder_layers,
        ),
        "DeepseekV3ForCausalLM": _Family(
            model_type="deepseek_v3", modules=("self_attn.mla_attn.mla_attn",), cache="latent", delivery="set"
        ),
        "JambaForCausalLM": _Family(model_type="jamba", modules=("attn",), layers=_jamba_layers, delivery="set"),
    }
)

#: Architectures that ``describe_model`` knows.
SUPPORTED_ARCHITECTURES: tuple[str, ...] = tuple(_FAMILIES)


def describe_model(config: object, *, architecture: str | None = None) -> ModelDescription:
    """Describe the attention of a model in a live engine.

    Args:
        config: A configuration of transformers, or the mapping in a ``config.json``.
        architecture: Class of the model, for a configuration that names none (of a model never saved).

    Returns:
        Which modules have a KV cache and scales, in the names of vLLM 0.32.

    Raises:
        ModelError: If the architecture is none of ``SUPPORTED_ARCHITECTURES``, a field that decides is missing or
            malformed, or the fields contradict each other.
    """
    fields = _fields(config, "config")
    architecture = _architecture(fields, architecture)
    family = _FAMILIES[architecture]
    if fields.get("model_type") != family.model_type:
        raise ModelError(
            f"{architecture} was tried with model_type {family.model_type!r}, got {fields.get('model_type')!r}, whose "
            f"fields may mean something else; {_WAY_OUT}"
        )
    section = _text_section(fields, architecture, family)
    if family.cache == "latent":
        section.count("kv_lora_rank")
    layers, shares = family.layers(section)
    if not layers:
        raise section.problem("none of its layers has attention, so there is no KV cache to scale")
    return ModelDescription(
        architecture=architecture,
        blocks=tuple(
            AttentionBlock(
                prefix=family.prefix,
                module=module,
                layers=layers,
                shares=shares,
                cache=family.cache,
                delivery=family.delivery,
            )
            for module in family.modules
        ),
    )


def _fields(config: object, what: str) -> Mapping[str, Any]:
    """Return a configuration as a mapping; transformers' own classes have ``to_dict``."""
    if isinstance(config, Mapping):
        return config
    to_dict = getattr(config, "to_dict", None)
    fields = to_dict() if callable(to_dict) and not isinstance(config, type) else None
    if not isinstance(fields, Mapping):
        raise ModelError(
            f"{what} must be a configuration of transformers or the mapping of a config.json, got "
            f"{type(config).__name__}; {_WAY_OUT}"
        )
    return fields


def _architecture(fields: Mapping[str, Any], architecture: str | None) -> str:
    """Return the one architecture that the caller or the configuration names."""
    named = fields.get("architectures")
    if architecture is None:
        if not isinstance(named, (list, tuple)) or len(named) != 1:
            raise ModelError(
                f"architectures must name one class, since names follow the class, got {named!r}; pass "
                f"architecture='...', e.g. type(model).__name__"
            )
        architecture = named[0]
    elif named and architecture not in named:
        raise ModelError(
            f"architecture is {architecture!r}, but the configuration names {named!r}, which the engine builds; pass "
            f"the same one, or none"
        )
    if architecture not in _FAMILIES:
        close = difflib.get_close_matches(str(architecture), _FAMILIES, n=1)
        hint = f" (the nearest is {close[0]})" if close else ""
        raise ModelError(
            f"the scale names of {architecture!r} were never tried{hint}; known are {', '.join(_FAMILIES)}. For "
            f"another model, {_WAY_OUT}"
        )
    return architecture


def _text_section(fields: Mapping[str, Any], architecture: str, family: _Family) -> _Section:
    """Return the fields of the text model."""
    nested = fields.get("text_config") if family.text else None
    if nested is None:
        if family.text == "nested":
            raise ModelError(f"the configuration of {architecture}: text_config is missing; {_AUTO}, or {_WAY_OUT}")
        return _Section(architecture=architecture, where="", fields=fields)
    text = _fields(nested, "text_config")
    if family.text_types and text.get("model_type") not in family.text_types:
        raise ModelError(
            f"{architecture} was tried with a text model of type {', '.join(family.text_types)}, got "
            f"{text.get('model_type')!r}, whose modules may have other names; {_WAY_OUT}"
        )
    return _Section(architecture=architecture, where="text_config.", fields=text)
