"""List the ops of what every device does, in the order of the compiler, with the arrays that they read and make.

    LocalBlock  ->  MemoryProgram over the values of its blocks

Both the estimate of a program and the rows that bound a search are read off this. Remat regions stand in line with what
is around them, behind a barrier that holds back their operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autopar.compiler.costs.attention import gradient_sums
from autopar.compiler.costs.compute import equation_s
from autopar.compiler.costs.mesh_costs import MeshCosts
from autopar.compiler.costs.own_collectives import own_collectives
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.jaxprs.equation_keys import literal_key
from autopar.compiler.jaxprs.fusion import LONGEST_ROW, alone, fused_traffic
from autopar.compiler.jaxprs.fusion_kinds import EXPONENTIALS, FusionRules, is_expensive, kind_beside_products, kind_of
from autopar.compiler.jaxprs.primitives import (
    ATTENTION,
    COMPRESSED_SUM,
    MATRIX_PRODUCTS,
    PRODUCTS,
    REDUCTIONS,
    REMAT,
    SELECTIONS,
    WINDOWS,
)
from autopar.compiler.jaxprs.strides import (
    adds_ones,
    merged_form,
    reads_transposed,
    reorders_images,
    turns_tiles,
    writes_transposed,
)
from autopar.compiler.memory.allocation import (
    Border,
    MemoryProgram,
    border_of_body,
    joins_late,
    replaced,
    stacked_from,
    taken_places,
)
from autopar.compiler.memory.joined_collectives import SUMS
from autopar.compiler.memory.latency_hiding import NO_ESTIMATE_S
from autopar.compiler.memory.liveness import Kind, Op, workspace_bytes, writes_over
from autopar.compiler.memory.merged_products import kept_products
from autopar.compiler.memory.twins import (
    ADDED_TO_ZEROS,
    made_elsewhere,
    rectifies,
    scattered_onto,
    transposing_updates,
    without_places,
)
from autopar.compiler.resharding.costs import reshard_s
from autopar.compiler.resharding.steps import AllGather, ReduceScatter, ReshardStep, Slice, collective_of
from autopar.compiler.sharding.layout import LogicalMesh, local_shape
from autopar.compiler.sharding.replicated_values import below_split_size
from autopar.compiler.spmd.local_program import (
    Action,
    Evaluate,
    LocalBlock,
    Reshard,
    RunBody,
    Value,
    action_values,
    value_bytes,
)
from autopar.hardware.machine import Machine

_READ_ANY_ORDER = MATRIX_PRODUCTS | REDUCTIONS
"""Equations that read the dimensions of an array in any order."""
_KEEP_ORDER = ("all-reduce", "collective-permute")
"""Collectives that take arrays in any order of their dimensions."""
_OF_A_LIBRARY_S = 1000 * NO_ESTIMATE_S
"""The same for calls of libraries but for products (`GpuLatencyEstimator::NodeCost`)."""
_KEPT_GROWTH = 2.0
"""Factor by which a kept exponential is larger than what it is computed from: in float32, of bfloat16."""


class BlockValue(NamedTuple):
    """A value and the block that makes or is given it: a body that stands twice has values of its own each time."""

    block: LocalBlock
    value: Value
    twin: bool = False
    """True of an array of its size that the compiler makes beside it: a copy in other memory or another order of its
    dimensions, or zeros."""


def listed_step(block: LocalBlock, mesh: LogicalMesh, donated: Collection[int], machine: Machine) -> MemoryProgram:
    """Return the memory program of a whole step; `donated` are the numbers of the inputs that it may overwrite."""
    taken = taken_places([*map(_type, block.inputs)], [*map(_type, block.outputs)], donated)
    own = [number for number in range(len(block.outputs)) if number not in taken]
    return _listed(block, Border(taken=taken, own=own), MeshCosts(machine=machine, mesh=mesh))


def _type_of(key: Hashable) -> str:
    """Return the name of the type of a value's numbers."""
    assert isinstance(key, BlockValue)
    aval: Any = key.value.variable.aval
    return aval.dtype.name


