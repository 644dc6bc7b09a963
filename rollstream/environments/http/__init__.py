"""`http`: an environment that runs on a server of the user's own, in any language. `contract` is what is said on the wire."""
