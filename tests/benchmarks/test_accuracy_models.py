"""Sizes of models that measurements name."""

import pytest

from benchmarks.accuracy_models import named_transformer


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("GPT-3 175B", 175),
        ("Llama-2-7B", 6.7),
        ("LLAMA2-70B", 69),
        ("Llama3.1-8B-MaxText", 8.0),
        ("LLAMA3.1_405B", 405),
        ("MPT-30b", 30.0),
        ("Mixtral-8x7B-MaxText", 46.7),
        ("DeepSeekV3", 671),
        ("deepseekv2", 236),
        ("Qwen3_30B_a3B", 30.5),
        ("Qwen3_235B_a22B", 235),
        ("GPT OSS 120B", 117),
        ("GPT OSS 20B", 20.9),
        ("GPT3-20B", 20.2),
        ("Nemotron4_15B", 15.6),
        ("Nemotron4_340B", 341),
        ("Kimi_K2", 1030),
        ("gpt-neo-2.7b", 2.65),
    ],
)
def test_named_models_have_the_parameters_of_their_papers(name, billions):
    model = named_transformer(name)
    assert model is not None
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.03)


def test_an_unknown_name_gives_no_model():
    assert named_transformer("a model nobody has written about") is None
