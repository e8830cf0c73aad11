"""Rows of measurements to change a cell of."""

from benchmarks.accuracy_rows import COLUMNS, Row

GPT_ROW = {
    "src": "VIA-Research/vTrain:data/ground_truth_single.csv",
    "framework": "Megatron-DeepSpeed",
    "model": "GPT",
    "hw": "A100",
    "ngpu": "8",
    "gpus_per_node": "8",
    "dp": "2",
    "tp": "2",
    "pp": "2",
    "mbs": "4",
    "gbs": "32",
    "seq": "1024",
    "layers": "24",
    "hidden": "1024",
    "heads": "16",
    "vocab": "50257",
    "recompute": "full",
    "step_s": "0.22",
}
SMALL_ROW = GPT_ROW | {"layers": "2", "hidden": "256", "heads": "4", "seq": "128", "vocab": "1000", "step_s": "0.018"}
"""A row that is planned in a second."""


def row(line: int = 2, **cells: str) -> Row:
    known = {**GPT_ROW, **cells}
    return Row(line=line, cells=tuple((column, known.get(column, "")) for column in COLUMNS))
