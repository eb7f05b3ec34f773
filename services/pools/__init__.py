"""Where the workers of a deployment run: a seam of few verbs, over processes of this machine or over actors of Ray."""
