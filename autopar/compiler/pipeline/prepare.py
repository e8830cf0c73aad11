"""Prepare a traced step for cutting: split its layer scans and its batch, and find the phases of its equations.

    Trace, decisions that change the program  ->  PreparedStep

The decisions are few (microbatches, pieces of the layer scans, what is exact), and a plan holds them, so that the same
plan always prepares the same program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from autopar.compiler.frontend.checkpoint_regions import Path, find_regions, find_wide_regions, inline_regions
from autopar.compiler.frontend.layer_scans import LeafRows, layer_scan_lengths, split_layer_scans
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.equation_keys import same_equations
from autopar.compiler.microbatch.split import MicrobatchedStep, split_batch
from autopar.compiler.microbatch.states import Unfinished
from autopar.compiler.microbatch.unsplit import whole_batch
from autopar.compiler.pipeline.phases import Phases, find_phases
from autopar.errors import InvalidArgument, NotSplittable, Unsupported


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedStep:
    """A microbatched step with the phases of its equations, and the names of its inputs."""

    trace: Trace
    phases: Phases
    inputs: tuple[LeafRows, ...]
    outputs: tuple[LeafRows, ...]
    input_names: tuple[str, ...]
    state_outputs: Mapping[int, int]
    recomputes: bool
    """True if the user rematerialises more than a layer at once: every stage is to compute its forward again."""


def loop_pieces_for(trace: Trace, num_layers: int) -> int:
    """Return the number of pieces that scans over layers are split into for `num_layers`; 1 if there are none."""
    closed = inline_regions(trace.jaxpr, find_wide_regions(trace.jaxpr, num_layers=num_layers))
    return num_layers if layer_scan_lengths(closed, batch_inputs=trace.batch_inputs) else 1


def prepare(
    trace: Trace,
    *,
    num_layers: int,
    num_microbatches: int,
    loop_pieces: int,
    batch_statistics: str,
    random: str,
) -> PreparedStep:
    """Dissolve rematerialised regions wider than a layer, and split loops and batch as asked for.

    A region that needs a statistic of the whole batch is dissolved, and all others with it.
    """
    prepared = partial(
        _prepare,
        trace,
        num_microbatches=num_microbatches,
        loop_pieces=loop_pieces,
        batch_statistics=batch_statistics,
        random=random,
    )
    return _dissolved(trace, num_layers, prepared)


def _dissolved(trace: Trace, num_layers: int, prepared: Callable[[frozenset[Path]], PreparedStep]) -> PreparedStep:
    """Return the step without the regions that are wider than a layer, or without any if one has to wait."""
    wide = find_wide_regions(trace.jaxpr, num_layers=num_layers)
    try:
        try:
            return prepared(wide)
        except Unfinished:
            every = find_regions(trace.jaxpr)
            if every <= wide:
                raise
            # No region can wait for the other microbatches.
            return prepared(every)
    except Unfinished as error:
        raise NotSplittable(str(error)) from error


@lru_cache(maxsize=6)
def waits_for_statistics(trace: Trace, num_microbatches: int, *, batch_statistics: str, random: str) -> bool:
    """Return whether microbatches wait for statistics of the whole batch, so that all are in memory meanwhile."""
    of_step = partial(prepare, trace, num_layers=1, loop_pieces=1, batch_statistics=batch_statistics, random=random)
    try:
        once, several = of_step(num_microbatches=1), of_step(num_microbatches=num_microbatches)
    except (InvalidArgument, NotSplittable, Unsupported):
        return False  # so it is refused where it is asked for
    return several.phases.num_rounds > once.phases.num_rounds


@lru_cache(maxsize=6)
def _prepare(
    trace: Trace,
    wide: frozenset[Path],
    *,
    num_microbatches: int,
    loop_pieces: int,
    batch_statistics: str,
    random: str,
) -> PreparedStep:
    """Return the step without the `wide` regions; the last few are remembered.

    A step is prepared alike to be planned, simulated and lowered, and for any layers that leave the same regions.
    """
    twin = _at_other_batch(trace, num_microbatches) if num_microbatches > 1 else None
    one, other = _without_regions(trace.jaxpr, twin, wide)
    closed, inputs, outputs, state_outputs = _split_loops(trace, one, loop_pieces)
    names = [_piece_name(trace, piece) for piece in inputs]
    batch = set(trace.batch_inputs)
    batch_inputs = [i for i, piece in enumerate(inputs) if piece.leaf in batch]
    if num_microbatches == 1:
        step = whole_batch(closed, batch_inputs=batch_inputs)
    else:
        assert other is not None
        step = split_batch(
            closed,
            _split_loops(trace, other, loop_pieces)[0],
            batch_inputs=batch_inputs,
            num_microbatches=num_microbatches,
            batch_statistics=batch_statistics,
            random=random,
            input_names=names,
        )
    return PreparedStep(
        trace=trace,
        phases=find_phases(step),
        inputs=inputs,
        outputs=outputs,
        input_names=_step_input_names(step, names, len(inputs)),
        state_outputs=state_outputs,
        recomputes=bool(wide),
    )


def _split_loops(
    trace: Trace, closed: jc.ClosedJaxpr, loop_pieces: int
) -> tuple[jc.ClosedJaxpr, tuple[LeafRows, ...], tuple[LeafRows, ...], dict[int, int]]:
    if loop_pieces > 1:
        split = split_layer_scans(
            closed, loop_pieces, batch_inputs=trace.batch_inputs, state_outputs=trace.state_outputs
        )
        closed, inputs, outputs = split.jaxpr, split.inputs, split.outputs
    else:
        inputs = tuple(LeafRows(leaf=i) for i in range(len(trace.inputs)))
        outputs = tuple(LeafRows(leaf=i) for i in range(len(trace.outputs)))
    position = {piece: i for i, piece in enumerate(inputs)}
    state_outputs: dict[int, int] = {}
    for i, piece in enumerate(outputs):
        leaf = trace.state_outputs.get(piece.leaf)
        replaced = None if leaf is None else position.get(LeafRows(leaf=leaf, start=piece.start, stop=piece.stop))
        if replaced is not None:
            state_outputs[i] = replaced
    return closed, inputs, outputs, state_outputs


def _without_regions(
    closed: jc.ClosedJaxpr, twin: jc.ClosedJaxpr | None, wide: frozenset[Path]
) -> tuple[jc.ClosedJaxpr, jc.ClosedJaxpr | None]:
    """Return the step and its twin at another batch, the regions dissolved alike in both."""
    if twin is None:
        return inline_regions(closed, wide), None
    if not same_equations(closed, twin):
        return inline_regions(closed, wide), inline_regions(twin, wide)
    return inline_regions(closed, wide, twin), inline_regions(twin, wide, closed)


def _at_other_batch(trace: Trace, num_microbatches: int) -> jc.ClosedJaxpr:
    if not trace.batch_inputs:
        raise InvalidArgument(
            f"{num_microbatches} microbatches were asked for, but {trace.no_other_batch_because}. "
            "Name the arguments that carry the batch in batch_argnums, inputs that do not in unbatched, or use one "
            "microbatch."
        )
    twin, reason = _as_one_microbatch(trace, num_microbatches)
    if twin is None:
        raise NotSplittable(
            f"{num_microbatches} microbatches need a step that accepts other batch sizes, but {reason}. Take sizes "
            "from the arguments' shapes in the model, or use one microbatch."
        )
    return twin


def _as_one_microbatch(trace: Trace, num_microbatches: int) -> tuple[jc.ClosedJaxpr | None, str]:
    """Return the step on as many rows as a microbatch has.

    Where it is another program then (one row is often a case of its own), it is the step on another batch: what differs
    from the full batch is the same.
    """
    rows = trace.num_rows
    twin, reason = trace.at_batch_of(rows // num_microbatches) if rows % num_microbatches == 0 else (None, "")
    if twin is not None and same_equations(trace.jaxpr, twin):
        return twin, ""
    other = trace.at_other_batch
    return (other, "") if other is not None else (twin, reason or trace.no_other_batch_because)


def _piece_name(trace: Trace, piece: LeafRows) -> str:
    # "@" separates a value's name from its microbatch.
    name = trace.inputs[piece.leaf].name.replace("@", "(at)")
    return name if piece.start is None else f"{name}[{piece.start}:{piece.stop}]"


def _step_input_names(step: MicrobatchedStep, names: Sequence[str], num_inputs: int) -> tuple[str, ...]:
    step_names: list[str] = []
    for i, spec in enumerate(step.inputs):
        if spec.leaf is None:
            step_names.append("microbatch")
        else:
            step_names.append(names[spec.leaf] + ("/whole" if i >= num_inputs else ""))
    return tuple(step_names)
