"""Devices in pairs with slow links between these, where stages pay off."""

import dataclasses

import autopar
from autopar.hardware.machine import Link, Machine


def slow_links(num_devices: int = 4, *, link: float = 1e7, flops: float = 1e9) -> autopar.Cluster:
    """Return hosts of two devices each, with `link` bytes a second between them, whose kernels take no time to start.

    Within a host there are 10^10 bytes a second; products have `flops` FLOPs a second at every size.
    """
    inter = Link(latency_s=1e-6, bandwidth=link, ramp_bytes=0.0)
    machine = dataclasses.replace(
        Machine.named("p3.16xlarge"),
        name="pairs",
        devices_per_host=2,
        domain=2,
        inter=inter,
        intra=dataclasses.replace(inter, bandwidth=1e10),
        peak_flops={"float32": flops},
        matmul_share={"float32": 1.0},
        matmul_half_flops=0.0,
        kernel_s=0.0,
        sources={},
    )
    return autopar.Cluster(num_devices=num_devices, machine=machine)
