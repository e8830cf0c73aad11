"""The fields that methods share: what each may be, and the error for anything else.

MEMORY_LEVELS, KINDS, ...   the words that a field may have
FIELD_CHECKS                the check of every field by its name, so that methods that share a field share its check
as_offload, placement_of    what is given, as a method keeps it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from jax.sharding import PartitionSpec

from autopar.checks import (
    BATCH_STATISTICS,
    RANDOM,
    check_choice,
    check_count,
    check_pattern,
    check_spec,
    is_number,
    is_text,
    is_whole,
    plain_value,
)
from autopar.errors import InvalidArgument
from autopar.ir.schedule import Schedule
from autopar.ir.schedules import get_schedule

MEMORY_LEVELS = {"off": math.inf, "adaptive": 0.9, "slight": 0.75, "moderate": 0.6, "heavy": 0.4}
"""The share of a device's memory that a plan may use, a tenth being left to what is not modelled; "off": no limit."""

EFFORTS = {"fast": 4, "normal": 32, "thorough": math.inf}
"""The parts of the space of all plans that a search looks into, the most promising first."""

ZERO_STAGES = (0, 1, 2, 3)
"""The stages of ZeRO: how much of the state replicas divide; 0: nothing."""

OFFLOADS = ("optimizer", "parameters", "activations")
"""Values that may live in pinned memory of the hosts while no task uses them."""

PLACEMENTS = ("intra_node_model", "intra_node_replica")
"""The devices that lie within a host: those that share the work on an example, or the replicas."""

KINDS = ("data", "zero", "tensor", "sequence", "expert", "pipeline")
"""The kinds of parallelism to which a search can be restricted."""

LAYOUTS = ("given", "search")
"""The authors of layouts of inputs of stages by hand that no spec names: a rule, or the solver."""

_USUAL_AXES = ("data", "model", "expert")


def given_devices(
    placement: Sequence[Sequence[int]], num_devices: int, degrees: tuple[int, int, int]
) -> tuple[tuple[int, ...], ...]:
    """Return the devices of every stage as they are given; `InvalidArgument` unless they are all, each once."""
    data, tensor, pipeline = degrees
    given = tuple(tuple(stage) for stage in placement)
    if [len(stage) for stage in given] != [data * tensor] * pipeline:
        sizes = " + ".join(str(len(stage)) for stage in given)
        raise InvalidArgument(
            f"placement has {sizes} devices in {len(given)} lists, and Megatron has {pipeline} stages of data={data} x "
            f"tensor={tensor} devices. Give {pipeline} lists of {data * tensor}."
        )
    if sorted(device for stage in given for device in stage) != list(range(num_devices)):
        raise InvalidArgument(
            f"placement is {[list(stage) for stage in given]}, which has not each of the devices 0 to "
            f"{num_devices - 1} once. Give every device one place."
        )
    return given


def placement_of(placement: Any) -> str | tuple[tuple[int, ...], ...]:
    """Return a placement with tuples of Python's numbers; `InvalidArgument` for what is none."""
    if is_text(placement):
        check_choice("placement", placement, PLACEMENTS)
        return placement
    lists = cast(Sequence[Any], placement if isinstance(placement, list | tuple) else [None])
    stages: list[Any] = [plain_value(stage) for stage in lists]
    if not stages or not all(isinstance(each, list | tuple) and each and all(map(is_whole, each)) for each in stages):
        raise InvalidArgument(
            f"placement is {placement!r}. Give one of {', '.join(map(repr, PLACEMENTS))}, or for every stage a list of "
            "its devices: [[0, 2, 1, 3]]."
        )
    return tuple(tuple(map(int, stage)) for stage in stages)


def one_for_each_stage(num_stages: int | None, stages_per_mesh: int, given: Mapping[str, Sequence[Any] | None]) -> None:
    """Raise `InvalidArgument` unless all lists have an entry for each stage: `layers` for the virtual ones too."""
    lists = {name: entries for name, entries in given.items() if entries is not None}
    counts = {name: len(entries) / (stages_per_mesh if name == "layers" else 1) for name, entries in lists.items()}
    if num_stages is not None:
        counts["num_stages"] = num_stages
    if len(set(counts.values())) > 1 or any(count % 1 for count in counts.values()):
        found = [f"{name} has {len(entries)} entries" for name, entries in lists.items()]
        found += [f"num_stages is {num_stages}"] if num_stages is not None else []
        virtual = f", and {stages_per_mesh} in layers, for its virtual stages" if stages_per_mesh > 1 else ""
        raise InvalidArgument(
            f"{', '.join(found)}. Give one entry in each list for each mesh{virtual}; num_stages can be left out."
        )
    shapes, submeshes = lists.get("mesh_shapes"), lists.get("submeshes")
    for shape, (hosts, devices) in zip(shapes or (), submeshes or ()):
        if math.prod(shape) != hosts * devices:
            raise InvalidArgument(
                f"The mesh shape {shape} has {math.prod(shape)} devices, and its submesh {(hosts, devices)} has "
                f"{hosts} x {devices} = {hosts * devices}. Give a shape whose product is {hosts * devices}, or another "
                "submesh."
            )


