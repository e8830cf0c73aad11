"""Steps of reinforcement learning, replay, games and evolution."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.wild.case import BATCH, SEED, Wild, case, ints, normal, two_layers, wild

# brax -----------------------------------------------------------------------------------------------------------------


@case("brax")
def brax_proximal_policy() -> Wild:
    """Brax's own update of PPO: its loss, its networks, its `gradient_update_fn`."""
    from brax.training import gradients, types
    from brax.training.agents.ppo import losses, networks

    net = networks.make_ppo_networks(6, 2, policy_hidden_layer_sizes=(16, 16), value_hidden_layer_sizes=(16, 16))
    optimizer = optax.sgd(0.01)
    loss = lambda params, data, key: losses.compute_ppo_loss(params, None, data, key, ppo_network=net)  # noqa: E731
    update = gradients.gradient_update_fn(loss, optimizer, pmap_axis_name=None, has_aux=True)

    def step(params: Any, state: Any, data: Any, key: jax.Array) -> Any:
        (_, metrics), params, state = update(params, data, key, optimizer_state=state)
        return params, state, metrics

    def arguments() -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(SEED))
        params = losses.PPONetworkParams(policy=net.policy_network.init(keys[0]), value=net.value_network.init(keys[1]))
        shape = (BATCH, 5)
        data = types.Transition(
            observation=normal(*shape, 6), action=normal(*shape, 2), reward=normal(*shape), discount=jnp.ones(shape),
            next_observation=normal(*shape, 6, seed=1),
            extras={
                "state_extras": {"truncation": jnp.zeros(shape)},
                "policy_extras": {
                    "raw_action": normal(*shape, 2), "log_prob": normal(*shape),
                    "distribution_params": normal(*shape, 4),
                },
            },
        )  # fmt: skip
        return params, optimizer.init(params), data, jax.random.key(2)

    return wild(step, arguments)


# evosax, mctx, gymnax -------------------------------------------------------------------------------------------------


@case("evosax")
def evosax_strategy() -> Wild:
    """`ask` and `tell` of `evosax`'s Open_ES, whose population is tried on a batch: a step without a gradient."""
    from evosax.algorithms import Open_ES

    loss, solution = two_layers()
    strategy = Open_ES(population_size=32, solution=solution)
    params = strategy.default_params

    def step(key: jax.Array, state: Any, x: jax.Array, y: jax.Array) -> Any:
        key, first, second = jax.random.split(key, 3)
        population, state = strategy.ask(first, state, params)
        fitness = jax.vmap(loss, in_axes=(0, None, None))(population, x, y)
        state, metrics = strategy.tell(second, population, fitness, state, params)
        return key, state, metrics

    def arguments() -> tuple[Any, ...]:
        state = strategy.init(jax.random.key(SEED), solution, params)
        return jax.random.key(1), state, normal(BATCH, 8), normal(BATCH, 4)

    return wild(step, arguments)


@case("mctx")
def mctx_policy_improvement() -> Wild:
    """`mctx.gumbel_muzero_policy`: a tree search by the model, and a gradient toward what it chose."""
    import mctx

    def predict(params: Any, seen: jax.Array) -> Any:
        hidden = jnp.tanh(seen @ params["in"])
        return hidden @ params["policy"], (hidden @ params["value"])[:, 0]

    def recurrent(params: Any, key: jax.Array, action: jax.Array, seen: jax.Array) -> Any:
        seen = jnp.tanh(seen + params["act"][action])
        logits, value = predict(params, seen)
        discount = jnp.full_like(value, 0.9)
        return mctx.RecurrentFnOutput(reward=seen[:, 0], discount=discount, prior_logits=logits, value=value), seen

    def step(params: Any, key: jax.Array, seen: jax.Array) -> Any:
        logits, value = predict(params, seen)
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=seen)
        found = mctx.gumbel_muzero_policy(params, key, root, recurrent, num_simulations=8)

        def loss_fn(params: Any) -> jax.Array:
            logits, value = predict(params, seen)
            wanted = found.search_tree.summary().value
            return jnp.mean(optax.softmax_cross_entropy(logits, found.action_weights) + (value - wanted) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss, found.action

    def arguments() -> tuple[Any, ...]:
        params = {"in": normal(6, 16) / 3, "policy": normal(16, 4), "value": normal(16, 1), "act": normal(4, 6)}
        return params, jax.random.PRNGKey(1), normal(BATCH, 6)

    return wild(step, arguments)


@case("gymnax")
def gymnax_policy_gradient() -> Wild:
    """Rollouts of `gymnax`'s CartPole in a scan inside of the step, and the policy gradient of what they gave."""
    import gymnax

    environment, settings = gymnax.make("CartPole-v1")
    logits = lambda params, seen: jnp.tanh(seen @ params["in"]) @ params["out"]  # noqa: E731

    def step(params: Any, worlds: Any, seen: jax.Array, key: jax.Array) -> Any:
        def act(carry: Any, key: jax.Array) -> Any:
            worlds, seen = carry
            first, second = jax.random.split(key)
            action = jax.random.categorical(first, logits(params, seen))
            move = jax.vmap(environment.step, (0, 0, 0, None))
            after, worlds, reward, *_ = move(jax.random.split(second, len(seen)), worlds, action, settings)
            return (worlds, after), (seen, action, reward)

        key, now = jax.random.split(key)
        (worlds, seen), (was, action, reward) = jax.lax.scan(act, (worlds, seen), jax.random.split(now, 4))
        ahead = jnp.cumsum(reward[::-1], 0)[::-1]

        def loss_fn(params: Any) -> jax.Array:
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits(params, was)), action[..., None], -1)[..., 0]
            return -jnp.mean(chosen * (ahead - ahead.mean()))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), worlds, seen, key, loss

    def arguments() -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(SEED), BATCH)
        seen, worlds = jax.vmap(environment.reset, (0, None))(keys, settings)
        return {"in": normal(4, 16) / 3, "out": normal(16, 2) / 4}, worlds, seen, jax.random.key(1)

    return wild(step, arguments, batch_argnums=(1, 2))


