"""Hugging Face checkpoints to and from our pytree.

families.py     each family's names, layouts and options
layouts.py      how stored tensors and our leaves correspond
files.py        config.json and safetensors
pretrained.py   load and save
"""

from .pretrained import load_gpt2, load_pretrained, pretrained_config, save_gpt2, save_pretrained

__all__ = ["load_gpt2", "load_pretrained", "pretrained_config", "save_gpt2", "save_pretrained"]
