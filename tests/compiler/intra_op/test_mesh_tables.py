"""The tables of a mesh: equal equations share their choices, and what a layout costs is found once."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.compiler.costs.compute import equation_s
from autopar.compiler.intra_op.mesh_tables import MeshTables, mesh_tables
from autopar.compiler.jaxprs import compat as jc
from autopar.compiler.jaxprs.equation_keys import equation_classes
from autopar.compiler.jaxprs.fusion import alone, fused_traffic
from autopar.compiler.jaxprs.fusion_kinds import FusionRules
from autopar.compiler.jaxprs.normalize import normalize
from autopar.compiler.resharding.costs import reshard_s
from autopar.compiler.sharding.layout import all_layouts
from autopar.compiler.sharding.rule_lookup import sharding_rules
from autopar.compiler.sharding.strategies import strategies
from tests.compiler.equations import real
from tests.compiler.planned_steps import GRID, LINE, mesh_costs

COSTS = mesh_costs(GRID, latency_s=1e-5)


def program(function, *arguments):
    return jc.open_jaxpr(normalize(jax.make_jaxpr(function)(*arguments)))[0]


def rule(eqn):
    return sharding_rules([eqn])[0]


def test_equal_equations_of_different_programs_share_their_choices():
    tables = MeshTables(costs=COSTS)
    one, other = (program(lambda x, y: jnp.tanh(x @ y) @ y, real(64, 64), real(64, 64)) for _ in range(2))
    found = [
        tables.alternatives(eqn, kind, frozenset(), rule)
        for jaxpr in (one, other)
        for eqn, kind in zip(jaxpr.eqns, equation_classes(jaxpr), strict=True)
    ]
    assert [each is found[0] for each in found] == [True, False, True] * 2
    assert found[1] is found[4]


def test_what_may_be_a_sum_is_decided_by_every_equation_for_itself():
    # Padding a sum with zeros is the sum of padded summands; padding it with ones is not.
    jaxpr = program(lambda x: (lax.pad(x, 0.0, [(0, 8, 0)]), lax.pad(x, 1.0, [(0, 8, 0)])), real(64))
    tables = MeshTables(costs=COSTS)
    kinds = equation_classes(jaxpr)
    assert kinds[0] is kinds[1]
    zeros, ones = (tables.alternatives(eqn, kinds[0], frozenset([0]), rule) for eqn in jaxpr.eqns)
    assert any(layout.partial for layout in zeros.results[0])
    assert not any(layout.partial for layout in ones.results[0])


def test_seconds_of_all_strategies_are_those_of_each():
    jaxpr = program(lambda x, y, i: jnp.exp(x @ y)[i].max(1) * 2.0, real(64, 32), real(32, 48), np.arange(16))
    for eqn, traffic in zip(jaxpr.eqns, fused_traffic(jaxpr, rules=FusionRules(product_sums=True)), strict=True):
        every = strategies(eqn, rule(eqn), GRID)
        found = mesh_tables(COSTS).alternatives(eqn, equation_classes(jaxpr)[jaxpr.eqns.index(eqn)], frozenset(), rule)
        for each in (traffic, alone(eqn)):
            assert found.seconds(eqn, each, COSTS).tolist() == [equation_s(eqn, s, COSTS, each) for s in every]


def test_equations_of_sizes_that_split_alike_have_the_strategies_of_one_another():
    def layouts(rows):
        (eqn,) = program(jnp.matmul, real(rows, 64), real(64, 64)).eqns
        return [(s.operands, s.results) for s in strategies(eqn, rule(eqn), GRID)]

    assert layouts(64) == layouts(4096)
    assert layouts(4) != layouts(64)


def test_reshardings_of_arrays_that_split_alike_are_found_once():
    tables = MeshTables(costs=COSTS)
    large, small = (tables.layout_list(all_layouts((rows, 64), GRID)) for rows in (1024, 64))
    assert large is small
    for rows in (64, 1024):
        seconds = tables.reshard_s(small, small, (rows, 64), 256.0 * rows, in_update=False)
        for i, before in enumerate(small.layouts):
            for j, after in enumerate(small.layouts):
                assert seconds[i, j] == reshard_s(before, after, (rows, 64), 4, COSTS)
    assert len(tables.lines) == 1
    tables.reshard_s(small, small, (64, 64), 16384.0, in_update=True)
    assert len(tables.lines) == 2


def test_meshes_of_equal_costs_have_one_table():
    assert mesh_tables(COSTS) is mesh_tables(mesh_costs(GRID, latency_s=1e-5))
    assert mesh_tables(COSTS) is not mesh_tables(mesh_costs(LINE, latency_s=1e-5))