@case("gymnax")
def gymnax_runner_state() -> Wild:
    """All in one argument, as in PureJaxRL: parameters, optimizer and the worlds of `gymnax`'s Pendulum."""
    import gymnax

    environment, settings = gymnax.make("Pendulum-v1")
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))

    def outputs(params: Any, seen: jax.Array) -> Any:
        hidden = jnp.tanh(seen @ params["in"])
        return hidden @ params["mean"], (hidden @ params["value"])[:, 0]

    def step(runner: Any) -> Any:
        params, moments, worlds, seen, key = runner

        def act(carry: Any, key: jax.Array) -> Any:
            worlds, seen = carry
            first, second = jax.random.split(key)
            action = outputs(params, seen)[0] + 0.1 * jax.random.normal(first, (BATCH, 1))
            move = jax.vmap(environment.step, (0, 0, 0, None))
            after, worlds, reward, *_ = move(jax.random.split(second, BATCH), worlds, action, settings)
            return (worlds, after), (seen, action, reward)

        key, now, mixing = jax.random.split(key, 3)
        (worlds, seen), taken = jax.lax.scan(act, (worlds, seen), jax.random.split(now, 4))
        order = jax.random.permutation(mixing, 4 * BATCH)
        rows = jax.tree.map(lambda x: x.reshape(4 * BATCH, *x.shape[2:])[order].reshape(2, -1, *x.shape[2:]), taken)

        def update(carry: Any, rows: Any) -> Any:
            def loss_fn(params: Any) -> jax.Array:
                was, action, reward = rows
                mean, value = outputs(params, was)
                ahead = jax.lax.stop_gradient(reward - value)
                return jnp.mean(jnp.sum((action - mean) ** 2, -1) * ahead + (value - reward) ** 2)

            loss, grads = jax.value_and_grad(loss_fn)(carry[0])
            updates, moments = optimizer.update(grads, carry[1])
            return (optax.apply_updates(carry[0], updates), moments), loss

        (params, moments), losses = jax.lax.scan(update, (params, moments), rows)
        return (params, moments, worlds, seen, key), losses.mean()

    def arguments() -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(SEED), BATCH)
        seen, worlds = jax.vmap(environment.reset, (0, None))(keys, settings)
        params = {"in": normal(3, 16) / 2, "mean": normal(16, 1) / 4, "value": normal(16, 1, seed=1) / 4}
        return ((params, optimizer.init(params), worlds, seen, jax.random.key(1)),)

    return wild(step, arguments)


# flashbax -------------------------------------------------------------------------------------------------------------


@case("flashbax")
def flashbax_replay() -> Wild:
    """Q-learning on what is sampled from a replay buffer of `flashbax` in the state, to which each call adds."""
    import flashbax

    buffer = flashbax.make_item_buffer(max_length=64, min_length=4, sample_batch_size=BATCH, add_batches=True)
    values = lambda params, seen: jnp.tanh(seen @ params["in"]) @ params["out"]  # noqa: E731

    def step(state: Any, new: Any, key: jax.Array) -> Any:
        key, now = jax.random.split(key)
        replay = buffer.add(state["replay"], new)
        drawn = buffer.sample(replay, now).experience
        wanted = drawn["reward"] + 0.9 * values(state["target"], drawn["after"]).max(-1)

        def loss_fn(params: Any) -> jax.Array:
            chosen = jnp.take_along_axis(values(params, drawn["seen"]), drawn["action"][:, None], 1)[:, 0]
            return optax.huber_loss(chosen, wanted).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        target = optax.incremental_update(params, state["target"], 0.1)
        return {"params": params, "target": target, "replay": replay}, key, loss

    def arguments() -> tuple[Any, ...]:
        params = {"in": normal(6, 16) / 3, "out": normal(16, 3) / 4}
        new = {
            "seen": normal(8, 6), "after": normal(8, 6, seed=1), "reward": normal(8), "action": ints(3, 8)
        }  # fmt: skip
        replay = buffer.add(buffer.init(jax.tree.map(lambda x: x[0], new)), new)
        target = jax.tree.map(lambda p: 0.9 * p, params)
        return {"params": params, "target": target, "replay": replay}, new, jax.random.key(1)

    return wild(step, arguments)
