"""`conversation`: the agent talks with a simulated user who wants something and does not say so at once.

`dialogue` is what was said and what it means, `judging` the optional rubric, `environment` the environment.
"""
