"""One file a contender; each defines `CONTENDER`."""
