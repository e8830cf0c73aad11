"""A value on the cluster as the driver holds it: its shape, and where it lies. Its bytes are fetched when read.

    metrics["loss"]           no byte moves
    float(metrics["loss"])    waits for the step, and fetches four bytes

Dropping the last reference frees the value on the cluster, with the next message.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from autopar.errors import DonatedBuffer
from autopar.runtime.distributed.pieces import Placed
from autopar.runtime.executables import KEY_IMPLEMENTATIONS, jax_dtype


class Owner(Protocol):
    """The owner of the values: the session of a cluster."""

    def fetch(self, values: Sequence[DistributedArray]) -> list[np.ndarray[Any, Any]]:
        """The bytes of values, whole; of random keys, their words."""
        ...

    def wait(self, values: Sequence[DistributedArray]) -> None:
        """Return when the values have been computed, and raise what kept them from it."""
        ...

    def forget(self, identity: int) -> None:
        """The driver holds the value no longer; may be called on any thread."""
        ...


class DistributedArray(NDArrayOperatorsMixin):
    """A value on the cluster, for the driver: like a `jax.Array`, and read like one.

    `np.asarray`, `float`, operators and `jax.device_get` fetch it; a step of the same cluster takes it as it lies.
    """

    # Weak: a handle can be a key of `jax.tree` caches and must be collected when the user drops it.
    __slots__ = ("__weakref__", "_deleted", "_fetched", "_finalizer", "dtype", "identity", "layout", "owner", "placed")

    def __init__(self, owner: Owner, identity: int, placed: Placed, layout: int) -> None:
        self.owner = owner
        self.identity = identity
        self.placed = placed
        self.layout = layout
        """The owner's number of `placed`: equal for values that lie alike."""
        self.dtype = jax_dtype(placed.dtype)
        self._deleted = False
        self._fetched: np.ndarray[Any, Any] | None = None
        self._finalizer = weakref.finalize(self, owner.forget, identity)
        self._finalizer.atexit = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions of the whole value."""
        return self.placed.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.placed.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.placed.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole value, counted once."""
        return self.size * self.dtype.itemsize

    @property
    def weak_type(self) -> bool:
        """True if the dtype is that of a Python number, which gives way to others."""
        return self.placed.weak_type

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype alone."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.weak_type)

    def is_deleted(self) -> bool:
        """Return True if the value was deleted, or donated to a step."""
        return self._deleted

    def delete(self) -> None:
        """Free the value on the cluster."""
        self.mark_donated()
        self.owner.forget(self.identity)

    def mark_donated(self) -> None:
        """The step that took the value frees it."""
        self._deleted = True
        self._fetched = None
        self._finalizer.detach()

    def block_until_ready(self) -> DistributedArray:
        """Wait until it has been computed."""
        self._check()
        self.owner.wait([self])
        return self

    def _check(self) -> None:
        if self._deleted:
            raise DonatedBuffer(
                f"A value of shape {self.shape} was donated to a step, or deleted, and is gone. "
                "Use the value that the step returned in its place, or do not donate it."
            )

    def words(self) -> np.ndarray[Any, Any]:
        """The bytes as numpy holds them: of random keys, their words."""
        self._check()
        if self._fetched is None:
            [self._fetched] = self.owner.fetch([self])
            self._fetched.flags.writeable = False
        return self._fetched

    def __jax_array__(self) -> jax.Array:
        if self.placed.dtype in KEY_IMPLEMENTATIONS:
            return jax.random.wrap_key_data(jnp.asarray(self.words()), impl=KEY_IMPLEMENTATIONS[self.placed.dtype])
        return jnp.asarray(self.words())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if self.placed.dtype in KEY_IMPLEMENTATIONS:
            raise TypeError("Random keys are no numbers. Use jax.random.key_data(jnp.asarray(keys)).")
        return np.array(self.words(), dtype=dtype, copy=True if copy is None else copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Operators compute on the driver, on numbers that were fetched."""
        numbers = [np.asarray(value) if isinstance(value, DistributedArray) else value for value in inputs]
        return getattr(ufunc, method)(*numbers, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index]

    def __len__(self) -> int:
        return len(np.asarray(self)) if not self.shape else self.shape[0]

    def __iter__(self) -> Any:
        return iter(np.asarray(self))

    def __float__(self) -> float:
        return float(np.asarray(self))

    def __int__(self) -> int:
        return int(np.asarray(self))

    def __index__(self) -> int:
        return np.asarray(self).__index__()

    def __bool__(self) -> bool:
        return bool(np.asarray(self))

    def item(self) -> Any:
        """The one number in it."""
        return np.asarray(self).item()

    def __format__(self, form: str) -> str:
        return format(np.asarray(self)[()] if not self.shape else np.asarray(self), form)

    def __repr__(self) -> str:
        state = ", deleted" if self._deleted else ""
        meshes = len({piece.layout for piece in self.placed.pieces})
        return f"DistributedArray({self.dtype}{list(self.shape)} on {len(self.placed.devices)} devices" + (
            f" of {meshes} meshes{state})" if meshes > 1 else f"{state})"
        )
