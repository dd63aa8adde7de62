"""vLLM's own online fp8 of some weights: ``… weights.safetensors out.safetensors``, with the Python that has vLLM.

Imports nothing of this project. For each weight ``N`` it writes ``<method>/N`` and its scales. Of what vLLM computes
with a GPU's kernel alone (a tensor's static scale) it takes the formula that vLLM has for platforms without one.
"""

import os
import sys

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def main(source: str, target: str) -> None:
    from safetensors.torch import load_file, save_file
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    with set_current_vllm_config(VllmConfig()):
        by_tensor = QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR)
    made = {}
    for name, weight in load_file(source).items():
        scale = fp8._fp8_channel_scale(fp8.weight_amax(weight, dim=-1, keepdim=True))
        made[f"fp8/{name}"], made[f"fp8/{name}_scale"] = fp8._fp8_quant_per_channel(weight, scale), scale
        scale = fp8._fp8_scale(fp8.weight_amax(weight).reshape(1))
        made[f"fp8-tensor/{name}"], made[f"fp8-tensor/{name}_scale"] = by_tensor.forward_native(weight, scale)[0], scale
        quantized, scale = per_block_cast_to_fp8(weight, block_size=[128, 128], use_ue8m0=False)
        made[f"fp8-block/{name}"], made[f"fp8-block/{name}_scale_inv"] = quantized, scale
    save_file(made, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
