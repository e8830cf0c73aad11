"""Random choice problems: small ones to enumerate, and large ones that look like the sharding of a train step."""

import itertools

import numpy as np

from autopar.compiler.solver.problem import MRF, Row, row_weight


def small_problem(seed: int) -> MRF:
    """At most twelve nodes of at most four options, sparse or dense, with ties, zeros, repeats and forbidden pairs."""
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(1, 13))
    sizes = rng.integers(1, 4 if num_nodes > 8 else 5, num_nodes)
    draw = [
        lambda shape: rng.random(shape),
        lambda shape: rng.integers(0, 4, shape).astype(float),
        lambda shape: rng.random(shape) * (rng.random(shape) < 0.4),
        lambda shape: 10 ** rng.uniform(-7, 0, shape),
    ][rng.integers(4)]
    forbidden = rng.choice([0.0, 0.05, 0.15])

    def costs(shape):
        return np.where(rng.random(shape) < forbidden, np.inf, draw(shape))

    density = rng.choice([0.2, 0.5, 1.0])
    pairs = [pair for pair in itertools.combinations(range(num_nodes), 2) if rng.random() < density]
    return MRF(
        costs=tuple(costs(size) for size in sizes),
        edges={(i, j): costs((sizes[i], sizes[j])) for i, j in pairs},
    )


def small_rows(problem: MRF, seed: int) -> list[Row]:
    """One to three rows of weights as large as bytes, some easy, some tight, some impossible."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(rng.integers(1, 4)):
        nodes = {i: rng.integers(0, 10, c.size) * 1e8 for i, c in enumerate(problem.costs) if rng.random() < 0.7}
        edges = {e: rng.integers(0, 5, m.shape) * 1e8 for e, m in problem.edges.items() if rng.random() < 0.2}
        lightest = sum(w.min() for w in [*nodes.values(), *edges.values()])
        heaviest = sum(w.max() for w in [*nodes.values(), *edges.values()])
        limit = lightest + rng.uniform(-0.02, 0.9) * (heaviest - lightest) + 1.0
        rows.append(Row(name=f"row {number}", nodes=nodes, edges=edges, limit=limit))
    return rows


def enumerate_best(problem: MRF, rows: list[Row] | None = None) -> float:
    """The least cost of any choice, by trying all."""
    values = costs_of_all(problem)
    for row in rows or ():
        values[weights_of_all(problem, row) > row.limit] = np.inf
    return float(values.min(initial=np.inf))


def least_excess(problem: MRF, rows: list[Row]) -> float:
    """The least that any possible choice exceeds its worst row by, by trying all; infinity if none is possible."""
    over = np.max([weights_of_all(problem, row) - row.limit for row in rows], axis=0)
    return float(over[np.isfinite(costs_of_all(problem))].min(initial=np.inf))


def costs_of_all(problem: MRF) -> np.ndarray:
    """The cost of every choice: an axis for each node, along it the node's options."""
    return _sums(problem, dict(enumerate(problem.costs)), problem.edges)


def weights_of_all(problem: MRF, row: Row) -> np.ndarray:
    """The weight of every choice in a row."""
    return _sums(problem, row.nodes, row.edges)


def _sums(problem: MRF, nodes, edges) -> np.ndarray:
    total = np.zeros([cost.size for cost in problem.costs])
    for numbers, values in [*(((i,), weights) for i, weights in nodes.items()), *edges.items()]:
        assert list(numbers) == sorted(numbers)
        total += values.reshape([size if i in numbers else 1 for i, size in enumerate(total.shape)])
    return total


def step_problem(seed: int, *, num_nodes: int = 600, factors: int = 6, axes: int = 2, mesh: tuple[int, ...] = ()):
    """Like a train step: factors^axes options a node, layers that repeat, and links from forward to backward nodes.

    An option gives each mesh axis to one of the node's factors. Node costs are compute and the reduction of the summed
    factor; the cost of an edge are the collectives that bring the producer's layout into the consumer's.
    """
    rng = np.random.default_rng(seed)
    mesh = mesh or (2, 4, 2)[:axes]
    options = np.array(list(itertools.product(range(factors), repeat=axes)))
    period = 24
    kinds = [node_costs(rng, options, mesh, factors) for _ in range(period)]
    links = [np.array([*rng.permutation(factors - 1), factors - 1]) for _ in range(6)]
    sizes = 10 ** rng.uniform(-5, -2.5, 8)
    matrices = [reshard_costs(options, mesh, links[rng.integers(6)], sizes[rng.integers(8)], rng) for _ in range(30)]
    offsets = [int(rng.integers(2, 9)) if rng.random() < 0.25 else 0 for _ in range(period)]
    half = num_nodes // 2
    edges = {}
    for node in range(1, num_nodes):
        where = node % period if node < half else period - 1 - (num_nodes - 1 - node) % period
        edges[node - 1, node] = matrices[where % 30]
        if offsets[where] and node - offsets[where] >= 0:
            edges[node - offsets[where], node] = matrices[(where + 7) % 30]
        if node >= half and where % 8 == 0:
            edges.setdefault((num_nodes - 1 - node, node), matrices[(where + 3) % 30])
    return MRF(costs=tuple(kinds[node % period] for node in range(num_nodes)), edges=edges)


def node_costs(rng, options, mesh, factors):
    work = 10 ** rng.uniform(-6, -2.5)
    summed, size = rng.integers(factors), 10 ** rng.uniform(-6, -3)
    blocked = rng.random(factors - 1) < 0.25
    cost = np.zeros(len(options))
    for index, option in enumerate(options):
        split = np.prod([n for n, f in zip(mesh, option) if f < factors - 1])
        reduced = np.prod([n for n, f in zip(mesh, option) if f == summed])
        cost[index] = work / split + (2 * size * (1 - 1 / reduced) + 1e-5 if reduced > 1 else 0)
        if any(f < factors - 1 and blocked[f] for f in option):
            cost[index] = np.inf
    return cost


def reshard_costs(options, mesh, link, size, rng):
    """Axis by axis: free where the factors agree or the producer is replicated, else a gather or an all-to-all."""
    produced = link[options]
    matrix = np.zeros((len(options), len(options)))
    held = np.prod([np.where(produced[:, a] < link.size - 1, n, 1) for a, n in enumerate(mesh)], axis=0)
    for axis, n in enumerate(mesh):
        source, target = produced[:, axis][:, None], options[:, axis][None, :]
        replicated = link.size - 1
        moved = (source != target) & (source != replicated)
        gather = moved & (target == replicated)
        matrix += np.where(gather, 1e-5 + size * (n - 1) / held[:, None] * 1.0, 0.0)
        matrix += np.where(moved & ~gather, 1e-5 + size * (n - 1) / n / held[:, None], 0.0)
    matrix[:, rng.random(len(options)) < 0.03] = np.inf
    matrix[np.isinf(matrix).all(1)] = 0.0
    return matrix


def memory_row(problem: MRF, seed: int, share: float, options) -> Row:
    """A row over a third of the nodes that allows `share` of what `options` use."""
    rng = np.random.default_rng(seed)
    nodes = {}
    for node, cost in enumerate(problem.costs):
        if rng.random() < 0.33:
            nodes[node] = 10 ** rng.uniform(6, 9) / rng.choice([1, 2, 4, 8], cost.size)
    row = Row(name="peak", nodes=nodes, edges={}, limit=1.0)
    used = row_weight(row, options)
    least = sum(weight[np.isfinite(problem.costs[i])].min() for i, weight in nodes.items())
    return Row(name="peak", nodes=nodes, edges={}, limit=least + share * (used - least))
