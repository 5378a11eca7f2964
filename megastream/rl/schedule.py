"""The learning rate of a step: a function of the step alone, so that a training that resumes continues it."""

from __future__ import annotations

import math

from megastream.rl.train_config import OptimizerSection


def learning_rate(optimizer: OptimizerSection, step: int) -> float:
    """The rate of step `step`, counted from 0: a linear warm-up, then constant, linear or half a cosine."""
    highest, lowest = optimizer.learning_rate, optimizer.min_learning_rate
    if step < optimizer.warmup_steps:
        return highest * (step + 1) / optimizer.warmup_steps
    if optimizer.decay == "constant":
        return highest
    done = min((step - optimizer.warmup_steps) / (optimizer.decay_steps - optimizer.warmup_steps), 1.0)
    left = 1.0 - done if optimizer.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return lowest + (highest - lowest) * left
