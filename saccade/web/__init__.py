"""The web page of `saccade serve` and its API. `page`, `api` and `server` need the web extra."""
