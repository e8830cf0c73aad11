"""Plans, stage graphs and programs as they are printed; `pytest --update-goldens` writes them anew, to be reviewed.

A golden says what changed. Whether it is right is said by the tests of what each value promises.
"""

from pathlib import Path
from typing import Any

import jax
import pytest

from autopar.compiler import passes
from autopar.hardware.cluster import Cluster
from tests.small_steps import (
    adam,
    adam_state,
    gpt_batch,
    gpt_loss,
    gpt_params,
    mlp_batch,
    mlp_params,
    mlp_step,
    traced,
    two_stages,
)

pytestmark = pytest.mark.skipif(
    not jax.__version__.startswith("0.10."), reason="releases of JAX differ in their equations; these are of 0.10"
)
GOLDEN = Path(__file__).parent / "golden"
STEPS: dict[str, Any] = {
    "mlp": (mlp_step, (mlp_params(), mlp_batch()), two_stages()),
    "tied_gpt": (
        adam(gpt_loss, clip=0.1),
        (adam_state(gpt_params()), gpt_batch()),
        two_stages(num_microbatches=4, schedule="zero-bubble"),
    ),
}


def printed(name: str, what: str) -> str:
    step, args, method = STEPS[name]
    trace = traced(step, *args, donated=(0,))
    plan = passes.make_plan(trace, method, cluster=Cluster(num_devices=4, kind="cpu"))
    # The fingerprint names the release of JAX as well.
    match what:
        case "plan":
            return str(plan).replace(trace.fingerprint, "<fingerprint>")
        case "stage_graph":
            return str(passes.cut_step(trace, plan))
        case _:
            return str(passes.lower_step(trace, plan))


@pytest.mark.parametrize("what", ["plan", "stage_graph", "program"])
@pytest.mark.parametrize("name", STEPS)
def test_print_is_as_it_was(name, what, request):
    path, text = GOLDEN / f"{name}.{what}.txt", printed(name, what) + "\n"
    if request.config.getoption("--update-goldens"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "run `pytest --update-goldens` if the change is meant"
