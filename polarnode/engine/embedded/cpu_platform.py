"""SGLang's out-of-tree platform for machines without a GPU: the same engine on torch's own kernels.

SGLang finds it by the entry point `polarnode_cpu` (group `sglang.srt.platforms`) and calls `activate()` in
every process where this package is installed, on GPU hosts too. So `activate()` returns None unless
`SGLANG_PLATFORM` names this platform, and the module imports only what SGLang's platform layer has imported
already.
"""

import os

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformCapabilities, PlatformEnum, SRTPlatform

NAME = "polarnode_cpu"


def activate() -> str | None:
    """The platform class's qualified name when the node chose this platform, else None: a GPU host must never
    end up on a CPU by accident.
    """
    return f"{__name__}:CpuPlatform" if os.environ.get("SGLANG_PLATFORM") == NAME else None


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # sglang is not typed
    """The platform of CPU hosts. OOT makes SGLang take its `forward_native` paths: `is_cpu()` stays false, so
    the CUDA-only `sgl_kernel` wheel is never imported.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()  # every default is "no": no Triton, no graph capture

    def init_backend(self) -> None:
        """Install the parts for CPUs. SGLang calls this once in each worker, before a model is made."""
        from polarnode.engine.embedded import cpu_attention

        cpu_attention.install_cpu_attention()
        cpu_attention.install_cpu_experts()
        cpu_attention.install_cpu_adapters()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False
