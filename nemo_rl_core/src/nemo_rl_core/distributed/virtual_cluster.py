# SPDX-License-Identifier: Apache-2.0
"""Reserved places for workers: placement groups, and the order of their bundles, which is the order of ranks."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_core.errors import ClusterError

__all__ = ["Bundle", "RayVirtualCluster"]

#: Seconds in which resources of workers that just ended may still come back.
_RELEASE_GRACE_S = 10.0
_POLL_S = 0.1
_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """One worker's place.

    Attributes:
        placement_group: The group that holds it.
        index: Its index within that group, which says nothing about rank order.
        node_id: Ray's id of the node.
        node_ip: Address of that node, as its peers reach it.
        gpu_id: The device as an opaque text (an index or a UUID), "" on CPU; of several, all of them joined by ",".
    """

    placement_group: PlacementGroup
    index: int
    node_id: str
    node_ip: str
    gpu_id: str


class RayVirtualCluster:
    """Bundles reserved in a Ray cluster, allocated on first use.

    With ``STRICT_PACK`` (the default) each entry of ``bundle_ct_per_node_list`` is a placement group of its own that
    lies on one node. With another strategy one group holds all bundles. The choice is made here and never changes.
    """

    def __init__(
        self,
        bundle_ct_per_node_list: Sequence[int],
        *,
        use_gpus: bool = True,
        slots_per_bundle: int = 1,
        max_colocated_worker_groups: int = 1,
        name: str = "cluster",
        placement_group_strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "STRICT_PACK",
        label_selector: Mapping[str, str] | None = None,
        timeout_s: float = 180.0,
    ) -> None:
        """Describe what is needed; nothing is reserved yet.

        Args:
            bundle_ct_per_node_list: Number of workers on each node.
            use_gpus: Whether a slot is a GPU.
            slots_per_bundle: GPUs, or CPU slots, of one worker: as many as it has ranks of its own.
            max_colocated_worker_groups: Worker groups that may share these bundles; each takes one CPU, and its
                share of the GPU.
            name: For messages and Ray's dashboard.
            placement_group_strategy: Ray's strategy.
            label_selector: Labels that the nodes must have, e.g. ``{"role": "train"}``.
            timeout_s: Seconds to wait for the reservation.

        Raises:
            ValueError: If a number or the strategy is out of its range.
        """
        if not bundle_ct_per_node_list or min(bundle_ct_per_node_list) < 1:
            raise ValueError(f"each node needs at least one bundle, got {list(bundle_ct_per_node_list)}")
        if slots_per_bundle < 1 or (slots_per_bundle > 1 and max_colocated_worker_groups > 1):
            raise ValueError(
                "slots_per_bundle must be at least 1, and 1 where worker groups share a bundle, got "
                f"{slots_per_bundle} and {max_colocated_worker_groups} groups"
            )
        if max_colocated_worker_groups < 1:
            raise ValueError(f"max_colocated_worker_groups must be at least 1, got {max_colocated_worker_groups}")
        strategies = ("STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD")
        if placement_group_strategy not in strategies:
            raise ValueError(f"placement_group_strategy must be one of {strategies}, got {placement_group_strategy!r}")
        self.bundle_ct_per_node_list = tuple(bundle_ct_per_node_list)
        self.use_gpus = use_gpus
        self.slots_per_bundle = slots_per_bundle
        self.max_colocated_worker_groups = max_colocated_worker_groups
        self.name = name
        self.placement_group_strategy = placement_group_strategy
        self.label_selector = dict(label_selector or {})
        self.timeout_s = timeout_s
        self._groups: list[PlacementGroup] = []
        self._bundles: tuple[Bundle, ...] = ()

    def world_size(self) -> int:
        """Return the number of bundles, which is the number of workers of a group on this cluster."""
        return sum(self.bundle_ct_per_node_list)

    def node_count(self) -> int:
        """Return the number of node entries asked for."""
        return len(self.bundle_ct_per_node_list)

    def get_placement_groups(self) -> list[PlacementGroup]:
        """Return the placement groups, reserving them on the first call.

        Raises:
            ClusterError: If the cluster has not, or does not become to have, what is asked for.
        """
        if not self._groups:
            self._reserve()
        return list(self._groups)

    def get_bundles(self) -> tuple[Bundle, ...]:
        """Return all bundles in rank order: by node, and within a node by device.

        Ray's own order of bundles is arbitrary; ranks of one tensor-parallel group would end up on several nodes.

        Raises:
            ClusterError: As ``get_placement_groups``; also if a device cannot be identified in time.
        """
        if not self._bundles:
            groups = self.get_placement_groups()
            try:
                self._bundles = tuple(sorted(self._locate(groups), key=_rank_order))
            except ClusterError:
                self.shutdown()
                raise
        return self._bundles

    def shutdown(self) -> None:
        """Give the reservation back. Calling it twice, or after Ray's end, is fine."""
        groups, self._groups, self._bundles = self._groups, [], ()
        if ray.is_initialized():
            for group in groups:
                remove_placement_group(group)

    def __enter__(self) -> "RayVirtualCluster":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _bundle_resources(self) -> dict[str, float]:
        """Return the resources of one bundle."""
        resources: dict[str, float] = {"CPU": float(self.slots_per_bundle * self.max_colocated_worker_groups)}
        if self.use_gpus:
            resources["GPU"] = float(self.slots_per_bundle)
        return resources

    def _reserve(self) -> None:
        """Create the groups and wait for them; on any failure remove them all."""
        if not ray.is_initialized():
            raise ClusterError(f"{self.name}: Ray is not running in this process; call start_ray() first")
        deadline = time.monotonic() + self.timeout_s
        self._check_total()
        self._await_free(min(deadline, time.monotonic() + _RELEASE_GRACE_S))
        per_node = self.placement_group_strategy == "STRICT_PACK"
        counts = self.bundle_ct_per_node_list if per_node else (self.world_size(),)
        try:
            for entry, count in enumerate(counts):
                self._groups.append(self._create(f"{self.name}-{entry}", count))
            for entry, group in enumerate(self._groups):
                if not group.wait(timeout_seconds=max(0.0, deadline - time.monotonic())):
                    raise ClusterError(
                        f"{self.name}: placement group {entry} ({counts[entry]} bundles of {self._bundle_resources()}, "
                        f"strategy {self.placement_group_strategy}{self._labels_text()}) was not ready after "
                        f"{self.timeout_s:g} s; free now: {_amounts(ray.available_resources())}. It was removed."
                    )
        except BaseException:  # also Ctrl-C: a reservation that nobody waits for would block the next run
            self.shutdown()
            raise

    def _create(self, name: str, count: int) -> PlacementGroup:
        """Ask Ray for one group."""
        selectors: dict[str, Any] = {}
        if self.label_selector:
            selectors["bundle_label_selector"] = [dict(self.label_selector) for _ in range(count)]
        bundles = [self._bundle_resources() for _ in range(count)]
        # Ray wants names of groups to be unique; a second run, or a cluster of the same name, is no mistake.
        unique = f"{name}-{uuid.uuid4().hex[:12]}"
        return placement_group(bundles, strategy=self.placement_group_strategy, name=unique, **selectors)

    def _labels_text(self) -> str:
        return f", labels {self.label_selector}" if self.label_selector else ""

    def _matching_nodes(self) -> list[dict[str, Any]]:
        """Return Ray's facts on the living nodes that have the labels."""
        return [
            node
            for node in ray.nodes()
            if node["Alive"] and self.label_selector.items() <= node.get("Labels", {}).items()
        ]

    def _check_total(self) -> None:
        """Refuse what this cluster could never give."""
        nodes = self._matching_nodes()
        if not nodes:
            seen = [node.get("Labels", {}) for node in ray.nodes() if node["Alive"]]
            raise ClusterError(
                f"{self.name}: no node has the labels {self.label_selector}; labels of the living nodes: {seen}"
            )
        bundle = self._bundle_resources()
        room = sorted((_bundles_that_fit(node["Resources"], bundle) for node in nodes), reverse=True)
        if sum(room) < self.world_size():
            totals = [_amounts(node["Resources"]) for node in nodes]
            raise ClusterError(
                f"{self.name}: {self.world_size()} bundles of {bundle} were asked for{self._labels_text()}, the cluster "
                f"has room for {sum(room)} in all: {totals}. Ask for fewer or add nodes."
            )
        largest = max(self.bundle_ct_per_node_list)
        if self.placement_group_strategy == "STRICT_PACK" and largest > room[0]:
            raise ClusterError(
                f"{self.name}: {largest} bundles of {bundle} were asked for on one node, the largest node has room for "
                f"{room[0]}; spread them over more entries of bundle_ct_per_node_list"
            )

    def _await_free(self, deadline: float) -> None:
        """Wait a short while for resources of ended workers, then refuse what is taken by others."""
        needed = {key: amount * self.world_size() for key, amount in self._bundle_resources().items()}
        while True:
            free = ray.available_resources()
            if all(free.get(key, 0.0) >= amount for key, amount in needed.items()):
                return
            if time.monotonic() >= deadline:
                raise ClusterError(
                    f"{self.name}: {needed} are needed and exist, but only {_amounts(free)} are free: other workers or "
                    "reservations hold the rest; shut them down or ask for less"
                )
            time.sleep(_POLL_S)

    def _locate(self, groups: Sequence[PlacementGroup]) -> list[Bundle]:
        """Find node and device of each bundle."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        places: list[tuple[PlacementGroup, int, str]] = []
        for group in groups:
            nodes = placement_group_table(group)["bundles_to_node_id"]
            places += [(group, int(index), node_id) for index, node_id in nodes.items()]
        devices = self._devices(places) if self.use_gpus else [""] * len(places)
        return [
            Bundle(placement_group=group, index=index, node_id=node_id, node_ip=addresses[node_id], gpu_id=device)
            for (group, index, node_id), device in zip(places, devices, strict=True)
        ]

    def _devices(self, places: Sequence[tuple[PlacementGroup, int, str]]) -> list[str]:
        """Ask a small task in each bundle which GPUs it was given: Ray tells nobody else."""
        share = 0.01 if self.slots_per_bundle == 1 else self.slots_per_bundle
        probe = ray.remote(num_cpus=0, num_gpus=share, max_retries=0)(_own_gpus)
        refs = []
        for group, index, _ in places:
            strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
            refs.append(probe.options(scheduling_strategy=strategy).remote())
        try:
            return ray.get(refs, timeout=_PROBE_TIMEOUT_S)
        except RayError as error:
            raise ClusterError(f"{self.name}: could not ask the bundles for their GPUs: {error}") from error


def _own_gpus() -> str:
    """Return the GPUs that Ray gave to this task, as text."""
    return ",".join(map(str, ray.get_gpu_ids()))


def _rank_order(bundle: Bundle) -> tuple[str, int, int, str, int]:
    """Return the sort key: node, then device (indices as numbers, other ids as text), then bundle index."""
    first = bundle.gpu_id.partition(",")[0]
    numeric = first.isdecimal()
    device = int(first) if numeric else 0
    return (bundle.node_id, 0 if numeric else 1, device, bundle.gpu_id, bundle.index)


def _bundles_that_fit(resources: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """Return how many bundles a node could hold."""
    return int(min(resources.get(key, 0.0) // amount for key, amount in bundle.items()))


def _amounts(resources: Mapping[str, float]) -> dict[str, float]:
    """Return the CPUs and GPUs of a node or of the cluster."""
    return {key: resources.get(key, 0.0) for key in ("CPU", "GPU")}
