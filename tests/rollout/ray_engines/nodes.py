"""A Ray cluster of three nodes with roles on this machine: `python -m tests.rollout.ray_engines.nodes MODEL FOLDER`.

Engines are on theirs."""

from __future__ import annotations

import os
import sys
import time
from itertools import cycle
from pathlib import Path
from threading import Timer
from typing import Any

from megaswift.errors import ConfigError, UserError
from megaswift.launchers.ray_cluster import LOOPBACK, ROLE_LABEL
from megaswift.rollout.backends.transformers_sampler import build
from megaswift.rollout.ray_engines import cluster
from megaswift.rollout.ray_engines import sampler as module
from megaswift.rollout.ray_engines.cluster import EngineSettings, open_cluster, place_engines
from megaswift.rollout.ray_engines.sampler import make_ray_sampler
from megaswift.rollout.sampler import SamplerOptions, SamplingParams
from tests.rollout.test_transformers import weights

SMALL = {"object_store_memory": 80_000_000}


def main(model: Path, folder: Path) -> None:
    """Print where engines are, and whether they answer as a sampler in the process; nodes are lost and added."""
    os.environ |= LOOPBACK
    import ray
    from ray.cluster_utils import Cluster

    nodes: Any = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 4, "labels": {ROLE_LABEL: "trainer"}, **SMALL}
    )
    open_cluster(nodes.address, 1)  # while there is one node, on which this process then is
    engine_node = {"num_cpus": 1, "labels": {ROLE_LABEL: "engines"}, **SMALL}
    for _ in range(2):
        nodes.add_node(**engine_node)
    options = SamplerOptions(dtype="float32", batch_size=2, sync_folder=folder / "sync")
    settings = EngineSettings("transformers", 2, 1, 0, str(model), options, str(folder))

    # There is room for two engines on their nodes, and no third one on the trainer's.
    cluster.PLACED_SECONDS = 3.0
    try:
        place_engines(EngineSettings("transformers", 3, 1, 0, str(model), options, str(folder)))
    except ConfigError as error:
        print(error.message())
    cluster.PLACED_SECONDS = 60.0
    group = place_engines(settings)
    sampler = make_ray_sampler(group, settings, model, 0)

    prompts = [[3, 9, 12, 2], [3, 30, 31, 32, 33, 2], [3, 8, 2]] * 4
    drawn = SamplingParams(12, temperature=1.3, stop_token_ids=(1,))
    seeds = [*range(len(prompts))]
    alone = build(model, options)
    factors = cycle((1.5, 0.5, 0.8))

    def bundles() -> list[str]:
        return [*ray.util.placement_group_table(group.group)["bundles_to_node_id"].values()]

    def round_of_weights() -> None:
        factor = next(factors)
        changed = [(name, tensor * factor) for name, tensor in weights(model)]
        alone.update_weights(changed)
        sampler.update_weights(changed)
        print("same:", sampler.generate(prompts, drawn, seeds) == alone.generate(prompts, drawn, seeds))
        roles = {node["NodeID"]: node["Labels"].get(ROLE_LABEL) for node in ray.nodes() if node["Alive"]}
        print("roles:", sorted(roles.get(node, "lost") for node in bundles()))

    def lose(node_id: str) -> None:
        [node] = [node for node in nodes.list_all_nodes() if node.node_id == node_id]
        nodes.remove_node(node, allow_graceful=False)

    for _ in range(2):
        round_of_weights()

    # The node of one engine is lost during a round, and there is no other one for it.
    loss = Timer(0.5, lose, [bundles()[0]])
    loss.start()
    while sampler.dispatcher.there() == [0, 1]:
        sampler.generate(prompts, drawn, seeds)
    loss.join()
    while not group.without_node():
        time.sleep(0.5)
    round_of_weights()

    # A new node takes it.
    nodes.add_node(**engine_node)
    while len(sampler.dispatcher.there()) < 2:
        sampler.generate(prompts, drawn, seeds)
    round_of_weights()
    print("restarts:", sampler.restarts())

    # All are lost, and nobody adds a node.
    module.LOST_SECONDS = 5.0
    for node in bundles():
        lose(node)
    try:
        sampler.generate(prompts, drawn, seeds)
    except UserError as error:
        print(error.message())
    sampler.close()
    nodes.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
