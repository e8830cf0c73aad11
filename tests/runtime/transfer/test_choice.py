"""The channel between processes is the best that is there, the same in all; one that no GPU has run says so."""

import importlib.util
from types import SimpleNamespace

import jax
import pytest

from autopar.errors import PlanMismatch, UntriedWarning
from autopar.runtime.transfer.choice import check_endpoints, chosen_endpoint
from autopar.runtime.transfer.jax_transfer import TransferServer


def test_processes_on_cpus_have_the_transfer_server_of_jax():
    assert isinstance(chosen_endpoint(0, [0], {0: jax.devices()[0]}, host="127.0.0.1"), TransferServer)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_gpus_without_cupy_have_it_too_and_are_told_that_it_is_untried():
    gpu = SimpleNamespace(platform="gpu", client=jax.devices()[0].client)
    with pytest.warns(
        UntriedWarning, match=r"by JAX's transfer server \(.*Install autopar\[cuda12\].*without GPUs only"
    ):
        endpoint = chosen_endpoint(0, [0], {0: gpu}, host="127.0.0.1")
    assert isinstance(endpoint, TransferServer)


def test_processes_that_chose_otherwise_are_named():
    check_endpoints(["Nccl", "Nccl"])
    with pytest.raises(PlanMismatch, match=r"Process 1 exchanges values by TransferServer, process 0 by Nccl\..*CuPy"):
        check_endpoints(["Nccl", "TransferServer"])
