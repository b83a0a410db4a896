# SPDX-License-Identifier: Apache-2.0
"""The FP8 ignore list: whole components, fused modules whole, every pattern with its hits, and none that misses."""

import dataclasses
import subprocess
import sys

import pytest

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.fp8.ignored_layers import FUSED, IgnoreRules, narrow_patterns, resolve_ignored_layers

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def dense(num_layers=12, prefix="model.layers"):
    """Names of a Qwen3 or a Llama."""
    layers = [f"{prefix}.{layer}.{name}" for layer in range(num_layers) for name in (*ATTENTION, *MLP)]
    return ["model.embed_tokens", *layers, "lm_head"]


def mixture(num_layers=3, num_experts=2):
    """Names of a Qwen2-MoE or Qwen3-MoE, with a shared expert and its gate."""
    names = ["model.embed_tokens"]
    for layer in range(num_layers):
        at = f"model.layers.{layer}"
        names += [f"{at}.{name}" for name in (*ATTENTION, "mlp.gate", "mlp.shared_expert_gate")]
        names += [f"{at}.mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
        names += [
            f"{at}.mlp.experts.{e}.{name}" for e in range(num_experts) for name in ("gate_proj", "up_proj", "down_proj")
        ]
    return [*names, "lm_head"]


def ignoring(*patterns, **other):
    return IgnoreRules(quantization_ignored_layer_kws=patterns, **other)


def test_without_rules_all_but_heads_and_embeddings_is_cast():
    resolved = resolve_ignored_layers(dense())
    assert resolved.ignored == {"model.embed_tokens": "embedding, never cast", "lm_head": "output head, never cast"}
    assert list(resolved.cast) == dense()[1:-1]
    assert resolved.hits == {}


def test_router_gates_stay_by_default_and_gate_projections_do_not():
    """Q42 too: the gate of a shared expert."""
    resolved = resolve_ignored_layers(mixture())
    gates = [name for name, reason in resolved.ignored.items() if reason == "router gate, never cast"]
    assert gates == [f"model.layers.{i}.mlp.{n}" for i in range(3) for n in ("gate", "shared_expert_gate")]
    assert "model.layers.0.mlp.experts.0.gate_proj" in resolved.cast
    assert "model.layers.0.mlp.shared_expert.gate_proj" in resolved.cast


@pytest.mark.parametrize(
    "name",
    [
        "block_sparse_moe.gate",
        "model.layers.0.feed_forward.router",
        "transformer.wte",
        "transformer.wpe",
        "embed_out",
        "model.decoder.embed_positions",
        "transformer.word_embeddings",
        "model.language_model.embed_tokens_per_layer",
        "model.layers.0.block_sparse_moe.router.layer",
        "model.layers.0.mlp.gate.wg",
        "model.layers.0.altup.modality_router",
        "model.layers.0.altup.prediction_coefs",
        "model.layers.0.altup.correction_coefs",
    ],
)
def test_other_families_gates_heads_and_embeddings_stay(name):
    assert name in resolve_ignored_layers([name, "model.layers.0.mlp.down_proj"]).ignored


def test_a_pattern_is_whole_components():
    """As a substring, 'layers.1' would hit layer 10 and 11, and 'mlp.gate' every gate_proj."""
    resolved = resolve_ignored_layers(dense(), ignoring("layers.1"))
    assert {name.split(".")[2] for name in resolved.hits["layers.1"]} == {"1"}
    assert resolved.ignored["model.layers.1.mlp.down_proj"] == "pattern 'layers.1'"
    assert "model.layers.10.mlp.down_proj" in resolved.cast
    resolved = resolve_ignored_layers(mixture(), ignoring("mlp.gate"))
    assert resolved.hits["mlp.gate"] == tuple(f"model.layers.{i}.mlp.gate" for i in range(3))


@pytest.mark.parametrize(
    ("pattern", "num_hits"),
    [
        ("down_proj", 12),
        ("mlp", 36),
        ("mlp.down_proj", 12),
        ("model.layers.3.mlp.down_proj", 1),
        ("*down*", 12),
        ("layers.*.mlp", 36),
        ("layers.1*.self_attn", 12),
        ("lm_head", 1),
        ("model", 85),
        ("*", 86),
    ],
)
def test_a_pattern_tells_what_it_hit(pattern, num_hits):
    """Q40: short patterns reach the full names, and the number of hits is there to be read."""
    names = dense()
    if num_hits > 80:
        with pytest.raises(ConfigError, match=f"nothing is left to cast: all {len(names)} modules"):
            resolve_ignored_layers(names, ignoring(pattern))
        return
    resolved = resolve_ignored_layers(names, ignoring(pattern))
    assert len(resolved.hits[pattern]) == num_hits
    assert set(resolved.hits[pattern]) <= set(resolved.ignored)
    assert f"pattern {pattern!r} hit {num_hits}" in resolved.report()


def test_a_star_stays_inside_its_component():
    resolved = resolve_ignored_layers(dense(), ignoring("model.*.0"))
    assert len(resolved.hits["model.*.0"]) == 7
    with pytest.raises(ConfigError, match=r"'model\.\*proj' hits no module"):
        resolve_ignored_layers(dense(), ignoring("model.*proj"))


@pytest.mark.parametrize(
    ("pattern", "advice"),
    [
        ("mlp.gat", r"it is a part of components, as in 'model\.layers\.0\.mlp\.gate_proj'.*write 'gate_up_proj'"),
        ("layer", r"it is a part of components.*write '\*layer\*'"),
        ("dwon_proj", r"near it are 'down_proj'"),
        ("linear_attn.in_proj_qkv", r"near it are|the modules' names end in"),
        ("zzzz", r"the modules' names end in .*down_proj.*lm_head"),
        ("layers.12", r"'layers' are numbered from 0 to 11"),
        ("qkv*", r"write 'qkv_proj', which stands for 'q_proj', 'k_proj', 'v_proj'"),
    ],
)
def test_a_pattern_that_hits_nothing_is_an_error_with_near_names(pattern, advice):
    """Q40: a pattern that never matched left the layer quantised without a scale."""
    with pytest.raises(ConfigError, match=f"hits no module; .*{advice}"):
        resolve_ignored_layers(dense(), ignoring("down_proj", pattern))


def test_a_fused_name_stands_for_its_members():
    resolved = resolve_ignored_layers(dense(2), ignoring("layers.0.self_attn.qkv_proj", "gate_up_proj"))
    assert resolved.hits["layers.0.self_attn.qkv_proj"] == tuple(
        f"model.layers.0.self_attn.{n}_proj" for n in ("q", "k", "v")
    )
    assert len(resolved.hits["gate_up_proj"]) == 4
    assert "model.layers.0.self_attn.o_proj" in resolved.cast


@pytest.mark.parametrize(
    ("patterns", "group"),
    [
        (("q_proj",), "self_attn.qkv_proj"),
        (("k_proj", "v_proj"), "self_attn.qkv_proj"),
        (("up_proj",), "mlp.gate_up_proj"),
        (("layers.0.mlp.gate_proj",), "mlp.gate_up_proj"),
    ],
)
def test_one_member_of_a_fused_module_without_the_others_is_an_error(patterns, group):
    with pytest.raises(
        ConfigError, match=rf"'model\.layers\.0\.{group}' as one module.*is ignored \(pattern .*or none"
    ):
        resolve_ignored_layers(dense(), ignoring(*patterns))
    whole = group.rpartition(".")[2]
    assert resolve_ignored_layers(dense(), ignoring(whole)).cast


def test_all_members_by_their_own_names_are_fine():
    resolved = resolve_ignored_layers(dense(1), ignoring("q_proj", "k_proj", "v_proj"))
    assert resolved.cast == tuple(f"model.layers.0.{n}" for n in ("self_attn.o_proj", *MLP))


def test_a_member_of_a_module_that_the_model_fuses_itself_is_pointed_to_it():
    """Phi-3 has qkv_proj and gate_up_proj in its own checkpoint."""
    names = ["model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj"]
    with pytest.raises(ConfigError, match="this model has 'qkv_proj', which holds 'q_proj': ignore it whole"):
        resolve_ignored_layers(names, ignoring("q_proj"))
    assert resolve_ignored_layers(names, ignoring("qkv_proj")).cast == tuple(names[1:])


@pytest.mark.parametrize(
    ("pattern", "way_out"),
    [
        ("up_proj", ("shared_expert.gate_up_proj",)),
        ("down_proj", ("shared_expert.down_proj",)),
        ("layers.1.mlp.shared_expert.up_proj", ("layers.1.mlp.shared_expert.gate_up_proj",)),
    ],
)
def test_the_way_out_of_half_a_group_leaves_the_experts_cast(pattern, way_out):
    """What the message says is followed word by word; it must not be the next error, nor hit the experts."""
    with pytest.raises(ConfigError) as refused:
        resolve_ignored_layers(mixture(), ignoring(pattern))
    assert all(repr(each) in str(refused.value) for each in way_out)
    resolved = resolve_ignored_layers(mixture(), ignoring(*way_out))
    assert not any(".experts." in name for name in resolved.ignored)


def test_the_narrowest_pattern_hits_whole_groups_and_nothing_else():
    names = [*mixture(2), "model.layers.2.mlp.gate_proj", "model.layers.2.mlp.up_proj", "model.layers.2.mlp.down_proj"]
    for wanted, patterns in (
        (["model.layers.2.mlp.up_proj"], ("mlp.gate_up_proj",)),
        (["model.layers.2.mlp.up_proj", "model.layers.2.mlp.down_proj"], ("mlp.gate_up_proj", "mlp.down_proj")),
        ([f"model.layers.{i}.mlp.shared_expert.gate_proj" for i in range(2)], ("shared_expert.gate_up_proj",)),
        (["model.layers.1.mlp.shared_expert.gate_proj"], ("layers.1.mlp.shared_expert.gate_up_proj",)),
        ([f"model.layers.{i}.mlp.experts.0.up_proj" for i in range(2)], ("mlp.experts",)),
        (["model.layers.1.mlp.experts.0.up_proj"], ("layers.1.mlp.experts",)),
        ([f"model.layers.{i}.self_attn.k_proj" for i in range(2)], ("qkv_proj",)),
    ):
        assert narrow_patterns(wanted, names) == patterns
        hit = {name for found in resolve_ignored_layers(names, ignoring(*patterns)).hits.values() for name in found}
        assert set(wanted) <= hit


@pytest.mark.parametrize("pattern", ["experts.1", "layers.0.mlp.experts.0.down_proj", "experts.*.down_proj"])
def test_some_experts_of_a_layer_without_the_others_is_an_error(pattern):
    with pytest.raises(ConfigError, match=r"'model\.layers\.0\.mlp\.experts' as one module, so its 6 members"):
        resolve_ignored_layers(mixture(), ignoring(pattern))
    assert resolve_ignored_layers(mixture(), ignoring("layers.0.mlp.experts")).cast


def test_grouped_experts_count_as_experts():
    """Q44: names without a number."""
    names = [f"model.layers.0.mlp.experts.{n}" for n in ("gate_up_proj", "down_proj")] + ["model.layers.0.mlp.gate"]
    assert resolve_ignored_layers(names).cast == tuple(names[:2])
    with pytest.raises(ConfigError, match="so its 2 members have one precision"):
        resolve_ignored_layers(names, ignoring("gate_up_proj"))


def test_fused_modules_can_be_described():
    names = ["h.0.attn.a", "h.0.attn.b", "h.0.mlp.c"]
    with pytest.raises(ConfigError, match=r"'h\.0\.attn\.ab' as one module"):
        resolve_ignored_layers(names, ignoring("a"), fused={"ab": ("a", "b")})
    assert resolve_ignored_layers(names, ignoring("ab"), fused={"ab": ("a", "b")}).cast == ("h.0.mlp.c",)
    assert resolve_ignored_layers(names, ignoring("a")).cast == ("h.0.attn.b", "h.0.mlp.c")


def test_first_and_last_layers_stay():
    """NeMo-RL once appended a list to the list, and the option did nothing."""
    rules = IgnoreRules(num_first_layers_in_bf16=1, num_last_layers_in_bf16=2)
    resolved = resolve_ignored_layers(dense(), rules)
    assert {int(name.split(".")[2]) for name in resolved.cast} == set(range(1, 10))
    reasons = {resolved.ignored[f"model.layers.{i}.mlp.down_proj"] for i in (0, 10, 11)}
    assert reasons == {"one of the first 1 layers", "one of the last 2 layers"}
    assert "     7  one of the first 1 layers" in resolved.report()


def test_the_number_of_layers_can_be_given_where_the_last_ones_have_no_linears():
    rules = IgnoreRules(num_last_layers_in_bf16=2)
    resolved = resolve_ignored_layers(dense(10), rules, num_layers=11)
    assert {int(name.split(".")[2]) for name in resolved.cast} == set(range(9))
    with pytest.raises(ConfigError, match=r"has layer 9 under 'model\.layers', got num_layers=9"):
        resolve_ignored_layers(dense(10), rules, num_layers=9)
    with pytest.raises(ConfigError, match="num_layers must be a number of layers, got True"):
        resolve_ignored_layers(dense(1), rules, num_layers=True)


def test_several_stacks_need_a_prefix():
    names = dense(4, "model.language_model.layers") + [f"model.visual.blocks.{i}.attn.proj" for i in range(6)]
    with pytest.raises(
        ConfigError,
        match=r"need one stack .*'model\.language_model\.layers', 'model\.visual\.blocks'.* write .*'model\.language_model\.layers\.0'",
    ):
        resolve_ignored_layers(names, IgnoreRules(num_first_layers_in_bf16=1))
    rules = IgnoreRules(num_first_layers_in_bf16=1, layers_prefix="model.language_model.layers")
    resolved = resolve_ignored_layers(names, rules)
    assert "model.visual.blocks.0.attn.proj" in resolved.cast
    assert "model.language_model.layers.0.mlp.down_proj" in resolved.ignored
    with pytest.raises(ConfigError, match=r"layers_prefix='model\.layers' is no path before a layer's number"):
        resolve_ignored_layers(names, dataclasses.replace(rules, layers_prefix="model.layers"))


def test_experts_numbers_are_no_layers():
    resolved = resolve_ignored_layers(mixture(3, 8), IgnoreRules(num_last_layers_in_bf16=1))
    assert {int(name.split(".")[2]) for name in resolved.cast} == {0, 1}


@pytest.mark.parametrize(("first", "last"), [(12, 0), (0, 12), (6, 6), (13, 0), (100, 100)])
def test_rules_that_leave_no_layer_are_refused(first, last):
    with pytest.raises(ConfigError, match="leave none of the 12 layers"):
        resolve_ignored_layers(dense(), IgnoreRules(num_first_layers_in_bf16=first, num_last_layers_in_bf16=last))


def test_first_and_last_need_numbered_layers():
    with pytest.raises(ConfigError, match="this model has none"):
        resolve_ignored_layers(["a", "b"], IgnoreRules(num_first_layers_in_bf16=1))


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"quantization_ignored_layer_kws": "lm_head"}, r"must be a list of texts, got 'lm_head'"),
        ({"quantization_ignored_layer_kws": (["a", "b"],)}, r"must be a list of texts, got \(\['a', 'b'\],\)"),
        ({"quantization_ignored_layer_kws": ("",)}, r"holds '': a pattern is one or more whole components"),
        ({"quantization_ignored_layer_kws": ("a..b",)}, r"holds 'a\.\.b'"),
        ({"quantization_ignored_layer_kws": ("re:.*",)}, r"holds 're:\.\*'"),
        ({"quantization_ignored_layer_kws": ("a", "a")}, r"holds 'a' twice"),
        ({"num_first_layers_in_bf16": -1}, r"num_first_layers_in_bf16 must be a number of layers, 0 or more, got -1"),
        ({"num_last_layers_in_bf16": True}, r"got True"),
        ({"num_last_layers_in_bf16": 1.0}, r"got 1\.0"),
    ],
)
def test_malformed_rules_are_refused(rules, words):
    with pytest.raises(ConfigError, match=words):
        IgnoreRules(**rules)


def test_rules_from_a_config_are_a_list_and_are_kept_as_a_tuple():
    assert IgnoreRules(quantization_ignored_layer_kws=["a"]).quantization_ignored_layer_kws == ("a",)


def test_the_order_and_doubles_of_the_names_do_not_matter():
    forth, back = (resolve_ignored_layers(names, ignoring("mlp")) for names in (dense() * 2, dense()[::-1]))
    assert set(forth.cast) == set(back.cast)
    assert forth.ignored == back.ignored
    assert len(forth.cast) + len(forth.ignored) == len(dense())


def test_malformed_names_are_refused_and_no_names_give_nothing():
    with pytest.raises(ConfigError, match="must be a text that is not empty, got ''"):
        resolve_ignored_layers(["", "a"])
    assert resolve_ignored_layers([]).cast == ()


def test_members_belong_to_one_fused_module_each():
    members = [member for group in FUSED.values() for member in group]
    assert len(set(members)) == len(members)


def test_the_module_needs_the_standard_library_alone():
    code = (
        "import sys, nemo_rl_core.fp8.ignored_layers\nprint({'torch', 'triton', 'pydantic', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
