"""Training on episodes: trainers, the driver that runs episodes for a trainer, and training rows of token ids.

Depends on `runs` and the folders below it. No other folder imports it at the top of a module: commands and options
import it when they need it. The libraries of trainers are also imported on first use.
"""
