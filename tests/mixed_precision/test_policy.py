"""Checks which policy is chosen for which hardware."""

import keras
import pytest

from tfdml.mixed_precision import recommended_policy
from tfdml.mixed_precision.policy import policy_for_gpus, policy_for_processor


@pytest.mark.parametrize(
    ("capabilities", "policy"),
    [
        ([(8, 0)], "mixed_bfloat16"),
        ([(9, 0), (8, 6)], "mixed_bfloat16"),
        ([(8, 0), (7, 5)], "mixed_float16"),
        ([(7, 0)], "mixed_float16"),
        ([(6, 1), (9, 0)], "float32"),
    ],
)
def test_the_weakest_gpu_decides(capabilities, policy):
    assert policy_for_gpus(capabilities) == policy


def test_cpu_needs_bfloat16_instructions():
    assert policy_for_processor("flags : fpu avx512f avx512_bf16 amx_bf16\n") == "mixed_bfloat16"
    assert policy_for_processor("flags : fpu avx512f avx2\n") == "float32"


def test_this_machine_gets_a_keras_policy():
    assert keras.dtype_policies.get(recommended_policy()).name == recommended_policy()
