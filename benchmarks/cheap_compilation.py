"""Settings of XLA under which CPU programs compile in about half of the time: they run slower, and give the same."""

from importlib.metadata import version

_FLAGS = {"xla_cpu_use_fusion_emitters": "false", "xla_cpu_parallel_codegen_split_count": "1"}


def cheap_xla_flags(given: str, **more: str) -> str:
    """Return `XLA_FLAGS` with these settings and `more`; what `given` names stays as it is.

    It must stand in the environment before JAX starts a backend. Releases of jaxlib after 0.10 have no other emitters.
    """
    flags = more | (_FLAGS if version("jaxlib").startswith("0.10.") else {})
    return " ".join([given, *(f"--{name}={value}" for name, value in flags.items() if name not in given)]).strip()