def _type(value: Any) -> Hashable:
    if not isinstance(value, Value):
        return None
    return value.variable.aval.shape, value.variable.aval.dtype, value.layout


def _reverses_nothing(eqn: jc.JaxprEqn) -> bool:
    """Return true if an equation reverses dimensions of size 1 alone."""
    aval: Any = eqn.outvars[0].aval
    return all(aval.shape[dim] == 1 for dim in jp.dimensions_of(eqn))


def _reduces_rows(eqn: jc.JaxprEqn) -> bool:
    """Return true if an equation reduces the innermost dimensions of an array, and a kernel holds these."""
    if eqn.primitive.name not in REDUCTIONS:
        return False
    rows: Any = eqn.invars[0].aval
    dims = jp.dimensions_of(eqn)
    innermost = sorted(dims) == [*range(rows.ndim - len(dims), rows.ndim)]
    return innermost and math.prod(rows.shape[dim] for dim in dims) <= LONGEST_ROW


def _listed(block: LocalBlock, border: Border, mesh_costs: MeshCosts) -> MemoryProgram:
    lister = _Lister(block=block, mesh_costs=mesh_costs)
    for value in block.inputs:
        lister.note(value)
    lister.run()
    if mesh_costs.machine.widens_bfloat16:
        lister.widen()
    if mesh_costs.machine.fuses_products:
        lister.keep()
    else:
        lister.scatter_onto_sums()
    if mesh_costs.machine.transposes_operands and mesh_costs.machine.schedules_for_latency:
        lister.merge_products()
    lister.fill()
    inputs, outputs = ([lister.key(v) for v in values] for values in (block.inputs, block.outputs))
    filled = lister.hold(replaced(inputs, outputs, border))
    copied = set[Hashable]()
    if mesh_costs.machine.copies_state:
        copies = lister.copy_last(replaced(inputs, outputs, border))
        copied = {old for result, old in replaced(inputs, outputs, border) if result in copies}
        outputs = [copies.get(key, key) for key in outputs]
    return MemoryProgram(
        ops=lister.ops,
        inputs=inputs,
        outputs=outputs,
        nbytes=lister.nbytes,
        inner=lister.inner,
        border=border,
        actions=lister.actions,
        copied=copied,
        filled=filled,
    ).order_ops(mesh_costs.machine)