def check_runs_of_layers(runs: Sequence[tuple[int, int]] | None) -> None:
    """Raise `InvalidArgument` unless every layer is in one run, in order."""
    at = 0
    for start, stop in runs or ():
        if start != at:
            found = f"leave out the layers {at} to {start - 1}" if start > at else f"have the layer {start} twice"
            raise InvalidArgument(
                f"layers are {[list(run) for run in runs or ()]}, which {found}. Begin every stage where the one "
                f"before it ends, the first at 0: [{at}, {max(stop, at + 1)}] instead of [{start}, {stop}]."
            )
        at = stop


def check_layers(num_layers: int, num_stages: int) -> None:
    """Raise `InvalidArgument` for fewer layers than stages."""
    if num_layers < num_stages:
        raise InvalidArgument(
            f"There are {num_layers} layers for {num_stages} stages, each needs one. Give layers={num_stages} or more, "
            "or use fewer stages."
        )


def _check_memory(name: str, memory: float | str) -> None:
    if isinstance(memory, str):
        check_choice(name, memory, tuple(MEMORY_LEVELS))
    elif not is_number(memory) or not memory > 0:
        raise InvalidArgument(
            f"{name} is {memory!r}; give bytes, a fraction of a device's memory above 0, or one of "
            f"{', '.join(MEMORY_LEVELS)}."
        )


def _check_remat(name: str, remat: bool | str) -> None:
    if not isinstance(remat, bool) and not (is_text(remat) and remat == "auto"):
        raise InvalidArgument(f'{name} is {remat!r}; give True, False, or "auto".')


def _check_seconds(name: str, seconds: float) -> None:
    if not is_number(seconds) or not seconds > 0:
        raise InvalidArgument(f"{name} is {seconds!r}; give a positive number of seconds.")


def _check_zero(name: str, zero: int) -> None:
    if not is_whole(zero) or zero not in ZERO_STAGES:
        raise InvalidArgument(f"{name} is {zero!r}; ZeRO has the stages 1, 2 and 3. Give one of them, or 0.")


def _check_stage(_: str, stage: int) -> None:
    if not is_whole(stage) or stage not in ZERO_STAGES[1:]:
        raise InvalidArgument(f"Zero has stage={stage!r}; there are the stages 1, 2 and 3. Give one of them.")


def _check_axis_names(name: str, names: tuple[str, ...]) -> None:
    if not isinstance(names, tuple) or not all(isinstance(each, str) for each in names):  # pyright: ignore
        raise InvalidArgument(f"{name} is {names!r}. Give a tuple of strings, one for each axis of the mesh.")


def _check_axis_sizes(name: str, sizes: tuple[int, ...]) -> None:
    if not isinstance(sizes, tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"{name} is {sizes!r}. Give a tuple of integers, one for each axis of the mesh.")


def _check_layers_of_stages(name: str, layers: Any) -> None:
    if isinstance(layers, tuple):
        pairs = cast(tuple[Any, ...], layers)
        whole = all(isinstance(run, tuple) and len(cast(Any, run)) == 2 and all(map(is_whole, run)) for run in pairs)
        if not pairs or not whole or not all(0 <= start < stop for start, stop in pairs):
            raise InvalidArgument(
                f"{name} is {_listed(pairs)}. Give the number of layers, or for every stage its first layer and the "
                "one behind its last: [[0, 5], [5, 12]]."
            )
        return
    check_count(name, layers)


def _check_submeshes(name: str, submeshes: Any) -> None:
    pairs = cast(tuple[Any, ...], submeshes if isinstance(submeshes, tuple) else ())
    whole = all(isinstance(each, tuple) and len(cast(Any, each)) == 2 and all(map(is_whole, each)) for each in pairs)
    if not pairs or not whole or not all(hosts > 0 and devices > 0 for hosts, devices in pairs):
        raise InvalidArgument(
            f"{name} is {_listed(submeshes)}. Give for every mesh its hosts and the devices of each: [(1, 4), (1, 4)]."
        )


