"""A Ray cluster of three nodes with roles on this machine: `python -m tests.rollout.ray_engines.nodes MODEL FOLDER`.

Engines are on theirs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from megaswift.errors import ConfigError
from megaswift.launchers.ray_cluster import LOOPBACK, ROLE_LABEL
from megaswift.rollout.backends.transformers_sampler import build
from megaswift.rollout.ray_engines import cluster
from megaswift.rollout.ray_engines.cluster import EngineSettings, open_cluster, place_engines
from megaswift.rollout.ray_engines.sampler import make_ray_sampler
from megaswift.rollout.sampler import SamplerOptions, SamplingParams
from tests.rollout.test_transformers import weights

SMALL = {"object_store_memory": 80_000_000}


def main(model: Path, folder: Path) -> None:
    """Say where engines are, and what they answer."""
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
    for factor in (1.5, 0.5):
        changed = [(name, tensor * factor) for name, tensor in weights(model)]
        alone.update_weights(changed)
        sampler.update_weights(changed)
        print("same:", sampler.generate(prompts, drawn, seeds) == alone.generate(prompts, drawn, seeds))
        roles = {node["NodeID"]: node["Labels"].get(ROLE_LABEL) for node in ray.nodes() if node["Alive"]}
        table = ray.util.placement_group_table(group.group)["bundles_to_node_id"]
        print("roles:", sorted(roles.get(node, "lost") for node in table.values()))
    sampler.close()
    nodes.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
