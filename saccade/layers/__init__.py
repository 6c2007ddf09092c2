"""Plain bricks, at home in any network: they know nothing of tokens or families."""
