"""What a processor can do, and what that costs."""
