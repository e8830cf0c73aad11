"""Steps of probabilistic, scientific and ranking models."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.wild.case import BATCH, SEED, Wild, case, ints, normal, two_layers, wild

# dynamax ------------------------------------------------------------------------------------------------------------


@case("dynamax")
def dynamax_hidden_markov() -> Wild:
    """The likelihood of `dynamax`'s Gaussian hidden Markov model, over a batch of sequences."""
    from dynamax.hidden_markov_model import GaussianHMM
    from dynamax.parameters import from_unconstrained, to_unconstrained

    model, optimizer = GaussianHMM(3, 2), optax.adam(1e-2)
    initial, properties = model.initialize(jax.random.key(SEED))

    def step(params: Any, state: Any, emissions: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            known = from_unconstrained(params, properties)
            return -jax.vmap(lambda each: model.marginal_log_prob(known, each))(emissions).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def arguments() -> tuple[Any, ...]:
        params = to_unconstrained(initial, properties)
        return params, optimizer.init(params), normal(BATCH, 10, 2)

    return wild(step, arguments)


# numpyro, jaxopt, blackjax --------------------------------------------------------------------------------------------


@case("numpyro")
def numpyro_variational() -> Wild:
    """`SVI.update`: stochastic variational inference of a logistic regression."""
    import numpyro
    from numpyro.distributions import Bernoulli, Normal
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def model(x: jax.Array, y: jax.Array) -> None:
        weight = numpyro.sample("weight", Normal(jnp.zeros(8), 1.0).to_event(1))
        bias = numpyro.sample("bias", Normal(0.0, 1.0))
        with numpyro.plate("examples", len(x)):
            numpyro.sample("y", Bernoulli(logits=x @ weight + bias), obs=y)

    svi = SVI(model, AutoNormal(model), numpyro.optim.SGD(0.01), Trace_ELBO())
    x, y = normal(BATCH, 8), ints(2, BATCH)

    return wild(svi.update, lambda: (svi.init(jax.random.PRNGKey(SEED), x, y), x, y))


@case("jaxopt")
def jaxopt_optax_solver() -> Wild:
    """`jaxopt.OptaxSolver.update` on a multiclass logistic loss with a penalty."""
    import jaxopt

    def objective(params: Any, data: Any) -> jax.Array:
        x, y = data
        losses = jax.vmap(jaxopt.loss.multiclass_logistic_loss)(y, x @ params["w"] + params["b"])
        return losses.mean() + 0.01 * jnp.sum(params["w"] ** 2)

    solver = jaxopt.OptaxSolver(objective, optax.sgd(0.1))
    params = {"w": normal(8, 5), "b": jnp.zeros(5)}

    def arguments() -> tuple[Any, ...]:
        data = (normal(BATCH, 8), ints(5, BATCH))
        return params, solver.init_state(params, data=data), data

    return wild(solver.update, arguments)


@case("blackjax")
def blackjax_langevin() -> Wild:
    """A step of `blackjax.sgld`: stochastic gradient Langevin dynamics on a minibatch."""
    import blackjax

    def log_density(weight: jax.Array, batch: Any) -> jax.Array:
        x, y = batch
        return -0.5 * jnp.sum(weight**2) - 10 * jnp.mean((x @ weight - y) ** 2)

    kernel = blackjax.sgld(jax.grad(log_density))

    def step(key: jax.Array, weight: jax.Array, batch: Any, step_size: float) -> jax.Array:
        return kernel.step(key, weight, batch, step_size)

    return wild(step, lambda: (jax.random.key(SEED), normal(8), (normal(BATCH, 8), normal(BATCH)), 1e-3))


# haliax, gpjax -------------------------------------------------------------------------------------------------------


@case("haliax")
def haliax_language_model() -> Wild:
    """Named axes: `hnn.Embedding`, blocks of attention in a `hnn.Stacked`, `hnn.cross_entropy_loss`."""
    import equinox as eqx
    import haliax as hax
    import haliax.nn as hnn

    Batch, Pos, Embed, Mlp, Vocab, Layers = hax.make_axes(batch=BATCH, pos=8, embed=16, mlp=32, vocab=32, layers=2)
    KeyPos = Pos.alias("key_pos")

    class Block(eqx.Module):
        norm: hnn.LayerNorm
        mlp: hnn.MLP

        @staticmethod
        def init(*, key: jax.Array) -> Block:
            return Block(hnn.LayerNorm.init(Embed), hnn.MLP.init(Embed, Embed, Mlp, 1, key=key))

        def __call__(self, x: Any) -> Any:
            mask = hnn.attention.causal_mask(Pos, KeyPos)
            keys = self.norm(x).rename({Pos: KeyPos})
            return x + self.mlp(hnn.attention.dot_product_attention(KeyPos, Embed, self.norm(x), keys, keys, mask))

    optimizer = optax.sgd(0.1)

    def step(model: Any, state: Any, tokens: Any) -> Any:
        def loss_fn(model: Any) -> jax.Array:
            embed, blocks = model
            logits = embed.unembed(blocks.fold(embed(tokens)))
            wanted = hnn.one_hot(hax.roll(tokens, -1, Pos), Vocab)
            return hnn.cross_entropy_loss(logits, Vocab, wanted).mean().scalar()

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, state = optimizer.update(grads, state, model)
        return eqx.apply_updates(model, updates), state, loss

    def arguments() -> tuple[Any, ...]:
        first, second = jax.random.split(jax.random.key(SEED))
        stacked = hnn.Stacked.init(Layers, Block, gradient_checkpointing=True)(key=jax.random.split(second, 2))
        model = hnn.Embedding.init(Vocab, Embed, key=first), stacked
        return model, optimizer.init(model), hax.named(ints(32, BATCH, 8), (Batch, Pos))

    return wild(step, arguments, eqx.filter_jit)


@case("gpjax")
def gpjax_fit() -> Wild:
    """`gpjax.fit` as the step: three iterations in a scan, each on a minibatch that it draws."""
    import equinox as eqx
    import gpjax as gpx

    def step(model: Any, data: Any, key: jax.Array) -> Any:
        objective = lambda model, batch: -gpx.objectives.elbo(model, batch)  # noqa: E731
        return gpx.fit(model=model, objective=objective, train_data=data, optim=optax.sgd(1e-3), num_iters=3,
                       batch_size=8, key=key, verbose=False, safe=False)  # fmt: skip

    def arguments() -> tuple[Any, ...]:
        prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=gpx.kernels.RBF())
        model = gpx.variational_families.VariationalGaussian(
            model=prior * gpx.likelihoods.Gaussian(), inducing_inputs=jnp.linspace(-2, 2, 6)[:, None]
        )
        return model, gpx.Dataset(X=normal(BATCH, 1), y=jnp.sin(normal(BATCH, 1))), jax.random.key(1)

    return wild(step, arguments, eqx.filter_jit)


