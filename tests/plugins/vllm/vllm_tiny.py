"""Models small enough to serve on two CPU cores, written by hand: Qwen3-MoE with 2 layers, 8 experts, top-2, in float32.

Weights are drawn wide (deviation 0.15), so that logits differ by far more than rounding and greedy tokens can be compared.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

LAYERS, HIDDEN, EXPERTS, TOP_K, INTERMEDIATE, VOCAB = 2, 128, 8, 2, 64, 512
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
BLOCK = (64, 64)  # both sizes are multiples, for one TP rank
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "float32",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "moe_intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    out = {
        "model.embed_tokens.weight": draw(VOCAB, HIDDEN),
        "lm_head.weight": draw(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        out[f"{at}.input_layernorm.weight"] = torch.ones(HIDDEN)
        out[f"{at}.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
        out[f"{at}.self_attn.q_proj.weight"] = draw(HEADS * HEAD_DIM, HIDDEN)
        out[f"{at}.self_attn.k_proj.weight"] = draw(KV_HEADS * HEAD_DIM, HIDDEN)
        out[f"{at}.self_attn.v_proj.weight"] = draw(KV_HEADS * HEAD_DIM, HIDDEN)
        out[f"{at}.self_attn.o_proj.weight"] = draw(HIDDEN, HEADS * HEAD_DIM)
        out[f"{at}.self_attn.q_norm.weight"] = torch.ones(HEAD_DIM)
        out[f"{at}.self_attn.k_norm.weight"] = torch.ones(HEAD_DIM)
        out[f"{at}.mlp.gate.weight"] = draw(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name, shape in (
                ("gate_proj", (INTERMEDIATE, HIDDEN)),
                ("up_proj", (INTERMEDIATE, HIDDEN)),
                ("down_proj", (HIDDEN, INTERMEDIATE)),
            ):
                out[f"{at}.mlp.experts.{expert}.{name}.weight"] = draw(*shape)
    return out


def save(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    from safetensors.torch import save_file  # comes with vLLM, and only there is this called

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    words = {f"t{token}": token for token in range(VOCAB)}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "post_processor": None, "decoder": None,
        "pre_tokenizer": {"type": "Whitespace"}, "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}))
    return folder


def save_plain(folder: Path, seed: int = 0) -> Path:
    return save(folder, weights(seed))


def save_block_fp8(quantised: Path, dequantised: Path, seed: int = 0) -> tuple[Path, Path]:
    """The experts in fp8 with one fp32 scale a block, all else in float32; and the model that those numbers mean."""
    stored, meant = {}, {}
    for name, tensor in weights(seed).items():
        if ".experts." not in name:
            stored[name] = meant[name] = tensor
            continue
        rows, columns = tensor.shape[0] // BLOCK[0], tensor.shape[1] // BLOCK[1]
        blocks = tensor.view(rows, BLOCK[0], columns, BLOCK[1])
        scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        small = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        stored[name] = small.view(tensor.shape)
        stored[name.replace("weight", "weight_scale_inv")] = scale
        meant[name] = (small.float() * scale[:, None, :, None]).view(tensor.shape)
    dense = [f"model.layers.{layer}.{part}" for layer in range(LAYERS) for part in
             ("mlp.gate", *(f"self_attn.{name}_proj" for name in "qkvo"))]  # fmt: skip
    quantization = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK), "modules_to_not_convert": [*dense, "lm_head"],
    }  # fmt: skip
    save(quantised, stored, quantization_config=quantization)
    return quantised, save(dequantised, meant)
