"""Steps of packages of vision models: jax-resnet, jax-models, Equimo, and a transformer of einops."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.wild.case import BATCH, SEED, Wild, case, cross_entropy, images, ints, normal, wild


@case("jax-resnet")
def jax_resnet_recomputed() -> Wild:
    """A residual network with batch norm, its loss under `jax.checkpoint`, and a moving average of the parameters."""
    import jax_resnet

    model = jax_resnet.ResNet(
        partial(jax_resnet.ResNetDBlock),
        stage_sizes=(1, 1),
        n_classes=10,
        hidden_sizes=(8, 16),
        stem_cls=jax_resnet.ResNetDStem,
    )
    optimizer = optax.sgd(0.01, momentum=0.9)

    def step(params: Any, stats: Any, state: Any, average: Any, batch: Any) -> Any:
        @jax.checkpoint
        def loss_fn(params: Any) -> Any:
            logits, new = model.apply({"params": params, "batch_stats": stats}, batch[0], mutable=["batch_stats"])
            return cross_entropy(logits, batch[1]), new["batch_stats"]

        (loss, new_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, new_stats, state, optax.incremental_update(params, average, 0.01), loss

    def arguments() -> tuple[Any, ...]:
        batch = images()
        variables = model.init(jax.random.key(SEED), batch[0])
        params, stats = variables["params"], variables["batch_stats"]
        return params, stats, optimizer.init(params), jax.tree.map(jnp.array, params), batch

    return wild(step, arguments)


@case("jax-models")
def jax_models_mixer() -> Wild:
    """`MLPMixer` with dropout, whose key the step splits."""
    from jax_models.models.mlp_mixer import MLPMixer

    model = MLPMixer(patch_size=4, hidden_size=16, channels_dim=16, tokens_dim=16, attach_head=True, num_classes=10)
    optimizer = optax.sgd(0.1)

    def step(params: Any, state: Any, key: jax.Array, batch: Any) -> Any:
        key, dropout = jax.random.split(key)
        apply = lambda params: model.apply({"params": params}, batch[0], False, rngs={"dropout": dropout})  # noqa: E731
        loss, grads = jax.value_and_grad(lambda params: cross_entropy(apply(params), batch[1]))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, key, loss

    def arguments() -> tuple[Any, ...]:
        batch = images()
        params = model.init(jax.random.key(SEED), batch[0], True)["params"]
        return params, optimizer.init(params), jax.random.key(1), batch

    return wild(step, arguments)


@case("equimo")
def equimo_vision_transformer() -> Wild:
    """Equimo's `VisionTransformer` on one image at a time under `jax.vmap`, with keys for stochastic depth."""
    import equinox as eqx
    from equimo.models.vit import VisionTransformer

    optimizer = optax.sgd(0.1)

    def step(model: Any, state: Any, x: jax.Array, labels: jax.Array, key: jax.Array) -> Any:
        key, drop = jax.random.split(key)
        keys = jax.random.split(drop, len(x))
        loss, grads = eqx.filter_value_and_grad(lambda m: cross_entropy(jax.vmap(m)(x, keys), labels))(model)
        updates, state = optimizer.update(grads, state, model)
        return eqx.apply_updates(model, updates), state, key, loss

    def arguments() -> tuple[Any, ...]:
        model = VisionTransformer(
            img_size=16, in_channels=3, dim=16, patch_size=4, num_heads=2, depths=[2], num_classes=10,
            drop_path_rate=0.1, pos_drop_rate=0.1, key=jax.random.PRNGKey(SEED),
        )  # fmt: skip
        state = optimizer.init(eqx.filter(model, eqx.is_array))
        return model, state, normal(BATCH, 3, 16, 16), ints(10, BATCH), jax.random.PRNGKey(1)

    return wild(step, arguments, eqx.filter_jit)


@case("dm-pix")
def pix_augmentation() -> Wild:
    """Crops, flips and hues by PIX inside of the step, each image with a key of its own."""
    import dm_pix as pix

    def augmented(key: jax.Array, image: jax.Array) -> jax.Array:
        crop, flip, hue = jax.random.split(key, 3)
        image = pix.random_crop(crop, jnp.pad(image, ((2, 2), (2, 2), (0, 0))), image.shape)
        return pix.random_hue(hue, jax.nn.sigmoid(pix.random_flip_left_right(flip, image)), 0.1)

    def step(params: Any, key: jax.Array, batch: Any) -> Any:
        key, draws = jax.random.split(key)
        x = jax.vmap(augmented)(jax.random.split(draws, len(batch[0])), batch[0]).reshape(len(batch[0]), -1)
        loss, grads = jax.value_and_grad(lambda params: cross_entropy(x @ params, batch[1]))(params)
        return params - 0.1 * grads, key, loss

    return wild(step, lambda: (normal(16 * 16 * 3, 10) / 30, jax.random.PRNGKey(SEED), images()))


@case("einops")
def einops_vision_transformer() -> Wild:
    """A vision transformer of `einops.rearrange`, `repeat`, `pack` and `reduce` in a Flax module."""
    import flax.linen as nn
    from einops import einsum, pack, rearrange, reduce, repeat

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Dense(16)(rearrange(x, "b (h p) (w q) c -> b (h w) (p q c)", p=4, q=4))
            token = self.param("token", nn.initializers.normal(), (1, 16))
            x, _ = pack([repeat(token, "n d -> b n d", b=len(x)), x], "b * d")
            for _ in range(2):
                q, k, v = rearrange(nn.Dense(48)(nn.LayerNorm()(x)), "b n (t h d) -> t b h n d", t=3, h=2)
                weights = nn.softmax(einsum(q, k, "b h i d, b h j d -> b h i j"))
                x += rearrange(einsum(weights, v, "b h i j, b h j d -> b h i d"), "b h i d -> b i (h d)")
                x += nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
            return nn.Dense(10)(reduce(x, "b n d -> b d", "mean"))

    model = Transformer()
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda params: cross_entropy(model.apply(params, batch[0]), batch[1]))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def arguments() -> tuple[Any, ...]:
        batch = images()
        params = model.init(jax.random.key(SEED), batch[0])
        return params, optimizer.init(params), batch

    return wild(step, arguments)
