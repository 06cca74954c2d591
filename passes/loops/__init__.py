"""What lowerings build loops with: vectors, tiles, epilogues, shares of rows, threads of a GPU."""
