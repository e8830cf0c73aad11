"""The sharding rule of attention in one kernel of cuDNN: examples and heads, as JAX's own partitioner splits it.

    forward     q [b, t, kg, _]  k, v [b, s, k, _]                 ->  result [b, t, kg, _]  statistics [b, kg, t]
    backward    these, statistics, result and its gradient         ->  gradients of q, k and v, as they

k heads of keys serve g heads of queries each: a device has whole groups, so that the ratio stays. Lengths and widths
are never split. A bias [b, kg, t, s] goes along, whose dimensions may be 1; its gradient is then a sum over examples or
heads, which are not split there: other results of the kernel are none.
"""

from __future__ import annotations

from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs import params as jp
from autopar.compiler.sharding.rule import Label, Rule, blocked_rule, rule_of_labels, shapes_of

_HEADS = ("kv", "group")


def attention_rule(eqn: jc.JaxprEqn) -> Rule:
    """Return the rule of a kernel of attention, or of its gradients.

    Every part would draw the same dropout, and see the largest numbers of its own only in 8 bits; pages are anywhere.
    These are not split.
    """
    kernel = jp.attention_of(eqn)
    if kernel.dropout or kernel.scaled or kernel.paged:
        return blocked_rule(eqn, "none")
    of_queries, of_keys = _placed(_HEADS, kernel.heads_first), _placed("kv", kernel.heads_first)
    bias: list[Label] = ["batch", _HEADS, None, None] if kernel.has_bias else [None]
    statistics: list[Label] = [("batch", "segments"), _HEADS, None]
    each = [["batch", None][: len(shape)] if any(shape) else [None] for shape in shapes_of(eqn.invars[4:10])]
    given = [of_queries, of_keys, of_keys, bias, *each]
    if kernel.backward:
        operands = [*given, statistics, of_queries, of_queries]
        results = [of_queries, of_keys, of_keys, bias][: len(eqn.outvars)]
    else:
        operands, results = given, [of_queries, statistics][: len(eqn.outvars)]
    summed = set[Label]()
    if kernel.backward and kernel.bias_gradient:
        sizes = zip(shapes_of(eqn.invars)[3], ("batch", "kv"), strict=False)
        summed = {label for size, label in sizes if size == 1}
    return rule_of_labels(
        eqn,
        operands,
        results,
        blocked=summed | {"group"},
        sizes={
            "batch": kernel.batch,
            "kv": kernel.kv_heads,
            "group": kernel.heads // kernel.kv_heads,
            "segments": kernel.segments,
        },
    )


def _placed(heads: Label, heads_first: bool) -> list[Label]:
    return ["batch", heads, None, None] if heads_first else ["batch", None, heads, None]
