"""Inter-operator parallelism: the layers in stages, the devices in submeshes, and which stage gets which."""
