"""Turn measured rows into cases that can be simulated, or say why one cannot.

What a row leaves out is filled in only from what else it says: sizes from the model's name, the global batch from
samples or tokens per second, microbatches from gradient accumulation, the step from the throughput. What is still
missing is a reason to skip the row.
"""

import math
import re
from dataclasses import dataclass, replace

from autopar.hardware.machine import Machine, machines
from benchmarks.accuracy_frameworks import Habits, habits_of, machine_of, with_kernel
from benchmarks.accuracy_models import Transformer, gpt_heads, gpt_of_size, named_transformer
from benchmarks.accuracy_rows import NUMBERS, Row


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a row's model is trained: degrees of parallelism, sizes of batches, recomputation.

    Devices are numbered with tensor parallelism innermost, then context, data and pipeline parallelism, as Megatron-LM
    does (Narayanan et al. 2021).
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    vp: int = 1
    """Virtual stages of each device: interleaved 1F1B if more than one."""
    cp: int = 1
    ep: int = 1
    """Experts are spread over `ep` devices of those that hold different data."""
    zero: int = 0
    """1 shards the optimizer's states over data parallelism, 2 the gradients too, 3 the parameters too."""
    microbatch: int
    """Samples of one microbatch in one data-parallel group."""
    microbatches: int
    """Microbatches of one step, in one data-parallel group."""
    sequence: int
    recompute: str = "none"
    """"none", "selective" (attention's scores) or "full" (whole layers)."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage; empty: equally many."""

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def batch(self) -> int:
        """Samples of one step."""
        return self.dp * self.microbatch * self.microbatches


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row as the simulator takes it, and what was measured."""

    row: Row
    model: Transformer
    layout: Layout
    habits: Habits
    machine: Machine
    measured_s: float | None
    """None if it ran out of memory."""
    out_of_memory: bool | None
    """Measured; None if the row does not say."""

    @property
    def measured_gib(self) -> float | None:
        """The most that one device held."""
        return self.row.number("mem_gib")

    @property
    def counts_tensors(self) -> bool:
        """True if the memory recorded is what tensors took: Megatron-LM prints torch.cuda.max_memory_allocated()
        (megatron/training/utils.py, report_memory)."""
        return self.row["framework"].lower().startswith("megatron-lm")

    @property
    def site(self) -> str:
        """The software that ran the step, of any release, and on which hosts: its cases are calibrated together."""
        return f"{self._setting} of {self.row['hw']}"

    @property
    def kind_of_site(self) -> str:
        """The site, whatever the hardware is called there."""
        return f"{self._setting} of {self.machine.name}"

    @property
    def _setting(self) -> str:
        executor = re.sub(r"[^a-z-].*", "", self.row["framework"].lower())
        hosts = "several hosts" if self.layout.devices > self.machine.domain else "one host"
        return f"{executor} on {hosts}"

    @property
    def cell(self) -> tuple[object, ...]:
        """Key that rows share which are choices for one task: model, hardware, devices, batch and sequence."""
        layout = self.layout
        return (self.model, self.row["hw"], self.row["framework"], layout.devices, layout.batch, layout.sequence)


class Unusable(Exception):
    """The reason that a row cannot be simulated, as a short sentence that counts with others."""


LARGEST = {"layers": 10_000, "ngpu": 10**6}
"""Largest value of a column that is taken for a measurement; 10⁸ for the other columns."""
LONGEST_S = 1e8
_VOCABULARY = 50304
"""Words of GPT-2, padded to a multiple of 128."""
_TRAINS_IN_BF16 = "02-28"
"""The day of 2022, as notes have it, from which Megatron-DeepSpeed has an optimizer for BF16."""


def case_of(row: Row) -> Case:
    """The row as a case; `Unusable` says why it is none."""
    for column in NUMBERS:
        if (row.number(column) or 0) > LARGEST.get(column, 10**8):
            raise Unusable(f"{column} is beyond what is simulated")
    hardware = machine_of(row["hw"])
    if hardware is None or hardware not in machines():
        raise Unusable(f"no machine file for the hardware {row['hw']!r}")
    habits = habits_of(row["framework"])
    if habits is None:
        raise Unusable("the framework is not named")
    habits = _with_types(row, with_kernel(habits, row["kernel"]))
    if "nvfp4" in row["note"].lower():
        raise Unusable("no machine file gives a rate for products in NVFP4")
    model = _model(row)
    layout = _layout(row, model)
    if (
        layout.microbatch * layout.sequence < layout.cp
        or model.query_size < layout.tp
        or not model.width
        or not model.vocab
    ):
        raise Unusable("its sizes leave some device without work")
    if layout.pp * layout.vp > model.layers + 2:  # the ends may have stages of their own
        raise Unusable("it has more stages than layers")
    if layout.ep > 1 and (model.experts is None or model.experts.count % layout.ep):
        raise Unusable("experts cannot be divided over ep")
    out_of_memory = None if not row["oom"] else row.number("oom") == 1
    measured_s = None if out_of_memory else _measured_s(row, model, layout)
    if measured_s is not None and not 0 < measured_s < LONGEST_S:
        raise Unusable("its step takes no time, or more than can be measured")
    return Case(
        row=row,
        model=model,
        layout=layout,
        habits=replace(habits, frozen=_trains_adapters(row, model)),
        machine=_machine(row, hardware),
        measured_s=measured_s,
        out_of_memory=out_of_memory,
    )


def _machine(row: Row, name: str) -> Machine:
    """The machine, with as many devices per host as the row says where a host is a fast domain."""
    machine = Machine.named(name)
    gigabytes = re.search(r"(\d+)gb", row["hw"].lower())
    if gigabytes:
        machine = replace(machine, memory_bytes=float(int(gigabytes[1]) * 2**30))
    per_host = row.whole("gpus_per_node")
    if not per_host or not machine.domain == machine.devices_per_host != per_host:
        return machine
    # A host has the network cards that the machine's has, whatever devices share them.
    bandwidth = machine.inter.bandwidth * machine.devices_per_host / per_host
    inter = replace(machine.inter, bandwidth=bandwidth)
    return replace(machine, devices_per_host=per_host, domain=per_host, inter=inter)


def _trains_adapters(row: Row, model: Transformer) -> bool:
    """LoRA by name, or by two thirds of the FLOPs of a token: none for the gradients of weights."""
    tokens_s, tflops = row.number("tok_s_gpu"), row.number("tflops_gpu")
    if re.search(r"\blora\b", f"{row['framework']} {row['model']} {row['note']}".replace("_", " ").lower()):
        return True
    return bool(tokens_s and tflops and not model.experts and tflops * 1e12 / tokens_s < 5 * model.parameters)


def _with_types(row: Row, habits: Habits) -> Habits:
    words = f"{row['hw']} {row['note']} {row['framework']} {row['kernel']}".lower()
    # NVIDIA's submissions to MLPerf compute in FP8, as their config files set it.
    if "fp8" in words or "mlperf" in words:
        return replace(habits, dtype="fp8")
    if re.match(r"gpt[- ]oss", row["model"].lower()):
        # Learnt sinks of attention: Transformer Engine fell back to separate kernels
        # in the releases that trained it in BF16, before cuDNN 9.13.1 (NVIDIA/TransformerEngine #2148, #2318).
        habits = replace(habits, flash=False)
    if "v100" in words:
        return replace(habits, dtype="float16")
    dated = re.match(r"\d\d-\d\d\b", row["note"])
    if dated is None or not row["framework"].lower().startswith("megatron-deepspeed"):
        return habits
    if dated[0] < _TRAINS_IN_BF16:
        return replace(habits, dtype="float16")
    # DeepSpeed's BF16_Optimizer, which keeps the gradients of PyTorch too.
    return replace(habits, dtype="bfloat16", sums_in_32_bits=True, kept_gradient_bytes=2.0)


# --- sizes ----------------------------------------------------------------------------------------------------


def _model(row: Row) -> Transformer:
    layers, hidden = row.whole("layers"), row.whole("hidden")
    if row["model"].lower().startswith("wide-resnet"):
        raise Unusable("a Wide-ResNet, whose plan is not recorded")
    if layers and hidden:
        heads = row.whole("heads") or gpt_heads(hidden)
        # BERT's word pieces (Devlin et al. 2019), padded as GPT-2's.
        vocab = row.whole("vocab") or (30592 if "bert" in row["model"].lower() else _VOCABULARY)
        return Transformer(layers=layers, hidden=hidden, heads=heads, vocab=vocab)
    billions = row.number("params_b")
    name = row["model"] if not billions else f"{row['model']}-{billions:g}b"
    named = named_transformer(row["model"]) or named_transformer(name)
    if named is None and billions and row["model"].upper() == "GPT":
        named = _gpt(row, billions)
    if named is None:
        missing = "layers" if hidden else "hidden size" if layers else "layers and hidden size"
        raise Unusable(f"{missing} missing, and the sizes of {row['model']!r} are not known")
    named = replace(named, vocab=row.whole("vocab") or named.vocab)
    return replace(named, layers=layers, **_fewer(row, named, layers)) if layers else named


def _fewer(row: Row, named: Transformer, layers: int) -> dict[str, object]:
    """A model cut to fewer layers keeps its share of those with plain MLPs, rounded up, and one with experts."""
    if named.experts is None or layers == named.layers:
        return {}
    plain = math.ceil(named.experts.dense_layers * layers / named.layers)
    return {"experts": replace(named.experts, dense_layers=min(plain, layers - 1))}


def _gpt(row: Row, billions: float) -> Transformer | None:
    """Sizes with that many parameters: a table's if known, or the nearest with layers that fill the stages evenly."""
    given, stages = row.whole("hidden"), row.whole("pp") or 1
    known = gpt_of_size(billions)
    agrees = known and row.whole("heads") in (None, known.heads) and given in (None, known.hidden)
    if known and agrees and known.layers % stages == 0:
        return known
    vocab = _VOCABULARY
    shapes = [
        (abs(math.log((12 * layers * hidden**2 + vocab * hidden) / (billions * 1e9))), hidden, layers)
        for hidden in ([given] if given else range(1024, 25601, 512))
        for layers in range(stages, 129, stages)
        if 80 <= hidden / layers <= 260
    ]
    if not shapes:
        return None
    error, hidden, layers = min(shapes)
    if error > 0.03:
        return None
    heads = row.whole("heads") or _heads(hidden, row.whole("tp") or 1)
    return Transformer(layers=layers, hidden=hidden, heads=heads, vocab=vocab)


