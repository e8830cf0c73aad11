"""Choose the model for a number of devices: the model grows with the devices, the batch stays (weak scaling).

    FAMILIES["gpt"].maker_on(8)()     Alpa's model for eight GPUs, 2.6B
    FAMILIES["gpt"].maker("39B")()    any model by its name
    FAMILIES["gpt"].scaled_down(8)    as much work for each of eight devices of a small machine as for one

The numbers of GPUs are those of benchmark/alpa/suite_{auto_gpt,auto_moe,wresnet}.py in alpa-projects/alpa.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp

from autopar.errors import InvalidArgument
from benchmarks.models.alpa_gpt import GPT_SIZES, GPTSize, alpa_gpt
from benchmarks.models.alpa_moe import DEEPSEEK_SIZES, MOE_SIZES, MoESize, alpa_moe, deepseek_moe
from benchmarks.models.llama import LLAMA_8B, LLAMA_70B, LLAMA_405B, llama_workload
from benchmarks.models.wide_resnet import RESNET_SIZES, ResNetSize, wide_resnet
from benchmarks.models.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models of one kind."""

    name: str
    models: Mapping[str, Callable[[], Workload]]
    """Models by name; nothing is made until one is called."""
    by_gpus: Mapping[int, str]
    scaled_down: Callable[[int], Workload]
    """The small model for a number of devices."""

    def maker(self, name: str) -> Callable[[], Workload]:
        """Return the maker of the model of this name; `InvalidArgument` names those alike if there is none."""
        return self.models[closest(f"The model of {self.name}", name, self.models)]

    def maker_on(self, num_gpus: int) -> Callable[[], Workload]:
        """Return the maker of Alpa's model for this number of GPUs; `InvalidArgument` if it has none for it."""
        if num_gpus not in self.by_gpus:
            raise InvalidArgument(
                f"There is no {self.name} model for {num_gpus} GPUs. Alpa's are for {', '.join(map(str, self.by_gpus))}"
                f" GPUs: give one of these numbers, or say which model with --model ({', '.join(self.models)})."
            )
        return self.maker(self.by_gpus[num_gpus])


def closest(what: str, name: str, names: Iterable[str]) -> str:
    """The name, if it is one of `names`; else `InvalidArgument` with those that are spelt alike."""
    known = list(names)
    if name in known:
        return name
    alike = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(alike)}? " if alike else ""
    raise InvalidArgument(f"{what} is {name!r}, which there is not. {hint}Choose one of {', '.join(known)}.")


def _small_gpt(num_devices: int) -> Workload:
    size = GPTSize(width=128, layers=2 * num_devices, heads=8, length=128, vocabulary=1024, batch=32)
    return alpa_gpt(f"gpt-{size.layers}-layers", size, jnp.float32)


def _small_moe(num_devices: int) -> Workload:
    layers = 2 * num_devices
    size = MoESize(width=128, layers=layers, experts=8, heads=8, length=128, vocabulary=1024, batch=32, group=128)
    return alpa_moe(f"moe-{layers}-layers", size, jnp.float32)


def _small_resnet(num_devices: int) -> Workload:
    channels = 4 * round(2 * num_devices**0.5)  # FLOPs grow with its square
    size = ResNetSize(channels=channels, depth=26, image=32, classes=64, batch=64)
    return wide_resnet(f"wresnet-{channels}-channels", size)


_LLAMAS = {
    name: partial(llama_workload, name, replace(model, scanned=False))
    for name, model in (("llama-3-8b", LLAMA_8B), ("llama-3-70b", LLAMA_70B), ("llama-3-405b", LLAMA_405B))
}
FAMILIES: Mapping[str, Family] = {
    "gpt": Family(
        name="gpt",
        models={**{name: partial(alpa_gpt, f"gpt-{name}", size) for name, size in GPT_SIZES.items()}, **_LLAMAS},
        by_gpus={1: "350M", 2: "760M", 4: "1.3B", 8: "2.6B", 16: "6.7B", 32: "15B", 64: "39B"},
        scaled_down=_small_gpt,
    ),
    "moe": Family(
        name="moe",
        models={
            **{name: partial(alpa_moe, f"moe-{name}", size) for name, size in MOE_SIZES.items()},
            **{name: partial(deepseek_moe, name, size) for name, size in DEEPSEEK_SIZES.items()},
        },
        by_gpus={1: "380M", 2: "690M", 4: "1.3B", 8: "2.4B", 16: "10B", 32: "27B", 64: "70B"},
        scaled_down=_small_moe,
    ),
    "wresnet": Family(
        name="wresnet",
        models={name: partial(wide_resnet, f"wresnet-{name}", size) for name, size in RESNET_SIZES.items()},
        by_gpus={1: "250M", 2: "500M", 4: "1B", 8: "2B", 16: "4B", 32: "6.8B", 64: "13B"},
        scaled_down=_small_resnet,
    ),
}