# rax, ott, e3nn -------------------------------------------------------------------------------------------------------


@case("rax")
def rax_lambda_rank() -> Wild:
    """`rax.pairwise_logistic_loss` weighted by `rax.dcg_lambdaweight`, and `rax.ndcg_metric`, of lists with masks."""
    import rax

    score = lambda params, x: (jnp.tanh(x @ params["in"]) @ params["out"])[..., 0]  # noqa: E731

    def step(params: Any, x: jax.Array, labels: jax.Array, where: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            weights = rax.dcg_lambdaweight
            return rax.pairwise_logistic_loss(score(params, x), labels, where=where, lambdaweight_fn=weights)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, loss, rax.ndcg_metric(score(params, x), labels, where=where, topn=5)

    def arguments() -> tuple[Any, ...]:
        params = {"in": normal(6, 16) / 3, "out": normal(16, 1) / 4}
        return params, normal(BATCH, 8, 6), ints(4, BATCH, 8).astype(jnp.float32), ints(4, BATCH, 8, seed=1) > 0

    return wild(step, arguments)


@case("ott-jax")
def ott_implicit_sinkhorn() -> Wild:
    """The transport cost of Sinkhorn's solver, differentiated implicitly, between a network's points and others."""
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import implicit_differentiation, sinkhorn

    solve = sinkhorn.Sinkhorn(implicit_diff=implicit_differentiation.ImplicitDiff())

    def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            made = jnp.tanh(x @ params["in"]) @ params["out"]
            geometry = pointcloud.PointCloud(made, y, epsilon=1.0)
            return jnp.sum(solve(linear_problem.LinearProblem(geometry)).matrix * geometry.cost_matrix)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return wild(step, lambda: (two_layers()[1], normal(BATCH, 8), normal(BATCH, 4)))


@case("e3nn-jax")
def e3nn_forces() -> Wild:
    """An equivariant network on spherical harmonics, trained on energies and forces, which are its gradients."""
    import e3nn_jax as e3nn
    from flax import linen

    class Net(linen.Module):
        @linen.compact
        def __call__(self, positions: jax.Array) -> jax.Array:
            apart = e3nn.IrrepsArray("1o", positions[:, None] - jnp.roll(positions, 1, 0)[None])
            sent = e3nn.concatenate([apart, e3nn.tensor_product(apart, e3nn.spherical_harmonics([1, 2], apart, True))])
            weights = e3nn.flax.MultiLayerPerceptron([8, sent.irreps.num_irreps], jax.nn.gelu)(e3nn.norm(apart).array)
            nodes = e3nn.flax.Linear("8x0e + 4x1o")(e3nn.mean(sent.regroup() * weights, axis=1))
            return e3nn.flax.Linear("0e")(
                e3nn.gate(e3nn.concatenate([nodes, e3nn.flax.Linear("4x0e")(nodes)]))
            ).array.sum()

    model = Net()

    def step(params: Any, positions: jax.Array, energies: jax.Array, forces: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            made, slopes = jax.vmap(jax.value_and_grad(model.apply, argnums=1), (None, 0))(params, positions)
            return jnp.mean((made - energies) ** 2) + jnp.mean((slopes + forces) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.001 * g, params, grads), loss

    def arguments() -> tuple[Any, ...]:
        positions = 2 * normal(BATCH, 5, 3)
        return model.init(jax.random.key(SEED), positions[0]), positions, normal(BATCH), normal(BATCH, 5, 3)

    return wild(step, arguments)


# tinygp -------------------------------------------------------------------------------------------------------------


@case("tinygp")
def tinygp_likelihood() -> Wild:
    """The likelihood of `tinygp`'s Gaussian process on a layer of the batch: every pair of examples meets."""
    from tinygp import GaussianProcess, kernels

    optimizer = optax.adam(0.01)

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        kernel = jnp.exp(params["amplitude"]) * kernels.Matern32(jnp.exp(params["scale"]))
        return -GaussianProcess(kernel, jnp.tanh(x @ params["layer"]), diag=0.1).log_probability(y)

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def arguments() -> tuple[Any, ...]:
        params = {"amplitude": jnp.zeros(()), "scale": jnp.zeros(()), "layer": normal(8, 4) / 3}
        return params, optimizer.init(params), normal(BATCH, 8), normal(BATCH, seed=1)

    return wild(step, arguments)