def _heads(hidden: int, tensor: int) -> int:
    """Return as many heads on each device, of a multiple of 8 channels, and as near to 128 as that allows."""
    possible = [heads for heads in range(tensor, hidden // 8 + 1, tensor) if hidden % (8 * heads) == 0]
    return min(possible, key=lambda heads: abs(math.log(hidden / heads / 128)), default=hidden // 128)


# --- layout ---------------------------------------------------------------------------------------------------


def _layout(row: Row, model: Transformer) -> Layout:
    tp, pp, cp = (row.whole(column) or 1 for column in ("tp", "pp", "cp"))
    if not (row["tp"] or row["dp"]):
        raise Unusable("the layout (dp, tp, pp) is not recorded")
    dp = row.whole("dp") or _divided(row.whole("ngpu"), tp * pp * cp)
    if not row["pp"]:
        raise Unusable("the pipeline's degree is not recorded")
    devices = row.whole("ngpu")
    if devices and dp and devices != dp * tp * pp * cp:
        raise Unusable("dp, tp, pp and cp do not make the number of devices")
    sequence = row.whole("seq") or model.positions or _sequence(row, model, dp)
    if not dp or not sequence:
        raise Unusable("the number of devices or the sequence length is not recorded")
    microbatch, microbatches = _microbatches(row, dp, pp)
    return Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        vp=row.whole("vp") or _virtual(row, model.layers, pp),
        cp=cp,
        ep=row.whole("ep") or 1,
        zero=_zero(row),
        microbatch=microbatch,
        microbatches=microbatches,
        sequence=sequence,
        recompute=_recompute(row),
        stage_layers=_stage_layers(row, pp, model.layers),
    )


def _sequence(row: Row, model: Transformer, dp: int | None) -> int | None:
    """The power of two that makes the recorded FLOP/s of the recorded time, each layer being computed four times."""
    step_s, tflops, batch, devices = (row.number(column) for column in ("step_s", "tflops_gpu", "gbs", "ngpu"))
    if not (step_s and tflops and batch and devices and dp):
        return None
    tokens = step_s * tflops * 1e12 * devices / (8 * model.parameters)
    return 2 ** round(math.log2(tokens / batch))


def _divided(devices: int | None, by: int) -> int | None:
    return devices // by if devices and devices % by == 0 else None


def _microbatches(row: Row, dp: int, stages: int) -> tuple[int, int]:
    noted = re.search(r"mbc(\d{1,8})(?!\d)", row["note"])
    if noted:
        return row.whole("mbs") or 1, max(1, int(noted[1]))
    batch = row.whole("gbs")
    if not batch:
        raise Unusable("the global batch is not recorded")
    size = max(1, row.whole("mbs") or batch // (dp * _accumulated(row, dp, stages, batch)))
    return size, max(1, round(batch / (dp * size)))


def _accumulated(row: Row, dp: int, stages: int, batch: int) -> int:
    """Microbatches of a step where no size of one is recorded."""
    noted = re.search(r"grad_accum=0*([1-9]\d*)", row["note"])
    if noted:
        return int(noted[1])
    if stages == 1:
        return 1  # only pipelines need more than one, and it is what frameworks do unless told
    return max(1, batch // dp)


def _virtual(row: Row, layers: int, stages: int) -> int:
    """NeMo's recipes and the submissions to MLPerf interleave; where they do not say how often, at most sixfold."""
    if stages == 1 or layers % stages or not re.search(r"nemo pretrain|mlperf", row["framework"].lower()):
        return 1
    return max(virtual for virtual in range(1, 7) if (layers // stages) % virtual == 0)


def _zero(row: Row) -> int:
    word = row["zero"].upper()
    if word in ("FULL_SHARD", "64"):
        return 3
    if word == "SHARD_GRAD_OP":
        return 2
    if word in ("1", "2", "3"):
        return int(word)
    # Megatron-Core's distributed optimizer is on in NeMo's and Megatron-Bridge's recipes and in the MLPerf submissions;
    # of DeepSpeed's stages, the first goes with pipelines.
    divided = r"bridge|nemo|mlperf|0\.14" if word else r"bridge|nemo|mlperf|0\.14|^megatron-deepspeed"
    return 1 if re.search(divided, row["framework"].lower()) else 0


def _recompute(row: Row) -> str:
    word = row["recompute"].lower()
    if "selective" in word:
        return "selective"
    if word in ("full", "true", "yes", "1") or word.startswith("every"):
        return "full"
    if word in ("none", "false", "no", "0", "disabled", "off"):
        return "none"
    if re.search(r"ptd-p|zero-3|v2\.4|oneflow|^megatron-deepspeed", row["framework"].lower()):
        return "full"
    return "none"


def _stage_layers(row: Row, stages: int, layers: int) -> tuple[int, ...]:
    """Layers per stage as noted, without the ends if the note counts the embedding and the logits as layers."""
    noted = re.search(r"layers/stage \[([\d, ]+)\]", row["note"])
    if not noted:
        return ()
    counts = [int(each) for each in noted[1].split(",")]
    if len(counts) != stages:
        raise Unusable("the layers per stage are not of as many stages as pp")
    if sum(counts) not in (layers, layers + 2):
        raise Unusable("the layers per stage are not those of the model, nor with its ends")
    if sum(counts) > layers:
        counts[0] -= 1
        counts[-1] -= 1
    return tuple(counts)


# --- time -----------------------------------------------------------------------------------------------------


def _measured_s(row: Row, model: Transformer, layout: Layout) -> float:
    step_s = row.number("step_s")
    if step_s:
        return step_s
    samples_s, tokens_s, tflops = (row.number(column) for column in ("samples_s", "tok_s_gpu", "tflops_gpu"))
    if tokens_s:
        return layout.batch * layout.sequence / (tokens_s * layout.devices)
    if samples_s:
        return layout.batch / samples_s
    if tflops:
        return _megatron_flops(model, layout) / (tflops * 1e12 * layout.devices)
    raise Unusable("no step time, throughput or FLOP/s is recorded")


def _megatron_flops(model: Transformer, layout: Layout) -> float:
    """Return the FLOPs as Narayanan et al. (2021, equation 3) count them, what is computed again included."""
    tokens, h = layout.batch * layout.sequence, model.hidden
    factor = 96 if layout.recompute == "full" else 72
    attention = 1 + layout.sequence / (6 * h)
    return factor * tokens * model.layers * h * h * (attention + model.vocab / (16 * model.layers * h))
