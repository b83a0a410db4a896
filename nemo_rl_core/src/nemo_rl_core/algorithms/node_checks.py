# SPDX-License-Identifier: Apache-2.0
"""Whether the nodes of a cluster that were chosen have what their workers need, asked before any worker starts."""

from collections.abc import Iterable

from nemo_rl_core.algorithms.assemble import model_settings
from nemo_rl_core.algorithms.engine import check_engine, wanted_distributions
from nemo_rl_core.algorithms.plan import RunPlan
from nemo_rl_core.config.run import RunConfig
from nemo_rl_core.distributed.environments import current_interpreter, require_compatible
from nemo_rl_core.distributed.nodes import ask_nodes
from nemo_rl_core.distributed.virtual_cluster import Bundle
from nemo_rl_core.errors import ModelError

__all__ = ["check_nodes"]

#: Seconds that a node gets to run its interpreter once; imports over a network file system take their time.
PROBE_TIMEOUT_S = 120.0


def check_nodes(config: RunConfig, plan: RunPlan, train: Iterable[Bundle], generation: Iterable[Bundle]) -> None:
    """Ask each chosen node for its versions and compare them with the driver's.

    Args:
        config: The whole config.
        plan: What is to run.
        train: The reserved places of the train workers.
        generation: Those of the generation workers.

    Raises:
        ClusterError: If a node does not answer, or has another Python, Ray or core than the driver.
        BackendError: If a generation node's engine or adapter is missing or does not fit; the subclass says which.
        ModelError: If a train node lacks the folder that it would load the weights from.
    """
    driver, folder = current_interpreter(), model_settings(config).folder
    environment = plan.train.environment
    folders = [] if folder is None else [folder]
    for report in ask_nodes(train, python=environment.python, folders=folders, timeout_s=PROBE_TIMEOUT_S):
        require_compatible(report.interpreter, driver, environment=environment.name, node=report.node_ip)
        if report.missing_folders:
            raise ModelError(
                f"policy.model_name: train node {report.node_ip} has no folder {folder!r}; train workers load the weights "
                "from it, so copy or mount it there under the same path. Generation nodes do not need it"
            )
    spec, environment, chosen = plan.backend, plan.generation.environment, plan.chosen
    adapter = (chosen.distribution, chosen.version) if chosen.node else None
    reports = ask_nodes(
        generation,
        python=environment.python,
        modules=[spec.worker_class.partition(":")[0]],
        distributions=[*wanted_distributions(spec), *filter(None, [chosen.distribution])],
        timeout_s=PROBE_TIMEOUT_S,
    )
    for report in reports:
        require_compatible(report.interpreter, driver, environment=environment.name, node=report.node_ip)
        check_engine(spec, report.interpreter, environment, node=report.node_ip, adapter=adapter)
