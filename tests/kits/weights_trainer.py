"""A trainer's end of an update, as a program: `python weights_trainer.py cpu|cuda`, a line of JSON in, a line
of JSON out.

{"do": "load", "path"}: have that checkpoint's weights. {"do": "payload", "flat", "names"}: handles of them,
base64. {"do": "spoil", "name", "shape"}: one tensor of another shape. {"do": "join", "port", "backend", "name"} and
{"do": "send", "names"}: a group with this process as rank 0.
"""

import json
import sys
from pathlib import Path
from typing import Any


class Trainer:
    def __init__(self, device: str) -> None:
        import torch

        torch.multiprocessing.set_sharing_strategy("file_system")  # the other end is no child of this process
        self.device = device
        self.tensors: dict[str, Any] = {}
        self.group: Any = None
        self.sent: list[Any] = []  # alive until the end

    def load(self, path: str) -> list[str]:
        from safetensors.torch import load_file

        found: dict[str, Any] = {}
        for file in sorted(Path(path).glob("*.safetensors")):
            found |= load_file(file)
        self.tensors = {name: tensor.to(self.device) for name, tensor in found.items()}
        return sorted(self.tensors)

    def spoil(self, name: str, shape: list[int]) -> str:
        import torch

        self.tensors[name] = torch.zeros(shape, device=self.device)
        return name

    def payload(self, names: list[str], flat: bool = False) -> str:
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        named = [(name, self.tensors[name]) for name in names]
        if not flat:
            self.sent.append(named)
            return str(MultiprocessingSerializer.serialize(named, output_str=True))
        bucket = FlattenedTensorBucket(named_tensors=named)
        self.sent.append(bucket)
        said = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        return str(MultiprocessingSerializer.serialize(said, output_str=True))

    def bucket(self, names: list[str]) -> dict[str, Any]:
        tensors = [self.tensors[name] for name in names]
        return {
            "names": names,
            "dtypes": [str(each.dtype).removeprefix("torch.") for each in tensors],
            "shapes": [list(each.shape) for each in tensors],
        }

    def join(self, port: int, backend: str = "gloo", world_size: int = 2, name: str = "weights") -> str:
        from sglang.srt.utils import init_custom_process_group

        address = f"tcp://127.0.0.1:{port}"
        self.group = init_custom_process_group(
            backend=backend, init_method=address, world_size=world_size, rank=0, group_name=name
        )
        return "joined"

    def send(self, names: list[str]) -> int:
        import torch

        for name in names:
            torch.distributed.broadcast(self.tensors[name], src=0, group=self.group)
        return len(names)


def main() -> None:
    trainer, answers = Trainer(sys.argv[1]), sys.stdout
    sys.stdout = sys.stderr  # what libraries print is no answer
    for line in sys.stdin:
        order = json.loads(line)
        answers.write(json.dumps(getattr(trainer, order.pop("do"))(**order)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
