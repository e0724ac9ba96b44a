"""The catalogue of GPUs that a plan can be made for, and the device of a pod without a GPU.

Rates are dense (no 2:4 sparsity) and from the vendors' data sheets (`source`). Memory is the total of `cudaMemGetInfo`,
which is 1 to 8 % less than the nominal size because of firmware, ECC and page tables; it is the smallest total that
PyTorch's out-of-memory messages report for the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

GIB = 2**30


class UnknownGPU(ValueError):  # noqa: N818 - named for what the user gave
    """A GPU product that is not in the catalogue; the message names the closest ones."""


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU. Unknown rates are None; a plan then omits what depends on them."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float | None = None
    flops_16bit: float | None = None
    """Dense bf16 tensor-core rate; fp16 on GPUs without bf16."""
    flops_fp8: float | None = None
    """None for GPUs without fp8."""
    link_bytes_per_s: float = 32e9
    """To the other GPUs of a node, in one direction: NVLink, else PCIe; PCIe 4.0 x16 where nothing is known."""
    supports_bf16: bool = True
    node_labels: tuple[str, ...] = ()
    """The values that GPU feature discovery sets for the node label `label_key`."""
    source: str = ""
    resource_name: str = "nvidia.com/gpu"
    label_key: str = "nvidia.com/gpu.product"


@dataclass(frozen=True, slots=True)
class CPU:
    """The device of a pod without a GPU: its container's memory, and rates if they were measured."""

    memory_bytes: int
    name: str = "cpu"
    bandwidth_bytes_per_s: float | None = None
    flops_16bit: float | None = None


Device = GPU | CPU


def has_fp8(device: Device) -> bool:
    """Whether it has arithmetic in fp8, which an fp8 cache needs."""
    return isinstance(device, GPU) and device.flops_fp8 is not None


_WITHOUT_BF16 = ("v100-16gb", "v100-32gb", "t4")


def _gpu(
    name: str, memory_gib: float, bandwidth_gb_s: float, tflops_16bit: float, tflops_fp8: float | None,
    link_gb_s: float, source: str, labels: tuple[str, ...],
) -> GPU:  # fmt: skip
    return GPU(
        name,
        int(memory_gib * GIB),
        bandwidth_bytes_per_s=bandwidth_gb_s * 1e9,
        flops_16bit=tflops_16bit * 1e12,
        flops_fp8=None if tflops_fp8 is None else tflops_fp8 * 1e12,
        link_bytes_per_s=link_gb_s * 1e9,
        supports_bf16=name not in _WITHOUT_BF16,
        node_labels=labels,
        source=f"NVIDIA {source}",
    )


_V100 = "V100 data sheet"
_CATALOGUE = (
    _gpu("v100-16gb", 15.77, 900, 125, None, 16, _V100, ("Tesla-V100-SXM2-16GB", "Tesla-V100-PCIE-16GB")),
    _gpu("v100-32gb", 31.73, 900, 125, None, 150, _V100, ("Tesla-V100-SXM2-32GB", "Tesla-V100-SXM3-32GB")),
    _gpu("t4", 14.56, 320, 65, None, 16, "T4 data sheet", ("Tesla-T4",)),
    _gpu("a10", 22.06, 600, 125, None, 32, "A10 data sheet", ("NVIDIA-A10",)),
    _gpu("a10g", 22.06, 600, 70, None, 32, "A10G data sheet (the GPU of AWS g5)", ("NVIDIA-A10G",)),
    _gpu("l4", 22.03, 300, 121, 242, 32, "L4 data sheet", ("NVIDIA-L4",)),
    _gpu("rtx-4090", 23.52, 1008, 165.2, 330.3, 32, "Ada GPU architecture white paper", ("NVIDIA-GeForce-RTX-4090",)),
    _gpu("l40s", 44.40, 864, 362, 733, 32, "L40S data sheet", ("NVIDIA-L40S",)),
    _gpu(
        "a100-40gb", 39.39, 1555, 312, None, 300, "A100 data sheet", ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB")
    ),
    _gpu("a100-80gb", 79.15, 2039, 312, None, 300, "A100 data sheet", ("NVIDIA-A100-SXM4-80GB",)),
    _gpu("a100-80gb-pcie", 79.15, 1935, 312, None, 32, "A100 data sheet", ("NVIDIA-A100-80GB-PCIe",)),
    _gpu("h100-80gb", 79.10, 3350, 989.4, 1978.9, 450, "H100 data sheet (SXM)", ("NVIDIA-H100-80GB-HBM3",)),
    _gpu("h100-80gb-pcie", 79.10, 2000, 756, 1513, 64, "H100 data sheet (PCIe)", ("NVIDIA-H100-PCIe",)),
    _gpu("h100-nvl", 93.00, 3900, 835.5, 1670.5, 64, "H100 NVL data sheet", ("NVIDIA-H100-NVL",)),
    _gpu("gh200-96gb", 94.50, 4000, 989.4, 1978.9, 450, "GH200 data sheet", ("NVIDIA-GH200-480GB",)),
    _gpu("h200-141gb", 139.72, 4800, 989.4, 1978.9, 450, "H200 data sheet", ("NVIDIA-H200",)),
    _gpu("b200-180gb", 178.35, 7700, 2250, 4500, 900, "DGX B200 data sheet", ("NVIDIA-B200",)),
    GPU(
        name="mi300x-192gb",
        memory_bytes=int(191.69 * GIB),
        bandwidth_bytes_per_s=5.3e12,
        flops_16bit=1307.4e12,
        flops_fp8=2614.9e12,
        link_bytes_per_s=448e9,
        node_labels=("AMD_Instinct_MI300X_OAM", "AMD_Instinct_MI300X"),
        source="AMD Instinct MI300X data sheet",
        resource_name="amd.com/gpu",
        label_key="amd.com/gpu.product-name",
    ),
)

GPUS: dict[str, GPU] = {gpu.name: gpu for gpu in _CATALOGUE}
"""The catalogue by product name, as in `--gpu` and `spec.resources.gpu.product`."""

_ALIASES = {
    "h100": "h100-80gb", "h100-sxm": "h100-80gb", "h100-pcie": "h100-80gb-pcie", "h200": "h200-141gb",
    "b200": "b200-180gb", "gh200": "gh200-96gb", "mi300x": "mi300x-192gb", "a100": "a100-40gb", "4090": "rtx-4090",
    "rtx4090": "rtx-4090", "v100": "v100-16gb", "h100-94gb": "h100-nvl",
}  # fmt: skip


def find_gpu(name: str) -> GPU:
    """The GPU of a catalogue name, an alias, or a node's product label. Raises `UnknownGPU`."""
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    known = {**GPUS, **{alias: GPUS[target] for alias, target in _ALIASES.items()}}
    for gpu in _CATALOGUE:
        known |= {label.lower().replace("_", "-"): gpu for label in gpu.node_labels}
    if wanted in known:
        return known[wanted]
    close = {known[match].name: None for match in get_close_matches(wanted, known, n=4, cutoff=0.5)}
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise UnknownGPU(f"GPU {name!r} is not in the catalogue: {hint}known are {', '.join(GPUS)}")
