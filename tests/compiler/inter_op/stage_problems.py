"""Solve the stage problems of these tests: tables of costs and transfers, with the options of a schedule."""

from autopar.compiler.inter_op.search import search_stages
from autopar.compiler.inter_op.stage_costs import CostTables, Timing, cost_tables
from autopar.ir.schedules import get_schedule


def timing_of(problem: dict) -> Timing:
    """The schedule of a problem, with its numbers."""
    return Timing(
        schedule=get_schedule(problem["schedule"]),
        num_microbatches=problem["num_microbatches"],
        virtual_stages=problem.get("virtual_stages", 1),
    )


def tables_of(problem: dict) -> CostTables:
    """The costs of a problem as the search has them."""
    costs, transfers = problem["costs"], problem["transfers"]
    return cost_tables(
        problem["num_layers"],
        (problem["num_devices"],),
        problem["submeshes"],
        lambda start, stop, submesh: costs[start, stop, submesh],
        lambda cut, source, target: transfers[cut, source, target],
        timing_of(problem),
    )


def search(problem: dict, **changes):
    """Search the stages of a problem, some of its entries changed."""
    arguments = problem | changes
    timing = timing_of(arguments)
    for name in ("schedule", "num_microbatches", "virtual_stages"):
        arguments.pop(name, None)
    costs, transfers = arguments.pop("costs"), arguments.pop("transfers")
    return search_stages(
        stage_costs=lambda start, stop, submesh: costs[start, stop, submesh],
        transfer_s=lambda cut, source, target: transfers[cut, source, target],
        timing=timing,
        **arguments,
    )
