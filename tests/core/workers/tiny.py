# SPDX-License-Identifier: Apache-2.0
"""A model that is small enough to be exact about."""

CHARACTERS = "0123456789?abcdefgh"
VOCAB = len(CHARACTERS) + 3
MODEL = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
}
