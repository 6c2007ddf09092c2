"""The web page of `saccade serve`. Only `page`, `api`, `image_input`, `server` and `style` need Gradio."""
