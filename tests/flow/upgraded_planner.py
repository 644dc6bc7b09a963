"""`rollstream.store.planner` of a later rollstream, which knows a later version of a terminal record."""

from rollstream.store import planner
from rollstream.store.decoding import READABLE

if __name__ == "__main__":
    READABLE["RolloutScored"] = 2
    planner.main()
