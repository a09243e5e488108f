"""The tiny model that engines serve, its fp8 copies, and the truth: Hugging Face's own implementation in fp32."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang_engines import NEW_TOKENS

BLOCK = 128  # of fp8 scales: as wide as the model is by default, whose fp8 copy therefore runs on one TP rank
FP8_MAX = 448.0
# Latent attention, with the rotary embedding that is the only one SGLang has for it on a CPU.
DEEPSEEK: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 64,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 64,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "routed_scaling_factor": 2.5, "initializer_range": 0.15, "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


def make_model(folder: Path, width: int = 128) -> Path:
    """Qwen3-MoE of 2 layers, 8 experts, top-2. Initialised so wide that no two tokens are near in score: fp32 then decides alike everywhere.

    width: of the model and of its experts; a multiple of 128 for each TP rank of its fp8 copy. Where experts have several blocks, neighbours
    differ by 2, so that no scale serves for another.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=width, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=width // 4,
        intermediate_size=width, moe_intermediate_size=width, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
        initializer_range=0.15, max_position_embeddings=256,
    )  # fmt: skip
    network = Qwen3MoeForCausalLM(config)
    if width > BLOCK:
        for name, weight in network.named_parameters():
            if ".experts." in name:  # [8, rows, columns], gate and up together
                block = [torch.arange(size) // BLOCK for size in weight.shape[-2:]]
                weight.data *= 1.0 + (block[0][:, None] + block[1]) % 2
    network.save_pretrained(folder)
    return folder


def make_glm(folder: Path) -> Path:
    """GLM-4.5, small: sigmoid scores, a correction bias that chooses, groups, a routed scaling factor of 2.5, a shared expert, a dense layer first."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=128, moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, n_group=2,
        topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True, initializer_range=0.15,
        max_position_embeddings=256,
    )  # fmt: skip
    network = Glm4MoeForCausalLM(config)
    _draw_correction_biases(network)
    network.save_pretrained(folder)
    return folder


def make_deepseek_v2(folder: Path) -> Path:
    """DeepSeek-V2, small: softmax scores, of which the best groups' count as they are, a factor of 2.5, a shared expert, a dense layer first."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV2Config(
        **DEEPSEEK, q_lora_rank=None, topk_method="group_limited_greedy", scoring_func="softmax", norm_topk_prob=False
    )
    DeepseekV2ForCausalLM(config).save_pretrained(folder)
    return folder


def make_deepseek_v3(folder: Path) -> Path:
    """The same as DeepSeek-V3: sigmoid scores, a correction bias that chooses groups and experts, weights that sum to 1 before the factor."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(**DEEPSEEK, q_lora_rank=64, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True)
    network = DeepseekV3ForCausalLM(config)
    _draw_correction_biases(network)
    network.save_pretrained(folder)
    return folder


def make_afmoe(folder: Path) -> Path:
    """AFMoE, small, without weights: a dense layer, then one of experts."""
    from transformers import AfmoeConfig

    config = AfmoeConfig(
        vocab_size=256, hidden_size=128, num_hidden_layers=2, num_dense_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=128, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, max_position_embeddings=256,
        architectures=["AfmoeForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    return folder


def _draw_correction_biases(network: Any) -> None:
    biases = [tensor for name, tensor in network.state_dict().items() if name.endswith("e_score_correction_bias")]
    assert biases
    for bias in biases:
        bias.copy_(0.1 * torch.randn(bias.shape))


def make_fp8_copy(model: Path, folder: Path, granularity: str) -> tuple[Path, Path]:
    """(the copy whose experts are fp8, the copy that holds the same values unquantised): the second is the first's truth.

    granularity: "block" scales, or one for a "tensor"; gate and up then share theirs, which SGLang would make them do.
    """
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    quantised, plain = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if not re.search(r"mlp\.experts\.\d+\.\w+_proj\.weight$", name):
            continue
        if granularity == "block":
            blocks = weight.unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK)
            scale = blocks.abs().amax((-1, -2)) / FP8_MAX
            spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        else:
            partners = [name] if "down_proj" in name else [re.sub("gate|up", part, name) for part in ("gate", "up")]
            scale = spread = torch.stack([tensors[partner].abs().amax() for partner in partners]).max() / FP8_MAX
        quantised[name] = (weight / spread).to(torch.float8_e4m3fn)
        quantised[f"{name}_scale_inv" if granularity == "block" else f"{name}_scale"] = scale
        plain[name] = quantised[name].float() * spread
    assert len(quantised) > len(tensors)
    config = json.loads((model / "config.json").read_text())
    attention = [
        f"model.layers.{i}.self_attn.{part}_proj" for i in range(config["num_hidden_layers"]) for part in ("q", "k", "v", "qkv", "o")
    ]
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": attention}
    if granularity == "block":
        fp8["weight_block_size"] = [BLOCK, BLOCK]
    for copy, held, changes in (("fp8", quantised, {"quantization_config": fp8}), ("plain", plain, {})):
        (folder / copy).mkdir(parents=True)
        save_file(held, folder / copy / "model.safetensors", metadata={"format": "pt"})
        (folder / copy / "config.json").write_text(json.dumps(config | changes))
    return folder / "fp8", folder / "plain"


def truth(model: Path, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Greedy tokens, and the log-probability of every token but the first: those of the prompt, then the new ones."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(NEW_TOKENS):
                tokens.append(int(network(torch.tensor([tokens])).logits[0, -1].argmax()))
            scores = network(torch.tensor([tokens])).logits[0].log_softmax(-1)
        answers.append(
            {"tokens": tokens[len(prompt) :], "logprobs": [float(scores[at - 1, token]) for at, token in enumerate(tokens) if at]}
        )
    return answers


def answer(result: dict[str, Any]) -> dict[str, Any]:
    """SGLang's result in the form of `truth`."""
    meta = result["meta_info"]
    return {
        "tokens": result["output_ids"],
        "logprobs": [entry[0] for entry in (*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"])],
    }
