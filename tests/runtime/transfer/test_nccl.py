"""The NCCL endpoint: its order without a GPU, what it says without one, and values between GPUs where there are two."""

import importlib.util
import shutil
import subprocess
from collections import defaultdict, deque
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import Unsupported
from autopar.runtime.interfaces import Parcel
from autopar.runtime.transfer.endpoints import incoming, outgoing
from autopar.runtime.transfer.nccl import Nccl, Pair, Transmission, opening_order, sequence, taking
from tests.runtime.exchange_process import drawn_messages
from tests.runtime.worlds import world

GPUS = 0
if shutil.which("nvidia-smi"):
    GPUS = len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.splitlines())

PROCESS_OF = [0, 0, 1, 1, 2, 2, 3, 3]
PROCESSES = range(4)


@pytest.mark.parametrize("seed", range(5))
def test_the_kth_send_of_a_pair_meets_its_kth_receive(seed):
    sent: dict[Pair, list[tuple[int, Transmission]]] = defaultdict(list)
    received: dict[Pair, list[tuple[int, Transmission]]] = defaultdict(list)
    for message, values in enumerate(drawn_messages(8, PROCESS_OF, seed=seed)):
        plans = [moved.plan for moved in values]
        for process in PROCESSES:
            for _, parcels, _ in outgoing(plans, process, PROCESS_OF).posts:
                for transmission in sequence(parcels):
                    sent[transmission.pair].append((message, transmission))
            for _, parcels in incoming(plans, process, PROCESS_OF).pulls:
                for transmission in sequence(parcels):
                    received[transmission.pair].append((message, transmission))
    assert sent == received
    assert len(sent) > 20 and all(PROCESS_OF[source] != PROCESS_OF[destination] for source, destination in sent)


@pytest.mark.parametrize("seed", range(20))
def test_communicators_open_without_waiting_in_a_circle(seed):
    rng = np.random.default_rng(seed)
    pairs = [(a, b) for a, b in rng.integers(0, 8, (30, 2)).tolist() if PROCESS_OF[a] != PROCESS_OF[b]]
    queues = {process: deque(opening_order(pairs, process, PROCESS_OF)) for process in PROCESSES}
    opened: set[Pair] = set()
    # A pair opens when it is next at both of its ends.
    while ready := [q[0] for q in queues.values() if q and all(queues[PROCESS_OF[d]][0] == q[0] for d in q[0])]:
        for pair in set(ready):
            for device in pair:
                queues[PROCESS_OF[device]].popleft()
            opened.add(pair)
    assert opened == set(pairs)


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float16", "float8_e4m3fn", "bool", "int8", "uint8", "uint32", "complex64"],
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)], ids=str)
def test_bytes_become_an_array_that_may_be_donated(dtype, shape):
    values = np.random.default_rng(0).integers(-5, 5, shape).astype(jnp.dtype(dtype))
    raw = jnp.asarray(np.frombuffer(values.tobytes(), np.uint8))
    device = jax.devices()[0]
    parcel = Parcel(source=0, destination=1, shape=shape, dtype=values.dtype)
    array, copied = taking(parcel, device)(raw)
    assert (array.dtype, array.shape, array.devices()) == (values.dtype, values.shape, {device})
    assert np.asarray(array).tobytes() == values.tobytes()
    assert raw.unsafe_buffer_pointer() not in {array.unsafe_buffer_pointer(), copied.unsafe_buffer_pointer()}
    array.delete()
    assert copied.block_until_ready().is_ready() and raw[0] == copied


def test_elements_of_less_than_a_byte_are_refused():
    parcel = Parcel(source=0, destination=1, shape=(4,), dtype=jnp.dtype("int4"))
    with pytest.raises(Unsupported, match=r"Values of int4 have less than a byte .* Convert them to int8"):
        sequence([parcel])


def test_devices_that_are_no_gpus_are_refused():
    with pytest.raises(Unsupported, match=r"the devices here are cpu. Use JAX's transfer server"):
        Nccl(0, [0], {0: jax.devices()[0]})


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_without_cupy_the_message_says_what_to_install():
    with pytest.raises(Unsupported, match=r"Install autopar\[cuda12\] or autopar\[cuda13\]"):
        Nccl(0, [0], {0: SimpleNamespace(platform="gpu")})


@pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, there are {GPUS}")
@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy")
def test_values_go_from_gpu_to_gpu():
    gpu = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    with world("nccl", [gpu | {"CUDA_VISIBLE_DEVICES": str(number)} for number in range(2)]) as found:
        assert [process["wrong"] for process in found] == [[], []]
        assert all(process["wire_bytes"] for process in found)
