"""Ray Train starts the processes, and again when one fails; autopar trains in them as it would anywhere."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import autopar
from autopar.errors import InvalidArgument, Unsupported
from tests.small_steps import mlp_params
from tests.training.ray_train_job import NUM_STEPS, batches, train_step

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("ray", "pyarrow", "pandas")),
    reason="pip install 'autopar[ray-train]'",
)
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_workers_of_ray_train_go_on_from_the_checkpoint_after_a_failure(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.ray_train_job", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads((tmp_path / "result.json").read_text())
    assert (tmp_path / "failed").exists() and found["processes"] == 2 and found["steps"] == 2
    state, losses = mlp_params(), []
    for number in range(NUM_STEPS):
        state, metrics = jax.jit(train_step)(state, batches(number))
        losses.append(float(metrics["loss"]))
    for mine, plain in zip(found["state"], jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6)
    reported = [json.loads(line) for line in (tmp_path / "reported.jsonl").read_text().splitlines()]
    assert {each["step"] for each in reported} == set(range(NUM_STEPS))
    for each in reported:
        assert set(each) == {"step", "loss"}
        np.testing.assert_allclose(each["loss"], losses[each["step"]], rtol=1e-5)


class FakeContext:
    """Ray Train's context for a group of three workers."""

    def get_world_size(self):
        return 3


def test_several_workers_without_a_jax_world_are_refused(monkeypatch):
    import ray.train

    monkeypatch.setattr(ray.train, "get_context", FakeContext)
    with pytest.raises(InvalidArgument, match=r"3 workers without a JAX world.*give ScalingConfig use_gpu=True"):
        autopar.ray_train_loop(lambda: None)()


def test_without_ray_train_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(Unsupported, match=r"pip install 'autopar\[ray-train\]'"):
        autopar.ray_train_report(0, {})
