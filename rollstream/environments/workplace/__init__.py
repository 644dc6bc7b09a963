"""`workplace`: a small office with mail, calendar and contacts, in which the agent does what it is asked with tools.

`office` is the state and what counts in it, `sample` an office to begin with, `environment` the tools and the score.
"""
