# SPDX-License-Identifier: Apache-2.0
"""Reservations in a real Ray with logical devices."""

import random
import time

import pytest
import ray

from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.errors import ClusterError


def free(key: str) -> float:
    return ray.available_resources().get(key, 0.0)


def free_becomes(key: str, amount: float) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if free(key) == amount:
            return True
        time.sleep(0.1)
    return False


def test_nothing_is_reserved_before_the_first_use_and_all_is_given_back(local_ray):
    cluster = RayVirtualCluster([2, 1], use_gpus=False, max_colocated_worker_groups=2)
    assert (cluster.world_size(), cluster.node_count()) == (3, 2)
    assert free_becomes("CPU", 12)  # what an earlier cluster held comes back a little later
    with cluster:
        assert len(cluster.get_placement_groups()) == 2
        assert cluster.get_placement_groups() == cluster.get_placement_groups()
        assert free_becomes("CPU", 6)
    assert free_becomes("CPU", 12)
    cluster.shutdown()


def test_bundles_come_in_the_order_of_node_and_device(local_ray):
    """U23: Ray's own order of bundles is no rank order."""
    with RayVirtualCluster([1, 2, 1], use_gpus=True) as cluster:
        bundles = cluster.get_bundles()
        assert [bundle.gpu_id for bundle in bundles] == ["0", "1", "2", "3"]
        assert len({bundle.node_id for bundle in bundles}) == 1
        assert len({(bundle.placement_group.id, bundle.index) for bundle in bundles}) == 4
        assert cluster.get_bundles() is bundles
    assert free_becomes("GPU", 4)


def test_device_ids_are_ordered_as_numbers_or_kept_as_opaque_text():
    """R57: a MIG UUID is no integer."""
    from nemo_rl_core.distributed.virtual_cluster import Bundle, _rank_order

    def bundle(node: str, gpu: str, index: int = 0) -> Bundle:
        return Bundle(placement_group=None, index=index, node_id=node, node_ip="", gpu_id=gpu)

    wanted = [
        *[bundle("a", str(gpu)) for gpu in (0, 2, 9, 10)],
        *[bundle("a", gpu) for gpu in ("MIG-1b", "MIG-7a")],
        bundle("b", "0"),
        *[bundle("c", "", index) for index in (0, 2, 11)],
    ]
    for seed in range(20):
        shuffled = random.Random(seed).sample(wanted, len(wanted))
        assert sorted(shuffled, key=_rank_order) == wanted


def test_a_worker_of_several_ranks_gets_as_many_devices_on_one_node(local_ray):
    """A replica of a tensor-parallel engine: two slots each, in the order of the devices."""
    with RayVirtualCluster([2], use_gpus=True, slots_per_bundle=2) as cluster:
        assert [bundle.gpu_id for bundle in cluster.get_bundles()] == ["0,1", "2,3"]
        assert free_becomes("GPU", 0)
        assert free_becomes("CPU", 8)
    assert free_becomes("GPU", 4)
    with pytest.raises(ClusterError, match=r"3 bundles of .*'GPU': 2\.0.*room for 2"):
        RayVirtualCluster([3], use_gpus=True, slots_per_bundle=2).get_placement_groups()


def test_more_than_the_cluster_has_is_refused_at_once_with_both_numbers(local_ray):
    """U22."""
    with pytest.raises(ClusterError, match=r"5 bundles.*room for 4"):
        RayVirtualCluster([5], use_gpus=True).get_placement_groups()


def test_what_others_hold_is_refused_and_told_from_what_does_not_exist(local_ray):
    """U22: free is looked at, not only total."""
    with RayVirtualCluster([9], use_gpus=False) as holder:
        holder.get_placement_groups()
        assert free_becomes("CPU", 3)
        with pytest.raises(ClusterError, match=r"need.* and exist, but only .*'CPU': 3\.0.* free"):
            RayVirtualCluster([4], use_gpus=False, timeout_s=0.5).get_placement_groups()
        with RayVirtualCluster([3], use_gpus=False) as fits:
            assert len(fits.get_bundles()) == 3
    assert free_becomes("CPU", 12)


def test_labels_choose_nodes_and_a_label_that_no_node_has_is_refused(local_ray):
    with RayVirtualCluster([1], use_gpus=False, label_selector={"role": "train"}) as cluster:
        assert len(cluster.get_bundles()) == 1
    with pytest.raises(ClusterError) as caught:
        RayVirtualCluster([1], use_gpus=False, label_selector={"role": "generation"}).get_placement_groups()
    assert "'role': 'generation'" in str(caught.value)
    assert "'role': 'train'" in str(caught.value)


def test_a_reservation_that_does_not_come_true_ends_at_its_deadline_and_is_removed(local_ray):
    """U16: two bundles on two different nodes, of which there is one."""
    cluster = RayVirtualCluster([2], use_gpus=False, placement_group_strategy="STRICT_SPREAD", timeout_s=1)
    with pytest.raises(ClusterError, match="was not ready after 1 s"):
        cluster.get_placement_groups()
    assert free_becomes("CPU", 12)
    states = {group["state"] for group in ray.util.placement_group_table().values()}
    assert states <= {"REMOVED"}


def test_one_group_over_all_bundles_is_made_for_the_spreading_strategies(local_ray):
    with RayVirtualCluster([1, 1], use_gpus=False, placement_group_strategy="PACK") as cluster:
        assert len(cluster.get_placement_groups()) == 1
        assert len(cluster.get_bundles()) == 2


@pytest.mark.parametrize(
    ("bundles", "options"),
    [
        ([], {}),
        ([2, 0], {}),
        ([1], {"max_colocated_worker_groups": 0}),
        ([1], {"placement_group_strategy": "ANY"}),
        ([1], {"slots_per_bundle": 0}),
        ([1], {"slots_per_bundle": 2, "max_colocated_worker_groups": 2}),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(bundles, options):
    with pytest.raises(ValueError):  # noqa: PT011 -- several rules, each with its own text
        RayVirtualCluster(bundles, **options)
