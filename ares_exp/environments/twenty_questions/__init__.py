"""`env=twenty_questions`, a guessing game between the policy and an oracle, without a container or code agent."""
