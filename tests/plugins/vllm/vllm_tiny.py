"""Models small enough to serve on two CPU cores, written by hand: Qwen3-MoE with 2 layers, 8 experts, top-2, in float32.

Weights are drawn wide, so that logits differ by far more than rounding and greedy tokens can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

LAYERS, HIDDEN, EXPERTS, TOP_K, INTERMEDIATE, VOCAB = 2, 128, 8, 2, 64, 512
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
DEVIATION = 0.15
FP8 = torch.float8_e4m3fn
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
        return torch.randn(*shape, generator=generator) * DEVIATION

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


def save_to_quantise(folder: Path, seed: int) -> Path:
    """A model in bf16 whose experts lose nothing where vLLM quantises them to fp8 as it loads them: it is its own dequantised copy.

    Every number is one of fp8 times a power of two, drawn for each expert, matrix and row, and every row holds the largest: the scale of
    whatever an expert is cut into is a power of two, another one than its neighbours'.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = weights(seed)
    for name, tensor in tensors.items():
        if ".experts." not in name:
            continue
        small = (tensor * 512).clamp(-448, 448).to(FP8).float()
        small[small.abs() < 2.0**-3] = 0  # an eighth of what is left is no subnormal number
        small[:, 0] = 448
        powers = torch.randint(0, 3, (len(tensor), 1), generator=generator) + torch.randint(0, 2, (), generator=generator)
        powers += int(name.split(".experts.")[1].split(".")[0]) % 3
        tensors[name] = small / 512 * 2.0**-powers
    return save(folder, {name: tensor.bfloat16() for name, tensor in tensors.items()})


def save_fp8(folder: Path, forms: Sequence[str], seed: int = 0) -> dict[str, Path]:
    """Models whose experts are fp8 by "block", "tensor" or "channel", all else in float32; and "copy", what the numbers of each of them mean.

    They mean the same numbers. A scale is `scale` times a power of two that is drawn for each block, channel or matrix, by which the fp8
    numbers are divided: they stay exact, gate and up of one expert can share the larger of their scales, as vLLM makes them do, and a scale
    that is used for its neighbour is off by 2 to 8.
    """
    generator = torch.Generator().manual_seed(seed)
    scale = 5 * DEVIATION / torch.finfo(FP8).max  # no weight is drawn further out
    stored: dict[str, dict[str, torch.Tensor]] = {form: {} for form in (*forms, "copy")}
    for name, tensor in weights(seed).items():
        if ".experts." not in name:
            for model in stored.values():
                model[name] = tensor
            continue
        small = (tensor / scale).to(FP8).float()
        small[small.abs() < 2.0**-3] = 0  # an eighth of what is left is no subnormal number
        stored["copy"][name] = small * scale
        rows, columns = tensor.shape
        for form in forms:
            shape = {"block": (rows // BLOCK[0], columns // BLOCK[1]), "channel": (rows, 1), "tensor": (1, 1)}[form]
            times = 2.0 ** torch.randint(0, 4, shape, generator=generator)
            spread = times.repeat_interleave(rows // shape[0], 0).repeat_interleave(columns // shape[1], 1)
            stored[form][name] = (small / spread).to(FP8)
            assert torch.equal(stored[form][name].float() * spread, small)
            scales = name.replace("weight", "weight_scale_inv" if form == "block" else "weight_scale")
            stored[form][scales] = (scale * times).view(()) if form == "tensor" else scale * times
    dense = [f"model.layers.{layer}.{part}" for layer in range(LAYERS) for part in
             ("mlp.gate", *(f"self_attn.{name}_proj" for name in "qkvo"))] + ["lm_head"]  # fmt: skip
    by_fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": dense}
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**fp8, "strategy": "channel", "dynamic": False},
        "input_activations": {**fp8, "strategy": "token", "dynamic": True},
    }
    configs: dict[str, dict[str, Any]] = {
        "block": {**by_fp8, "weight_block_size": list(BLOCK)},
        "tensor": by_fp8,
        "channel": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "ignore": dense,
            "config_groups": {"group_0": group},
        },
    }
    return {
        form: save(folder / form, tensors, **({"quantization_config": configs[form]} if form in configs else {}))
        for form, tensors in stored.items()
    }
