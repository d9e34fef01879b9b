"""What drivers share; public, so that nobody else's driver has to copy it."""
