"""The HTTP service that runs rollouts for trainers."""
