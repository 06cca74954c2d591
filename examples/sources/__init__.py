"""Where the examples get their texts, graphs and models. Nothing here is an example itself."""
