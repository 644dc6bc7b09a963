"""`gymnasium`: any world of the Gymnasium library that is acted on with discrete actions or text, by its id.

`wording` turns spaces into words and back, `simulations` keeps worlds running, `environment` is the environment.
"""
