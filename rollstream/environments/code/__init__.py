"""Code repair: patches to a repository, graded by its tests. Pure parts; nothing here runs a command."""
