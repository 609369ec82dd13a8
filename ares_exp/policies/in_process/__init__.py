"""Generation with a model in this process: prompts of token ids, batches of rows, sampling, and the model's thread.

Functions of this package import torch and transformers only when they need them. Policies with token ids import it.
"""
