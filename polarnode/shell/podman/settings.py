"""What a node's runtimes are told."""

from pathlib import Path

from attrs import frozen


@frozen(kw_only=True)
class RuntimesSettings:
    """`state_dir` may be shared by nodes, `node_id` is on every container's label. None for the folder of recipes is the checkout's own."""

    state_dir: Path
    node_id: str
    runtimes_dir: Path | None = None
    base_image: str | None = None  # a Debian image to build on; None: one that can be pulled, else one built from this machine's archive
    warm: int = 8  # started containers kept of one shape at most: as many as INIT and READY hold; about 1 MB each, and only while they are wanted
    prepared: int = 32  # prepared workspaces kept as images
    calls: int = 6  # calls to Podman at once: on two cores more than 4-8 only wait for each other (3.6 lifecycles/s at 8, 2.0 at 32)
    volumes: tuple[str, ...] = ()  # folders below which tasks may mount
    disk_reserve_mb: int = 4096  # MiB left free on the disk of the containers: half of it left, and the largest is ended
