"""Listen to a model, turn what it reports into maps, pictures and scores."""
