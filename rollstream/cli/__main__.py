"""`python -m rollstream.cli` is `rollstream`: how one command starts another whatever PATH says."""

from rollstream.cli import main

if __name__ == "__main__":
    main()
