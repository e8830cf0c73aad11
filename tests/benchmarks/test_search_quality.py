"""Random machines are those of their seed, and a row says which method is ahead."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import autopar
from benchmarks.enumerated_plans import train_step
from benchmarks.models.sizes import FAMILIES
from benchmarks.search_quality import ALLOWED, FREE, Row, cluster_of, line, main, measured, slower


def test_a_random_machine_is_that_of_its_seed():
    one, again, other = (cluster_of(f"random:{seed}") for seed in (3, 3, 4))
    assert one == again
    assert one != other
    assert one.num_devices % one.groups[0].machine.devices_per_host == 0


@pytest.mark.parametrize("seed", [0, 5])
def test_a_row_on_a_random_machine(seed):
    row = measured("mlp", f"random:{seed}", [FREE, "4 microbatches", "3 stages"])
    assert row.best in ("4 microbatches", "3 stages")
    assert row.ratio <= ALLOWED
    assert f"of {row.best}" in line(row)


def test_methods_are_held_to_a_share_of_the_memory_that_the_free_plan_takes():
    row = measured("mlp", "dgx-h100:8", [FREE, "1 microbatch", "little memory", "DataParallel()"], 0.65)
    free = measured("mlp", "dgx-h100:8", [FREE])
    assert row.step_ms[FREE] > 1.001 * free.step_ms[FREE]
    assert row.step_ms[FREE] <= ALLOWED * row.step_ms["1 microbatch"]
    assert row.refused == dict.fromkeys(("little memory", "DataParallel()"), "does not fit")


def test_rows_are_held_against_those_of_an_earlier_search():
    def row(model, step_ms, refused=()):
        return Row(
            model=model,
            cluster="random:0",
            step_ms=step_ms,
            refused=dict.fromkeys(refused, "does not fit"),
            plan="",
            gap=None,
            cpu_s=1.0,
            ratio=1.0,
            best="",
        )

    before = [dataclasses.asdict(row("gpt", {FREE: 2.0, "1f1b": 2.0, "gpipe": 3.0, "2 stages": 4.0}))]
    now = row("gpt", {FREE: 2.001, "1f1b": 2.1, "3 stages": 9.0}, refused=["gpipe", "4 stages"])
    assert slower([now, row("mlp", {FREE: 9.0})], before) == [
        "gpt on random:0 by 1f1b takes 2.1 ms, 2 ms before",
        "gpt on random:0 by gpipe has no plan, 3 ms before",
    ]


def test_a_model_that_there_is_not_is_refused_with_those_that_there_are(capsys):
    for unknown in ("resnet", "gpt:2.6", "mlp:2.6B"):
        with pytest.raises(SystemExit):
            main(["--models", unknown])
        assert f"{unknown} is no model; give one of mlp, " in capsys.readouterr().err


def test_a_model_of_a_family_is_held_as_well(monkeypatch):
    small = FAMILIES["wresnet"].scaled_down(1)
    monkeypatch.setitem(FAMILIES, "wresnet", dataclasses.replace(FAMILIES["wresnet"], models={"small": lambda: small}))
    row = measured("wresnet:small", "dgx-h100:2", [FREE, "1 microbatch"])
    assert row.best == "1 microbatch" and row.ratio <= ALLOWED and not row.refused


def test_a_search_that_is_slower_than_before_fails(tmp_path):
    before, asked = tmp_path / "before.json", ["--models", "mlp", "--clusters", "random:5", "--methods", "1f1b"]
    main([*asked, "--json", str(before)])
    main([*asked, "--before", str(before)])
    with pytest.raises(SystemExit, match=r"has no row of lstm on random:5, .* Ask for models"):
        main(["--models", "lstm", *asked[2:], "--before", str(before)])
    rows = json.loads(before.read_text())
    rows[0]["step_ms"] = {name: 0.9 * ms for name, ms in rows[0]["step_ms"].items()}
    before.write_text(json.dumps(rows))
    with pytest.raises(SystemExit, match=r"mlp on random:5 by Auto\(\) takes .* ms before"):
        main([*asked, "--before", str(before)])


def test_a_cluster_that_there_is_not_is_refused_before_anything_is_planned(capsys):
    with pytest.raises(autopar.InvalidArgument, match=r"no machine 'dgx-a100'\. Did you mean"):
        main(["--models", "mlp", "--clusters", "random:5", "1x dgx-a100", "--methods", "1f1b"])
    assert "random:5" not in capsys.readouterr().out


def test_a_search_of_unequal_layers_is_not_behind_one_of_a_schedule_alone():
    """The best stages are for one microbatch, of which no formula that counts on more of them tells."""

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    widths = (2048, 512, 512, 2048, 512, 256)
    params = [{"up": array(256, width), "down": array(width, 256)} for width in widths]
    cluster = cluster_of("random:11")
    traced = autopar.parallelize(train_step, cluster=cluster).trace(params, {"x": array(32, 256), "y": array(32, 256)})
    free_s, restricted_s = (
        traced.plan(method).simulate(cluster).step_time_s
        for method in (autopar.Auto(), autopar.Auto(schedule="zero-bubble", num_microbatches=1))
    )
    assert free_s <= ALLOWED * restricted_s
