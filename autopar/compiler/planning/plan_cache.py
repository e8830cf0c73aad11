"""Keep plans in files, by the content of all that they depend on: the same step plans again without a search.

    Trace, method, cluster  ->  key            the program, the request, the hardware, what was registered, releases
    key                     ->  Plan           if one was kept, belongs to the program, and fits the devices

A key is made of contents and not of names, so that an entry never has to be declared stale: another line of the
model, figure of the machine, version of a package or character of this compiler is another key. What has no content
that can be read, such as a rule that was registered as a closure, has no key, and its plans are made each time.

A plan of several stages or microbatches depends on the step at other batches too, which only another trace can tell.
Lowering such a plan reads these traces in any case; so they are held against those of the time when it was made.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Collection, Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from autopar.compiler.frontend.scopes import default_strategy
from autopar.compiler.frontend.trace import Trace
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.content import content_digest
from autopar.compiler.jaxprs.flops import registered_flops
from autopar.compiler.planning.plan_checks import check_inputs_and_devices, check_machines
from autopar.compiler.sharding.primitive_rules import registered_rules
from autopar.compiler.sharding.replication import gathered_reasons, note_replicated
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.hardware.collectives import collective_costs
from autopar.ir.plan import Plan
from autopar.ir.schedules import SCHEDULES
from autopar.kept_files import keep_text, read_text
from autopar.methods import Method

_PACKAGES = ("jax", "jaxlib", "ml_dtypes", "numpy", "scipy", "highspy")
_SOURCES = "**/*.py", "**/*.json"


def kept_plan(
    trace: Trace,
    method: Method,
    cluster: Cluster,
    *,
    checked: bool,
    directory: Path | None,
    make: Callable[[], Plan],
) -> Plan:
    """Return the plan that is kept for all that `make` depends on, else the one that it returns, and keep that.

    `checked` is as for `make_plan`. What was noted while the plan was made (`note_replicated`) is noted again. An entry
    that cannot be read, that was changed, or whose plan is none for this program and these devices is made again.
    """
    key = None if directory is None else plan_key(trace, method, cluster, checked=checked)
    if directory is None or key is None:
        return make()
    name = f"plan-{key}.json"
    text = read_text(directory, name)
    found = None if text is None else _plan_of(text, key, trace, cluster)
    if found is not None:
        plan, reasons = found
    else:
        with gathered_reasons() as gathered:
            plan = make()
        reasons = tuple(gathered)
        if plan.certificate is None or not plan.certificate.stopped_by_clock:  # a machine with more time finds better
            keep_text(directory, name, _text_of(plan, key, trace, reasons))
    for reason in reasons:
        note_replicated(reason)
    return plan


def plan_key(trace: Trace, method: Method, cluster: Cluster, *, checked: bool) -> str | None:
    """Return a text that differs wherever a plan might; None if something that it depends on has no content."""
    primitives = {eqn.primitive.name for eqn in jc.all_equations(trace.jaxpr)}
    return content_digest(
        *_releases(),
        jc.settings_text(),
        trace.jaxpr,
        [(leaf.name, leaf.argument) for leaf in (*trace.inputs, *trace.outputs)],
        (trace.name, trace.batch, trace.donated_inputs, sorted(trace.state_outputs.items())),
        sorted(trace.kept_inputs.items()),
        trace.host_state,
        (method, cluster, checked),
        # A kind may be that of a registered machine; to ask warns of one without figures, also where the plan is kept.
        [group.machine for group in cluster.groups],
        default_strategy(),
        _by_name(_deciding(registered_rules(), primitives)),
        _by_name(_deciding(registered_flops(), primitives)),
        _by_name(collective_costs()),
        SCHEDULES,
    )


def _deciding(registered: Iterable[tuple[str, Any]], primitives: Collection[str]) -> list[tuple[str, Any]]:
    """Return what is registered for a program; a function of the user's for another primitive decides nothing."""
    return [each for each in registered if each[0] in primitives or content_digest(each[1]) is not None]


def _by_name(registered: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return what is registered by name in the order of names: sets of primitives have another one in each process."""
    return sorted(registered, key=lambda each: each[0])


@cache
def _releases() -> tuple[str, ...]:
    """Return the versions of what plans are made with, this package's by its files."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _SOURCES for path in package.glob(pattern)):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return (digest.hexdigest(), sys.version, *(f"{name} {_version(name)}" for name in _PACKAGES))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _text_of(plan: Plan, key: str, trace: Trace, reasons: tuple[str, ...]) -> str:
    return json.dumps(
        {
            "key": key,
            "program": plan.fingerprint,
            "plan": plan.to_json(),
            "reasons": list(reasons),
            "other batches": {str(rows): _at_batch(trace, rows) for rows in _other_batches(plan, trace)},
        }
    )


def _plan_of(text: str, key: str, trace: Trace, cluster: Cluster) -> tuple[Plan, tuple[str, ...]] | None:
    """Return a kept plan and what was noted when it was made; None if it is damaged, or none of this program.

    The key tells the program: its fingerprint, which is read off the whole program as it prints, is not made again.
    """
    try:
        body: dict[str, Any] = dict(json.loads(text))
        plan = Plan.from_json(body["plan"])
        if (body["key"], body["program"]) != (key, plan.fingerprint):
            return None
        check_inputs_and_devices(plan, trace, num_devices=cluster.num_devices)
        check_machines(plan, cluster)
        if not _same_at_other_batches(plan, trace, body["other batches"]):
            return None
        return plan, tuple(map(str, body["reasons"]))
    except (AutoparError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _same_at_other_batches(plan: Plan, trace: Trace, kept: dict[str, str | None]) -> bool:
    """Return whether the step is what it was at the other batches that a plan's program is made of."""
    read = {str(rows) for rows in _other_batches(plan, trace, set(map(int, kept)))}
    return all(kept[each] is not None and kept[each] == _at_batch(trace, int(each)) for each in read)


def _other_batches(plan: Plan, trace: Trace, traced: Collection[int] | None = None) -> list[int]:
    """Return the rows of the other batches of which a plan's program is made, of those that were `traced`."""
    if (plan.num_stages == 1 and plan.num_microbatches == 1) or not trace.batch_inputs:
        return []
    rows = trace.num_rows
    read = {rows // plan.num_microbatches, rows // 2, 2 * rows}
    return sorted(read.intersection(trace.rows_traced if traced is None else traced))


def _at_batch(trace: Trace, rows: int) -> str | None:
    """Return the digest of the step on a batch of so many rows; None where it has none."""
    traced, _ = trace.at_batch_of(rows)
    return content_digest(traced)
