"""Converts models to and from transformers (docs/huggingface.md).

names.py has the table of names that a model's module needs. families.py has the families that we
convert.
"""

from shardwright.huggingface.names import Layers, Names, as_transformers_reads, check_fixed
from shardwright.huggingface.tensors import Tensors
