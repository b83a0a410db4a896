# SPDX-License-Identifier: Apache-2.0
"""FP8 layers in a live model, without an engine: where values and scales lie, which kernels leave them there."""

from types import SimpleNamespace

import pytest
import torch

from nemo_rl_core.fp8.blockwise import cast_blockwise, dequantise
from nemo_rl_vllm.fp8 import BLOCK
from nemo_rl_vllm.fp8_kernels import _cpu_experts, _cpu_kernel, _keep_experts, keeping, keeps_experts, keeps_weights
from nemo_rl_vllm.layouts import Layout, block_layout
from nemo_rl_vllm.live_weights import LiveWeights

# -- layouts ---------------------------------------------------------------------------------------------------------


def test_scales_lie_as_their_weight_does_in_blocks():
    """The last part of a fused layer may be ragged; a row-parallel share is columns."""
    v = Layout(shape=(200, 256), share=(slice(0, 200),), place=(slice(384, 584),))
    assert block_layout("v", v, BLOCK) == Layout(shape=(2, 2), share=(slice(0, 2),), place=(slice(3, 5),))
    down = Layout(shape=(256, 512), share=(slice(None), slice(256, 512)))
    assert block_layout("down", down, BLOCK) == Layout(shape=(2, 4), share=(slice(None), slice(2, 4)))
    assert down.held == (256, 256)
    assert block_layout("v", v, BLOCK).held == (2, 2)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(shape=(256, 128), share=(slice(64, 128),)),
        Layout(shape=(256, 128), share=(slice(0, 192),)),
        Layout(shape=(256, 128), share=(slice(0, 256),), place=(slice(192, 448),)),
    ],
)
def test_a_share_that_cuts_a_block_has_no_scales(layout):
    """Q38: the engine's own check comes first; this is the adapter's second word."""
    with pytest.raises(RuntimeError, match=r"'qkv' lies at .* no edges of blocks of 128 x 128"):
        block_layout("qkv", layout, BLOCK)


class Base:
    """vLLM's base class of such kernels, as far as it counts here."""

    def process_weights_after_loading(self, layer):
        layer.append("changed")


class Fine(Base):
    """Takes weights as they lie in a checkpoint."""


class Packs(Base):
    """Has a step of its own."""

    def process_weights_after_loading(self, layer):
        layer.append("packed")


class PacksToo(Packs):
    """Inherits one."""


class Stranger:
    """Of another base."""


class Experts(torch.nn.Module):
    """The experts of a layer as vLLM has them on the second of two ranks: two of them, of width 256."""

    moe_config = SimpleNamespace(intermediate_size_per_partition=128, hidden_dim=256, tp_size=2, tp_rank=1)
    quant_method = SimpleNamespace(fp8_backend=SimpleNamespace(name="TRITON"), moe_block_shape=[128, 128])

    def __init__(self, inner: int = 128) -> None:
        super().__init__()
        for name, rows, columns in (("w13", 2 * inner, 256), ("w2", 256, inner)):
            weight = torch.arange(2 * rows * columns, dtype=torch.float32).remainder(400).view(2, rows, columns)
            cast = cast_blockwise(weight)
            for leaf in ("weight", "weight_scale_inv"):
                parameter = torch.nn.Parameter(getattr(cast, leaf), requires_grad=False)
                self.register_parameter(f"{name}_{leaf}", parameter)

    def get_expert_mapping(self):
        names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
        return [("", f"experts.{e}.{name}.", e, shard) for e in range(2) for shard, name in names.items()]


def experts_model(layer: torch.nn.Module) -> torch.nn.Module:
    mlp = torch.nn.ModuleDict({"experts": torch.nn.ModuleDict({"routed_experts": layer})})
    return torch.nn.ModuleDict({"mlp": mlp})


MODULES = tuple(f"mlp.experts.{e}.{name}" for e in range(2) for name in ("gate_proj", "down_proj", "up_proj"))


def test_fp8_experts_are_read_back_where_a_checkpoint_has_them():
    """Q36, Q44: shapes of the wholes; values and scales of this rank's share, each expert on its own."""
    layer = Experts()
    live = LiveWeights(experts_model(layer), rank=1, num_ranks=2, fp8_weights=MODULES)
    specs = live.contents.by_name
    assert set(specs) == {f"{name}.{leaf}" for name in MODULES for leaf in ("weight", "weight_scale_inv")}
    assert str(specs["mlp.experts.1.up_proj.weight"]) == "float8_e4m3fn[256, 256]"
    assert str(specs["mlp.experts.1.down_proj.weight_scale_inv"]) == "float32[2, 2]"
    up, down = (live._parts[f"mlp.experts.1.{name}_proj.weight_scale_inv"] for name in ("up", "down"))
    assert torch.equal(up.read(), layer.w13_weight_scale_inv[1][1:])
    assert up.share == (slice(1, 2),)
    assert torch.equal(down.read(), layer.w2_weight_scale_inv[1])
    assert down.share == (slice(None), slice(1, 2))


def test_experts_that_vllm_has_padded_are_refused_by_name():
    """Q38: a share that is no whole blocks is padded by some kernels; its scales are then others."""
    with pytest.raises(
        RuntimeError, match=r"routed_experts\.w13_weight has \[512, 256\] .* share \[256, 256\]; take fewer"
    ):
        LiveWeights(experts_model(Experts(inner=256)), rank=1, num_ranks=2, fp8_weights=MODULES)


