# SPDX-License-Identifier: Apache-2.0
"""A model that two ranks share, without an engine: what each must hold, and what the digests of a refit say of it.

The model has the attributes of vLLM's layers, and a loader of its own that cuts shares by `torch.chunk`.
"""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nemo_rl_core.errors import RefitError, WeightsInvalidError
from nemo_rl_core.refit.digest import digests_of
from nemo_rl_core.refit.manifest import Manifest
from nemo_rl_core.refit.receiver import RefitReceiver
from nemo_rl_core.refit.report import RefitReport
from nemo_rl_core.refit.sender import RefitSender
from nemo_rl_core.refit.settings import RefitSettings
from nemo_rl_vllm.layouts import fused_layouts, plain_layout
from nemo_rl_vllm.live_weights import LiveWeights

WIDTH, HEAD, VOCAB = 6, 3, 5
QUICK = RefitSettings(rendezvous_timeout_s=20.0, transfer_timeout_s=20.0, silence_timeout_s=10.0, bucket_bytes=64)


def layer(rows: int, *columns: int, **attributes: object) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(rows, *columns), requires_grad=False)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


class SharedModel(nn.Module):
    """One of two ranks: a padded vocabulary, two query heads over one KV head, gate and up, a row-parallel layer, a norm."""

    hf_to_vllm_mapper = SimpleNamespace(
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        }
    )

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.loads_share_of, self.passes_over = rank, ""
        start, stop = ((0, 4), (4, VOCAB))[rank]  # padded to 8 rows
        rows = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=stop)
        tp = {"tp_size": 2, "tp_rank": rank}
        heads = {"total_num_heads": 2, "num_heads": 1, "total_num_kv_heads": 1, "num_kv_heads": 1}
        self.embed = layer(4, WIDTH, org_vocab_size=VOCAB, shard_indices=rows, **tp)
        self.qkv_proj = layer(3 * HEAD, WIDTH, head_size=HEAD, num_kv_head_replicas=2, **heads, **tp)
        self.gate_up_proj = layer(4, WIDTH, output_sizes=[4, 4], output_size=8, input_size=WIDTH, **tp)
        self.down_proj = layer(WIDTH, 2, output_size=WIDTH, input_size=4, **tp)
        self.norm = layer(WIDTH)

    def load_weights(self, pairs):
        rank, loaded = self.loads_share_of, set()
        for name, tensor in pairs:
            leaf = name.split(".")[0]
            target = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}.get(leaf[:-5], leaf[:-5])
            live = getattr(self, leaf if leaf in ("embed", "norm") else f"{target}_proj").weight.data
            loaded.add(f"{leaf if leaf in ('embed', 'norm') else f'{target}_proj'}.weight")
            if name == self.passes_over:
                continue
            if leaf == "embed":
                part = nn.functional.pad(tensor, (0, 0, 0, 3)).chunk(2)[rank]
            elif leaf in ("norm", "k_proj", "v_proj"):
                part = tensor
            else:
                part = tensor.chunk(2, dim=1 if leaf == "down_proj" else 0)[rank]
            start = {"k_proj": HEAD, "v_proj": 2 * HEAD, "up_proj": 2}.get(leaf, 0)
            live[start : start + len(part)] = part
        return loaded


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    shapes = {
        "embed": (VOCAB, WIDTH),
        "q_proj": (2 * HEAD, WIDTH),
        "k_proj": (HEAD, WIDTH),
        "v_proj": (HEAD, WIDTH),
        "gate_proj": (4, WIDTH),
        "up_proj": (4, WIDTH),
        "down_proj": (WIDTH, 4),
        "norm": (WIDTH,),
    }
    stream = torch.Generator().manual_seed(seed)
    return {f"{name}.weight": torch.randn(shape, generator=stream) for name, shape in shapes.items()}


@pytest.fixture
def ranks():
    """Models, sinks and receivers of both ranks, and a sender."""
    models = [SharedModel(rank) for rank in (0, 1)]
    sinks = [LiveWeights(model, rank=rank, num_ranks=2) for rank, model in enumerate(models)]
    receivers = [RefitReceiver(rank=1 + r, num_receivers=2, settings=QUICK, device_id=f"rank {r}") for r in (0, 1)]
    with RefitSender(num_receivers=2, settings=QUICK, host="127.0.0.1") as sender:
        yield models, sinks, lambda tensors, version: refit(sender, receivers, sinks, tensors, version)
    for receiver in receivers:
        receiver.close()


