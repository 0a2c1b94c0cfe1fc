"""``config.json`` of model families in the form in which their makers published them, sizes small.

The values are those of the published files (written for transformers 4: ``rope_theta`` beside
``rope_scaling``, ``torch_dtype``, activations and layer kinds under their old names), so a reader
that is not the config class itself gets them wrong. Widths, depths and vocabulary are small.

    for name in FAMILIES:
        directory = published_model(tmp_path / name, name)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 264
"""Rows of every embedding: the byte tokenizer's 256 tokens, its special tokens, some to spare."""

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
_ATTENTION = {"attention_bias": False, "attention_dropout": 0.0}
_V4 = {"torch_dtype": "bfloat16", "use_cache": True, "initializer_range": 0.02}
_LLAMA: dict[str, Any] = {
    **_SIZES, **_V4, **_ATTENTION,
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "rms_norm_eps": 1e-05, "pretraining_tp": 1, "tie_word_embeddings": False,
    "max_position_embeddings": 2048, "rope_scaling": None, "transformers_version": "4.33.1",
}  # fmt: skip
_LLAMA3_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip
_QWEN: dict[str, Any] = {
    **_SIZES, **_V4,
    "attention_dropout": 0.0, "hidden_act": "silu", "rms_norm_eps": 1e-06,
    "max_position_embeddings": 4096, "max_window_layers": 2, "sliding_window": 4096,
    "use_sliding_window": False, "tie_word_embeddings": False, "rope_theta": 1000000.0,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
_DEEPSEEK: dict[str, Any] = {
    **_SIZES, **_V4, **_ATTENTION, **_EXPERTS,
    "hidden_act": "silu", "rms_norm_eps": 1e-06, "num_key_value_heads": 4,
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "routed_scaling_factor": 1.0, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "max_position_embeddings": 16384,
    "rope_theta": 10000, "tie_word_embeddings": False, "pretraining_tp": 1, "ep_size": 1,
    "scoring_func": "softmax", "seq_aux": True, "aux_loss_alpha": 0.001,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
_GEMMA: dict[str, Any] = {
    **_SIZES, **_V4, **_ATTENTION,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "head_dim": 8,
    "rms_norm_eps": 1e-06, "max_position_embeddings": 8192, "rope_theta": 10000.0,
}  # fmt: skip
_GEMMA3_TEXT: dict[str, Any] = {
    **_GEMMA,
    "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "num_hidden_layers": 6, "query_pre_attn_scalar": 8, "sliding_window": 16,
    "sliding_window_pattern": 6, "rope_local_base_freq": 10000, "rope_theta": 1000000,
    "rope_scaling": None, "max_position_embeddings": 4096,
}  # fmt: skip
_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
_OLMO: dict[str, Any] = {
    **_SIZES, **_V4, **_ATTENTION,
    "hidden_act": "silu", "num_key_value_heads": 4, "pad_token_id": 1,
    "max_position_embeddings": 4096, "rope_theta": 500000, "rope_scaling": None,
    "tie_word_embeddings": False,
}  # fmt: skip
_COHERE: dict[str, Any] = {
    **_SIZES, **_V4, **_ATTENTION,
    "hidden_act": "silu", "layer_norm_eps": 1e-05, "logit_scale": 0.0625, "use_qk_norm": False,
    "max_position_embeddings": 8192, "rope_theta": 10000.0, "pad_token_id": 0,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {**_LLAMA, "rms_norm_eps": 1e-05, "max_position_embeddings": 4096},
    "llama3.1": {
        **_LLAMA, "max_position_embeddings": 131072, "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3_ROPE, "mlp_bias": False,
    },
    "llama3.2": {
        **_LLAMA, "max_position_embeddings": 131072, "rope_theta": 500000.0, "head_dim": 8,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0}, "tie_word_embeddings": True,
    },
    "codellama": {**_LLAMA, "rope_theta": 1000000, "max_position_embeddings": 16384},
    "mistral": {
        **_SIZES, **_V4, "architectures": ["MistralForCausalLM"], "model_type": "mistral",
        "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "sliding_window": 16, "tie_word_embeddings": False,
    },
    "mixtral": {
        **_SIZES, **_V4, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
        "hidden_act": "silu", "max_position_embeddings": 32768, "num_experts_per_tok": 2,
        "num_local_experts": 4, "output_router_logits": False, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    },
    "qwen2.5": {**_QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen2.5-yarn": {
        **_QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
        "rope_scaling": {
            "factor": 4.0, "original_max_position_embeddings": 4096, "type": "yarn",
        },
    },
    "qwen2-moe": {
        **_QWEN, **_EXPERTS, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
        "decoder_sparse_step": 1, "num_experts": 4, "shared_expert_intermediate_size": 16,
        "norm_topk_prob": False, "sliding_window": 0, "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    },
    "qwen3": {
        **_QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16,
        "attention_bias": False, "rope_scaling": None, "sliding_window": None,
        "tie_word_embeddings": True,
    },
    "qwen3-moe": {
        **_QWEN, **_EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 16, "mlp_only_layers": [],
        "num_experts": 4, "output_router_logits": False, "rope_scaling": None,
        "router_aux_loss_coef": 0.001, "sliding_window": None,
    },
    "qwen3-next": {
        **_QWEN, **_EXPERTS, "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next", "decoder_sparse_step": 1, "full_attention_interval": 2,
        "head_dim": 16, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 8,
        "mlp_only_layers": [], "num_experts": 4, "partial_rotary_factor": 0.25,
        "rope_scaling": None, "shared_expert_intermediate_size": 16, "rope_theta": 10000000,
    },
    "gemma": {
        **_GEMMA, "architectures": ["GemmaForCausalLM"], "model_type": "gemma",
        "hidden_act": "gelu", "hidden_activation": None, "rope_scaling": None,
    },
    "gemma2": {
        **_GEMMA, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2",
        "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 8, "sliding_window": 16,
    },
    "gemma3-1b": {**_GEMMA3_TEXT, "architectures": ["Gemma3ForCausalLM"]},
    "gemma3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "boi_token_index": 258, "eoi_token_index": 259, "eos_token_id": [1, 106],
        "image_token_index": 260, "initializer_range": 0.02, "mm_tokens_per_image": 4,
        "text_config": {
            key: _GEMMA3_TEXT[key] for key in (
                "model_type", "hidden_size", "intermediate_size", "num_hidden_layers",
                "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window",
                "vocab_size", "query_pre_attn_scalar",
            )
        } | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "vision_config": {
            **_VISION, "model_type": "siglip_vision_model", "vision_use_head": False,
        },
    },
    "phi2": {
        **_SIZES, **_V4, "architectures": ["PhiForCausalLM"], "model_type": "phi",
        "attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.1, "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "num_key_value_heads": 4,
        "partial_rotary_factor": 0.4, "qk_layernorm": False, "rope_scaling": None,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_size": 80,
    },
    "phi3-128k": {
        **_SIZES, **_V4, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3",
        "attention_bias": False, "attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
        "hidden_act": "silu", "max_position_embeddings": 131072, "num_key_value_heads": 4,
        "original_max_position_embeddings": 4096, "pad_token_id": 0, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "long_factor": [1.0, 1.5, 2.0, 3.0], "short_factor": [1.0, 1.0, 1.1, 1.2],
            "type": "longrope",
        },
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": False,
    },
    "phi4-mini": {
        **_SIZES, **_V4, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3",
        "attention_bias": False, "attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
        "full_attn_mod": 1, "hidden_act": "silu", "interpolate_factor": 1, "lm_head_bias": False,
        "max_position_embeddings": 131072, "mlp_bias": False, "hidden_size": 64,
        "original_max_position_embeddings": 4096, "pad_token_id": 0, "partial_rotary_factor": 0.75,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "long_factor": [1.0, 1.118, 1.13, 1.17, 1.2, 1.3],
            "short_factor": [1.0, 1.0, 1.0, 1.0, 1.0, 1.0], "type": "longrope",
        },
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True,
    },
    "deepseek-v2": {
        **_DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "n_group": 1, "topk_group": 1, "q_lora_rank": None, "topk_method": "greedy",
        "norm_topk_prob": False,
    },
    "deepseek-v3": {
        **_DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "num_nextn_predict_layers": 1,
    },
    "glm4-moe": {
        **_SIZES, **_V4, **_EXPERTS, "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe", "attention_bias": True, "attention_dropout": 0.0,
        "pad_token_id": 258, "head_dim": 16, "eos_token_id": [257, 259, 260], "n_group": 1,
        "topk_group": 1, "n_routed_experts": 4,
        "n_shared_experts": 1, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1,
        "hidden_act": "silu", "max_position_embeddings": 131072, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 1000000, "tie_word_embeddings": False, "use_qk_norm": False,
    },
    "gpt-oss": {
        **_SIZES, **_V4, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss",
        "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 257, "head_dim": 16,
        "experts_per_token": 2, "num_experts_per_tok": 2, "num_local_experts": 4,
        "hidden_act": "silu", "initial_context_length": 4096, "intermediate_size": 32,
        "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 131072,
        "output_router_logits": False, "pad_token_id": 258, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 16,
        "swiglu_limit": 7.0, "tie_word_embeddings": False,
    },
    "olmo": {
        **_OLMO, "architectures": ["OlmoForCausalLM"], "model_type": "olmo", "clip_qkv": None,
        "rope_theta": 10000.0,
    },
    "olmo2": {
        **_OLMO, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2",
        "rms_norm_eps": 1e-06,
    },
    "olmo3": {
        **_OLMO, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3",
        "rms_norm_eps": 1e-06, "sliding_window": 16, "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "max_position_embeddings": 65536,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1,
            "factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
    },
    "granite3": {
        **_SIZES, **_V4, "architectures": ["GraniteForCausalLM"], "model_type": "granite",
        "attention_bias": False, "attention_dropout": 0.1, "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0, "hidden_act": "silu", "logits_scaling": 8.0,
        "max_position_embeddings": 131072, "mlp_bias": False, "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
    },
    "granite4": {
        **_SIZES, **_V4, "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid", "attention_bias": False, "attention_dropout": 0.0,
        "attention_multiplier": 0.015625, "embedding_multiplier": 12, "hidden_act": "silu",
        "layer_types": ["mamba", "attention"], "logits_scaling": 8, "mamba_chunk_size": 256,
        "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_state": 16,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 4, "mamba_proj_bias": False,
        "max_position_embeddings": 131072, "normalization_function": "rmsnorm",
        "num_experts_per_tok": 0, "num_local_experts": 0, "output_router_logits": False,
        "position_embedding_type": "nope", "residual_multiplier": 0.246, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000, "router_aux_loss_coef": 0.01,
        "shared_intermediate_size": 48, "tie_word_embeddings": True, "init_method": "mup",
    },
    "smollm3": {
        **_SIZES, **_V4, **_ATTENTION, "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3", "hidden_act": "silu", "layer_types": ["full_attention"] * 4,
        "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4,
        "pad_token_id": 258, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 5000000.0, "sliding_window": None, "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "command-r": {
        **_COHERE, "architectures": ["CohereForCausalLM"], "model_type": "cohere",
        "model_max_length": 131072, "pretraining_tp": 1, "rope_theta": 8000000.0,
    },
    "command-r7b": {
        **_COHERE, "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "head_dim": 8,
        "cache_implementation": "hybrid", "_sliding_window_pattern": 4, "layer_switch": 4,
        "num_hidden_layers": 4, "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj", "rope_theta": 50000, "rope_scaling": None,
        "rotary_pct": 1.0, "sliding_window": 16, "sliding_window_pattern": 4,
        "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
        "use_parallel_embedding": True,
    },
    "exaone4": {
        **_SIZES, **_V4, "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4",
        "attention_dropout": 0.0, "head_dim": 8, "hidden_act": "silu",
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "num_hidden_layers": 4,
        "max_position_embeddings": 131072, "pad_token_id": 0, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "rope_theta": 1000000, "sliding_window": 16, "sliding_window_pattern": "LLLG",
        "tie_word_embeddings": False,
    },
    "nemotron": {
        **_SIZES, **_V4, "architectures": ["NemotronForCausalLM"], "model_type": "nemotron",
        "attention_bias": False, "attention_dropout": 0.0, "head_dim": 8, "hidden_act": "relu2",
        "hidden_dropout": 0.0, "max_position_embeddings": 4096, "mlp_bias": False,
        "norm_eps": 1e-05, "partial_rotary_factor": 0.5, "rope_scaling": None,
        "rope_theta": 10000, "rope_percent": 0.5, "tie_word_embeddings": False,
    },
    "ernie4.5": {
        **_SIZES, **_V4, "architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5",
        "head_dim": 8, "hidden_act": "silu", "max_position_embeddings": 131072, "pad_token_id": 0,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "rope_scaling": None,
        "tie_word_embeddings": True, "use_bias": False,
    },
    "hunyuan-dense": {
        **_SIZES, **_V4, "architectures": ["HunYuanDenseV1ForCausalLM"],
        "model_type": "hunyuan_v1_dense", "attention_bias": False, "attention_dropout": 0.1,
        "attention_head_dim": 8, "eod_token_id": 258, "head_dim": 8, "hidden_act": "silu",
        "max_position_embeddings": 32768, "mlp_bias": False, "norm_type": "rms",
        "pad_token_id": 0, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "type": "dynamic",
        },
        "rope_theta": 10000.0, "tie_word_embeddings": True, "use_cla": False,
        "use_qk_norm": True, "cla_share_factor": 2,
    },
    "gpt2": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1, "bos_token_id": 256, "embd_pdrop": 0.1, "eos_token_id": 256,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
        "n_ctx": 1024, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 1024,
        "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": VOCABULARY,
    },
    "opt-350m": {
        "_name_or_path": "opt-350m", "_remove_final_layer_norm": False, "activation_dropout": 0.0,
        "activation_function": "relu", "architectures": ["OPTForCausalLM"],
        "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": False,
        "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 48, "hidden_size": 32, "init_std": 0.02,
        "layerdrop": 0.0, "max_position_embeddings": 2048, "model_type": "opt",
        "num_attention_heads": 4, "num_hidden_layers": 2, "pad_token_id": 1, "prefix": "</s>",
        "torch_dtype": "float16", "use_cache": True, "vocab_size": VOCABULARY,
        "word_embed_proj_dim": 16,
    },
    "pythia": {
        "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0,
        "hidden_act": "gelu", "hidden_size": 32, "initializer_range": 0.02,
        "intermediate_size": 48, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
        "model_type": "gpt_neox", "num_attention_heads": 4, "num_hidden_layers": 2,
        "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
        "torch_dtype": "float16", "use_cache": True, "use_parallel_residual": True,
        "vocab_size": VOCABULARY,
    },
    "falcon": {
        "alibi": False, "apply_residual_connection_post_layernorm": False,
        "architectures": ["FalconForCausalLM"], "attention_dropout": 0.0, "bias": False,
        "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0, "hidden_size": 32,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "falcon",
        "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 4,
        "num_hidden_layers": 2, "parallel_attn": True, "torch_dtype": "bfloat16",
        "use_cache": True, "vocab_size": VOCABULARY,
    },
    "bloom": {
        "apply_residual_connection_post_layernorm": False, "architectures": ["BloomForCausalLM"],
        "attention_dropout": 0.0, "attention_softmax_in_fp32": True, "bias_dropout_fusion": True,
        "bos_token_id": 1, "eos_token_id": 2, "hidden_dropout": 0.0, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True, "model_type": "bloom",
        "n_embed": 32, "n_inner": None, "n_layer": 2, "num_attention_heads": 4, "offset_alibi": 100,
        "pad_token_id": 3, "pretraining_tp": 1, "seq_length": 2048, "slow_but_exact": False,
        "unk_token_id": 0, "use_cache": True, "vocab_size": VOCABULARY,
    },
    "stablelm2": {
        **_SIZES, **_V4, "architectures": ["StableLmForCausalLM"], "model_type": "stablelm",
        "attention_dropout": 0.0, "hidden_act": "silu", "hidden_dropout": 0.0,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 4096, "num_key_value_heads": 4,
        "partial_rotary_factor": 0.25, "qk_layernorm": False, "rope_scaling": None,
        "rope_theta": 10000, "tie_word_embeddings": False, "use_parallel_residual": False,
        "use_qkv_bias": True, "hidden_size": 64,
    },
    "starcoder2": {
        **_SIZES, **_V4, "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2",
        "activation_function": "gelu", "attention_dropout": 0.1, "attention_softmax_in_fp32": True,
        "embedding_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-05,
        "max_position_embeddings": 16384, "mlp_type": "default", "norm_epsilon": 1e-05,
        "norm_type": "layer_norm", "residual_dropout": 0.1, "rope_theta": 999999.4420358813,
        "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "sliding_window": 16,
        "use_bias": True,
    },
    "llama4": {
        "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
        "boi_token_index": 258, "eoi_token_index": 259, "image_token_index": 260,
        "text_config": {
            **_SIZES, "model_type": "llama4_text", "attention_bias": False,
            "attention_chunk_size": 8192, "attention_dropout": 0.0, "attn_scale": 0.1,
            "attn_temperature_tuning": True,
            "eos_token_id": [257, 258], "floor_scale": 8192, "for_llm_compressor": False,
            "head_dim": 8, "hidden_act": "silu", "interleave_moe_layer_step": 1,
            "intermediate_size_mlp": 48, "initializer_range": 0.02,
            "max_position_embeddings": 10485760, "no_rope_layers": [], "num_experts_per_tok": 1,
            "num_local_experts": 4, "output_router_logits": False, "pad_token_id": 259,
            "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "router_aux_loss_coef": 0.001,
            "router_jitter_noise": 0.0, "use_cache": True, "use_qk_norm": True,
            "num_hidden_layers": 4,
            "rope_scaling": {**_LLAMA3_ROPE, "factor": 16.0, "high_freq_factor": 1.0},
            "torch_dtype": "bfloat16",
        },
        "torch_dtype": "bfloat16", "tie_word_embeddings": False,
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "num_channels": 3,
            "model_type": "llama4_vision_model", "projector_input_dim": 16,
            "projector_output_dim": 16, "vision_output_dim": 16, "pixel_shuffle_ratio": 0.5,
            "rope_theta": 10000, "hidden_act": "gelu", "norm_eps": 1e-05,
            "vision_feature_layer": -1, "vision_feature_select_strategy": "default",
        },
    },
    "qwen2.5-vl": {
        **_QWEN, "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl", "vision_start_token_id": 258, "vision_end_token_id": 259,
        "vision_token_id": 260, "image_token_id": 261, "video_token_id": 262,
        "sliding_window": 32768, "tie_word_embeddings": True,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "vision_config": {
            "depth": 1, "hidden_act": "silu", "hidden_size": 16, "intermediate_size": 16,
            "num_heads": 2, "in_chans": 3, "out_hidden_size": 32, "patch_size": 4,
            "spatial_merge_size": 2, "spatial_patch_size": 4, "window_size": 16,
            "fullatt_block_indexes": [0], "tokens_per_second": 2, "temporal_patch_size": 2,
        },
    },
    "qwen3.5": {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "image_token_id": 258, "video_token_id": 259, "vision_start_token_id": 260,
        "vision_end_token_id": 261, "tie_word_embeddings": True,
        "text_config": {
            **_SIZES, "model_type": "qwen3_5_text", "attention_bias": False,
            "tie_word_embeddings": True,
            "attention_dropout": 0.0, "dtype": "bfloat16", "full_attention_interval": 2,
            "head_dim": 16, "hidden_act": "silu", "initializer_range": 0.02,
            "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
            "linear_value_head_dim": 8, "max_position_embeddings": 262144,
            "mtp_num_hidden_layers": 1, "rms_norm_eps": 1e-06, "use_cache": True,
            "rope_parameters": {
                "mrope_interleaved": True, "mrope_section": [1, 1, 0],
                "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default",
            },
        },
        "vision_config": {
            "model_type": "qwen3_5", "deepstack_visual_indexes": [], "depth": 1, "hidden_size": 16,
            "intermediate_size": 16, "num_heads": 2, "in_channels": 3, "out_hidden_size": 32,
            "num_position_embeddings": 16, "patch_size": 4, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "hidden_act": "gelu_pytorch_tanh",
        },
    },
}  # fmt: skip
"""Name -> the published values."""


