"""What layers of experts need when they run: which tokens an expert gets, and its activation."""