def refit(sender, receivers, sinks, tensors, version: int) -> list:
    """Return what the sender and both ranks say of one refit: reports or errors."""
    said: dict[int, object] = {}

    def receive(rank: int) -> None:
        sinks[rank].begin(caches_dropped=True)
        try:
            said[1 + rank] = receivers[rank].receive(sender.address, sinks[rank])
        except RefitError as error:
            said[1 + rank] = error

    threads = [threading.Thread(target=receive, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        said[0] = sender.send(Manifest.from_tensors(tensors.items()), tensors.items(), version)
    except RefitError as error:
        said[0] = error
    for thread in threads:
        thread.join(60)
    return [said[rank] for rank in (0, 1, 2)]


def test_both_ranks_expect_the_whole_checkpoint(ranks):
    """R36, U40."""
    _, sinks, _ = ranks
    wanted = Manifest.from_tensors(checkpoint(1).items())
    assert [wanted.differences(sink.contents) for sink in sinks] == [(), ()]


def test_each_rank_vouches_for_the_whole_by_the_share_that_it_holds(ranks):
    """R33: twice, with other weights, and read again after each."""
    models, sinks, send = ranks
    for version in (1, 2):
        tensors = checkpoint(version)
        sent, *received = send(tensors, version)
        assert isinstance(sent, RefitReport), sent
        assert [report.digest for report in received] == [sent.digest] * 2
        assert [sink.live_digests() for sink in sinks] == [digests_of(tensors.items())] * 2
        torch.testing.assert_close(models[1].down_proj.weight.data, tensors["down_proj.weight"][:, 2:], rtol=0, atol=0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", list(checkpoint(1)))
def test_a_tensor_that_one_rank_s_loader_passes_over_ends_the_refit_on_all(ranks, name, rank):
    """R33, U30: although the loader says that it took it."""
    models, _, send = ranks
    models[rank].passes_over = name
    said = send(checkpoint(1), 1)
    assert all(isinstance(error, RefitError) for error in said), said
    assert len({error.cause for error in said}) == 1
    assert f"rank {rank} of the engine's 2 does not hold its share of {name!r} as it was sent" in said[0].cause
    models[rank].passes_over = ""
    assert isinstance(send(checkpoint(2), 2)[0], RefitReport)


@pytest.mark.parametrize("swapped", [(0,), (1,), (0, 1)], ids=str)
def test_the_other_rank_s_share_ends_the_refit(ranks, swapped):
    models, _, send = ranks
    for rank in swapped:
        models[rank].loads_share_of = 1 - rank
    said = send(checkpoint(1), 1)
    assert all("does not hold its share of 'embed.weight'" in error.cause for error in said)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_changes_after_a_refit_is_seen_where_it_changed(ranks, rank):
    models, sinks, send = ranks
    with pytest.raises(WeightsInvalidError, match=r"rank 0 of the engine's 2 has received no 'embed\.weight'"):
        sinks[0].live_digests()
    send(checkpoint(1), 1)
    models[rank].qkv_proj.weight.data[HEAD, 0] += 1
    with pytest.raises(RuntimeError, match=f"rank {rank} of the engine's 2 .*'k_proj.weight' as it was sent .1 such"):
        sinks[rank].live_digests()
    assert sinks[1 - rank].live_digests() == digests_of(checkpoint(1).items())


def test_padding_is_nobodys_weight(ranks):
    """Rows behind the vocabulary may hold anything."""
    models, sinks, send = ranks
    send(checkpoint(1), 1)
    models[1].embed.weight.data[1:] = 7.0
    assert sinks[1].live_digests() == digests_of(checkpoint(1).items())


def test_a_layer_whose_sizes_explain_nothing_is_refused_by_name():
    module = SimpleNamespace(output_size=8, input_size=6, tp_size=2, tp_rank=0)
    with pytest.raises(
        RuntimeError, match=r"'odd\.weight' has shape \[3, 6\], which is neither all nor one of 2 shares"
    ):
        plain_layout("odd.weight", torch.zeros(3, 6), module)
    module.output_sizes = [4, 4]
    with pytest.raises(RuntimeError, match=r"fused layer 'odd\.weight' has 3 rows"):
        fused_layouts("odd.weight", torch.zeros(3, 6), module, ["gate", "up"])
    with pytest.raises(RuntimeError, match="one tensor in the checkpoint and several in the engine"):
        plain_layout("odd.weight", torch.zeros(4, 6), module)
