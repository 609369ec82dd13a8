"""`env=twenty_questions`: a guessing game between the policy and an oracle, without container and code agent."""
