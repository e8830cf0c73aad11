"""Arrays laid side by side: what lies in the places of inputs that are read no more."""

import pytest

from autopar.compiler.memory.allocation import Border, MemoryProgram, alive, worst_moments
from autopar.compiler.memory.liveness import Op


def kernels_read_by_copies(nbytes: dict[str, int], order: str) -> MemoryProgram:
    """Kernels "k" and "l" are copied for a library to "p" and "q", which their updates read in the given order."""
    ops = [
        Op("apart", ("k",), ("p",)),
        Op("apart", ("p", "x"), ("a",)),
        Op("apart", ("l",), ("q",)),
        Op("apart", ("q", "a"), ("b",)),
        *(Op("apart", (key, "b"), (key.upper(),)) for key in order),
    ]
    return MemoryProgram(
        ops=ops,
        inputs=["k", "l", "x"],
        outputs=["P", "Q"],
        nbytes=dict.fromkeys("xab", 1) | nbytes,
        inner={},
        border=Border(taken={0: 0, 1: 1}),
        actions=(),
    )


@pytest.mark.parametrize(
    ("large", "order", "housed"),
    [
        pytest.param("k", "qp", {"q"}, id="an equal copy that is gone before, rather than what is smaller"),
        pytest.param("k", "pq", {"a"}, id="no copy that is there longer"),
        pytest.param("l", "qp", {"a"}, id="no copy that is larger"),
    ],
)
def test_other_arrays_lie_in_the_places_of_inputs_that_are_read_from_copies(large: str, order: str, housed: set[str]):
    copies = {"k": "kpP", "l": "lqQ"}
    nbytes = {key: 8 if large == "k" or kernel == large else 4 for kernel, keys in copies.items() for key in keys}
    program = kernels_read_by_copies(nbytes, order)
    assert program.housed.keys() == housed
    (worst,) = worst_moments(program, 1)
    assert worst.nbytes == sum(nbytes.get(key, 1) for key in alive(worst))
    assert not housed.intersection(alive(worst))


@pytest.mark.parametrize(
    ("last", "housed"),
    [
        pytest.param("g", {"g"}, id="a gradient once the parameter is read no more"),
        pytest.param("w", set(), id="nothing where the update reads the parameter"),
    ],
)
def test_gradients_lie_in_the_places_of_parameters_that_are_gathered_anew(last: str, housed: set[str]):
    ops = [
        Op("apart", ("w", "x"), ("a",)),
        Op("apart", ("a",), ("g",)),
        Op("apart", ("g", last, "s"), ("t",), collective="reduce-scatter"),
        Op("apart", ("t",), ("v",), collective="all-gather"),
    ]
    program = MemoryProgram(
        ops=ops,
        inputs=["w", "x", "s"],
        outputs=["v"],
        nbytes=dict.fromkeys("wgv", 8) | dict.fromkeys("xsta", 9),
        inner={},
        border=Border(taken={0: 0}),
        actions=(),
    )
    assert program.housed.keys() == housed
    assert program.levels[:4] == [9, 9 + (0 if housed else 8), 9 + (0 if housed else 8), 9]


@pytest.mark.parametrize(
    ("result", "housed"),
    [
        pytest.param(8, {"a", "b"}, id="one after the other in the place of a result that is made later"),
        pytest.param(2, set(), id="none that is larger than the result"),
    ],
)
def test_others_lie_in_the_places_of_results_until_these_are_made(result: int, housed: set[str]):
    ops = [
        Op("apart", ("x",), ("a",)),
        Op("apart", ("a",), ("c",)),
        Op("apart", ("c",), ("b",)),
        Op("apart", ("b",), ("d",)),
        Op("apart", ("d",), ("y",)),
    ]
    nbytes = {"x": 1, "a": 4, "b": 4, "c": 9, "d": 9, "y": result}
    program = MemoryProgram(
        ops=ops, inputs=["x"], outputs=["y"], nbytes=nbytes, inner={}, border=Border(own=[0]), actions=()
    )
    assert program.housed.keys() == housed
    (worst,) = worst_moments(program, 1)
    assert worst.nbytes == result + 9 + (0 if housed else 4)
