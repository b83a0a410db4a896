# SPDX-License-Identifier: Apache-2.0
"""FP8 helpers of the train side: scale names, calibration and casts."""
