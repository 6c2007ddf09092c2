"""HTML pages and charts of training, explanation, scores and the demo."""
