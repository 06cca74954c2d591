"""Where the time of a model's calls goes: clocks, what a call moves and computes, the text, and the trace."""