def test_a_layer_of_another_kernel_is_refused_by_the_kernels_name():
    """Q31: at the start of the engine; DeepGEMM, say, packs the scales."""
    layer = torch.nn.Linear(128, 128)
    layer.quant_method = SimpleNamespace(fp8_linear=Packs())
    with pytest.raises(
        RuntimeError, match=r"no refit can load 'proj\.weight': its kernel Packs .* set vllm_cfg\.precision"
    ):
        LiveWeights(torch.nn.ModuleDict({"proj": layer}))


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (MODULES[1:], r"'mlp\.experts\.0\.gate_proj' is FP8 in the engine, and the sender does not cast it \(1 such"),
        ((*MODULES, "lm_head"), r"'lm_head' is cast to FP8 by the sender, and not FP8 in the engine \(1 such"),
    ],
)
def test_an_engine_that_casts_other_modules_than_the_sender_is_refused(modules, words):
    """Q42: before the first refit."""
    with pytest.raises(RuntimeError, match=words):
        LiveWeights(experts_model(Experts()), rank=1, num_ranks=2, fp8_weights=modules)


# -- kernels ---------------------------------------------------------------------------------------------------------


def test_only_kernels_without_a_step_of_their_own_are_kept_and_made_to_do_nothing():
    """Q31: what a kernel packs, no refit can load."""
    (kept,) = keeping([PacksToo, Fine, Stranger, Packs], Base)
    assert issubclass(kept, Fine)
    layer: list[str] = []
    kept().process_weights_after_loading(layer)
    assert layer == []
    assert keeps_weights(kept())
    assert not keeps_weights(Fine())
    assert not keeps_weights(None)
    assert keeping([kept], Base) == [kept], "a second call leaves what the first has made"


def test_experts_on_a_cpu_compute_with_the_values_that_the_weights_stand_for():
    """Against one expert after another for each token, in the same order of sums."""
    stream = torch.Generator().manual_seed(2)
    w13, w2 = torch.randn(3, 256, 128, generator=stream), torch.randn(3, 128, 128, generator=stream)
    first, second = cast_blockwise(w13), cast_blockwise(w2)
    kernel = _cpu_experts(Base)()
    kernel.w1_scale, kernel.w2_scale = first.weight_scale_inv, second.weight_scale_inv
    x, chosen_ids = torch.randn(4, 128, generator=stream), torch.tensor([[0, 2], [2, 1], [1, 0], [0, 1]])
    router = torch.rand(4, 2, generator=stream)
    output = torch.empty(4, 128)
    kernel.apply(output, x, first.weight, second.weight, router, chosen_ids)
    for token in range(4):
        expected = torch.zeros(128)
        for expert, share in zip(chosen_ids[token], router[token], strict=True):
            gate, up = (dequantise(first)[expert] @ x[token]).chunk(2)
            expected += share * (dequantise(second)[expert] @ (torch.nn.functional.silu(gate) * up))
        assert torch.allclose(output[token], expected, rtol=1e-4, atol=1e-2)
    with pytest.raises(NotImplementedError):
        kernel.apply(output, x, first.weight, second.weight, router, chosen_ids, expert_map=torch.arange(3))
    assert keeps_weights(kernel)


@pytest.mark.parametrize(
    ("method", "keeps"),
    [
        (SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=_cpu_experts(Base)())), True),
        (SimpleNamespace(moe_kernel=SimpleNamespace(impl=SimpleNamespace(fused_experts=_cpu_experts(Base)()))), True),
        (SimpleNamespace(fp8_backend=SimpleNamespace(name="TRITON"), moe_block_shape=[128, 128]), True),
        (SimpleNamespace(fp8_backend=SimpleNamespace(name="TRITON"), moe_block_shape=[64, 64]), False),
        (SimpleNamespace(fp8_backend=SimpleNamespace(name="DEEPGEMM"), moe_block_shape=[128, 128]), False),
        (SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=Fine())), False),
        (None, False),
    ],
)
def test_experts_are_kept_by_this_kernel_and_by_triton_with_whole_blocks(method, keeps):
    """Q36: any other packs them, or splits their blocks."""
    assert keeps_experts(method) is keeps


def test_vllms_own_kernels_for_experts_on_cpus_give_way_once():
    vllms = SimpleNamespace(
        CPUExpertsFp8=Base, CPUExpertsFp8W8A8=Packs, prepare_fp8_moe_layer_for_cpu=lambda w13, w2: (-w13, -w2)
    )
    _keep_experts(vllms)
    kept = vllms.CPUExpertsFp8
    _keep_experts(vllms)
    assert vllms.CPUExpertsFp8 is kept
    assert issubclass(kept, Base)
    assert not vllms.CPUExpertsFp8W8A8._supports_current_device()
    assert vllms.prepare_fp8_moe_layer_for_cpu(1, 2) == (1, 2)


@pytest.mark.parametrize("shape", [(256, 128), (200, 130)])
def test_the_kernel_for_cpus_computes_with_the_values_that_the_weights_stand_for(shape):
    stream = torch.Generator().manual_seed(1)
    cast = cast_blockwise(torch.randn(shape, generator=stream))
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(cast.weight, requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(cast.weight_scale_inv, requires_grad=False)
    x, bias = torch.randn(3, shape[1], generator=stream), torch.randn(shape[0], generator=stream)
    kernel = _cpu_kernel(Base)()
    kernel.process_weights_after_loading(layer)
    assert torch.equal(kernel.apply_weights(layer, x, bias), x @ dequantise(cast).T + bias)
    assert keeps_weights(kernel)
