# SPDX-License-Identifier: Apache-2.0
"""Which weights are cast to FP8: an ignore list resolved against the names of the modules that are there.

Sender and engine have to agree on this, module by module: a weight that one side casts and the other does not is
computed with scales that nobody set. So the list is resolved once, against real names, and it can't miss in silence:
every pattern says what it hit, and one that hits nothing is an error.

A pattern is one or more whole components of a name (``linear_attn``, ``mlp.down_proj``, ``layers.3``), matched anywhere
in it; ``*`` stands for any characters inside a component. Whole components, because as a substring ``mlp.gate`` would
take every ``mlp.gate_proj`` along, and ``layers.1`` also layer 10.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nemo_rl_core.errors import ConfigError

__all__ = ["FUSED", "IgnoreRules", "ResolvedLayers", "narrow_patterns", "resolve_ignored_layers"]

#: Modules that engines fuse into one, with the members that a checkpoint has; they have one precision.
FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
        "in_proj_ba": ("in_proj_b", "in_proj_a"),
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    }
)

# Last components. Their rounding moves the logits, or the choice of experts, of every token.
_HEADS = frozenset({"lm_head", "embed_out", "score"})
_EMBEDDINGS = re.compile(r"embed_tokens(_per_layer)?|embed_positions|embed_in|word_embeddings|wte|wpe|embeddings?")
# Any component: a router may be a module with a layer inside. ``gate_proj`` and ``gate_up_proj`` are no gates.
_ROUTER = re.compile(r"(.+_)?(gate|router)")
#: Gemma 3n's coefficients between its copies of the hidden state: its router's outputs times these.
_COEFFICIENTS = frozenset({"prediction_coefs", "correction_coefs"})
_EXPERT = re.compile(r"(.*\.experts)(?:\.[0-9]+)?\..+")
_LAYER = re.compile(r"(.+?)\.([0-9]+)\..+")
_PATTERN = re.compile(r"[A-Za-z0-9_*-]+(?:\.[A-Za-z0-9_*-]+)*")


@dataclass(frozen=True, kw_only=True)
class IgnoreRules:
    """What stays in bfloat16 beside what is never cast (heads, embeddings, router gates).

    Attributes:
        quantization_ignored_layer_kws: Patterns as this module's docstring says; a fused name (``qkv_proj``) stands for
            its members.
        num_first_layers_in_bf16: Layers from the front that stay.
        num_last_layers_in_bf16: Layers from the back that stay.
        layers_prefix: Path before a layer's number (``model.layers``), for models with several stacks; None where there
            is one.
    """

    quantization_ignored_layer_kws: tuple[str, ...] = ()
    num_first_layers_in_bf16: int = 0
    num_last_layers_in_bf16: int = 0
    layers_prefix: str | None = None

    def __post_init__(self) -> None:
        """Check the rules as far as that is possible without a model.

        Raises:
            ConfigError: If a pattern is malformed or stands there twice, or a number is no number from 0 on.
        """
        patterns = self.quantization_ignored_layer_kws
        if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ConfigError(
                f"quantization_ignored_layer_kws must be a list of texts, got {patterns!r}; write ['linear_attn']"
            )
        object.__setattr__(self, "quantization_ignored_layer_kws", tuple(patterns))
        for pattern in patterns:
            if not _PATTERN.fullmatch(pattern):
                raise ConfigError(
                    f"quantization_ignored_layer_kws holds {pattern!r}: a pattern is one or more whole components of a "
                    f"module's name with dots between them, such as 'mlp.down_proj', and '*' for any characters"
                )
            if list(patterns).count(pattern) > 1:
                raise ConfigError(f"quantization_ignored_layer_kws holds {pattern!r} twice; keep one")
        for field in ("num_first_layers_in_bf16", "num_last_layers_in_bf16"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{field} must be a number of layers, 0 or more, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class ResolvedLayers:
    """The answer for one model.

    Attributes:
        cast: Names of the modules whose weights are cast, in the order given.
        ignored: Names of the others, in the order given, each with the reason. Its keys are what an engine's ignore
            list has to hold.
        hits: Each pattern with the names that it hit.
    """

    cast: tuple[str, ...]
    ignored: Mapping[str, str]
    hits: Mapping[str, tuple[str, ...]]

    def report(self) -> str:
        """Return a few lines for a log: how many are cast, how many stay and why, and what each pattern hit."""
        lines = [f"FP8: {len(self.cast)} modules are cast, {len(self.ignored)} stay as they are"]
        reasons = list(self.ignored.values())
        lines += [f"  {reasons.count(reason):5d}  {reason}" for reason in dict.fromkeys(reasons)]
        lines += [f"  pattern {pattern!r} hit {len(names)}" for pattern, names in self.hits.items()]
        return "\n".join(lines)


def resolve_ignored_layers(
    modules: Iterable[str],
    rules: IgnoreRules | None = None,
    *,
    num_layers: int | None = None,
    fused: Mapping[str, tuple[str, ...]] = FUSED,
) -> ResolvedLayers:
    """Divide a model's linear modules into those whose weights are cast and those that stay.

    Args:
        modules: Names of all linear modules, embeddings and grouped experts, as ``named_modules()`` gives them on the
            train side; of the whole model, not of one stage of a pipeline.
        rules: What stays in bfloat16; None for what is never cast alone.
        num_layers: How many layers the model has; None counts them by the names.
        fused: Fused name to member names.

    Raises:
        ConfigError: If a pattern hits nothing; if one member of a fused module stays and another is cast; if the layers
            can't be counted or fewer are there than stay; or if nothing is left to cast.
    """
    rules = rules or IgnoreRules()
    names = tuple(dict.fromkeys(modules))
    if malformed := [name for name in names if not isinstance(name, str) or not name]:
        raise ConfigError(f"a module's name must be a text that is not empty, got {malformed[0]!r}")
    hits = {pattern: _hit(pattern, names, fused) for pattern in rules.quantization_ignored_layer_kws}
    ignored = {name: reason for name in names if (reason := _never_cast(name))}
    for pattern, found in hits.items():
        for name in found:
            ignored.setdefault(name, f"pattern {pattern!r}")
    for name, reason in _first_and_last(names, rules, num_layers).items():
        ignored.setdefault(name, reason)
    _require_whole_groups(names, ignored, fused)
    cast = tuple(name for name in names if name not in ignored)
    if names and not cast:
        raise ConfigError(
            f"nothing is left to cast: all {len(names)} modules stay as they are "
            f"({'; '.join(dict.fromkeys(ignored.values()))}); ignore less, or leave FP8 weights off"
        )
    return ResolvedLayers(
        cast=cast,
        ignored=MappingProxyType({name: ignored[name] for name in names if name in ignored}),
        hits=MappingProxyType(hits),
    )


def narrow_patterns(
    wanted: Iterable[str],
    names: Iterable[str],
    ignored: Iterable[str] = (),
    fused: Mapping[str, tuple[str, ...]] = FUSED,
) -> tuple[str, ...]:
    """Return the shortest patterns that hit some modules, whatever has one precision with them, and nothing else.

    Args:
        wanted: Names of the modules that are to stay.
        names: Names of all modules.
        ignored: Names of those that stay in any case, which a pattern may hit too.
        fused: Fused name to member names.
    """
    names, groups = tuple(names), {}
    for name in names:
        groups.setdefault(_group_of(name, fused), []).append(name)
    missing = dict.fromkeys(_group_of(name, fused) for name in wanted)
    may_hit = frozenset(ignored).union(*(groups[group] for group in missing))
    others = [f".{name}." for name in names if name not in may_hit]
    found = []
    while missing:
        group = next(iter(missing))
        pattern = next(tail for tail in _tails(group) if not _hits_any(tail, others, fused) or tail == group)
        found.append(pattern)
        for each in [each for each in missing if each == group or f".{each}".endswith(f".{pattern}")]:
            del missing[each]
    return tuple(found)


def _group_of(name: str, fused: Mapping[str, tuple[str, ...]]) -> str:
    """Return the name of what an engine keeps as one module: a layer's experts, a fused layer, or the module itself."""
    if match := _EXPERT.fullmatch(name):
        return match[1]
    parent, _, last = name.rpartition(".")
    whole = next((whole for whole, members in fused.items() if last in members), last)
    return f"{parent}.{whole}".lstrip(".")


