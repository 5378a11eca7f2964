"""Tests that need a GPU. Without one they are not collected; tools/gpu_check.sh runs them."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
