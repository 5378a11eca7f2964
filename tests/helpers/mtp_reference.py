"""The loss of a layer of multi-token prediction, by two models of `transformers`, which has no such layer itself.

DeepSeek-V3's report, section 2.2: the embedding of the next token and the state of this one, each with a norm of its
own, are projected together, pass one more decoder layer, a last norm and the model's own head.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, linear, pad, rms_norm

from megastream.trainer.config import TrainerConfig
from megastream.trainer.model import TokenBatch


def mtp_loss(config: TrainerConfig, folder: Path, batches: Sequence[TokenBatch]) -> float:
    """Mean over the microbatches' means, each over the tokens whose next one counts; fp32. Writes below `folder`."""
    weights = load_file(folder / "model.safetensors")
    prefix = f"model.layers.{config.layers}."
    main, last = _load(folder), _load(_alone(folder, weights, prefix))

    def norm(value: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(value, (config.hidden,), weights[f"{prefix}{name}.weight"], config.norm_eps)

    losses = []
    for batch in batches:
        assert batch.mask is not None
        tokens, labels = batch.tokens[:, :-1], batch.tokens[:, 1:]
        with torch.no_grad():
            states = main.model(tokens).last_hidden_state
            after = main.model.embed_tokens(pad(tokens[:, 1:], (0, 1)))
            both = torch.cat([norm(after, "enorm"), norm(states, "hnorm")], dim=-1)
            logits = last(inputs_embeds=linear(both, weights[f"{prefix}eh_proj.weight"])).logits
        # Behind the last position there is no second token.
        each = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
        counted = batch.mask[:, 1:].flatten()
        losses.append(float((each * counted).sum() / counted.sum()))
    return sum(losses) / len(losses)


def _alone(folder: Path, weights: dict[str, torch.Tensor], prefix: str) -> Path:
    """A model of that one decoder layer, with the last norm and the head."""
    own = {name.replace(prefix, "model.layers.0."): t for name, t in weights.items() if name.startswith(prefix)}
    own["model.norm.weight"] = own["model.layers.0.shared_head.norm.weight"]
    own |= {name: weights[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    alone = folder / "alone"
    alone.mkdir(exist_ok=True)
    save_file({name: t.contiguous().clone() for name, t in own.items()}, alone / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (alone / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 1, "first_k_dense_replace": 0}))
    return alone


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