def _check_mesh_shapes(name: str, shapes: Any) -> None:
    every = cast(tuple[Any, ...], shapes if isinstance(shapes, tuple) else ())
    if not every or not all(isinstance(shape, tuple) and all(map(is_whole, cast(Any, shape))) for shape in every):
        raise InvalidArgument(
            f"{name} is {_listed(shapes)}. Give a tuple of integers for every mesh: [(2, 2), (4, 1)]."
        )
    if len({len(shape) for shape in every}) > 1:
        raise InvalidArgument(
            f"{name} is {_listed(shapes)}, with different numbers of axes, which all have the same names. Give each as "
            "many axes, those that it has no use for of size 1."
        )


def _listed(entries: Any) -> Any:
    """Return entries as they are mostly written."""
    return list(cast(Any, entries)) if isinstance(entries, tuple) else repr(entries)


def _check_kinds(name: str, kinds: tuple[str, ...]) -> None:
    known = ", ".join(map(repr, KINDS))
    if not isinstance(kinds, tuple) or not kinds:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"{name} is {kinds!r}. Give one or more of {known}, or leave it out to allow all.")
    for kind in kinds:
        check_choice(name, kind, KINDS)


_OFFLOAD_WORDS = ", ".join(f'"{word}"' for word in OFFLOADS)


def _check_offload(words: Any) -> None:
    several = isinstance(words, tuple | list | set | frozenset)
    for word in cast(Iterable[Any], words) if several else (words,):
        check_choice("offload", word, OFFLOADS if several else ("off", *OFFLOADS, "auto"))
    if several and not words:
        raise InvalidArgument(
            f'offload is {words!r}, which names nothing. Use "off", or one or more of {_OFFLOAD_WORDS}.'
        )


def as_offload(words: str | Iterable[str], *, searched: bool = False) -> str | tuple[str, ...]:
    """Return one word as it is, several in the order in which they are listed; parameters imply the optimizer's."""
    if words == "auto" and not searched:
        raise InvalidArgument(
            f'offload="auto" is for Auto, which searches. Use "off", or one or more of {_OFFLOAD_WORDS}.'
        )
    if isinstance(words, str):
        return words
    given = set(words)
    named = tuple(w for w in OFFLOADS if w in given and not (w == "optimizer" and "parameters" in given))
    return named[0] if len(named) == 1 else named


def _check_patterns(name: str, patterns: Mapping[str, PartitionSpec]) -> None:
    if not isinstance(patterns, Mapping) or not all(isinstance(each, str) for each in patterns):  # pyright: ignore
        raise InvalidArgument(f"{name} is {patterns!r}. Give a dictionary from regular expressions to PartitionSpecs.")
    for pattern in patterns:
        check_pattern(name, pattern)


# By the name of the field: methods that share a field share its check.
FIELD_CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    "num_stages": check_count,
    "num_microbatches": check_count,
    "virtual_stages": check_count,
    "layers": _check_layers_of_stages,
    "data": check_count,
    "tensor": check_count,
    "pipeline": check_count,
    "schedule": lambda _, schedule: get_schedule(schedule),
    "random": lambda name, word: check_choice(name, word, RANDOM),
    "batch_statistics": lambda name, word: check_choice(name, word, BATCH_STATISTICS),
    "effort": lambda name, word: check_choice(name, word, tuple(EFFORTS)),
    "memory": _check_memory,
    "remat": _check_remat,
    "zero": _check_zero,
    "offload": lambda _, words: _check_offload(words),
    "time_limit_s": _check_seconds,
    "stage": _check_stage,
    "mesh_shape": _check_axis_sizes,
    "mesh_shapes": _check_mesh_shapes,
    "submeshes": _check_submeshes,
    "layouts": lambda name, word: check_choice(name, word, LAYOUTS),
    "axis_names": _check_axis_names,
    "pins": _check_patterns,
    "kinds": _check_kinds,
    "specs": _check_patterns,
}


def check_specs(specs: Mapping[str, PartitionSpec], axes: tuple[str, ...]) -> None:
    """Raise `InvalidArgument` for a spec of inputs with axes that the mesh lacks."""
    for pattern, spec in specs.items():
        check_spec(f"the inputs that match {pattern!r}", spec, (axes,))


def axes_or_usual(mesh_shape: tuple[int, ...], axis_names: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the names of the axes of a mesh: those that are given, or the usual ones."""
    if axis_names is not None:
        return axis_names
    if len(mesh_shape) > len(_USUAL_AXES):
        raise InvalidArgument(
            f"The mesh shape {mesh_shape} has {len(mesh_shape)} axes, there are usual names for up to "
            f"{len(_USUAL_AXES)} only. Give axis_names, one for each axis."
        )
    return _USUAL_AXES[: len(mesh_shape)]


def virtual_stages_of(schedule: str | Schedule, virtual_stages: int | None) -> int:
    """Return the number of stages on a mesh: the one that is given, or the schedule's usual one."""
    return get_schedule(schedule).virtual_stages[0] if virtual_stages is None else virtual_stages