TYPED: dict[str, dict[str, Any]] = {
    "llama2": {"rope_theta": 500000.0},
    "llama3.1": {"rms_norm_eps": 0.01},
    "llama3.2": {"rope_theta": 100.0},
    "codellama": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_experts_per_tok": 1},
    "qwen2.5": {"rope_theta": 100.0},
    "qwen2.5-yarn": {"rope_scaling": {"factor": 2.0}},
    "qwen2-moe": {"num_experts_per_tok": 1},
    "qwen3": {"rms_norm_eps": 0.01},
    "qwen3-moe": {"norm_topk_prob": False},
    "qwen3-next": {"partial_rotary_factor": 0.5},
    "gemma": {"hidden_act": "relu"},
    "gemma2": {"sliding_window": 8},
    "gemma3-1b": {"rope_theta": 100.0},
    "gemma3-4b": {"sliding_window": 8},
    "phi2": {"partial_rotary_factor": 0.5},
    "phi3-128k": {"rms_norm_eps": 0.01},
    "phi4-mini": {"rope_theta": 100.0},
    "deepseek-v2": {"routed_scaling_factor": 2.0},
    "deepseek-v3": {"num_experts_per_tok": 1},
    "glm4-moe": {"partial_rotary_factor": 0.25},
    "gpt-oss": {"sliding_window": 8},
    "olmo": {"clip_qkv": 0.01},
    "olmo2": {"rope_theta": 100.0},
    "olmo3": {"sliding_window": 8},
    "granite3": {"logits_scaling": 4.0},
    "granite4": {"residual_multiplier": 0.5},
    "smollm3": {"rope_theta": 100.0},
    "command-r": {"logit_scale": 0.5},
    "command-r7b": {"sliding_window": 8},
    "exaone4": {"sliding_window": 8},
    "nemotron": {"partial_rotary_factor": 0.25},
    "ernie4.5": {"rope_theta": 100.0},
    "hunyuan-dense": {"rope_scaling": {"alpha": 10.0}},
    "gpt2": {"activation_function": "relu"},
    "opt-350m": {"activation_function": "gelu"},
    "pythia": {"use_parallel_residual": False},
    "falcon": {"layer_norm_epsilon": 0.01},
    "bloom": {"layer_norm_epsilon": 0.01},
    "stablelm2": {"partial_rotary_factor": 0.5},
    "starcoder2": {"norm_epsilon": 0.01},
    "llama4": {"use_qk_norm": False},
    "qwen2.5-vl": {"rope_theta": 100.0},
    "qwen3.5": {"rms_norm_eps": 0.01},
}
"""Name -> a key that a user types beside it, with a value that changes the loss."""


def with_typed(name: str) -> dict[str, Any]:
    """The published values with the typed one, as somebody who edits the file by hand has them."""
    values: dict[str, Any] = json.loads(json.dumps(FAMILIES[name]))
    part = values.get("text_config", values)
    for key, value in TYPED[name].items():
        part[key] = {**(part.get(key) or {}), **value} if isinstance(value, dict) else value
    return values


def published_model(directory: Path, name: str) -> Path:
    """A directory as it is published: weights by ``save_pretrained`` in the layout of the Hub, a
    byte tokenizer, and the family's own ``config.json``. Returns it."""
    import torch
    import transformers

    from tests.small_tokenizers import byte_tokenizer

    directory.mkdir(parents=True)
    file = directory / "config.json"
    file.write_text(json.dumps(FAMILIES[name]), encoding="utf-8")
    config = transformers.AutoConfig.from_pretrained(directory)
    torch.manual_seed(5)
    model = getattr(transformers, FAMILIES[name]["architectures"][0])._from_config(
        config, dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    file.write_text(json.dumps(FAMILIES[name]), encoding="utf-8")
    byte_tokenizer(begin="<s>", end="</s>").save_pretrained(directory)
    return directory