@dataclass(kw_only=True, eq=False)
class _Lister:
    block: LocalBlock
    mesh_costs: MeshCosts
    ops: list[Op] = field(default_factory=list[Op])
    actions: list[Action] = field(default_factory=list[Action])
    """The action of each op."""
    inner: dict[int, tuple[MemoryProgram, ...]] = field(default_factory=dict[int, tuple[MemoryProgram, ...]])
    nbytes: dict[Hashable, float] = field(default_factory=dict[Hashable, float])
    names: dict[Value, Any] = field(default_factory=dict[Value, Any])
    """The value outside of each operand of a region in line, and the value inside of each result of one."""
    keys: dict[int, BlockValue | None] = field(default_factory=dict[int, BlockValue | None])
    """The `key` of each value of the block, by its identity."""
    sources: dict[Value, Value] = field(default_factory=dict[Value, Value])
    """The original of each value that is another one reversed, or a form in the same layout."""
    unchanged: dict[Value, Value] = field(default_factory=dict[Value, Value])
    """The original of each value that is another one reversed along dimensions of size 1."""
    resharded: dict[Hashable, Value] = field(default_factory=dict[Hashable, Value])
    """The first result, by what is resharded and how."""
    zeros: set[Value] = field(default_factory=set[Value])
    """Values whose windows have gradients, which GPUs add to zeros."""
    sent: set[Value] = field(default_factory=set[Value])
    """Values that collectives make in an order of dimensions of their own."""
    ordered: set[Value] = field(default_factory=set[Value])
    """Values that something reads to which the order of dimensions matters: no product, no reduction."""
    turned: set[Hashable] = field(default_factory=set[Hashable])
    """Values that are transposed into another order in memory."""
    transposed: set[Hashable] = field(default_factory=set[Hashable])
    """Values that libraries write in another order of dimensions, those of regions in line as well."""
    swapped: set[Value] = field(default_factory=set[Value])
    """Values that are transposed: products that make them read their operands in each other's place."""
    region: Hashable = None
    """The name of the barrier that holds back the operands, if the block is a region in line."""

    @property
    def mesh(self) -> LogicalMesh:
        return self.mesh_costs.mesh

    @property
    def machine(self) -> Machine:
        return self.mesh_costs.machine

    def run(self) -> None:
        """List the ops of the block."""
        for action in self.block.actions:
            self._note(action)
        for action in self.block.actions:
            if isinstance(action, RunBody) and action.eqn.primitive.name in REMAT:
                self._run_in_line(action)
            else:
                self._add(action)

    def _note(self, action: Action) -> None:
        """Note what an action reads in one order, sends, reverses, has in another form, or adds to zeros."""
        if not (isinstance(action, Evaluate) and action.eqn.primitive.name in _READ_ANY_ORDER):
            self.ordered.update(v for v in action_values(action)[1])
        if isinstance(action, Reshard) and (kind := collective_of(action.steps)) and kind not in _KEEP_ORDER:
            self.sent.add(action.result)
        match action:
            case Reshard(operand=Value() as operand, result=result) if action.source == result.layout:
                self.sources[result] = self._source(operand)
            case Evaluate(eqn=eqn, operands=(Value() as operand,), results=(result,)) if eqn.primitive.name == "rev":
                self.sources[result] = self._source(operand)
                if _reverses_nothing(eqn):
                    self.unchanged[result] = self.unchanged.get(operand, operand)
            case Evaluate(eqn=eqn, operands=(Value() as operand,), results=(result,)) if (
                eqn.primitive.name == "transpose"
            ):
                aval: Any = result.variable.aval
                self.swapped.add(self._source(operand))
                turns = turns_tiles(eqn, local_shape(tuple(aval.shape), result.layout, self.mesh))
                self.turned.update(self._keys(operand) if turns else ())
            case Evaluate(eqn=eqn, operands=(_, Value() as operand)) if eqn.primitive.name == ADDED_TO_ZEROS:
                self.zeros.add(self._source(operand))
            case _:
                pass

    def _source(self, value: Value) -> Value:
        return self.sources.get(value, value)

    def widen(self) -> None:
        """Keep expensive results of bfloat16 in float32, if fused ops alone read them.

        Those of regions that are computed again live too shortly: at most one of each layer's is kept so.
        """
        narrow, roots = self._read_by(lambda op: op.kind in ("apart", "barrier"))
        wide: set[Hashable] = set()
        for number, op in enumerate(self.ops):
            if op.kind == "fused" and op.expensive and not narrow.intersection(op.results):
                wide.update(key for key in op.results if self._is_own(key) and _type_of(key) == "bfloat16")
                self.ops[number] = op._replace(widening=2.0 if wide.intersection(op.results) else 1.0)
        self._scale(wide, roots, 2.0)

    def keep(self) -> None:
        """Keep what kernels of products write in the type in which they do, unless something apart reads it."""
        found = fused_traffic(self.block.jaxpr, rules=FusionRules.of(self.machine))
        kept = {id(eqn): each.kept for eqn, each in zip(self.block.jaxpr.eqns, found, strict=True)}
        read, roots = self._read_by(lambda op: op.kind in ("apart", "barrier"))
        by_share: dict[float, set[Hashable]] = {}
        for op, action in zip(self.ops, self.actions, strict=True):
            if op.kind == "product" and isinstance(action, Evaluate) and id(action.eqn) in kept:
                own = {key for key in op.results if key not in read and self._is_own(key)}
                by_share.setdefault(kept[id(action.eqn)], set()).update(own)
        for share, arrays in by_share.items():
            self._scale(arrays, roots, share)

    def _read_by(self, reads: Callable[[Op], bool]) -> tuple[set[Hashable], dict[Hashable, Hashable]]:
        """Return the values that some ops read or the block results in, and the array of each view or form."""
        roots: dict[Hashable, Hashable] = {}
        found: set[Hashable] = {key for v in self.block.outputs if (key := self.key(v)) is not None}
        for op in self.ops:
            arrays = [roots.get(key, key) for key in op.reads]
            if op.kind in ("view", "form"):
                roots[op.results[0]] = arrays[0]
            elif reads(op):
                found.update(arrays)
        return found, roots

    def _scale(self, arrays: set[Hashable], roots: dict[Hashable, Hashable], factor: float) -> None:
        """Count arrays, with all their views and forms, as so many times as large."""
        for key in (*arrays, *(key for key, root in roots.items() if root in arrays)):
            self.nbytes[key] *= factor

    def _is_own(self, key: Hashable) -> bool:
        """Return true if a value is one of the block, and not of a region in line with it."""
        return isinstance(key, BlockValue) and key.block is self.block

    def name(self, value: Any) -> Any:
        """Return a value as this program calls it; it may be a constant."""
        if not isinstance(value, Value):
            return ("constant", literal_key(value))
        return self.names.get(value, BlockValue(self.block, value))

    def key(self, value: Any) -> BlockValue | None:
        """Return the same, None if it is too small to count, or on the host."""
        if id(value) not in self.keys:
            self.keys[id(value)] = self._key(value)
        return self.keys[id(value)]

    def _key(self, value: Any) -> BlockValue | None:
        named = self.name(value)
        if not isinstance(named, BlockValue) or jc.is_on_host(named.value.variable):
            return None
        return None if below_split_size(named.value.variable.aval) else named

    def note(self, value: Value) -> None:
        """Note the size of a value."""
        self.nbytes[self.name(value)] = value_bytes(value, self.mesh)

    def _run_in_line(self, action: RunBody) -> None:
        (body,) = action.bodies
        barrier = Op("barrier", self._keys(*action.operands), (), small_results=(body,))
        self.ops.append(self._placed(barrier, (*action.operands, *action.after), ()))
        self.actions.append(action)
        region = _Lister(
            block=body,
            mesh_costs=self.mesh_costs,
            ops=self.ops,
            actions=self.actions,
            inner=self.inner,
            nbytes=self.nbytes,
            turned=self.turned,
            transposed=self.transposed,
            region=body,
            names={inside: self.name(value) for inside, value in zip(body.inputs, action.operands, strict=True)},
        )
        region.run()
        self.names.update(
            (value, region.name(inside)) for value, inside in zip(action.results, body.outputs, strict=True)
        )

    def _add(self, action: Action) -> None:
        if isinstance(action, RunBody):
            self.inner[len(self.ops)] = tuple(
                _listed(body, border_of_body(action.eqn, number, len(body.inputs), len(body.outputs)), self.mesh_costs)
                for number, body in enumerate(action.bodies)
            )
        for value in (action.result,) if isinstance(action, Reshard) else action.results:
            self.note(value)
        if isinstance(action, Reshard) and self._is_there(action):
            return
        if self.machine.transposes_kernels and isinstance(action, Evaluate):
            self._transpose_kernel(action)
            for copy in self._reordered(action).values():
                self._copy(action, Op("apart", self._keys(copy.value), (copy,)))
        op = self._op(action)
        if isinstance(action, Reshard) and op.results and self._transposes(action):
            op = op._replace(workspace=self.nbytes[op.results[0]])
        if isinstance(action, Reshard):
            before = (action.operand,) if action.source == action.result.layout else (action.operand, *action.after)
            op = self._placed(op, before, (action.result,))
        else:
            op = self._placed(op, action.operands, action.results)
        self.ops.append(op)
        self.actions.append(action)
        if isinstance(action, Evaluate) and self.zeros.intersection(action.results) and rectifies(action.eqn):
            self._share_zeros(action)

    def _placed(self, op: Op, before: Sequence[Any], results: Sequence[Value]) -> Op:
        """Return an op with what decides its place alone. `before` are its operands, and what it waits for else."""
        waits_for: list[Hashable] = [self.name(value) for value in before if isinstance(value, Value)]
        if self.region is not None and not all(map(self._is_own, (*op.reads, *waits_for))):
            waits_for.append(self.region)
        return op._replace(
            waits_for=tuple(key for key in waits_for if key not in op.reads),
            small_results=(
                *op.small_results,
                *(key for value in results if (key := self.name(value)) not in op.results),
            ),
        )

    def _is_there(self, action: Reshard) -> bool:
        """Return true if what reversing nothing gives is resharded as what it was given already is: it is one array."""
        if not isinstance(action.operand, Value) or action.after:
            return False
        same = self.unchanged.get(action.operand, action.operand)
        first = self.resharded.setdefault((same, action.steps, action.result.layout), action.result)
        if first is action.result or same is action.operand:
            return False
        self.names[action.result] = self.name(first)
        self.keys.pop(id(action.result), None)
        return True

    def _transposes(self, action: Reshard) -> bool:
        """Return true if what is gathered is transposed: along another dimension than its outermost, for no product."""
        last = action.steps[-1] if action.steps else None
        if not (self.machine.gathers_outermost and isinstance(last, AllGather) and action.result in self.ordered):
            return False
        shape = local_shape(tuple(action.aval.shape), action.result.layout, self.mesh)
        return any(size > 1 for size in shape[: last.dim])

    def _share_zeros(self, action: Evaluate) -> None:
        """Keep the zeros that a linear rectifier compares with: gradients of windows of its result are added there."""
        (result,) = action.results
        if self.key(result) is not None and not self.machine.fuses_products:
            zeros = BlockValue(self.block, result, twin=True)
            self.nbytes[zeros] = value_bytes(result, self.mesh)
            self.ops.append(Op("apart", (), (zeros,)))
            self.actions.append(action)

    def _transpose_kernel(self, action: Evaluate) -> None:
        """Copy the kernel of a convolution into the order in which libraries read it, once for all that read it."""
        if writes_transposed(action.eqn):
            self.transposed.update(self._keys(*action.results))
        copy = self._transposed_kernel(action)
        if copy is not None:
            self._copy(action, Op("fused", self._keys(copy.value), (copy,), expensive=True))

    def _copy(self, action: Evaluate, op: Op) -> None:
        """Add an op that makes the copy of an array that an action reads, unless there is one already."""
        (copy,) = op.results
        assert isinstance(copy, BlockValue)
        if copy not in self.nbytes:
            self.nbytes[copy] = value_bytes(copy.value, self.mesh)
            self.ops.append(op)
            self.actions.append(action)

    def _transposed_kernel(self, action: Evaluate) -> BlockValue | None:
        """Return the copy that a convolution reads of its kernel, if it does; libraries reverse a kernel themselves."""
        if not (self.machine.transposes_kernels and reads_transposed(action.eqn)):
            return None
        kernel = action.operands[1]
        if not isinstance(kernel, Value) or self.key(kernel) is None:
            return None
        return BlockValue(self.block, self._source(kernel), twin=True)

    def hold(self, replaced: Iterable[tuple[Hashable, Hashable]]) -> Collection[Hashable]:
        """Have updates that transpose gradients read copies of the state: those for libraries, or early ones.

        Return the arrays that have early ones.
        """
        _, roots = self._read_by(lambda op: False)
        twins: dict[Hashable, BlockValue] = {}
        updated: dict[Hashable, int] = {}
        for key, update in transposing_updates(self.ops, roots, replaced, self.transposed).items():
            assert isinstance(key, BlockValue)
            twins[key] = key._replace(twin=True)
            for number in update.reads:
                op = self.ops[number]
                reads = (twins[key] if roots.get(each, each) == key else each for each in op.reads)
                self.ops[number] = op._replace(reads=tuple(reads))
            if twins[key] not in self.nbytes:
                self.nbytes[twins[key]] = self.nbytes[key]
                updated[key] = update.number
        held = without_places(updated, self.nbytes)
        copies = [Op("apart", (key,), (twins[key],), early=(twins[key],)) for key in held]
        actions = [self.actions[updated[key]] for key in held]
        self.ops[:0], self.actions[:0] = copies, actions
        self.inner = {number + len(held): programs for number, programs in self.inner.items()}
        return updated

    def scatter_onto_sums(self) -> None:
        """Scatter onto the array that what is scattered onto zeros would be added to."""
        for number, summing, others in scattered_onto(self.ops, self._eqns()):
            op = self.ops[number]
            self.ops[summing] = op._replace(reads=(*others, *op.reads[1:]), results=self.ops[summing].results)
            self.ops[number] = Op("fused", (), ())
            self.actions[summing] = self.actions[number]

    def fill(self) -> None:
        """Make the constants that ops write over: they are in memory before, each for the first one that does."""
        constants: set[Hashable] = set()
        made: list[tuple[int, BlockValue]] = []
        for number, op in enumerate(self.ops):
            fills = op.kind in ("view", "form", "fused") and op.reads and constants.issuperset(op.reads)
            if op.kind == "constant" or fills:
                constants.update(op.results)
            elif op.kind == "apart" and op.over and op.results and not constants.isdisjoint(op.reads[:1]):
                constant = op.reads[0]
                assert isinstance(constant, BlockValue)
                filled = constant._replace(twin=True)
                if filled not in self.nbytes:
                    self.nbytes[filled] = self.nbytes[constant]
                    made.append((number, filled))
        for number, filled in reversed(made):
            self.ops[number] = self.ops[number]._replace(reads=(filled, *self.ops[number].reads[1:]))
            self.ops.insert(number, Op("apart", (), (filled,)))
            self.actions.insert(number, self.actions[number])
            self.inner = {place + (place >= number): programs for place, programs in self.inner.items()}

    def _eqns(self) -> list[jc.JaxprEqn | None]:
        """Return the equations of the ops that evaluate one."""
        return [action.eqn if isinstance(action, Evaluate) else None for action in self.actions]

    def merge_products(self) -> None:
        """Keep merged products for parts of which copies in a second order are made only when they are read."""
        for kept in kept_products(self.ops, self._eqns(), self.nbytes, self._local_shape):
            others = [key._replace(twin=True) for key in kept.others if isinstance(key, BlockValue)]
            self.nbytes.update((other, self.nbytes[key]) for other, key in zip(others, kept.others, strict=True))
            maker, reader = self.ops[kept.maker], self.ops[kept.reader]
            self.ops[kept.maker] = maker._replace(results=(*maker.results, *others))
            self.ops[kept.reader] = reader._replace(reads=(*reader.reads, *others))

    def _local_shape(self, key: Hashable) -> tuple[int, ...]:
        assert isinstance(key, BlockValue)
        aval: Any = key.value.variable.aval
        return local_shape(tuple(aval.shape), key.value.layout, self.mesh)

    def copy_last(self, replaced: Iterable[tuple[Hashable, Hashable]]) -> dict[Hashable, BlockValue]:
        """Copy results that are made elsewhere to the places of the state that they replace, when all else is done.

        Return these copies by result.
        """
        _, roots = self._read_by(lambda op: False)
        copies: dict[Hashable, BlockValue] = {}
        for result, number in made_elsewhere(self.ops, roots, replaced, self.turned):
            assert isinstance(result, BlockValue)
            copies[result] = result._replace(twin=True)
            self.nbytes[copies[result]] = self.nbytes[result]
            self.ops.append(Op("apart", (result,), (copies[result],)))
            self.actions.append(self.actions[number])
        return copies

    def _op(self, action: Action) -> Op:
        match action:
            case Reshard(operand=operand, result=result, steps=steps):
                reads, results, kind = self._keys(operand), self._keys(result), collective_of(steps)
                if reads and action.source == result.layout:
                    return Op("form", reads, results)
                return Op(
                    "apart" if kind else "fused",
                    reads,
                    results,
                    over=kind == "all-reduce",
                    collective=kind,
                    seconds=self._reshard_s(action) if kind else None,
                    latency_s=self._reshard_s(action, share=0.0) if kind else 0.0,
                    steps=(*self._combined_as(steps), action.aval.dtype) if kind in SUMS else self._combined_as(steps),
                    slices=not kind and any(isinstance(step, Slice) for step in steps),
                    keeps_order=kind in _KEEP_ORDER,
                    behind_barrier=bool(action.after),
                )
            case Evaluate(eqn=eqn, strategy=strategy):
                reads, results, kind = self._keys(*action.operands), self._keys(*action.results), self._kind_of(eqn)
                if (copy := self._transposed_kernel(action)) is not None:
                    reads = (*self._keys(action.operands[0]), copy)
                if copies := self._reordered(action):
                    reads = tuple(copies.get(key, key) for key in reads)
                if eqn.primitive.name == ADDED_TO_ZEROS and isinstance(action.operands[1], Value):
                    zeros = BlockValue(self.block, self._source(action.operands[1]), twin=True)
                    reads = (*reads, zeros) if zeros in self.nbytes else reads
                own = own_collectives(eqn, strategy, self.mesh) if eqn.primitive.name == COMPRESSED_SUM else ()
                exchanged = [each.nbytes for each, _ in own]
                return Op(
                    "fused" if kind == "view" and not (reads and results) else kind,
                    reads,
                    results,
                    expensive=self._is_costly(eqn),
                    growth=_KEPT_GROWTH if self._keeps(eqn) else 1.0,
                    over=writes_over(eqn),
                    computes_narrower=self.machine.computes_narrower,
                    gathers=eqn.primitive.name == "gather",
                    reorders=self._reorders(eqn),
                    keeps_order=eqn.primitive.name in WINDOWS | SELECTIONS,
                    adds_gradients=not self.machine.fuses_products and eqn.primitive.name == "add_any",
                    reduces_rows=self.machine.holds_rows and _reduces_rows(eqn),
                    workspace=workspace_bytes(eqn, self.machine.product_workspace_bytes, exchanged)
                    + self._places_bytes(action)
                    + self._gradient_sums_bytes(action),
                    seconds=self._seconds(action),
                    forms=self._forms(action),
                    extent=self._extent(action),
                )
            case RunBody(eqn=eqn):
                return Op(
                    "apart",
                    self._keys(*action.operands),
                    self._keys(*action.results),
                    over=writes_over(eqn),
                    late=joins_late(eqn),
                    early=self._keys(*action.results[stacked_from(eqn) :]),
                    seconds=NO_ESTIMATE_S,
                )

    def _combined_as(self, steps: Sequence[ReshardStep]) -> tuple[ReshardStep, ...]:
        """Return what is equal for collectives that may be one: where XLA scatters the outermost dimension, any is."""
        if not self.machine.gathers_outermost:
            return tuple(steps)
        return tuple(ReduceScatter(step.axes, 0) if isinstance(step, ReduceScatter) else step for step in steps)

    def _places_bytes(self, action: Evaluate) -> float:
        """Return the bytes of the places of the largest in all windows, which XLA finds before it adds there.

        A place is a number of 32 bits for each dimension, and the largest is beside it. Compilers whose kernels compute
        what they read, as those of TPUs, do both in one.
        """
        if action.eqn.primitive.name not in SELECTIONS or self.machine.fuses_products:
            return 0.0
        summed: Any = action.operands[0]
        aval = summed.variable.aval
        return (aval.ndim * 4 + max(4, aval.dtype.itemsize)) * value_bytes(summed, self.mesh) / aval.dtype.itemsize

    def _reorders(self, eqn: jc.JaxprEqn) -> bool:
        """Return true if a library reads what it computes with in another order of dimensions than others."""
        if not self.machine.transposes_kernels or eqn.primitive.name not in PRODUCTS:
            return False
        images: Any = eqn.invars[0].aval
        return reorders_images(eqn, self.machine.has_channels_last(images.dtype.name))

    def _reordered(self, action: Evaluate) -> dict[Hashable, BlockValue]:
        """Return the copies of what a library reads in another order than a collective makes it in, by array.

        Kernels that compute something write it in that order.
        """
        if not self._reorders(action.eqn):
            return {}
        sent = [v for v in action.operands if isinstance(v, Value) and v in self.sent]
        kernel = self._transposed_kernel(action)
        return {key: copy for v in sent if (key := self.key(v)) and (copy := key._replace(twin=True)) != kernel}

    def _gradient_sums_bytes(self, action: Evaluate) -> float:
        """Return the bytes in which a kernel of attention sums the gradients of its queries."""
        if action.eqn.primitive.name not in ATTENTION:
            return 0.0
        queries: Any = action.operands[0]
        return gradient_sums(action.eqn) * value_bytes(queries, self.mesh)

    def _is_costly(self, eqn: jc.JaxprEqn) -> bool:
        """Return true if an equation takes so much that its result is kept rather than computed again.

        On GPUs of which XLA knows what instructions take, those whose latencies it estimates, a hyperbolic tangent of
        32 bits does not. Of 16 bits it is computed by way of 32, and is kept.
        """
        if self.machine.fuses_products or not is_expensive(eqn):
            return False
        if not (self.machine.holds_rows and self.machine.schedules_for_latency and eqn.primitive.name == "tanh"):
            return True
        aval: Any = eqn.outvars[0].aval
        return aval.dtype.itemsize < 4

    def _keeps(self, eqn: jc.JaxprEqn) -> bool:
        """Return true for what is kept for many readers, though it is larger than what it is computed from."""
        return self.machine.keeps_exponentials and eqn.primitive.name in EXPONENTIALS

    def _kind_of(self, eqn: jc.JaxprEqn) -> Kind:
        """Return how XLA treats an equation."""
        if not self.machine.fuses_products:
            return "view" if adds_ones(eqn) else kind_of(eqn)
        return "product" if eqn.primitive.name in PRODUCTS else kind_beside_products(eqn)

    def _seconds(self, action: Evaluate) -> float | None:
        """Return what the compiler has an equation take; None for what it takes to read and write memory."""
        name = action.eqn.primitive.name
        if not self.machine.schedules_for_latency or name not in PRODUCTS | ATTENTION:
            return None
        if name not in MATRIX_PRODUCTS:
            return _OF_A_LIBRARY_S
        return equation_s(action.eqn, action.strategy._replace(combined=()), self.mesh_costs, alone(action.eqn))

    def _forms(self, action: Evaluate) -> tuple[Hashable, ...]:
        """Return the form in which a product reads each array that it reads."""
        if action.eqn.primitive.name != "dot_general":
            return ()
        swapped = not self.swapped.isdisjoint(action.results)
        places = [n for n, operand in enumerate(action.operands) if self.key(operand) is not None]
        return tuple(merged_form(action.eqn, place, swapped) for place in places)

    def _extent(self, action: Evaluate) -> float:
        values: Sequence[Any] = action.operands if action.eqn.primitive.name in REDUCTIONS else action.results
        if not values or not isinstance(values[0], Value):
            return 0.0
        return value_bytes(values[0], self.mesh) / values[0].variable.aval.dtype.itemsize

    def _reshard_s(self, action: Reshard, share: float = 1.0) -> float:
        """Return the seconds that it takes to reshard this share of the array."""
        aval: Any = action.aval
        return reshard_s(action.source, action.result.layout, aval.shape, share * aval.dtype.itemsize, self.mesh_costs)

    def _keys(self, *values: Any) -> tuple[BlockValue, ...]:
        return tuple(key for value in values if (key := self.key(value)) is not None)
