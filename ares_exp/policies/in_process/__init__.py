"""Generation with a model in this process: prompts of token ids, sampling, and the thread that runs the model.

Functions of this package import torch and transformers only when they need them. Policies that handle token ids import
this package.
"""
