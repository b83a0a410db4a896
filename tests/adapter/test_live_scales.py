# SPDX-License-Identifier: Apache-2.0
"""Scales of a KV cache in a live model: every copy that the engine keeps, or an error that names it."""

import pytest
import torch
from torch import nn

from nemo_rl_core.refit.digest import tensor_digest
from nemo_rl_vllm.live_scales import LiveScales
from nemo_rl_vllm.live_weights import LiveWeights


class Backend:
    """Says the name of a vLLM attention backend."""

    def __init__(self, name):
        self.name = name

    def get_name(self):
        return self.name


class Kernel:
    """What a backend keeps beside the module: products that it fills in once."""

    def __init__(self):
        self.bmm1_scale = self.bmm2_scale = self.o_sf_scale = None


class Attention(nn.Module):
    """The places in which vLLM 0.32 keeps the scales of one attention module."""

    def __init__(self, kv_cache_dtype="fp8_e4m3", backend="FLASH_ATTN", attn_type="decoder", size=()):
        super().__init__()
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.attn_backend, self.impl = Backend(backend), Kernel()
        self._o_scale_float = None
        for kind in ("q", "k", "v"):
            self.register_buffer(f"_{kind}_scale", torch.ones(size))
            setattr(self, f"_{kind}_scale_float", 1.0)
        self._k_scale_cpu, self._v_scale_cpu = torch.tensor(1.0), torch.tensor(1.0)


def model_of(*attentions):
    """A model whose layers hold these modules, None for a layer without attention."""
    layers = [nn.ModuleDict({} if a is None else {"attn": a}) for a in attentions]
    return nn.ModuleDict({"layers": nn.ModuleList(layers)})


def test_the_owners_are_the_modules_with_an_fp8_cache_and_no_others():
    """Q3: by the live module tree. Layers without attention, encoders and layers kept in bf16 have no scales."""
    live = LiveScales(
        model_of(Attention(), None, Attention("auto"), Attention("fp8"), Attention(attn_type="encoder_only"))
    )
    assert live.owners == ("layers.0.attn", "layers.3.attn")
    assert live.names(include_q=False)[:2] == ("layers.0.attn.k_scale", "layers.0.attn.v_scale")
    assert live.names()[0] == "layers.0.attn.q_scale"


@pytest.mark.parametrize("kind", ["q_scale", "k_scale", "v_scale"])
def test_setting_one_scale_sets_every_copy_of_it_and_touches_no_other(kind):
    """Q20, Q21: the buffer on the device, the float, the host copy, and the products that are made of them."""
    model = model_of(Attention(), Attention())
    live = LiveScales(model)
    attention = model["layers"][1]["attn"]
    attention.impl.bmm1_scale, attention.impl.bmm2_scale, attention.impl.o_sf_scale = 0.5, 2.0, 3.0
    attention._o_scale_float = 4.0
    buffer = getattr(attention, f"_{kind}")
    live.set(f"layers.1.attn.{kind}", 0.0123456)
    assert getattr(attention, f"_{kind}") is buffer, "a CUDA graph reads the old one for ever"
    in_float32 = torch.tensor(0.0123456).item()
    assert (buffer.item(), getattr(attention, f"_{kind}_float")) == (in_float32, in_float32)
    if kind != "q_scale":
        assert getattr(attention, f"_{kind}_cpu").item() == in_float32
    assert (attention.impl.bmm1_scale, attention.impl.bmm2_scale, attention.impl.o_sf_scale) == (None, None, None)
    assert attention._o_scale_float is None
    assert live.get(f"layers.1.attn.{kind}") == in_float32
    others = [name for name in live.names() if name != f"layers.1.attn.{kind}"]
    assert {live.get(name) for name in others} == {1.0}


@pytest.mark.parametrize("copy", ["_k_scale_float", "_k_scale_cpu", "_k_scale"])
def test_copies_that_differ_are_an_error_and_not_a_value(copy):
    model = model_of(Attention())
    live = LiveScales(model)
    attention = model["layers"][0]["attn"]
    held = getattr(attention, copy)
    if isinstance(held, float):
        setattr(attention, copy, 0.5)
    else:
        held.fill_(0.5)
    with pytest.raises(RuntimeError, match=r"different values of scale 'layers.0.attn.k_scale': .*refit again"):
        live.get("layers.0.attn.k_scale")


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), 1e-46, 1e39])
def test_what_is_no_scale_is_never_set(value):
    live = LiveScales(model_of(Attention()))
    with pytest.raises(RuntimeError, match="positive finite number"):
        live.set("layers.0.attn.k_scale", value)
    assert live.get("layers.0.attn.k_scale") == 1.0


@pytest.mark.parametrize("name", ["layers.1.attn.k_scale", "layers.0.attn.prob_scale", "k_scale"])
def test_a_scale_of_no_module_is_an_error(name):
    with pytest.raises(KeyError, match="no module of the engine"):
        LiveScales(model_of(Attention())).set(name, 1.0)


