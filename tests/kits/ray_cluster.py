"""A Ray cluster of several raylets on loopback, in a process that a test kills parts of.

    python tests/kits/ray_cluster.py FOLDER PORT NAME…

Starts a head at PORT (0: any) and a raylet for each NAME, and writes a line of JSON: {"address", "gcs",
"raylets"}, the pids by name. Ends, with all of it, with its standard input.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from ray._private.utils import get_ray_address_file
from ray.cluster_utils import Cluster

SMALL: dict[str, Any] = {
    "num_cpus": 1,
    "object_store_memory": 80_000_000,
    "node_ip_address": "127.0.0.1",
    "include_dashboard": False,
}
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback stays loopback
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # 60 s by default: what Ray ends when its head is gone, it ends sooner here
    "RAY_gcs_rpc_server_reconnect_timeout_s": "4",
}


def main(folder: Path, port: int, names: list[str]) -> None:
    report = os.dup(1)
    os.dup2(2, 1)  # Ray prints
    head = {**SMALL, "temp_dir": str(folder), **({"gcs_server_port": port} if port else {})}
    # where Cluster writes the head's address, whatever its own folder is: missing where Ray never ran
    Path(get_ray_address_file(None)).parent.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(initialize_head=True, head_node_args=head)
    raylets: dict[str, int] = {}
    for name in names:
        node = cluster.add_node(**SMALL, resources={"polarnode_host": 1}, labels={"polarnode-host": name})
        raylets[name] = node.all_processes["raylet"][0].process.pid
    gcs = cluster.head_node.all_processes["gcs_server"][0].process.pid
    line = {"address": cluster.address, "gcs": gcs, "raylets": raylets}
    os.write(report, json.dumps(line).encode() + b"\n")
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
