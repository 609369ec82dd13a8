"""`ares-exp compare RUN_A RUN_B …`: do these runs differ, or was it chance?"""
