"""Where samples come from, in which order, and how they are dealt to feeders and fetched."""
