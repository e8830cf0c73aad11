"""Steps of language models and of frameworks that train them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.wild.case import BATCH, SEED, Wild, case, cross_entropy, images, ints, normal, wild

# transformers ---------------------------------------------------------------------------------------------------------


def _transformer(model: Any, loss_fn: Callable[[Any, Any], jax.Array], batch: Any) -> Wild:
    """The step of the package's Flax examples: a loss of the model's outputs, plain SGD."""

    def step(params: Any, batch: Any, key: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: loss_fn(model(**batch["inputs"], params=p, dropout_rng=key,
                                                                train=True), batch))(params)  # fmt: skip
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return wild(step, lambda: (jax.tree.map(jnp.array, model.params), batch, jax.random.PRNGKey(SEED)))


@case("transformers")
def transformers_gpt2() -> Wild:
    """`FlaxGPT2LMHeadModel`, two blocks, with dropout."""
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    model = FlaxGPT2LMHeadModel(GPT2Config(vocab_size=101, n_positions=16, n_embd=32, n_layer=2, n_head=4))
    tokens = ints(101, BATCH, 16)
    loss = lambda out, batch: cross_entropy(out.logits[:, :-1], batch["inputs"]["input_ids"][:, 1:])  # noqa: E731
    return _transformer(model, loss, {"inputs": {"input_ids": tokens}})


@case("transformers")
def transformers_bert() -> Wild:
    """`FlaxBertForSequenceClassification` with an attention mask."""
    from transformers import BertConfig, FlaxBertForSequenceClassification

    config = BertConfig(vocab_size=101, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=64, max_position_embeddings=16, num_labels=5)  # fmt: skip
    inputs = {"input_ids": ints(101, BATCH, 12), "attention_mask": ints(2, BATCH, 12).at[:, 0].set(1)}
    batch = {"inputs": inputs, "labels": ints(5, BATCH)}
    return _transformer(
        FlaxBertForSequenceClassification(config), lambda out, batch: cross_entropy(out.logits, batch["labels"]), batch
    )


@case("transformers")
def transformers_llama() -> Wild:
    """`FlaxLlamaForCausalLM`: rotary positions, fewer key heads than query heads."""
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    config = LlamaConfig(vocab_size=101, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16)  # fmt: skip
    tokens = ints(101, BATCH, 12)
    loss = lambda out, batch: cross_entropy(out.logits[:, :-1], batch["inputs"]["input_ids"][:, 1:])  # noqa: E731
    return _transformer(FlaxLlamaForCausalLM(config), loss, {"inputs": {"input_ids": tokens}})


@case("transformers")
def transformers_vit() -> Wild:
    """`FlaxViTForImageClassification`."""
    from transformers import FlaxViTForImageClassification, ViTConfig

    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16,
                       patch_size=8, num_labels=10)  # fmt: skip
    image, label = images()
    batch = {"inputs": {"pixel_values": image.transpose(0, 3, 1, 2)}, "labels": label}
    return _transformer(
        FlaxViTForImageClassification(config), lambda out, batch: cross_entropy(out.logits, batch["labels"]), batch
    )


# penzai ---------------------------------------------------------------------------------------------------------------


@case("penzai")
def penzai_trainer() -> Wild:
    """The step function of Penzai's `StatefulTrainer`, already under `jax.jit` with static arguments by name."""
    from penzai import pz
    from penzai.models.simple_mlp import MLP
    from penzai.toolshed.basic_training import StatefulTrainer

    def loss_fn(model: Any, state: Any, rng: jax.Array, xs: Any, labels: jax.Array) -> Any:
        logits = model(xs).unwrap("batch", "features")
        return cross_entropy(logits, labels), state, {}

    def keywords() -> dict[str, Any]:
        model = MLP.from_config(init_base_rng=jax.random.key(SEED), feature_sizes=[8, 16, 5])
        trainer = StatefulTrainer.build(jax.random.key(1), model, optax.sgd(0.1), loss_fn)
        stateless, variables = pz.unbind_variables(trainer.model)
        return {
            "root_rng": trainer.root_rng, "state": trainer.state.value, "stateless_model": stateless,
            "trainable_params": pz.freeze_variables(tuple(variables)), "frozen_params": (), "state_vars": (),
            "loss_fn": trainer.loss_fn, "optimizer_def": trainer.optimizer_def,
            "kwargs": {"xs": pz.nx.wrap(normal(BATCH, 8), "batch", "features"), "labels": ints(5, BATCH)},
        }  # fmt: skip

    step = StatefulTrainer.build(jax.random.key(1), MLP.from_config(jax.random.key(SEED), [8, 5]), optax.sgd(0.1),
                                 loss_fn).step_fn  # fmt: skip
    return wild(step, tuple, lambda step: step, keywords)


