"""One module per figure: the papers' own, and those every family shares."""