def _tails(group: str) -> list[str]:
    """Return the ends of a name, from the shortest; none that begins with a number, or is ``experts`` alone."""
    parts = group.split(".")
    tails = [".".join(parts[start:]) for start in reversed(range(len(parts))) if not parts[start].isdigit()]
    return [tail for tail in tails if tail not in ("experts", group)] + [group]


def _hits_any(pattern: str, dotted: Iterable[str], fused: Mapping[str, tuple[str, ...]]) -> bool:
    """Say whether a pattern without a star hits one of the names, each of which stands between two dots."""
    spellings = [f".{spelling}." for spelling in _spellings(pattern, fused)]
    return any(spelling in name for name in dotted for spelling in spellings)


def _never_cast(name: str) -> str | None:
    """Return why a module is never cast, or None."""
    last = name.rpartition(".")[2]
    if last in _HEADS:
        return "output head, never cast"
    if _EMBEDDINGS.fullmatch(last):
        return "embedding, never cast"
    if last in _COEFFICIENTS or any(_ROUTER.fullmatch(part) for part in name.split(".")):
        return "router gate, never cast"
    return None


def _hit(pattern: str, names: tuple[str, ...], fused: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names that a pattern hits, also by the members of a fused name at its end."""
    if found := _matches(pattern, names, fused):
        return found
    raise ConfigError(f"quantization_ignored_layer_kws: {pattern!r} hits no module; {_advice(pattern, names, fused)}")


def _matches(pattern: str, names: tuple[str, ...], fused: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    expressions = [_expression(spelling) for spelling in _spellings(pattern, fused)]
    return tuple(name for name in names if any(each.search(name) for each in expressions))


def _spellings(pattern: str, fused: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return a pattern, and where it ends in a fused name, also with each of its members."""
    *front, last = pattern.split(".")
    return [pattern, *(".".join([*front, member]) for member in fused.get(last, ()))]


def _expression(pattern: str) -> re.Pattern[str]:
    body = re.escape(pattern).replace(r"\*", "[^.]*")
    return re.compile(rf"(?:^|\.){body}(?:\.|$)")


def _advice(pattern: str, names: tuple[str, ...], fused: Mapping[str, tuple[str, ...]]) -> str:
    """Say what the user may have meant by a pattern that hits nothing."""
    last = pattern.rpartition(".")[2]
    for whole, members in fused.items():
        if last in members and any(name.rpartition(".")[2] == whole for name in names):
            return f"this model has {whole!r}, which holds {last!r}: ignore it whole or not at all"
        has_members = any(name.rpartition(".")[2] in members for name in names)
        if has_members and "*" in last and last.strip("*") and _expression(last).search(whole):
            written = ".".join([*pattern.split(".")[:-1], whole])
            return f"a fused name takes no star: write {written!r}, which stands for {', '.join(map(repr, members))}"
    if inside := [name for name in names if pattern.replace("*", "") in name]:
        starred = ".".join(part if part == "*" else f"*{part.strip('*')}*" for part in pattern.split("."))
        hit = frozenset(_matches(starred, names, fused))
        groups = {_group_of(name, fused) for name in hit}
        whole = [name for name in names if _group_of(name, fused) in groups]
        # Half of a fused layer would be the next error.
        written = [starred] if len(whole) == len(hit) else narrow_patterns(hit, names, fused=fused)
        return (
            f"it is a part of components, as in {inside[0]!r}: a pattern is whole components, so write "
            f"{', '.join(repr(each) for each in written)}"
        )
    if match := re.fullmatch(r"(.*?)\.?([0-9]+)", pattern):
        numbers = {
            int(found[1]) for name in names if (found := re.search(rf"(?:^|\.){re.escape(match[1])}\.([0-9]+)\.", name))
        }
        if match[1] and numbers:
            return f"{match[1]!r} are numbered from {min(numbers)} to {max(numbers)}"
    parts = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
    if near := difflib.get_close_matches(last, parts, 3, 0.5):
        return f"near it are {', '.join(repr(part) for part in near)}"
    return f"the modules' names end in {', '.join(sorted({name.rpartition('.')[2] for name in names})) or 'nothing'}"


def _first_and_last(names: tuple[str, ...], rules: IgnoreRules, num_layers: int | None) -> dict[str, str]:
    """Return the modules of the first and last layers, with the reason."""
    first, last = rules.num_first_layers_in_bf16, rules.num_last_layers_in_bf16
    if not first and not last:
        return {}
    stacks: dict[str, dict[str, int]] = {}
    for name in names:
        if match := _LAYER.fullmatch(name):
            stacks.setdefault(match[1], {})[name] = int(match[2])
    prefix = _prefix(stacks, rules.layers_prefix)
    layers = stacks[prefix]
    total = max(layers.values()) + 1 if num_layers is None else num_layers
    if isinstance(total, bool) or not isinstance(total, int):
        raise ConfigError(f"num_layers must be a number of layers, got {num_layers!r}")
    if max(layers.values()) >= total:
        raise ConfigError(f"the model has layer {max(layers.values())} under {prefix!r}, got num_layers={num_layers!r}")
    if first + last >= total:
        raise ConfigError(
            f"num_first_layers_in_bf16={first} and num_last_layers_in_bf16={last} leave none of the {total} layers "
            f"under {prefix!r} to cast; lower them, or leave FP8 weights off"
        )
    reasons = {}
    for name, layer in layers.items():
        if layer < first:
            reasons[name] = f"one of the first {first} layers"
        elif layer >= total - last:
            reasons[name] = f"one of the last {last} layers"
    return reasons


def _prefix(stacks: Mapping[str, object], wanted: str | None) -> str:
    """Return the path of the layers that first and last are counted in."""
    found = ", ".join(repr(prefix) for prefix in stacks) or "none"
    if wanted is not None and wanted not in stacks:
        raise ConfigError(f"layers_prefix={wanted!r} is no path before a layer's number; this model has {found}")
    if wanted is None and len(stacks) != 1:
        raise ConfigError(
            f"num_first_layers_in_bf16 and num_last_layers_in_bf16 need one stack of numbered layers, this model has "
            f"{found}; leave both out and write patterns such as '{next(iter(stacks), 'layers')}.0'"
        )
    return next(iter(stacks)) if wanted is None else wanted


def _require_whole_groups(
    names: tuple[str, ...], ignored: Mapping[str, str], fused: Mapping[str, tuple[str, ...]]
) -> None:
    """Refuse a fused module, or the experts of one layer, of which a part stays and a part is cast."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_group_of(name, fused), []).append(name)
    cut = {
        group: stays
        for group, members in groups.items()
        if 0 < len(stays := [name for name in members if name in ignored]) < len(members)
    }
    for group, stays in cut.items():
        members = groups[group]
        goes = next(name for name in members if name not in ignored)
        of_experts = bool(_EXPERT.fullmatch(goes))
        alike = [each for each in cut if bool(_EXPERT.fullmatch(groups[each][0])) == of_experts]
        patterns = narrow_patterns((groups[each][0] for each in alike), names, ignored, fused)
        way_out = f"ignore all of them with {', '.join(repr(each) for each in patterns)}, or none"
        if of_experts and (narrow := _beside_experts(ignored[stays[0]], names, ignored, fused)):
            way_out += f"; for what is no expert write {narrow} instead"
        raise ConfigError(
            f"the engine keeps {group!r} as one module, so its {len(members)} members have one precision: "
            f"{stays[0]!r} is ignored ({ignored[stays[0]]}) and {goes!r} is not; {way_out}"
        )


def _beside_experts(
    reason: str, names: tuple[str, ...], ignored: Mapping[str, str], fused: Mapping[str, tuple[str, ...]]
) -> str:
    """Return the patterns for what one pattern hit beside experts, or an empty text."""
    hit = [name for name, why in ignored.items() if why == reason and not _EXPERT.fullmatch(name)]
    kept = [name for name, why in ignored.items() if why != reason]
    return ", ".join(repr(each) for each in narrow_patterns(hit, names, kept, fused))
