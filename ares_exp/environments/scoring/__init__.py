"""Scorers: functions and judges that add rewards to the verifier's rewards of finished episodes."""
