"""Peak speed of devices: dense matrix products, without sparsity, as their makers give it."""

from __future__ import annotations

PEAKS: tuple[tuple[tuple[str, ...], float, float | None], ...] = (
    # Words of the device's name, TFLOP/s in bf16 and fp16, in fp32. The first row whose words are all there holds.
    # fp32 is without TF32, which torch leaves off unless it is told otherwise.
    (("B200",), 2250.0, None),  # NVIDIA DGX B200 datasheet (36 PFLOP/s over 8 with sparsity)
    (("H200",), 989.4, 67.0),  # NVIDIA H200 datasheet (1,979 with sparsity)
    (("H100", "NVL"), 835.5, 60.0),  # NVIDIA H100 datasheet (1,671 with sparsity)
    (("H100", "PCIe"), 756.5, 51.0),  # NVIDIA H100 PCIe product brief (1,513 with sparsity)
    (("H100",), 989.4, 67.0),  # NVIDIA H100 datasheet, SXM
    (("H800", "PCIe"), 756.5, 51.0),  # H100 PCIe with slower links
    (("H800",), 989.4, 67.0),  # H100 SXM with slower links
    (("A100",), 312.0, 19.5),  # NVIDIA A100 datasheet, PCIe and SXM alike
    (("A800",), 312.0, 19.5),  # A100 with slower links
    (("L40S",), 362.0, 91.6),  # NVIDIA L40S datasheet (733 with sparsity)
    (("910B2",), 376.0, None),  # 24 cores at the clock of the 910B3
    (("910B3",), 313.0, None),  # Huawei Atlas 800T A2: 2.5 PFLOP/s fp16 over 8
    (("910B4",), 280.0, None),  # Huawei Atlas 300T A2: 280 TFLOP/s fp16
)


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Peak of the device in TFLOP/s; None: it is not known.

    Args:
        device_name: as the driver gives it, such as ``NVIDIA H100 80GB HBM3`` or ``Ascend910B3``.
        dtype: ``fp32``, ``bf16`` or ``fp16``.
    """
    for words, half, single in PEAKS:
        if all(word in device_name for word in words):
            return single if dtype == "fp32" else half
    return None