# tunix ----------------------------------------------------------------------------------------------------------------


def _tunix_step(adapted: bool) -> Wild:
    from flax import nnx
    from tunix.models.llama3 import model as llama
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

    config = llama.ModelConfig(num_layers=2, vocab_size=64, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8,
                               num_kv_heads=2, rope_theta=10_000, norm_eps=1e-5)  # fmt: skip

    def trainer() -> Any:
        model = llama.Llama3(config, rngs=nnx.Rngs(SEED))
        if adapted:
            import qwix

            provider = qwix.LoraProvider(module_path=".*q_proj|.*kv_proj|.*gate_proj", rank=4, alpha=2.0)
            model = qwix.apply_lora_to_model(model, provider, **model.get_model_input())
        return PeftTrainer(model, optax.adamw(1e-3), TrainingConfig(eval_every_n_steps=100, max_steps=10))

    def arguments() -> tuple[Any, ...]:
        mine, length = trainer(), 12
        batch = {
            "input_tokens": ints(64, BATCH, length),
            "input_mask": jnp.ones((BATCH, length), bool),
            "positions": jnp.tile(jnp.arange(length), (BATCH, 1)),
            "attention_mask": jnp.tile(jnp.tril(jnp.ones((length, length), bool)), (BATCH, 1, 1)),
        }
        return mine.model, mine.optimizer, batch

    return wild(trainer().create_train_step_fn(), arguments, nnx.jit)


@case("google-tunix")
def tunix_llama() -> Wild:
    """The step of Tunix's `PeftTrainer` on its Llama 3, every parameter trained."""
    return _tunix_step(adapted=False)


@case("google-tunix")
def tunix_llama_lora() -> Wild:
    """The same with low-rank adapters by Qwix, which alone are trained."""
    return _tunix_step(adapted=True)


# maxtext --------------------------------------------------------------------------------------------------------------


def _maxtext_step(**options: Any) -> Wild:
    import maxtext
    from flax import nnx
    from flax.core.spmd import logical_axis_rules
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train.train import train_step
    from maxtext.utils import sharding, train_utils

    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    given = {
        "run_name": "wild", "base_output_directory": "", "dataset_type": "synthetic", "enable_checkpointing": False,
        "enable_goodput_recording": False, "skip_jax_distributed_system": True, "log_config": False, "steps": 5,
        "base_num_decoder_layers": 2, "base_emb_dim": 32, "base_mlp_dim": 64, "base_num_query_heads": 4,
        "base_num_kv_heads": 2, "head_dim": 8, "vocab_size": 64, "max_target_length": 16, "per_device_batch_size": 2,
        "attention": "dot_product", "dtype": "float32", "decoder_block": "llama2", "gradient_clipping_threshold": 1.0,
    }  # fmt: skip
    config = pyconfig.initialize(["wild", str(base)], **given, **options)

    def prepared() -> tuple[Any, ...]:
        _, _, shardings, _, mesh, *_, state = train_utils.setup_train_loop(config, None)
        return *nnx.split(state), mesh, *sharding.maybe_update_params_sharding_with_opt(config, shardings)

    graph, _, mesh, params_shardings, shardings = prepared()

    @contextmanager
    def around() -> Iterator[None]:
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            yield

    def arguments() -> tuple[Any, ...]:
        batch: dict[str, jax.Array] = {}
        for number, name in enumerate(("inputs", "targets")):
            batch[name] = 1 + ints(63, BATCH, 16, seed=number)
            batch[f"{name}_position"] = jnp.tile(jnp.arange(16, dtype=jnp.int32), (BATCH, 1))
            batch[f"{name}_segmentation"] = jnp.ones((BATCH, 16), jnp.int32)
        return prepared()[1], batch

    step = partial(train_step, graph, config, shardings, params_shardings)
    return wild(lambda state, data: step(state, data), arguments, around=around)


@case("maxtext")
def maxtext_llama() -> Wild:
    """MaxText's `train_step` on its Llama 2 decoder, called under its mesh and its logical axis rules."""
    return _maxtext_step(scan_layers=False)


@case("maxtext")
def maxtext_llama_scanned() -> Wild:
    """The same with its layers in a scan and computed again."""
    return _maxtext_step(scan_layers=True, remat_policy="full")
