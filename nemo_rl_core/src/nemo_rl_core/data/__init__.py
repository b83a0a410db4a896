# SPDX-License-Identifier: Apache-2.0
"""What flows between the parts.

Axis letters, used in names (``logprobs_BS``) and docstrings of the whole project:

=====  =====================================================================
B      sequences of a batch (prompt with one completion each)
S      tokens of a sequence, right-padded: prompt, completion, padding
G      completions per prompt (group size)
T      tokens of a flat list of positions
L      layers
V      vocabulary
=====  =====================================================================

A training batch is a ``BatchedDataDict`` with these keys:

=============================  ======  =========================================================================
``input_ids``                  [B, S]  int64, prompt then completion then padding
``input_lengths``              [B]     int64, prompt plus completion
``token_mask``                 [B, S]  float32, 1 on the sampled tokens
``sample_mask``                [B]     float32, 0 for a sample that must not count
``generation_logprobs``        [B, S]  float32, of token s given those before it, 0 where ``token_mask`` is 0
``prev_logprobs``              [B, S]  float32, the same under the policy before the update
``reference_policy_logprobs``  [B, S]  float32, the same under the reference policy (only with a KL penalty)
``advantages``                 [B]     float32
=============================  ======  =========================================================================

Column 0 of a logprob tensor is 0: the first token has nothing before it.
"""
