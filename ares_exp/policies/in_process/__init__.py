"""Generation with token ids in this process: prompts, sampling, and the hidden states of a model.

Functions of this package import torch and transformers only when they need them. Policies that handle token ids import
this package.
"""