def test_names_that_are_not_exactly_the_live_ones_are_refused_before_any_refit():
    """Q4: a scale that would go nowhere, and a module that would stay at 1.0."""
    live = LiveScales(model_of(Attention(), Attention()))
    live.require(live.names())
    live.require(live.names(include_q=False))
    with pytest.raises(RuntimeError, match=r"no scale comes for 'layers.1.attn.v_scale' \(1 such\)"):
        live.require(live.names(include_q=False)[:-1])
    with pytest.raises(RuntimeError, match=r"no scale comes for 'layers.0.attn.q_scale'"):
        live.require(live.names()[1:])
    with pytest.raises(RuntimeError, match=r"'layers.2.attn.k_scale' is not in it \(1 such\)"):
        live.require((*live.names(), "layers.2.attn.k_scale"))
    with pytest.raises(RuntimeError, match=r"2 attention modules .*no scale comes for .*4 such"):
        live.require(())


def test_a_cache_or_backend_whose_scales_cannot_be_kept_right_is_refused_by_name():
    with pytest.raises(RuntimeError, match=r"'layers.0.attn' has a KV cache of type 'int8_per_token_head'"):
        LiveScales(model_of(Attention("int8_per_token_head")))
    with pytest.raises(RuntimeError, match=r"one scale for each head \(2\)"):
        LiveScales(model_of(Attention(size=(2,))))
    # Its kernels take the Python float, which a graph keeps.
    flashinfer = model_of(Attention(backend="FLASHINFER"))
    with pytest.raises(RuntimeError, match=r"FLASHINFER.*enforce_eager"):
        LiveScales(flashinfer, graphs=True)
    assert LiveScales(flashinfer).owners
    assert LiveScales(model_of(Attention()), graphs=True).owners


class Model(nn.Module):
    """A model of one weight and one attention module, whose loader takes the weight alone."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.attn = Attention()

    def load_weights(self, pairs):
        taken = dict(pairs)
        assert list(taken) == ["norm"]
        self.norm.data.copy_(taken["norm"])
        return {"norm"}


NAMES = ("attn.q_scale", "attn.k_scale", "attn.v_scale")


def test_a_sink_brings_scales_in_one_transaction_with_the_weights_and_reads_them_back():
    """They are set at the end, all together, and the digest is of the live ones."""
    model = Model()
    sink = LiveWeights(model, kv_scales=NAMES)
    assert [(s.name, s.shape, s.dtype) for s in sink.contents.specs] == [
        ("norm", (4,), "float32"),
        *((name, (), "float32") for name in NAMES),
    ]
    sink.begin(caches_dropped=True)
    sink.load([("norm", torch.ones(4)), ("attn.q_scale", torch.tensor(0.5))])
    sink.load([("attn.k_scale", torch.tensor(0.25)), ("attn.v_scale", torch.tensor(2.0))])
    assert (model.attn._k_scale.item(), sink.version) == (1.0, None)
    sink.finish(7)
    assert (model.attn._k_scale.item(), model.attn._k_scale_float, sink.version) == (0.25, 0.25, 7)
    assert sink.live_digests()["attn.v_scale"] == tensor_digest("attn.v_scale", torch.tensor(2.0))
    model.attn._v_scale_float = 1.0
    with pytest.raises(RuntimeError, match=r"different values of scale 'attn.v_scale'"):
        sink.live_digests()


def test_a_scale_that_is_not_live_fails_the_refit_also_where_no_digest_is_made():
    sink = LiveWeights(Model(), kv_scales=NAMES)
    take = sink._scales.set
    sink._scales.set = lambda name, value: None if name == "attn.v_scale" else take(name, value)
    sink.begin(caches_dropped=True)
    sink.load([(name, torch.tensor(0.5)) for name in NAMES])
    with pytest.raises(RuntimeError, match=r"scale 'attn.v_scale' is not live as it was sent \(1 such\)"):
        sink.finish(1)
    assert sink.version is None


def test_where_no_scale_of_q_comes_it_is_set_to_one_and_not_left():
    """Q14: an engine with quantised weights starts with whatever its dummy weights say."""
    model = Model()
    LiveScales(model).set("attn.q_scale", 0.25)
    sink = LiveWeights(model, kv_scales=NAMES[1:])
    sink.begin(caches_dropped=True)
    sink.load([(name, torch.tensor(0.5)) for name in NAMES[1:]])
    sink.finish(1)
    assert (model.attn._q_scale.item(), model.attn._q_scale_float) == (1.0, 1.0)


def test_scales_of_a_refit_that_failed_are_not_set_by_the_next_one():
    model = Model()
    sink = LiveWeights(model, kv_scales=NAMES)
    sink.begin(caches_dropped=True)
    sink.load([("attn.k_scale", torch.tensor(0.125))])
    sink.begin(caches_dropped=True)
    sink.load([("norm", torch.ones(4)), ("attn.q_scale", torch.tensor(0.5))])
    sink.finish(1)
    assert (model.attn._q_scale.item(), model.attn._k_scale.item()) == (0.5, 1.0)


@pytest.mark.parametrize("names", [(), NAMES[:2], (*NAMES, "other.k_scale")])
def test_an_engine_whose_cache_wants_other_scales_is_refused_before_its_first_refit(names):
    with pytest.raises(RuntimeError, match="would bring other scales than theirs"):
        LiveWeights(Model(), kv_scales=names)
