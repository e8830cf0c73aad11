"""Solve the stage problems of these tests: tables of costs and transfers, with the options of a schedule."""

from autopar.compiler.inter_op.search import search_stages
from autopar.compiler.inter_op.stage_costs import Timing
from autopar.ir.schedules import get_schedule


def search(problem: dict, **changes):
    """Search the stages of a problem, some of its entries changed."""
    arguments = problem | changes
    costs, transfers = arguments.pop("costs"), arguments.pop("transfers")
    timing = Timing(
        schedule=get_schedule(arguments.pop("schedule")),
        num_microbatches=arguments.pop("num_microbatches"),
        virtual_stages=arguments.pop("virtual_stages", 1),
    )
    return search_stages(
        stage_costs=lambda start, stop, submesh: costs[start, stop, submesh],
        transfer_s=lambda cut, source, target: transfers[cut, source, target],
        timing=timing,
        **arguments,
    )
