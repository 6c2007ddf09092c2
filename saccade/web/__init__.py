"""The page: `saccade serve`. Everything here but `page` and `api` works without Gradio, and is tested without it."""
