# SPDX-License-Identifier: Apache-2.0
"""What flows between the parts. Axis letters stand in `nemo_rl_core.data.axes`."""
