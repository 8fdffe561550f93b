"""How long the trainer waits for new weights to reach replicas, by each transport.

    python benchmarks/weights_transport.py [--megabytes 512] [--replicas 2] [--bucket 128] \\
        [--repeats 5] [--address HOST:PORT]

Real replicas with the native engine, as Ray actors; this process is rank 0. Transports take turns, so that
they meet the same machine. With an address the replicas are on that cluster's other machine, such as one
behind a cable (as root):

    STORE=2000000000 tests/runtime/netns.sh up /tmp/two
    tc -n strop-a qdisc add dev veth0 root tbf rate 4gbit burst 4mb latency 50ms  # a slower cable
    tests/runtime/netns.sh run python benchmarks/weights_transport.py --address 10.99.7.1:6399 \\
        --where "a 4 Gb/s cable"

Prints one JSON line per transport: the median and the spread of seconds, GB/s to each replica, and how long
the spare copy of the group took afterwards, for which nobody waits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from strop.config.compose import load
from strop.extras import require
from strop.runtime.ray.replica_pool import RayReplicaPool, ReplicaManager
from strop.runtime.rollout_replica import ReplicaSpec
from strop.runtime.weight_transports import BroadcastTransport, FileTransport, ObjectStoreTransport, Transport

NAMESPACE = "benchmark"
HIDDEN = 1024


def model_of(megabytes: int, folder: Path) -> dict[str, torch.Tensor]:
    """The configuration of a Llama of about this size in float32, in `folder`; its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_attention_heads": 16,
        "vocab_size": 8192,
    }
    layers = max(1, ((megabytes << 20) // 4 - 8192 * HIDDEN) // (16 * HIDDEN**2))
    config = LlamaConfig(**shape, num_hidden_layers=layers, tie_word_embeddings=True)
    config.save_pretrained(folder)
    return dict(LlamaForCausalLM(config).state_dict())


def replicas_at(ray: Any, folder: Path, count: int, far: bool) -> tuple[RayReplicaPool, Any]:
    """`far`: on the machine where this process is not. The keeper ends when nobody refers to it."""
    words = [f"actor_rollout_ref.model.path={folder}", "data.train_files=none"]
    recipe = ReplicaSpec(
        "native", load("ppo_trainer", words).config.actor_rollout_ref.model, {}, "float32", "cpu", False
    )
    here = ray.get_runtime_context().get_node_id()
    place: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 100}
    if far:
        other = next(node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here)
        place["resources"] = {f"node:{other['NodeManagerAddress']}": 0.01}
    keeper = (
        ray.remote(ReplicaManager)
        .options(name="pool", namespace=NAMESPACE, num_cpus=0)
        .remote(recipe, [place] * count, 300.0)
    )
    ray.get(keeper.deaths.remote())
    return RayReplicaPool(f"{ray.get_runtime_context().gcs_address} {NAMESPACE} pool"), keeper


def measure(transport: Transport, weights: dict[str, torch.Tensor], version: int) -> dict[str, float]:
    start = time.perf_counter()
    sent = transport.send(weights.items(), version)
    waited = time.perf_counter() - start
    if isinstance(transport, BroadcastTransport) and transport._copy_kept is not None:
        transport._copy_kept.result()
    return {"bytes": sent, "waited": waited, "spare": time.perf_counter() - start - waited}


def summary(name: str, rows: list[dict[str, float]], arguments: argparse.Namespace) -> dict[str, Any]:
    waited = sorted(row["waited"] for row in rows)
    median = statistics.median(waited)
    return {
        "transport": name,
        "where": arguments.where,
        "replicas": arguments.replicas,
        "bytes": int(rows[0]["bytes"]),
        "bucket_mb": arguments.bucket,
        "median_s": round(median, 3),
        "min_s": round(waited[0], 3),
        "max_s": round(waited[-1], 3),
        "gb_per_s": round(rows[0]["bytes"] / median / 1e9, 2),
        "spare_s": round(statistics.median(row["spare"] for row in rows), 3),
        "cores": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("megabytes", 512), ("replicas", 2), ("bucket", 128), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--address")
    parser.add_argument("--where", default="one machine", help="what the lines say of it")
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray = require("ray", extra="ray", why="This benchmark")
    own = {} if arguments.address else {"include_dashboard": False, "object_store_memory": 3 << 30}
    ray.init(
        address=arguments.address or "local",
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level="ERROR",
        **own,
    )
    with tempfile.TemporaryDirectory() as folder:
        weights = model_of(arguments.megabytes, Path(folder))
        pool, _keeper = replicas_at(ray, Path(folder), arguments.replicas, far=bool(arguments.address))
        transports: dict[str, Transport] = {
            "naive": ObjectStoreTransport(pool, arguments.bucket),
            "nccl (gloo)": BroadcastTransport(pool, arguments.bucket, torch.device("cpu"), 120.0),
            "file": FileTransport(pool, arguments.bucket, Path(folder) / "buckets"),
        }
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in transports}
        for turn in range(arguments.repeats + 1):
            for number, (name, transport) in enumerate(transports.items()):
                rows[name].append(measure(transport, weights, turn * len(transports) + number + 1))
        for name, transport in transports.items():
            print(
                json.dumps(summary(name, rows[name][1:], arguments))
            )  # the first turn makes connections and memory
            transport.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
