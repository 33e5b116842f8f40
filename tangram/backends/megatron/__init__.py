"""The backend on megatron-core."""

import warnings

# megatron-core tells at every import which optional packages it does without, between a user and the one line of an error.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
