"""Whether compiled graphs compute what torch computes, and which part of a graph does not."""
